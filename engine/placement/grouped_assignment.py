"""Experts on the GPUs of a mixed cluster, several experts to a GPU: near-optimal, with a proven bound.

The objective is Aurora's, max F + 2 max N (equation 3, see `assignment`), with loads that add up over the experts of a
GPU. The paper has one expert to a GPU; with more the problem contains bin packing, so it is answered in three steps:
the Lagrangian bound at the multipliers of the linear relaxation, local search (a greedy start, the best exchange at the
worst GPUs, kicks), and CP-SAT where the instance is small enough.
"""

import math
import threading
import time
from collections.abc import Callable

import numpy as np

from engine.errors import InputError
from engine.placement.assignment import AssignmentInstance, assign
from engine.placement.group_loads import GroupLoads
from engine.result import Floats, Ints, Limits, Report, Result, Stop, never, relative_gap, result_of, status_of

STEPS_PER_EXPERT = 60
SECONDS_PER_STEP, SECONDS_PER_PAIR = 4e-6, 15e-9
"""Cost of a step and of one pair looked at in it, measured: they turn seconds into steps, so that answers repeat."""
STEPS_PER_POLL = 16
PROVEN_GAP = 1e-6
CP_SAT_PAIRS, CP_SAT_PAIRS_PER_SECOND = 4096, 5000
"""GPU-expert pairs up to which CP-SAT pays, at all and for each second it may work: above, it spends tens of seconds, or all of
them, on its first relaxation."""
CP_SAT_UNITS = 2**30
"""Integer units of the known objective in the model: rounding costs under 2e-7 of it even with 50 experts on a GPU. With
2^32 and more CP-SAT 9.15 calls wrong answers of small models optimal (32-bit sums in its presolve)."""
RELAXATION_SHARE, SEARCH_SHARE, CP_SAT_SHARE = 0.2, 0.25, 0.55


def search(
    instance: AssignmentInstance,
    slots: Ints,
    seconds: float,
    deadline: float,
    seed: int,
    target: float,
    stop: Stop,
    on_incumbent: Callable[[float], None],
) -> Ints:
    """gpu_of_expert int64[expert] with a low max F + 2 max N, within the slots int64[gpu].

    The steps are those of `GroupLoads.search`: as many as fit `seconds`, fewer at the `deadline` of time.perf_counter, at an
    objective of `target`, or when `stop` answers True.
    """
    state = GroupLoads(instance, slots)
    worst_pairs = 2 * int(np.ceil(instance.experts / instance.gpus)) * len(state.place)
    steps = int(seconds / (SECONDS_PER_STEP + SECONDS_PER_PAIR * worst_pairs))
    steps = min(steps, STEPS_PER_EXPERT * instance.experts)
    rng = np.random.default_rng(seed)
    lowest, done = math.inf, 0
    while True:
        if state.costs[0] < lowest:
            lowest = float(state.costs[0])
            on_incumbent(lowest)
        if done >= steps or lowest <= target or stop() or time.perf_counter() > deadline:
            return state.best[: instance.experts]
        state.search(min(STEPS_PER_POLL, steps - done), target, rng)
        done += STEPS_PER_POLL


def assign_groups(
    instance: AssignmentInstance,
    limits: Limits = Limits(),
    stop: Stop = never,
    report: Report | None = None,
    *,
    slots: Ints,
    exact_slots: bool = True,
) -> Result[Ints]:
    """Experts to GPUs so that max F + 2 max N is small; `solution` is gpu_of_expert int64[expert].

    slots: int64[gpu], the experts that each GPU takes, or at most takes with `exact_slots=False`

    Status OPTIMAL if the relative gap is at most 1e-6, TIME_LIMIT if CP-SAT ended without that proof, FEASIBLE if the
    instance is beyond CP-SAT (more GPU-expert pairs than 4096, or than pay in that time), CANCELLED if `stop` answered True.
    Raises InputError if the slots cannot hold the experts.
    """
    start = time.perf_counter()
    slots, seed = _checked_slots(slots, instance, exact_slots), limits.seed
    options = {"exact_slots": exact_slots, "time_limit": limits.seconds}
    if slots.max() == slots.min() == 1:
        # Experts that nobody asks for, as many as there are GPUs without one, change no cost.
        idle = ((0, 0), (0, instance.gpus - instance.experts))
        compute, receive, saved = (np.pad(table, idle) for table in (instance.compute, instance.receive, instance.send_saved))
        alone = assign(AssignmentInstance(compute, receive, instance.send_total, saved), stop)
        solution = alone.solution[: instance.experts]
        return result_of("assign_groups", start, alone.status, alone.objective, alone.bound, solution, options, seed)

    deadline = start + limits.wall_seconds
    floors = _unavoidable(instance, slots, exact_slots)
    least = floors[0] + 2 * floors[1]
    if not stop():
        seconds = RELAXATION_SHARE * limits.seconds
        least = max(least, relaxation_bound(instance, slots, exact_slots, floors, seconds, deadline, stop))

    def found(objective: float, proven: float = 0.0) -> None:
        if report:
            report(objective, min(max(least, proven), objective))

    bound, target = least, least * (1 + PROVEN_GAP)
    best = search(instance, slots, SEARCH_SHARE * limits.seconds, deadline, seed, target, stop, found)
    objective = instance.cost(best)
    beyond_cp_sat = instance.compute.size > min(CP_SAT_PAIRS, CP_SAT_PAIRS_PER_SECOND * CP_SAT_SHARE * limits.seconds)
    if relative_gap(objective, bound) > PROVEN_GAP and not beyond_cp_sat and not stop():
        rest = Limits(CP_SAT_SHARE * limits.seconds, max(0.0, deadline - time.perf_counter()), seed)
        improved, proven = best_groups(instance, slots, exact_slots, best, rest, stop, found)
        bound = max(bound, proven)
        if instance.cost(improved) < objective:
            best, objective = improved, instance.cost(improved)
    status = status_of(relative_gap(objective, bound) <= PROVEN_GAP, stop, limited=not beyond_cp_sat)
    return result_of("assign_groups", start, status, objective, min(bound, objective), best, options, seed)


