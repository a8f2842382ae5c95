"""Straight limits below the price of rows that serve several experts of a token: the experts of a group, one by one, never cost
more than its rows.

A row to a group that serves n experts of a token is a part 1 / n of each, and 1 / n is at least a - b n for any b >= 0 and the
largest a for which that holds at n = 1, 2, … So the rows of experts x (0 or 1 each) cost at least the sum of a - b less x' B x,
where B_ef is b times the tokens that go to e and f. A group has so many experts at most, and so many seconds of their FFNs:
prices q >= 0 of a limit take q_e size_f off B_ef and add q_e times the limit to expert e. Then x' B x is at most d x if

* B - diag(d) has no eigenvalue above 0, with any N >= 0 added to B, as x' N x >= 0. This is the dual of a semidefinite
  programme, for which the alternating direction method of multipliers looks; lines are averaged over its steps, since an
  average of lower limits is one. However good the find, its eigenvalues prove it.
* or d is the sums of the positive parts of the rows of B, which takes no search: for many experts.
"""

from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from engine.placement.coactivation.instance import distinct, sets_of
from engine.result import Floats, Ints

STEPS, EVERY, RHO, CHANGING, ROUNDS = 42, 3, 0.3, 0.75, 4
"""Steps of the search, from new lines to new ones, its penalty, the part of the steps in which lines change, and how often in a
step the prices of limits follow."""
CELLS = 5_000_000
"""Pairs of experts and kinds of sources up to which tokens are counted once for all prices."""
SAFE = 1e-9
"""Part of the largest entry by which eigenvalues may be off."""


class Caps(NamedTuple):
    """The limits of a group.

    slots: experts that it may have
    size: float64[expert] seconds of their FFNs, at least; none = there is no limit of seconds
    seconds: of FFNs at which the search looks for the closest limit
    """

    slots: int
    size: Floats
    seconds: float


class Limit(NamedTuple):
    """Whatever experts a group has, its rows cost at least the sum of what `at` has for them.

    part: float64[expert]
    slot: float64[expert], less for every slot that the group may have
    load: float64[expert], less for every second of FFNs that it may have
    """

    part: Floats
    slot: Floats
    load: Floats

    def at(self, slots: int, seconds: float) -> Floats:
        """float64[expert] of a group with these limits."""
        return self.part - slots * self.slot - (seconds * self.load if self.load.any() else 0.0)


