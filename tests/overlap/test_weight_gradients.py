"""Weight gradients under all-to-alls against every assignment, a linear programme, and changes that must not matter."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import strategies as st
from ortools.sat.python.cp_model import UNKNOWN
from scipy.optimize import linprog

from engine.errors import IllegalError, InputError
from engine.overlap.weight_gradients import WeightGradientInstance, bounds, kernel, overlap, schedule_weight_gradients
from engine.overlap.weight_gradients.bounds import best_fit, closest_sums, cut_bound, exchange_search
from engine.overlap.weight_gradients.exact import best_assignment, best_nested
from engine.overlap.weight_gradients.instance import without_idle
from engine.result import Limits, Status, never
from tests import everything
from tests.benchmarks.bench_weight_gradients import backward_pass, scattered
from tests.cases.examples import tried
from tests.oracles.overlapping import check_weight_gradients

EXACT = 1e-9
ROUNDED = 1e-7
"""Loss of an objective to CP-SAT's rounding to integers, for up to ten durations."""


def worth(instance: WeightGradientInstance, alltoall_of_dw: np.ndarray) -> float:
    return check_weight_gradients(instance.alltoall, instance.dw, instance.allowed, alltoall_of_dw)


def every_assignment(instance: WeightGradientInstance) -> float:
    """The optimum, by trying everything."""
    m = len(instance.alltoall)
    choices = [[-1, *np.flatnonzero(row)] for row in instance.allowed]
    all_of_them = np.array(list(product(*choices)), dtype=np.int64).reshape(-1, len(choices))
    hidden = np.zeros(len(all_of_them))
    for j in range(m):
        hidden += np.minimum(instance.alltoall[j], (all_of_them == j) @ instance.dw)
    return float(hidden.max())


def splittable(instance: WeightGradientInstance) -> float:
    """The optimum if a dW may be split at will, by a linear programme."""
    w, m = instance.allowed.shape
    per_alltoall = np.tile(np.eye(m), w)
    per_dw = np.repeat(np.eye(w), m, axis=1)
    limits = np.concatenate([instance.alltoall, instance.dw])
    most = [(0, None if ok else 0) for ok in instance.allowed.ravel()]
    return -linprog(-np.ones(w * m), np.vstack([per_alltoall, per_dw]), limits, bounds=most).fun


@st.composite
def instances(draw, alltoalls: int = 3, dws: int = 6, nested: bool | None = None) -> WeightGradientInstance:
    m, w = draw(st.integers(1, alltoalls)), draw(st.integers(1, dws))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        alltoall, dw = rng.integers(0, 12, m).astype(float), rng.integers(0, 12, w).astype(float)
    else:
        alltoall, dw = rng.exponential(size=m), rng.exponential(size=w) * rng.choice([0.3, 1, 3])
    if draw(st.booleans()) if nested is None else nested:
        allowed = rng.permutation(np.arange(m)) >= rng.integers(0, m + 1, w)[:, None]
    else:
        allowed = rng.random((w, m)) < 0.6
    return WeightGradientInstance(alltoall, dw, allowed)


