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

    def moved(self, traffic: np.ndarray) -> np.ndarray:
        """float64[4·gpu] bytes that an all-to-all of this traffic (float64[src, dst] bytes, diagonal ignored) moves through
        every port, as in `capacity`."""
        traffic = off_diagonal(traffic)
        fabric, link = np.where(self.linked, 0.0, traffic), np.where(self.linked, traffic, 0.0)
        return np.concatenate([matrix.sum(axis=axis) for matrix in (fabric, link) for axis in (1, 0)])

    def bound(self, traffic: np.ndarray) -> float:
        """Seconds below which no all-to-all of this traffic (float64[src, dst] bytes) can end, one start-up included."""
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
