"""Pairs on mixed GPUs, proven: CP-SAT on the question whether all costs can stay below a threshold, by bisection."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python.cp_model import FEASIBLE, INFEASIBLE, OPTIMAL, CpModel, LinearExpr

from engine.placement.colocation.search import Triples, largest
from engine.result import Stop
from engine.solver import solve

LEAST_SECONDS = 0.05


def prove(
    cost: NDArray[np.float64],
    kinds: list[list[int]],
    best: Triples,
    bound: float,
    seconds: float,
    deadline: float,
    seed: int,
    stop: Stop,
    report: Callable[[float], None],
) -> tuple[Triples, float]:
    """A better state or a higher bound, by bisection over the values that the largest cost can still have.

    seconds: for the first question; deadline: of time.perf_counter.
    """
    cost_of_kind = cost[[gpus[0] for gpus in kinds]]
    objective = largest(cost, best)
    values = np.unique(cost_of_kind[(cost_of_kind >= bound) & (cost_of_kind < objective)])
    # Nothing stays below values[low], `best` within values[high] (the objective beyond the end); from values[unknown]
    # on there is no answer in time. The first question is whether anything beats the incumbent: it mostly settles all.
    low, high = 0, len(values)
    unknown, middle = high, high - 1
    while low < unknown and not stop():
        left = min(seconds, deadline - time.perf_counter())
        if left < LEAST_SECONDS:
            break
        answer, state = _within(cost_of_kind, kinds, values[middle], left, seed, stop)
        if state is not None:
            best, objective = state, largest(cost, state)
            high = unknown = int(np.searchsorted(values, objective))
            report(objective)
        elif answer == INFEASIBLE:
            low = middle + 1
        else:
            unknown, seconds = middle, seconds / 2
        middle = (low + unknown) // 2
    return best, float(values[low]) if low < high else objective


def _within(
    cost: NDArray[np.float64], gpus_of_kind: list[list[int]], most: float, seconds: float, seed: int, stop: Stop
) -> tuple[int, Triples | None]:
    """Is there a state with no cost above `most`? CP-SAT's status, and the state if it found one.

    cost: float64[kind, expert of a, expert of b].
    """
    size = cost.shape[1]
    model = CpModel()
    kind, a, b = np.nonzero(cost <= most)
    chosen = [model.new_bool_var("") for _ in range(len(kind))]
    for index in (a, b):
        order = np.argsort(index, kind="stable")
        ends = np.searchsorted(index[order], np.arange(size + 1))
        for expert in range(size):
            model.add_exactly_one(chosen[place] for place in order[ends[expert] : ends[expert + 1]])
    for gpu_kind, gpus in enumerate(gpus_of_kind):
        model.add(LinearExpr.sum([chosen[place] for place in np.flatnonzero(kind == gpu_kind)]) == len(gpus))
    status, solver = solve(model, seconds, seed, stop, linearization_level=2, probing_level=0)
    if status not in (OPTIMAL, FEASIBLE):
        return status, None
    state = np.empty((2, size), dtype=np.int64)
    for gpu_kind, gpus in enumerate(gpus_of_kind):
        pairs = [place for place in np.flatnonzero(kind == gpu_kind) if solver.boolean_value(chosen[place])]
        state[0, gpus], state[1, gpus] = a[pairs], b[pairs]
    return status, (state[0], state[1])
