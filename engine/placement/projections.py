"""Nearest points of simple sets, which relaxations of placements project onto."""

import numpy as np

from engine.result import Floats

HALVINGS = 60
"""Halvings of the interval of shifts: to round-off."""


def onto_box(values: Floats, highest: float, total: float) -> Floats:
    """The nearest vector with entries in 0 … highest that sum to `total`: all shifted alike, and cut off."""
    low, high = values.min() - highest, values.max()
    moved = np.empty_like(values)

    def shifted(shift: float) -> Floats:
        return np.minimum(np.maximum(np.subtract(values, shift, out=moved), 0.0, out=moved), highest, out=moved)

    for _ in range(HALVINGS):
        shift, ends = (low + high) / 2, (low, high)
        if shifted(shift).sum() > total:
            low = shift
        else:
            high = shift
        if ends == (low, high):
            break  # nothing lies between them any more
    return shifted(high)
