"""Which two experts, one of each model, share which GPU of a mixed cluster: a 3-D bottleneck matching.

Aurora section 7, NP-hard in general. The paper decouples it: first the pairs without a look at the GPUs, then the pairs
to GPUs. Here: lower bounds, a local search, and, where they do not meet, CP-SAT on the question whether all costs can
stay below a threshold, by bisection, with GPUs of equal cost merged into one of a capacity.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError
from engine.placement.colocation.bounds import assigned, projections, weighted_mean
from engine.placement.colocation.search import largest, search
from engine.result import Provenance, Result, Status, Stop, library_versions, never

QUESTION_SHARE = 0.5
"""Part of the time limit that a threshold question may take, halved after one without an answer: lower ones are easier."""
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
    from engine.placement.colocation.exact import prove  # see engine.solver

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
        best, bound = prove(cost, kinds, best, bound, QUESTION_SHARE * time_limit, deadline, seed, stop, report)
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
