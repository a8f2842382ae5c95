"""Pairs of experts on shared GPUs against every permutation, and under changes that must not matter."""

import time
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import strategies as st
from ortools.sat.python.cp_model import UNKNOWN

from engine.errors import IllegalError, InputError
from engine.placement.assignment import bottleneck_assignment, with_slack
from engine.placement.colocation import heterogeneous
from engine.placement.colocation.heterogeneous import colocate_heterogeneous, decoupled, projections, weighted_mean
from engine.placement.colocation.pairs import (
    ModelTables,
    colocate,
    cycle_bound,
    pair_weight,
    random_colocation,
    sorted_colocation,
)
from engine.result import Limits, Status
from tests.cases.examples import tried
from tests.cases.placements import SPEEDS, numbers
from tests.oracles.placing import check_colocation, check_colocation_heterogeneous
from tests.strategies import seeds

KINDS = ("integer", "float", "skewed")


def loads(experts: int, seed: int, kind: str, balanced: bool = False) -> np.ndarray:
    """send_a, recv_a, send_b, recv_b as rows; balanced: every expert receives as much as it sends."""
    drawn = numbers(np.random.default_rng(seed), kind, (4, experts))
    return drawn[[0, 0, 2, 2]] if balanced else drawn


def costs(gpus: int, seed: int, kind: str) -> np.ndarray:
    """Costs float64[gpu, a, b]: unrelated numbers, or loads over the speeds of two or four types of GPU."""
    rng = np.random.default_rng(seed)
    if kind in KINDS:
        return numbers(rng, kind, (gpus, gpus, gpus))
    if kind == "any sign":
        return rng.integers(-9, 9, (gpus, gpus, gpus)).astype(np.float64)
    speed = rng.choice(SPEEDS[: 2 if kind == "two types" else 4], gpus)
    of_a, of_b = numbers(rng, "skewed", (gpus,)), numbers(rng, "integer", (gpus,))
    return (of_a[None, :, None] + of_b[None, None, :]) / speed[:, None, None]


def all_permutations(size: int) -> np.ndarray:
    return np.array(list(permutations(range(size))))


def proven(result, worth: float) -> None:
    assert result.status is Status.OPTIMAL
    assert result.objective == result.bound == worth
    assert result.solution.dtype == np.int64


@tried(150, st.integers(1, 7), seeds, st.sampled_from(KINDS), st.booleans())
def test_colocation_equals_every_permutation(experts, seed, kind, balanced):
    four = loads(experts, seed, kind, balanced)
    result = colocate(*four)
    proven(result, check_colocation(result.solution, *four))
    every = pair_weight(*four)[np.arange(experts), all_permutations(experts)]
    assert result.objective == every.max(axis=1).min()
    # Ties go to the least sum.
    least = every[every.max(axis=1) == result.objective].sum(axis=1).min()
    assert balanced or pair_weight(*four)[np.arange(experts), result.solution].sum() == pytest.approx(least, rel=1e-12)


@tried(60, st.integers(1, 40), seeds, st.sampled_from(KINDS))
def test_sorting_is_optimal_where_one_number_decides_and_matching_agrees(experts, seed, kind):
    """Theorem 6.2 against the bottleneck assignment; `colocate` takes the sorting there."""
    four = loads(experts, seed, kind, balanced=True)
    weight = pair_weight(*four)
    matched, bound = bottleneck_assignment(weight, np.arange(experts))
    assert check_colocation(colocate(*four).solution, *four) == bound == check_colocation(matched, *four)


@tried(60, st.integers(1, 12), seeds, st.sampled_from(KINDS))
def test_bottleneck_assignment_and_its_slack(size, seed, kind):
    """The threshold is right: a matching stays within it (`with_slack` would fail), none stays below."""
    weight = numbers(np.random.default_rng(seed), kind, (size, size))
    assignment, bound = bottleneck_assignment(weight, np.random.default_rng(seed).permutation(size))
    slack, row = with_slack(weight, bound), np.arange(size)
    assert sorted(assignment) == sorted(slack) == list(range(size))
    assert weight[row, assignment].max() == weight[row, slack].max() == bound
    assert weight[row, slack].sum() <= weight[row, assignment].sum() * (1 + 1e-12)
    with pytest.raises(ValueError, match="infeasible"):
        with_slack(weight, np.nextafter(bound, -np.inf))


def test_random_colocation_is_a_pairing_of_its_seed():
    drawn = [tuple(random_colocation(6, seed)) for seed in range(20)]
    assert all(sorted(pairing) == list(range(6)) for pairing in drawn) and len(set(drawn)) > 10
    assert drawn[4] == tuple(random_colocation(6, 4))


