"""Several all-to-alls whose sends are one schedule: a phase begins when the one before it has ended, whoever's sends it has.

What `Fabric` is for all-to-alls that know nothing of each other, this is for those of a joint order, with the same calls.
"""

from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.network import Network, off_diagonal
from engine.plan import OrderMode, Schedule
from engine.plan.replay import replay
from engine.simulate.flows import Flows, all_to_all


@dataclass(eq=False)
class _Exchange:
    """One all-to-all: the second of its release, its sends, and what is known of when they begin and end (float64[send]
    seconds, nan: not yet). phase: int64[send], the plan's number times one more than there are GPUs, so that what the schedule
    does not know has places between the last of its own phases and the next one."""

    release: float
    src: np.ndarray
    dst: np.ndarray
    size: np.ndarray
    phase: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @property
    def waiting(self) -> np.ndarray:
        return np.isnan(self.end)


class Lockstep:
    """The all-to-alls of one layer of two models in a joint order. hurry: as of `Fabric`; phases need no hurrying."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.hurry = np.zeros(1, dtype=bool)
        self.now = 0.0
        self._exchanges: dict[str, _Exchange] = {}

    def release(self, name: str, start: float, mode: OrderMode, schedule: Schedule | None, traffic: np.ndarray) -> None:
        """Let an all-to-all start at `start` seconds. traffic: float64[src, dst] bytes, diagonal ignored; the schedule may
        have been made for other traffic (see `replay`). Raises InputError for other modes than joint."""
        if mode != "joint":
            raise InputError(
                f"{name} has a {mode} order, but the other model's is joint; both models need the same one"
            )
        src, dst, size, phase = replay(schedule, off_diagonal(traffic))
        own_last = int(schedule.phase.max()) if schedule.sends else -1
        turn, room = phase - schedule.phases, self.network.gpus + 1
        phase = np.where(turn >= 0, room * own_last + 1 + turn, room * phase)
        nothing = np.full(len(src), np.nan)
        self._exchanges[name] = _Exchange(start, src, dst, size, phase, nothing, nothing.copy())

    def finish(self, name: str) -> float:
        """Simulate until this all-to-all has ended; the second at which it has (its start if it sends nothing)."""
        awaited = self._exchanges[name]
        while awaited.waiting.any():
            self._run_phase()
        return float(awaited.end.max(initial=awaited.release))

    def flows(self, name: str) -> Flows:
        """The sends of an all-to-all that has ended; their times are seconds of the network, not since its start."""
        exchange = self._exchanges[name]
        if exchange.waiting.any():
            raise ValueError(f"{name} has not ended yet")
        return Flows(exchange.src, exchange.dst, exchange.size, exchange.start, exchange.end)

    def _run_phase(self) -> None:
        """Simulate the earliest phase that has sends which have not ended."""
        pending = [exchange for exchange in self._exchanges.values() if exchange.waiting.any()]
        phase = min(exchange.phase[exchange.waiting].min() for exchange in pending)
        here = [exchange.waiting & (exchange.phase == phase) for exchange in pending]
        begin = max(exchange.release for exchange, sends in zip(pending, here, strict=True) if sends.any())
        begin = max(begin, self.now)
        src, dst, size = (
            np.concatenate([getattr(exchange, column)[sends] for exchange, sends in zip(pending, here, strict=True)])
            for column in ("src", "dst", "size")
        )
        end = begin + self._seconds(src, dst, size)
        for exchange, sends, ends in zip(
            pending, here, np.split(end, np.cumsum([sends.sum() for sends in here])[:-1]), strict=True
        ):
            exchange.start[sends], exchange.end[sends] = begin, ends
        self.now = float(end.max())

    def _seconds(self, src: np.ndarray, dst: np.ndarray, size: np.ndarray) -> np.ndarray:
        """float64[send]: when sends that begin together end. Bytes of both models between two GPUs are one transfer."""
        gpus, capacity = self.network.gpus, self.network.capacity
        pair, of_pair = np.unique(src * gpus + dst, return_inverse=True)
        total = np.bincount(of_pair, size)
        source, sink = pair // gpus, pair % gpus
        out, into = self.network.ports(source, sink)
        # No matching: sends of both models that no schedule knew.
        if max(np.bincount(out).max(), np.bincount(into).max()) > 1:
            traffic = np.zeros((gpus, gpus))
            traffic[source, sink] = total
            flows = all_to_all("concurrent", None, traffic, self.network)
            ended = np.zeros((gpus, gpus))
            ended[flows.src, flows.dst] = flows.end
            return ended[src, dst]
        rate = np.minimum(capacity[out], capacity[into])
        return (self.network.start_up(source, sink) + total / rate)[of_pair]
