"""Flows on the fabric: how long an all-to-all takes when its sends follow a given order.

The fabric is a big switch (Aurora §2.4): it never blocks, only the GPUs' own ports limit. GPUs of a node with links of
its own reach each other over those instead, through a second pair of ports. Flows that meet at a port share it
max-min fairly, as concurrent TCP or RDMA streams do; every send starts with a latency during which no byte moves.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.cluster import Cluster
from engine.communication.replay import replay
from engine.plan import OrderMode, Schedule


@dataclass(frozen=True, eq=False)
class Network:
    """Port capacities and latencies.

    send, receive: float64[gpu] bytes/s to and from the fabric
    link: float64[gpu] bytes/s per direction to the other GPUs of the node, 0 = no links, they meet on the fabric
    node: int64[gpu]; latency: seconds to start a send over the fabric; link_latency: float64[gpu] inside the node
    """

    send: np.ndarray
    receive: np.ndarray
    link: np.ndarray
    node: np.ndarray
    latency: float
    link_latency: np.ndarray

    @classmethod
    def of(cls, cluster: Cluster) -> "Network":
        """The network of a cluster as drawn."""
        nodes = [node for node in cluster.nodes for _ in node.gpus]
        return cls(
            send=cluster.values("send_bandwidth"),
            receive=cluster.values("receive_bandwidth"),
            link=np.array([node.link_bandwidth or 0.0 for node in nodes]),
            node=cluster.node_of_gpu,
            latency=cluster.latency,
            link_latency=np.array([node.link_latency for node in nodes]),
        )

    @property
    def gpus(self) -> int:
        return len(self.send)

    @property
    def linked(self) -> np.ndarray:
        """bool[gpu, gpu]: pairs that talk over the links of their node."""
        same = self.node[:, None] == self.node[None, :]
        return same & (self.link > 0)[:, None] & (self.link > 0)[None, :]

    def start_up(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """float64[send]: latency of a send."""
        return np.where(self.linked[src, dst], self.link_latency[src], self.latency)

    def ports(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[send] each: the port a send leaves by and the port it arrives at, as indices into `capacity`."""
        over_link = np.where(self.linked[src, dst], 2 * self.gpus, 0)
        return src + over_link, dst + self.gpus + over_link

    @property
    def capacity(self) -> np.ndarray:
        """float64[4·gpu] bytes/s: fabric out, fabric in, link out, link in."""
        return np.concatenate([self.send, self.receive, self.link, self.link])

    def fluid_seconds(self, src: np.ndarray, dst: np.ndarray, size: np.ndarray) -> float:
        """Seconds that the busiest port needs for sends of `size` bytes, latency left out: no order can be faster."""
        out, into = self.ports(src, dst)
        moved = np.bincount(out, size, 4 * self.gpus) + np.bincount(into, size, 4 * self.gpus)
        busy = moved > 0
        return float((moved[busy] / self.capacity[busy]).max(initial=0.0))

    def bound(self, traffic: np.ndarray) -> float:
        """Seconds below which no all-to-all of this traffic (float64[src, dst] bytes) can end, one start-up included."""
        src, dst = np.nonzero(_off_diagonal(traffic))
        if not len(src):
            return 0.0
        return self.fluid_seconds(src, dst, traffic[src, dst]) + float(self.start_up(src, dst).min())


@dataclass(frozen=True, eq=False)
class Flows:
    """The sends of one all-to-all as they ran. src, dst: int64[send]; bytes, start, end: float64[send], seconds from
    the start of the all-to-all; the latency lies inside [start, end]."""

    src: np.ndarray
    dst: np.ndarray
    bytes: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @property
    def seconds(self) -> float:
        return float(self.end.max(initial=0.0))


def all_to_all(mode: OrderMode, schedule: Schedule | None, traffic: np.ndarray, network: Network) -> Flows:
    """Run the traffic in the given order. traffic: float64[src, dst] bytes, diagonal ignored.

    The schedule may have been made for other traffic: its pairs keep their order and their split over phases, pairs it
    does not know follow at the end (see `replay`).
    """
    traffic = _off_diagonal(traffic)
    if mode == "concurrent":
        src, dst = np.nonzero(traffic)
        return _run(network, src, dst, traffic[src, dst], lane=np.arange(len(src)))
    src, dst, size, phase = replay(schedule, traffic)
    if mode == "sequential":
        return _run(network, src, dst, size, lane=src)
    return _in_phases(network, src, dst, size, phase, paced=mode == "shared")


