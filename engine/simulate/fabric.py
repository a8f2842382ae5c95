"""Several all-to-alls on one network, overlapping in time, simulated event by event no further than was asked for.

The start of one model's collective may depend on the end of an earlier one, and that on all others in flight. So
collectives are released one by one, and the simulation never runs ahead of the end that was asked for. In a `Fabric` those in
flight at once share every port max-min fairly, send by send; one alone takes exactly as long as `flows.all_to_all` says. In
`Lockstep`, with the same calls, the sends of all of them are one schedule (a joint order): a phase begins when the one before
it has ended for both models.
"""

from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.network import Network, off_diagonal
from engine.plan import OrderMode, Schedule
from engine.plan.plan import replay
from engine.simulate import fair_share
from engine.simulate.flows import EXACT_SENDS, HURRIED_WINDOW, WINDOW, Flows, all_to_all, least_seconds

SENDS = ("source", "sink", "size", "latency", "left", "start", "end")


@dataclass(eq=False)
class _Exchange:
    """One all-to-all.

    sends: columns by the names in SENDS, and src, dst and group (int64[send], ascending), see `fair_share.run`
    follower: int64[group]
    bound: seconds that it lasts at the least
    unfinished: sends that have not ended
    end: seconds; None: it has not ended
    """

    sends: dict[str, np.ndarray]
    follower: np.ndarray
    bound: float
    unfinished: int
    end: float | None = None
    exact: bool = True


class Fabric:
    """A network and the exchanges in flight on it.

    now: the second up to which it has been simulated
    hurry: bool[1], see `all_to_all`
    """

    def __init__(self, network: Network) -> None:
        """Raises InputError for a network with measured exchanges, which were measured one at a time."""
        if network.measured is not None:
            raise InputError("exchanges were measured one at a time, and here several meet; choose other network costs")
        self.network = network
        self.hurry = np.zeros(1, dtype=bool)
        self.now = 0.0
        self._exchanges: dict[str, _Exchange] = {}

    def release(self, name: str, start: float, mode: OrderMode, schedule: Schedule | None, traffic: np.ndarray) -> None:
        """Let an all-to-all start at `start` seconds, not before `now`.

        concurrent: all sends at once, no schedule; sequential: every sender works through its own list; matched: the phases
        of the schedule one after another.

        Raises InputError for a name in use, a start in the past, and the modes `shared` and `two-tier`: their constant rates
        leave no room for a second collective.

        traffic: float64[src, dst] bytes, diagonal ignored
        schedule: may have been made for other traffic (see `replay`)
        """
        if name in self._exchanges:
            raise InputError(f"there already is a collective named {name}")
        if not start >= self.now:
            raise InputError(f"{name}: starts at {start:g} s, but the network is simulated up to {self.now:g} s already")
        if mode in ("shared", "two-tier"):
            raise InputError(
                f"{name}: a {mode} order gives every send a constant rate of an otherwise idle network, which two "
                "models do not have; use a matched, sequential or concurrent order"
            )
        sends, follower = _in_groups(mode, schedule, off_diagonal(traffic))
        src, dst, size = sends["src"], sends["dst"], sends["size"]
        sends["source"], sends["sink"] = self.network.ports(src, dst)
        sends |= {"latency": self.network.start_up(src, dst), "left": size.copy(), "end": np.full(len(src), np.nan)}
        sends["start"] = np.where(np.isin(sends["group"], follower), np.nan, start)
        ended = None if len(src) else start
        # Only of sends that all begin at once it is known how many meet.
        least = least_seconds if mode == "concurrent" else Network.fluid_seconds
        self._exchanges[name] = _Exchange(sends, follower, least(self.network, src, dst, size), len(src), ended)

    def finish(self, name: str) -> float:
        """Simulate until this all-to-all has ended; the second at which it has (its start if it sends nothing)."""
        awaited = self._exchanges[name]
        if awaited.end is None:
            self._run(awaited)
        return awaited.end

    def flows(self, name: str) -> Flows:
        """The sends of an all-to-all that has ended; their times are seconds of the fabric, not since its start."""
        exchange = self._exchanges[name]
        if exchange.end is None:
            raise ValueError(f"{name} has not ended yet")
        listed = np.empty_like(exchange.sends["listed"])
        listed[exchange.sends["listed"]] = np.arange(len(listed))
        columns = (exchange.sends[column][listed] for column in ("src", "dst", "size", "start", "end"))
        return Flows(*columns, exact=exchange.exact)

    def _run(self, awaited: _Exchange) -> None:
        """Simulate all that is in flight until one of it has ended."""
        live = [exchange for exchange in self._exchanges.values() if exchange.end is None]
        counts = [len(exchange.sends["src"]) for exchange in live]
        groups = np.cumsum([0, *(len(exchange.follower) for exchange in live)])
        sends = {name: np.concatenate([exchange.sends[name] for exchange in live]) for name in SENDS}
        group = np.concatenate([exchange.sends["group"] + base for exchange, base in zip(live, groups, strict=False)])
        based = zip(live, groups, strict=False)
        follower = [np.where(own.follower < 0, -1, own.follower + base) for own, base in based]
        unfinished = np.array([exchange.unfinished for exchange in live])
        at_once = sum(int(np.bincount(exchange.sends["group"]).max()) for exchange in live)
        exact = at_once <= EXACT_SENDS
        bound = 0.0 if exact else min(exchange.bound for exchange in live)
        exchange = np.repeat(np.arange(len(live)), counts)
        columns = fair_share.Sends(group=group, exchange=exchange, **sends)
        ports, windows = (self.network.capacity, self.network.share), (WINDOW * bound, HURRIED_WINDOW * bound)
        until = self.now, live.index(awaited), windows, self.hurry
        self.now = fair_share.run(columns, np.concatenate(follower), unfinished, *ports, *until)
        cuts = np.cumsum(counts)[:-1]
        for column in ("left", "start", "end"):
            for exchange, part in zip(live, np.split(sends[column], cuts), strict=True):
                exchange.sends[column] = part
        for exchange, count in zip(live, unfinished.tolist(), strict=True):
            exchange.unfinished, exchange.exact = count, exchange.exact and exact
            if not count:
                exchange.end = float(exchange.sends["end"].max())
        awaited.end = self.now


