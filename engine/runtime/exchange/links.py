"""The links between ranks: how fast each is, and the start-up of a send. Needs no PyTorch."""

from dataclasses import dataclass

import numpy as np

from engine.network import Network
from engine.schema import Frozen
from engine.units import digits, seconds

UNSEEN = 1e13
"""Bytes/s, ten times those of the fastest port there is. A fit beyond it says that the time measured did not grow with
the bytes sent, not how fast the links are."""


class Tiers(Frozen):
    """The ranks in two tiers: nodes with links of their own, and the fabric between them. A rank with a link of 0 meets
    its node's other ranks on the fabric.

    node: of every rank, exactly one
    port: bytes/s of every rank in each direction, to the fabric
    link: bytes/s of every rank in each direction, to the other ranks of its node
    """

    node: tuple[int, ...]
    port: tuple[float, ...]
    link: tuple[float, ...]

    @property
    def network(self) -> Network:
        """The network without start-ups. All ranks make the same one, whatever they measure."""
        port = np.array(self.port)
        return Network(port, port, np.array(self.link), np.array(self.node), 0.0, np.zeros(len(port)))


@dataclass(frozen=True, eq=False)
class Links:
    """The links of the ranks.

    rates: float64[rank] bytes/s of every rank's link to the fabric in each direction
    start_up: seconds of a send in addition to its bytes
    node: int64[rank]
    near: float64[rank] bytes/s of its link to the other ranks of its node, 0 if it has none (default: all ranks meet on
        the fabric)
    """

    rates: np.ndarray
    start_up: float = 0.0
    node: np.ndarray | None = None
    near: np.ndarray | None = None

    @classmethod
    def between(cls, rates: np.ndarray, tiers: Tiers | None, start_up: float = 0.0) -> "Links":
        """The links of ranks whose nodes are known, or that all meet on the fabric."""
        nodes = () if tiers is None else (np.array(tiers.node), np.array(tiers.link))
        return cls(rates, start_up, *nodes)

    @property
    def network(self) -> Network:
        """The links as a network of all ranks."""
        ranks = len(self.rates)
        node, near = (np.arange(ranks), np.zeros(ranks)) if self.near is None else (self.node, self.near)
        return Network(self.rates, self.rates, near, node, self.start_up, np.full(ranks, self.start_up))

    @property
    def slowest(self) -> float:
        """Bytes/s between the two ranks with the slowest link."""
        network = self.network
        out, into = network.ports(*np.nonzero(~np.eye(network.gpus, dtype=bool)))
        return float(network.capacity[np.concatenate([out, into])].min())

    @property
    def text(self) -> str:
        """The assumption of a prediction about the links, in words."""
        said = f"links of {_range(self.rates)}"
        if self.near is not None and self.near.any():
            said += f" (inside nodes {_range(self.near[self.near > 0])})"
        return f"{said}, a latency of {seconds(self.start_up)} per send"


def _range(rates: np.ndarray) -> str:
    if rates.max() >= UNSEEN:
        return "a rate too high to be seen in what was measured"
    slowest, fastest = (digits(rate * 8 / 1e6) for rate in (rates.min(), rates.max()))
    return f"{slowest if slowest == fastest else f'{slowest} to {fastest}'} Mbit/s"
