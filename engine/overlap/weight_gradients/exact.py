"""Proofs: by CP-SAT for any eligibility, and by a search through states where eligible sets are nested.

They are in a backward pass: a dW that may run now may also run later.
"""

import heapq
import math
import time
from typing import NamedTuple

import numpy as np

from engine.overlap.weight_gradients.bounds import subset_sums
from engine.overlap.weight_gradients.instance import NOWHERE, WeightGradientInstance
from engine.result import Ints, Limits, Stop

FIRST_SHARE = 0.2
"""Share of the time for a first attempt without the full linear relaxation."""
UNITS_EXPONENT = 30
"""The bound is 2^29 to 2^30 integer units. With 2^36 and more CP-SAT 9.15 calls wrong answers of small models optimal."""
SLACK = 5e-10
"""Improvements below this part of the known overlap are not looked for."""
MOST_SUBSETS = 2**22
"""Subsets of waiting dW to look at before giving up: seconds of work."""
MOST_WAITING = 18
STATES_PER_POLL = 64

Waiting = tuple[int, ...]
"""Durations (as places in a sorted list) of the dW that are released and not used, in rising order."""


def rounding(instance: WeightGradientInstance) -> float:
    """The most that CP-SAT's limit may be above the optimum, relative to it: a unit for each duration."""
    return sum(instance.allowed.shape) * 2.0 ** (2 - UNITS_EXPONENT)


def best_assignment(
    instance: WeightGradientInstance, known: Ints, bound: float, limits: Limits, stop: Stop
) -> tuple[Ints, float]:
    """(alltoall_of_dw int64[w], proven upper limit of the overlap), within the limits.

    Durations are rounded up to whole units, so the optimum of the integers is not below the true one.

    known: int64[w], a good answer, which comes back if none is found
    bound: a limit that is already proven, above 0
    """
    from ortools.sat.python.cp_model import FEASIBLE, OPTIMAL, CpModel, LinearExpr

    from engine.solver import solve

    # A power of two divides without round-off.
    unit = 2.0 ** (math.frexp(bound)[1] - UNITS_EXPONENT)
    alltoall = [math.ceil(duration / unit) for duration in instance.alltoall.tolist()]
    dw = [math.ceil(duration / unit) for duration in instance.dw.tolist()]
    model, hint = CpModel(), {}
    under = {}
    for i, row in enumerate(instance.allowed):
        for j in np.flatnonzero(row).tolist():
            under[i, j] = model.new_bool_var("")
            hint[under[i, j]] = int(known[i] == j)
        model.add_at_most_one(under[i, j] for j in np.flatnonzero(row).tolist())
    hidden = []
    for j, column in enumerate(instance.allowed.T):
        able = np.flatnonzero(column).tolist()
        hidden.append(model.new_int_var(0, alltoall[j], ""))
        hint[hidden[j]] = min(alltoall[j], sum(dw[i] for i in able if known[i] == j))
        model.add(LinearExpr.weighted_sum([under[i, j] for i in able], [dw[i] for i in able]) >= hidden[j])
    model.add(LinearExpr.sum(hidden) <= math.ceil(bound / unit) + len(alltoall) + len(dw))
    model.maximize(LinearExpr.sum(hidden))
    # Without the full relaxation small models are quick that can take for ever with it, and the other way round for large.
    seconds, wall, begin = FIRST_SHARE * limits.seconds, limits.wall_seconds, time.perf_counter()
    first = Limits(seconds, FIRST_SHARE * wall, limits.seed)
    status, solver = solve(model, first, stop, hint=hint, linearization_level=1)
    if status != OPTIMAL and not stop():
        rest = Limits(limits.seconds - seconds, max(0.0, begin + wall - time.perf_counter()), limits.seed)
        status, solver = solve(model, rest, stop, hint=hint, linearization_level=2)
    if status not in (OPTIMAL, FEASIBLE):
        return known, bound
    alltoall_of_dw = np.full_like(known, NOWHERE)
    for (i, j), chosen in under.items():
        if solver.boolean_value(chosen):
            alltoall_of_dw[i] = j
    return alltoall_of_dw, min(bound, solver.best_objective_bound * unit)


class State(NamedTuple):
    """The best way to some collection of waiting dW.

    hidden: overlap so far
    before: the dW that waited before the last all-to-all
    used: those of them and of the newly released that ran under it
    limits: two upper limits of the overlap in the end, the lower one first
    """

    hidden: float
    before: Waiting
    used: Waiting
    limits: tuple[float, float]


