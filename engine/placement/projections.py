"""Nearest points of simple sets, which relaxations of placements project onto."""

import numpy as np

from engine.result import Floats

HALVINGS = 60
"""Halvings of the interval of shifts: to round-off."""


def onto_box(values: Floats, highest: float, total: float) -> Floats:
    """The nearest vector with entries in 0 … highest that sum to `total`: all shifted alike, and cut off."""
    low, high = values.min() - highest, values.max()
    for _ in range(HALVINGS):
        shift = (low + high) / 2
        if np.clip(values - shift, 0.0, highest).sum() > total:
            low = shift
        else:
            high = shift
    return np.clip(values - high, 0.0, highest)
