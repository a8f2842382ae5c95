"""Seconds below which no placement brings a layer: prices of the loads of its ports and GPUs prove them.

An exchange takes at least the mean of its ports' seconds by any weights that sum to 1, and so it is with FFNs. At such prices a
row costs something at every group, the rows of a group cost at least a sum over its experts (see `together`), every expert has
a place where that is cheapest, and the sum of these is a bound (weak duality). An expert with one copy is whole somewhere: a
port takes all its rows there, so the ports that the largest experts need wherever they are may be weighed too.

The longest FFNs take F seconds, which also limits the experts of a GPU that share rows. At fixed prices the bound is concave in
F, so over an interval it is least at an end; several prices and intervals cover all F from the least to infinity.

With copies, each token goes to any of them: an expert's rows cost at least as they would on the second cheapest group for their
source, less what a copy saves where it is cheaper, and less what it shares there.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from engine.placement.best import Rows
from engine.placement.best.together import Caps, Limit, Tier, by_eigenvalues, by_rows
from engine.result import Floats, Ints, Stop

SINGLED_OUT = 8
"""Experts that are weighed as a whole."""
GROWTH, INTERVALS, WEIGHTS = 1.12, 20, 5
"""Factor from an end of an interval of F to the next, intervals, and weights of the prices of FFNs that are tried on each."""
LINEAR_WORK, LINEAR_CELLS, ROUGH, RARE = 400_000, 600_000, 150, 0.2
"""Cells of all linear programmes for a second of work, and of the largest one; steps in place of larger ones,
and the part of the mean price of a port below which it is none."""
LOOKS = 2
"""Limits of F that are looked at: that of the linear programme, and the one where the bound is the lowest then."""


@dataclass(frozen=True)
class Bounded:
    """A layer as its bounds see it.

    rows: the ports, and their seconds
    tiers: its rows by level
    least: float64[expert, gpu] seconds of the FFN of all tokens of an expert, the least that any copies leave
    room: int64[gpu] slots
    slots: of the layer in all
    free: True if copies of an expert may serve any parts of its tokens, False if equal parts of those of every source
    start: float64[port] seconds before the first byte, or what the exchange surely has of that, if that is less
    """

    rows: Rows
    tiers: tuple[Tier, ...]
    least: Floats
    room: Ints
    slots: int
    free: bool
    start: Floats

    @property
    def single(self) -> bool:
        """True if every expert has one copy."""
        return self.slots == len(self.least)

    @property
    def whole(self) -> bool:
        """True if all tokens of an expert cost what they do on some one group: of one copy, or of equal parts of rows that
        serve nothing else."""
        return self.single or not (self.free or any(tier.shared for tier in self.tiers))

    @property
    def largest(self) -> Ints:
        """int64[expert] that are singled out: those with the most tokens."""
        return np.argsort(-self.tiers[0].demand.sum(axis=1), kind="stable")[:SINGLED_OUT]

    def caps(self, tier: Tier, group: int, longest: float) -> Caps:
        """The limits of a group if no GPU's FFNs take longer."""
        here = tier.group == group
        size = self.least[:, here].min(axis=1) if self.single and np.isfinite(longest) else np.zeros(0)
        return Caps(min(int(self.room[here].sum()), len(self.least)), size, int(here.sum()) * longest)

    @property
    def shortest(self) -> float:
        """Seconds of the longest FFNs at least."""
        experts, gpus = self.least.shape
        weight = 1 / np.maximum(self.least.sum(axis=0), 1e-30)
        bounds = [float((self.least * weight).min(axis=1).sum() / weight.sum())]
        each = np.sort(self.least.min(axis=1))[::-1]
        if self.single:  # of n GPUs' i n + 1 longest FFNs i + 1 are on one GPU
            bounds += [float(each[i * gpus - i : i * gpus + 1].sum()) for i in range((experts - 1) // gpus + 1)]
            if self.room.sum() == experts:  # every slot is taken
                beside = np.sort(self.least, axis=0).cumsum(axis=0)[np.maximum(self.room - 2, 0), np.arange(gpus)]
                bounds.append(float((self.least + np.where(self.room > 1, beside, 0.0)).min(axis=1).max()))
            return max(bounds)
        low, high = float(each[0]) / gpus, float(each.sum())
        for _ in range(50):  # an expert needs a copy for every F that its FFN takes
            middle = (low + high) / 2
            low, high = (
                (middle, high) if np.maximum(np.ceil(each / max(middle, 1e-30)), 1).sum() > self.slots else (low, middle)
            )
        return max(*bounds, low)


@dataclass(frozen=True)
class Prices:
    """Prices of the loads of a layer, not negative.

    there, back, ffn: float64[port], float64[port], float64[gpu] of dispatch, combine and FFNs
    slot: float64[gpu] seconds of a slot
    out: int64[expert] that are singled out, with one copy
    singled: float64[3, out] of the busiest port of each in the dispatch, in the combine, and of its FFN; with those above
        the sums of dispatch and of combine are at most 1
    longest: seconds of the longest FFNs for which these are the prices
    """

    there: Floats
    back: Floats
    ffn: Floats
    slot: Floats
    out: Ints
    singled: Floats
    longest: float

    def plain(self) -> "Prices":
        """The same without experts that are singled out."""
        there, back = (each / max(float(each.sum()), 1e-30) for each in (self.there, self.back))
        return replace(self, there=there, back=back, out=self.out[:0], singled=self.singled[:, :0])


def wholes(bounded: Bounded, experts: Ints) -> Floats:
    """float64[3, expert, gpu] seconds of the busiest port in dispatch and combine and of the FFN, of one expert alone."""
    rows, gpus = bounded.rows, len(bounded.room)
    moved = np.zeros((len(experts), gpus, len(rows.there) + 1))
    for tier in bounded.tiers:
        for gpu, group in enumerate(tier.group):
            for side in (tier.sends[group], tier.takes[group]):
                np.add.at(moved[:, gpu], (slice(None), side), tier.demand[experts])
    used = moved[:, :, :-1] > 0
    sides = [bounded.start + moved[:, :, :-1] * each for each in (rows.there, rows.back)]
    return np.stack([*(np.where(used, side, 0.0).max(axis=2, initial=0.0) for side in sides), bounded.least[experts]])


def rough_prices(bounded: Bounded, part: tuple[Floats, ...]) -> Prices:
    """Prices by multiplicative weights in place of a large linear programme: from equal ones, a busier port or GPU counts more.

    part: as in `prices_of`
    """
    rows, (experts, gpus), ports = bounded.rows, bounded.least.shape, len(bounded.rows.there)
    used = np.isin(
        np.arange(ports), np.concatenate([side.ravel() for tier in bounded.tiers for side in (tier.sends, tier.takes)])
    )
    weights, slot = [used / rows.there, used / rows.back, np.ones(gpus)], np.zeros(gpus)
    kept, best, mean = None, -np.inf, [np.zeros(ports), np.zeros(ports), np.zeros(gpus), np.zeros(gpus)]
    for step in range(1, ROUGH + 1):
        there, back, ffn = weights = [each / max(float(each.sum()), 1e-30) for each in weights]
        if step == ROUGH:
            there, back, ffn, slot = (each / (ROUGH - 1) for each in mean)
        of_port = np.append(there * rows.there + back * rows.back, 0.0)
        cost = slot + ffn * bounded.least
        for tier, of_row in zip(bounded.tiers, part, strict=True):
            cost += ((tier.demand @ (of_port[tier.sends] + of_port[tier.takes]).T) * of_row)[:, tier.group]
        value = float(cost.min(axis=1).sum() - (slot * bounded.room).sum())
        if value > best:
            best, kept = value, (there, back, ffn, slot)
        mean = [total + each for total, each in zip(mean, (there, back, ffn, slot), strict=True)]
        place, loads = cost.argmin(axis=1), np.zeros(ports + 1)
        for tier, of_row in zip(bounded.tiers, part, strict=True):
            moved, group = np.zeros(tier.sends.shape), tier.group[place]
            np.add.at(moved, group, tier.demand * of_row[np.arange(experts), group, None])
            loads += sum(np.bincount(side.ravel(), moved.ravel(), ports + 1) for side in (tier.sends, tier.takes))
        busy = [
            loads[:-1] * rows.there,
            loads[:-1] * rows.back,
            np.bincount(place, bounded.least[np.arange(experts), place], gpus),
        ]
        weights = [
            each * np.exp(load / max(float(load.max()), 1e-30) / step**0.5) for each, load in zip(weights, busy, strict=True)
        ]
        over = np.bincount(place, minlength=gpus) - bounded.room
        slot = np.maximum(slot + over * (best / experts / experts / step**0.5), 0.0)
    # Ports that hardly count are dropped, and the groups that rows reach by them need no limits.
    there, back, ffn, slot = kept
    there, back = (np.where(each > RARE * each.mean(), each, 0.0) for each in (there, back))
    there, back = (each / max(float(each.sum()), 1e-30) for each in (there, back))
    return Prices(there, back, ffn, slot, np.zeros(0, dtype=np.int64), np.zeros((3, 0)), 0.0)


def prices_of(bounded: Bounded, part: tuple[Floats, ...], longest: float | None = None) -> Prices:
    """Prices at which a bound is large: the dual of a linear programme that divides experts among GPUs.

    part: of every tier float64[expert, group], about the part of a row of each token that an expert costs there
    longest: seconds of the longest FFNs; None = any
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, csr_array, eye_array, hstack, kron, vstack

    rows, (experts, gpus), ports = bounded.rows, bounded.least.shape, len(bounded.rows.there)
    cells, columns, values = [], [], []
    expert = np.arange(experts)[:, None] * gpus
    for tier, of_row in zip(bounded.tiers, part, strict=True):
        for gpu, group in enumerate(tier.group):
            moved = tier.demand * of_row[:, group, None]
            for side in (tier.sends[group], tier.takes[group]):
                cell, column = np.broadcast_arrays(expert + gpu, side[None])
                moves = (column < ports) & (moved > 0)
                cells.append(cell[moves])
                columns.append(column[moves])
                values.append(moved[moves])
    moved = coo_array(
        (np.concatenate(values), (np.concatenate(cells), np.concatenate(columns))), (experts * gpus, ports)
    ).tocsr()
    own = kron(np.ones((experts, 1)), eye_array(gpus)).tocsr()
    loads = [moved * rows.there, moved * rows.back, own.multiply(bounded.least.reshape(-1, 1))]
    constant = [bounded.start, bounded.start, np.zeros(gpus)]
    out = np.zeros(0, dtype=np.int64)
    if bounded.single:
        out = bounded.largest
        whole = wholes(bounded, out)
        number = np.repeat(np.arange(len(out)), gpus)
        cell = (out[:, None] * gpus + np.arange(gpus)).ravel()
        loads += [coo_array((side.ravel(), (cell, number)), (experts * gpus, len(out))) for side in whole]
        constant += [np.zeros(len(out))] * 3
    sizes = [len(each) for each in constant]
    loads = hstack(loads).tocsr()
    scale = float(loads.max()) or 1.0
    three = csr_array(np.repeat(np.tile(np.eye(3), (2, 1))[: len(sizes)], sizes, axis=0))
    limits = vstack([hstack([loads.T / scale, -three]), hstack([own.T, csr_array((gpus, 3))])]).tocsr()
    one = hstack([kron(eye_array(experts), np.ones((1, gpus))), csr_array((experts, 3))]).tocsr()
    most = np.concatenate([*(-each / scale for each in constant), bounded.room])
    bounds = [(0, None)] * (experts * gpus + 2) + [(0, None) if longest is None else (longest / scale,) * 2]
    cost = np.repeat([0.0, 1.0], [experts * gpus, 3])
    answer = linprog(cost, limits, most, one, np.ones(experts), bounds, method="highs")
    if answer.x is None:
        prices = [np.full(size, 1 / max(size, 1)) for size in sizes[:3]]
        return Prices(*prices, np.zeros(gpus), out[:0], np.zeros((3, 0)), 0.0)
    dual = np.maximum(-answer.ineqlin.marginals, 0.0)
    *prices, slot = np.split(dual, np.cumsum(sizes))
    sums = [max(sum(float(each.sum()) for each in prices[side::3]), 1.0) for side in range(2)] + [1.0]
    prices = [each / sums[number % 3] for number, each in enumerate(prices)]
    return Prices(*prices[:3], slot * scale, out, np.array(prices[3:]).reshape(3, -1), float(answer.x[-1]) * scale)


class Proof:
    """The bound of a layer for every F, from limits of rows at several prices.

    seconds: work of searches by eigenvalues, where tokens are known
    part: of every tier float64[expert, group], see `prices_of`, by the limits of late
    """

    def __init__(self, bounded: Bounded, seconds: float) -> None:
        self.bounded, self.seconds = bounded, seconds
        self.ends = bounded.shortest * GROWTH ** np.arange(INTERVALS + 1)
        self.proven = np.full(INTERVALS + 1, -np.inf)
        self.part = tuple(self._at_first(tier) for tier in bounded.tiers)

    def _at_first(self, tier: Tier) -> Floats:
        """float64[expert, group] of rows that all cost the same."""
        rows, part, known = np.ones(tier.sends.shape[1]), np.ones((len(self.bounded.least), len(tier.sends))), {}
        for group in range(len(tier.sends) if tier.shared else 0):
            caps = self.bounded.caps(tier, group, self.bounded.shortest * GROWTH)
            key = caps.slots, caps.size.tobytes()
            if caps.slots and key not in known:
                slope, limit = limit_of(tier, rows, caps, self._can(tier.seconds))
                alone = tier.alone(rows, slope, tier.most(caps.slots))
                known[key] = _part(alone + limit.at(caps.slots, caps.seconds), tier.demand.sum(axis=1), tier.most(caps.slots))
            part[:, group] = known.get(key, 1.0)
        return part

    @property
    def least(self) -> float:
        """Seconds of the layer at least."""
        return max(float(self.proven.min()), self.bounded.shortest) * (1 - 1e-9)

    @property
    def worst(self) -> float:
        """The end of the interval of F with the lowest bound."""
        return float(self.ends[min(int(self.proven.argmin()) + 1, INTERVALS)])

    def _can(self, seconds: float) -> bool:
        """True if there is work left for searches, which is then done."""
        can = seconds <= self.seconds
        self.seconds -= seconds if can else 0.0
        return can

    def look(self, prices: Prices, longest: float) -> None:
        """Prove what limits do at some prices that are the closest where no GPU's FFNs take longer."""
        bounded, shape = self.bounded, self.bounded.least.shape
        of_port = np.append(prices.there * bounded.rows.there + prices.back * bounded.rows.back, 0.0)
        of_rows = [of_port[tier.sends] + of_port[tier.takes] for tier in bounded.tiers]  # float64[group, kind] each
        work = sum(tier.seconds * int(each.any(axis=1).sum()) for tier, each in zip(bounded.tiers, of_rows, strict=True))
        if not bounded.whole:
            self._look_at_copies(prices, of_rows, self._can(work))
            return
        # Without a limit of F sums of rows are hardly worse.
        search = np.isfinite(longest) and self._can(work)
        part, load = np.tile(np.where(bounded.room > 0, prices.slot, np.inf), (shape[0], 1)), np.zeros(shape)
        for tier, of_row, before in zip(bounded.tiers, of_rows, self.part, strict=True):
            for group, price in enumerate(of_row):
                here, caps = tier.group == group, bounded.caps(tier, group, longest)
                if not (price.any() and caps.slots):
                    continue
                slope, limit = limit_of(tier, price, caps, search)
                most = tier.most(caps.slots)
                alone = tier.alone(price, slope, most)
                before[:, group] = _part(alone + limit.at(caps.slots, caps.seconds), tier.demand @ price, most)
                part[:, here] += (alone + limit.at(caps.slots, 0.0))[:, None]
                load[:, here] += here.sum() * limit.load[:, None]
        self._tell(prices, part, load, 0.0)

    def _look_at_copies(self, prices: Prices, of_rows: list[Floats], search: bool) -> None:
        """The same where each token goes to any copy: rows as on the second cheapest group for their source, less what every
        copy saves where it is cheaper and where it is together with others, on flat lines, on good ones and between."""
        bounded, experts = self.bounded, len(self.bounded.least)
        good: dict[int, Floats] = {}
        for share in (0.0, 0.5, 1.0):
            part, base = np.tile(np.where(bounded.room > 0, 0.0, np.inf), (experts, 1)), 0.0
            for number, (tier, of_row) in enumerate(zip(bounded.tiers, of_rows, strict=True)):
                second, most = np.sort(of_row, axis=0)[min(1, len(of_row) - 1)], tier.most(experts)
                if not second.any():
                    continue
                if share and number not in good:
                    most_room = int(np.argmax(np.bincount(tier.group, bounded.room)))
                    good[number] = limit_of(tier, second, bounded.caps(tier, most_room, np.inf), search)[0]
                slope = share * good[number] if share else np.zeros(experts)
                base += float(tier.alone(second, slope, most).sum())
                for group, price in enumerate(np.minimum(of_row, second)):
                    caps = bounded.caps(tier, group, np.inf)
                    saved = tier.alone(second - price, slope, most)
                    if share and price.any() and caps.slots:
                        saved -= np.minimum(limit_of(tier, price, caps, search, slope)[1].at(caps.slots, 0.0), 0.0)
                    part[:, tier.group == group] -= saved[:, None]
            self._tell(prices, part, np.zeros_like(part), base)

    def _tell(self, prices: Prices, part: Floats, load: Floats, base: float) -> None:
        """Keep the bound of every interval of F where experts cost part - F load on a GPU, and base wherever they are."""
        bounded, out = self.bounded, prices.out
        singled = np.zeros_like(part)
        if len(out):
            whole = wholes(bounded, out)
            part[out] += np.einsum("se,seg->eg", prices.singled[:2], whole[:2])
            singled[out] = prices.singled[2][:, None] * whole[2]
        constant = float(((prices.there + prices.back) * bounded.start).sum()) + base
        copied = None if bounded.whole else _copied(part, bounded.slots)
        for weight in np.linspace(0.0, 1.0, WEIGHTS):
            slope = 1 - weight * float(prices.ffn.sum() + prices.singled[2].sum())
            ffns = weight * (bounded.least * prices.ffn + singled)
            if copied is None:
                slots = float((prices.slot * bounded.room).sum())
                placed = [float((part + ffns - longest * load).min(axis=1).sum()) - slots for longest in self.ends]
            else:
                placed = float(ffns.min(axis=1).sum()) + copied
            values = constant + slope * self.ends + placed
            beyond = np.inf if slope >= 0 and not load.any() else -np.inf
            self.proven = np.maximum(self.proven, np.minimum(values, np.append(values[1:], beyond)))


def _copied(cost: Floats, slots: int) -> float:
    """The least that experts cost in so many slots, each in at least one: by the best price of a slot."""

    def bound(price: float) -> float:
        priced = cost + price
        some = np.minimum(priced, 0.0).sum(axis=1)
        return float(np.where(some < 0, some, priced.min(axis=1)).sum()) - price * slots

    low, high = 0.0, float(max(-cost.min(initial=0.0), 0.0))
    for _ in range(36):  # concave in the price
        first, second = (2 * low + high) / 3, (low + 2 * high) / 3
        low, high = (first, high) if bound(first) < bound(second) else (low, second)
    return bound((low + high) / 2)


def limit_of(tier: Tier, price: Floats, caps: Caps, search: bool, slope: Floats | None = None) -> tuple[Floats, Limit]:
    """(slopes of lines, a limit of pairs), see `together`."""
    none = np.zeros(len(tier.demand))
    if not tier.shared:
        return none, Limit(none, none, none)
    if search and len(tier.member):
        return by_eigenvalues(tier, price, caps, slope)
    return by_rows(tier, price, caps, slope)


def _part(cost: Floats, of_all: Floats, most: int) -> Floats:
    """The part of a row that an expert costs, of one that serves so many at most."""
    return np.clip(cost / np.where(of_all > 0, of_all, 1.0), 1 / most, 1.0)


def least_of(layer: Callable[[int], Bounded], layers: int, seconds: float, stop: Stop) -> float | None:
    """Seconds below which no placement brings these layers one after another, on all cores; None if it was stopped.

    layer: makes the layer of a number
    seconds: work of linear programmes, and as much of searches
    """
    first = layer(0)
    experts, gpus = first.least.shape
    cells = experts * gpus * 2 * (gpus + 2)
    # Any prices prove a bound, so those of a layer do for the next ones too.
    alike = -(-layers // max(int(LINEAR_WORK * seconds) // cells, 1)) if cells <= LINEAR_CELLS else 1

    def several(begin: int) -> float:
        total, prices = 0.0, None
        for number in range(begin, min(begin + alike, layers)):
            if stop():
                return np.nan
            least, prices = least_seconds(layer(number), seconds / layers, prices)
            total += least
        return total

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        total = sum(threads.map(several, range(0, layers, alike)))
    return None if np.isnan(total) else total


def least_seconds(bounded: Bounded, seconds: float, known: list[Prices] | None = None) -> tuple[float, list[Prices]]:
    """(seconds below which no placement brings a layer, the prices that prove it).

    seconds: work of searches
    known: prices of another layer, which serve for this one too; None = look for some
    """
    proof = Proof(bounded, seconds)
    experts, gpus = bounded.least.shape
    large = experts * gpus * 2 * (gpus + 2) > LINEAR_CELLS
    prices = list(known or [(rough_prices if large else prices_of)(bounded, proof.part)])
    for price in prices if known else ():  # also without experts that are singled out, which differ more from layer to layer
        proof.look(price.plain(), np.inf)
    prices = [replace(price, out=bounded.largest[: len(price.out)]) for price in prices]
    proof.look(prices[0], np.inf)
    for tier in bounded.tiers if not bounded.whole else ():
        # At prices under which a row costs the same wherever it leaves, a good place is no better than another.
        used = np.isin(np.arange(len(bounded.start)), tier.sends)
        there, back = (used / each / max(float((used / each).sum()), 1e-30) for each in (bounded.rows.there, bounded.rows.back))
        proof.look(replace(prices[0], there=there, back=back), np.inf)
    for number in range(LOOKS if bounded.single and any(tier.shared for tier in bounded.tiers) else 0):
        if number >= len(prices):
            if large or known:
                break
            prices.append(prices_of(bounded, proof.part, proof.worst))
        proof.look(prices[number], max(prices[number].longest, bounded.shortest) * (1 if number else GROWTH))
        if number:
            proof.look(prices[number], np.inf)
    return proof.least, prices
