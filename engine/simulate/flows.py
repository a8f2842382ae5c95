"""Flows on the network: the duration of an all-to-all when its sends follow a given order.

Flows that meet at a port share it max-min fairly, as concurrent TCP or RDMA streams do, at the rate that so many of them reach
there together (`Network.share`); every send starts with a latency during which no byte moves. In a two-tier order GPUs relay
over the links of their node while the ports between nodes are at work, step by step.
"""

from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from engine.communication.order import meeting_seconds
from engine.communication.steps import Steps
from engine.errors import StoppedError
from engine.network import Network, off_diagonal
from engine.plan import OrderMode, Schedule
from engine.plan.plan import replay
from engine.simulate import fair_share
from engine.simulate.fair_share import DONE, Sends, rate_at

EXACT_SENDS = 1024
"""Limit up to which every end of sends that share ports is an event of its own (32 GPUs if all pairs differ)."""
WINDOW, PROOF_WINDOW, HURRIED_WINDOW = 2e-3, 6e-3, 0.2
"""Above that the ends within this part of the all-to-all's bound are one event. The whole is then late by less than 0.2 % and
a send by less than 1 % of the whole, as the tests hold against exact runs on 64 GPUs; for more GPUs a timeline states the
interval that is proven for it. That proof takes wider windows, because it only has to be safe, and so does a simulation
that is to end soon."""


@njit(cache=True, nogil=True)
def latest_end(sends: Sends, capacity: np.ndarray, reached: np.ndarray, window: float) -> float:
    """Seconds at which sends that all start at 0 have ended at the latest, for any windows of `fair_share.run`: a bound that
    needs no levels, compiled (numba). Arguments as there; the sends are only read.

    Max-min fairness gives a send at least the lower of the equal shares of its two ports. Here it gets just that, of ports that
    divide by all sends that have not ended here, which are at least those that have not ended there, and more sends never reach
    more together: so none ends earlier here.
    """
    source, sink = sends.source.astype(np.uint32), sends.sink.astype(np.uint32)  # no compiled look for negative indices
    size, latency = sends.size, sends.latency
    total, ports = len(size), len(capacity)
    users, active, left = np.zeros(ports, dtype=np.int64), np.arange(total).astype(np.uint32), size.copy()
    for send in range(total):
        users[source[send]] += 1
        users[sink[send]] += 1
    share = np.empty(ports)
    now, last, moving = 0.0, 0.0, total
    while moving:
        for port in range(ports):
            share[port] = rate_at(port, users[port], capacity, reached) / max(users[port], 1)
        earliest, next_arrival = np.inf, np.inf
        for place in range(moving):
            send = active[place]
            if latency[send] > now:
                next_arrival = min(next_arrival, latency[send])
            else:
                earliest = min(earliest, now + left[send] / min(share[source[send]], share[sink[send]]))
        until = min(max(earliest, now + window), next_arrival)
        still = 0
        for place in range(moving):
            send = active[place]
            active[still] = send
            still += 1
            if latency[send] > now:
                continue
            rate = min(share[source[send]], share[sink[send]])
            ends = now + left[send] / rate
            left[send] -= rate * (until - now)
            if ends <= until or left[send] <= DONE * size[send]:
                last = max(last, ends)
                users[source[send]] -= 1
                users[sink[send]] -= 1
                still -= 1
        now, moving = until, still
    return last


