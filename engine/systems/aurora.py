"""Aurora (Li et al., 2024): four scenarios, told by the open models and cluster.

One model (exclusive) or two (colocating), on equal GPUs (homogeneous) or mixed ones (heterogeneous). Equal GPUs are the
special case of mixed ones in which the paper's own, simpler rules hold; the kernels are the same.
"""

from functools import partial

from engine.goal import Goal
from engine.problem import Problem
from engine.result import Stop
from engine.systems.aurora_colocated import DecoupledOptions, PrintedOptions, colocating, decoupled_matching, sorted_pairs
from engine.systems.aurora_exclusive import AuroraOptions, exclusive, exclusive_printed
from engine.systems.base import Draft, Report, System
from engine.systems.baselines import PackingOptions, RandomColocationOptions, random_colocation, same_model_packing


def aurora(problem: Problem, options: AuroraOptions, stop: Stop, report: Report) -> Draft:
    """Exclusive (§4 homogeneous, §5 heterogeneous) or colocating (§6 homogeneous, §7 heterogeneous)."""
    scenario = exclusive if problem.goal is Goal.INFERENCE else colocating
    return scenario(problem, options, stop, report)


_two = partial(System, goals=(Goal.TWO_MODELS,))
_of_two = partial(_two, baseline=True, preselected=True, shown_beside=True)

SYSTEMS = (
    System(
        name="aurora",
        title="Aurora",
        summary="puts experts on the GPUs that suit them, beside the right expert of a second model where there is one, and "
        "orders every all-to-all so that no receiver is contended",
        paper="Aurora §4 to §7",
        recipe=aurora,
        options=AuroraOptions,
        goals=(Goal.INFERENCE, Goal.TWO_MODELS),
        preselected=True,
    ),
    System(
        name="aurora-printed",
        title="Aurora as printed",
        summary="the paper's own rules, for comparison: experts sorted by tokens, Algorithm 1's greedy order",
        paper="Aurora Algorithm 1, Theorem 5.1",
        recipe=exclusive_printed,
    ),
    _two(
        name="aurora-sorted",
        title="Sorted colocation",
        summary="the paper's rule for equal GPUs: the most popular experts of one model beside the least popular of the other",
        paper="Aurora Theorem 6.2",
        recipe=sorted_pairs,
        options=PrintedOptions,
    ),
    _two(
        name="aurora-decoupled",
        title="Decoupled colocation",
        summary="the paper's method for mixed GPUs: experts are paired without a look at the GPUs, then each pair gets a GPU",
        paper="Aurora §6.2 (Case II), §7.2",
        recipe=decoupled_matching,
        options=DecoupledOptions,
    ),
    _of_two(
        name="rec",
        title="Random colocation (REC)",
        summary="experts of the second model beside random ones of the first",
        paper="Aurora §8.1",
        recipe=random_colocation,
        options=RandomColocationOptions,
    ),
    _of_two(
        name="packing",
        title="Same-model packing (Lina)",
        summary="each model alone on every second GPU, tokens included, its most popular experts beside its least popular",
        paper="Aurora §8.1, Lina §4.2",
        recipe=same_model_packing,
        options=PackingOptions,
    ),
)
