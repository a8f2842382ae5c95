"""Times between and just beyond measured sizes."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError

REACH = 4.0
"""How far beyond the largest measured size a time is still predicted, as a multiple of that size."""


def never_falling(seconds: np.ndarray) -> np.ndarray:
    """float64[size]: times over ascending sizes, the bumps cut off: a size that was measured slower than a larger one (another
    kernel, noise) takes the larger one's time, which it has by padding. Every cost source promises that more work never
    takes less time."""
    return np.minimum.accumulate(seconds[::-1])[::-1]


@dataclass(frozen=True, eq=False)
class Curve:
    """Piecewise-linear time over size, as Lancet prices its communication (§3).

    sizes: float64[point], ascending and different; seconds: float64[point], never falling.
    """

    sizes: np.ndarray
    seconds: np.ndarray

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> "Curve":
        """The curve through (size, seconds) points in any order, at least one; of a size measured several times the median
        counts, and see `never_falling`."""
        size, seconds = np.array(sorted(points), dtype=np.float64).T
        sizes, first = np.unique(size, return_index=True)
        return cls(sizes, never_falling(np.array([np.median(part) for part in np.split(seconds, first[1:])])))

    def at(self, size: np.ndarray, what: str) -> np.ndarray:
        """float64[...]: seconds of work of `size` (float64[...]); 0 where it is 0.

        Below the smallest measured size its time holds, for it is mostly start-up; above the largest its throughput
        holds, up to `REACH` times that size. Raises InputError beyond; `what` begins the message.
        """
        size = np.asarray(size, dtype=np.float64)
        largest = self.sizes[-1]
        if size.max(initial=0) > REACH * largest:
            raise InputError(
                f"{what} was measured up to size {largest:.3g} and {size.max():.3g} is asked for, more than {REACH:g} times "
                "that; measure larger sizes, or use the datasheet or an α–β profile for it"
            )
        beyond = np.maximum(size / largest, 1.0)
        return np.where(size > 0, np.interp(size, self.sizes, self.seconds) * beyond, 0.0)
