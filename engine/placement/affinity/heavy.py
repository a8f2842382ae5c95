"""How many hops three layers in a row can keep, where a few pairs of experts carry most of them.

With few experts on a GPU spectra are far from the truth there: they do not see that an expert whose three strong successors
are all kept needs room for them and for whatever else they follow. This limit does.

The counts of both pairs of layers are split into heavy ones H, few for every expert, and the rest, limited by `spectral`. A
group is C experts A of the middle layer with C of each outer layer. An expert s of an outer layer is in one group only, to
which it brings sum H[a, s] over a in A. At a price of mu_s = max H[a, s] for it the group is left with at most

    g(A) = sum over both outer layers of the C largest max(0, sum H[a, s] - mu_s),

so all groups together keep at most sum mu and what the best division of the middle layer gains (a Lagrangian relaxation of
"every s once"). Charges u >= 0 on the middle experts with u(A) >= g(A) for every A limit that gain to sum u: the dual of set
partitioning. Where no s is heavy for two parts of A, g(A) is at most the sum of the parts' g. So only the connected sets of
up to C experts have to be looked at, which are few where H is sparse.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.placement.affinity.bounds import spectral
from engine.result import Stop, never

LARGEST_GROUP = 4
"""Experts of a group in a layer; connected sets of more are too many to list."""
HEAVY_PER_EXPERT = (1, 2, 3)
MOST_SETS, CHUNK = 400_000, 20_000
SECONDS_PER_SET, SECONDS_PER_CUBE = 2.5e-6, 3e-9
"""Of one connected set, and of the spectra for each expert^3, on an ordinary core: they only divide a time limit."""


def heavy_limit(
    transitions: NDArray[np.float64],
    groups: int,
    layer_limits: NDArray[np.float64],
    seconds: float,
    deadline: float,
    enough: float,
    stop: Stop = never,
    on_limit: Callable[[float], None] | None = None,
) -> float:
    """No placement on `groups` equal groups keeps more of the hops than this.

    transitions: float64[layer - 1, expert, expert]; layer_limits: float64[layer - 1], of `spectral_limits`, which hold where
    this limit is not tighter; seconds: how much work to do, as estimated from its amount; deadline: of `time.perf_counter`,
    an outer cap; enough: hops known to be kept, at which the work ends; on_limit: called with every new limit.
    """
    pairs, experts = len(transitions), transitions.shape[1]
    total = float(layer_limits.sum())
    if experts // groups > LARGEST_GROUP or pairs < 2:
        return total
    choices, worth = HEAVY_PER_EXPERT, 0
    first = np.arange(0, pairs - 1, 2)
    # The middle of the model decides how many counts are heavy, and whether any are.
    for low in np.roll(first, -(len(first) // 2)).tolist():
        if stop() or time.perf_counter() > deadline or seconds <= 0 or total <= enough:
            break
        best, known = None, float(layer_limits[low : low + 2].sum())
        for heavy in choices:
            limit, sets = triple_limit(*transitions[low : low + 2], groups, heavy)
            seconds -= SECONDS_PER_SET * sets + SECONDS_PER_CUBE * experts**3
            if limit < known:
                best, known = heavy, limit
        if best is None and not worth:
            break
        choices, worth = choices if best is None else (best,), worth + 1
        total += known - float(layer_limits[low : low + 2].sum())
        if on_limit:
            on_limit(total)
    return total


def triple_limit(before: NDArray[np.float64], after: NDArray[np.float64], groups: int, heavy: int) -> tuple[float, int]:
    """At most so many hops of two consecutive pairs of layers stay in their group, and how many sets that took to prove;
    infinite where they are too many.

    before, after: float64[expert, expert], counts into and out of the middle layer; heavy: how many of them for every expert
    are taken as heavy.
    """
    experts = len(before)
    size = experts // groups
    sides = [_split(before.T, size, heavy), _split(after, size, heavy)]
    links = [side > 0 for side, _ in sides]
    shared = np.logical_or(*((link.astype(np.float32) @ link.T.astype(np.float32)) > 0 for link in links))
    sets = _connected(shared, size)
    if sets is None:
        return np.inf, MOST_SETS
    price = [side.max(axis=0) for side, _ in sides]
    gain = sum(_gains(sets, side, mu, size) for (side, _), mu in zip(sides, price, strict=True))
    charge = _charges(sets, gain, experts)
    round_off = 1e-12 * (before.sum() + after.sum())
    rest = sum(spectral(light, groups) for _, light in sides)
    return float(sum(mu.sum() for mu in price) + charge + rest + round_off), len(sets)


def _split(count: NDArray[np.float64], size: int, heavy: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The heavy counts above what a group may well keep of light ones, and the rest: both float64[expert, expert]."""
    experts = len(count)
    largest = np.argsort(-count, axis=None, kind="stable")[: min(heavy, experts) * experts]
    is_heavy = np.zeros(count.shape, dtype=bool)
    is_heavy.flat[largest] = True
    light = np.where(is_heavy, 0.0, count)
    level = np.partition(light, -size, axis=1)[:, -size].mean()
    above = np.where(is_heavy, np.maximum(count - level, 0.0), 0.0)
    return above, count - above


