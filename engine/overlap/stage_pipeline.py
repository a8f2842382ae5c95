"""The time of a range of a chain of operators that is cut into parts which overlap each other (Lancet §5.3).

Consecutive operators of a range on one stream form a stage. There is one compute and one network stream; each runs all
parts of a stage, in index order, before the next stage (stage-major). Part p of stage s starts after part p of stage
s - 1 and after whatever is before it on its stream. Stages alternate between the streams, so that is stage s - 2.

Lancet simulates every part of every stage. Here two numbers a stage are enough. With d seconds a part, R when the first
part may start, and f(p) when part p of the stage before ends, part p ends at

    d + max over q <= p of (max(f(q), R if q = 0) + (p - q) d).

If f is convex in p, that maximum is at q = 0 or at q = p, which gives max(R + (p + 1) d, f(p) + d): convex again, and
the first stage is a line. So the ends of the first and of the last part follow from those of the stages before alone.
"""

from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.result import Bools, Floats, Ints


@dataclass(frozen=True)
class ChainInstance:
    """A chain of operators, each of which needs the one before it.

    network: bool[op], True for communication, False for computation
    times: float64[op, K] seconds of ONE part when the operator is cut into 1 ... K parts, at least 0; infinite where it
        cannot be cut so. The first column is the whole operator and finite.
    latest_last: int64[op] or None: the last operator up to which a range that starts here may be cut into two or more
        parts; before the operator itself: not at all. None: every range may be cut. A rule of that form suffices,
        because a range that can be cut can also be cut when it ends earlier (see `operator_axes.latest_last`).

    Raises InputError if a shape or a value is wrong.
    """

    network: Bools
    times: Floats
    latest_last: Ints | None = None

    def __post_init__(self) -> None:
        network, times = np.asarray(self.network, dtype=bool), np.asarray(self.times, dtype=np.float64)
        ops = len(network) if network.ndim == 1 else 0
        if ops == 0 or times.ndim != 2 or len(times) != ops or times.shape[1] == 0:
            raise InputError(f"times: shape {times.shape} beside network {network.shape}; wanted [op, K] and [op], not empty")
        if np.isnan(times).any() or times.min() < 0 or not np.isfinite(times[:, 0]).all():
            raise InputError("times: every value must be at least 0, and finite for the whole operator (one part)")
        with np.errstate(over="ignore"):
            work = times * np.arange(1, times.shape[1] + 1)
            if not np.isfinite(work[np.isfinite(times)].sum()):
                raise InputError("times: the values are too large to have a finite sum")
        latest = np.full(ops, ops - 1) if self.latest_last is None else np.asarray(self.latest_last, dtype=np.int64)
        if latest.shape != (ops,):
            raise InputError(f"latest_last: shape {latest.shape}; wanted one operator for each of the {ops}")
        for name, value in (("network", network), ("times", times), ("latest_last", latest)):
            object.__setattr__(self, name, value)

    @property
    def ops(self) -> int:
        return len(self.network)

    @property
    def max_parts(self) -> int:
        return self.times.shape[1]

    @property
    def sequential(self) -> float:
        """Seconds of the chain when nothing is cut."""
        return float(self.times[:, 0].sum())

    def begins_stage(self, op: int) -> bool:
        """True if the operator is on another stream than the one before it."""
        return op > 0 and bool(self.network[op] != self.network[op - 1])


class Pipelines:
    """Many ranges that grow by the same operators, each in every number of parts at once.

    A range starts with the first `extend` that names it. All arrays are float64[count, start] seconds since the start of
    the range.

    parts: int64[count], the numbers of parts
    starts: number of ranges
    """

    def __init__(self, parts: Ints, starts: int) -> None:
        self.parts = parts[:, None]
        self.may_start = np.zeros((len(parts), starts))
        """Start of the last stage's first part, at the earliest."""
        self.before = np.zeros((len(parts), starts))
        """End of the last part of the stage before it."""
        self.stage = np.zeros((len(parts), starts))
        """Seconds of one part of the last stage so far."""

    def extend(self, seconds: Floats, begins_stage: bool, ranges: slice = slice(None)) -> None:
        """Add one operator to the end of some ranges; seconds: float64[count], the time of one part."""
        may_start, before, stage = self.may_start[:, ranges], self.before[:, ranges], self.stage[:, ranges]
        if begins_stage:
            end = self.end(ranges)
            np.maximum(before, may_start + stage, out=may_start)
            before[:] = end
            stage[:] = 0.0
        stage += seconds[:, None]

    def end(self, ranges: slice = slice(None)) -> Floats:
        """End of the last part of the last stage, and so of the range."""
        stage = self.stage[:, ranges]
        return np.maximum(self.may_start[:, ranges] + self.parts * stage, self.before[:, ranges] + stage)


def overlap_bound(instance: ChainInstance) -> float:
    """Seconds below which no cutting of the chain gets, whatever the ranges and the order of the parts.

    A stream works for at least the sum over its operators of the least k times[k], whatever k each gets. It cannot
    start before one part of every operator ahead of its first one is done, and one part of every operator behind its
    last one is still to come when it has finished.
    """
    parts = np.arange(1, instance.max_parts + 1)
    work, one_part = (instance.times * parts).min(axis=1), instance.times.min(axis=1)
    bound = 0.0
    for stream in (instance.network, ~instance.network):
        if stream.any():
            own = np.flatnonzero(stream)
            idle = one_part[: own[0]].sum() + one_part[own[-1] + 1 :].sum()
            bound = max(bound, float(work[stream].sum() + idle))
    return bound
