"""Ranges and parts of a chain, held against a replay of every part and against all divisions of small chains."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError
from engine.overlap.partition import group_starts, partition
from engine.overlap.stage_pipeline import ChainInstance, overlap_bound
from engine.result import Result, Status
from tests.cases.examples import tried
from tests.cases.refusals import refusal
from tests.oracles.order_search import best_order_seconds, range_seconds
from tests.oracles.overlapping import check_partition

COMP, COMM = False, True


@st.composite
def chains(draw, ops: int = 7, parts: int = 3) -> ChainInstance:
    """A random chain; parts cost a little more than their share, some operators cannot be cut, some ranges neither."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, most = (int(rng.integers(1, largest + 1)) for largest in (ops, parts))  # drawn by hypothesis most would be 1 or 2
    whole = rng.integers(0, 12, count) if draw(st.booleans()) else rng.random(count) * 10.0 ** rng.integers(-2, 2)
    times = whole[:, None] / np.arange(1, most + 1) + draw(st.sampled_from([0.0, 0.02, 0.3]))
    times *= rng.uniform(0.8, 1.2, times.shape)
    times[:, 1:][rng.random((count, most - 1)) < draw(st.sampled_from([0.0, 0.15]))] = np.inf
    latest = None
    if draw(st.booleans()):
        latest = np.sort(rng.integers(-1, count, count))
    return ChainInstance(rng.random(count) < draw(st.sampled_from([0.3, 0.5])), times, latest)


def worth_of(result: Result, instance: ChainInstance, max_range: int | None = None) -> float:
    ranges = [(part_range.first, part_range.last, part_range.parts) for part_range in result.solution]
    return replayed(ranges, instance, max_range)


def replayed(ranges: Sequence[tuple[int, int, int]], instance: ChainInstance, max_range: int | None = None) -> float:
    network, times = instance.network.tolist(), instance.times.tolist()
    return check_partition(ranges, network, times, instance.latest_last.tolist(), max_range)


def best_by_trying_all(instance: ChainInstance, borders: Sequence[int], max_range: int | None = None) -> float:
    """The least over every division of the chain into ranges that start at some of `borders`, in every number of parts."""
    cost = cache(lambda *part_range: cost_of(part_range, instance, max_range))  # the same in every division
    best = np.inf
    for chosen in product([False, True], repeat=len(borders)):
        starts = [0, *(border for border, taken in zip(borders, chosen, strict=True) if taken), instance.ops]
        for parts in product(range(1, instance.max_parts + 1), repeat=len(starts) - 1):
            best = min(best, sum(cost(a, b - 1, k) for (a, b), k in zip(pairwise(starts), parts, strict=True)))
    return best


def cost_of(part_range: tuple[int, int, int], instance: ChainInstance, max_range: int | None) -> float:
    first, last, _ = part_range
    before = [(op, op, 1) for op in range(first)]
    after = [(op, op, 1) for op in range(last + 1, instance.ops)]
    try:
        whole = replayed([*before, part_range, *after], instance, max_range)
    except IllegalError:
        return np.inf
    return whole - instance.times[:first, 0].sum() - instance.times[last + 1 :, 0].sum()


@tried(60, chains(ops=14, parts=6), st.data())
def test_a_range_takes_as_long_as_its_replay(instance, data):
    first = data.draw(st.integers(0, instance.ops - 1))
    allowed = int(instance.latest_last[first])
    for last in {first, instance.ops - 1, min(max(allowed, first), instance.ops - 1), min(allowed + 1, instance.ops - 1)}:
        for parts in range(1, instance.max_parts + 1):
            if last >= first:
                seconds = range_seconds(instance, first, last, parts)
                assert seconds == pytest.approx(cost_of((first, last, parts), instance, None), rel=1e-9, abs=1e-9)


@tried(200, chains(), st.one_of(st.none(), st.integers(1, 4)), st.sampled_from((None, 1, 2)))
def test_nothing_beats_the_answer(instance, max_range, max_parts):
    result = partition(instance, max_range=max_range, max_parts=max_parts)
    instance = ChainInstance(instance.network, instance.times[:, :max_parts], instance.latest_last)
    assert result.objective == pytest.approx(worth_of(result, instance, max_range), rel=1e-9)
    expected = best_by_trying_all(instance, range(1, instance.ops), max_range)
    assert result.objective == pytest.approx(expected, rel=1e-9, abs=1e-9)
    unlimited = best_by_trying_all(instance, range(1, instance.ops))
    assert result.bound == pytest.approx(unlimited, rel=1e-9, abs=1e-9)
    reached = expected <= unlimited + 1e-9
    assert result.status is (Status.OPTIMAL if reached else Status.FEASIBLE)


@tried(100, chains(), st.floats(0.01, 20), st.one_of(st.none(), st.integers(1, 3)))
def test_groups_stay_together_and_are_divided_best(instance, group_seconds, max_range):
    starts = group_starts(instance, group_seconds).tolist()
    result = partition(instance, group_seconds=group_seconds, max_range=max_range)
    assert {part_range.first for part_range in result.solution} <= set(starts)
    group = {start: number for number, start in enumerate([*starts, instance.ops])}
    assert all(
        group[part_range.last + 1] - group[part_range.first] <= (max_range or instance.ops) for part_range in result.solution
    )
    assert result.objective == pytest.approx(worth_of(result, instance), rel=1e-9)
    assert result.objective >= partition(instance).objective * (1 - 1e-12)
    if max_range is None:
        assert result.objective == pytest.approx(best_by_trying_all(instance, starts[1:]), rel=1e-9, abs=1e-9)


