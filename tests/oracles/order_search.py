"""The best order of the parts of a cut range, by trying all of them, to measure the loss of stage-major order (Lancet §5.3).

Stage-major order is optimal for a dispatch, experts and a combine, but not for longer ranges, where it can pay to run a
later stage of the first part before an earlier stage of the last.
"""

import math
from collections.abc import Sequence

import numpy as np

from engine.overlap.stage_pipeline import ChainInstance, Pipelines

MOST_PARTS = 3

Times = tuple[float, ...]
"""When the last finished stage of every part ended, the part that is furthest first, and when both streams are free."""


def best_order_seconds(stages: Sequence[float], parts: int) -> float:
    """Least seconds of a range over all orders in which its two streams can run the parts of its stages.

    stages: seconds of one part of every stage, stages alternating between the streams. At most `MOST_PARTS` parts, for
    the orders multiply (see `tests.benchmarks.bench_overlap` for how long it takes).

    A schedule is a sequence of (part, its next stage), each put at the end of its stream. States with the same stages
    done differ only in times; one that is nowhere earlier than another is dropped, and so is one that cannot end before a
    known schedule. The parts are alike and may change places.
    """
    assert 1 <= parts <= MOST_PARTS
    best = _stage_major(stages, parts)
    rest = [sum(stages[done:]) for done in range(len(stages) + 1)]
    rest_of_stream = [[sum(stages[done + (done + s) % 2 :: 2]) for s in (0, 1)] for done in range(len(stages) + 1)]
    front: dict[tuple[int, ...], list[Times]] = {(0,) * parts: [(0.0,) * (parts + 2)]}
    for _ in range(parts * len(stages)):
        following: dict[tuple[int, ...], set[Times]] = {}
        for done, states in front.items():
            # Of parts equally far only the one that is ready first goes on: the others could take its place.
            movable = [part for part in range(parts) if done[part] < len(stages) and done[part] not in done[:part]]
            for part in movable:
                stream, key = (done[part] % 2, tuple(done[other_part] + (other_part == part) for other_part in range(parts)))
                order = sorted(range(parts), key=lambda other_part, key=key: -key[other_part])
                key = tuple(key[ordered_part] for ordered_part in order)
                after = following.setdefault(key, set())
                work = [sum(rest_of_stream[count][s] for count in key) for s in (0, 1)]
                for time in states:
                    moved = list(time)
                    moved[part] = moved[parts + stream] = max(time[part], time[parts + stream]) + stages[done[part]]
                    ready = [moved[ordered_part] for ordered_part in order]
                    at_least = max(
                        moved[parts] + work[0],
                        moved[parts + 1] + work[1],
                        *(now + rest[count] for now, count in zip(ready, key, strict=True)),
                    )
                    if at_least < best:
                        after.add((*_sorted_within(ready, key), *moved[parts:]))
        front = {key: _earliest(states) for key, states in following.items() if states}
    return min((max(time) for states in front.values() for time in states), default=best)


def _stage_major(stages: Sequence[float], parts: int) -> float:
    """The schedule of the paper, part by part."""
    free, end = [0.0, 0.0], [0.0] * parts
    for stage, seconds in enumerate(stages):
        for part in range(parts):
            free[stage % 2] = end[part] = max(free[stage % 2], end[part]) + seconds
    return end[-1]


def _sorted_within(ready: list[float], done: tuple[int, ...]) -> list[float]:
    """Parts that are equally far, the first ready first."""
    return [now for _, now in sorted(zip((-count for count in done), ready, strict=True))]


def _earliest(states: set[Times]) -> list[Times]:
    """The states that no other one is nowhere later than."""
    kept: list[Times] = []
    for time in sorted(states):
        if not any(all(a <= b for a, b in zip(other, time, strict=True)) for other in kept):
            kept.append(time)
    return kept


def range_seconds(instance: ChainInstance, first: int, last: int, parts: int) -> float:
    """Seconds of the operators first ... last in stage-major order, cut into `parts` parts (1: the plain sum); infinite if they
    must not be cut so."""
    if parts > 1 and last > instance.latest_last[first]:
        return math.inf
    pipeline = Pipelines(np.array([parts]), 1)
    for op in range(first, last + 1):
        pipeline.extend(instance.times[op, parts - 1 : parts], instance.begins_stage(op))
    return float(pipeline.end()[0, 0])
