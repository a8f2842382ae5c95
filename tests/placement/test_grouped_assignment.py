"""Several experts to a GPU: against every grouping, the bound, real recordings, and interruption."""

import time
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
from ortools.sat.python.cp_model import FEASIBLE, OPTIMAL, CpModel
from scipy.optimize import linprog

from engine.errors import InputError
from engine.placement.assignment import AssignmentInstance
from engine.placement.baselines import linear_assignment
from engine.placement.grouped_assignment import assign_groups, relaxation_bound
from engine.result import Limits, Status
from engine.solver import solve
from tests.cases.placements import SPEEDS, mixed_instance, routing

KINDS = (("integer", 0.2), ("float", 1.0), ("skewed", 3.0))
"""Numbers of a kind, and the weight of computation against the network."""


def brute_force(instance: AssignmentInstance, slots: np.ndarray, exact_slots: bool) -> float:
    every = map(np.array, product(range(instance.gpus), repeat=instance.experts))
    fits = np.equal if exact_slots else np.less_equal
    return min(instance.cost(row) for row in every if fits(np.bincount(row, minlength=instance.gpus), slots).all())


def four_speeds(experts: int, gpus: int, seed: int) -> tuple[AssignmentInstance, np.ndarray]:
    """A layer with skewed popularity on a cluster of four speeds, equal slots."""
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(experts, 4.0))
    tokens = np.stack([rng.multinomial(8192, rng.dirichlet(200 * popularity)) for _ in range(gpus)])
    speed = np.array(SPEEDS)[np.arange(gpus) * 4 // gpus]
    return mixed_instance(tokens, speed), np.full(gpus, experts // gpus)


FULL, AT_MOST = ([2, 2, 2], [3, 3], [3, 1, 2], [5, 0, 1], [6]), ([3, 3, 3], [4, 1, 2], [9, 9], [6, 0, 2])


@pytest.mark.parametrize(("slots", "exact_slots"), [*((slots, True) for slots in FULL), *((slots, False) for slots in AT_MOST)])
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("turn", range(len(KINDS)))
def test_equals_every_grouping(slots, exact_slots, kind, turn):
    slots, computation = np.array(slots), KINDS[(kind + turn) % len(KINDS)][1]
    instance = mixed_instance(*routing(len(slots), 6, 7 * sum(slots) + len(slots) + turn, KINDS[kind][0]), computation)
    result = assign_groups(instance, Limits(2.0, wall=60), slots=slots, exact_slots=exact_slots)
    held = np.bincount(result.solution, minlength=len(slots))
    optimum = brute_force(instance, slots, exact_slots)
    assert (held == slots).all() if exact_slots else (held <= slots).all()
    assert result.status is Status.OPTIMAL
    assert result.objective == instance.cost(result.solution) == pytest.approx(optimum, rel=1e-6)
    assert result.bound <= optimum * (1 + 1e-12)


def test_same_seed_same_answer_and_close_to_the_bound():
    instance, slots = four_speeds(48, 8, 1)
    heard = []  # seconds suffice for a proof, which on a busy machine take longer; what time cuts off is not repeatable
    limits = Limits(10.0, wall=60.0)
    first = assign_groups(instance, limits, report=lambda *pair: heard.append(pair), slots=slots)
    second = assign_groups(instance, limits, slots=slots)
    assert first.solution.tolist() == second.solution.tolist()
    assert first.bound == second.bound
    assert first.gap < 0.005
    assert all(bound <= objective for objective, bound in heard)
    assert heard[-1][0] == pytest.approx(first.objective, rel=1e-6)
    assert instance.cost(linear_assignment(48, slots)) > first.objective


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_relaxation_of_gpus_that_are_alike_is_that_of_all(seed, links):
    """The linear programme with a variable for every GPU and expert, solved by another code. On links the sending is fixed."""
    rng = np.random.default_rng(seed)
    names = rng.integers(0, 3, 6)
    compute, receive, saved = (rng.random((3, 8))[names] * weight for weight in (1.0, 0.7, 0.0 if links else 0.2))
    sent = rng.random(6) if links else saved.sum(axis=1) + 0.1 * names
    instance, exact = AssignmentInstance(compute, receive, sent, saved), seed % 2 == 0
    slots = np.array([2, 1, 1, 2, 1, 1]) if exact else np.array([2, 2, 3, 1, 2, 2])
    floors = (0.3 * seed, 0.5 + sent.max() * links)
    f, n = np.zeros(50), np.zeros(50)
    f[-2], n[-1] = 1.0, 1.0
    spread = np.eye(6)[:, :, None] * np.ones(8)
    tables = [(np.eye(6)[:, :, None] * table).reshape(6, 48) for table in (compute, receive, -saved)]
    rows = [np.hstack([table, np.zeros((6, 2))]) - limit for table, limit in zip(tables, (f, n, n), strict=True)]
    rooms, wholes = np.pad(spread.reshape(6, 48), ((0, 0), (0, 2))), np.pad(np.tile(np.eye(8), 6), ((0, 0), (0, 2)))
    limits = np.concatenate([np.zeros(12), -sent])
    if exact:
        equal, values = np.vstack([wholes, rooms]), np.append(np.ones(8), slots)
    else:
        rows, limits, equal, values = [*rows, rooms], np.append(limits, slots), wholes, np.ones(8)
    bounds = [(0, 1)] * 48 + [(floors[0], None), (floors[1], None)]
    optimum = linprog(f + 2 * n, np.vstack(rows), limits, equal, values, bounds).fun
    found = relaxation_bound(instance, slots, exact, floors, 5.0, np.inf, lambda: False)
    assert found == pytest.approx(optimum, rel=1e-7)


@pytest.mark.parametrize(
    ("experts", "gpus", "after"),
    [(64, 8, 0.0), (64, 8, 0.2), (256, 64, 0.3), pytest.param(128, 32, 2.0, marks=pytest.mark.everything)],
)
@pytest.mark.clock
def test_cancelled_within_half_a_second(experts, gpus, after):
    instance, slots = four_speeds(experts, gpus, 1)
    start = time.perf_counter()
    result = assign_groups(instance, Limits(60.0), lambda: time.perf_counter() - start >= after, slots=slots)
    assert time.perf_counter() - start < after + 1.0  # half a second, and as much again for a busy machine
    assert result.status is Status.CANCELLED
    assert (np.bincount(result.solution, minlength=gpus) == slots).all()
    assert 0 < result.bound <= result.objective == instance.cost(result.solution)
    assert assign_groups(instance, Limits(0.3), slots=slots).runtime < 1.3


def test_no_tokens_at_all():
    result = assign_groups(mixed_instance(np.zeros((2, 4)), np.ones(2)), slots=np.array([2, 2]))
    assert (result.objective, result.status) == (0.0, Status.OPTIMAL)


@pytest.mark.parametrize(
    ("slots", "says"),
    [([1] * 8, "8 places for 16 experts; give the GPUs 8 more slots"), ([3] * 8, "take 8 slots away"), ([8, 8], "8 GPUs")],
)
def test_bad_slots_say_what_would_do(slots, says):
    with pytest.raises(InputError, match=says):
        assign_groups(four_speeds(16, 8, 0)[0], slots=np.array(slots))


def knapsack() -> tuple[CpModel, list]:
    rng = np.random.default_rng(0)
    weight, value = rng.integers(10**6, 10**7, (2, 300)).tolist()
    model = CpModel()
    taken = [model.new_bool_var(f"taken{i}") for i in range(300)]
    for shift in range(20):
        model.add(sum(w * taken[(i * (shift + 1)) % 300] for i, w in enumerate(weight)) <= sum(weight) // 3)
    model.maximize(sum(v * t for v, t in zip(value, taken, strict=True)))
    return model, taken


@pytest.mark.clock
def test_solver_stops_when_asked_and_keeps_its_answer():
    model, taken = knapsack()
    start = time.perf_counter()
    status, solver = solve(model, Limits(60.0), lambda: time.perf_counter() - start > 0.3, hint=dict.fromkeys(taken, 0))
    assert time.perf_counter() - start < 2.0
    assert status in (FEASIBLE, OPTIMAL)
    assert solver.objective_value >= 0


def test_solver_passes_on_an_exception_of_the_caller():
    with pytest.raises(KeyboardInterrupt):
        solve(knapsack()[0], Limits(60.0), Mock(side_effect=KeyboardInterrupt))


@pytest.mark.parametrize(("gpus", "experts"), [(4, 3), (5, 2), (5, 4), (6, 1)])
@pytest.mark.parametrize(("kind", "computation"), KINDS)
def test_idle_gpus_equal_every_choice(gpus, experts, kind, computation):
    slots = np.ones(gpus, dtype=np.int64)
    for seed in range(3):
        instance = mixed_instance(*routing(gpus, experts, seed, kind), computation)
        result = assign_groups(instance, slots=slots, exact_slots=False)
        assert result.status is Status.OPTIMAL
        assert np.bincount(result.solution, minlength=gpus).max() == 1
        assert result.solution.shape == (experts,)
        assert result.objective == instance.cost(result.solution) == pytest.approx(brute_force(instance, slots, False))
        assert result.bound == result.objective
