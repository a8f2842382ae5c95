"""One placement for two aims: few hops between GPUs, and GPUs that are loaded alike; robust, and near the one in use.

A placement made for affinity alone (ExFlow, section IV) leaves GPUs loaded unequally, one made for balance alone (EPLB)
sends nearly every token elsewhere at every layer. The objective here is the weighted sum of both figures, each without a
unit, so that neither more tokens nor another currency of hops changes the answer. Small instances are solved exactly, by a
shortest path through all placements of every layer; others by `search`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from math import factorial, prod
from typing import Literal

import numpy as np

from engine.errors import InputError
from engine.placement.joint.instance import JointInstance
from engine.placement.joint.rows import RowsInstance, state_of, terms_of
from engine.placement.joint.search import first_placement, search
from engine.placement.joint.state import JointState, JointTerms
from engine.result import Ints, Limits, Report, Result, Status, Stop, never, result_of

MOST_PLACEMENTS, MOST_STEPS = 2520, 150_000_000
"""Placements of a layer, and pairs of them over all layers and budgets, up to which `shortest` is a matter of a second."""
Workloads = Literal["worst", "mean"]
PROVEN_GAP = 1e-9
KICKS_PER_EXPERT, LEAST_KICKS = 0.4, 100
SECONDS_PER_LOOK, SECONDS_PER_SWAP, LOOKS_WITH_MOVES = 7e-5, 6e-9, 4
"""Cost of a look at the swaps of a layer, and of each swap in each table, on an ordinary core; with limited moves every look
is followed by those at its neighbours."""


def shortest(terms: JointTerms, start: Ints | None, max_moves: int | None, stop: Stop) -> Ints | None:
    """The best placement int64[layer, expert] with at most max_moves pairs elsewhere than in `start`; None if stopped.

    The value of a layer's placement is the least cost of the layers up to it, for every number of moves left.
    """
    instance = terms.instance
    every = _all_placements(instance.slots)
    to = (every[:, :, None] == np.arange(instance.gpus)).astype(np.float64)
    if start is None or max_moves is None:
        start, max_moves = np.broadcast_to(every[:1], (instance.layers, instance.experts)), 0
        moves = np.zeros((instance.layers, len(every)), dtype=np.int64)
    else:
        moves = (every[None] != start[:, None]).sum(axis=2)
    alone = np.einsum("wle,neg->lnwg", terms.load, to).max(axis=3).sum(axis=2)
    value = np.full((max_moves + 1, len(every)), np.inf)
    for budget in range(max_moves + 1):
        fits = moves[0] <= budget
        value[budget, fits] = alone[0, fits]
    came_from = []
    distance_to = (to @ terms.distance).reshape(len(every), -1)
    flat = to.reshape(len(every), -1)
    for layer in range(1, instance.layers):
        moved = np.einsum("ik,nkg->nig", terms.hop[0, layer - 1], distance_to.reshape(to.shape)).reshape(len(every), -1)
        cost = flat @ moved.T
        best = np.full(value.shape, np.inf)
        origin = np.zeros(value.shape, dtype=np.int64)
        for count in np.unique(moves[layer]):
            here = np.flatnonzero(moves[layer] == count)
            for budget in range(count, max_moves + 1):
                if stop():
                    return None
                total = value[budget - count][:, None] + cost[:, here]
                origin[budget, here] = total.argmin(axis=0)
                best[budget, here] = total[origin[budget, here], np.arange(len(here))]
        value = best + alone[layer]
        came_from.append(origin)
    index, budget = int(value[max_moves].argmin()), max_moves
    path = [index]
    for layer in range(instance.layers - 1, 0, -1):
        before = int(came_from[layer - 1][budget, index])
        budget -= int(moves[layer, index])
        index = before
        path.append(index)
    return every[path[::-1]]


def _all_placements(slots: Ints) -> Ints:
    """int64[placement, expert]: every way to fill the slots, in lexicographic order."""
    if len(slots) == int(slots.sum()) == int(slots.max(initial=0) * len(slots)):
        return np.array(list(permutations(range(len(slots)))), dtype=np.int64)
    rows: list[list[int]] = []

    def fill(row: list[int], left: list[int]) -> None:
        if len(row) == int(slots.sum()):
            rows.append(row)
            return
        for gpu, free in enumerate(left):
            if free:
                fill([*row, gpu], [count - (other == gpu) for other, count in enumerate(left)])

    fill([], slots.tolist())
    return np.array(rows, dtype=np.int64)


def place_jointly(
    instance: JointInstance,
    limits: Limits = Limits(),
    stop: Stop = never,
    report: Report | None = None,
    *,
    weight: float,
    workloads: Workloads = "worst",
    start: Ints | None = None,
    max_moves: int | None = None,
    initial: tuple[Ints, ...] = (),
    kicks: int | None = None,
    on_placement: Callable[[Ints], None] | None = None,
) -> Result[Ints]:
    """Experts to GPUs with a low weight · H / H_random + (1 - weight) · B; `solution` is gpu_of_expert int64[layer, expert].

    H is the hop cost share (`JointFigures`; of a `RowsInstance` rows / those of a blind placement), H_random its expected
    value under a blind placement, which depends on the slots and the prices of hops only; B is the imbalance, the mean over
    layers of max / mean GPU load less 1. Over several workloads each is the largest ("worst") or the mean of theirs.

    limits: the work is that of looks at swaps, an outer cap; small instances are always proven
    weight: 0 (balance alone) … 1 (affinity alone)
    start: int64[layer, expert], the placement in use; the search begins there
    max_moves: the most (layer, expert) pairs that may be on another GPU than in `start`; None: any number. Without a limit
        GPUs that are alike are named so that few experts leave the GPU they are on in `start`.
    initial: further placements to begin from; the best one is taken. With max_moves those too far from `start` are not.
    kicks: number of times that the search starts anew from a disturbed placement; None: 0.4 a (layer, expert) pair, at least
        100
    on_placement: called with copies of placements met

    Status OPTIMAL if proven: the instance is small enough for a shortest path over all placements (at most 2520 of a
    layer), or the objective meets the bound, or no move is allowed. TIME_LIMIT or CANCELLED if the search was cut short,
    else FEASIBLE. The bound is the weighted sum of the lower limits of H and B, each alone.

    Raises InputError if the weight or an option is out of range, or a placement given does not fill the slots.
    """
    began = time.perf_counter()
    start, initial = _checked(instance, weight, workloads, start, max_moves, initial, kicks)
    terms = terms_of(instance, weight, workloads == "worst")
    if kicks is None:
        kicks = max(LEAST_KICKS, int(KICKS_PER_EXPERT * instance.layers * instance.experts))
    # Seconds of a look, as estimated, turn seconds into looks, so that answers repeat.
    tables = len(terms.hop) + 2 * len(terms.load)
    look = SECONDS_PER_LOOK + SECONDS_PER_SWAP * instance.experts**2 * tables
    looks = int(limits.seconds / (look if max_moves is None else LOOKS_WITH_MOVES * look))
    incumbent = _Incumbent(terms, looks, began + limits.wall_seconds, stop, report, on_placement)
    incumbent.bound = max(terms.limit(incumbent.ended), 0.0)
    if max_moves is not None:
        candidates = [start, *(place for place in initial if (place != start).sum() <= max_moves)]
    else:
        candidates = [*([] if start is None else [start]), *initial] or [first_placement(terms, incumbent.ended)]
    incumbent.begin(min(candidates, key=terms.objective))
    proven = done = max_moves == 0 or _solved(incumbent, start, max_moves)
    if not proven and instance.gpus > 1 and not incumbent.ended():
        done = _searched(incumbent, start, max_moves, kicks, limits.seed, from_mean=terms.worst and not initial)
    best, bound = incumbent.place, incumbent.bound
    if start is not None and max_moves is None and instance.gpus_alike:
        from scipy.optimize import linear_sum_assignment

        # GPUs get the names with which most experts are on the GPU they are on in `start`.
        pair = np.bincount((best * instance.gpus + start).ravel(), minlength=instance.gpus**2)
        best = linear_sum_assignment(pair.reshape(instance.gpus, instance.gpus), maximize=True)[1][best]
    objective = terms.objective(best)
    if proven or objective <= bound + PROVEN_GAP or instance.gpus == 1:
        status, bound = Status.OPTIMAL, objective if proven or instance.gpus == 1 else bound
    elif incumbent.cancelled:
        status = Status.CANCELLED
    else:
        status = Status.FEASIBLE if done else Status.TIME_LIMIT
    options = {"weight": weight, "workloads": workloads, "kicks": kicks, "time_limit": limits.seconds}
    options |= {} if max_moves is None else {"max_moves": max_moves}
    return result_of("place_jointly", began, status, objective, min(bound, objective), best, options, limits.seed)


@dataclass
class _Incumbent:
    """The best placement so far, int64[layer, expert], and when to stop looking for a better one.

    looks: looks at the swaps of a layer that the search may still take, about
    bound: lower limit of every objective
    deadline: on the clock of `time.perf_counter`
    cancelled: True if `stop` answered True when last asked
    late: True if looks or deadline were over when last asked
    """

    terms: JointTerms
    looks: int
    deadline: float
    stop: Stop
    on_progress: Report | None
    on_placement: Callable[[Ints], None] | None
    place: Ints | None = None
    objective: float = np.inf
    bound: float = 0.0
    cancelled: bool = False
    late: bool = False

    def ended(self) -> bool:
        self.cancelled = self.cancelled or self.stop()
        self.late = self.late or time.perf_counter() > self.deadline
        return self.cancelled or self.late or self.objective <= self.bound + PROVEN_GAP

    def ended_look(self) -> bool:
        """True if the work is to end, asked before each look at the swaps of a layer."""
        self.looks -= 1
        self.late = self.late or self.looks < 0
        return self.ended()

    def begin(self, place: Ints) -> None:
        self.place, self.objective = place, self.terms.objective(place)
        self.report()

    def visit(self, state: JointState) -> None:
        if self.on_placement:
            self.on_placement(state.place.copy())
        objective = state.objective if state.terms is self.terms else self.terms.objective(state.place)
        if objective < self.objective - PROVEN_GAP:
            self.place, self.objective = state.place.copy(), objective
            self.report()

    def report(self) -> None:
        if self.on_progress:
            self.on_progress(self.objective, min(self.bound, self.objective))


def _solved(incumbent: _Incumbent, start: Ints | None, max_moves: int | None) -> bool:
    """True if all placements could be gone through; the best one is then the incumbent.

    They can where they are few and the objective is a sum over layers: not where the worst workload counts, nor where rows do.
    """
    terms, instance = incumbent.terms, incumbent.terms.instance
    if isinstance(instance, RowsInstance) or terms.worst or instance.experts > 10:
        return False
    placements = factorial(instance.experts) // prod(factorial(int(slots)) for slots in instance.slots)
    steps = placements**2 * max(instance.layers - 1, 1) * ((max_moves or 0) + 1)
    if placements > MOST_PLACEMENTS or steps > MOST_STEPS:
        return False
    place = shortest(terms, start, max_moves, incumbent.ended)
    if place is None:
        return False
    if terms.objective(place) < incumbent.objective:
        incumbent.place = place
    if incumbent.on_placement:
        incumbent.on_placement(place.copy())
    return True


def _searched(incumbent: _Incumbent, start: Ints | None, max_moves: int | None, kicks: int, seed: int, from_mean: bool) -> bool:
    """Search from the incumbent; True if all kicks were made. from_mean: half of them for the workloads' mean first."""
    terms, start = incumbent.terms, None if max_moves is None else start
    if from_mean:
        # The mean is smoother: half of the kicks go into a placement that is good for all.
        mean = terms_of(terms.instance, terms.weight, worst=False)
        state = state_of(mean, incumbent.place, start, max_moves)
        search(state, kicks // 2, seed, incumbent.ended_look, incumbent.visit)
        kicks -= kicks // 2
    return search(state_of(terms, incumbent.place, start, max_moves), kicks, seed, incumbent.ended_look, incumbent.visit)


def _checked(
    instance: JointInstance,
    weight: float,
    workloads: str,
    start: Ints | None,
    max_moves: int | None,
    initial: tuple[Ints, ...],
    kicks: int | None,
) -> tuple[Ints | None, list[Ints]]:
    if not 0 <= weight <= 1:
        raise InputError(f"weight: {weight}; wanted a number from 0 (balance alone) to 1 (affinity alone)")
    if workloads not in ("worst", "mean"):
        raise InputError(f"workloads: {workloads!r}; wanted 'worst' or 'mean'")
    if kicks is not None and kicks < 0:
        raise InputError(f"kicks: {kicks}; wanted 0 or more")
    if max_moves is not None and start is None:
        raise InputError("max_moves: a limit on moves needs `start`, the placement that experts would move from")
    if max_moves is not None and max_moves < 0:
        raise InputError(f"max_moves: {max_moves}; wanted 0 or more, or None for no limit")
    if start is not None:
        start = instance.check_placement(start, "start")
    return start, [instance.check_placement(place, f"initial placement {i}") for i, place in enumerate(initial)]
