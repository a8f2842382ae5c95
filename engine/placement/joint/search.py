"""Local search for joint placements: the best swaps, exchanges in several layers at once, renamed suffixes, kicks.

Exchanges between two GPUs in many layers at once are the exact best, by dynamic programming over the layers.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from itertools import combinations

import numpy as np

from engine.placement.baselines import heaviest_first
from engine.placement.joint.state import BROAD, EVENNESS, NARROW, TOLERANCE, JointState, JointTerms
from engine.result import Floats, Ints, Stop, never

MOST_EXCHANGES = 4096
"""Exchanges of two experts against two are left out where there would be more: at over 11 experts per GPU."""
MOST_CELLS = 2**15
"""Exchanges times layers of one chain: some ten milliseconds."""
CHOICES = 16
"""Exchanges of every layer that the dynamic programme chooses from: those that are best with the other layers as they
are. More were slower and gave no better plans in the same time on recorded traffic."""
ACCEPT = 1.0001
"""Most that an accepted placement may be worse than the one it came from, as a factor."""
KICKS_PER_RETURN = 100
PRICES = 12
"""Halvings of the price of a move, from the gain per move of the best swap: the best moves come first."""
GPUS_PER_KICK, PAIRS_PER_KICK, SWAPS_PER_GPU = 8, 10, 1.25
POLISH_ROUNDS, POLISH_PAIRS = 20, 120
PRICE_STEPS = 6
MANY_EXPERTS = 128
"""From here on one look at all swaps of a layer is used for several."""

Visit = Callable[[JointState], None]
"""Called with every local optimum that was accepted."""


def chain(state: JointState, first_gpu: int, second_gpu: int, low: int, high: int, price: float = 0.0) -> list[int]:
    """Exchange experts of two GPUs in the layers low … high - 1 so that the objective falls most, at most one exchange of
    one or two experts against as many a layer; returns the layers that changed.

    Exchanges of neighbouring layers add up, but for twice the tokens between the experts exchanged, so the best choice
    is a shortest path. Where the worst workload counts, a mixture guides instead; exchanges that make that objective worse,
    or move more experts than may be moved, are taken back. price: cost of a (layer, expert) pair that leaves its GPU.
    """
    terms = state.terms
    sizes = int(terms.instance.slots[first_gpu]), int(terms.instance.slots[second_gpu])
    if not min(sizes):
        return []
    table, reverse = _exchanges(*sizes)
    here = state.place[low:high]
    members = [np.nonzero(here == gpu)[1].reshape(len(here), -1) for gpu in (first_gpu, second_gpu)]
    member = np.concatenate(members, axis=1)
    on_hops, on_peaks = state.guide(state.hops), state.guide(state.peaks)
    cost = np.tensordot(on_hops, state.cost[:, low:high, :, second_gpu] - state.cost[:, low:high, :, first_gpu], axes=1)
    alone = np.take_along_axis(cost, member, axis=1) @ reverse
    for workload, share in enumerate(on_peaks):
        shift = np.take_along_axis(terms.load[workload, low:high], member, axis=1) @ reverse
        load = state.gpu_load[workload, low:high]
        rest = np.delete(load, (first_gpu, second_gpu), axis=1).max(axis=1, initial=0.0)[:, None]
        after = np.maximum(np.maximum(load[:, first_gpu, None] - shift, load[:, second_gpu, None] + shift), rest)
        alone += share * (after - state.peak[workload, low:high, None])
        alone += (2 * EVENNESS * share / terms.unit) * shift * (load[:, second_gpu, None] - load[:, first_gpu, None] + shift)
    if price > 0:
        home = np.take_along_axis(state.start[low:high], member, axis=1)
        alone += ((home == first_gpu) * price - (home == second_gpu) * price) @ reverse
    picks, choices = _shortest(state, alone, table, member, low, on_hops, terms.distance[first_gpu, second_gpu] * 2)
    mark, before = len(state.journal), state.objective
    for offset, pick in enumerate(picks):
        if pick >= 0:
            exchange = table[choices[offset, pick]]
            pairs = zip(member[offset, exchange > 0], member[offset, exchange < 0], strict=True)
            for first, second in pairs:
                state.swap(low + offset, int(first), int(second))
    if not state.legal or (terms.worst and state.objective > before + TOLERANCE):
        state.undo(mark)
        return []
    return [low + offset for offset, pick in enumerate(picks) if pick >= 0]


def longest_chain(state: JointState, first_gpu: int, second_gpu: int) -> int:
    """Layers that a chain between two GPUs takes in without keeping a caller that wants to stop waiting."""
    sizes = int(state.terms.instance.slots[first_gpu]), int(state.terms.instance.slots[second_gpu])
    return max(4, MOST_CELLS // len(_exchanges(*sizes)[0])) if min(sizes) else state.layers


def _shortest(
    state: JointState, alone: Floats, table: Floats, member: Ints, low: int, on_hops: Floats, apart: float
) -> tuple[list[int], Ints]:
    """The choice of every layer (-1: no exchange) and the exchange that every choice stands for, int64[layer, choice]."""
    layers, exchanges = alone.shape
    count = min(CHOICES if layers > 1 else 1, exchanges)
    choices = np.argpartition(alone, count - 1, axis=1)[:, :count]
    alone = np.take_along_axis(alone, choices, axis=1)
    value, steps, index = np.append(alone[0], 0.0), [], np.arange(count + 1)
    for layer in range(1, layers):
        hop = state.terms.hop[:, low + layer - 1][:, member[layer - 1][:, None], member[layer]]
        tokens = hop[0] if len(hop) == 1 else np.tensordot(on_hops, hop, axes=1)
        total = np.zeros((count + 1, count + 1))
        total[:count, :count] = table[choices[layer - 1]] @ tokens @ table[choices[layer]].T
        total *= -apart
        total[:, :count] += alone[layer]
        total += value[:, None]
        steps.append(total.argmin(axis=0))
        value = total[steps[-1], index]
    if not value.min() < -TOLERANCE:
        return [-1] * layers, choices
    picks = [int(value.argmin())]
    for step in reversed(steps):
        picks.append(int(step[picks[-1]]))
    return [pick if pick < count else -1 for pick in reversed(picks)], choices


@cache
def _exchanges(first: int, second: int) -> tuple[Floats, Floats]:
    """float64[exchange, expert of one or the other GPU] and its transpose: 1 leaves the first GPU, -1 the second."""
    rows = []
    for size in (1, 2):
        ways = [(left, right) for left in combinations(range(first), size) for right in combinations(range(second), size)]
        if size > 1 and len(ways) > MOST_EXCHANGES:
            break
        block = np.zeros((len(ways), first + second))
        for row, (left, right) in zip(block, ways, strict=True):
            row[list(left)] = 1.0
            row[[first + index for index in right]] = -1.0
        rows.append(block)
    table = np.concatenate(rows)
    table.setflags(write=False)
    return table, np.ascontiguousarray(table.T)


def search(state: JointState, kicks: int, seed: int, stop: Stop, visit: Visit) -> bool:
    """Improve a placement; `visit` sees every accepted one. True if all kicks were made, False if `stop` ended it.

    A kick exchanges experts blindly among a few GPUs in one to four layers (with limited moves it first sends some home),
    then the best exchanges mend it; the result is taken back if it is worse. `state` ends at the best placement.
    """
    rng = np.random.default_rng(seed)
    _settle(state, rng, stop, visit)
    best, lowest = state.place.copy(), state.objective
    kept = lowest
    for kick in range(kicks):
        if stop():
            break
        if kick and kick % KICKS_PER_RETURN == 0:
            state.reset(best)  # also clears the round-off of many updates
            kept = state.objective
        state.journal.clear()
        low, high, gpus = _kick(state, rng)
        free = state.max_moves is None
        if free:
            descend(state, range(low, high), stop)
        else:
            descend_steeply(state, stop)
        wide_low, wide_high = max(0, low - 1), min(state.layers, high + 1)
        pairs = list(combinations(gpus.tolist(), 2)) if state.linked else []
        for index in rng.permutation(len(pairs))[:PAIRS_PER_KICK]:
            if stop():
                break
            chain(state, *pairs[index], wide_low, wide_high)
        _descend_twice(state, range(wide_low, wide_high) if free else range(state.layers), stop)
        objective = state.objective
        if objective > kept * ACCEPT + TOLERANCE:
            state.undo()
            continue
        kept = objective
        visit(state)
        if objective < lowest - TOLERANCE:
            best, lowest = state.place.copy(), objective
    else:
        state.reset(best)
        return True
    state.reset(best)
    return False


def descend(state: JointState, layers: Iterable[int], stop: Stop, price: float = 0.0) -> None:
    """The best swap of a layer until none helps, in `layers` and wherever a swap changes a neighbour's costs."""
    waiting = deque(layers)
    queued = set(waiting)
    while waiting and not stop():
        layer = waiting.popleft()
        queued.discard(layer)
        changed = False
        while not stop():
            gains = state.swap_gains(layer, price)
            first, second = divmod(int(gains.argmin()), state.experts)
            if not gains[first, second] < -TOLERANCE:
                break
            state.swap(layer, first, second)
            changed = True
            if state.max_moves is None and state.experts >= MANY_EXPERTS:
                _swap_others(state, layer, gains, {first, second})
        for other in (layer - 1, layer + 1):
            if changed and 0 <= other < state.layers and other not in queued:
                waiting.append(other)
                queued.add(other)


