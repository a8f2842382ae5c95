"""Several all-to-alls on one network, overlapping in time, simulated event by event as far as somebody needs to know.

When a collective of one model may start depends on when an earlier one ended, and that on what else was in flight. So
collectives are released one by one, and the simulation never runs ahead of the end that was asked for. Those in flight
at once share every port max-min fairly, send by send; one alone takes exactly as long as `network.all_to_all` says.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.network import Network
from engine.plan import OrderMode, Schedule
from engine.plan.replay import replay
from engine.simulate.flows import Flows, fair_rates

DONE = 1e-9
"""Part of its bytes that a send may lack when it has ended: without it, round-off would add endless tiny steps."""

COLUMNS = {"src": int, "dst": int, "out": int, "into": int, "lane": int} | dict.fromkeys(
    ("size", "left", "latency", "start", "end"), float
)


@dataclass(eq=False)
class _Lane:
    """Groups of sends of one collective (int64[send] each, the next one last): a group starts when the one before has
    ended. `unfinished` counts the sends in flight."""

    collective: "_Collective"
    groups: list[np.ndarray]
    unfinished: int = 0


@dataclass(eq=False)
class _Collective:
    sends: slice
    unfinished: int
    end: float | None = None


class Fabric:
    """A network and what is in flight on it. `now`: the second up to which it has been simulated."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.now = 0.0
        self._capacity = network.capacity
        self._collectives: dict[str, _Collective] = {}
        self._lanes: list[_Lane] = []
        self._send = {name: np.empty(0, dtype=kind) for name, kind in COLUMNS.items()}
        self._arrivals: list[tuple[float, int]] = []  # a heap: when a send's latency is over, the send
        self._active = np.empty(0, dtype=np.int64)

    def release(self, name: str, start: float, mode: OrderMode, schedule: Schedule | None, traffic: np.ndarray) -> None:
        """Let an all-to-all start at `start` seconds, not before `now`.

        concurrent: all sends at once, no schedule; sequential: every sender works through its own list; matched: the
        phases of the schedule one after another. traffic: float64[src, dst] bytes, diagonal ignored; the schedule may
        have been made for other traffic (see `replay`).

        Raises InputError for a name in use, a start in the past, and the modes `shared` and `two-tier`: their constant rates
        leave no room for a second collective.
        """
        if name in self._collectives:
            raise InputError(f"there already is a collective named {name}")
        if not start >= self.now:
            raise InputError(
                f"{name}: starts at {start:g} s, but the network is simulated up to {self.now:g} s already"
            )
        if mode in ("shared", "two-tier"):
            raise InputError(
                f"{name}: a {mode} order gives every send a constant rate of an otherwise idle network, which two "
                "models do not have; use a matched, sequential or concurrent order"
            )
        traffic = np.where(np.eye(self.network.gpus, dtype=bool), 0.0, traffic)
        if mode == "concurrent":
            src, dst = np.nonzero(traffic)
            size, lane, group = traffic[src, dst], np.zeros(len(src), dtype=int), np.zeros(len(src), dtype=int)
        else:
            src, dst, size, phase = replay(schedule, traffic)
            lane, group = (src, np.arange(len(src))) if mode == "sequential" else (np.zeros_like(src), phase)
        first = len(self._send["src"])
        collective = _Collective(slice(first, first + len(src)), len(src), None if len(src) else start)
        self._collectives[name] = collective
        out, into = self.network.ports(src, dst)
        latency, never = self.network.start_up(src, dst), np.full(len(src), np.nan)
        new = {"src": src, "dst": dst, "out": out, "into": into, "lane": len(self._lanes) + _ranks(lane), "size": size}
        new |= {"left": size, "latency": latency, "start": never, "end": never}
        self._send = {column: np.concatenate([self._send[column], new[column]]) for column in COLUMNS}
        for lane_id in np.unique(lane):
            sends = np.flatnonzero(lane == lane_id)
            sends = sends[np.argsort(group[sends], kind="stable")]
            cuts = np.flatnonzero(np.diff(group[sends])) + 1
            self._lanes.append(_Lane(collective, np.split(first + sends, cuts)[::-1]))
            self._begin(self._lanes[-1], start)

    def finish(self, name: str) -> float:
        """Simulate until this all-to-all has ended; the second at which it has (its start if it sends nothing)."""
        collective = self._collectives[name]
        while collective.end is None:
            self._step()
        return collective.end

    def flows(self, name: str) -> Flows:
        """The sends of an all-to-all that has ended; their times are seconds of the fabric, not since its start."""
        collective = self._collectives[name]
        if collective.end is None:
            raise ValueError(f"{name} has not ended yet")
        return Flows(*(self._send[column][collective.sends] for column in ("src", "dst", "size", "start", "end")))

    def _begin(self, lane: _Lane, at: float) -> None:
        group = lane.groups.pop()
        lane.unfinished = len(group)
        self._send["start"][group] = at
        for send, ready in zip(group.tolist(), (at + self._send["latency"][group]).tolist(), strict=True):
            heapq.heappush(self._arrivals, (ready, send))

    def _step(self) -> None:
        """Advance to the next moment at which a rate changes."""
        arrived = []
        while self._arrivals and self._arrivals[0][0] <= self.now:
            arrived.append(heapq.heappop(self._arrivals)[1])
        active = np.concatenate([self._active, np.array(arrived, dtype=np.int64)])
        out, into, lane = (self._send[column][active] for column in ("out", "into", "lane"))
        left, size = self._send["left"][active], self._send["size"][active]
        users = np.bincount(out, minlength=len(self._capacity)) + np.bincount(into, minlength=len(self._capacity))
        if users.max() <= 1:
            # Nobody shares a port, so the end of a send changes nothing until its lane goes on: one step for many.
            rate = np.minimum(self._capacity[out], self._capacity[into])
            ends = self.now + left / rate
            last = np.full(len(self._lanes), -np.inf)
            np.maximum.at(last, lane, ends)
            until = last[lane].min(initial=np.inf)
        else:
            rate = fair_rates(out, into, self._capacity)
            ends = self.now + left / rate
            until = ends.min(initial=np.inf)
        until = min(until, self._arrivals[0][0] if self._arrivals else np.inf)
        left = left - rate * (until - self.now)
        self.now = float(until)
        self._send["left"][active] = left
        # A send may be so short that its end is no later than now in floats: it has ended all the same.
        ended = (left <= DONE * size) | (ends <= until)
        self._active = active[~ended]
        self._send["end"][active[ended]] = np.minimum(ends[ended], self.now)
        for lane_id in lane[ended].tolist():
            self._end_send(self._lanes[lane_id])

    def _end_send(self, lane: _Lane) -> None:
        """Count a send that ended now."""
        lane.unfinished -= 1
        lane.collective.unfinished -= 1
        if not lane.unfinished and lane.groups:
            self._begin(lane, self.now)
        if not lane.collective.unfinished:
            lane.collective.end = self.now


def _ranks(values: np.ndarray) -> np.ndarray:
    """int64[value]: the place of every value among the different ones."""
    return np.unique(values, return_inverse=True)[1]