CROSSING = WeightGradientInstance(
    np.array([8.0, 7, 9]), np.array([6.0, 6, 9, 4]), np.array([[1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
)
"""Sets that are not nested, and 22 of the 24 that splittable dW would hide: no search can prove it."""


@tried(120, instances())
def test_best_equals_every_assignment_and_no_bound_and_no_other_way_lies(instance):
    optimum = every_assignment(instance)
    relative, unit = instance.relative()
    assert min(cut_bound(instance), cut_bound(relative) * unit) >= optimum * (1 - 1e-12)
    before = 0.0
    for options in ({"algorithm": "greedy"}, {"limits": Limits(exact=False)}, {}):
        result = schedule_weight_gradients(instance, **options)
        assert worth(instance, result.solution) == pytest.approx(result.objective, rel=EXACT)
        assert before <= result.objective * (1 + EXACT) and result.objective <= optimum * (1 + EXACT)
        assert (result.status is Status.OPTIMAL) == (result.bound <= result.objective * (1 + EXACT)) or not options
        before = result.objective
        if options:
            assert optimum <= result.bound * (1 + 1e-12)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(optimum, rel=ROUNDED)
    assert result.objective <= result.bound <= optimum * (1 + ROUNDED)


@tried(25, instances(nested=False))
def test_cp_sat_alone_equals_every_assignment(instance):
    optimum = every_assignment(instance)
    nothing = np.full(len(instance.dw), -1)
    if optimum == 0:
        return
    alltoall_of_dw, bound = best_assignment(instance, nothing, cut_bound(instance), Limits(), never)
    assert worth(instance, alltoall_of_dw) == pytest.approx(optimum, rel=ROUNDED)
    assert optimum * (1 - 1e-12) <= bound <= optimum * (1 + ROUNDED)


@tried(80, instances(alltoalls=4, nested=True), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_states_alone_equal_every_assignment(instance, share):
    sets = [set(np.flatnonzero(column)) for column in instance.allowed.T]
    assert all(a <= b or b <= a for a in sets for b in sets)
    optimum = every_assignment(instance)
    alltoall_of_dw, bound = best_nested(instance, share * optimum, 10**6, never)
    assert optimum * (1 - 1e-12) <= bound <= optimum * (1 + EXACT)
    if alltoall_of_dw is not None:
        assert worth(instance, alltoall_of_dw) == pytest.approx(optimum, rel=EXACT)
    else:
        assert share == 1.0 or optimum == 0
    # Kept to one state at a time, whatever it finds is an assignment, and a claim of proof is true.
    alltoall_of_dw, bound = best_nested(instance, share * optimum, 1, never)
    assert bound >= optimum * (1 - 1e-12)
    assert alltoall_of_dw is None or worth(instance, alltoall_of_dw) <= optimum * (1 + EXACT)


def test_cp_sat_is_given_numbers_it_can_count_with():
    """In units of 2^-36 of the optimum and finer CP-SAT 9.15 proved an optimum of 6.54 here."""
    alltoall = np.array([1.07302903, 0.30845314, 5.37543687])
    dw = np.array([1.09928134, 0.34608612, 5.39939126, 1.49591729, 0.08914033])
    allowed = np.array([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]])
    instance = WeightGradientInstance(alltoall, dw, allowed)
    alltoall_of_dw, bound = best_assignment(instance, np.full(5, -1), cut_bound(instance), Limits(), never)
    assert worth(instance, alltoall_of_dw) == pytest.approx(every_assignment(instance), rel=EXACT)
    assert bound >= every_assignment(instance)


def test_durations_of_any_ratio_do_not_overflow():
    instance = WeightGradientInstance(np.array([1e-130, 1e155]), np.array([1.2e155]), np.ones((1, 2)))
    with np.errstate(over="raise"):
        result = schedule_weight_gradients(instance)
    assert (result.objective, result.status) == (pytest.approx(1e155), Status.OPTIMAL)


def test_cp_sat_without_an_answer_changes_nothing(monkeypatch):
    monkeypatch.setattr("engine.solver.solve", lambda *_, **__: (UNKNOWN, None))
    known = best_fit(CROSSING)
    alltoall_of_dw, bound = best_assignment(CROSSING, known, 24.0, Limits(), never)
    assert alltoall_of_dw.tolist() == known.tolist() and bound == 24


def test_states_that_were_dropped_leave_no_proof():
    """One state at a time leads nowhere here, though 25 is possible: that 24 cannot be beaten does not follow."""
    allowed = np.array([[0, 1, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1]])
    instance = WeightGradientInstance(np.array([7.0, 10, 9]), np.array([7.0, 7, 6, 4, 8]), allowed)
    assert best_nested(instance, 24.0, 1, never) == (None, np.inf)
    alltoall_of_dw, bound = best_nested(instance, 24.0, 100, never)
    assert (worth(instance, alltoall_of_dw), bound) == (25, 25)
    # Nor do sets that are not nested.
    crossing = WeightGradientInstance(np.ones(2), np.ones(2), np.eye(2, dtype=bool))
    assert best_nested(crossing, 0.0, 100, never) == (None, np.inf)
    assert schedule_weight_gradients(crossing).objective == 2


@pytest.mark.parametrize("unit", [1e-9, 1e-15, 1e-100, 1e-290])
def test_durations_that_cannot_count_take_no_precision(unit):
    """Only CP-SAT proves this one; an all-to-all nothing may run under, and a dW nowhere allowed, may last for ever."""
    alltoall, dw = unit * np.array([8.0, 7, 9, 0]), unit * np.array([6.0, 6, 9, 4, 0])
    alltoall[3], dw[4] = 1.0, 1.0
    allowed = np.array([[1, 0, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    instance = WeightGradientInstance(alltoall, dw, allowed)
    result = schedule_weight_gradients(instance)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(22 * unit, rel=EXACT)
    # Of an all-to-all only as much counts as may ever run under it, of a dW as much as its longest all-to-all lasts.
    relative, longest = WeightGradientInstance(np.array([9.0, 3]), np.array([4.0, 7]), [[1, 1], [0, 1]]).relative()
    assert (longest, relative.alltoall.tolist(), relative.dw.tolist()) == (4.0, [1.0, 0.75], [1.0, 0.75])


@tried(60, instances(alltoalls=5, dws=9))
def test_the_cut_is_the_maximum_flow(instance):
    assert cut_bound(instance) == pytest.approx(splittable(instance), rel=1e-7, abs=1e-9)


@tried(60, instances(alltoalls=4, dws=10))
def test_no_dw_runs_under_an_alltoall_for_nothing(instance):
    for limits in (Limits(), Limits(exact=False)):
        result = schedule_weight_gradients(instance, limits)
        for dw in np.flatnonzero(result.solution >= 0):
            j, others = result.solution[dw], result.solution.copy()
            others[dw] = -1
            assert instance.dw[others == j].sum() < instance.alltoall[j] and instance.dw[dw] > 0


def test_the_longest_dw_that_can_be_spared_goes_first():
    instance = WeightGradientInstance(np.array([5.0]), np.array([3.0, 5, 2]), np.ones((3, 1)))
    assert without_idle(instance, np.zeros(3, dtype=np.int64)).tolist() == [0, -1, 0]


@pytest.mark.parametrize(
    ("alltoall", "dw", "allowed", "greedy", "objective", "best"),
    [
        # 10: closest is 9, then of the 1 left the closest of 4, 6, 8 is 4; the second all-to-all takes 6, closest to 5.
        ([10, 5], [4, 6, 9, 8], [[1, 1]] * 4, [0, 1, 0, -1], 15, 15),
        # The first of two equally close, and one that may not run there is passed over.
        ([5], [5, 4, 6], [[0], [1], [1]], [-1, 0, 0], 5, 5),
        # Durations as they are: 13 is further from 10 than 8 is, though only 10 of it could count.
        ([10, 4], [13, 8], [[1, 1]] * 2, [0, 0], 10, 14),
        # A large dW is nearer to the last bit of the first all-to-all than nothing else, and the later one starves.
        ([10, 10], [9, 10], [[1, 0], [1, 1]], [-1, 0], 10, 19),
    ],
)
def test_greedy_by_hand(alltoall, dw, allowed, greedy, objective, best):
    instance = WeightGradientInstance(np.array(alltoall, float), np.array(dw, float), np.array(allowed))
    assert best_fit(instance).tolist() == greedy
    result = schedule_weight_gradients(instance, algorithm="greedy")
    assert (overlap(instance, best_fit(instance)), result.objective) == (objective, objective)
    assert result.bound == pytest.approx(cut_bound(instance))
    assert (result.status is Status.FEASIBLE) == (objective < best)
    exact = schedule_weight_gradients(instance)
    assert (exact.objective, exact.status) == (best, Status.OPTIMAL)


def test_sums_of_several_are_looked_for_at_once():
    instance = WeightGradientInstance(np.array([10.0]), np.array([9.0, 4, 6, 3]), np.ones((4, 1)))
    assert best_fit(instance).tolist() == [0, -1, -1, 0]
    assert closest_sums(instance).tolist() == [-1, 0, 0, -1]


def test_search_gets_near_the_flow():
    """Greedy is 2.5 % below it in these, exchanges of single dW 0.3 %; through the kernel, where sets are not nested, greedy
    8 % and closest sums 3 % (all measured). It brings in dW that run under none."""
    result = schedule_weight_gradients(scattered(24, 8), Limits(exact=False))
    assert result.objective >= 0.998 * result.bound
    instance = WeightGradientInstance(np.array([5.0, 5]), np.array([4.0, 4, 5, 5]), np.ones((4, 2)))
    found = exchange_search(instance, np.array([0, 1, -1, -1]), 10.0, 100, 0, never, lambda improved: None)
    assert worth(instance, found) == 10
    for seed in (2, 7) if everything.WANTED else (2,):
        instance, _ = backward_pass(24, seed).relative()
        bound, start = cut_bound(instance), best_fit(instance)
        assert overlap(instance, start) < 0.985 * bound
        alltoall_of_dw = exchange_search(instance, start, bound * (1 - 1e-12), 20_000, 0, never, lambda improved: None)
        assert worth(instance, alltoall_of_dw) >= bound * (1 - 1e-4)


def test_without_proofs_there_is_none(monkeypatch):
    result = schedule_weight_gradients(CROSSING, Limits(exact=False))
    assert (result.status, result.objective, result.bound) == (Status.FEASIBLE, 22, pytest.approx(24))
    # States are then only a search: as few as are kept for that, not as many as a proof takes.
    widths = []
    monkeypatch.setattr(kernel, "best_nested", lambda instance, known, width, stop: (widths.append(width), np.inf))
    schedule_weight_gradients(CROSSING, Limits(exact=False))
    schedule_weight_gradients(CROSSING)
    assert widths == [kernel.FEW_STATES, kernel.FEW_STATES, kernel.ALL_STATES]


@pytest.mark.parametrize(("above", "status"), [(1e-6, Status.TIME_LIMIT), (4e-8, Status.TIME_LIMIT), (2e-8, Status.OPTIMAL)])
def test_only_what_rounding_can_take_is_forgiven(monkeypatch, above, status):
    """CP-SAT's limit for three all-to-alls and four dW may be 4 x 7 / 2^30 = 2.6e-8 too high."""
    monkeypatch.setattr(kernel, "best_assignment", lambda instance, known, *_: (known, overlap(instance, known) * (1 + above)))
    result = schedule_weight_gradients(CROSSING)
    assert result.status is status
    assert result.bound == pytest.approx(22 * (1 + above), rel=1e-12)


def test_a_search_cut_short_says_so_where_no_proof_follows(monkeypatch):
    monkeypatch.setattr(kernel, "MOST_CHOICES", 0)
    assert schedule_weight_gradients(scattered(24, 8), Limits(0.3)).status is Status.TIME_LIMIT
    assert schedule_weight_gradients(CROSSING).status is Status.FEASIBLE


def test_search_never_answers_with_less_than_it_had(monkeypatch):
    """So hot that it keeps leaving good answers."""
    monkeypatch.setattr(bounds, "WARM", 1.0)
    monkeypatch.setattr(bounds, "COOL", 1.0)
    instance, _ = scattered(6, 1).relative()
    start = best_fit(instance)
    for seed in range(5):
        seen = [start]
        alltoall_of_dw = exchange_search(instance, start, np.inf, 300, seed, never, seen.append)
        hidden = [worth(instance, assignment) for assignment in seen]
        assert all(a < b * (1 + 1e-12) for a, b in pairwise(hidden)) and len(seen) > 1
        assert alltoall_of_dw.tolist() == seen[-1].tolist()
        again = exchange_search(instance, alltoall_of_dw, np.inf, 20, seed, never, seen.append)
        assert worth(instance, again) >= hidden[-1]


@pytest.mark.parametrize(
    ("layers", "seed"),
    [
        *((4, 1), (4, 14), (12, 0), (24, 2)),
        *(pytest.param(*sizes, marks=pytest.mark.everything) for sizes in ((12, 3), (24, 4), (24, 26))),
    ],
)
def test_backward_passes_are_proven(layers, seed):
    instance = backward_pass(layers, seed)
    result = schedule_weight_gradients(instance, Limits(30, wall=100))
    assert result.status is Status.OPTIMAL
    assert worth(instance, result.solution) == pytest.approx(result.objective, rel=EXACT)
    greedy = schedule_weight_gradients(instance, algorithm="greedy")
    assert greedy.objective < result.objective <= result.bound <= greedy.bound * (1 + 1e-12)


def test_same_seed_same_answer():
    instance = scattered(6, 1)
    first, second = (schedule_weight_gradients(instance, Limits(seed=5, exact=False)) for _ in range(2))
    assert first.solution.tolist() == second.solution.tolist()
    others = [schedule_weight_gradients(instance, Limits(seed=seed, exact=False)).solution for seed in range(5)]
    assert any((other != first.solution).any() for other in others)


@pytest.mark.parametrize("after", [0, 1, 5, 20, 60])
@pytest.mark.parametrize("make", [backward_pass, scattered])
def test_cancelled_work_has_a_legal_answer_and_a_true_bound(make, after):
    instance, asked = make(24, 8), iter(range(10**9))
    result = schedule_weight_gradients(instance, stop=lambda: next(asked) >= after)
    assert result.status is Status.CANCELLED
    assert worth(instance, result.solution) == pytest.approx(result.objective, rel=EXACT)
    assert result.objective >= schedule_weight_gradients(instance, algorithm="greedy").objective * (1 - EXACT)
    assert result.objective < result.bound <= splittable(instance) * (1 + 1e-6)


@pytest.mark.clock
def test_a_time_limit_is_kept_and_said():
    result = schedule_weight_gradients(backward_pass(24, 8), Limits(0.05))
    assert result.status is Status.TIME_LIMIT and result.runtime < 1.5
    assert result.objective < result.bound


def test_progress_improves_and_ends_at_the_answer():
    seen = []
    instance = backward_pass(24, 2)
    result = schedule_weight_gradients(instance, report=lambda *figures: seen.append(figures))
    assert len(seen) > 2 and [objective for objective, _ in seen] == sorted(objective for objective, _ in seen)
    assert seen[-1][0] == pytest.approx(result.objective, rel=EXACT)
    # Lancet's greedy, then the closest sums, then the search.
    relative, unit = instance.relative()
    assert seen[0][0] == pytest.approx(overlap(instance, best_fit(instance)), rel=EXACT)
    assert seen[1][0] == pytest.approx(overlap(relative, closest_sums(relative)) * unit, rel=EXACT)
    assert all(objective <= bound <= instance.alltoall.sum() * (1 + EXACT) for objective, bound in seen)


@pytest.mark.parametrize(("w", "m"), [(0, 0), (0, 2), (3, 0)])
def test_nothing_to_hide_or_nothing_to_hide_it(w, m):
    for options in ({"algorithm": "greedy"}, {}, {"limits": Limits(exact=False)}):
        instance = WeightGradientInstance(np.ones(m), np.ones(w), np.ones((w, m)))
        result = schedule_weight_gradients(instance, **options)
        assert (result.objective, result.bound, result.status) == (0, 0, Status.OPTIMAL)
        assert result.solution.tolist() == [-1] * w and result.solution.dtype == np.int64


@pytest.mark.parametrize(
    ("alltoall", "dw", "allowed", "message"),
    [
        ([np.nan], [1.0], [[1]], "alltoall"),
        ([1.0], [np.inf], [[1]], "dw"),
        ([1.0], [1e308, 1e308], [[1], [1]], "dw"),
        ([[1.0]], [1.0], [[1]], "alltoall"),
        ([1.0], [1.0], [[1, 1]], r"allowed: shape \(1, 2\); wanted \(1, 1\)"),
        ([1.0], [1.0], [[2]], "0 or 1"),
    ],
)
def test_bad_input_is_named(alltoall, dw, allowed, message):
    with pytest.raises(InputError, match=message):
        WeightGradientInstance(np.array(alltoall), np.array(dw), np.array(allowed))
    with pytest.raises(InputError, match="'first'"):
        schedule_weight_gradients(CROSSING, algorithm="first")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0], "1 weight gradients instead of 2"),
        ([0, 2], "does not exist"),
        ([0, -2], "does not exist"),
        ([0, 0], "gradient 1 runs under all-to-all 0"),
        ([0, 0.5], "no whole number"),
    ],
)
def test_the_check_sees_every_broken_rule(answer, message):
    with pytest.raises(IllegalError, match=message):
        check_weight_gradients([1.0, 2.0], [3.0, 1.0], [[1, 1], [0, 1]], answer)
    assert check_weight_gradients([1.0, 2.5], [3.0, 1.0, 1.0], [[1, 1]] * 3, [0, 1, 1]) == 3.0
    assert check_weight_gradients([1.0, 2.5], [3.0, 1.0, 1.0], [[1, 1]] * 3, [-1, -1, 1]) == 1.0
