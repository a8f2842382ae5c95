"""Loads of GPUs with several experts each, and the exchange of two that lowers the highest loads most; compiled (numba).

Part of `grouped_assignment`: the steps of its local search, of which it makes some thousands a layer.
"""

import numpy as np
from numba import njit

from engine.placement.assignment import AssignmentInstance
from engine.result import Bools, Floats, Ints

ACCEPT, KICKS_PER_RETURN = 1.002, 50
SQUARINGS = 9
"""Loads are compared in the 2**9-norm: nearly the maximum, yet it still sees the second worst GPU."""


class GroupLoads:
    """An assignment with its loads; items are the experts and, with slots to spare, one free place per GPU.

    place: int64[item], the GPU of every item
    kept, best: int64[item], the assignment that the search goes on from, and the one of the lowest cost
    """

    def __init__(self, instance: AssignmentInstance, slots: Ints) -> None:
        """A greedy assignment.

        slots: int64[gpu], the experts that each GPU takes at most
        """
        gpus, experts = instance.gpus, instance.experts
        spare = slots.sum() > experts
        padding = ((0, gpus if spare else 0), (0, 0))
        compute, receive, saved = (
            np.pad(table.T, padding) for table in (instance.compute, instance.receive, instance.send_saved)
        )
        self.experts, self.slots = experts, slots
        self.tables = np.stack([compute, receive, -saved])
        """float64[load, item, gpu] in seconds: of F, of what is received, and of what is sent."""
        self.empty = np.stack([np.zeros(gpus), np.zeros(gpus), instance.send_total])
        """float64[load, gpu]: the loads of GPUs without experts."""
        self.loads = self.empty.copy()
        self.barred = np.zeros(len(compute), dtype=np.bool_)
        """bool[item]: a free place that its GPU does not have, which may be exchanged with nothing."""
        self.place = np.concatenate([self._greedy(), np.arange(gpus if spare else 0)])
        _reload(self.place, self.experts, self.slots, self.tables, self.empty, self.loads, self.barred)
        self.kept, self.best, self.kicks = self.place.copy(), self.place.copy(), 0
        self.costs = np.full(2, self.cost())
        """float64[2]: max F + 2 max N of the best assignment and of the kept one, from which the next kick starts."""

    def cost(self) -> float:
        """max F + 2 max N in seconds."""
        return float(_cost(self.loads))

    def search(self, steps: int, target: float, rng: np.random.Generator) -> None:
        """Steps of the local search, fewer once the lowest cost is at most `target`.

        A step takes the best exchange of an item on the GPU with the largest F or N for any other item; where none helps the
        state is accepted or taken back, and kicked by one to three random exchanges.
        """
        arrays = self.place, self.kept, self.best, self.costs, self.slots, self.tables, self.empty, self.loads, self.barred
        self.kicks = _search(steps, target, self.kicks, rng, self.experts, *arrays)

    def _greedy(self) -> Ints:
        """The heaviest expert first, each where the objective grows least."""
        gpus = len(self.slots)
        compute, receive, _ = self.tables
        place = np.zeros(self.experts, dtype=np.int64)
        f, n, left = np.zeros(gpus), np.zeros(gpus), self.slots.copy()
        weight = (compute.min(axis=1) + 2 * receive.min(axis=1))[: self.experts]
        for expert in np.argsort(-weight, kind="stable"):
            new_f, new_n = f + compute[expert], n + receive[expert]
            grown = np.maximum(new_f, f.max()) + 2 * np.maximum(new_n, n.max()) + 1e-3 * (new_f + 2 * new_n)
            gpu = np.where(left > 0, grown, np.inf).argmin()
            place[expert], f[gpu], n[gpu] = gpu, new_f[gpu], new_n[gpu]
            left[gpu] -= 1
        return place


