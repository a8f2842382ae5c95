"""The network between GPUs: ports, their capacities and latencies, and lower bounds of an all-to-all's time.

The fabric is a big switch (Aurora §2.4): it never blocks, only the GPUs' own ports limit. GPUs of a node with links of
its own reach each other over those instead, through a second pair of ports.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from engine.cluster import Cluster, Efficiency
from engine.result import Unbounded


class MeasuredExchanges(Protocol):
    """The shares of their rates that ports reach in a whole exchange, where that was measured (see `engine.costs.deepep`)."""

    def __call__(self, exchange: str, unit: str, domains: int, fabric: float, links: float) -> tuple[float, float]:
        """The shares of ports to the fabric and of links.

        exchange: "dispatch" or "combine"
        unit: as in `Travel`
        domains: scale-up domains that exchange rows
        fabric: bytes that the busiest port to the fabric moves
        links: bytes that the busiest port to the links moves
        """
        ...


@dataclass(frozen=True, eq=False)
class Network:
    """Port capacities and latencies.

    send, receive: float64[gpu] bytes/s; to and from the fabric, for one send alone
    link: float64[gpu] bytes/s; in each direction to the other GPUs of the node, 0 = no links, they meet on the fabric
    node: int64[gpu]; index of the GPU's node
    latency: seconds; start-up of a send over the fabric
    link_latency: float64[gpu] seconds; start-up inside the node
    share: float64[2, sends]; the part of these rates that 1, 2, … sends reach together at a port of the fabric and at one of
        the links, the last for more; the first is 1, and none is larger than the one before it. All bounds are for the whole
        rates, so no number of sends undercuts them.
    measured: the share of these capacities that a whole exchange has, see `carrying`; None: all of them
    """

    send: np.ndarray
    receive: np.ndarray
    link: np.ndarray
    node: np.ndarray
    latency: float
    link_latency: np.ndarray
    share: np.ndarray = field(default_factory=lambda: np.ones((2, 1)))
    measured: MeasuredExchanges | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> "Network":
        """The network of a cluster as drawn."""
        nodes = [node for node in cluster.nodes for _ in node.gpus]
        link = np.array([node.link_bandwidth or 0.0 for node in nodes])
        link_latency = np.array([node.link_latency for node in nodes])
        ports = cluster.values("send_bandwidth"), cluster.values("receive_bandwidth")
        drawn = cls(*ports, link, cluster.node_of_gpu, cluster.latency, link_latency)
        return drawn if cluster.efficiency is None else drawn.with_efficiency(cluster.efficiency)

    @property
    def unbounded(self) -> Unbounded | None:
        """The reason for which no bound on orders says anything here: every order of an exchange takes the measured seconds."""
        return None if self.measured is None else "measured exchanges have no order to choose"

    def with_efficiency(self, efficiency: Efficiency) -> "Network":
        """The same ports, with their shares multiplied by those of an efficiency."""
        sends = np.arange(1, self.most_sends + 1)
        mine = np.stack([self.reached(over_links, sends) for over_links in (False, True)])
        share = mine * efficiency.table(self.most_sends)
        fabric, links = share[:, 0]
        rates = {"send": self.send * fabric, "receive": self.receive * fabric, "link": self.link * links}
        return replace(self, share=share / share[:, :1], **rates)

    @property
    def gpus(self) -> int:
        return len(self.send)

    @property
    def most_sends(self) -> int:
        """Sends that can meet at a port, at least 1: of each of two models one from or to every other GPU, as no more than two
        all-to-alls are ever on the way."""
        return max(2 * (self.gpus - 1), 1)

    @property
    def contended(self) -> bool:
        """True if sends that meet at a port reach less than its whole rate."""
        return bool((self.share < 1).any())

    @cached_property
    def linked(self) -> np.ndarray:
        """The pairs that talk over the links of their node: bool[gpu, gpu]."""
        same = self.node[:, None] == self.node[None, :]
        return same & (self.link > 0)[:, None] & (self.link > 0)[None, :]

    @cached_property
    def domain(self) -> np.ndarray:
        """The scale-up domain of every GPU, named by its first one: int64[gpu].

        A domain is the GPUs of a node with links of its own. A GPU without links is alone in its domain.
        """
        return np.where(self.link > 0, self.linked.argmax(axis=1), np.arange(self.gpus))

    @cached_property
    def inside(self) -> np.ndarray:
        """The pairs of one scale-up domain: bool[gpu, gpu]."""
        return self.domain[:, None] == self.domain[None, :]

    @property
    def direct(self) -> bool:
        """True if no GPU can relay for another: there are no links, or no other domain to send to."""
        domains = len(np.unique(self.domain))
        return domains in (1, self.gpus)

    def start_up(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """The latency of each send: float64[send] seconds.

        src, dst: int64[send]; GPUs
        """
        return np.where(self.linked[src, dst], self.link_latency[src], self.latency).astype(np.float64)

    def ports(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The port that each send leaves by and the one it arrives at, as indices into `capacity`: int64[send] each.

        src, dst: int64[send]; GPUs
        """
        over_link = np.where(self.linked[src, dst], 2 * self.gpus, 0)
        return src + over_link, dst + self.gpus + over_link

    @cached_property
    def capacity(self) -> np.ndarray:
        """float64[4·gpu] bytes/s of one send alone: fabric out, fabric in, link out, link in."""
        return np.concatenate([self.send, self.receive, self.link, self.link]).astype(np.float64)

    def carrying(self, exchange: str, unit: str, traffic: np.ndarray) -> "Network":
        """The network as fast as it is in one exchange, by the measured shares; itself without any.

        exchange: "dispatch" or "combine"
        unit: as in `Travel`; the receiver that each row stands for
        traffic: float64[src, dst] bytes; the diagonal is ignored
        """
        if self.measured is None:
            return self
        moved = self.moved(traffic)
        busiest = (float(ports.max(initial=0.0)) for ports in np.split(moved, 2))
        fabric, links = self.measured(exchange, unit, len(np.unique(self.domain)), *busiest)
        return replace(self, send=self.send * fabric, receive=self.receive * fabric, link=self.link * links, measured=None)

    def rate(self, port: np.ndarray, sends: np.ndarray) -> np.ndarray:
        """The bytes/s that sends reach together at a port: float64[...].

        port: integers[...]; as in `capacity`
        sends: integers[...]; 1 or more
        """
        return self.capacity[port] * self.reached(port >= 2 * self.gpus, sends)

    def reached(self, over_links: bool | np.ndarray, sends: np.ndarray) -> np.ndarray:
        """The share of a port's rate that sends reach together: float64[...].

        over_links: True for a port of the links, False for one of the fabric
        sends: integers[...]; 0 counts as 1
        """
        column = np.clip(sends, 1, self.share.shape[1]) - 1
        return self.share[np.asarray(over_links, dtype=np.int64), column]

    def fluid_seconds(self, src: np.ndarray, dst: np.ndarray, size: np.ndarray) -> float:
        """Seconds that the busiest port needs for these sends, latency left out: no order can be faster.

        src, dst: int64[send]; GPUs
        size: float64[send] bytes
        """
        out, into = self.ports(src, dst)
        moved = np.bincount(out, size, 4 * self.gpus) + np.bincount(into, size, 4 * self.gpus)
        busy = moved > 0
        return float((moved[busy] / self.capacity[busy]).max(initial=0.0))

    def paced_seconds(self, src: np.ndarray, dst: np.ndarray, size: np.ndarray) -> float:
        """Seconds of these sends, latency left out, when all go at once and each at the constant rate that lets them end
        together: the time of the busiest port with as many sends as it has.

        src, dst: int64[send]; GPUs
        size: float64[send] bytes
        """
        out, into = self.ports(src, dst)
        ports, moving = np.concatenate([out, into]), np.concatenate([size, size])
        moved = np.bincount(ports, moving, 4 * self.gpus)
        sends = np.bincount(ports[moving > 0], minlength=4 * self.gpus)
        busy = np.flatnonzero(moved)
        return float((moved[busy] / self.rate(busy, sends[busy])).max(initial=0.0))

    def relayed_seconds(self, traffic: np.ndarray) -> float:
        """Lower bound in seconds, latency left out, even when GPUs of a scale-up domain relay for each other (see
        `engine.communication.two_tier`).

        traffic: float64[src, dst] bytes

        All that leaves (enters) a domain crosses its own ports, which together carry the sum of their rates. All that leaves
        (enters) a GPU crosses its port or its links, and what stays in the domain the links alone.
        """
        moved = off_diagonal(traffic)
        within, between = np.where(self.inside, moved, 0.0), np.where(self.inside, 0.0, moved)
        seconds = [0.0]
        for axis, rate in ((1, self.send), (0, self.receive)):
            local, away = within.sum(axis=axis), between.sum(axis=axis)
            ports = np.bincount(self.domain, rate)
            seconds.append((np.bincount(self.domain, away)[ports > 0] / ports[ports > 0]).max(initial=0.0))
            seconds.append(((local + away) / (self.link + rate)).max(initial=0.0))
            seconds.append((local[local > 0] / self.link[local > 0]).max(initial=0.0))
        return float(max(seconds))

    def relayed_bound(self, traffic: np.ndarray) -> float:
        """Lower bound in seconds of an all-to-all with any relays, one start-up included.

        It is never above `bound`, and the same without links.

        traffic: float64[src, dst] bytes
        """
        sends = off_diagonal(traffic) > 0
        out, into = sends.any(axis=1), sends.any(axis=0)
        if not out.any():
            return 0.0
        # Bytes for another node may begin with a hop over the links, bytes that stay in the node do.
        start_ups = self.link_latency[(self.linked.sum(axis=1) > 1) & (out | into)]
        if (sends & ~self.linked).any():
            start_ups = np.append(start_ups, self.latency)
        return self.relayed_seconds(traffic) + float(start_ups.min())

    def moved(self, traffic: np.ndarray) -> np.ndarray:
        """Bytes that an all-to-all moves through every port: float64[4·gpu], as in `capacity`.

        traffic: float64[src, dst] bytes; the diagonal is ignored
        """
        traffic = off_diagonal(traffic)
        fabric, link = np.where(self.linked, 0.0, traffic), np.where(self.linked, traffic, 0.0)
        return np.concatenate([matrix.sum(axis=axis) for matrix in (fabric, link) for axis in (1, 0)])

    def bound(self, traffic: np.ndarray) -> float:
        """Lower bound in seconds of an all-to-all in which every byte goes straight to its receiver, one start-up included.

        traffic: float64[src, dst] bytes
        """
        moved = self.moved(traffic)
        busy = np.flatnonzero(moved)
        if not len(busy):
            return 0.0
        return float((moved[busy] / self.capacity[busy]).max()) + self.least_start_up(moved)

    def least_start_up(self, moved: np.ndarray) -> float:
        """Seconds of the shortest start-up among sends that move something.

        moved: float64[4·gpu] bytes; see the method `moved`, not all 0
        """
        over_link = np.where(moved[2 * self.gpus : 3 * self.gpus] > 0, self.link_latency, np.inf)
        return float(min(over_link.min(), self.latency if moved[: self.gpus].any() else np.inf))


def off_diagonal(traffic: np.ndarray) -> np.ndarray:
    """The traffic between different GPUs: float64[src, dst] bytes with a zero diagonal."""
    return np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic)
