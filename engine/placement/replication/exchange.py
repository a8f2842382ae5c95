"""Exchanges of replicas between pairs of GPUs, for many layers and all pairs of GPUs at once.

The work of a slot is in units of the ideal: 1 is what a GPU of speed 1 has when the work is divided perfectly. No exchange
puts two replicas of an expert on the same GPU.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.result import Stop

STILL_ROUNDS = 6
"""Rounds without any improvement after which a row is taken to have none left: its pairs are drawn anew each time."""
IMPROVEMENT = 1e-9
"""Least relative improvement of a pair's worse GPU that counts, far above round-off."""
MOST_ENTRIES = 2**22
"""Entries of that table for one row: where there are more, the greedy layout has to do."""
ENTRIES_AT_ONCE = 400_000
"""Entries of the table of exchanges that are weighed in one step: few enough for the processor's cache."""


@dataclass
class Layouts:
    """Layouts and what they weigh.

    expert: int64[row, gpu, place]; weight: float64[row, load, gpu, place], 0 where there is no slot; time: float64[row,
    load, gpu], the sum of the weights over the GPU's speed; speed: float64[gpu].
    """

    expert: NDArray[np.int64]
    weight: NDArray[np.float64]
    speed: NDArray[np.float64]

    def __post_init__(self) -> None:
        self.time = self.weight.sum(axis=3) / self.speed

    @property
    def worst(self) -> NDArray[np.float64]:
        """float64[row]: time of the slowest GPU under the worst load."""
        return self.time.max(axis=(1, 2))

    def take(self, rows: NDArray[np.int64]) -> "Layouts":
        return Layouts(self.expert[rows], self.weight[rows], self.speed)

    def put(self, rows: NDArray[np.int64], better: "Layouts") -> None:
        self.expert[rows], self.weight[rows], self.time[rows] = better.expert, better.weight, better.time


def exchange(
    layouts: Layouts, good_enough: NDArray[np.float64], rounds: int, rng: np.random.Generator, stop: Stop
) -> None:
    """Improve layouts in place by exchanging replicas between the GPUs of pairs, all pairs of all rows at once.

    In each round the GPUs are paired anew, the slowest with the fastest or at random, and every pair makes the one
    exchange that lowers the time of its worse GPU, over all loads, the most. good_enough: float64[row], the worst time
    below which a row is left alone.
    """
    open_rows = np.flatnonzero(layouts.worst > good_enough)
    still = np.zeros(len(layouts.expert), dtype=np.int64)
    _, gpus, places = layouts.expert.shape
    if gpus < 2 or gpus // 2 * places * places > MOST_ENTRIES:
        return
    at_once = max(1, ENTRIES_AT_ONCE // (gpus // 2 * places * places))
    for turn in range(rounds):
        for first in range(0, len(open_rows), at_once):
            if stop():
                return
            rows = open_rows[first : first + at_once]
            part = layouts.take(rows)
            changed = _exchange_once(part, _pairs(part.time, turn, rng))
            layouts.put(rows, part)
            still[rows] = np.where(changed, 0, still[rows] + 1)
        keep = (layouts.worst[open_rows] > good_enough[open_rows]) & (still[open_rows] < STILL_ROUNDS)
        open_rows = open_rows[keep]
        if not len(open_rows):
            return


def _pairs(time: NDArray[np.float64], turn: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """int64[2, row, pair]: in even turns the slowest GPU with the fastest and so on inwards, otherwise at random."""
    rows, _, gpus = time.shape
    if turn % 2 == 0:
        order = np.argsort(-time.max(axis=1), axis=1, kind="stable")
    else:
        order = np.argsort(rng.random((rows, gpus)), axis=1)
    half = gpus // 2
    return np.stack([order[:, :half], order[:, ::-1][:, :half]])


def _exchange_once(layouts: Layouts, pairs: NDArray[np.int64]) -> NDArray[np.bool_]:
    """One exchange for every pair that gains by one; bool[row], whether anything changed."""
    expert, weight, time, speed = layouts.expert, layouts.weight, layouts.time, layouts.speed
    rows, loads, _, places = weight.shape
    first, second = pairs
    row = np.arange(rows)[:, None]
    mine, yours = expert[row, first], expert[row, second]  # [row, pair, place]
    every = np.arange(loads)[None, :, None]
    w1, w2 = weight[row[:, None], every, first[:, None]], weight[row[:, None], every, second[:, None]]
    t1, t2 = time[row[:, None], every, first[:, None]], time[row[:, None], every, second[:, None]]
    s1, s2 = speed[first], speed[second]
    before = np.maximum(t1, t2).max(axis=1)
    after = None
    for load in range(loads):
        moved = w1[:, load, :, :, None] - w2[:, load, :, None, :]
        first_time = t1[:, load, :, None, None] - moved / s1[..., None, None]
        second_time = t2[:, load, :, None, None] + moved / s2[..., None, None]
        worse = np.maximum(first_time, second_time, out=first_time)
        after = worse if after is None else np.maximum(after, worse, out=after)
    same = mine[..., :, None] == yours[..., None, :]
    forbidden = (same.any(axis=3) | (mine < 0))[..., :, None] | (same.any(axis=2) | (yours < 0))[..., None, :]
    after[forbidden] = np.inf
    flat = after.reshape(rows, -1, places * places)
    best = flat.argmin(axis=2)
    gains = np.take_along_axis(flat, best[..., None], axis=2)[..., 0] < before * (1 - IMPROVEMENT)
    r, p = np.nonzero(gains)
    i, j = np.divmod(best[r, p], places)
    g, h = first[r, p], second[r, p]
    expert[r, g, i], expert[r, h, j] = expert[r, h, j], expert[r, g, i]
    my_weight, your_weight = weight[r, :, g, i], weight[r, :, h, j]
    weight[r, :, g, i], weight[r, :, h, j] = your_weight, my_weight
    # Summed afresh, so that round-off does not add up over many rounds.
    time[r, :, g] = weight[r, :, g].sum(axis=2) / speed[g][:, None]
    time[r, :, h] = weight[r, :, h].sum(axis=2) / speed[h][:, None]
    return gains.any(axis=1)
