"""Local search for grouped assignments: a greedy start, the best exchange at the worst GPUs, kicks."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.placement.assignment import AssignmentInstance
from engine.result import Stop

STEPS_PER_EXPERT = 60
SECONDS_PER_STEP, SECONDS_PER_PAIR = 60e-6, 80e-9
"""Cost of a step and of one pair looked at in it, measured: they turn seconds into steps, so that answers repeat."""
SQUARINGS = 9
"""Loads are compared in the 2**9-norm: nearly the maximum, yet it still sees the second worst GPU."""
ACCEPT = 1.002
KICKS_PER_RETURN = 50
STEPS_PER_POLL = 16


def search(
    instance: AssignmentInstance,
    slots: NDArray[np.int64],
    seconds: float,
    deadline: float,
    seed: int,
    target: float,
    stop: Stop,
    on_incumbent: Callable[[float], None],
) -> NDArray[np.int64]:
    """gpu_of_expert int64[expert] with a low max F + 2 max N, within the slots int64[gpu].

    A step takes the best exchange of an item on the GPU with the largest F or N for any other item, where an item is an
    expert or a free place; where none helps the state is accepted or taken back, and kicked by a few random exchanges.
    Ends after the steps that fit `seconds`, at the `deadline` of time.perf_counter, at an objective of `target`, or
    when `stop` answers True.
    """
    state = _State(instance, slots)
    worst_pairs = 2 * int(np.ceil(instance.experts / instance.gpus)) * len(state.compute)
    steps = int(seconds / (SECONDS_PER_STEP + SECONDS_PER_PAIR * worst_pairs))
    rng = np.random.default_rng(seed)
    best, kept = state.place.copy(), state.place.copy()
    lowest = kept_cost = state.cost()
    on_incumbent(lowest)
    kicks = 0
    for step in range(min(steps, STEPS_PER_EXPERT * instance.experts)):
        if lowest <= target or (step % STEPS_PER_POLL == 0 and (stop() or time.perf_counter() > deadline)):
            break
        if state.improve():
            if state.cost() < lowest:
                best, lowest = state.place.copy(), state.cost()
                on_incumbent(lowest)
            continue
        kicks += 1
        if kicks % KICKS_PER_RETURN == 0:
            kept, kept_cost = best.copy(), lowest
        elif state.cost() <= kept_cost * ACCEPT:
            kept, kept_cost = state.place.copy(), state.cost()
        state.restore(kept)
        state.kick(rng)
    return best[: instance.experts]


class _State:
    """An assignment with its loads; items are the experts and, with slots to spare, one free place per GPU."""

    def __init__(self, instance: AssignmentInstance, slots: NDArray[np.int64]) -> None:
        gpus, experts = instance.gpus, instance.experts
        spare = slots.sum() > experts
        padding = ((0, gpus if spare else 0), (0, 0))
        self.experts, self.slots = experts, slots
        self.send_total = instance.send_total
        self.compute = np.pad(instance.compute.T, padding)
        self.receive = np.pad(instance.receive.T, padding)
        self.saved = np.pad(instance.send_saved.T, padding)
        self.item = np.arange(len(self.compute))
        self.place = np.concatenate([self._greedy(), np.arange(gpus if spare else 0)])
        self._reload()

    def _greedy(self) -> NDArray[np.int64]:
        """The heaviest expert first, each where the objective grows least."""
        gpus = len(self.slots)
        place = np.zeros(self.experts, dtype=np.int64)
        f, n, left = np.zeros(gpus), np.zeros(gpus), self.slots.copy()
        weight = (self.compute.min(axis=1) + 2 * self.receive.min(axis=1))[: self.experts]
        for expert in np.argsort(-weight, kind="stable"):
            new_f, new_n = f + self.compute[expert], n + self.receive[expert]
            grown = np.maximum(new_f, f.max()) + 2 * np.maximum(new_n, n.max()) + 1e-3 * (new_f + 2 * new_n)
            gpu = np.where(left > 0, grown, np.inf).argmin()
            place[expert], f[gpu], n[gpu] = gpu, new_f[gpu], new_n[gpu]
            left[gpu] -= 1
        return place

    def _reload(self) -> None:
        gpus = len(self.slots)
        self.f = np.bincount(self.place, self.compute[self.item, self.place], gpus)
        self.r = np.bincount(self.place, self.receive[self.item, self.place], gpus)
        self.s = self.send_total - np.bincount(self.place, self.saved[self.item, self.place], gpus)
        self.n = np.maximum(self.r, self.s)
        held = np.bincount(self.place[: self.experts], minlength=gpus)
        # A free place that its GPU does not have may be exchanged with nothing.
        self.barred = np.append(np.zeros(self.experts, dtype=bool), (held >= self.slots)[self.place[self.experts :]])

    def cost(self) -> float:
        return float(self.f.max() + 2 * self.n.max())

    def restore(self, place: NDArray[np.int64]) -> None:
        self.place = place.copy()
        self._reload()

    def improve(self) -> bool:
        """Make the best exchange at the GPUs with the largest F and N, if one lowers the smoothed objective."""
        place = self.place
        mine = np.flatnonzero(((place == self.f.argmax()) | (place == self.n.argmax())) & ~self.barred)
        here, there = place[mine], place
        f_top, n_top = self.f.max() or 1.0, self.n.max() or 1.0

        def power(seconds: NDArray[np.float64], top: float) -> NDArray[np.float64]:
            ratio = np.minimum(seconds / top, 2.0)
            for _ in range(SQUARINGS):
                ratio *= ratio
            return ratio

        def exchanged(load: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[NDArray, NDArray]:
            own = seconds[self.item, place]
            at_here = (load[here] - own[mine])[:, None] + seconds[:, here].T
            at_there = (load[there] - own)[None, :] + seconds[mine][:, there]
            return at_here, at_there

        def totals(at_here: NDArray, at_there: NDArray, load: NDArray, top: float) -> tuple[NDArray, float]:
            """The smoothed maximum after every exchange, and the one now."""
            now = power(load, top)
            others = np.maximum(now.sum() - now[here][:, None] - now[there][None, :], 0.0)
            root = 0.5**SQUARINGS
            return top * (others + power(at_here, top) + power(at_there, top)) ** root, top * now.sum() ** root

        receive_here, receive_there = exchanged(self.r, self.receive)
        send_here, send_there = exchanged(self.s, -self.saved)
        n_after, n_now = totals(
            np.maximum(receive_here, send_here), np.maximum(receive_there, send_there), self.n, n_top
        )
        f_after, f_now = totals(*exchanged(self.f, self.compute), self.f, f_top)
        after = f_after + 2 * n_after
        after[here[:, None] == there[None, :]] = np.inf
        after[:, self.barred] = np.inf
        mine_index, item = divmod(int(after.argmin()), len(place))
        if not after[mine_index, item] < (f_now + 2 * n_now) * (1 - 1e-12):
            return False
        self._exchange(int(mine[mine_index]), item)
        self._reload()
        return True

    def kick(self, rng: np.random.Generator) -> None:
        """One to three random exchanges."""
        for _ in range(rng.integers(1, 4)):
            first, second = rng.integers(len(self.place), size=2)
            if not (self.barred[first] or self.barred[second]):
                self._exchange(int(first), int(second))
                self._reload()

    def _exchange(self, first: int, second: int) -> None:
        """Swap the GPUs of two items; a free place stays where it is, for only its GPU's count changes."""
        gpu_first, gpu_second = self.place[first], self.place[second]
        if first < self.experts:
            self.place[first] = gpu_second
        if second < self.experts:
            self.place[second] = gpu_first
