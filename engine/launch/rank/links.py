"""The links between the ranks of a launch: how fast each is, and the start-up of a send. Needs no PyTorch."""

from dataclasses import dataclass, replace

import numpy as np

from engine.costs import fit_line
from engine.launch.rank.instructions import RankInstructions, Tiers
from engine.network import Network
from engine.units import digits, seconds

UNSEEN = 1e13
"""Bytes/s, ten times those of the fastest port there is. A fit beyond it says that the time measured did not grow with
the bytes sent, not how fast the links are."""


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


def links_of(instructions: RankInstructions, measured: dict[str, list]) -> Links | None:
    """The links as known before the launch, or all alike (those inside nodes among themselves) and as fast as they were
    measured. None for a single rank. The start-up is that of a send to one peer, the cost of every phase and every send
    of a sequence; sends to all at once start together.

    measured: as returned by `measure_machine`
    """
    if not measured["network"]:
        return None
    ranks, tiers = instructions.ranks, instructions.tiers
    if instructions.bandwidth is not None:
        links = known_links(instructions)
    elif "inside nodes" not in measured:
        links = Links(np.full(ranks, _rate(measured["network"])))
    else:
        near = np.where(np.array(tiers.link) > 0, _rate(measured["inside nodes"]), 0.0)
        links = Links(np.full(ranks, _rate(measured["between nodes"])), node=np.array(tiers.node), near=near)
    sent, took = np.array(measured["phases"]).T
    return replace(links, start_up=max(0.0, float(np.median(took - sent / links.slowest))))


def known_links(instructions: RankInstructions, start_up: float = 0.0) -> Links:
    """The links of a testbed."""
    return Links.between(np.array(instructions.bandwidth), instructions.tiers, start_up)


def _rate(measured: list[list[float]]) -> float:
    """Bytes/s of exchanges of [bytes, seconds]."""
    return 1 / max(fit_line(*np.array(measured).T).beta, 1 / UNSEEN)
