"""The ranges of a chain of operators to cut, and their numbers of parts: a dynamic programme (Lancet §5.1).

T(0) = 0 and T(n) = min over i < n of T(i) + min over k of P(i+1 ... n, k), where P is the time of a range in k parts
and ranges run one after another. The paper prints i >= 1 without a base case and counts operator i twice.

The ranges that end at an operator are all one operator longer than those that end before it, so one `Pipelines` holds
all of them in every number of parts: an operator costs a handful of array operations, and no P is ever stored.
"""

import time
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.overlap.stage_pipeline import ChainInstance, Pipelines, overlap_bound
from engine.result import Ints, Result, Status, Stop, never, result_of

MEETS = 1e-9
"""An objective this close to its bound, relatively, is optimal."""


@dataclass(frozen=True, order=True)
class Range:
    """The operators first ... last, cut into `parts` parts; 1: not partitioned, they run one after another."""

    first: int
    last: int
    parts: int


def partition(
    instance: ChainInstance,
    stop: Stop = never,
    *,
    max_range: int | None = None,
    max_parts: int | None = None,
    group_seconds: float | None = None,
) -> Result[tuple[Range, ...]]:
    """The ranges that cover the chain in the least time, in order; `objective` is end-to-end seconds.

    max_range: the most groups in a range (Lancet's ι); operators, if there are no groups; None: no limit
    max_parts: the most parts of a range (Lancet's ρ); None: as many as the instance has times for
    group_seconds: cut the chain only between groups of consecutive operators of one stream of at most this length
        (Lancet's γ); None: between any two operators

    Exact among all divisions into ranges and parts that these allow, the parts in stage-major order. `bound` is the
    least time without `max_range` and `group_seconds`, and status OPTIMAL means that it is reached, FEASIBLE that it is
    not. `overlap_bound` holds for any order of the parts. When `stop` answers True, operators not decided yet stay
    uncut, the status is CANCELLED and the bound is `overlap_bound`. Raises InputError for options below 1 part or
    operator and group lengths that are not positive.
    """
    start = time.perf_counter()
    for name, value in (("max_range", max_range), ("max_parts", max_parts)):
        if value is not None and value < 1:
            raise InputError(f"{name}: {value}; wanted at least 1")
    if group_seconds is not None and not group_seconds > 0:
        raise InputError(f"group_seconds: {group_seconds}; wanted a positive time")
    narrow = ChainInstance(instance.network, instance.times[:, :max_parts], instance.latest_last)
    starts = group_starts(narrow, group_seconds)
    best = _search(narrow, starts, max_range or len(starts), stop)
    bound = overlap_bound(narrow)
    if not best.finished:
        status = Status.CANCELLED
    else:
        exact = best
        if len(starts) < narrow.ops or (max_range or narrow.ops) < narrow.ops:
            exact = _search(narrow, np.arange(narrow.ops), narrow.ops, stop)
        if exact.finished:
            bound = exact.objective
        status = Status.OPTIMAL if best.objective <= bound * (1 + MEETS) else Status.FEASIBLE
    options = {"max_range": max_range, "max_parts": max_parts, "group_seconds": group_seconds}
    given = {name: value for name, value in options.items() if value is not None}
    return result_of("partition", start, status, best.objective, min(bound, best.objective), best.ranges, given)


def group_starts(instance: ChainInstance, group_seconds: float | None) -> Ints:
    """int64[group], the first operator of every group (see `partition`).

    A group ends where the stream changes, so that the cuts right before and after an all-to-all stay possible.
    """
    if group_seconds is None:
        return np.arange(instance.ops)
    starts, length = [0], 0.0
    for op in range(instance.ops):
        length += instance.times[op, 0]
        if op > 0 and (instance.begins_stage(op) or length > group_seconds):
            starts.append(op)
            length = instance.times[op, 0]
    return np.array(starts)


@dataclass(frozen=True)
class _Search:
    objective: float
    ranges: tuple[Range, ...]
    finished: bool


def _search(instance: ChainInstance, starts: Ints, max_range: int, stop: Stop) -> _Search:
    """The dynamic programme over the groups that begin at `starts` int64[group]."""
    groups = len(starts)
    ends = np.append(starts[1:], instance.ops)
    parts = np.arange(2, instance.max_parts + 1)
    pipelines = Pipelines(parts, groups)
    total = np.zeros(groups + 1)
    """T(n): float64[groups done]."""
    cut: list[tuple[int, int]] = []
    """For every group the (first group, parts) of the best range that ends with it."""
    for group in range(groups):
        if stop():
            break
        # Only starts from which a range of at most max_range groups still reaches this group go on growing.
        window = slice(max(0, group + 1 - max_range), group + 1)
        for op in range(starts[group], ends[group]):
            pipelines.extend(instance.times[op, 1:], instance.begins_stage(op), window)
        whole = total[group] + instance.times[starts[group] : ends[group], 0].sum()
        total[group + 1] = whole
        cut.append((group, 1))
        if len(parts):
            seconds = pipelines.end(window)
            best = seconds.argmin(axis=0)
            reach = total[window] + seconds[best, np.arange(len(best))]
            reach[instance.latest_last[starts[window]] < ends[group] - 1] = np.inf
            first = int(reach.argmin())
            if reach[first] < whole:
                total[group + 1] = reach[first]
                cut[-1] = (window.start + first, int(parts[best[first]]))
    decided, done = len(cut), []
    group = decided
    while group > 0:
        first, count = cut[group - 1]
        done.append((first, group - 1, count))
        group = first
    done.reverse()
    done += [(group, group, 1) for group in range(decided, groups)]
    rest = instance.times[ends[decided - 1] if decided else 0 :, 0].sum()
    ranges = tuple(Range(int(starts[a]), int(ends[b]) - 1, count) for a, b, count in _merged(done, max_range))
    return _Search(float(total[decided] + rest), ranges, decided == groups)


def _merged(ranges: list[tuple[int, int, int]], max_range: int) -> list[tuple[int, int, int]]:
    """Neighbours that are not cut as one range, as far as the limit allows: fewer ranges, the same time."""
    merged: list[tuple[int, int, int]] = []
    for first, last, parts in ranges:
        if merged and parts == 1 == merged[-1][2] and last - merged[-1][0] < max_range:
            first = merged.pop()[0]
        merged.append((first, last, parts))
    return merged
