"""Several all-to-alls on one network, overlapping in time, simulated event by event as far as somebody needs to know.

When a collective of one model may start depends on when an earlier one ended, and that on what else was in flight. So
collectives are released one by one, and the simulation never runs ahead of the end that was asked for. Those in flight
at once share every port max-min fairly, send by send; one alone takes exactly as long as `network.all_to_all` says.
"""

from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.network import Network, off_diagonal
from engine.plan import OrderMode, Schedule
from engine.plan.replay import replay
from engine.simulate import fair_share
from engine.simulate.flows import EXACT_SENDS, HURRIED_WINDOW, WINDOW, Flows, least_seconds

SENDS = ("source", "sink", "size", "latency", "left", "start", "end")


@dataclass(eq=False)
class _Exchange:
    """One all-to-all. sends: columns by the names in SENDS and src, dst and group (int64[send], ascending), see
    `fair_share.run`; follower: int64[group]; bound: seconds that it lasts at the least; unfinished: sends that have not
    ended; end: seconds."""

    sends: dict[str, np.ndarray]
    follower: np.ndarray
    bound: float
    unfinished: int
    end: float | None = None
    exact: bool = True


class Fabric:
    """A network and what is in flight on it. now: the second up to which it has been simulated; hurry: bool[1], see
    `all_to_all`."""

    def __init__(self, network: Network) -> None:
        """Raises InputError for a network whose exchanges were measured, for that was one at a time."""
        if network.measured is not None:
            raise InputError("exchanges were measured one at a time, and here several meet; choose other network costs")
        self.network = network
        self.hurry = np.zeros(1, dtype=bool)
        self.now = 0.0
        self._exchanges: dict[str, _Exchange] = {}

    def release(self, name: str, start: float, mode: OrderMode, schedule: Schedule | None, traffic: np.ndarray) -> None:
        """Let an all-to-all start at `start` seconds, not before `now`.

        concurrent: all sends at once, no schedule; sequential: every sender works through its own list; matched: the
        phases of the schedule one after another. traffic: float64[src, dst] bytes, diagonal ignored; the schedule may
        have been made for other traffic (see `replay`).

        Raises InputError for a name in use, a start in the past, and the modes `shared` and `two-tier`: their constant rates
        leave no room for a second collective.
        """
        if name in self._exchanges:
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
        follower = [
            np.where(exchange.follower < 0, -1, exchange.follower + base)
            for exchange, base in zip(live, groups, strict=False)
        ]
        unfinished = np.array([exchange.unfinished for exchange in live])
        at_once = sum(int(np.bincount(exchange.sends["group"]).max()) for exchange in live)
        exact = at_once <= EXACT_SENDS
        bound = 0.0 if exact else min(exchange.bound for exchange in live)
        exchange = np.repeat(np.arange(len(live)), counts)
        columns = fair_share.Sends(group=group, exchange=exchange, **sends)
        self.now = fair_share.run(
            columns,
            np.concatenate(follower),
            unfinished,
            self.network.capacity,
            self.network.share,
            self.now,
            live.index(awaited),
            (WINDOW * bound, HURRIED_WINDOW * bound),
            self.hurry,
        )
        cuts = np.cumsum(counts)[:-1]
        for column in ("left", "start", "end"):
            for exchange, part in zip(live, np.split(sends[column], cuts), strict=True):
                exchange.sends[column] = part
        for exchange, count in zip(live, unfinished.tolist(), strict=True):
            exchange.unfinished, exchange.exact = count, exchange.exact and exact
            if not count:
                exchange.end = float(exchange.sends["end"].max())
        awaited.end = self.now


def _in_groups(
    mode: OrderMode, schedule: Schedule | None, traffic: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The sends of an all-to-all (int64 src and dst, float64 size, int64 group, ascending, and `listed`, the place in the
    order) and the group that follows each group (int64, -1: none): all in one, one of a sender after the other, or phase
    after phase."""
    if mode == "concurrent":
        src, dst = np.nonzero(traffic)
        size, listed, group, chain = (
            traffic[src, dst],
            np.arange(len(src)),
            np.zeros(len(src), dtype=np.int64),
            np.zeros(1),
        )
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
