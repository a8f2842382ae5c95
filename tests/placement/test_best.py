"""The search under the time of a layer: against seconds counted port by port, every placement of few experts, and itself."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs import Datasheet
from engine.placement.best import AT_LEAST, _kernel, anneal
from engine.problem import Problem
from engine.simulate import simulate
from engine.systems.aurora_exclusive import fixed_compute
from engine.systems.best_layers import LayersOf, bound_of
from engine.systems.pieces import linear_placement
from tests.cases.best_layers import (
    COPIES,
    FEWEST,
    GO_ON,
    GPU,
    NODE,
    ONE_LAYER,
    drawn,
    every_held,
    held_at_random,
    layer_of,
    plan_of,
)
from tests.cases.examples import examples
from tests.oracles.plans import seconds_by_ports
from tests.strategies import seeds


def with_free_ffns(problem: Problem) -> Problem:
    """The same with FFNs that take no time, so that it does not matter which of equally good copies serves."""
    nodes = [
        node.model_copy(
            update={"gpus": tuple(gpu.model_copy(update={"flops_fp16": 1e40, "memory_bandwidth": 1e40}) for gpu in node.gpus)}
        )
        for node in problem.cluster.nodes
    ]
    return replace(problem, cluster=problem.cluster.model_copy(update={"nodes": nodes}), cost=Datasheet(launch=0.0))


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
    layers.room[:] = max(map(len, held)) + data.draw(st.integers(0, 1))
    is_counted_afresh(task, problem, layers.room, seed, data.draw(st.sampled_from((1e-3, 1.0))))


@pytest.mark.parametrize("seed", range(6))
def test_copies_that_only_share_ffns_are_counted_afresh(seed):
    problem = drawn(seed, GPU, experts=2, tokens=1)
    layers, task = layer_of(problem, held_at_random(problem, 2, seed), 2)
    is_counted_afresh(task, problem, layers.room, seed, 1.0)


def is_counted_afresh(task, problem, room, seed, heat):
    kernel, known = _kernel(task.layer), task.layer
    best, begun = (task.expert.copy(), task.place.copy()), task.seconds(known)
    state, more = kernel.begin(*known, *best)
    heat *= begun or 1.0
    lowest, _ = anneal(known, (state, more), best, begun, (heat, heat, 300), seed % 1000, GO_ON)
    again, more_again = kernel.begin(*known, state.expert, state.place)
    for now, afresh in [
        (state, again),
        *(zip(more, more_again, strict=True) if isinstance(more[0], tuple) else [(more, more_again)]),
    ]:
        for name in now._fields:
            if name not in ("held", "slot", "carry", "tally"):
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
        assert np.all(np.bincount(place[used], minlength=len(problem.cluster.gpus)) <= room)
        assert (place[~used] == -1).all()


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
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(1, 12))])
def test_few_experts_are_placed_as_well_as_by_trying_all(travel, spare, room, links, seed):
    problem = drawn(seed, travel, links=links)
    if travel in FEWEST:
        problem = with_free_ffns(problem)
    experts, room = 4, np.full(3, room)
    layers = LayersOf(problem, problem.network, 1.0, room, experts + spare)
    least = min(seconds_by_ports(plan_of([held], problem), problem)[0] for held in every_held(experts, room, experts + spare))
    found = [np.inf]
    tolerance = 0.02 if travel == FEWEST[1] else 1e-9  # nodes: which GPU spreads depends on the copies that serve
    for again, moves in enumerate((6000, 6000, *(AT_LEAST,) * 4)):
        if min(found) > least * (1 + tolerance):
            task = layers.task(0, linear_placement(problem))
            task.search(moves, again, GO_ON)
            found += seconds_by_ports(plan_of([task.held], problem), problem)
    assert least * (1 - 1e-9) <= min(found) <= least * (1 + tolerance)
    bound = bound_of(problem, room, experts + spare, lambda: False)
    fixed = sum(float(step.max()) for step in fixed_compute(problem).values())
    assert (0.0 if spare and travel != COPIES else 0.4) * (least + fixed) < bound <= (least + fixed) * (1 + 1e-9)
