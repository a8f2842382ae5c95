"""The search under the time of a layer: against seconds counted port by port, every placement of few experts, and itself."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster import Cluster, Node
from engine.costs import Datasheet
from engine.placement.best import Task, _kernel, least_seconds, prices_of
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.problem import Problem, make_problem
from engine.result import Provenance
from engine.simulate import simulate
from engine.systems.aurora_exclusive import fixed_compute
from engine.systems.best import LayersOf, bound_of
from engine.systems.pieces import linear_placement
from engine.workload import RoutingTrace
from tests.cases.examples import examples
from tests.oracles.plans import seconds_by_ports
from tests.strategies import make_gpu, make_model, problems, seeds

GO_ON = np.zeros(1, dtype=bool)
COPIES, GPU, NODE = (Travel(unit=unit) for unit in ("copies", "gpu", "node"))
FEWEST = [Travel(unit=unit, replicas="fewest") for unit in ("gpu", "node")]


def plan_of(held: list, problem: Problem) -> Plan:
    """held: [layer][gpu], the experts there"""
    experts = problem.workload.num_experts
    placement = Placement(experts=experts, experts_of_gpu=held, model_layers=problem.model.moe_layers)
    order, origin = SendOrder(mode="concurrent"), Provenance(optimiser="test")
    return Plan(name="test", placement=placement, send_order=order, travel=problem.travel, provenance=origin)


def held_at_random(problem: Problem, spare: int, seed: int) -> list:
    """One layer with so many further copies, none twice on a GPU."""
    rng, experts, gpus = np.random.default_rng(seed), problem.workload.num_experts, len(problem.cluster.gpus)
    held = np.zeros((gpus, experts), dtype=bool)
    held[rng.integers(0, gpus, experts), np.arange(experts)] = True
    free = np.argwhere(~held)
    held[tuple(free[rng.permutation(len(free))[:spare]].T)] = True
    return [np.flatnonzero(row).tolist() for row in held]


def layer_of(problem: Problem, held: list, spare: int) -> tuple[LayersOf, Task]:
    """The first layer of a problem with any number of slots on a GPU, from a placement."""
    experts, gpus = problem.workload.num_experts, len(problem.cluster.gpus)
    layers = LayersOf(problem, problem.network, np.full(gpus, experts), experts + spare)
    return layers, layers.task(0, plan_of([held], problem).placement)


def with_free_ffns(problem: Problem) -> Problem:
    """The same with FFNs that take no time, so that it does not matter which of equally good copies serves."""
    nodes = [
        node.model_copy(
            update={"gpus": tuple(gpu.model_copy(update={"flops_fp16": 1e40, "memory_bandwidth": 1e40}) for gpu in node.gpus)}
        )
        for node in problem.cluster.nodes
    ]
    return replace(problem, cluster=problem.cluster.model_copy(update={"nodes": nodes}), cost=Datasheet(launch=0.0))


ONE_LAYER = problems(layers=(1, 1), travelling=True, contended=False)


@settings(max_examples=examples(150, 30), deadline=None)
@given(ONE_LAYER, st.sampled_from((COPIES, GPU, NODE, FEWEST[0])), st.integers(0, 4), seeds)
def test_seconds_are_those_of_the_busiest_ports_and_ffns(problem, travel, spare, seed):
    problem = replace(problem, travel=travel)
    if travel in FEWEST and spare:
        problem = with_free_ffns(problem)
    held = held_at_random(problem, spare, seed)
    _, task = layer_of(problem, held, spare)
    assert task.held == held
    (wanted,) = seconds_by_ports(plan_of([held], problem), problem)
    assert task.seconds(task.layer) == pytest.approx(wanted, rel=1e-9, abs=1e-30)
    fixed = sum(float(step.max()) for step in fixed_compute(problem).values())
    together = problem.cost.together(np.ones(len(problem.cluster.gpus)))
    total = simulate(plan_of([held], problem), problem).total
    if np.all(together == 1):
        assert total >= (fixed + wanted) * (1 - 1e-9)


@pytest.mark.parametrize("travel", [COPIES, GPU, *FEWEST], ids=str)
def test_on_equal_ports_a_simulation_takes_just_as_long(travel):
    """All but few times: where a busy port waits for sends that others slow down it takes a little longer."""
    off = []
    for seed in range(12):
        problem = drawn(seed, travel, kinds=1, gpus=6, experts=12, tokens=300)
        held = held_at_random(problem, 0, seed)
        _, task = layer_of(problem, held, 0)
        fixed = sum(float(step.max()) for step in fixed_compute(problem).values())
        off.append(simulate(plan_of([held], problem), problem).total / (fixed + task.seconds(task.layer)) - 1)
    assert sorted(np.abs(off))[-2] < 1e-12 and -1e-12 < min(off) <= max(off) < 0.06


@settings(max_examples=examples(80, 15), deadline=None)
@given(ONE_LAYER, st.sampled_from((COPIES, GPU, NODE, *FEWEST)), st.integers(0, 4), seeds, st.data())
def test_what_moves_change_is_what_is_counted_afresh(problem, travel, spare, seed, data):
    problem = replace(problem, travel=travel)
    held = held_at_random(problem, spare, seed)
    layers, task = layer_of(problem, held, spare)
    most = max(map(len, held))
    layers.room[:] = data.draw(st.integers(most, most + 1))
    kernel, known = _kernel(task.layer), task.layer
    best, begun = (task.expert.copy(), task.place.copy()), task.seconds(known)
    state, more = kernel.begin(*known, *best)
    heat = begun * data.draw(st.sampled_from((1e-3, 1.0)))
    lowest, _ = kernel.anneal(*known, state, more, best, begun, (heat, heat, 300), seed % 1000, GO_ON)
    again, more_again = kernel.begin(*known, state.expert, state.place)
    for now, afresh in [
        (state, again),
        *(zip(more, more_again, strict=True) if isinstance(more[0], tuple) else [(more, more_again)]),
    ]:
        for name in now._fields:
            if name not in ("held", "slot"):
                scale = 1 + np.abs(getattr(afresh, name)).max(initial=0.0)
                if name == "rows":  # the last one is of rows that stay
                    now, afresh = (each._replace(rows=each.rows[:-1]) for each in (now, afresh))
                np.testing.assert_allclose(
                    getattr(now, name), getattr(afresh, name), rtol=1e-9, atol=1e-9 * scale, err_msg=name
                )
    assert kernel.seconds_of(*known, *best) == pytest.approx(lowest, rel=1e-9) and lowest <= begun
    for expert, place in (best, (state.expert, state.place)):
        used = expert >= 0
        pairs = set(zip(expert[used].tolist(), place[used].tolist(), strict=True))
        assert len(pairs) == used.sum() and set(expert[used]) == set(range(problem.workload.num_experts))
        assert np.all(np.bincount(place[used], minlength=len(layers.room)) <= layers.room)
        assert (place[~used] == -1).all()


def drawn(
    seed: int, travel: Travel, kinds: int = 3, gpus: int = 3, experts: int = 4, tokens: int = 30, links: bool = False
) -> Problem:
    """Skewed top-2 routing of one layer on GPUs of several rates."""
    rng = np.random.default_rng(seed)
    cards = [make_gpu(kind, send=(1e6, 8e5, 5e5)[kind], flops=(4e9, 1e9, 2e9)[kind]) for kind in rng.integers(0, kinds, gpus)]
    sizes = (2, gpus - 2) if links else (gpus,)
    parts = np.split(np.arange(gpus), np.cumsum(sizes)[:-1])
    nodes = tuple(
        Node(name=f"node-{at}", gpus=tuple(cards[gpu] for gpu in part), link_bandwidth=3e6 if links else None)
        for at, part in enumerate(parts)
    )
    keys = rng.gumbel(size=(tokens, 1, experts)) + np.log(rng.dirichlet(np.full(experts, 1.0)) + 1e-9)
    chosen = np.argsort(-keys, axis=2)[:, :, :2].astype(np.int16)
    trace = RoutingTrace("drawn", chosen, experts, source_rank=rng.integers(0, gpus, tokens).astype(np.int32))
    return make_problem(trace, Cluster(name="drawn", nodes=nodes), make_model(1, experts, 2), Datasheet(), travel=travel)


def every_held(experts: int, room: np.ndarray, slots: int) -> Iterator[list]:
    """All placements of one layer with so many copies at most."""
    gpus = range(len(room))
    homes = [subset for size in gpus for subset in itertools.combinations(gpus, size + 1) if size <= slots - experts]
    for row in itertools.product(homes, repeat=experts):
        held = [[expert for expert in range(experts) if gpu in row[expert]] for gpu in gpus]
        if sum(map(len, row)) <= slots and all(len(here) <= most for here, most in zip(held, room, strict=True)):
            yield held


@pytest.mark.parametrize(
    ("travel", "spare", "room", "links"),
    [
        (COPIES, 0, 2, False),
        (COPIES, 0, 4, True),
        (COPIES, 2, 3, False),
        (GPU, 0, 2, False),
        (GPU, 0, 4, True),
        (GPU, 2, 3, False),
        (NODE, 0, 2, True),
        (NODE, 0, 4, True),
        (NODE, 1, 2, True),
        (FEWEST[0], 2, 3, False),
        (FEWEST[1], 2, 3, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(2, 12))])
def test_few_experts_are_placed_as_well_as_by_trying_all(travel, spare, room, links, seed):
    problem = drawn(seed, travel, links=links)
    if travel in FEWEST:
        problem = with_free_ffns(problem)
    experts, room = 4, np.full(3, room)
    layers = LayersOf(problem, problem.network, room, experts + spare)
    least = min(seconds_by_ports(plan_of([held], problem), problem)[0] for held in every_held(experts, room, experts + spare))
    found = []
    for again in range(6):
        task = layers.task(0, linear_placement(problem))
        task.search(6000, again, GO_ON)
        found += seconds_by_ports(plan_of([task.held], problem), problem)
    tolerance = 0.02 if travel == FEWEST[1] else 1e-9  # nodes: which GPU spreads depends on the copies that serve
    assert least * (1 - 1e-9) <= min(found) <= least * (1 + tolerance)
    bound = bound_of(problem, room, experts + spare, lambda: False)
    assert (bound is None) == (spare > 0 and travel != COPIES)
    if bound is not None:
        fixed = sum(float(step.max()) for step in fixed_compute(problem).values())
        assert 0.3 * (least + fixed) < bound <= (least + fixed) * (1 + 1e-9)
        known, load = layers.layer(0), layers.ffn(problem.demand[0].sum(axis=0)).T
        odd = replace(prices_of(known, load), slot=np.full(3, 1e-3))  # any prices prove a bound
        assert spare or least_seconds(known, load, odd, True) <= least * (1 + 1e-9)


def test_hidden_tokens_never_get_slower_and_end_a_search_that_fits_the_others_alone():
    """Tokens at random: little that is learnt from some of them helps the others."""
    ended = 0
    for seed in range(4):
        problem = drawn(seed, GPU, kinds=1, gpus=8, experts=32, tokens=400)
        chosen = np.random.default_rng(seed).integers(0, 32, (400, 1, 2)).astype(np.int16)
        problem = replace(problem, workload=replace(problem.workload, experts=chosen))
        tasks = []
        for hide in (False, True):
            layers = LayersOf(problem, problem.network, np.full(8, 4), 32, hide)
            tasks.append(layers.task(0, linear_placement(problem)))
        whole, part = tasks
        before = part.seconds(part.hidden)
        for task in tasks:
            task.search(160_000, seed, GO_ON)
        assert part.seconds(part.hidden) <= before
        assert whole.seconds(whole.layer) < part.seconds(whole.layer)
        ended += part.moves < whole.moves
    assert ended