@njit(cache=True, nogil=True)
def _search(
    steps: int,
    target: float,
    kicks: int,
    rng: np.random.Generator,
    experts: int,
    place: Ints,
    kept: Ints,
    best: Ints,
    costs: Floats,
    slots: Ints,
    tables: Floats,
    empty: Floats,
    loads: Floats,
    barred: Bools,
) -> int:
    """`GroupLoads.search`; the number of kicks so far."""
    items = len(place)
    for _ in range(steps):
        if costs[0] <= target:
            break
        first, second = _best_exchange(place, barred, tables, loads)
        if first >= 0:
            _exchange(place, first, second, experts)
            _reload(place, experts, slots, tables, empty, loads, barred)
            if _cost(loads) < costs[0]:
                best[:], costs[0] = place, _cost(loads)
            continue
        kicks += 1
        if kicks % KICKS_PER_RETURN == 0:
            kept[:], costs[1] = best, costs[0]
        elif _cost(loads) <= costs[1] * ACCEPT:
            kept[:], costs[1] = place, _cost(loads)
        place[:] = kept
        _reload(place, experts, slots, tables, empty, loads, barred)
        for _ in range(rng.integers(1, 4)):
            first, second = rng.integers(0, items), rng.integers(0, items)
            if not (barred[first] or barred[second]):
                _exchange(place, first, second, experts)
                _reload(place, experts, slots, tables, empty, loads, barred)
    return kicks


@njit(cache=True, nogil=True)
def _cost(loads: Floats) -> float:
    """max F + 2 max N in seconds."""
    return loads[0].max() + 2 * max(loads[1].max(), loads[2].max())


@njit(cache=True, nogil=True)
def _exchange(place: Ints, first: int, second: int, experts: int) -> None:
    """Swap the GPUs of two items; a free place stays where it is, for only its GPU's count changes."""
    gpu_first, gpu_second = place[first], place[second]
    if first < experts:
        place[first] = gpu_second
    if second < experts:
        place[second] = gpu_first


@njit(cache=True, nogil=True)
def _reload(place: Ints, experts: int, slots: Ints, tables: Floats, empty: Floats, loads: Floats, barred: Bools) -> None:
    """Count `loads` and `barred` anew, from the first item to the last: an assignment has the same loads by any way to it."""
    loads[:] = 0.0
    held = np.zeros(len(slots), dtype=np.int64)
    for item in range(len(place)):
        gpu = place[item]
        for load in range(3):
            loads[load, gpu] += tables[load, item, gpu]
        if item < experts:
            held[gpu] += 1
    loads += empty
    for item in range(experts, len(place)):
        barred[item] = held[place[item]] >= slots[place[item]]


@njit(cache=True, nogil=True)
def _power(seconds: float, top: float) -> float:
    ratio = min(seconds / top, 2.0)
    for _ in range(SQUARINGS):
        ratio *= ratio
    return ratio


@njit(cache=True, nogil=True)
def _norm(total: float, top: float) -> float:
    """The norm in seconds from the sum of powers. Square roots are the same on every machine, other powers are not."""
    for _ in range(SQUARINGS):
        total = np.sqrt(total)
    return top * total


@njit(cache=True, nogil=True)
def _nearly_norm(total: float, top: float) -> float:
    """`_norm`, or less, to 1e-11 and much faster. Logarithms differ from machine to machine: they only spare roots."""
    if total < 0.01:
        return 0.0
    small = np.log(total) / 2**SQUARINGS
    return top * (1 + small * (1 + small / 2 * (1 + small / 3 * (1 + small / 4))))


