"""Loads of GPUs with several experts each, and the exchange of two that lowers the highest loads most; compiled (numba).

Part of `grouped_assignment`: the steps of its local search, of which it makes some thousands a layer.
"""

import numpy as np
from numba import njit

from engine.placement.assignment import AssignmentInstance
from engine.result import Bools, Floats, Ints

SQUARINGS = 9
"""Loads are compared in the 2**9-norm: nearly the maximum, yet it still sees the second worst GPU."""


class GroupLoads:
    """An assignment with its loads; items are the experts and, with slots to spare, one free place per GPU.

    place: int64[item], the GPU of every item
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
        self._reload()

    def cost(self) -> float:
        """max F + 2 max N in seconds."""
        return float(self.loads[0].max() + 2 * np.maximum(self.loads[1], self.loads[2]).max())

    def restore(self, place: Ints) -> None:
        """Take back a former `place`."""
        self.place = place.copy()
        self._reload()

    def improve(self) -> bool:
        """Make the best exchange at the GPUs with the largest F and N, if one lowers the smoothed objective."""
        first, second = _best_exchange(self.place, self.barred, self.tables, self.loads)
        if first < 0:
            return False
        self._exchange(first, second)
        return True

    def kick(self, rng: np.random.Generator) -> None:
        """One to three random exchanges."""
        for _ in range(rng.integers(1, 4)):
            first, second = rng.integers(len(self.place), size=2)
            if not (self.barred[first] or self.barred[second]):
                self._exchange(int(first), int(second))

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

    def _exchange(self, first: int, second: int) -> None:
        """Swap the GPUs of two items; a free place stays where it is, for only its GPU's count changes."""
        gpu_first, gpu_second = self.place[first], self.place[second]
        if first < self.experts:
            self.place[first] = gpu_second
        if second < self.experts:
            self.place[second] = gpu_first
        self._reload()

    def _reload(self) -> None:
        _reload(self.place, self.experts, self.slots, self.tables, self.empty, self.loads, self.barred)


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
    lowest = (_norm(f_sum, f_top) + 2 * _norm(n_sum, n_top)) * (1 - 1e-12)
    best = (-1, -1)
    for first in range(len(place)):
        here = place[first]
        if barred[first] or (here != worst[0] and here != worst[1]):
            continue
        which = 0 if here == worst[0] else 1
        for second in range(len(place)):
            there = place[second]
            if there == here or barred[second]:
                continue
            f_here = loads[0, here] - tables[0, first, here] + tables[0, second, here]
            f_there = loads[0, there] - tables[0, second, there] + tables[0, first, there]
            n_here = max(
                loads[1, here] - tables[1, first, here] + tables[1, second, here],
                loads[2, here] - tables[2, first, here] + tables[2, second, here],
            )
            n_there = max(
                loads[1, there] - tables[1, second, there] + tables[1, first, there],
                loads[2, there] - tables[2, second, there] + tables[2, first, there],
            )
            f_floor = max(f_least[which, there], min(max(f_here, f_there), 2 * f_top))
            n_floor = max(n_least[which, there], min(max(n_here, n_there), 2 * n_top))
            if (f_floor + 2 * n_floor) * (1 - 1e-9) >= lowest:  # whatever is lost to rounding
                continue
            f_after = _norm(f_others[which, there] + _power(f_here, f_top) + _power(f_there, f_top), f_top)
            n_after = _norm(n_others[which, there] + _power(n_here, n_top) + _power(n_there, n_top), n_top)
            if f_after + 2 * n_after < lowest:
                lowest, best = f_after + 2 * n_after, (first, second)
    return best


def compile_ahead() -> None:
    """Run every compiled function once, with the types that it always has."""
    GroupLoads(AssignmentInstance(np.ones((2, 4)), np.ones((2, 4)), np.ones(2), np.zeros((2, 4))), np.array([2, 3])).improve()
