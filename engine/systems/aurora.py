"""Aurora (Li et al., 2024): four scenarios, chosen by what is open.

One model (exclusive) or two (colocating), on equal GPUs (homogeneous) or mixed ones (heterogeneous). Equal GPUs are the
special case of mixed ones in which the paper's own, simpler rules hold; the kernels are the same.
"""

from engine.problem import Problem
from engine.result import Stop
from engine.systems.aurora_colocated import colocating
from engine.systems.aurora_exclusive import ORDER, SLOTS, TIME_LIMIT, exclusive, exclusive_printed
from engine.systems.base import SEED, Draft, Option, Report, System, Value
from engine.systems.colocated_baselines import random_colocation, same_model_packing

GPUS = Option(
    "gpus",
    "in order",
    "the first model's experts in contiguous blocks (REC), or at random as well (RGA + REC)",
    choices=("in order", "random"),
)


def aurora(problem: Problem, settings: dict[str, Value], stop: Stop, report: Report) -> Draft:
    """Exclusive (§4 homogeneous, §5 heterogeneous) or colocating (§6 homogeneous, §7 heterogeneous)."""
    scenario = exclusive if problem.second is None else colocating
    return scenario(problem, settings, stop, report)


SYSTEMS = (
    System(
        "aurora",
        "Aurora",
        "puts experts on the GPUs that suit them, beside the right expert of a second model where there is one, and orders "
        "every all-to-all so that no receiver is contended",
        "Aurora §4 to §7",
        aurora,
        (SLOTS, ORDER, TIME_LIMIT, SEED),
        models=(1, 2),
    ),
    System(
        "aurora-printed",
        "Aurora as printed",
        "the paper's own rules, for comparison: experts sorted by tokens, Algorithm 1's greedy order",
        "Aurora Algorithm 1, Theorem 5.1",
        exclusive_printed,
    ),
    System(
        "rec",
        "Random colocation (REC)",
        "experts of the second model beside random ones of the first",
        "Aurora §8.1",
        random_colocation,
        (GPUS, SEED),
        baseline=True,
        models=(2,),
    ),
    System(
        "packing",
        "Same-model packing (Lina)",
        "each model on every second GPU, its most popular experts beside its least popular",
        "Aurora §8.1, Lina §4.2",
        same_model_packing,
        baseline=True,
        models=(2,),
    ),
)