@tried(120, st.integers(1, 5), seeds, st.sampled_from((*KINDS, "two types", "four types", "any sign")))
def test_triples_equal_every_pair_of_permutations_and_bounds_are_bounds(gpus, seed, kind):
    cost = costs(gpus, seed, kind)
    every, gpu = all_permutations(len(cost)), np.arange(len(cost))
    result, best = colocate_heterogeneous(cost), min(float(cost[gpu, a, every].max(axis=1).min()) for a in every)
    proven(result, check_colocation_heterogeneous(result.solution, cost))
    assert result.objective == best
    bound, states = projections(cost, lambda: False)
    assert max(bound, weighted_mean(cost)) <= best
    assert all(check_colocation_heterogeneous(np.stack(state, axis=1), cost) >= best for state in states)


@pytest.mark.parametrize("seed", range(30))
def test_the_proof_finds_what_the_local_search_misses(seed, monkeypatch):
    """CP-SAT alone, from a random state and the weakest bound, gives the same optimum as all steps together."""
    cost = costs(6, seed, ("float", "integer", "skewed", "two types", "four types")[seed % 5])
    wanted = colocate_heterogeneous(cost, Limits(seed=seed))
    proven(wanted, check_colocation_heterogeneous(wanted.solution, cost))
    random = tuple(np.random.default_rng(seed).permutation(6) for _ in "ab")
    monkeypatch.setattr(heterogeneous, "projections", lambda cost, stop: (float(cost.min()), [random]))
    monkeypatch.setattr(heterogeneous, "weighted_mean", lambda cost: 0.0)
    monkeypatch.setattr(heterogeneous, "search", lambda cost, starts, *rest: starts[0])
    alone = colocate_heterogeneous(cost, Limits(seed=seed))
    proven(alone, check_colocation_heterogeneous(alone.solution, cost))
    assert alone.objective == wanted.objective


def test_without_a_proof_the_answer_is_legal_and_the_bound_valid():
    statuses = set()
    for seed in range(30):
        cost = costs(8, seed, "four types")
        quick, full = colocate_heterogeneous(cost, Limits(exact=False)), colocate_heterogeneous(cost)
        assert check_colocation_heterogeneous(quick.solution, cost) == quick.objective
        assert quick.bound <= full.objective <= quick.objective
        statuses.add(quick.status)
        assert full.status is Status.OPTIMAL
    assert statuses == {Status.FEASIBLE, Status.OPTIMAL}


def test_without_an_answer_of_cp_sat_nothing_is_proven(monkeypatch):
    """It answers nothing in its time, or the costs are too many for it."""
    every, quick = (costs(8, seed, "four types") for seed in range(30)), Limits(exact=False)
    unproven = next(table for table in every if colocate_heterogeneous(table, quick).status is not Status.OPTIMAL)
    optimum, asked = colocate_heterogeneous(unproven).objective, []
    monkeypatch.setattr("engine.solver.solve", lambda *rest, **more: (asked.append(1) or UNKNOWN, None))
    monkeypatch.setattr("engine.solver.seconds_of_work", lambda solver: 0.0)
    result = colocate_heterogeneous(unproven)
    assert result.status is Status.TIME_LIMIT and result.bound <= optimum <= result.objective
    assert 1 < len(asked) < 12
    monkeypatch.setattr(heterogeneous, "CP_SAT_TRIPLES", 60)
    monkeypatch.setattr("engine.solver.solve", None)
    result = colocate_heterogeneous(unproven)
    assert result.status is Status.FEASIBLE and result.provenance.options["exact"] is True
    assert check_colocation_heterogeneous(result.solution, unproven) == result.objective > result.bound


@pytest.mark.clock
def test_a_time_limit_is_kept_and_said():
    rng = np.random.default_rng(0)
    of_a, of_b, speed = rng.random(40), rng.random(40), rng.uniform(0.4, 1, 40)
    cost = (of_a[None, :, None] + of_b) / speed[:, None, None]
    start = time.perf_counter()
    result = colocate_heterogeneous(cost, Limits(0.4))
    assert time.perf_counter() - start < 4
    assert result.status in (Status.TIME_LIMIT, Status.OPTIMAL)
    assert check_colocation_heterogeneous(result.solution, cost) == result.objective >= result.bound
    assert result.bound >= (of_a.sum() + of_b.sum()) / speed.sum() * (1 - 1e-9)
    assert result.gap < 0.05


def test_decoupled_is_two_bottleneck_assignments_and_like_sorting_seldom_optimal():
    ratios, sorting = [], []
    for seed in range(40):
        rng, four = np.random.default_rng(seed), loads(6, seed, "float")
        weight = pair_weight(*four)
        cost = weight / rng.choice(SPEEDS, 6)[:, None, None] + rng.random((6, 6)) * 0.2
        assignment = decoupled(cost, weight)
        worth = check_colocation_heterogeneous(assignment, cost)
        partner = assignment[assignment[:, 0].argsort(), 1]
        assert check_colocation(partner, *four) == colocate(*four).objective
        pairs = cost[:, np.arange(6), partner]
        assert worth == pairs[np.arange(6), all_permutations(6)].max(axis=1).min()
        ratios.append(worth / colocate_heterogeneous(cost).objective)
        by_rule = sorted_colocation(np.maximum(four[0], four[1]), np.maximum(four[2], four[3]))
        sorting.append(check_colocation(by_rule, *four) / colocate(*four).objective)
    assert min(*ratios, *sorting) >= 1
    assert np.mean(np.array(ratios) > 1.001) > 0.5 and np.mean(np.array(sorting) > 1.001) > 0.5


