"""GEMM times on a grid of sizes, and the interpolated times of the sizes between and just beyond them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from engine.errors import InputError

REACH = 4.0
"""Limit up to which a time beyond the measured sizes is still predicted, as a multiple of the largest."""


def never_falling(seconds: np.ndarray) -> np.ndarray:
    """float64[size]: times over ascending sizes, the bumps cut off: a size that was measured slower than a larger one (another
    kernel, noise) takes the larger one's time, which it has by padding. Every cost source promises that more work never
    takes less time."""
    return np.minimum.accumulate(seconds[::-1])[::-1]


@dataclass(frozen=True, eq=False)
class Curve:
    """Piecewise-linear time over size, as Lancet prices its communication (§3).

    sizes: float64[point], ascending and different
    seconds: float64[point], never falling
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

    def at(self, size: np.ndarray, subject: str) -> np.ndarray:
        """float64[...]: seconds of work of `size` (float64[...]); 0 for 0.

        Below the smallest measured size its time holds, for it is mostly start-up; above the largest its throughput
        holds, up to `REACH` times that size. Raises InputError beyond; the message begins with `subject`.
        """
        size = np.asarray(size, dtype=np.float64)
        largest = self.sizes[-1]
        if size.max(initial=0) > REACH * largest:
            raise InputError(
                f"{subject} was measured up to size {largest:.3g} and {size.max():.3g} is asked for, more than {REACH:g} times "
                "that; measure larger sizes, or use the datasheet or an α–β profile for it"
            )
        beyond = np.maximum(size / largest, 1.0)
        return np.where(size > 0, np.interp(size, self.sizes, self.seconds) * beyond, 0.0)


@dataclass(frozen=True, eq=False)
class GemmTable:
    """seconds: float64[m, n, k] at the sizes m, n, k: float64[size], ascending."""

    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    seconds: np.ndarray

    @classmethod
    def of(cls, points: Iterable[tuple[float, ...]]) -> Self | None:
        """The grid of (m, n, k, seconds) points in any order, of which each size has one; None where they are no grid: of
        two sizes or more on every axis, with a point wherever three of them meet."""
        table = np.array(sorted(points), dtype=np.float64)
        axes = [np.unique(column) for column in table[:, :3].T]
        shape = tuple(len(axis) for axis in axes)
        if min(shape) < 2 or len(table) != np.prod(shape) or len(np.unique(table[:, :3], axis=0)) != len(table):
            return None
        return cls(*axes, table[:, 3].reshape(shape))

    def of_shape(self, n: float, k: float) -> np.ndarray:
        """float64[m]: seconds at the table's m for one shape, linear in the logarithms between the grid's n and k, never
        falling over m (see `engine.costs.gemm_table`). Outside the grid its edge counts, above it at the edge's throughput."""
        log_seconds = np.log(self.seconds)
        for size, sizes in ((n, self.n), (k, self.k)):
            log_seconds = _blend(log_seconds, np.log(sizes), np.log(size))
        return never_falling(np.exp(log_seconds)) * max(n / self.n[-1], 1.0) * max(k / self.k[-1], 1.0)

    def over_rows(self, of_shape: np.ndarray, m: np.ndarray) -> np.ndarray:
        """float64[...]: seconds of m (float64[...]) rows of the shape with the times `of_shape`; 0 for m = 0."""
        m = np.asarray(m, dtype=np.float64)
        seconds = np.exp(np.interp(np.log(np.maximum(m, 1.0)), np.log(self.m), np.log(of_shape)))
        return np.where(m > 0, seconds * np.maximum(m / self.m[-1], 1.0), 0.0)


def _blend(values: np.ndarray, sizes: np.ndarray, size: float) -> np.ndarray:
    """`values` interpolated linearly at `size` along their second axis, with its places at `sizes`; clamped at both ends."""
    upper = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
    share = np.clip((size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1]), 0.0, 1.0)
    return (1 - share) * values[:, upper - 1] + share * values[:, upper]
