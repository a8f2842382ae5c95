"""Attention runs where tokens are: the GPU that carries most of them decides, and every GPU keeps all contexts."""

from dataclasses import replace

import numpy as np
import pytest

from engine.compare.figures import metrics
from engine.compare.what_if import least
from engine.costs import Datasheet
from engine.errors import InputError
from engine.plan import Placement
from engine.problem import MEMORY_SHARE, Problem
from engine.simulate import bound_of_plan, simulate
from engine.workload import RoutingTrace
from tests.oracles.plans import check_plan
from tests.simulate.test_work import coherent, top_one
from tests.strategies import cluster_of, make_gpu, make_model

COST = Datasheet()


def crowded(**sizes) -> tuple[Problem, Placement]:
    """Four tokens, two on each GPU, all of which go on from GPU 1."""
    trace = top_one([[1, 1, 0]] * 4, 2, [0, 0, 1, 1])
    problem = Problem(trace, cluster_of(*[make_gpu()] * 2), make_model(3, 2, **sizes), COST)
    return problem, Placement.from_gpu_of_expert(np.tile(np.arange(2), (3, 1)), 2, (1, 2, 3))


def test_the_busiest_gpu_s_attention_counts_beyond_that_of_tokens_at_home():
    problem, placement = crowded(sequence_length=7)
    plan = coherent(placement)
    gpu, model = problem.cluster.gpus[0], problem.model
    seconds = [float(COST.attention(gpu, np.array(tokens), 4, model)) for tokens in (2.0, 4.0)]
    timeline = simulate(plan, problem)
    events = timeline.events[timeline.events["kind"] == "attention"]
    assert events["layer"].tolist() == [1, 2] and (events["resource"] == 1).all()
    assert (events["end"] - events["start"]).tolist() == pytest.approx([seconds[1] - seconds[0]] * 2)
    begins = timeline.events[timeline.events["kind"] == "gate"].groupby("layer")["start"].min()
    assert events.set_index("layer")["end"].to_dict() == pytest.approx(begins.loc[1:].to_dict())
    assert timeline.total == pytest.approx(check_plan(plan, problem), rel=1e-9)
    assert metrics(plan, problem, timeline).seconds["attention"] == pytest.approx(2 * (seconds[1] - seconds[0]))
    assert least(plan, problem).parts["attention"] == pytest.approx(2 * (seconds[1] - seconds[0]))
    bare = replace(problem, runs_attention=False)
    added = bound_of_plan(plan, problem, 1, 1) - bound_of_plan(plan, bare, 1, 1)
    assert added == pytest.approx(seconds[1] - seconds[0])


def test_other_plans_and_launches_run_no_attention_and_even_carriers_cost_nothing_more():
    problem, placement = crowded()
    plan = coherent(placement)
    vanilla = simulate(plan.model_copy(update={"execution": "vanilla"}), problem)
    launched = simulate(plan, replace(problem, runs_attention=False))
    even = top_one([[0, 0, 1], [1, 1, 0]] * 2, 2, [0, 0, 1, 1])
    for timeline in (vanilla, launched, simulate(plan, replace(problem, workload=even))):
        assert "attention" not in set(timeline.events["kind"])
    assert launched.total == pytest.approx(check_plan(plan, replace(problem, runs_attention=False)), rel=1e-9)


def test_longer_sequences_and_dense_layers_in_between_make_the_busiest_gpu_s_attention_longer():
    problem, placement = crowded()
    short = RoutingTrace(
        "short", problem.workload.experts, 2, np.arange(4, dtype=np.int32), problem.workload.source_rank
    )
    seconds = simulate(coherent(placement), problem).seconds_of_kind()["attention"]
    assert simulate(coherent(placement), replace(problem, workload=short)).seconds_of_kind()["attention"] < seconds
    deeper = problem.model.model_copy(update={"layers": 6, "dense_layers": (0, 2, 4)})
    assert simulate(coherent(placement), replace(problem, model=deeper)).seconds_of_kind()[
        "attention"
    ] == pytest.approx(2 * seconds)


def test_contexts_of_all_tokens_have_to_fit_beside_the_experts():
    problem, placement = crowded()
    model = problem.model
    assert problem.context_bytes == 4 * 2 * model.d_model * 2 * model.layers
    latent = model.model_copy(update={"kv_numbers": 16, "dtype": "fp8"})
    assert replace(problem, model=latent).context_bytes == 4 * 16 * 2 * model.layers
    wanted = problem.held_bytes(placement).max() + problem.context_bytes
    plan = coherent(placement)

    def with_memory(size: float) -> Problem:
        return replace(problem, cluster=cluster_of(*[make_gpu(memory=size / MEMORY_SHARE)] * 2))

    with_memory(wanted * 1.001).check_plan(plan)
    with_memory(wanted * 0.999).check_plan(plan.model_copy(update={"execution": "vanilla"}))
    with pytest.raises(
        InputError, match=r"^GPU 0 · type-0 would hold .* GB of keys and values of all 4 tokens"
    ) as refused:
        simulate(plan, with_memory(wanted * 0.999))
    assert "\n" not in str(refused.value)