@njit(cache=True, nogil=True)
def _best_exchange(place: Ints, barred: Bools, tables: Floats, loads: Floats) -> tuple[int, int]:
    """The two items of the exchange that lowers the smoothed objective most; -1 where none lowers it.

    What an exchange cannot get below, the norm of the other GPUs and the higher of its own two, spares most of them roots.
    """
    gpus = loads.shape[1]
    network = np.maximum(loads[1], loads[2])
    worst = np.array([loads[0].argmax(), network.argmax()])
    f_top, n_top = loads[0, worst[0]] or 1.0, network[worst[1]] or 1.0
    f_powers, n_powers = np.empty(gpus), np.empty(gpus)
    for gpu in range(gpus):
        f_powers[gpu], n_powers[gpu] = _power(loads[0, gpu], f_top), _power(network[gpu], n_top)
    f_sum, n_sum = f_powers.sum(), n_powers.sum()
    f_others, n_others = np.empty((2, gpus)), np.empty((2, gpus))
    f_least, n_least = np.empty((2, gpus)), np.empty((2, gpus))
    for which in range(2):
        here = worst[which]
        for there in range(gpus):
            f_others[which, there] = max(f_sum - f_powers[here] - f_powers[there], 0.0)
            n_others[which, there] = max(n_sum - n_powers[here] - n_powers[there], 0.0)
            f_least[which, there] = _norm(f_others[which, there], f_top)
            n_least[which, there] = _norm(n_others[which, there], n_top)
    # What every second item brings to the GPU it joins on `first`, leaves behind, and where: once for all first items.
    items = len(place)
    left = np.empty((3, items))
    for item in range(items):
        there = place[item]
        for load in range(3):
            left[load, item] = loads[load, there] - tables[load, item, there]
    brought, floors = np.empty((3, items)), np.empty(items)
    known = -1
    lowest = (_norm(f_sum, f_top) + 2 * _norm(n_sum, n_top)) * (1 - 1e-12)
    best = (-1, -1)
    for first in range(items):
        here = place[first]
        if barred[first] or (here != worst[0] and here != worst[1]):
            continue
        which = 0 if here == worst[0] else 1
        if known != here:
            known = here
            for item in range(items):
                for load in range(3):
                    brought[load, item] = tables[load, item, here]
        f_rest, in_rest, out_rest = loads[:, here] - tables[:, first, here]
        f_joins, in_joins, out_joins = tables[0, first], tables[1, first], tables[2, first]
        for second in range(items):
            there = place[second]
            f_floor = max(f_rest + brought[0, second], left[0, second] + f_joins[there])
            n_floor = max(
                max(in_rest + brought[1, second], out_rest + brought[2, second]),
                max(left[1, second] + in_joins[there], left[2, second] + out_joins[there]),
            )
            f_floor = max(f_least[which, there], min(f_floor, 2 * f_top))
            n_floor = max(n_least[which, there], min(n_floor, 2 * n_top))
            floors[second] = (f_floor + 2 * n_floor) * (1 - 1e-9)  # whatever is lost to rounding
        for second in range(items):
            there = place[second]
            if floors[second] >= lowest or there == here or barred[second]:
                continue
            f_here, f_there = f_rest + brought[0, second], left[0, second] + f_joins[there]
            n_here = max(in_rest + brought[1, second], out_rest + brought[2, second])
            n_there = max(left[1, second] + in_joins[there], left[2, second] + out_joins[there])
            f_total = f_others[which, there] + _power(f_here, f_top) + _power(f_there, f_top)
            n_total = n_others[which, there] + _power(n_here, n_top) + _power(n_there, n_top)
            if (_nearly_norm(f_total, f_top) + 2 * _nearly_norm(n_total, n_top)) * (1 - 1e-9) >= lowest:
                continue
            f_after, n_after = _norm(f_total, f_top), _norm(n_total, n_top)
            if f_after + 2 * n_after < lowest:
                lowest, best = f_after + 2 * n_after, (first, second)
    return best


def compile_ahead() -> None:
    """Run every compiled function once, with the types that it always has."""
    instance = AssignmentInstance(np.ones((2, 4)), np.ones((2, 4)), np.ones(2), np.zeros((2, 4)))
    GroupLoads(instance, np.array([2, 3])).search(2, 0.0, np.random.default_rng(0))
