"""The least rows that the tokens of a layer send, in any placement: straight lower limits over a relaxed placement.

The same-group matrix Y of P groups of C vertices (C - 1 experts, and one vertex that stands for the group itself, or is left
out where no token has a home) is positive semidefinite with unit diagonal and row sums C. Its part orthogonal to the constant
vector has P - 1 eigenvalues C, the others 0; an expert shares its group with one of the group vertices, these with none of
each other. Rows are at least constant - <slope, Y> (see `lines`), and for any prices Z >= 0 of signs, d of the diagonal, and
prices h of an expert's homes

    <slope, Y> <= (C / V) sum(M) + C (sum of the P - 1 largest eigenvalues of centred M) + sum d + 2 sum_e max_g h_eg

with M = slope + Z - Diag d - h, V vertices. Under a cap the load together with any vertex is at most that of a group: a
price u_v >= 0 for each takes u_v load_w from the slope of v and w, and u_v times a group's load from the limit. The
alternating direction method of multipliers looks for the Y that sends least and for the prices; lines are averaged over its
steps (an average of lower limits is one). Every value of `evaluate` is proven.

The straight limits on the rows of a token are linear in the same-group matrix, and compiled (numba). A token with k experts,
n_e of which are in the group of e, touches λ = Σ_e 1 / n_e groups; one that is its home costs nothing. Two kinds of lines,
both true of every placement:

* an expert at a time: its part of the rows, (1 - y) / n with y = 1 at home and n a whole number, is at least
  c - s n - (c - s) y for any chord c - s n of 1 / n between neighbouring whole numbers;
* a token at a time: rows against the number of its pairs that are in the same group and of its experts at home, over all
  ways to divide k experts, have a lower convex hull, with facets that are lines.
"""

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine.placement.coactivation.instance import distinct, sets_of
from engine.placement.projections import onto_box
from engine.result import Floats, Ints

MOST_CHOICES = 12
"""Experts of a token up to which all ways to divide them are listed."""
RHO, RELAXATION, LEAST_SHARE, CAP_STEP = 0.3, 1.6, 0.1, 2.0
"""The third: of a new line in the average; the last: speed at which prices follow load above the cap."""


@cache
def facets(choices: int, size: int, groups: int) -> Floats:
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


def _facets_of(experts: int, size: int, groups: int) -> Floats:
    """Lines float64[line, 3] of tokens with exactly so many experts."""
    from scipy.spatial import ConvexHull, QhullError

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

    The tokens' lines that are highest at `same`. Y is 1.0 where two vertices are in the same group, else 0.0.

    member: int32[net, choice] (-1 after the last)
    home: int64[net], the vertex of the home group, -1 = outside
    weight: float64[net] tokens
    same: float64[vertex, vertex], the share in which two vertices are in the same group
    lines: of `facets`
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


