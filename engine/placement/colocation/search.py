"""Local search for pairs of experts on mixed GPUs: exact bottleneck assignments over two of the three indices in turn.

With the experts of a fixed on their GPUs, those of b are a plain assignment to GPUs, and likewise with a and b, or with
pairs and GPUs, exchanged. No step makes the largest cost worse; among equals it takes the least sum of a power of the
costs, which also presses on those next to the largest, so a descent ends where all three agree. A kick deals the experts
of the worst GPU and of a few others out anew.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.placement.bottleneck import bottleneck_assignment, with_slack
from engine.result import Stop

RANDOM_STARTS = 4
KICKS = 30
LEAST_KICKED, MOST_KICKED = 2, 5
POWERS = (16.0, 4.0)
"""Descents take these in turn: neither leads to the better end everywhere, and both do better than the plain sum."""
Triples = tuple[NDArray[np.int64], NDArray[np.int64]]
"""int64[gpu] each: the expert of a and the expert of b on every GPU."""


def search(
    cost: NDArray[np.float64],
    starts: list[Triples],
    target: float,
    seed: int,
    stop: Stop,
    on_incumbent: Callable[[float], None],
) -> Triples:
    """Experts with a low largest cost, at least as good as every one of `starts` (at least one).

    cost: float64[gpu, expert of a, expert of b]. The search ends at a largest cost of `target`, after a fixed number
    of descents, or when `stop` answers True.
    """
    rng = np.random.default_rng(seed)
    gpus = len(cost)
    shape = cost - cost.min()
    best = min(starts, key=lambda state: largest(cost, state))
    lowest = largest(cost, best)
    on_incumbent(lowest)
    random = [(rng.permutation(gpus), rng.permutation(gpus)) for _ in range(RANDOM_STARTS)]
    first = [*starts, *random]
    for turn in range(len(first) + (KICKS if gpus > 1 else 0)):
        if lowest <= target or stop():
            break
        state = first[turn] if turn < len(first) else _kicked(cost, best, rng)
        state = _descend(shape, state, POWERS[turn % len(POWERS)], stop)
        worth = largest(cost, state)
        if worth < lowest:
            on_incumbent(worth)
        if worth <= lowest:  # another of the same worth is as good to kick, and not the same again
            best, lowest = state, worth
    return best


def largest(cost: NDArray[np.float64], state: Triples) -> float:
    """The largest cost that a state uses."""
    return float(cost[np.arange(len(cost)), *state].max())


def _worth(cost: NDArray[np.float64], state: Triples, power: float) -> tuple[float, float]:
    """The largest cost, then the sum of all costs to a power, in units of the largest."""
    used = cost[np.arange(len(cost)), *state]
    most = float(used.max())
    return most, float(((used / most) ** power).sum()) if most > 0 else 0.0


def _descend(cost: NDArray[np.float64], state: Triples, power: float, stop: Stop) -> Triples:
    """Reassign the experts of b, those of a, and the pairs to GPUs, until nothing changes for the better.

    cost: at least 0.
    """
    gpu = same = np.arange(len(cost))
    worth, failures, turn = _worth(cost, state, power), 0, 0
    while failures < 3 and not stop():
        a, b = state
        if turn == 0:
            changed = a, _reassign(cost[gpu, a, :], b, power)
        elif turn == 1:
            changed = _reassign(cost[gpu, :, b], a, power), b
        else:
            pair = _reassign(cost[:, a, b], same, power)
            changed = a[pair], b[pair]
        new_worth = _worth(cost, changed, power)
        failures = 0 if new_worth < worth else failures + 1
        if new_worth < worth:
            state, worth = changed, new_worth
        turn = (turn + 1) % 3
    return state


def _reassign(weight: NDArray[np.float64], known: NDArray[np.int64], power: float) -> NDArray[np.int64]:
    """The bottleneck assignment of weight float64[row, column] with the least sum of powers; column_of_row int64[row]."""
    _, most = bottleneck_assignment(weight, known)
    if most <= 0:
        return known
    return with_slack(np.where(weight <= most, (weight / most) ** power, np.inf), 1.0)


def _kicked(cost: NDArray[np.float64], state: Triples, rng: np.random.Generator) -> Triples:
    """The worst GPU and a few others exchange their experts of both models at random."""
    gpus = len(cost)
    worst = int(cost[np.arange(gpus), *state].argmax())
    count = min(gpus, int(rng.integers(LEAST_KICKED, MOST_KICKED + 1)))
    others = np.delete(np.arange(gpus), worst)
    chosen = np.append(rng.choice(others, count - 1, replace=False), worst)
    a, b = state[0].copy(), state[1].copy()
    a[chosen], b[chosen] = a[rng.permutation(chosen)], b[rng.permutation(chosen)]
    return a, b
