"""What the ranks of `test_exchange` exchange."""

import numpy as np

from engine.communication.order import order, random_order
from engine.plan import OrderMode, Schedule

MODES: tuple[OrderMode, ...] = ("matched", "shared", "sequential", "concurrent")
PACED_RATES = np.array([40e3, 20e3, 20e3])
"""Bytes/s."""


def counts_of(ranks: int, seed: int) -> np.ndarray:
    """int64[src, dst] rows, some of them none."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, 60, (ranks, ranks)) * (rng.random((ranks, ranks)) < 0.8)


def schedule_of(mode: OrderMode, counts: np.ndarray, seed: int) -> Schedule | None:
    """A schedule made for other traffic than it is used for, so that some pairs are unknown to it."""
    planned = np.where(np.random.default_rng(seed + 100).random(counts.shape) < 0.8, counts, 0).astype(float)
    if mode == "concurrent":
        return None
    if mode == "sequential":
        return random_order(planned, seed)
    rate = np.linspace(1.0, 2.0, len(counts))
    return order(planned, rate, rate, mode).solution
