"""The all-to-alls of two models as one schedule of matchings (Aurora §6: |N^a + N^b|, table 2).

At most two all-to-alls of two colocated models are in flight at once, and the one that began first feeds computation that
the other one's must wait for. So the first keeps its own optimum, the busiest line of its bytes, and the second fills the
ports that idle meanwhile. A linear program finds the part of it that fits there so that the rest ends earliest: a
transportation problem with room for every line of the matrix. Together the two are one matrix, and its exact order is as
long as the first alone; the rest of the second goes after it, as the first of the next pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from engine.communication.order import order, pair_rate
from engine.communication.two_tier import COLUMNS, order_on
from engine.network import Network, off_diagonal
from engine.plan import Schedule
from engine.result import Stop, never

NOTHING = 1e-10
"""Part of the largest pair's bytes that is round-off."""
PREFER_MORE = 1e-6
"""Worth of a second sent during the first all-to-all, in seconds by which the rest ends earlier: it only breaks ties."""


def filling(network: Network, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """float64[src, dst]: the bytes of `second` to send together with all of `first`, no line longer than its longest.

    They are chosen so that the longest line of the rest is shortest. Fabric and links are two networks with lines of their
    own. Start-up times are left out.

    first, second: float64[src, dst] bytes, diagonal ignored
    """
    rate, away = pair_rate(network), ~np.eye(network.gpus, dtype=bool)
    parts = [part & away for part in (~network.linked, network.linked)]
    seconds = [np.where(part, first / rate, 0.0) for part in parts]
    lines = [np.concatenate([each.sum(axis=1), each.sum(axis=0)]) for each in seconds]  # of senders, then of receivers
    length = max(sums.max() for sums in lines)
    moved = np.zeros_like(second)
    if length == 0:
        return moved
    for part, taken in zip(parts, lines, strict=True):
        src, dst = np.nonzero(part & (second > 0))
        if len(src):
            wanted = second[src, dst] / rate[src, dst] / length
            share = _fill(src, dst, wanted, np.maximum(1.0 - taken / length, 0.0))
            moved[src, dst] = np.minimum(share * length * rate[src, dst], second[src, dst])
    left = second - moved
    return np.where(left <= NOTHING * second.max(), second, np.where(moved <= NOTHING * second.max(), 0.0, moved)) * away


def _fill(src: np.ndarray, dst: np.ndarray, wanted: np.ndarray, room: np.ndarray) -> np.ndarray:
    """float64[pair]: the part of `wanted` that fits into the room, float64[2·gpu], of both lines of every pair."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix, hstack, vstack

    pairs, gpus = len(src), len(room) // 2
    column = np.arange(pairs)
    ends = csr_matrix((np.ones(2 * pairs), (np.r_[src, dst + gpus], np.r_[column, column])), (2 * gpus, pairs))
    longest = -np.ones((2 * gpus, 1))
    limits = vstack([hstack([ends, csr_matrix((2 * gpus, 1))]), hstack([-ends, csr_matrix(longest)])])
    b_ub = np.r_[room, -(ends @ wanted)]
    bounds = [*((0.0, most) for most in wanted), (0.0, None)]
    answer = linprog(np.r_[np.full(pairs, -PREFER_MORE), 1.0], A_ub=limits.tocsr(), b_ub=b_ub, bounds=bounds, method="highs")
    return np.maximum(answer.x[:-1], 0.0)


@dataclass(eq=False)
class JointOrder:
    """One schedule of several all-to-alls, phase after phase, as it grows.

    `serve` adds bytes of an all-to-all, and `schedules` has the result.

    network: the network with the ports
    exchanges: number of all-to-alls
    """

    network: Network
    exchanges: int
    stop: Stop = never
    _sends: list[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    _duration: list[float] = field(default_factory=list)

    def serve(
        self, first: int, traffic: np.ndarray, begin: float, second: int, waiting: np.ndarray, release: float
    ) -> tuple[float, np.ndarray]:
        """Send all of the all-to-all `first` from `begin` on, and the part of `second` that fits, from `release` on.

        traffic, waiting: float64[src, dst] bytes of the two

        Returns the second at which the first has ended, start-ups included (`begin` if it has nothing to send), and the
        bytes of the second that are left.
        """
        left = off_diagonal(traffic)
        if release > begin:
            begin, left = self._alone(first, left, begin, release)
            if not left.any():
                return begin, waiting
            begin = max(begin, release)
        taken = filling(self.network, left, off_diagonal(waiting))
        schedule = self._order(left + taken)
        self._append((first, second), (left, taken), schedule)
        return begin + float(self._seconds(schedule).sum()), waiting - taken

    def schedules(self) -> list[Schedule]:
        """The part of each all-to-all. The phases are those of the whole, and so are their durations."""
        duration = np.array(self._duration)
        columns: list[list[list[np.ndarray]]] = [[[], [], [], []] for _ in range(self.exchanges)]
        for exchange, *parts in self._sends:
            for column, part in zip(columns[exchange], parts, strict=True):
                column.append(part)
        joined = [[np.concatenate(parts) if parts else np.zeros(0) for parts in each] for each in columns]
        return [Schedule(duration=duration, **dict(zip(COLUMNS, each, strict=True))) for each in joined]

    def _alone(self, first: int, traffic: np.ndarray, begin: float, until: float) -> tuple[float, np.ndarray]:
        """(second, bytes left) after the phases of one all-to-all that begin before `until`, the last cut there."""
        schedule = self._order(traffic)
        length = self._seconds(schedule)
        start = begin + np.concatenate([[0.0], np.cumsum(length)])
        begun = int(np.searchsorted(start[:-1], until))
        if begun == schedule.phases and start[-1] <= until:
            self._append((first, first), (traffic, np.zeros_like(traffic)), schedule)
            return float(start[-1]), np.zeros_like(traffic)
        # Every send of the last phase is cut at the same moment, start-ups not counted.
        start_up = length[begun - 1] - schedule.duration[begun - 1]
        lasts = min(max(until - start[begun - 1] - start_up, 0.0), schedule.duration[begun - 1])
        rate = pair_rate(self.network)[schedule.src, schedule.dst]
        size = np.where(schedule.phase == begun - 1, np.minimum(schedule.bytes, lasts * rate), schedule.bytes)
        here = (schedule.phase < begun) & (size > NOTHING * traffic.max())
        sent = np.zeros_like(traffic)
        np.add.at(sent, (schedule.src[here], schedule.dst[here]), size[here])
        left = np.where(traffic - sent > NOTHING * traffic.max(), traffic - sent, 0.0)
        duration = np.where(np.arange(begun) == begun - 1, lasts, schedule.duration[:begun])
        columns = (schedule.src, schedule.dst, size, schedule.phase)
        parts = {name: column[here] for name, column in zip(COLUMNS, columns, strict=True)}
        prefix = Schedule(duration=duration, **parts)
        self._append((first, first), (sent, np.zeros_like(sent)), prefix)
        return float(start[begun - 1] + (start_up + lasts if here[schedule.phase == begun - 1].any() else 0.0)), left

    def _order(self, traffic: np.ndarray) -> Schedule:
        return order_on(self.network, traffic, partial(order, mode="matched", stop=self.stop))[0]

    def _seconds(self, schedule: Schedule) -> np.ndarray:
        """float64[phase]: planned seconds of every phase, its longest start-up included."""
        start_up = np.zeros(schedule.phases)
        np.maximum.at(start_up, schedule.phase, self.network.start_up(schedule.src, schedule.dst))
        return schedule.duration + start_up

    def _append(self, exchanges: Sequence[int], parts: Sequence[np.ndarray], schedule: Schedule) -> None:
        """Add the phases of a schedule for the bytes of two all-to-alls together; a pair sends those of the first first."""
        gpus, base = self.network.gpus, len(self._duration)
        src, dst, size = schedule.src.astype(np.int64), schedule.dst.astype(np.int64), schedule.bytes
        pair = src * gpus + dst
        listed = np.argsort(pair, kind="stable")
        running = np.cumsum(size[listed])
        starts = np.flatnonzero(np.diff(pair[listed], prepend=-1))
        before = np.empty_like(size)
        sooner = running - size[listed]
        before[listed] = sooner - np.repeat(sooner[starts], np.diff(np.append(starts, len(pair))))
        of_first = np.clip(parts[0][src, dst] - before, 0.0, size)
        least = NOTHING * max((part.max(initial=0.0) for part in parts), default=0.0)
        of_first = np.where(of_first > size - least, size, np.where(of_first < least, 0.0, of_first))
        for exchange, bytes_sent in zip(exchanges, (of_first, size - of_first), strict=True):
            here = bytes_sent > 0
            self._sends.append((exchange, src[here], dst[here], bytes_sent[here], schedule.phase[here] + base))
        self._duration.extend(schedule.duration.tolist())