@tried(60, chains(ops=12), st.floats(0.01, 20))
def test_groups_are_full_but_not_overfull(instance, group_seconds):
    starts = group_starts(instance, group_seconds)
    whole = instance.times[:, 0]
    for first, end in pairwise([*starts, instance.ops]):
        assert end - first == 1 or whole[first:end].sum() <= group_seconds * (1 + 1e-9)
        assert len(set(instance.network[first:end])) == 1
        if end < instance.ops and instance.network[end] == instance.network[first]:
            assert whole[first : end + 1].sum() > group_seconds * (1 - 1e-9)


@tried(60, chains(ops=20, parts=6), st.integers(0, 20))
def test_a_stopped_search_leaves_a_legal_answer(instance, calls):
    asked = iter(range(calls))
    result = partition(instance, stop=lambda: next(asked, None) is None)
    assert result.objective == pytest.approx(worth_of(result, instance), rel=1e-9)
    assert result.bound <= result.objective
    assert result.status is (Status.OPTIMAL if calls >= instance.ops else Status.CANCELLED)


@tried(60, chains(ops=8, parts=3))
def test_the_overlap_bound_holds_for_every_order(instance):
    bound = overlap_bound(instance)
    assert bound <= partition(instance).objective * (1 + 1e-12)
    streams = np.flatnonzero(np.diff(instance.network, prepend=~instance.network[0]))
    for parts in range(1, instance.max_parts + 1):
        stages = np.add.reduceat(instance.times[:, parts - 1], streams).tolist()
        if np.isfinite(stages).all():
            assert bound <= best_order_seconds(stages, parts) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("network", "times", "expected"),
    [
        ([COMP, COMM, COMP], [[3, 1], [6, 3], [3, 2]], 6 + 1 + 2),  # the network, one part before it, one behind
        ([COMM, COMP, COMM], [[1, 1], [6, 2], [1, 0.25]], 4 + 1 + 0.25),  # cut in two the computation takes 2 · 2
        ([COMP, COMP], [[1, np.inf], [2, 0.5]], 1 + 2 * 0.5),
    ],
)
def test_the_overlap_bound_by_hand(network, times, expected):
    assert overlap_bound(ChainInstance(network, times)) == expected


def all_interleavings(stages: Sequence[float], done: tuple[int, ...], time: tuple[float, ...]) -> float:
    """The shortest schedule over every sequence of (part, its next stage), each put at the end of its stream."""
    parts = len(done)
    ends = [max(time)] if min(done) == len(stages) else []
    for part in range(parts):
        if done[part] < len(stages):
            later, stream = list(time), parts + done[part] % 2
            later[part] = later[stream] = max(time[part], time[stream]) + stages[done[part]]
            ends.append(all_interleavings(stages, (*done[:part], done[part] + 1, *done[part + 1 :]), tuple(later)))
    return min(ends)


@pytest.mark.parametrize(("count", "parts", "instances"), [(4, 2, 60), (5, 2, 60), (6, 2, 40), (3, 3, 20)])
def test_no_interleaving_beats_the_order_search(count, parts, instances):
    rng = np.random.default_rng(count)
    for _ in range(instances):
        stages = (10.0 ** rng.uniform(-1.5, 0, count)).tolist()
        expected = all_interleavings(stages, (0,) * parts, (0.0,) * (parts + 2))
        assert best_order_seconds(stages, parts) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ChainInstance([], np.empty((0, 2))), "not empty"),
        (lambda: ChainInstance([COMP], np.empty((1, 0))), "not empty"),
        (lambda: ChainInstance([COMP, COMM], [[1.0]]), "shape"),
        (lambda: ChainInstance([COMP], [[1.0, np.nan]]), "at least 0"),
        (lambda: ChainInstance([COMP], [[np.inf, 1.0]]), "one part"),
        (lambda: ChainInstance([COMP, COMP], [[1.0], [1.0]], [0]), "latest_last"),
        (lambda: partition(ChainInstance([COMP], [[1.0]]), max_range=0), "max_range"),
        (lambda: partition(ChainInstance([COMP], [[1.0]]), max_parts=0), "max_parts"),
        (lambda: partition(ChainInstance([COMP], [[1.0]]), group_seconds=0.0), "group_seconds"),
    ],
)
def test_bad_input_is_said(build, message):
    assert message in refusal(build)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 1, 1)], "end at operator 1"),
        ([(0, 0, 1), (2, 2, 1)], "does not start"),
        ([(0, 3, 1)], "beyond"),
        ([(0, 2, 3)], "3 parts"),
        ([(0, 2, 2)], "more than 2"),
        ([(0, 0, 1), (1, 2, 2)], "may be cut up to 1"),
        ([(0, 1, 2), (2, 2, 1)], "cannot be cut"),
    ],
)
def test_the_check_refuses_what_breaks_a_rule(ranges, message):
    with pytest.raises(IllegalError, match=message):
        check_partition(ranges, [COMP, COMM, COMP], [[2, 1], [2, np.inf], [2, 1]], [2, 1, 2], max_range=2)