class Relaxation:
    """The lower limit on a layer's rows, tightened by `iterate`.

    experts: int[token, choice] (-1 = none)
    home: int64[token], the token's own group, -1 = outside
    count: experts in all
    load: float64[expert], as a part of a group's cap, for a limit on the rows of placements within this cap
    """

    def __init__(self, experts: NDArray[np.integer], home: Ints, groups: int, count: int, load: Floats | None = None) -> None:
        chosen = sets_of(experts)
        at, _, times = distinct(np.column_stack([chosen, home.astype(np.int32)]))
        self.member, self.home = chosen[at], np.where(home[at] < 0, -1, home[at] + count)
        self.weight = times.astype(np.float64)
        self.experts, self.groups, self.homes = count, groups, groups if (home >= 0).any() else 0
        self.lines = facets(chosen.shape[1], count // groups, groups)
        self.vertices = count + self.homes
        self.size = self.vertices // groups
        self.load, self.cap_price = np.zeros(self.vertices), np.zeros(self.vertices)
        if load is not None:
            self.load[:count] = load
        # The mean of all placements.
        self.same = np.full((self.vertices, self.vertices), (count / groups - 1) / max(count - 1, 1))
        self.same[count:] = self.same[:, count:] = 1 / groups
        self.same[count:, count:] = 0.0
        np.fill_diagonal(self.same, 1.0)
        self.slope, self.constant = self._tangent()
        self.scale = (float(np.linalg.norm(_centred(self.slope))) or 1.0) / self.size
        self.price = np.zeros_like(self.same)
        self.steps, self.limit = 0, -math.inf

    def _tangent(self) -> tuple[Floats, float]:
        slope = np.empty_like(self.same)
        constant = tangent(self.member, self.home, self.weight, self.same, self.lines, slope)
        return (slope + slope.T) / 2, constant

    @property
    def seconds_of_step(self) -> float:
        """On an ordinary core, by estimate."""
        return least_seconds(self.vertices) + 5e-9 * self.member.size * self.member.shape[1]

    def iterate(self) -> None:
        """One step of the method."""
        from scipy.linalg import eigh

        rho, total = RHO * self.scale, self.size * (self.groups - 1)
        pulled = _centred(self.same + (self._capped_slope() - self.price) / rho)
        values, vectors = eigh(pulled, driver="evd", overwrite_a=True, check_finite=False)
        values = onto_box(values, self.size, total)
        used = values > 1e-9 * self.size
        spread = (vectors[:, used] * values[used]) @ vectors[:, used].T + self.size / self.vertices
        mixed = RELAXATION * spread + (1 - RELAXATION) * self.same
        self.same = self._legal(mixed + self.price / rho)
        self.price += rho * (mixed - self.same)
        self.steps += 1
        share = max(LEAST_SHARE, 2 / (self.steps + 2))
        slope, constant = self._tangent()
        self.slope = (1 - share) * self.slope + share * slope
        self.constant = (1 - share) * self.constant + share * constant
        if self.load.any():
            step = CAP_STEP * rho / (self.load @ self.load)
            self.cap_price = np.maximum(self.cap_price + step * (self.same @ self.load - 1.0), 0.0)

    def _capped_slope(self) -> Floats:
        price = np.outer(self.cap_price, self.load)
        return self.slope - (price + price.T) / 2

    def _legal(self, matrix: Floats) -> Floats:
        """The nearest matrix without negative entries, with a unit diagonal, and with one home for every expert."""
        experts, matrix = self.experts, np.maximum(matrix, 0.0) if not self.homes else matrix
        if self.homes:
            rows = matrix[:experts, experts:]  # onto the nearest without negative entries that each sum to 1
            falling = -np.sort(-rows, axis=1)
            shift = (falling.cumsum(axis=1) - 1) / np.arange(1, rows.shape[1] + 1)
            last = (falling > shift).sum(axis=1) - 1
            homes = np.maximum(rows - shift[np.arange(experts), last][:, None], 0.0)
            matrix = np.maximum(matrix, 0.0)
            matrix[:experts, experts:], matrix[experts:, :experts] = homes, homes.T
            matrix[experts:, experts:] = 0.0
        np.fill_diagonal(matrix, 1.0)
        return matrix

    def evaluate(self) -> float:
        """Rows that every placement sends at least: the best value so far, which is `limit`."""
        from scipy.linalg import eigh

        experts = self.experts
        price = (self.price + self.price.T) / 2
        homes, diagonal = price[:experts, experts:], price.diagonal().copy()
        limit = float(diagonal.sum()) + (2 * float(homes.max(axis=1).sum()) if self.homes else 0.0)
        price[:experts, :experts] = np.minimum(price[:experts, :experts], 0.0)
        np.fill_diagonal(price, diagonal)
        limit += float(self.cap_price.sum())
        gain = self._capped_slope() - price
        limit += self.size / self.vertices * float(gain.sum())
        if self.groups > 1:
            side = self.vertices
            # All eigenvalues: the routine for a few of them fails on matrices of low rank.
            top = eigh(_centred(gain), driver="evd", eigvals_only=True)[1 - self.groups :]
            # Round-off of the eigenvalues, generously.
            limit += self.size * (float(top.sum()) + 1e-12 * side * float(np.abs(gain).max()) * side)
        self.limit = max(self.limit, self.constant - limit)
        return self.limit


def least_seconds(vertices: int) -> float:
    """Seconds of one step, before the tokens' choices are known."""
    return 1e-3 + 1e-9 * vertices**3


def _centred(matrix: Floats) -> Floats:
    """A symmetric matrix without its row and column means."""
    means = matrix.mean(axis=0)
    return matrix - means - means[:, None] + means.mean()