def _swap_others(state: JointState, layer: int, gains: Floats, moved: set[int]) -> None:
    """More swaps from the same gains float64[expert, expert], the best of every expert that has not moved since, each
    kept only if it still helps: for many experts far cheaper than all gains anew after every swap."""
    partner = gains.argmin(axis=1)
    gain = gains[np.arange(len(gains)), partner]
    now = state.potential(layer)
    for first in np.argsort(gain, kind="stable")[: len(gain) // 2].tolist():
        second = int(partner[first])
        if not gain[first] < -TOLERANCE:
            break
        if first in moved or second in moved:
            continue
        state.swap(layer, first, second)
        after = state.potential(layer)
        if after < now - TOLERANCE:
            now = after
            moved |= {first, second}
        else:
            state.undo(len(state.journal) - 1)


def _descend_twice(state: JointState, layers: range, stop: Stop) -> None:
    """A descent with an eye on all workloads and, where the worst counts, one for the worst alone."""
    descend(state, layers, stop)
    if state.terms.worst:
        state.breadth = NARROW
        descend(state, layers, stop)
        state.breadth = BROAD


def descend_steeply(state: JointState, stop: Stop, price: float = 0.0) -> None:
    """The best swap of all layers until none helps, so that few allowed moves go where they gain most.

    A layer's best gain is kept until it or a neighbour changes, and looked at again before its swap is made, since the
    worst workload may have become another.
    """
    best = np.array([state.swap_gains(layer, price).min() for layer in range(state.layers)])
    while not stop():
        layer = int(best.argmin())
        gains = state.swap_gains(layer, price)
        first, second = divmod(int(gains.argmin()), state.experts)
        gain = float(gains[first, second])
        if not best[layer] < -TOLERANCE:
            return
        if gain > best[layer] + TOLERANCE:
            best[layer] = gain
            continue
        state.swap(layer, first, second)
        for other in range(max(layer - 1, 0), min(layer + 2, state.layers)):
            best[other] = state.swap_gains(other, price).min()


def rename_suffixes(state: JointState) -> None:
    """At every layer boundary give all GPUs after it the names that keep most tokens.

    For GPUs that are alike: loads and hops inside the suffix stay as they are.
    """
    from scipy.optimize import linear_sum_assignment

    terms, changed = state.terms, False
    guide, before = state.guide(state.hops), state.objective
    old_place, place = state.place, state.place.copy()
    for layer in range(state.layers - 1):
        tokens = np.tensordot(guide, terms.hop[:, layer], axes=1)
        pair = place[layer][:, None] * state.gpus + place[layer + 1]
        kept = np.bincount(pair.ravel(), tokens.ravel(), state.gpus**2).reshape(state.gpus, state.gpus)
        new, old = linear_sum_assignment(kept, maximize=True)
        if kept[new, old].sum() > np.trace(kept) + TOLERANCE:
            place[layer + 1 :] = np.argsort(old)[place[layer + 1 :]]
            changed = True
    if changed:
        state.reset(place)
        if state.objective > before:
            state.reset(old_place)


def first_placement(terms: JointTerms, stop: Stop = never) -> Ints:
    """int64[layer, expert]: layer by layer the assignment that keeps most tokens of the layer before.

    Prices on GPU load rise where it is high; of the prices tried, those with the best layer count. Where none is better, with
    no weight on hops, and in all layers still to come when `stop` answers True: heaviest expert first onto the lightest GPU
    with a free slot.
    """
    from scipy.optimize import linear_sum_assignment

    instance = terms.instance
    place = np.empty((instance.layers, instance.experts), dtype=np.int64)
    column = np.repeat(np.arange(instance.gpus), instance.slots)
    mean = terms.load.mean(axis=0)
    for layer in range(instance.layers):
        place[layer] = heaviest_first(mean[layer], instance.slots)
        if not layer or not terms.weight or stop():
            continue
        hop = terms.hop[:, layer - 1].mean(axis=0).T @ terms.distance[place[layer - 1]]
        load, gpu_price = mean[layer] * len(terms.load), np.zeros(instance.gpus)
        expert = np.arange(instance.experts)
        best = hop[expert, place[layer]].sum() + np.bincount(place[layer], load, instance.gpus).max()
        for step in range(PRICE_STEPS):
            if stop():
                break
            cost = hop + load[:, None] * gpu_price
            trial = column[linear_sum_assignment(cost[:, column])[1]]
            held = np.bincount(trial, load, instance.gpus)
            value = hop[expert, trial].sum() + held.max()
            if value < best:
                place[layer], best = trial, value
            gpu_price = np.maximum(gpu_price + (held / max(held.mean(), TOLERANCE) - 1) / (step + 2), 0.0)
    return place


def _settle(state: JointState, rng: np.random.Generator, stop: Stop, visit: Visit) -> None:
    """The first local optimum. With limited moves a price on moving falls from high to nothing."""
    visit(state)
    free = state.max_moves is None
    price = 0.0
    if not free:
        gains = [state.swap_gains(layer).min() for layer in range(state.layers)]
        finite = [gain for gain in gains if np.isfinite(gain)]
        price = max(-min(finite, default=0.0) / 2, 0.0)
    for _ in range(PRICES if price else 0):
        if stop():
            break
        descend_steeply(state, stop, price)
        _chains(state, rng, stop, price)
        price /= 2
    if free and state.terms.instance.gpus_alike:
        rename_suffixes(state)
    descend(state, range(state.layers), stop)
    for _ in range(POLISH_ROUNDS):
        before = state.objective
        _chains(state, rng, stop)
        descend(state, range(state.layers), stop)
        if free and state.terms.instance.gpus_alike and not stop():
            rename_suffixes(state)
        if stop() or not state.objective < before * (1 - 1e-5):
            break
    _descend_twice(state, range(state.layers), stop)
    visit(state)


def _chains(state: JointState, rng: np.random.Generator, stop: Stop, price: float = 0.0) -> None:
    pairs = list(combinations(range(state.gpus), 2)) if state.linked else []
    for index in rng.permutation(len(pairs))[:POLISH_PAIRS]:
        span = longest_chain(state, *pairs[index])
        for low in range(0, state.layers, span):
            if stop():
                return
            chain(state, *pairs[index], low, min(low + span, state.layers), price)


def _kick(state: JointState, rng: np.random.Generator) -> tuple[int, int, Ints]:
    """Exchange experts blindly; returns the layers low … high - 1 and the GPUs where it happened."""
    width = int(rng.integers(1, 5))
    low = int(rng.integers(max(1, state.layers - width + 1)))
    high = min(low + width, state.layers)
    gpus = np.sort(rng.permutation(np.flatnonzero(state.terms.instance.slots))[:GPUS_PER_KICK])
    if state.max_moves is not None:
        _send_home(state, low, high, rng)
        if rng.random() < 0.5:
            return low, high, gpus
    for layer in range(low, high):
        experts = np.flatnonzero(np.isin(state.place[layer], gpus))
        for _ in range(int(np.ceil(SWAPS_PER_GPU * len(gpus)))):
            first, second = (int(expert) for expert in rng.choice(experts, 2))
            if state.place[layer, first] != state.place[layer, second]:
                state.swap(layer, first, second)
                if not state.legal:
                    state.undo(len(state.journal) - 1)
    return low, high, gpus


def _send_home(state: JointState, low: int, high: int, rng: np.random.Generator) -> None:
    """Send about half of the experts that left their GPU back to it, in exchange for others that came to it."""
    for layer in range(low, high):
        home = state.start[layer]
        for expert in rng.permutation(np.flatnonzero(state.place[layer] != home)):
            if rng.random() < 0.5 and state.place[layer, expert] != home[expert]:
                # The slots are full, so where one is missing there is one that came from elsewhere.
                foreign = np.flatnonzero((state.place[layer] == home[expert]) & (home != home[expert]))
                state.swap(layer, int(expert), int(rng.choice(foreign)))
