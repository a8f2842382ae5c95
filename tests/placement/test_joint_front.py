"""The front between affinity and balance has no beaten point and ends near the optima; plans scored on several workloads."""

import time
from itertools import pairwise, permutations, product

import numpy as np
import pytest

from engine.errors import InputError
from engine.placement.joint.front import FrontPoint, front
from engine.placement.joint.instance import JointInstance, equal_slots
from engine.placement.joint.kernel import _all_placements, place_jointly
from engine.placement.robust import score_matrix
from engine.result import Limits
from tests.cases.placements import random_instance, random_start, recorded_like
from tests.oracles.placing import check_joint


def check_points(points: list[FrontPoint], instance: JointInstance, most: int, worst: bool = True, **limits) -> None:
    """Every figure as the validator sees it, in order, none beaten, no more than asked for."""
    assert 1 <= len(points) <= most
    for point in points:
        tables = zip(instance.transitions, instance.load, strict=True)
        checks = [check_joint(point.gpu_of_expert, *pair, instance.slots, **limits) for pair in tables]
        for name in ("kept_share", "balancedness", "imbalance", "hop_cost_share"):
            expected = [getattr(check, name) for check in checks]
            np.testing.assert_allclose(getattr(point.figures, name), expected, atol=1e-9)
        least, most_of = (min, max) if worst else (np.mean, np.mean)
        assert point.kept_share == pytest.approx(least([check.kept_share for check in checks]), abs=1e-9)
        assert point.balancedness == pytest.approx(least([check.balancedness for check in checks]), abs=1e-9)
        assert point.hop_cost_share == pytest.approx(most_of([check.hop_cost_share for check in checks]), abs=1e-9)
        assert point.moves == checks[0].moves
    assert [point.hop_cost_share for point in points] == sorted(point.hop_cost_share for point in points)
    for first, second in permutations(points, 2):
        assert not first.beats(second)
        alike = abs(first.hop_cost_share - second.hop_cost_share) + abs(first.balancedness - second.balancedness)
        assert alike > 1e-9


@pytest.mark.parametrize("worst", [True, False])
def test_none_beats_another_and_the_ends_are_near_the_extremes(worst):
    instance = recorded_like(layers=4, workloads=2)
    workloads = "worst" if worst else "mean"
    points = front(instance, points=6, workloads=workloads, kicks=6)
    check_points(points, instance, 6, worst)
    assert len(points) >= 4
    ends = (place_jointly(instance, weight=weight, workloads=workloads, kicks=6).solution for weight in (1.0, 0.0))
    affinity, balance = map(instance.figures, ends)
    aggregate = np.min if worst else np.mean
    assert points[0].kept_share > 0.98 * aggregate(affinity.kept_share)
    assert points[-1].balancedness > 0.99 * aggregate(balance.balancedness)
    assert points[0].balancedness < 0.95 * points[-1].balancedness
    assert points[-1].kept_share < 0.9 * points[0].kept_share


def test_between_the_ends_it_bends_outwards_and_the_same_seed_gives_the_same():
    """Some point is well above the straight line between the ends: a bit of one aim buys much of the other."""
    points, again = (front(recorded_like(), Limits(60, seed=3), points=5, kicks=6) for _ in range(2))
    kept = np.array([point.kept_share for point in points])
    even = np.array([point.balancedness for point in points])
    kept, even = (kept - kept.min()) / np.ptp(kept), (even - even.min()) / np.ptp(even)
    assert (kept + even).max() > 1.2
    assert [point.gpu_of_expert.tolist() for point in points] == [point.gpu_of_expert.tolist() for point in again]


@pytest.mark.parametrize("seed", range(6))
def test_no_placement_at_all_beats_the_corners(seed):
    """Tiny instances, every search exact: no placement has a better weighted sum, so corners cannot be beaten."""
    instance = random_instance((2, 2) if seed % 2 else (1, 1, 1), 3, 1, seed)
    points = front(instance, points=6)
    check_points(points, instance, 6)
    every = [instance.figures(np.array(rows)) for rows in product(_all_placements(instance.slots), repeat=3)]
    hops = np.array([figures.hop_cost_share[0] for figures in every])
    imbalance = np.array([figures.imbalance[0] for figures in every])
    for point in (points[0], points[-1]):
        assert not ((hops < point.hop_cost_share - 1e-9) & (imbalance < point.figures.imbalance[0] - 1e-9)).any()
    assert points[0].hop_cost_share <= hops.min() + 0.02
    assert points[-1].figures.imbalance[0] <= imbalance.min() + 0.02


def test_all_points_keep_to_the_moves():
    instance = recorded_like()
    start = random_start(instance, 2)
    points = front(instance, points=5, start=start, max_moves=20, kicks=6)
    check_points(points, instance, 5, start=start, max_moves=20)
    assert max(point.moves for point in points) > 10
    assert [point.moves for point in front(instance, points=5, start=start, max_moves=0)] == [0]


