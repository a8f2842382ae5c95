"""Straight lower limits on the rows of a token, linear in which experts are in the same group, compiled (numba).

A token with k experts, n_e of which are in the group of e, touches λ = Σ_e 1 / n_e groups; one that is its home costs
nothing. Two kinds of lines, both true of every placement:

* an expert at a time: its part of the rows, (1 - y) / n with y = 1 at home and n a whole number, is at least
  c - s n - (c - s) y for any chord c - s n of 1 / n between neighbouring whole numbers;
* a token at a time: rows against the number of its pairs that are in the same group and of its experts at home, over all
  ways to divide k experts, have a lower convex hull, whose facets are lines.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.spatial import ConvexHull, QhullError

MOST_CHOICES = 12
"""Experts of a token up to which all ways to divide them are listed."""


@cache
def facets(choices: int, size: int, groups: int) -> NDArray[np.float64]:
    """Lines float64[experts of a token, line, 3] for up to so many experts: rows are at least a + b * pairs + c * at home.

    size: experts of a group. Lines of nothing, -inf, fill up the tables of token sizes with fewer lines.
    """
    tables = [_facets_of(experts, size, groups) for experts in range(min(choices, MOST_CHOICES) + 1)]
    tables += [np.empty((0, 3))] * (choices + 1 - len(tables))
    lines = np.zeros((choices + 1, max(1, *map(len, tables)), 3))
    lines[:, :, 0] = -np.inf
    for table, own in zip(lines, tables, strict=True):
        table[: len(own)] = own
    return lines


def _facets_of(experts: int, size: int, groups: int) -> NDArray[np.float64]:
    """Lines float64[line, 3] of tokens with exactly so many experts."""
    fewest: dict[tuple[int, int], int] = {}
    for home in range(min(experts, size) + 1):
        for parts in _divisions(experts - home, size, groups):
            pairs = sum(part * (part - 1) // 2 for part in (home, *parts))
            fewest[pairs, home] = min(len(parts), fewest.get((pairs, home), experts))
    points = np.array([(pairs, home, rows) for (pairs, home), rows in fewest.items()], dtype=np.float64).reshape(-1, 3)
    lifted = points + np.array([0.0, 0.0, 2.0 * experts + 1.0])
    try:
        planes = ConvexHull(np.concatenate([points, lifted])).equations
    except (QhullError, ValueError):
        return np.empty((0, 3))  # too few experts for a hull with an inside: single experts say all there is to say
    below = planes[planes[:, 2] < -1e-9]
    lines = -below[:, [3, 0, 1]] / below[:, 2:3]
    lines = np.unique(lines.round(9), axis=0)
    # Rounded lines may cross the points.
    lines[:, 0] += np.minimum((points[:, 2] - lines[:, :1] - lines[:, 1:] @ points[:, :2].T).min(axis=1), 0.0)
    return lines


def _divisions(experts: int, largest: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide so many experts into at most so many parts, the largest first."""
    if experts == 0:
        yield ()
    elif most:
        for part in range(min(experts, largest), 0, -1):
            for rest in _divisions(experts - part, part, most - 1):
                yield (part, *rest)


@njit(cache=True, nogil=True)
def tangent(
    member: np.ndarray, home: np.ndarray, weight: np.ndarray, same: np.ndarray, lines: np.ndarray, slope: np.ndarray
) -> float:
    """Write slope float64[vertex, vertex] and return a constant: rows are at least constant - <slope, Y> for all placements.

    The tokens' lines that are highest at `same`. member: int32[net, choice] (-1 after the last); home: int64[net], the vertex
    of the home group, -1 = outside; weight: float64[net] tokens; same: float64[vertex, vertex], how much two vertices are in
    the same group; Y: 1.0 where they are, else 0.0; lines: of `facets`.
    """
    slope[:] = 0.0
    constant = 0.0
    near = np.empty(member.shape[1])
    for net in range(len(member)):
        own, at_home = member[net], home[net]
        size, pairs, homely, single = 0, 0.0, 0.0, 0.0
        for expert in own:
            if expert < 0:
                break
            together = 0.0
            for other in own:
                if other < 0:
                    break
                together += same[expert, other]
            near[size] = max(together, 1.0)
            pairs += (together - 1.0) / 2
            fall, top = _chord(near[size])
            y = same[expert, at_home] if at_home >= 0 else 0.0
            homely += y
            single += top - fall * near[size] - (top - fall) * y
            size += 1
        best, highest = -1, single
        for at in range(lines.shape[1]):
            value = lines[size, at, 0] + lines[size, at, 1] * pairs + lines[size, at, 2] * homely
            if value > highest:
                best, highest = at, value
        if best >= 0:
            constant += weight[net] * lines[size, best, 0]
        for at in range(size):
            expert = own[at]
            fall, top = _chord(near[at])
            pair, away = (fall, top - fall) if best < 0 else (-lines[size, best, 1] / 2, -lines[size, best, 2])
            if best < 0:
                constant += weight[net] * (top - fall)
            for other in own[:size]:
                if other != expert:
                    slope[expert, other] += weight[net] * pair
            if at_home >= 0:
                slope[expert, at_home] += weight[net] * away
    return constant


@njit(cache=True, nogil=True)
def _chord(near: float) -> tuple[float, float]:
    """(s, c): c - s n is at most 1 / n for all whole n > 0; a mixture of the two chords around `near`, at least 1."""
    low = max(int(near - 0.5), 1)
    part = min(max(near - 0.5 - low, 0.0), 1.0)
    here, above = 1.0 / (low * (low + 1)), 1.0 / ((low + 1) * (low + 2))
    return (1 - part) * here + part * above, (1 - part) * (2 * low + 1) * here + part * (2 * low + 3) * above
