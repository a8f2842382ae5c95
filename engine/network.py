"""The network between GPUs: ports, their capacities and latencies, and what no all-to-all can undercut.

The fabric is a big switch (Aurora §2.4): it never blocks, only the GPUs' own ports limit. GPUs of a node with links of
its own reach each other over those instead, through a second pair of ports.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.cluster import Cluster


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

    @cached_property
    def linked(self) -> np.ndarray:
        """bool[gpu, gpu]: pairs that talk over the links of their node."""
        same = self.node[:, None] == self.node[None, :]
        return same & (self.link > 0)[:, None] & (self.link > 0)[None, :]

    @cached_property
    def domain(self) -> np.ndarray:
        """int64[gpu]: the scale-up domain of every GPU, named by its first one: the GPUs of a node with links of its own. A
        GPU without links is alone in its own."""
        return np.where(self.link > 0, self.linked.argmax(axis=1), np.arange(self.gpus))

    @cached_property
    def inside(self) -> np.ndarray:
        """bool[gpu, gpu]: pairs of one scale-up domain."""
        return self.domain[:, None] == self.domain[None, :]

    @property
    def direct(self) -> bool:
        """Whether no GPU can relay for another: there are no links, or no other domain to send to."""
        domains = len(np.unique(self.domain))
        return domains in (1, self.gpus)

    def start_up(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """float64[send]: latency of a send."""
        return np.where(self.linked[src, dst], self.link_latency[src], self.latency).astype(np.float64)

    def ports(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[send] each: the port a send leaves by and the port it arrives at, as indices into `capacity`."""
        over_link = np.where(self.linked[src, dst], 2 * self.gpus, 0)
        return src + over_link, dst + self.gpus + over_link

    @cached_property
    def capacity(self) -> np.ndarray:
        """float64[4·gpu] bytes/s: fabric out, fabric in, link out, link in."""
        return np.concatenate([self.send, self.receive, self.link, self.link]).astype(np.float64)

    def fluid_seconds(self, src: np.ndarray, dst: np.ndarray, size: np.ndarray) -> float:
        """Seconds that the busiest port needs for sends of `size` bytes, latency left out: no order can be faster."""
        out, into = self.ports(src, dst)
        moved = np.bincount(out, size, 4 * self.gpus) + np.bincount(into, size, 4 * self.gpus)
        busy = moved > 0
        return float((moved[busy] / self.capacity[busy]).max(initial=0.0))

    def relayed_seconds(self, traffic: np.ndarray) -> float:
        """Seconds that no all-to-all of this traffic (float64[src, dst] bytes) can undercut, latency left out, even when GPUs
        of a scale-up domain relay for each other (see `engine.communication.two_tier`).

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
        """Seconds below which no all-to-all of this traffic (float64[src, dst] bytes) can end, whoever relays for whom, one
        start-up included. Never above `bound`, and the same without links."""
        sends = off_diagonal(traffic) > 0
        out, into = sends.any(axis=1), sends.any(axis=0)
        if not out.any():
            return 0.0
        # What leaves a GPU for another node may begin with a hop over its links, what stays does.
        start_ups = self.link_latency[(self.linked.sum(axis=1) > 1) & (out | into)]
        if (sends & ~self.linked).any():
            start_ups = np.append(start_ups, self.latency)
        return self.relayed_seconds(traffic) + float(start_ups.min())

    def moved(self, traffic: np.ndarray) -> np.ndarray:
        """float64[4·gpu] bytes that an all-to-all of this traffic (float64[src, dst] bytes, diagonal ignored) moves through
        every port, as in `capacity`."""
        traffic = off_diagonal(traffic)
        fabric, link = np.where(self.linked, 0.0, traffic), np.where(self.linked, traffic, 0.0)
        return np.concatenate([matrix.sum(axis=axis) for matrix in (fabric, link) for axis in (1, 0)])

    def bound(self, traffic: np.ndarray) -> float:
        """Seconds below which no all-to-all of this traffic (float64[src, dst] bytes) can end in which every byte goes straight
        to its receiver, one start-up included."""
        moved = self.moved(traffic)
        busy = np.flatnonzero(moved)
        if not len(busy):
            return 0.0
        over_link = np.where(moved[2 * self.gpus : 3 * self.gpus] > 0, self.link_latency, np.inf)
        start_up = min(over_link.min(), self.latency if moved[: self.gpus].any() else np.inf)
        return float((moved[busy] / self.capacity[busy]).max()) + float(start_up)


def off_diagonal(traffic: np.ndarray) -> np.ndarray:
    """float64[src, dst] bytes: what leaves its GPU."""
    return np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic)
