"""Which experts go on which GPU of a mixed cluster, several experts to a GPU: near-optimal, with a proven bound.

The objective is Aurora's, max F + 2 max N (equation 3, see `assignment`), with loads that add up over the experts of a
GPU. The paper has one expert to a GPU; with more the problem contains bin packing, so it is answered in three steps:
the Lagrangian bound at the multipliers of the linear relaxation, local search (a greedy start, the best move or swap at
the worst GPUs, kicks), and CP-SAT where the instance is small enough.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError
from engine.placement.assignment import AssignmentInstance, assign
from engine.placement.grouped_search import search
from engine.result import Provenance, Result, Status, Stop, library_versions, never, relative_gap

PROVEN_GAP = 1e-6
CP_SAT_PAIRS = 4096
"""GPU-expert pairs up to which CP-SAT pays: above, it spends tens of seconds on its first relaxation."""
RELAXATION_SHARE, SEARCH_SHARE, CP_SAT_SHARE = 0.2, 0.25, 0.55


def assign_groups(
    instance: AssignmentInstance,
    slots: NDArray[np.int64],
    exact_slots: bool = True,
    time_limit: float = 10.0,
    seed: int = 0,
    stop: Stop = never,
    on_incumbent: Callable[[float, float], None] | None = None,
) -> Result[NDArray[np.int64]]:
    """Experts to GPUs so that max F + 2 max N is small; `solution` is gpu_of_expert int64[expert].

    slots: int64[gpu], how many experts each GPU takes, or at most takes with `exact_slots=False`.
    time_limit: wall seconds; half of it and less is the rule, for deterministic limits end each step.
    on_incumbent: called with (objective, bound) in seconds after improvements.

    Status OPTIMAL if the relative gap is at most 1e-6, TIME_LIMIT if CP-SAT ended without that proof, FEASIBLE if the
    instance is beyond CP-SAT (more than 4096 GPU-expert pairs), CANCELLED if `stop` answered True. Same input and seed,
    same answer, unless the wall limit cuts a step short. Raises InputError if the slots cannot hold the experts.
    """
    from engine.placement.grouped_exact import best_groups  # see engine.solver
    from engine.placement.grouped_relaxation import relaxation_bound

    start = time.perf_counter()
    slots = _checked_slots(slots, instance, exact_slots)
    options = {"exact_slots": exact_slots, "time_limit": time_limit}
    provenance = Provenance(optimiser="assign_groups", options=options, seed=seed, versions=library_versions())
    if slots.max() == slots.min() == 1:
        result = assign(_with_idle_experts(instance), stop)
        return replace(result, solution=result.solution[: instance.experts], provenance=provenance)

    deadline = start + time_limit
    floors = _unavoidable(instance, slots, exact_slots)
    least = floors[0] + 2 * floors[1]
    if not stop():
        seconds = RELAXATION_SHARE * time_limit
        least = max(least, relaxation_bound(instance, slots, exact_slots, floors, seconds, stop))

    def report(objective: float, proven: float = 0.0) -> None:
        if on_incumbent:
            on_incumbent(objective, min(max(least, proven), objective))

    bound, target = least, least * (1 + PROVEN_GAP)
    best = search(instance, slots, SEARCH_SHARE * time_limit, deadline, seed, target, stop, report)
    objective = instance.cost(best)
    beyond_cp_sat = instance.compute.size > CP_SAT_PAIRS
    if relative_gap(objective, bound) > PROVEN_GAP and not beyond_cp_sat and not stop():
        seconds = max(0.0, min(CP_SAT_SHARE * time_limit, deadline - time.perf_counter()))
        improved, proven = best_groups(instance, slots, exact_slots, best, seconds, seed, stop, report)
        bound = max(bound, proven)
        if instance.cost(improved) < objective:
            best, objective = improved, instance.cost(improved)
    if relative_gap(objective, bound) <= PROVEN_GAP:
        status = Status.OPTIMAL
    elif stop():
        status = Status.CANCELLED
    else:
        status = Status.FEASIBLE if beyond_cp_sat else Status.TIME_LIMIT
    return Result(status, objective, min(bound, objective), time.perf_counter() - start, best, provenance)


def _with_idle_experts(instance: AssignmentInstance) -> AssignmentInstance:
    """The instance with experts that nobody asks for, as many as there are GPUs without one: they change no cost."""
    idle = ((0, 0), (0, instance.gpus - instance.experts))
    return AssignmentInstance(
        np.pad(instance.compute, idle),
        np.pad(instance.receive, idle),
        instance.send_total,
        np.pad(instance.send_saved, idle),
    )


def _unavoidable(instance: AssignmentInstance, slots: NDArray[np.int64], exact_slots: bool) -> tuple[float, float]:
    """Lower limits of max F and max N in seconds: what an expert with its lightest company, or a GPU, cannot avoid."""
    some = np.flatnonzero(slots)

    def at_least(seconds: NDArray[np.float64]) -> float:
        with_expert = seconds[some]
        if exact_slots:
            lightest = np.cumsum(np.sort(with_expert, axis=1), axis=1)
            full = lightest[np.arange(len(some)), slots[some] - 1]
            others = np.where(slots[some] > 1, lightest[np.arange(len(some)), slots[some] - 2], 0.0)
            with_expert = np.maximum(full[:, None], others[:, None] + with_expert)
            return max(with_expert.min(axis=0).max(), full.max())
        return with_expert.min(axis=0).max()

    most_saved = np.cumsum(-np.sort(-instance.send_saved, axis=1), axis=1)
    most_saved = np.where(slots > 0, most_saved[np.arange(len(slots)), slots - 1], 0.0)
    sending = (instance.send_total - most_saved).max()
    return float(at_least(instance.compute)), float(max(at_least(instance.receive), sending))


def _checked_slots(slots: NDArray[np.int64], instance: AssignmentInstance, exact_slots: bool) -> NDArray[np.int64]:
    slots = np.asarray(slots)
    if slots.shape != (instance.gpus,) or not np.issubdtype(slots.dtype, np.integer) or slots.min() < 0:
        raise InputError(f"slots: wanted one whole number of at least 0 for each of the {instance.gpus} GPUs")
    places, experts = int(slots.sum()), instance.experts
    if places < experts:
        raise InputError(
            f"slots: {places} places for {experts} experts; give the GPUs {experts - places} more slots "
            "(more memory per GPU or more GPUs), or place fewer experts"
        )
    if exact_slots and places > experts:
        raise InputError(
            f"slots: {places} places for {experts} experts, yet every slot is to be filled; "
            f"take {places - experts} slots away or let the slots be upper limits"
        )
    return np.minimum(slots, experts).astype(np.int64)
