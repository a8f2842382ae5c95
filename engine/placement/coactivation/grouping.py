"""Experts grouped by how often they fire together, pair by pair: a quick start for the search."""

import numpy as np
from numpy.typing import NDArray

from engine.placement.coactivation.nets import Nets


def grouped(nets: Nets) -> NDArray[np.int64]:
    """The group of every expert, as many in each: int64[expert].

    Group by group: the free expert that fires with the other free ones most often, then always the one that fires most often
    with those of the group. A pair counts by the tokens that go to both, over their further experts.
    """
    experts = nets.experts
    together = np.zeros((experts + 1, experts + 1))
    sizes = (nets.member >= 0).sum(axis=1)
    weight = nets.price.max(axis=1) / np.maximum(sizes - 1, 1)
    for own in nets.member.T:
        for other in nets.member.T:
            np.add.at(together, (own, other), weight)
    together = together[:experts, :experts]  # without "none", which is last
    np.fill_diagonal(together, 0.0)
    group, free = np.empty(experts, dtype=np.int64), np.ones(experts, dtype=bool)
    with_free = together.sum(axis=1)
    for index in range(nets.groups):
        pull = with_free.copy()
        for held in range(experts // nets.groups):
            expert = np.where(free, pull, -1.0).argmax()
            pull = together[expert].copy() if held == 0 else pull + together[expert]
            group[expert], free[expert] = index, False
            with_free -= together[expert]
    return group