def relayed_sends(schedule: Schedule, traffic: np.ndarray, network: Network) -> tuple[np.ndarray, ...]:
    """The columns of `Flows`: src, dst (int64[send]), bytes, start and end (float64[send], seconds).

    A step begins when the one before has ended everywhere. In it the sends of a node over its links go at the constant rates
    that its busiest link allows, those between two nodes at the rate of the slower one, and each kind has its own start-up.
    The bytes of one GPU for another over links are a single send, from the first step that has some of it to the end of the
    last one: in nodes of eight a stage has several times as many relays as sends over ports.

    traffic: float64[src, dst] bytes, diagonal ignored
    """
    steps = Steps.of(schedule, traffic, network)
    step, src, dst, size = steps.sends()
    domain = steps.domains.of_gpu
    over_links = domain[src] == domain[dst]
    over_ports = np.maximum(steps.ports[0, step, domain[src]], steps.ports[1, step, domain[dst]])
    took = network.start_up(src, dst) + np.where(over_links, steps.links[step, domain[src]], over_ports)
    length = np.zeros(len(steps.links))
    np.maximum.at(length, step, took)
    start = (np.cumsum(length) - length)[step]
    end = start + took

    pair, send = np.unique(src[over_links] * network.gpus + dst[over_links], return_inverse=True)
    first, last = np.full(len(pair), np.inf), np.zeros(len(pair))
    np.minimum.at(first, send, start[over_links])
    np.maximum.at(last, send, end[over_links])
    whole = (pair // network.gpus, pair % network.gpus, np.bincount(send, size[over_links], len(pair)), first, last)
    columns = (src, dst, size, start, end)
    return tuple(np.append(column[~over_links], part) for column, part in zip(columns, whole, strict=True))


@dataclass(frozen=True, eq=False)
class Flows:
    """The sends of one all-to-all as they ran.

    src, dst: int64[send]
    bytes: float64[send]
    start, end: float64[send], seconds from the start of the all-to-all; the latency lies inside [start, end]
    exact: True if every end was an event of its own
    latest: seconds at which an exact run would have ended at the latest (`Network.bound` is the earliest); None: not proven
    """

    src: np.ndarray
    dst: np.ndarray
    bytes: np.ndarray
    start: np.ndarray
    end: np.ndarray
    exact: bool = True
    latest: float | None = None

    def mirrored(self) -> "Flows":
        """The flows of the reversed all-to-all: every receiver sends."""
        return replace(self, src=self.dst, dst=self.src)

    def shared(self, passes: int) -> "Flows":
        """The part of every flow that one of so many passes has."""
        parts = {name: getattr(self, name) / passes for name in ("bytes", "start", "end")}
        return replace(self, **parts, latest=None if self.latest is None else self.latest / passes)

    @property
    def seconds(self) -> float:
        return float(self.end.max(initial=0.0))


def all_to_all(
    mode: OrderMode, schedule: Schedule | None, traffic: np.ndarray, network: Network, hurry: np.ndarray | None = None
) -> Flows:
    """Run the traffic in the given order. A sequential one raises StoppedError in a hurry, because it has no windows.

    schedule: may have been made for other traffic: its pairs keep their order and their split over phases, pairs it does not
        know follow at the end (see `replay`). In a two-tier order bytes go by relays, see `relayed_sends`
    traffic: float64[src, dst] bytes, diagonal ignored
    hurry: bool[1], which the caller may set at any time. Windows are wider from then on: ten times as fast, and some per cent
        late at most, as the interval that comes with it says. None: never
    """
    traffic = off_diagonal(traffic)
    hurry = np.zeros(1, dtype=bool) if hurry is None else hurry
    if mode == "concurrent":
        src, dst = np.nonzero(traffic)
        return _side_by_side(network, src, dst, traffic[src, dst], hurry)
    if mode == "two-tier":
        return Flows(*relayed_sends(schedule, traffic, network))
    src, dst, size, phase = replay(schedule, traffic)
    if mode == "sequential":
        return _one_by_one(network, src, dst, size, hurry)
    return _in_phases(network, src, dst, size, phase, mode == "shared", hurry)


def _side_by_side(network: Network, src: np.ndarray, dst: np.ndarray, size: np.ndarray, hurry: np.ndarray) -> Flows:
    """All sends at once. hurry: see `all_to_all`."""
    out, into = network.ports(src, dst)
    capacity, latency = network.capacity, network.start_up(src, dst)
    count = len(src)
    start, end = np.zeros(count), np.full(count, np.nan)
    if max(np.bincount(port).max(initial=0) for port in (out, into)) <= 1:  # no sends meet
        return Flows(src, dst, size, start, latency + size / np.minimum(capacity[out], capacity[into]))
    bound = least_seconds(network, src, dst, size) if count > EXACT_SENDS else 0.0
    together, size = np.zeros(count, dtype=np.int64), size.astype(np.float64)
    sends = fair_share.Sends(out, into, size, latency, together, together, size.copy(), start, end)
    windows = WINDOW * bound, HURRIED_WINDOW * bound
    fair_share.run(sends, np.array([-1]), np.array([count]), capacity, network.share, 0.0, 0, windows, hurry)
    if not bound:
        return Flows(src, dst, size, start, end)
    window = (HURRIED_WINDOW if hurry[0] else PROOF_WINDOW) * bound
    latest = latest_end(sends, capacity, network.share, window)
    return Flows(src, dst, size, start, end, False, max(latest, float(end.max())))


def least_seconds(network: Network, src: np.ndarray, dst: np.ndarray, size: np.ndarray) -> float:
    """Seconds that these sends take at the least when all begin at once, latency left out. Windows are parts of it: of the time
    at whole rates they would be far too narrow for ports that reach little of them."""
    if not network.contended:
        return network.fluid_seconds(src, dst, size)
    traffic = np.zeros((network.gpus, network.gpus))
    np.add.at(traffic, (src, dst), size)
    return max(network.fluid_seconds(src, dst, size), meeting_seconds(network, traffic))


def _one_by_one(network: Network, src: np.ndarray, dst: np.ndarray, size: np.ndarray, hurry: np.ndarray) -> Flows:
    """Every sender works through its own sends in the order in which they stand."""
    out, into = network.ports(src, dst)
    order = np.argsort(src, kind="stable")
    same_sender = src[order[1:]] == src[order[:-1]]
    follower = np.full(len(src), -1)
    follower[order[:-1][same_sender]] = order[1:][same_sender]
    start, end = fair_share.run_sequences(
        out, into, size.astype(np.float64), network.start_up(src, dst), follower, network.capacity, network.share, hurry
    )
    if np.isnan(end).any():
        raise StoppedError("stopped before the order was simulated")
    return Flows(src, dst, size, start, end)


def _in_phases(
    network: Network, src: np.ndarray, dst: np.ndarray, size: np.ndarray, phase: np.ndarray, paced: bool, hurry: np.ndarray
) -> Flows:
    """Phases one after another, each until its last send has ended. hurry: see `all_to_all`."""
    if not len(src):
        return Flows(src, dst, size, np.zeros(0), np.zeros(0))
    out, into = network.ports(src, dst)
    number = np.cumsum(np.r_[0, phase[1:] != phase[:-1]])
    first = np.flatnonzero(np.r_[True, number[1:] != number[:-1]])
    # As if no sends met, which holds in every phase of a matched order carried out on the traffic it was made for.
    seconds = network.start_up(src, dst) + size / np.minimum(network.capacity[out], network.capacity[into])
    exact = True
    for crowded in range(len(first)) if paced else _crowded(number, out, into):
        here = slice(first[crowded], first[crowded + 1] if crowded + 1 < len(first) else None)
        if paced:
            latency = network.start_up(src[here], dst[here]).max()
            seconds[here] = latency + network.paced_seconds(src[here], dst[here], size[here])
        else:
            meeting = _side_by_side(network, src[here], dst[here], size[here], hurry)
            seconds[here], exact = meeting.end, exact and meeting.exact
    begin = np.r_[0.0, np.cumsum(np.maximum.reduceat(seconds, first))[:-1]][number]
    return Flows(src, dst, size, begin, begin + seconds, exact)


def _crowded(phase: np.ndarray, out: np.ndarray, into: np.ndarray) -> np.ndarray:
    """int64[…]: the phases in which sends meet at a port."""
    crowded = []
    for port in (out, into):
        places, sends = np.unique(phase * (port.max() + 1) + port, return_counts=True)
        crowded.append(places[sends > 1] // (port.max() + 1))
    return np.unique(np.concatenate(crowded))