def test_points_arrive_one_by_one():
    instance = recorded_like()
    seen = []
    points = front(instance, report=seen.append, points=5, kicks=8)
    assert 2 <= len(seen) <= 5
    assert not any(early.beats(point) for early in seen for point in points)
    assert not any(early.beats(late) for early, late in pairwise(seen))
    assert len({point.gpu_of_expert.tobytes() for point in seen}) == len(seen)
    for point in seen:
        check_points([point], instance, 1)


@pytest.mark.clock
def test_a_stop_after_the_second_point_and_the_time_limit_of_all():
    instance, seen = recorded_like(), []
    points = front(instance, stop=lambda: len(seen) >= 2, report=seen.append, points=9, kicks=10)
    assert len(seen) <= 3
    check_points(points, instance, 9)
    check_points(front(instance, stop=lambda: True, points=9), instance, 9)
    began = time.perf_counter()
    check_points(front(instance, Limits(0.4), points=5, kicks=10**6), instance, 5)
    assert time.perf_counter() - began < 2.5


def test_a_front_of_one_point_and_of_no_choice():
    instance = recorded_like()
    check_points(front(instance, points=1, kicks=10), instance, 1)
    alone = JointInstance(instance.transitions, instance.load, equal_slots(16, 1))
    assert [point.kept_share for point in front(alone, points=5)] == [pytest.approx(1.0)]
    with pytest.raises(InputError, match="points: 0"):
        front(instance, points=0)
    with pytest.raises(InputError, match="max_moves"):
        front(instance, points=3, max_moves=4)


def test_without_replicas_it_is_what_the_validator_counts():
    instance = random_instance((2, 2, 2), 4, 3, 0, "floats")
    places = [random_start(instance, seed) for seed in range(4)]
    scores = score_matrix([np.eye(3)[place] for place in places], list(instance.load), list(instance.transitions))
    tables = [*zip(instance.transitions, instance.load, strict=True)]
    checks = [[check_joint(place, *pair, instance.slots) for pair in tables] for place in places]
    for name in ("balancedness", "kept_share"):
        wanted = np.array([[getattr(check, name) for check in row] for row in checks])
        assert getattr(scores, name) == pytest.approx(wanted, abs=1e-12)


def test_replicas_by_hand():
    """Expert 0 half on each GPU, then expert 1: three quarters on GPU 0. In another unit, with other names, everywhere, and
    of nothing."""
    share = np.array([[[0.5, 0.5], [0.0, 1.0]], [[1.0, 0.0], [0.75, 0.25]]])
    tokens = np.array([[[4.0, 8.0], [0.0, 20.0]]])
    load = np.array([[12.0, 20.0], [4.0, 28.0]])
    kept = 4 * 0.5 + 8 * (0.5 * 0.75 + 0.5 * 0.25) + 20 * 0.25
    scores = score_matrix(
        [share, share[:, :, ::-1], np.full((2, 2, 2), 0.5)],
        [load, 1000 * load, np.array([[0.0, 0.0], [1.0, 3.0]])],
        [tokens, 1000 * tokens, np.zeros((1, 2, 2))],
    )
    balance = (16 / 26 + 16 / 25) / 2, (1 + 2 / 3.25) / 2
    assert scores.kept_share == pytest.approx(np.array([[kept / 32] * 2 + [1.0]] * 2 + [[0.5, 0.5, 1.0]]))
    assert scores.balancedness == pytest.approx(np.array([[balance[0]] * 2 + [balance[1]]] * 2 + [[1.0] * 3]))
    assert np.isnan(score_matrix([share], [load]).kept_share).all()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (([], [np.ones((1, 2))]), "at least one plan"),
        (([np.ones((1, 2, 2))], [np.ones((1, 2))]), "plan 0, layer 0, expert 0: the shares .* add up to 2"),
        (([np.full((1, 2, 2), -0.5)], [np.ones((1, 2))]), "plan 0"),
        (([np.full((1, 2, 2), 0.5)], [np.ones((2, 2))]), r"loads: workload 0 has shape \(2, 2\)"),
        (([np.full((1, 2, 2), 0.5), np.full((2, 2, 2), 0.5)], [np.ones((1, 2))]), "shares: plan 1 has shape"),
        (([np.full((2, 2, 2), 0.5)], [np.ones((2, 2))], [np.ones((2, 2, 2))]), "transitions: workload 0"),
        (([np.full((2, 2, 2), 0.5)], [np.ones((2, 2))], []), "of 0 workloads, but loads of 1"),
        (([np.full((2, 2, 2), 0.5)], [-np.ones((2, 2))]), "loads: workload 0: every value"),
    ],
)
def test_bad_scores(arguments, part):
    with pytest.raises(InputError, match=part):
        score_matrix(*arguments)
