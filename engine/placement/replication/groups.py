"""Expert groups onto nodes, evenly: the first step of EPLB's hierarchical policy, here the best one where it can be tried.

Routing that is limited to few groups then meets few nodes; the price is that a node is as busy as its groups.
"""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from engine.placement.replication.exchange import Layouts, exchange
from engine.placement.replication.greedy import equal_weights, packed
from engine.result import never

MOST_WAYS = 3000
"""Ways to deal groups to nodes up to which all are tried: 8 groups on 4 nodes are 105, 12 on 3 nodes 5775."""


def groups_of_nodes(
    load: NDArray[np.float64], nodes: int, groups: int, speed_of_node: float, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(groups in the order of their nodes int64[row, group], proven least time of the busiest node float64[row]).

    load: float64[row, load, expert], in units in which a node does `speed_of_node` in a time of 1.
    """
    rows, loads, experts = load.shape
    work = load.reshape(rows, loads, groups, experts // groups).sum(axis=3) / speed_of_node
    ways = _partitions(groups, nodes)
    if ways is not None:
        worst = np.stack([work[:, :, way].sum(axis=3).max(axis=(1, 2)) for way in ways])
        return ways[worst.argmin(axis=0)].reshape(rows, groups), worst.min(axis=0)
    share = groups // nodes
    worst_work = work.max(axis=1)
    layout = packed(worst_work, np.ones((rows, groups), dtype=np.int64), np.full(nodes, share), np.ones(nodes))
    layouts = Layouts(layout, equal_weights(layout, work), np.ones(nodes))
    exchange(layouts, np.ones(rows), 200, np.random.default_rng(seed), never)
    # The heaviest group has company: the lightest others at least.
    rising = np.sort(work, axis=2)
    least = rising[:, :, -1] + rising[:, :, : share - 1].sum(axis=2)
    return layouts.expert.reshape(rows, groups), least.max(axis=1)


def _partitions(groups: int, nodes: int) -> NDArray[np.int64] | None:
    """int64[way, node, group of the node]: every even dealing of groups to alike nodes; None if there are too many."""
    ways: list[list[tuple[int, ...]]] = [[]]
    for _ in range(nodes):
        longer = []
        for way in ways:
            left = sorted(set(range(groups)).difference(*way))
            for others in combinations(left[1:], groups // nodes - 1):
                longer.append([*way, (left[0], *others)])
                if len(longer) > MOST_WAYS:
                    return None
        ways = longer
    return np.array(ways)