class Tier:
    """The rows of a level, by the sets of experts that tokens go to.

    group: int64[gpu], receivers of a row
    sends, takes: int64[group, kind] ports of a row
    demand: float64[expert, kind] tokens
    member: int64[set, choice] experts, -1 after the last; of no set where a row serves one expert, or tokens are not known
    tokens: float64[set, kind]
    likely: float64[expert], the chance that a token has the expert, where rows serve several but tokens are not known
    """

    def __init__(self, group: Ints, ports: tuple[Ints, Ints], kind: Ints, demand: Floats) -> None:
        """kind: int64[source]; demand: float64[source, expert] tokens"""
        self.group, (self.sends, self.takes), self.kind = group, ports, kind
        self.demand = np.zeros((demand.shape[1], self.sends.shape[1]))
        np.add.at(self.demand.T, kind, demand)
        self.member, self.tokens, self.likely = np.zeros((0, 1), dtype=np.int64), np.zeros((0, len(self.demand.T))), None

    def know(self, choices: Ints, source: Ints) -> None:
        """Count rows that serve all experts of a token that are there.

        choices: int[token, choice] experts, -1 = none
        source: int64[token]
        """
        chosen = sets_of(choices)
        at, of, _ = distinct(chosen)
        kinds = self.sends.shape[1]
        self.member = chosen[at].astype(np.int64)
        cell = of * kinds + self.kind[source]
        self.tokens = np.bincount(cell, minlength=len(at) * kinds).reshape(len(at), kinds).astype(np.float64)
        self.demand[:] = 0.0
        net, choice = np.nonzero(self.member >= 0)
        np.add.at(self.demand, self.member[net, choice], self.tokens[net])

    @property
    def shared(self) -> bool:
        """True if a row serves several experts."""
        return len(self.member) > 0 or self.likely is not None

    def most(self, slots: int) -> int:
        """Experts of a token that a row to so many slots serves at most."""
        return max(min(slots, self.member.shape[1] if len(self.member) else len(self.demand)), 1) if self.shared else 1

    def pairs(self, price: Floats, slope: Floats) -> Floats:
        """float64[expert, other] tokens that go to both, times their price and the slope of the first one's line.

        price: float64[kind] of a row
        slope: float64[expert], or float64[set, choice]
        """
        experts = len(self.demand)
        if self.likely is not None:
            return (slope * (self.demand @ price))[:, None] * self.likely
        if slope.ndim == 1 and experts * experts * len(price) <= CELLS:
            return slope[:, None] * (self._pairs_of_kind @ price)
        total, weight, real = np.zeros(experts * experts), self.tokens @ price, self.member >= 0
        line = self.lines(slope) * weight[:, None]
        for choice in range(self.member.shape[1]):
            both = real & real[:, choice : choice + 1]
            cell = (self.member[:, choice : choice + 1] * experts + self.member)[both]
            total += np.bincount(cell, np.broadcast_to(line[:, choice : choice + 1], both.shape)[both], len(total))
        return total.reshape(experts, experts)

    @cached_property
    def _pairs_of_kind(self) -> Floats:
        """float64[expert, other, kind] tokens."""
        experts, kinds = self.demand.shape
        at, kind = np.nonzero(self.tokens)
        member, tokens, total = self.member[at], self.tokens[at, kind], np.zeros(experts * experts * kinds)
        for first, second in product(member.T, member.T):
            both = (first >= 0) & (second >= 0)
            cell = (first[both] * experts + second[both]) * kinds + kind[both]
            np.add.at(total, cell, tokens[both])
        return total.reshape(experts, experts, kinds)

    @property
    def seconds(self) -> float:
        """Work of `by_eigenvalues`, of an ordinary core."""
        experts, (sets, choices) = len(self.demand), self.member.shape
        return STEPS * (2e-9 * experts**3 + 4e-8 * experts**2 + 4e-9 * sets * choices**2)

    def lines(self, slope: Floats) -> Floats:
        """float64[set, choice]: the slopes of all choices, 0 where there is none. slope: as in `pairs`"""
        return np.where(self.member >= 0, slope[self.member] if slope.ndim == 1 else slope, 0.0)

    def alone(self, price: Floats, slope: Floats, most: int) -> Floats:
        """float64[expert]: price of an expert's tokens if each were all that a row serves, on its line.

        price, slope: as in `pairs`
        most: experts that a row serves
        """
        n = np.arange(1, most + 1)
        if slope.ndim == 1:
            return (self.demand @ price) * np.min(1 / n + slope[:, None] * (n - 1), axis=-1)
        height = np.min(1 / n + self.lines(slope)[..., None] * (n - 1), axis=-1) * (self.tokens @ price)[:, None]
        real = self.member >= 0
        return np.bincount(self.member[real], height[real], len(self.demand))


def by_rows(tier: Tier, price: Floats, caps: Caps, slope: Floats | None = None) -> tuple[Floats, Limit]:
    """(slope float64[expert] of the best line of every expert, a limit of pairs by sums of rows: see `Limit`, whose part lacks
    `Tier.alone`).

    price: float64[kind] of a row
    slope: lines that stay; None = the best ones
    """
    experts, most = len(tier.demand), tier.most(caps.slots)
    pairs, none = tier.pairs(price, np.ones(experts)), np.zeros(experts)
    np.fill_diagonal(pairs, 0.0)
    edge = np.sort(pairs, axis=1)[:, max(experts - caps.slots, 0)] if caps.slots < experts else none
    limits = [Limit(-(np.maximum(pairs - edge[:, None], 0.0).sum(axis=1) - edge), edge, none)]
    if len(caps.size):
        worth = pairs / np.maximum(caps.size, 1e-30)
        order = np.argsort(-worth, axis=1)
        filled = np.cumsum(caps.size[order], axis=1) > np.maximum(caps.seconds - caps.size, 0.0)[:, None]
        last = np.take_along_axis(order, filled.argmax(axis=1)[:, None], 1)
        edge = np.where(filled.any(axis=1), np.take_along_axis(worth, last, 1)[:, 0], 0.0)
        beyond = np.maximum(pairs - edge[:, None] * caps.size, 0.0).sum(axis=1)
        limits.append(Limit(-(beyond - edge * caps.size), none, edge))
    n = np.arange(1, most)
    slopes = [np.full(experts, line) for line in (0.0, *(1 / (n * (n + 1))))] if slope is None else [slope]
    value, best = np.full(experts, -np.inf), (none, limits[0])
    for line in slopes:
        alone = tier.alone(price, line, most)
        for limit in limits:
            scaled = Limit(*(line * part for part in limit))
            now = alone + scaled.at(caps.slots, caps.seconds)
            better = now > value
            value = np.maximum(value, now)
            chosen = Limit(*(np.where(better, new, old) for new, old in zip(scaled, best[1], strict=True)))
            best = np.where(better, line, best[0]), chosen
    return best


