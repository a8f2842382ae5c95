"""One layer's time while experts move: as computed from all pairs of GPUs, never under its instance, fast on 1024 GPUs."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster import Cluster, Node
from engine.compare.synthetic import Recipe, synthetic
from engine.costs import Datasheet
from engine.problem import Problem
from engine.simulate.work import Load, compute_seconds
from engine.systems.aurora_exclusive import LayerSeconds, assign_layers, fixed_compute, instance_of_layer
from engine.systems.pieces import slots_of_gpu, to_placement
from tests.cases.examples import examples
from tests.strategies import make_gpu, make_model, problems, seeds


def by_pairs(problem: Problem, layer: int, gpu_of_expert: np.ndarray) -> float:
    """Seconds of a layer from the bytes between all pairs of GPUs."""
    network, gpus = problem.network, len(problem.cluster.gpus)
    size, tokens = problem.demand[layer] * problem.model.bytes_per_token, problem.demand[layer].sum(axis=0)
    traffic, ffn = np.zeros((gpus, gpus)), np.zeros(gpus)
    for expert, gpu in enumerate(gpu_of_expert):
        traffic[:, gpu] += size[:, expert]
        ffn[gpu] += problem.cost.expert_ffn(problem.cluster.gpus[gpu], tokens[expert], problem.model)
    np.fill_diagonal(traffic, 0.0)
    steps = []
    for sends in (traffic, traffic.T):
        fabric, links = np.where(network.linked, 0.0, sends), np.where(network.linked, sends, 0.0)
        busiest = [fabric.sum(axis=1) / network.send, fabric.sum(axis=0) / network.receive]
        for axis in (0, 1):
            busiest.append(np.divide(links.sum(axis=axis), network.link, out=np.zeros(gpus), where=network.link > 0))
        steps.append(np.max(busiest))
    return float(problem.cost.together(ffn).max() + sum(steps))


@settings(max_examples=examples(80), deadline=None)
@given(problems(layers=(1, 2)), seeds, st.integers(0, 12))
def test_experts_that_move_one_by_one_take_what_all_pairs_take(problem, seed, moves):
    rng, gpus = np.random.default_rng(seed), len(problem.cluster.gpus)
    experts, layer = problem.workload.num_experts, problem.workload.layers - 1
    place, seconds = rng.integers(0, gpus, experts), LayerSeconds(problem, layer)
    for _ in range(moves):
        assert seconds(place) == pytest.approx(by_pairs(problem, layer, place), rel=1e-9, abs=1e-15)
        place = place.copy()
        place[rng.integers(experts, size=rng.integers(1, 3))] = rng.integers(gpus)
    assert seconds.afresh(place) == pytest.approx(by_pairs(problem, layer, place), rel=1e-9, abs=1e-15)


@settings(max_examples=examples(80), deadline=None)
@given(problems(layers=(1, 1)), seeds, st.integers(0, 2))
def test_no_placement_within_the_slots_is_under_its_instance(problem, seed, spare):
    rng, gpus, experts = np.random.default_rng(seed), len(problem.cluster.gpus), problem.workload.num_experts
    slots = np.full(gpus, -(-experts // gpus) + spare)
    place = rng.permutation(np.repeat(np.arange(gpus), slots))[:experts]
    instance = instance_of_layer(problem, 0, slots)
    if np.array_equal(problem.cost.together(np.ones(gpus)), np.ones(gpus)):
        assert instance.cost(place) <= by_pairs(problem, 0, place) * (1 + 1e-9)


@settings(max_examples=examples(40, 4), deadline=None)
@given(problems())
def test_gate_and_aggregation_are_those_of_a_pass(problem):
    home = np.zeros((problem.workload.layers, problem.workload.num_experts), dtype=np.int64)
    held = problem.tokens_of_rank
    wanted = compute_seconds(Load(problem, to_placement(home, problem)), held, held)
    for kind, seconds in fixed_compute(problem).items():
        np.testing.assert_allclose(seconds, wanted[kind])


@pytest.mark.parametrize(
    ("link", "kinds"),
    [(450e9, 4), *(pytest.param(*each, marks=pytest.mark.everything) for each in ((None, 1), (None, 4), (450e9, 1)))],
)
@pytest.mark.clock
def test_two_layers_on_1024_gpus(link, kinds):
    gpus = [make_gpu(kind, 50e9 / (1 + kind), 50e9 / (1 + kind), 1e15) for kind in range(kinds)]
    gpus = [gpu.model_copy(update={"memory": 1e12}) for gpu in gpus]
    nodes = [Node(name=f"node-{at}", gpus=(gpus[at % kinds],) * 8, link_bandwidth=link) for at in range(128)]
    model = make_model(2, 256, 8)
    trace = synthetic(model, Recipe(4096, 0.5, 0.0))
    problem = Problem(trace, Cluster(name="large", nodes=tuple(nodes)), model, Datasheet())
    problem.demand  # noqa: B018 - counted before the clock starts
    start = time.perf_counter()
    rows, bound, _, cancelled = assign_layers(problem, "even", 2.0, 0, lambda: False, lambda *_: None)
    assert time.perf_counter() - start < 10
    assert not cancelled
    slots = slots_of_gpu(problem, "even")
    assert all((np.bincount(row, minlength=1024) <= slots).all() for row in rows)
    fixed = sum(seconds.max(axis=1).sum() for seconds in fixed_compute(problem).values())
    objective = sum(by_pairs(problem, layer, row) for layer, row in enumerate(rows))
    assert bound <= (fixed + objective) * (1 + 1e-9)
    assert objective <= 1.1 * (bound - fixed)