def _connected(shared: NDArray[np.bool_], size: int) -> NDArray[np.int64] | None:
    """Connected sets of 2 … size experts of a graph bool[expert, expert]: int64[set, size], filled up with `experts`; None
    where they are too many."""
    experts = len(shared)
    sets, listed = np.arange(experts)[:, None], [np.empty((0, size), dtype=np.int64)]
    for members in range(2, size + 1):
        if len(sets) * experts > 32 * MOST_SETS:
            return None
        near = shared[sets].any(axis=1)
        near[np.arange(len(sets))[:, None], sets] = False
        if np.count_nonzero(near) > 4 * MOST_SETS:
            return None
        row, joins = np.nonzero(near)
        grown = np.sort(np.column_stack([sets[row], joins]), axis=1)
        key = grown @ (experts ** np.arange(members, dtype=np.int64))
        sets = grown[np.unique(key, return_index=True)[1]]
        listed.append(np.pad(sets, ((0, 0), (0, size - members)), constant_values=experts))
    sets = np.concatenate(listed)
    return sets if len(sets) <= MOST_SETS else None


def _gains(
    sets: NDArray[np.int64], heavy: NDArray[np.float64], price: NDArray[np.float64], size: int
) -> NDArray[np.float64]:
    """What each set brings above the prices of the best `size` experts of one outer layer: float64[set].

    heavy: float64[middle expert, outer expert]; price: float64[outer expert].
    """
    width = max(1, int(np.count_nonzero(heavy, axis=1).max()))
    outer = np.pad(np.argsort(-heavy, axis=1, kind="stable")[:, :width], ((0, 1), (0, 0)))
    brings = np.pad(-np.sort(-heavy, axis=1)[:, :width], ((0, 1), (0, 0)))
    gains = np.empty(len(sets))
    for low in range(0, len(sets), CHUNK):
        part = sets[low : low + CHUNK]
        ends, amount = outer[part].reshape(len(part), -1), brings[part].reshape(len(part), -1)
        order = np.argsort(ends, axis=1)
        ends, amount = np.take_along_axis(ends, order, axis=1), np.take_along_axis(amount, order, axis=1)
        # Sums over runs of the same outer expert, from cumulative ones.
        sums = amount.cumsum(axis=1)
        last = np.ones(ends.shape, dtype=bool)
        last[:, :-1] = ends[:, 1:] != ends[:, :-1]
        so_far = np.maximum.accumulate(np.where(last, sums, 0.0), axis=1)
        so_far = np.concatenate([np.zeros((len(part), 1)), so_far[:, :-1]], axis=1)
        net = np.where(last, np.maximum(sums - so_far - price[ends], 0.0), 0.0)
        if net.shape[1] > size:
            net = np.partition(net, -size, axis=1)[:, -size:]
        gains[low : low + CHUNK] = net.sum(axis=1)
    return gains


def _charges(sets: NDArray[np.int64], gain: NDArray[np.float64], experts: int) -> float:
    """The sum of charges that cover every set's gain float64[set]: each set's gain shared equally at first, then every
    expert's charge lowered to what its sets still need, the highest first. No single one could be lower."""
    if not len(sets):
        return 0.0
    members = (sets < experts).sum(axis=1)
    charge = np.zeros(experts + 1)
    for place in range(sets.shape[1]):
        np.maximum.at(charge, sets[:, place], gain / members)
    charge[experts] = 0.0
    by_expert = np.argsort(sets, axis=None, kind="stable")
    ends = np.searchsorted(sets.ravel()[by_expert], np.arange(experts + 1))
    of_expert = by_expert // sets.shape[1]
    slack = charge[sets].sum(axis=1) - gain
    for expert in np.argsort(-charge[:experts], kind="stable").tolist():
        mine = of_expert[ends[expert] : ends[expert + 1]]
        lower = min(charge[expert], slack[mine].min(initial=np.inf))
        charge[expert] -= lower
        slack[mine] -= lower
    short = max(float((gain - charge[sets].sum(axis=1)).max()), 0.0)
    return float(charge.sum()) + experts * short