def by_eigenvalues(tier: Tier, price: Floats, caps: Caps, slope: Floats | None = None) -> tuple[Floats, Limit]:
    """The same with slope float64[set, choice], by a semidefinite programme: a token goes to known experts."""
    experts, most = len(tier.demand), tier.most(caps.slots)
    limits = [(np.ones(experts) / caps.slots, 1 / caps.slots)]
    if len(caps.size):
        limits.append((caps.size / max(caps.seconds, 1e-30), 1 / max(caps.seconds, 1e-30)))
    priced = tier.tokens @ price > 0
    member = np.where(tier.member[priced] >= 0, tier.member[priced], experts)
    with_whom = member[:, :, None] * (experts + 1) + member[:, None, :]
    near = np.zeros((experts + 1, experts + 1))  # about 1 of experts of the same group; one that is none is with nobody
    same = near[:experts, :experts]
    same[:] = 0.8 * np.eye(experts) + 0.2
    smooth, dual, prices = same.copy(), np.zeros((experts, experts)), [np.zeros(experts) for _ in limits]
    fixed, changes, scale = slope is not None, 0, 0.0
    slope = np.zeros(tier.member.shape) if slope is None else slope
    pairs = _together(tier, price, slope)
    for step in range(STEPS):
        if not fixed and step % EVERY == 0 and step <= CHANGING * STEPS:
            whole = np.clip(np.floor(near.ravel()[with_whom].sum(axis=2)), 1, max(most - 1, 1))
            changes += 1
            slope[priced] += (1 / (whole * (whole + 1)) - slope[priced]) * (2 / (changes + 1))
            pairs = _together(tier, price, slope)
        scale = scale or float(pairs.max()) or 1.0
        target = smooth - dual + pairs / (scale * RHO)
        for _ in range(ROUNDS):
            same[:] = np.maximum(target - _priced(limits, prices), 0.0)
            np.fill_diagonal(same, 1.0)
            for number, (size, _) in enumerate(limits):
                over = (same @ size - 1.0) / (len(limits) * max(float(size @ size), 1e-30))
                prices[number] = np.maximum(prices[number] + over, 0.0)
        smooth = same + dual
        value, vector = np.linalg.eigh(smooth)
        below = value < 0
        dual = (vector[:, below] * value[below]) @ vector[:, below].T
        smooth -= dual
    prices = [RHO * scale * of_limit for of_limit in prices]
    return slope, _proven(pairs - _priced(limits, prices), -RHO * scale * dual, limits, prices)


def _priced(limits: list[tuple[Floats, float]], prices: list[Floats]) -> Floats:
    """float64[expert, other]: what the prices of limits take off pairs."""
    return sum(_even(price[:, None] * size) for (size, _), price in zip(limits, prices, strict=True))


def _proven(pairs: Floats, slack: Floats, limits: list[tuple[Floats, float]], prices: list[Floats]) -> Limit:
    """The limit of pairs for any prices, with the smallest diagonal near one that a search found.

    pairs: float64[expert, other] less the prices of limits; slack: of the search, positive semidefinite
    """
    more = np.maximum(-pairs - slack, 0.0)
    np.fill_diagonal(more, 0.0)
    pairs = pairs + more
    diagonal = np.diag(pairs + slack).copy()
    pairs -= np.diag(diagonal)
    diagonal += max(np.linalg.eigvalsh(pairs)[-1] + SAFE * float(np.abs(pairs).max()), 0.0)
    slot, load = (*prices, np.zeros(len(diagonal)))[:2]
    return Limit(-diagonal, slot * limits[0][1], load * (limits[1][1] if len(limits) > 1 else 0.0))


def _together(tier: Tier, price: Floats, slope: Floats) -> Floats:
    """`Tier.pairs` of different experts, the same both ways."""
    pairs = _even(tier.pairs(price, slope))
    np.fill_diagonal(pairs, 0.0)
    return pairs


def _even(matrix: Floats) -> Floats:
    return (matrix + matrix.T) / 2