def _off_diagonal(traffic: np.ndarray) -> np.ndarray:
    return np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic)


def _in_phases(
    network: Network, src: np.ndarray, dst: np.ndarray, size: np.ndarray, phase: np.ndarray, paced: bool
) -> Flows:
    """Phases one after another, each until its last send has ended."""
    start, end = np.zeros(len(src)), np.zeros(len(src))
    now = 0.0
    first = np.flatnonzero(np.r_[True, phase[1:] != phase[:-1]]) if len(phase) else np.empty(0, dtype=np.int64)
    for begin, stop in pairwise([*first, len(phase)]):
        here = slice(begin, stop)
        start[here] = now
        if paced:
            latency = network.start_up(src[here], dst[here]).max()
            end[here] = now + latency + network.fluid_seconds(src[here], dst[here], size[here])
        else:
            end[here] = now + _run(network, src[here], dst[here], size[here], np.arange(stop - begin)).end
        now = end[here].max()
    return Flows(src, dst, size, start, end)


def _run(network: Network, src: np.ndarray, dst: np.ndarray, size: np.ndarray, lane: np.ndarray) -> Flows:
    """Event-driven flows: those of one lane run one after another in the given order, lanes run side by side."""
    out, into = network.ports(src, dst)
    capacity, latency = network.capacity, network.start_up(src, dst)
    count = len(src)
    ports = np.concatenate([out, into])
    if len(np.unique(ports)) == 2 * count and len(np.unique(lane)) == count:  # nobody meets or waits for anybody
        end = latency + size / np.minimum(capacity[out], capacity[into])
        return Flows(src, dst, size, np.zeros(count), end)

    order = np.argsort(lane, kind="stable")
    follows = np.full(count, -1)
    same_lane = lane[order[1:]] == lane[order[:-1]]
    follows[order[:-1][same_lane]] = order[1:][same_lane]
    heads = order[np.r_[True, ~same_lane]]

    start, end = np.zeros(count), np.zeros(count)
    left = size.astype(np.float64).copy()
    ready_at = np.full(count, np.inf)
    ready_at[heads] = latency[heads]
    waiting, active = list(heads), np.empty(0, dtype=np.int64)
    now = 0.0
    while waiting or len(active):
        ripe = [flow for flow in waiting if ready_at[flow] <= now]
        if ripe:
            waiting = [flow for flow in waiting if ready_at[flow] > now]
            active = np.concatenate([active, ripe]).astype(np.int64)
        rate = fair_rates(out[active], into[active], capacity)
        step = (left[active] / rate).min(initial=np.inf)
        step = min(step, min((ready_at[flow] for flow in waiting), default=np.inf) - now)
        left[active] -= rate * step
        now += step
        # Flows within a billionth of their end are done: without this, round-off would add endless tiny steps.
        done = active[left[active] <= 1e-9 * size[active]]
        active = active[left[active] > 1e-9 * size[active]]
        end[done] = now
        for flow in follows[done][follows[done] >= 0]:
            start[flow] = now
            ready_at[flow] = now + latency[flow]
            waiting.append(flow)
    return Flows(src, dst, size, start, end)


def fair_rates(out: np.ndarray, into: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """float64[flow]: max-min fair rates by progressive filling (Bertsekas & Gallager, Data Networks, §6.5.2).

    Not only the port with the lowest share of all is filled in a round, but every one whose flows have no lower share at
    their other ends: the shares of the ports that stay open only grow, so nothing that is filled later can lower it.
    """
    rate = np.zeros(len(out))
    room, flows = capacity.copy(), np.arange(len(out))
    while len(flows):
        users = np.bincount(out, minlength=len(room)) + np.bincount(into, minlength=len(room))
        share = room / np.maximum(users, 1)
        at_out, at_into = share[out], share[into]
        level = np.minimum(at_out, at_into)
        full = np.ones(len(room), dtype=bool)
        full[out[at_out > level * (1 + 1e-12)]] = False
        full[into[at_into > level * (1 + 1e-12)]] = False
        fixed = full[out] | full[into]
        level = np.where(fixed, level, 0.0)
        rate[flows] = level
        room = np.maximum(room - np.bincount(out, level, len(room)) - np.bincount(into, level, len(room)), 0.0)
        out, into, flows = out[~fixed], into[~fixed], flows[~fixed]
    return rate
