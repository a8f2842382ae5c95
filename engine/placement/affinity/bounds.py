"""Upper limits of the hops that any placement can keep, so that an affinity plan comes with a gap.

Groups are GPUs, or nodes: P groups with C = E / P experts each in every layer. Three limits, all valid at whatever
iteration they are left:

* `spectral`, milliseconds: the 0/1 matrix "same group" of two layers has singular value C once on the constant vector and
  P - 1 times orthogonal to it, so it keeps at most C / E of all hops plus C times the P - 1 largest singular values of
  the centred counts (von Neumann's trace inequality). Also no row or column keeps more than its C largest counts.
* `Window`, seconds: the same-group matrix X of all experts of several consecutive layers is positive semidefinite and
  non-negative with unit diagonal and block row sums C. Its part orthogonal to the layer means has trace n C (P - 1) and
  no eigenvalue above n C for n layers. For any prices S >= 0 of the signs, d of the diagonal and t >= 0 of the triangle
  rule X_ij + X_jk <= 1 + X_ik the kept hops are at most

      sum t + (C / E) sum(B) + (1 - C / E) sum d + n C (sum of the P - 1 largest eigenvalues of centred(B - Diag d)),

  B being the symmetric counts plus S and the rearranged t. The alternating direction method of multipliers finds good
  prices; prices on triangles are moved by how far the current X breaks them.
* `heavy_limit`, for three layers in a row and few experts on a GPU, where a few pairs of experts carry most hops. Spectra are
  far from the truth there: they do not see that an expert with three strong successors, all of them kept, needs room for them
  and for whatever else they follow.

`heavy_limit` splits the counts of both pairs of layers into heavy ones H, few for every expert, and the rest, limited by
`spectral`. A group is C experts A of the middle layer with C of each outer layer. An expert s of an outer layer is in one
group only, to which it brings sum H[a, s] over a in A. At a price of mu_s = max H[a, s] for it the group is left with at most

    g(A) = sum over both outer layers of the C largest max(0, sum H[a, s] - mu_s),

so all groups together keep at most sum mu and the gain of the best division of the middle layer (a Lagrangian relaxation of
"every s once"). Charges u >= 0 on the middle experts with u(A) >= g(A) for every A limit that gain to sum u: the dual of set
partitioning. Where no s is heavy for two parts of A, g(A) is at most the sum of the parts' g. So only the connected sets of
up to C experts have to be looked at, which are few where H is sparse.
"""

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numba import njit

from engine.placement.projections import onto_box
from engine.result import Bools, Floats, Ints, Stop, never

SECONDS_PER_SPECTRUM = 1e-9
"""Seconds of a pair of layers' spectrum on an ordinary core, for each expert^3."""
RHO, RELAXATION = 0.12, 1.6
CUT_ITERATION, CUT_EVERY, CUT_STEP, CUTS_PER_LAYER, CUT_VIOLATION, CUT_WIDTH = 24, 3, 0.3, 600, 0.1, 24
"""From which iteration and how often triangles are priced, how fast, and how many new ones may join at a time: those broken
by so much, among so many of the nearest experts of each."""
SECONDS_PER_CUBE = 3e-10
"""Seconds of an iteration on an ordinary core, for each side^3 of a window's matrix."""
LARGEST_SIDE, FEWEST_ITERATIONS, EVALUATE_EVERY = 520, 30, 10
LARGEST_GROUP = 4
"""Experts of a group in a layer; connected sets of more are too many to list."""
HEAVY_PER_EXPERT = (1, 2, 3)
MOST_SETS = 400_000
SECONDS_PER_SET, HEAVY_SECONDS_PER_CUBE = 2.5e-6, 3e-9
"""Seconds of a connected set, and of the spectra for each expert^3, on an ordinary core: they only divide a time limit."""


def spectral(count: Floats, groups: int) -> float:
    """The most hops of one layer pair that stay in their group. count: float64[expert, expert]."""
    return _spectral(count, (groups,))[0]