def best_nested(instance: WeightGradientInstance, known: float, width: int, stop: Stop) -> tuple[Ints | None, float]:
    """(an assignment int64[w] that beats `known` or None, proven upper limit of the overlap, infinite without a proof).

    Goes through the all-to-alls in the order of their eligible sets, keeping for every collection of waiting dW the most
    overlap so far, and drops those that cannot beat `known` even if all further dW may be split. That is quick where it is
    needed: where many dW wait, the bound is met anyway. Without nested sets, or with too many subsets, there is neither
    proof nor assignment.

    width: after each all-to-all only so many collections are kept, those that promise most; if none is lost by that, there
        is a proof
    """
    order = np.argsort(instance.allowed.sum(axis=0), kind="stable")
    allowed, seconds = instance.allowed[:, order], instance.alltoall[order]
    if (allowed[:, :-1] & ~allowed[:, 1:]).any():
        return None, math.inf
    m = len(seconds)
    release = np.where(allowed.any(axis=1), allowed.argmax(axis=1), m)
    duration, kind = np.unique(instance.dw, return_inverse=True)
    released = np.bincount(release, instance.dw, m + 1)
    # From the next all-to-all on: their time, and the overlap possible there beyond the dW that wait for the next.
    left, gain = np.zeros(m + 1), np.zeros(m + 1)
    for j in reversed(range(m)):
        left[j] = left[j + 1] + seconds[j]
        gain[j] = min(left[j + 1], (released[j + 1] if j + 1 < m else 0.0) + gain[j + 1])
    target, subsets, expanded, complete = known * (1 + SLACK), 0, 0, True
    stages: list[dict[Waiting, State]] = [{(): State(0.0, (), (), (0.0, 0.0))}]
    for j in range(m):
        new = kind[release == j].tolist()
        later = released[j + 1] if j + 1 < m else 0.0
        reached: dict[Waiting, State] = {}
        for before, state in stages[-1].items():
            waiting = sorted((*before, *new))
            subsets, expanded = subsets + 2 ** min(len(waiting), 63), expanded + 1
            stopped = expanded % STATES_PER_POLL == 0 and stop()
            if stopped or len(waiting) > MOST_WAITING or subsets > MOST_SUBSETS:
                return None, math.inf
            # Without loss no dW of a subset that covers the all-to-all can be spared, and to one that does not, none can be
            # added that hides something with all its duration: it could not do better later.
            total, shortest = subset_sums(duration[waiting]), np.array([np.inf])
            for dw_seconds in duration[waiting]:
                shortest = np.concatenate([shortest, np.minimum(shortest, dw_seconds)])
            # The numbers of a subset and of its complement add up to 2^n - 1.
            spared, added = total - shortest < seconds[j], total + shortest[::-1] > seconds[j]
            worth_a_look = np.where(total >= seconds[j], spared, added)
            hidden = state.hidden + np.minimum(total, seconds[j])
            by_time, by_work = hidden + left[j + 1], hidden + (total[-1] - total + later + gain[j + 1])
            promising = worth_a_look & (np.minimum(by_time, by_work) > target)
            for chosen in np.flatnonzero(promising).tolist():
                kept = tuple(dw_kind for place, dw_kind in enumerate(waiting) if not chosen >> place & 1)
                if kept not in reached or reached[kept].hidden < hidden[chosen]:
                    used = tuple(dw_kind for place, dw_kind in enumerate(waiting) if chosen >> place & 1)
                    limits = sorted((float(by_time[chosen]), float(by_work[chosen])))
                    reached[kept] = State(float(hidden[chosen]), before, used, (limits[0], limits[1]))
        if len(reached) > width:
            complete = False
            reached = dict(heapq.nlargest(width, reached.items(), key=lambda item: item[1].limits))
        stages.append(reached)
    if not stages[-1]:
        return None, target if complete else math.inf
    end = max(stages[-1], key=lambda waiting: stages[-1][waiting].hidden)
    bound = max(stages[-1][end].hidden, target) if complete else math.inf
    # Back from the last state to the durations that every all-to-all used, then to dW of these durations.
    used_at = []
    for reached in reversed(stages[1:]):
        used_at.append(reached[end].used)
        end = reached[end].before
    alltoall_of_dw = np.full(len(kind), NOWHERE, dtype=np.int64)
    for j, used in enumerate(reversed(used_at)):
        for dw_kind in used:
            free = (kind == dw_kind) & (release <= j) & (alltoall_of_dw == NOWHERE)
            alltoall_of_dw[free.argmax()] = order[j]
    return alltoall_of_dw, bound
