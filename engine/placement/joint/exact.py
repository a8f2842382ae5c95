"""The exact joint placement of small instances: a shortest path through all placements of every layer."""

from itertools import permutations
from math import factorial, prod

import numpy as np
from numpy.typing import NDArray

from engine.placement.joint.rows import RowsInstance
from engine.placement.joint.state import JointTerms
from engine.result import Stop

MOST_PLACEMENTS, MOST_STEPS = 2520, 150_000_000
"""Placements of a layer, and pairs of them over all layers and budgets, up to which this is a matter of a second."""


def solvable(terms: JointTerms, max_moves: int | None) -> bool:
    """Whether the instance is small enough, and its objective a sum over layers: not where the worst workload counts, nor
    where rows do."""
    instance = terms.instance
    if isinstance(instance, RowsInstance):
        return False
    placements = factorial(instance.experts) // prod(factorial(int(slots)) for slots in instance.slots)
    steps = placements**2 * max(instance.layers - 1, 1) * ((max_moves or 0) + 1)
    return not terms.worst and instance.experts <= 10 and placements <= MOST_PLACEMENTS and steps <= MOST_STEPS


def shortest(
    terms: JointTerms, start: NDArray[np.int64] | None, max_moves: int | None, stop: Stop
) -> NDArray[np.int64] | None:
    """The best placement int64[layer, expert] with at most max_moves pairs elsewhere than in `start`; None if stopped.

    The value of a layer's placement is the least cost of the layers up to it, for every number of moves left.
    """
    instance = terms.instance
    every = _all_placements(instance.slots)
    to = (every[:, :, None] == np.arange(instance.gpus)).astype(np.float64)
    if start is None or max_moves is None:
        start, max_moves = np.broadcast_to(every[:1], (instance.layers, instance.experts)), 0
        moves = np.zeros((instance.layers, len(every)), dtype=np.int64)
    else:
        moves = (every[None] != start[:, None]).sum(axis=2)
    alone = np.einsum("wle,neg->lnwg", terms.load, to).max(axis=3).sum(axis=2)
    value = np.full((max_moves + 1, len(every)), np.inf)
    for budget in range(max_moves + 1):
        fits = moves[0] <= budget
        value[budget, fits] = alone[0, fits]
    came_from = []
    distance_to = (to @ terms.distance).reshape(len(every), -1)
    flat = to.reshape(len(every), -1)
    for layer in range(1, instance.layers):
        moved = np.einsum("ik,nkg->nig", terms.hop[0, layer - 1], distance_to.reshape(to.shape)).reshape(len(every), -1)
        cost = flat @ moved.T
        best = np.full(value.shape, np.inf)
        origin = np.zeros(value.shape, dtype=np.int64)
        for count in np.unique(moves[layer]):
            here = np.flatnonzero(moves[layer] == count)
            for budget in range(count, max_moves + 1):
                if stop():
                    return None
                total = value[budget - count][:, None] + cost[:, here]
                origin[budget, here] = total.argmin(axis=0)
                best[budget, here] = total[origin[budget, here], np.arange(len(here))]
        value = best + alone[layer]
        came_from.append(origin)
    index, budget = int(value[max_moves].argmin()), max_moves
    path = [index]
    for layer in range(instance.layers - 1, 0, -1):
        before = int(came_from[layer - 1][budget, index])
        budget -= int(moves[layer, index])
        index = before
        path.append(index)
    return every[path[::-1]]


def _all_placements(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[placement, expert]: every way to fill the slots, in lexicographic order."""
    if len(slots) == int(slots.sum()) == int(slots.max(initial=0) * len(slots)):
        return np.array(list(permutations(range(len(slots)))), dtype=np.int64)
    rows: list[list[int]] = []

    def fill(row: list[int], left: list[int]) -> None:
        if len(row) == int(slots.sum()):
            rows.append(row)
            return
        for gpu, free in enumerate(left):
            if free:
                fill([*row, gpu], [count - (other == gpu) for other, count in enumerate(left)])

    fill([], slots.tolist())
    return np.array(rows, dtype=np.int64)