def _spectral(count: Floats, divisions: tuple[int, ...]) -> list[float]:
    """`spectral` for each of some numbers of groups, by one spectrum."""
    experts, total = len(count), count.sum()
    centred = count - count.mean(axis=0) - count.mean(axis=1, keepdims=True) + count.mean()
    values = np.linalg.svd(centred, compute_uv=False)
    # Singular values carry round-off of this size; the limit must not fall below the truth for it.
    slack = 1e-12 * experts * total
    kept = [experts // groups * (total / experts + values[: groups - 1].sum()) + slack for groups in divisions]
    return [float(min(most, _largest(count, groups))) for most, groups in zip(kept, divisions, strict=True)]


def spectral_limits(transitions: Floats, *divisions: int, stop: Stop = never, deadline: float = np.inf) -> Floats:
    """`spectral` of every pair of layers for each of some numbers of groups: float64[division, layer - 1], without the first
    axis for a single one; only the largest counts of every line for the pairs still to do once `stop` is True, or where spectra
    would not be ready by the deadline of `time.perf_counter`."""
    seconds = SECONDS_PER_SPECTRUM * transitions.shape[1] ** 3 if len(transitions) else 0.0

    def limits(count: Floats) -> list[float]:
        if not stop() and time.perf_counter() + seconds < deadline:
            return _spectral(count, divisions)
        return [_largest(count, groups) for groups in divisions]

    found = np.array([limits(count) for count in transitions]).reshape(-1, len(divisions)).T
    return found if len(divisions) > 1 else found[0]


def _largest(count: Floats, groups: int) -> float:
    """No row or column keeps more than its C largest counts."""
    experts = len(count)
    rest = experts - experts // groups
    kept = [np.partition(count, rest, axis=axis).take(range(rest, experts), axis=axis).sum() for axis in (0, 1)]
    return float(min(kept))


def within_limit(count: Floats, groups: int) -> float:
    """The most hops between experts of one layer that stay in their group.

    The "same group" matrix of a layer has eigenvalue C on the constant vector and P - 1 times orthogonal to it, so half of its
    inner product with the counts is at most C / 2 times their mean line and the P - 1 largest eigenvalues of the centred
    counts. Also no expert keeps more than its C - 1 largest counts.

    count: float64[expert, expert], symmetric (both directions together), 0 on the diagonal
    """
    experts = len(count)
    size = experts // groups
    centred = count - count.mean(axis=0) - count.mean(axis=1, keepdims=True) + count.mean()
    values = np.linalg.eigvalsh(centred)
    largest = np.sort(count, axis=1)[:, experts - size + 1 :].sum()
    slack = 1e-12 * experts * count.sum()
    return float(min(size * (count.sum() / experts + values[experts - groups + 1 :].sum()) + slack, largest) / 2)


class Window:
    """The limit over some consecutive layers, tightened by `iterate`.

    counts: float64[layer - 1, expert, expert]
    limit: hops kept at most, the best of all evaluations so far
    """

    def __init__(self, counts: Floats, groups: int) -> None:
        self.layers, self.experts, self.groups = len(counts) + 1, counts.shape[1], groups
        self.size = self.experts // groups
        side = self.layers * self.experts
        self.counts = np.zeros((side, side))
        for layer, count in enumerate(counts):
            here, there = (slice(at * self.experts, (at + 1) * self.experts) for at in (layer, layer + 1))
            self.counts[here, there] = count / 2
            self.counts[there, here] = count.T / 2
        self.total = float(counts.sum())
        self.limit = float("inf")
        self.scale = float(np.linalg.norm(self._centred(self.counts))) or 1.0
        self.counts /= self.scale
        self.rho = RHO / (self.size * self.layers)
        # The iterations only look for good prices: single precision does, at twice the speed. Limits are in double.
        self.x = np.full((side, side), self.size / self.experts, dtype=np.float32)
        np.fill_diagonal(self.x, 1.0)
        self.price = np.zeros((side, side), dtype=np.float32)
        self.triangles = np.empty((0, 3), dtype=np.int64)
        self.triangle_price = np.empty(0)
        self.priced = self.counts
        self.priced_single = self.counts.astype(np.float32)
        self.iterations = 0

    def iterate(self) -> None:
        """One step of the method; `limit` changes only with `evaluate`."""
        from scipy.linalg import eigh

        since = self.iterations - CUT_ITERATION
        if since >= 0 and since % CUT_EVERY == 0 and self.layers > 1:
            self._price_triangles(find=since % (3 * CUT_EVERY) == 0)
        self.iterations += 1
        pulled = self._centred(self.x + (self.priced_single - self.price) / np.float32(self.rho))
        values, vectors = eigh(pulled, driver="evd", overwrite_a=True, check_finite=False)
        highest = self.layers * self.size
        values = onto_box(values, highest, highest * (self.groups - 1))
        used = values > 1e-9 * highest
        spread = (vectors[:, used] * values[used]) @ vectors[:, used].T + np.float32(self.size / self.experts)
        mixed = np.float32(RELAXATION) * spread + np.float32(1 - RELAXATION) * self.x
        self.x = np.maximum(mixed + self.price / np.float32(self.rho), np.float32(0.0))
        np.fill_diagonal(self.x, 1.0)
        self.price += np.float32(self.rho) * (mixed - self.x)

    def evaluate(self) -> float:
        """The limit at the present prices joins `limit`, which is returned."""
        from scipy.linalg import eigh

        share = self.size / self.experts
        price = self.price.astype(np.float64)
        diagonal = price.diagonal().copy()
        signs = np.maximum(-price, 0.0)
        np.fill_diagonal(signs, 0.0)
        gain = self.priced + (signs + signs.T) / 2
        side = len(gain)
        centred = self._centred(gain - np.diag(diagonal))
        top = eigh(centred, eigvals_only=True, subset_by_index=[side - self.groups + 1, side - 1], check_finite=False)
        value = self.triangle_price.sum() + share * gain.sum() + (1 - share) * diagonal.sum()
        value += self.layers * self.size * top.sum()
        # Round-off of the eigenvalues, generously.
        value += 1e-12 * side * self.layers * self.size * max(1.0, float(np.abs(top).max()))
        self.limit = min(self.limit, float(value) * self.scale)
        return self.limit

    def _centred(self, matrix: Floats) -> Floats:
        """Every block without its row and column means."""
        blocks = matrix.reshape(self.layers, self.experts, self.layers, self.experts)
        blocks = blocks - blocks.mean(axis=1, keepdims=True)
        return (blocks - blocks.mean(axis=3, keepdims=True)).reshape(matrix.shape)

    def _price_triangles(self, find: bool) -> None:
        """Move the prices t along the broken triangle rules; look for further ones if `find`."""
        step = CUT_STEP * self.rho
        known = self.triangles
        if find:
            known = np.unique(np.concatenate([known, self._broken_triangles()]), axis=0)
            price = np.zeros(len(known))
            side = len(self.x)
            order = (known[:, 0] * side + known[:, 1]) * side + known[:, 2]
            old = (self.triangles[:, 0] * side + self.triangles[:, 1]) * side + self.triangles[:, 2]
            price[np.searchsorted(order, old)] = self.triangle_price
        else:
            price = self.triangle_price
        i, j, k = known.T
        price = np.maximum(price + step * (self.x[i, j] + self.x[j, k] - self.x[i, k] - 1.0), 0.0)
        self.triangles, self.triangle_price = known[price > 0], price[price > 0]
        i, j, k = self.triangles.T
        moved = np.zeros_like(self.counts)
        np.add.at(moved, (i, k), self.triangle_price / 2)
        np.add.at(moved, (i, j), -self.triangle_price / 2)
        np.add.at(moved, (j, k), -self.triangle_price / 2)
        self.priced = self.counts + moved + moved.T
        self.priced_single = self.priced.astype(np.float32)

    def _broken_triangles(self) -> Ints:
        """The worst triangles (i, j, k), j in each layer, i < k in the same or a neighbouring one: int64[triangle, 3]."""
        triangles, experts = [np.empty((0, 3), dtype=np.int64)], self.experts
        for layer in range(self.layers):
            low, high = max(0, layer - 1) * experts, min(self.layers, layer + 2) * experts
            middle = np.arange(layer * experts, (layer + 1) * experts)
            near = self.x[middle, low:high].copy()
            near[np.arange(experts), middle - low] = 0.0
            # A broken rule needs two large entries in a row, so the largest few of each row are enough to look at.
            largest = min(CUT_WIDTH, near.shape[1])
            ends = np.sort(np.argpartition(-near, largest - 1, axis=1)[:, :largest], axis=1)
            value = np.take_along_axis(near, ends, axis=1)
            ends += low
            broken = value[:, :, None] + value[:, None, :] - self.x[ends[:, :, None], ends[:, None, :]] - 1.0
            row, first, second = np.nonzero(broken > CUT_VIOLATION)
            row, first, second = (part[first < second] for part in (row, first, second))
            worst = np.argsort(-broken[row, first, second], kind="stable")[:CUTS_PER_LAYER]
            row, first, second = row[worst], first[worst], second[worst]
            triangles.append(np.column_stack([ends[row, first], middle[row], ends[row, second]]))
        return np.concatenate(triangles)


def keep_limit(
    transitions: Floats,
    groups: int,
    layer_limits: Floats,
    seconds: float,
    deadline: float,
    enough: float,
    stop: Stop = never,
    on_limit: Callable[[float], None] | None = None,
) -> float:
    """No placement on `groups` equal groups keeps more of the hops than this.

    transitions: float64[layer - 1, expert, expert]
    layer_limits: float64[layer - 1], of `spectral_limits`
    seconds: work to do, as estimated from its amount
    deadline: of `time.perf_counter`, an outer cap
    enough: hops known to be kept, at which the work ends
    on_limit: called with every new limit
    """
    layers, experts = len(transitions) + 1, transitions.shape[1]
    limits = layer_limits

    def fits(depth: int) -> bool:
        work = 2 * FEWEST_ITERATIONS * -(-(layers - 1) // (depth - 1)) * _seconds(depth, experts)
        return depth * experts <= LARGEST_SIDE and work <= seconds

    # Layers of a window: as many as leave time for enough iterations.
    depth = next(filter(fits, range(layers, 2, -1)), 2)
    cuts = np.unique(np.linspace(0, layers - 1, -(-(layers - 1) // (depth - 1)) + 1).round().astype(int))
    spans = list(pairwise(cuts.tolist()))
    cost = sum(_seconds(high - low + 1, experts) for low, high in spans)
    iterations = int(seconds / cost)
    if iterations < FEWEST_ITERATIONS:
        spans, iterations = spans[: iterations * len(spans) // FEWEST_ITERATIONS], FEWEST_ITERATIONS
    best = [float(limits[low:high].sum()) for low, high in spans]
    rest = float(limits.sum()) - sum(best)
    # A few iterations everywhere first, so that a deadline finds every window tightened.
    windows = [None] * len(spans)
    done = 0
    while done < iterations:
        steps = min(FEWEST_ITERATIONS if not done else EVALUATE_EVERY, iterations - done)
        for at, (low, high) in enumerate(spans):
            window = windows[at] = windows[at] or Window(transitions[low:high], groups)
            for _ in range(steps):
                if stop() or time.perf_counter() > deadline or rest + sum(best) <= enough:
                    return rest + sum(best)
                window.iterate()
            best[at] = min(best[at], window.evaluate())
            if on_limit:
                on_limit(rest + sum(best))
        done += steps
    return rest + sum(best)


def affordable(layers: int, experts: int, seconds: float) -> bool:
    """True if `keep_limit` can tighten at least half of the pairs of layers within so much work."""
    return FEWEST_ITERATIONS * (layers - 1) * _seconds(2, experts) <= 2 * seconds


def _seconds(layers: int, experts: int) -> float:
    return SECONDS_PER_CUBE * (layers * experts) ** 3 + 1e-3


def heavy_limit(
    transitions: Floats,
    groups: int,
    layer_limits: Floats,
    seconds: float,
    deadline: float,
    enough: float,
    stop: Stop = never,
    on_limit: Callable[[float], None] | None = None,
) -> float:
    """No placement on `groups` equal groups keeps more of the hops than this. Parameters as of `keep_limit`; the
    `layer_limits` hold where this limit is not tighter."""
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
        # The first to be tried has to leave time for half of the model; less would tighten next to nothing.
        most = MOST_SETS if worth else int(min(MOST_SETS, 2 * seconds / len(first) / SECONDS_PER_SET))
        for heavy in choices:
            limit, sets = triple_limit(*transitions[low : low + 2], groups, heavy, most)
            seconds -= SECONDS_PER_SET * sets + HEAVY_SECONDS_PER_CUBE * experts**3
            if limit < known:
                best, known = heavy, limit
        if best is None and not worth:
            break
        choices, worth = choices if best is None else (best,), worth + 1
        total += known - float(layer_limits[low : low + 2].sum())
        if on_limit:
            on_limit(total)
    return total


def triple_limit(before: Floats, after: Floats, groups: int, heavy: int, most: int = MOST_SETS) -> tuple[float, int]:
    """(the most hops of two consecutive pairs of layers that stay in their group, the number of sets that the proof took);
    infinite where they are more than `most`.

    before, after: float64[expert, expert], counts into and out of the middle layer
    heavy: the number of them for every expert that are taken as heavy
    """
    experts = len(before)
    size = experts // groups
    sides = [_split(before.T, size, heavy), _split(after, size, heavy)]
    links = [side > 0 for side, _ in sides]
    shared = np.logical_or(*((link.astype(np.float32) @ link.T.astype(np.float32)) > 0 for link in links))
    sets = _connected(shared, size, most)
    if sets is None:
        return np.inf, most
    price = [side.max(axis=0) for side, _ in sides]
    gain = sum(_gains(sets, side, mu, size) for (side, _), mu in zip(sides, price, strict=True))
    charge = _charges(sets, gain, experts)
    round_off = 1e-12 * (before.sum() + after.sum())
    rest = sum(spectral(light, groups) for _, light in sides)
    return float(sum(mu.sum() for mu in price) + charge + rest + round_off), len(sets)


def _split(count: Floats, size: int, heavy: int) -> tuple[Floats, Floats]:
    """The heavy counts above the light ones that a group may well keep, and the rest: both float64[expert, expert]."""
    experts = len(count)
    largest = np.argsort(-count, axis=None, kind="stable")[: min(heavy, experts) * experts]
    is_heavy = np.zeros(count.shape, dtype=bool)
    is_heavy.flat[largest] = True
    light = np.where(is_heavy, 0.0, count)
    level = np.partition(light, -size, axis=1)[:, -size].mean()
    above = np.where(is_heavy, np.maximum(count - level, 0.0), 0.0)
    return above, count - above


def _connected(shared: Bools, size: int, most: int = MOST_SETS) -> Ints | None:
    """Connected sets of up to `size` experts of a graph bool[expert, expert]: int64[set, size], filled up with `experts`; None
    where they are more than `most`."""
    experts = len(shared)
    sets, listed = np.arange(experts)[:, None], [np.empty((0, size), dtype=np.int64)]
    for members in range(2, size + 1):
        if len(sets) * experts > 32 * most:
            return None
        near = shared[sets].any(axis=1)
        near[np.arange(len(sets))[:, None], sets] = False
        if np.count_nonzero(near) > 4 * most:
            return None
        row, joins = np.nonzero(near)
        grown = np.sort(np.column_stack([sets[row], joins]), axis=1)
        key = grown @ (experts ** np.arange(members, dtype=np.int64))
        sets = grown[np.unique(key, return_index=True)[1]]
        listed.append(np.pad(sets, ((0, 0), (0, size - members)), constant_values=experts))
    sets = np.concatenate(listed)
    return sets if len(sets) <= most else None


def _gains(sets: Ints, heavy: Floats, price: Floats, size: int) -> Floats:
    """Hops that each set brings above the prices of the best `size` experts of one outer layer: float64[set].

    heavy: float64[middle expert, outer expert]
    price: float64[outer expert]
    """
    width = max(1, int(np.count_nonzero(heavy, axis=1).max()))
    outer = np.pad(np.argsort(-heavy, axis=1, kind="stable")[:, :width], ((0, 1), (0, 0)))
    brings = np.pad(-np.sort(-heavy, axis=1)[:, :width], ((0, 1), (0, 0)))
    return _net_gains(sets, outer, brings, price, size)


@njit(cache=True, nogil=True)
def _net_gains(sets: Ints, outer: Ints, brings: Floats, price: Floats, size: int) -> Floats:
    """`_gains` from the outer experts int64[middle expert, place] and the hops to them, float64 alike."""
    gains = np.empty(len(sets))
    brought, largest = np.zeros(len(price)), np.empty(size)
    for at in range(len(sets)):
        for middle in sets[at]:
            for place in range(outer.shape[1]):
                brought[outer[middle, place]] += brings[middle, place]
        largest[:] = 0.0
        for middle in sets[at]:
            for place in range(outer.shape[1]):
                end = outer[middle, place]
                net, brought[end] = brought[end] - price[end], 0.0
                for rank in range(size):
                    if net > largest[rank]:
                        net, largest[rank] = largest[rank], net
        gains[at] = largest.sum()
    return gains


def _charges(sets: Ints, gain: Floats, experts: int) -> float:
    """The sum of charges that cover every set's gain float64[set]: each set's gain shared equally at first, then every
    expert's charge lowered to the need of its sets, the highest first. No single one could be lower."""
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
