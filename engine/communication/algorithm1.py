"""Aurora's printed ordering rule (Algorithm 1), kept because people compare `order` with it.

It avoids conflicts but never moves a transfer that it has placed, so it can miss the bound of Theorem 4.2; a
three-by-three matrix is enough.
"""

import time

import numpy as np

from engine.communication.order import Sends, checked_traffic, matched_bound, matched_schedule, met, pair_seconds, rotation
from engine.communication.relays import counted
from engine.errors import StoppedError
from engine.plan import Schedule
from engine.result import Result, Stop, never, result_of

SLIVER = 1e-12
"""Times that differ by less than this share of the bound differ by rounding."""


def algorithm1(traffic: np.ndarray, send: np.ndarray, receive: np.ndarray, stop: Stop = never) -> Result[Schedule]:
    """A matched order by Algorithm 1 of Aurora (§4.2), first-fit on volumes in place of token slots.

    traffic: float64[src, dst] bytes, diagonal ignored
    send, receive: float64[gpu] bytes/s

    Status OPTIMAL when the makespan meets `matched_bound`, else FEASIBLE. Raises InputError like `order`, and StoppedError
    once `stop` answers True. The printed text leaves five things open, read so:

    * The traffic of a GPU (lines 2 and 6) is the busier of its two directions, in seconds at pairwise rates.
    * A GPU handles its receives as well as its sends (lines 4 and 10), the busier direction first, so that the
      bottleneck direction runs without a pause.
    * The order within a direction (random in line 3, unsaid in line 8) is the longest transfer first.
    * GPUs are sorted once (line 6), after the bottleneck's traffic is removed: the loop of line 7 then empties D.
    * To avoid conflicts (line 8) is to take the earliest times at which both ends are free, split over gaps if need be.
    """
    started = time.perf_counter()
    traffic, send, receive = checked_traffic(traffic, send, receive)
    bound = matched_bound(traffic, send, receive)
    seconds = pair_seconds(traffic, send, receive)
    schedule = matched_schedule(traffic, send, receive, _phases(seconds, _first_fit(seconds, SLIVER * bound, stop), bound))
    makespan = schedule.makespan
    return result_of("order/algorithm1", started, met(makespan, bound), makespan, bound, schedule)


def _first_fit(seconds: np.ndarray, sliver: float, stop: Stop) -> np.ndarray:
    """float64[piece, 4]: src, dst, start and end of every piece of every transfer, gaps below `sliver` left unused."""
    n = len(seconds)
    free = np.array([[0.0, np.inf]])
    sender_free, receiver_free = [free] * n, [free] * n
    left = seconds.copy()
    pieces = []

    def handle(gpu: int) -> None:
        sends = [(gpu, peer) for peer in _longest_first(left[gpu])]
        receives = [(peer, gpu) for peer in _longest_first(left[:, gpu])]
        sends_first = left[gpu].sum() >= left[:, gpu].sum()
        for src, dst in sends + receives if sends_first else receives + sends:
            # The parts longer than `sliver` of the intersection of two sorted lists of intervals.
            mine, theirs = sender_free[src], receiver_free[dst]
            # Interval k of the first meets those of the second that end after it starts and start before it ends.
            first = np.searchsorted(theirs[:, 1], mine[:, 0], side="right")
            count = np.searchsorted(theirs[:, 0], mine[:, 1], side="left") - first
            a = np.repeat(np.arange(len(mine)), count)
            b = counted(count) + first[a]
            both = np.stack([np.maximum(mine[a, 0], theirs[b, 0]), np.minimum(mine[a, 1], theirs[b, 1])], axis=1)
            used = _earliest(both[both[:, 1] - both[:, 0] > sliver], left[src, dst])
            pieces.extend((src, dst, start, end) for start, end in used)
            sender_free[src] = _without(sender_free[src], used)
            receiver_free[dst] = _without(receiver_free[dst], used)
            left[src, dst] = 0.0

    def load() -> np.ndarray:
        return np.maximum(left.sum(axis=0), left.sum(axis=1))

    if n:
        handle(int(np.argmax(load())))
        for gpu in np.argsort(-load(), kind="stable"):
            if stop():
                raise StoppedError("stopped before Algorithm 1 had ordered all sends")
            handle(int(gpu))
    return np.array(pieces).reshape(-1, 4)


def _longest_first(seconds: np.ndarray) -> list[int]:
    order = np.argsort(-seconds, kind="stable")
    return order[: np.count_nonzero(seconds)].tolist()


def _earliest(intervals: np.ndarray, length: float) -> np.ndarray:
    """The first `length` seconds of sorted intervals of which the last one is endless."""
    filled = np.cumsum(intervals[:, 1] - intervals[:, 0])
    last = int(np.searchsorted(filled, length))
    used = intervals[: last + 1].copy()
    used[last, 1] = used[last, 0] + length - (filled[last - 1] if last else 0.0)
    return used


def _without(free: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Sorted free intervals after taking away sorted intervals that lie inside them."""
    edges = np.sort(np.concatenate([free.ravel(), used.ravel()])).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def _phases(seconds: np.ndarray, pieces: np.ndarray, bound: float) -> list[Sends]:
    """Cut the pieces at every time at which one starts or ends: between two such times the sends are one matching."""
    times = np.unique(pieces[:, 2:])
    times = times[np.diff(times, prepend=-np.inf) > SLIVER * bound]
    first, last = (np.searchsorted(times, pieces[:, k], side="right") - 1 for k in (2, 3))
    count = last - first
    piece = np.repeat(np.arange(len(pieces)), count)
    phase = counted(count) + first[piece]
    by_phase = np.argsort(phase, kind="stable")
    piece, phase = piece[by_phase], phase[by_phase]
    src, dst = pieces[piece, 0].astype(np.int64), pieces[piece, 1].astype(np.int64)
    columns = (src, dst, np.diff(times)[phase])
    cuts = np.flatnonzero(np.diff(phase)) + 1
    phases = list(zip(*(np.split(column, cuts) for column in columns), strict=True)) if len(piece) else []
    unsent = seconds.copy()
    unsent[src, dst] = 0.0  # transfers too short to show between two cuts
    return phases + rotation(unsent)
