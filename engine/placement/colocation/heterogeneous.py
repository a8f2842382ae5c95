"""Which two experts, one of each model, share which GPU of a mixed cluster: a 3-D bottleneck matching.

Aurora section 7, NP-hard in general. The paper decouples it: first the pairs without a look at the GPUs, then the pairs
to GPUs. Here: lower bounds, a local search, and, where they do not meet, CP-SAT on the question whether all costs can
stay below a threshold, by bisection, with GPUs of equal cost merged into one of a capacity.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python.cp_model import FEASIBLE, INFEASIBLE, OPTIMAL, CpModel, LinearExpr

from engine.errors import InputError
from engine.placement.colocation.bounds import assigned, projections, weighted_mean
from engine.placement.colocation.search import Triples, largest, search
from engine.result import Provenance, Result, Status, Stop, library_versions, never
from engine.solver import solve

QUESTION_SHARE = 0.5
"""Part of the time limit that a threshold question may take, halved after one without an answer: lower ones are easier."""
LEAST_SECONDS = 0.05
CP_SAT_TRIPLES = 2**19
"""Triples of kinds of GPUs and experts up to which CP-SAT pays: 64 different GPUs, or 4 types and 350 experts."""


def colocate_heterogeneous(
    cost: NDArray[np.float64],
    time_limit: float = 10.0,
    seed: int = 0,
    exact: bool = True,
    stop: Stop = never,
    on_incumbent: Callable[[float, float], None] | None = None,
) -> Result[NDArray[np.int64]]:
    """One expert of each of two models to every GPU so that the largest cost used is least.

    cost: float64[gpu, expert of a, expert of b], usually seconds (see `engine.simulate.colocated.layer_weight`), finite,
        all three of one length.
    time_limit: wall seconds of the proof, deterministic limits mostly end it before; exact: whether to prove at all.
    on_incumbent: called with (objective, bound) after improvements.

    `solution` is int64[gpu, 2], the expert of a and the expert of b on every GPU. Status OPTIMAL if objective and bound
    are equal, TIME_LIMIT if the proof took too long, FEASIBLE if none was asked for or the instance is beyond CP-SAT,
    CANCELLED if `stop` answered True. Same input and seed, same answer, unless the wall limit cuts a step short. Raises
    InputError for a wrong shape or value.
    """
    start = time.perf_counter()
    deadline, options = start + time_limit, {"time_limit": time_limit, "exact": exact}
    cost = _checked(cost)
    projected, starts = projections(cost, stop)
    least = max(projected, weighted_mean(cost))

    def report(objective: float) -> None:
        if on_incumbent:
            on_incumbent(objective, min(least, objective))

    best = search(cost, starts, least, seed, lambda: stop() or time.perf_counter() > deadline, report)
    bound = least
    kinds = _kinds(cost)
    exact = exact and len(kinds) * cost[0].size <= CP_SAT_TRIPLES
    if exact and largest(cost, best) > bound:
        best, bound = _prove(cost, kinds, best, bound, QUESTION_SHARE * time_limit, deadline, seed, stop, report)
    objective = largest(cost, best)
    if objective <= bound:
        status = Status.OPTIMAL
    elif stop():
        status = Status.CANCELLED
    else:
        status = Status.TIME_LIMIT if exact else Status.FEASIBLE
    return Result(
        status=status,
        objective=objective,
        bound=min(bound, objective),
        runtime=time.perf_counter() - start,
        solution=np.stack(best, axis=1),
        provenance=Provenance(
            optimiser="colocate_heterogeneous", options=options, seed=seed, versions=library_versions()
        ),
    )


def decoupled(cost: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.int64]:
    """The sub-optimal method of Aurora section 7.2: int64[gpu, 2], the expert of a and the expert of b on every GPU.

    First pairs by a bottleneck assignment on `weight`: float64[expert of a, expert of b], which knows no GPU (see
    `engine.placement.colocation.pair_weight`); then pairs to GPUs by another on `cost`: float64[gpu, expert of a, expert
    of b]. Raises InputError for wrong shapes and values.
    """
    cost, weight = _checked(cost), np.asarray(weight, dtype=np.float64)
    if weight.shape != cost.shape[1:] or not np.isfinite(weight).all():
        raise InputError(f"weight: shape {weight.shape}; wanted {cost.shape[1:]}, every value finite")
    a = np.arange(len(cost))
    b = assigned(weight)
    pair = assigned(cost[:, a, b])
    return np.stack([pair, b[pair]], axis=1)


def _checked(cost: NDArray[np.float64]) -> NDArray[np.float64]:
    cost = np.asarray(cost, dtype=np.float64)
    if cost.ndim != 3 or cost.size == 0 or len(set(cost.shape)) != 1:
        raise InputError(
            f"cost: shape {cost.shape}; wanted [gpu, expert of a, expert of b] with as many experts of each model as GPUs"
        )
    if not np.isfinite(cost).all():
        raise InputError("cost: every value must be finite")
    return cost


def _kinds(cost: NDArray[np.float64]) -> list[list[int]]:
    """The GPUs of every kind: those with the same costs."""
    slices: dict[bytes, list[int]] = {}
    for gpu, cost_of_gpu in enumerate(cost):
        slices.setdefault(cost_of_gpu.tobytes(), []).append(gpu)
    return list(slices.values())


def _prove(
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