def _in_groups(mode: OrderMode, schedule: Schedule | None, traffic: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The sends of an all-to-all (int64 src and dst, float64 size, int64 group, ascending, and `listed`, the place in the
    order) and the group that follows each group (int64, -1: none): all in one, one of a sender after the other, or phase
    after phase."""
    if mode == "concurrent":
        src, dst = np.nonzero(traffic)
        size, listed = traffic[src, dst], np.arange(len(src))
        group, chain = np.zeros(len(src), dtype=np.int64), np.zeros(1)
    else:
        src, dst, size, phase = replay(schedule, traffic)
        listed = np.argsort(src if mode == "sequential" else phase, kind="stable")
        src, dst, size = src[listed], dst[listed], size[listed]
        group = np.arange(len(src)) if mode == "sequential" else np.unique(phase[listed], return_inverse=True)[1]
        chain = src if mode == "sequential" else np.zeros(group.max(initial=-1) + 1)
    follower = np.full(len(chain), -1)
    goes_on = np.flatnonzero(chain[1:] == chain[:-1])
    follower[goes_on] = goes_on + 1
    return {"src": src, "dst": dst, "size": size.astype(np.float64), "group": group, "listed": listed}, follower


@dataclass(eq=False)
class _LockstepExchange:
    """One all-to-all: the second of its release, its sends, and their known begins and ends.

    start, end: float64[send] seconds, nan: not yet
    phase: int64[send], the plan's number times one more than there are GPUs, so that sends unknown to the schedule have
        places between the last of its own phases and the next one
    """

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
    """The all-to-alls of one layer of two models in a joint order, with the calls of `Fabric`. hurry: there, too; phases need
    no hurrying."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.hurry = np.zeros(1, dtype=bool)
        self.now = 0.0
        self._exchanges: dict[str, _LockstepExchange] = {}

    def release(self, name: str, start: float, mode: OrderMode, schedule: Schedule | None, traffic: np.ndarray) -> None:
        """Let an all-to-all start at `start` seconds. Raises InputError for other modes than joint.

        traffic: float64[src, dst] bytes, diagonal ignored
        schedule: may have been made for other traffic (see `replay`)
        """
        if mode != "joint":
            raise InputError(f"{name} has a {mode} order, but the other model's is joint; both models need the same one")
        src, dst, size, phase = replay(schedule, off_diagonal(traffic))
        own_last = int(schedule.phase.max()) if schedule.sends else -1
        turn, room = phase - schedule.phases, self.network.gpus + 1
        phase = np.where(turn >= 0, room * own_last + 1 + turn, room * phase)
        nothing = np.full(len(src), np.nan)
        self._exchanges[name] = _LockstepExchange(start, src, dst, size, phase, nothing, nothing.copy())

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
        ended = np.split(end, np.cumsum([sends.sum() for sends in here])[:-1])
        for exchange, sends, ends in zip(pending, here, ended, strict=True):
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
