"""The search by the copy of every rank, of one model or two: against seconds counted port by port, Aurora's table 2, every
placement of few experts, and itself."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs import Datasheet
from engine.placement.best.by_source import anneal, begin, choose, rule_of, seconds_of
from engine.placement.dispatch_rules import choices_of_ranks
from engine.plan import Travel
from engine.problem import Problem, make_problem
from engine.systems.aurora_colocated import layer_seconds, shared_slots, sides_of_layers
from engine.systems.best_goals import LayersOfTwo
from engine.systems.best_layers import LayersOf
from engine.systems.pieces import linear_placement
from tests.cases.best_layers import GO_ON, ONE_LAYER, drawn, every_held, held_at_random, layer_of, plan_of
from tests.cases.examples import examples
from tests.cases.two_models import pairs
from tests.oracles.plans import seconds_by_ports
from tests.strategies import seeds

FIXED = [Travel(unit=unit, replicas="fixed") for unit in ("copies", "gpu", "node")]
NEAR = [Travel(replicas=rule, ranks_per_node=2) for rule in ("nearest-dynamic", "nearest-static")]


@settings(max_examples=examples(100, 20), deadline=None)
@given(ONE_LAYER, st.sampled_from(FIXED), st.integers(1, 4), seeds)
def test_seconds_are_those_of_the_busiest_ports_and_ffns_under_a_rule(problem, travel, spare, seed):
    problem = replace(problem, travel=travel, cost=Datasheet())
    held = held_at_random(problem, spare, seed)
    _, task = layer_of(problem, held, spare)
    (wanted,) = seconds_by_ports(plan_of([held], problem), problem)
    assert task.held == held and task.seconds(task.layer) == pytest.approx(wanted, rel=1e-9, abs=1e-30)


@pytest.mark.parametrize("travel", [FIXED[0], *NEAR], ids=lambda travel: travel.in_words)
@pytest.mark.parametrize("spare", [1, 4, 9])
def test_ranks_have_the_copies_that_the_rule_gives_them(travel, spare):
    problem = drawn(0, travel, gpus=6, experts=5)
    for seed in range(8):
        placement = plan_of([held_at_random(problem, spare, seed)], problem).placement
        near, _ = choices_of_ranks(placement, travel, 0, np.ones(5))
        dealt, _ = choices_of_ranks(placement, NEAR[0], 0, np.ones(5))
        for expert, copies in enumerate(placement.share[0] > 0):
            choose(rule_of(travel), 2, copies, expert, picked := np.zeros(6, dtype=np.int64))
            known = dealt[:, expert] >= 0 if travel is NEAR[1] else np.ones(6, dtype=bool)
            np.testing.assert_array_equal(picked[known], near[known, expert])
            assert copies[picked[~known]].all()


def two_layers_of(problem: Problem) -> LayersOfTwo:
    return LayersOfTwo(problem, shared_slots((problem, problem.second), "even"))


@settings(max_examples=examples(60, 15), deadline=None)
@given(pairs(contended=False), st.integers(0, 2**16))
def test_two_models_take_the_seconds_of_table_2(problem, seed):
    nodes = tuple(node.model_copy(update={"link_latency": 0.0}) for node in problem.cluster.nodes)
    at_once = {"cluster": problem.cluster.model_copy(update={"nodes": nodes, "latency": 0.0}), "cost": Datasheet()}
    problem = replace(problem, **at_once, second=replace(problem.second, **at_once))
    layers, rng, experts = two_layers_of(problem), np.random.default_rng(seed), problem.workload.num_experts
    for layer, sides in enumerate(sides_of_layers(problem)):
        place = rng.integers(0, len(problem.cluster.gpus), 2 * experts)
        wanted = layer_seconds(sides, problem)(place[:experts], place[experts:])
        assert seconds_of(*layers.layer(layer), np.arange(2 * experts), place) == pytest.approx(wanted, rel=1e-9)


@settings(max_examples=examples(60, 15), deadline=None)
@given(st.one_of(pairs(contended=False), ONE_LAYER), st.sampled_from([*FIXED, *NEAR]), st.integers(1, 3), seeds, st.data())
def test_what_moves_change_is_what_is_counted_afresh(problem, travel, spare, seed, data):
    if problem.second is None:
        problem = replace(problem, travel=travel)
        held = held_at_random(problem, spare, seed)
        layers, task = layer_of(problem, held, spare)
        layers.room[:] = max(map(len, held))
    else:
        layers, one = two_layers_of(problem), linear_placement(problem)
        task = layers.task(0, [type("Start", (), {"placement": one, "placement_b": one})])
    known, begun = task.layer, task.seconds(task.layer)
    best, heat = (task.expert.copy(), task.place.copy()), begun * data.draw(st.sampled_from((1e-3, 1.0)))
    states, more = begin(*known, *best)
    lowest, _ = anneal(*known, states, more, best, begun, (heat, heat, 300), seed % 1000, GO_ON)
    assert seconds_of(*known, *best) == pytest.approx(lowest, rel=1e-9) and lowest <= begun
    behind = np.where(states[1].expert >= 0, states[1].expert + len(known[0].layers[0].ffn), -1)
    ends = np.r_[states[0].expert, behind], np.r_[states[0].place, states[1].place]
    again, more_again = begin(*known, *ends)
    for now, afresh in zip([*states, more[1]], [*again, more_again[1]], strict=True):
        for name in set(now._fields) - {"held", "slot"}:
            left, right = getattr(now, name), getattr(afresh, name)
            if name == "rows":  # the last one is of rows that stay
                left, right = left[..., :-1], right[..., :-1]
            np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9 * (1 + np.abs(right).max(initial=0.0)), err_msg=name)
    for picks in zip(more[0], more_again[0], strict=True):
        np.testing.assert_array_equal(*picks)
    for expert, place in (best, ends):
        used = expert >= 0
        assert len(set(zip(expert[used].tolist(), place[used].tolist(), strict=True))) == used.sum()
        assert set(expert[used]) == set(range(sum(len(layer.ffn) for layer in known[0].layers)))
        for state, layer in zip(states, known[0].layers, strict=True):
            assert np.all(np.bincount(state.place[state.expert >= 0], minlength=len(layer.room)) <= layer.room)


@pytest.mark.parametrize("travel", FIXED, ids=lambda travel: travel.in_words)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(1, 8))])
def test_few_experts_are_placed_as_well_as_by_trying_all_under_a_rule(travel, seed):
    problem = drawn(seed, travel, links=True)
    layers = LayersOf(problem, problem.network, 1.0, room := np.full(3, 3), 5)
    least = min(seconds_by_ports(plan_of([held], problem), problem)[0] for held in every_held(4, room, 5))
    found = []
    for again in range(4):
        task = layers.task(0, linear_placement(problem))
        task.search(4000, again, GO_ON)
        found += seconds_by_ports(plan_of([task.held], problem), problem)
    assert least * (1 - 1e-9) <= min(found) <= least * (1 + 1e-9)


@pytest.mark.parametrize("unit", ["copies", "gpu", "node"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(2, 12))])
def test_few_experts_of_two_models_are_placed_as_well_as_by_trying_all(unit, seed):
    first, second = (drawn(2 * seed + side, Travel(unit=unit), links=True) for side in range(2))
    both = (second.workload, second.model)
    problem = make_problem(first.workload, first.cluster, first.model, Datasheet(), both, travel=Travel(unit=unit))
    layers, start = two_layers_of(problem), linear_placement(problem)
    known, experts = layers.layer(0), np.arange(8)
    rows = [row for row in product(range(3), repeat=4) if np.bincount(row, minlength=3).max() <= 2]
    least = min(seconds_of(*known, experts, np.array([*a, *b])) for a, b in product(rows, repeat=2))
    found = []
    for again in range(4):
        task = layers.task(0, [type("Start", (), {"placement": start, "placement_b": start})])
        task.search(6000, again, GO_ON)
        found.append(task.seconds(known))
    assert min(found) == pytest.approx(least, rel=1e-9)
