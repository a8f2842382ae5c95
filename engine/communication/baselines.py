"""Send orders that systems use without optimising: random (RCS) and shortest job first (SJF), Aurora §8.1."""

import numpy as np

from engine.plan import Schedule


def random_order(traffic: np.ndarray, seed: int) -> Schedule:
    """RCS: every sender works through its peers in a random order. traffic: float64[src, dst] bytes."""
    keys = np.random.default_rng(seed).random(traffic.shape)
    return _by_key(traffic, keys)


def shortest_first(traffic: np.ndarray) -> Schedule:
    """SJF: every sender serves the peer with the fewest bytes first. traffic: float64[src, dst] bytes."""
    return _by_key(traffic, traffic)


def _by_key(traffic: np.ndarray, key: np.ndarray) -> Schedule:
    src, dst = np.nonzero(np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic))
    order = np.lexsort((dst, key[src, dst], src))
    src, dst = src[order], dst[order]
    return Schedule(src=src, dst=dst, bytes=traffic[src, dst], phase=np.zeros(len(src), dtype=np.int64))
