"""The links between the ranks of a launch, as known beforehand or as measured. Needs no PyTorch."""

from dataclasses import replace

import numpy as np

from engine.costs import fit_line
from engine.launch.rank.instructions import RankInstructions
from engine.runtime.exchange.links import UNSEEN, Links


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