ONES, LARGE = np.ones(3), np.array([1.7e308, 1.0, 1.0])


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda: colocate(LARGE, ONES, LARGE, ONES), "loads are too large"),
        (lambda: colocate_heterogeneous(np.ones((2, 3, 3))), r"cost: shape \(2, 3, 3\)"),
        (lambda: colocate_heterogeneous(np.full((2, 2, 2), np.inf)), "finite"),
        (lambda: decoupled(np.ones((2, 2, 2)), np.ones((3, 3))), "weight: shape"),
    ],
)
def test_bad_input_is_named(answer, says):
    with pytest.raises(InputError, match=says):
        answer()


def test_illegal_answers_are_refused():
    for partner in ([0, 1, 1], [0, 1], [0, 1, 3], [-1, 0, 1]):
        with pytest.raises(IllegalError):
            check_colocation(np.array(partner), ONES, ONES, ONES, ONES)
    for assignment in ([[0, 0], [1, 1]], [[0, 0], [1, 1], [1, 2]], [[0, 0], [1, 1], [2, 1]]):
        with pytest.raises(IllegalError):
            check_colocation_heterogeneous(np.array(assignment), np.ones((3, 3, 3)))
    assert check_colocation(np.array([2, 0, 1]), np.array([1.0, 2, 3]), ONES, np.array([7.0, 8, 5]), 9 * ONES) == 11.0


# Bound of a whole cycle


@st.composite
def cycles(draw):
    """Two models on two or three GPUs, few enough experts to try all placements."""
    gpus = draw(st.integers(2, 3))
    experts = draw(st.integers(gpus, 4))
    slots = np.full(gpus, -(-experts // gpus))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    tables = []
    for _ in range(2):
        size = rng.integers(0, 20, (gpus, experts)).astype(float)
        rate = rng.choice([1.0, 2.0, 4.0], gpus)
        received = (size.sum(axis=0) - size) / rate[:, None]
        gate, aggregate, ffn = rng.random(gpus), rng.random(gpus), rng.random((gpus, experts)) * draw(st.sampled_from((1, 20)))
        network = received, size.sum(axis=1) / rate, size / rate[:, None], draw(st.sampled_from((0.0, 0.5)))
        tables.append(ModelTables(gate, aggregate, ffn, *network, slots, int(slots.sum()) == experts))
    return tables, rng.random(gpus)


def cycle_of(tables, next_gate, places) -> float:
    """Table 2 with the network serving both at once, which no schedule beats, for one placement of each model."""
    sums = []
    for table, place in zip(tables, places, strict=True):
        on = np.eye(len(table.slots))[list(place)].T
        ffn, received = (table.ffn * on).sum(axis=1), (table.receive * on).sum(axis=1)
        sent = table.send_total - (table.send_saved * on).sum(axis=1)
        sums.append((ffn, sent, received))
    (ffn_a, sent_a, got_a), (ffn_b, sent_b, got_b) = sums
    a, b = tables
    port_a, port_b = max(sent_a.max(), got_a.max()), max(sent_b.max(), got_b.max())
    both = max((sent_a + sent_b).max(), (got_a + got_b).max())
    start = min(a.start_up, b.start_up)
    arrived = max(both + start, b.gate.min() + port_b + b.start_up)
    first = port_a + a.start_up + ffn_a
    second = np.maximum(first, arrived) + ffn_b
    back_a = first.max() + port_a + a.start_up
    back_b = max(second.max() + port_b + b.start_up, first.max() + both + start)
    return max(back_b + (b.aggregate + next_gate).max(), back_a + (a.aggregate + b.aggregate + next_gate).max())


@tried(60, cycles())
def test_no_pair_of_placements_is_below_the_bound_of_a_cycle(case):
    tables, next_gate = case
    bound = cycle_bound(*tables, next_gate)
    gpus, experts = tables[0].ffn.shape
    every = product(range(gpus), repeat=experts)
    legal = [place for place in every if np.all(np.bincount(place, minlength=gpus) <= tables[0].slots)]
    best = min(cycle_of(tables, next_gate, pair) for pair in product(legal, repeat=2))
    assert bound <= best * (1 + 1e-9)
    assert bound >= 0.4 * best


def test_large_cycles_are_bounded_without_the_programme(monkeypatch):
    rng = np.random.default_rng(0)
    size = rng.random((4, 8))
    table = ModelTables(np.ones(4), np.ones(4), size, size, size.sum(axis=1), size * 0.1, 0.0, np.full(4, 2), True)
    full = cycle_bound(table, table, np.zeros(4))
    monkeypatch.setattr("engine.placement.colocation.pairs.MOST_CELLS", 0)
    assert 0 < cycle_bound(table, table, np.zeros(4)) <= full