def _unavoidable(instance: AssignmentInstance, slots: Ints, exact_slots: bool) -> tuple[float, float]:
    """Lower limits of max F and max N in seconds, which an expert with its lightest company, or a GPU, cannot avoid."""
    some = np.flatnonzero(slots)

    def at_least(seconds: Floats) -> float:
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


def _checked_slots(slots: Ints, instance: AssignmentInstance, exact_slots: bool) -> Ints:
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


def best_groups(
    instance: AssignmentInstance, slots: Ints, exact_slots: bool, best: Ints, limits: Limits, stop: Stop, report: Report
) -> tuple[Ints, float]:
    """An assignment int64[expert] at least as good as `best` up to rounding, and a lower bound in seconds.

    Loads are rounded down and savings up, so that the optimum of the integer model is at most the true one.
    """
    from ortools.sat.python.cp_model import FEASIBLE, OPTIMAL, CpModel, LinearExpr

    from engine.solver import solve

    objective, gpus, experts = instance.cost(best), instance.gpus, instance.experts
    scale = CP_SAT_UNITS / objective
    # The product of two floats may land just above a whole number it should stay below: give way before rounding.
    slack = 1e-6

    def down(value: Floats) -> Ints:
        return np.floor(np.maximum(value * scale - slack, 0.0)).astype(np.int64)

    compute, receive, send_total = down(instance.compute), down(instance.receive), down(instance.send_total)
    saved = np.ceil(instance.send_saved * scale + slack).astype(np.int64)
    model = CpModel()
    x = [[model.new_bool_var("") for _ in range(experts)] for _ in range(gpus)]
    f, n = model.new_int_var(0, CP_SAT_UNITS, "f"), model.new_int_var(0, CP_SAT_UNITS // 2, "n")
    for e in range(experts):
        model.add_exactly_one(x[g][e] for g in range(gpus))
    for g in range(gpus):
        held = LinearExpr.sum(x[g])
        model.add(held == int(slots[g]) if exact_slots else held <= int(slots[g]))
        model.add(LinearExpr.weighted_sum(x[g], compute[g].tolist()) <= f)
        model.add(LinearExpr.weighted_sum(x[g], receive[g].tolist()) <= n)
        model.add(int(send_total[g]) - LinearExpr.weighted_sum(x[g], saved[g].tolist()) <= n)
    model.minimize(f + 2 * n)
    hint = {x[g][e]: int(best[e] == g) for g in range(gpus) for e in range(experts)}
    status, solver = solve(
        model, limits, stop, lambda objective, bound: report(objective / scale, bound / scale), hint=hint, linearization_level=2
    )
    if status not in (OPTIMAL, FEASIBLE):
        return best, 0.0
    chosen = np.array([[solver.boolean_value(variable) for variable in row] for row in x])
    return chosen.argmax(axis=0), solver.best_objective_bound / scale


def relaxation_bound(
    instance: AssignmentInstance,
    slots: Ints,
    exact_slots: bool,
    floors: tuple[float, float],
    seconds: float,
    deadline: float,
    stop: Stop,
) -> float:
    """Lower bound of max F + 2 max N in seconds: the linear relaxation with max F and max N not below their floors.

    The simplex code only proposes multipliers. The bound is the Lagrangian at them; its minimum over the assignments is a
    transportation problem solved exactly, so no solver tolerance enters it. GPUs that nothing tells apart are one to the
    simplex code, with as much room as all of them: of any solution the mean over their names is one too. 0 if the simplex
    code came to no end within `seconds` of work, or by the `deadline` of time.perf_counter.
    """
    # Where no load is above its floor with every expert spread over all slots, the floors are the relaxation.
    share = slots / slots.sum()
    f, received, saved = (table.sum(axis=1) * share for table in (instance.compute, instance.receive, instance.send_saved))
    if f.max() <= floors[0] and max(received.max(), (instance.send_total - saved).max()) <= floors[1]:
        return floors[0] + 2 * floors[1]

    from ortools.linear_solver.python import model_builder
    from scipy.optimize import linear_sum_assignment
    from scipy.sparse import csr_matrix

    from engine.solver import DETERMINISTIC_SHARE, POLL_SECONDS

    experts = instance.experts
    unit = instance.cost(np.repeat(np.arange(instance.gpus), slots)[:experts]) or 1.0
    # What a GPU sends in any case is in the floor of N already.
    sent = np.where(instance.send_saved.any(axis=1), instance.send_total, 0.0)
    told_by = np.column_stack([instance.compute, instance.receive, instance.send_saved, sent, slots])
    rows = told_by.view(np.dtype((np.void, told_by.itemsize * told_by.shape[1]))).ravel()
    _, first, kind, alike = np.unique(rows, return_index=True, return_inverse=True, return_counts=True)
    kinds, room = len(first), (alike * slots[first]).astype(np.float64)
    # Variables: the part of an expert on a kind, by kind; F and N. Rows: experts, rooms, and three loads a kind.
    part, most = np.arange(kinds * experts).reshape(kinds, experts), np.full(kinds, np.inf)
    load_rows = [np.column_stack([part, np.full(kinds, limit)]).ravel() for limit in (part.size, part.size + 1, part.size + 1)]
    tables = (table[first] / (unit * alike[:, None]) for table in (instance.compute, instance.receive, -instance.send_saved))
    loads = [np.column_stack([table, -np.ones(kinds)]).ravel() for table in tables]
    lengths = np.repeat([kinds, experts, experts + 1], [experts, kinds, 3 * kinds])
    entries = np.concatenate([np.ones(2 * part.size), *loads])
    columns = np.concatenate([part.T.ravel(), part.ravel(), *load_rows])
    model = model_builder.Model()
    model.helper.fill_model_from_sparse_data(
        np.append(np.zeros(part.size), np.array(floors) / unit),
        np.append(np.ones(part.size), [2.0, 2.0]),
        np.append(np.zeros(part.size), [1.0, 2.0]),
        np.concatenate([np.ones(experts), room if exact_slots else -most, *[-most] * 3]),
        np.concatenate([np.ones(experts), room, np.zeros(2 * kinds), -sent[first] / unit]),
        csr_matrix((entries, columns, np.append(0, np.cumsum(lengths))), (len(lengths), part.size + 2)),
    )
    solver = model_builder.Solver("glop")
    solver.set_solver_specific_parameters(f"max_deterministic_time: {DETERMINISTIC_SHARE * seconds}")
    if math.isfinite(deadline):
        solver.set_time_limit_in_seconds(max(0.0, deadline - time.perf_counter()))
    outcome: list[model_builder.SolveStatus] = []
    helper = threading.Thread(target=lambda: outcome.append(solver.solve(model)), daemon=True)
    helper.start()
    while helper.is_alive():
        helper.join(POLL_SECONDS)
        if stop():
            solver.stop_search()
    if not outcome or outcome[0] != model_builder.SolveStatus.OPTIMAL:
        return 0.0
    duals = [solver.dual_value(row) for row in model.get_linear_constraints()[-3 * kinds :]]
    on_kind = np.maximum(-np.array(duals), 0.0).reshape(3, kinds) / alike
    on_f, on_receive, on_send = on_kind[:, kind]
    on_f = on_f / max(on_f.sum(), 1.0)
    share = max((on_receive.sum() + on_send.sum()) / 2, 1.0)
    on_receive, on_send = on_receive / share, on_send / share
    price = on_f[:, None] * instance.compute + on_receive[:, None] * instance.receive
    per_slot = np.repeat(price - on_send[:, None] * instance.send_saved, slots, axis=0)
    taken = per_slot[linear_sum_assignment(per_slot)].sum()
    free_f, free_n = 1 - on_f.sum(), 2 - on_receive.sum() - on_send.sum()
    return float(on_send @ instance.send_total + taken + max(free_f, 0.0) * floors[0] + max(free_n, 0.0) * floors[1])
