"""ExFlow with several experts per token: what is minimised is what context-coherent execution sends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.network import off_diagonal
from engine.placement.affinity.bounds import within_limit
from engine.placement.affinity.kernel import AffinityInstance, affinity
from engine.placement.transitions import executed_hops
from engine.plan import Placement
from engine.problem import Problem
from engine.simulate.work import work_of
from engine.systems import SYSTEMS, run
from engine.systems.exflow import crossing_bytes, executed_instance
from engine.workload import RoutingTrace
from tests.cases.examples import examples
from tests.strategies import cluster_of, make_gpu
from tests.systems.samples import EIGHT, every_placement, problem_of, sample, sample_model

pytestmark = pytest.mark.slow


def routed(seed: int, tokens: int, layers: int, experts: int, k: int, skew: float = 0.4) -> RoutingTrace:
    """Tokens with k different experts per layer, of which a few groups are popular together."""
    rng = np.random.default_rng(seed)
    popular = rng.dirichlet(np.full(experts, skew), size=(layers, 3))
    topic = rng.integers(3, size=tokens)
    chosen = np.empty((tokens, layers, k), dtype=np.int16)
    for token, layer in np.ndindex(tokens, layers):
        weight = popular[layer, topic[token]] + 1e-9
        chosen[token, layer] = rng.choice(experts, size=k, replace=False, p=weight / weight.sum())
    return RoutingTrace("routed", chosen, experts)


def equal_gpus(count: int):
    return cluster_of(*[make_gpu(send=1e9)] * count)


def executed_bytes(place: np.ndarray, problem: Problem) -> tuple[float, float]:
    """Bytes that change GPU in a simulated context-coherent pass: (between and within layers, all else). All else: the first
    dispatch and the all-gathers."""
    placement = Placement.from_gpu_of_expert(place, len(problem.cluster.gpus), problem.model.moe_layers)
    work = work_of(placement, problem, "context-coherent")
    rest = sum(off_diagonal(traffic).sum() for traffic in (work.dispatch[0], work.gather, work.prompt_gather))
    return crossing_bytes(work) - rest, rest


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 999), st.sampled_from([(4, 2), (6, 3), (8, 2)]), st.integers(1, 3), st.integers(1, 4))
def test_the_objective_is_the_bytes_that_the_simulated_pass_moves_between_gpus(seed, sizes, k, layers):
    experts, gpus = sizes
    problem = problem_of(routed(seed, 60, layers, experts, k), equal_gpus(gpus))
    place = np.argsort(np.random.default_rng(seed).random((layers, experts)), axis=1) % gpus
    cost = executed_instance(problem).cost(place)
    assert cost * problem.model.bytes_per_token == pytest.approx(executed_bytes(place, problem)[0])


@pytest.mark.parametrize("seed", range(3))
def test_the_plan_sends_as_little_as_any_placement(seed):
    """Every placement of 4 experts on 2 GPUs in three layers, top-2, simulated."""
    problem = problem_of(routed(seed, 200, 3, 4, 2), equal_gpus(2))
    least = min(executed_bytes(place, problem)[0] for place in every_placement(3, 4, 2))
    plan = run(SYSTEMS["exflow"], problem, {"time_limit": 1.0}).result.solution
    assert plan.execution == "context-coherent"
    assert executed_bytes(plan.placement.gpu_of_expert, problem)[0] == pytest.approx(least)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("layers", "gpus"), [(1, 3), (2, 3), (3, 2)])
def test_no_placement_gets_below_the_bound_and_the_search_reaches_the_optimum(seed, layers, gpus):
    between, within = executed_hops(routed(seed, 150, layers, 6, 3).experts, 6)
    instance = AffinityInstance(between, gpus, within=within)
    result = affinity(instance, time_limit=1.0)
    costs = [instance.cost(place) for place in every_placement(layers, 6, gpus)]
    assert result.bound <= min(costs) * (1 + 1e-9) and result.objective == pytest.approx(min(costs))


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 999), st.sampled_from([(4, 2), (6, 2), (6, 3), (4, 4)]))
def test_no_division_of_a_layer_keeps_more_than_its_limit(seed, sizes):
    experts, gpus = sizes
    count = np.random.default_rng(seed).integers(0, 9, size=(experts, experts)) * ~np.eye(experts, dtype=bool)
    count = (count + count.T).astype(float)
    limit = within_limit(count, gpus)
    for (row,) in every_placement(1, experts, gpus):
        assert (count * (row[:, None] == row)).sum() / 2 <= limit * (1 + 1e-9) + 1e-9


def test_the_default_sends_less_than_the_other_counts_of_hops_on_a_recording_with_two_experts_a_token():
    trace = sample("beta-code", 2000)
    problem = problem_of(trace, EIGHT)
    moved = {
        hops: executed_bytes(
            run(SYSTEMS["exflow"], problem, {"hops": hops, "time_limit": 4.0}).result.solution.placement.gpu_of_expert,
            problem,
        )[0]
        for hops in ("executed", "all", "first")
    }
    assert moved["executed"] < min(moved["all"], moved["first"])


def test_with_one_expert_a_token_the_copies_are_the_hops():
    experts = sample("alpha-code", 500).experts
    between, within = executed_hops(experts, 16)
    assert not (within * ~np.eye(16, dtype=bool)).any() and sample_model().experts_per_token == 1
    chained = [
        np.bincount(experts[:, layer, 0].astype(int) * 16 + experts[:, layer + 1, 0], minlength=256).reshape(16, 16)
        for layer in range(len(between))
    ]
    np.testing.assert_array_equal(between, chained)
