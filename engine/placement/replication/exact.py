"""The best replication of one small layer, proven by CP-SAT."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from ortools.sat.python.cp_model import FEASIBLE, OPTIMAL, CpModel, CpSolver, CpSolverStatus, LinearExpr

from engine.placement.replication.bounds import counts_of
from engine.placement.replication.instance import ReplicationInstance
from engine.result import Floats, Ints, Limits, Stop
from engine.solver import seconds_of_work, solve

UNITS = 2**24
"""Integer units of the ideal time in the models: rounding costs under 1e-6 of it even with a dozen experts on a GPU."""
SPEED_UNITS = 2**26
"""Integer units of the highest speed where speeds differ; the product with a time still fits into 63 bits."""


def best_layout(
    instance: ReplicationInstance,
    known: Ints,
    bound: float,
    limits: Limits,
    stop: Stop,
    spend: Callable[[float], None] = lambda seconds: None,
) -> tuple[Ints, float]:
    """(layout int64[gpu, place], proven lower limit of the worst time in units of the ideal).

    instance: of a single layer
    known: int64[gpu, place], a good layout, which comes back if nothing better is found
    bound: a limit that is already proven
    spend: called with the seconds of work that it took
    """
    load, speed = instance.relative[0], instance.speed
    if _longest(load, speed) * SPEED_UNITS >= 2**63:  # times further apart than the solver's whole numbers can count
        return known, bound

    def solved(model: CpModel, hint: dict) -> tuple[CpSolverStatus, CpSolver]:
        status, solver = solve(model, limits, stop, hint=hint, linearization_level=2)
        spend(seconds_of_work(solver))
        return status, solver

    model = _free_model if instance.split == "free" else _equal_model
    return model(load, instance.slots_of_gpu, speed, known, bound, solved)


def _equal_model(load, slots_of_gpu, speed, known, bound, solved) -> tuple[Ints, float]:
    """Copies of an expert on a GPU, once for every number of replicas the expert may have."""
    loads, experts = load.shape
    gpus, most = len(slots_of_gpu), int(slots_of_gpu.sum()) - experts + 1
    model = CpModel()
    worst = model.new_int_var(max(int(bound * UNITS * (1 - 1e-9)) - 1, 0), _longest(load, speed), "")
    copies, hint = {}, {}
    heaviest = int(load.max(axis=0).argmax())
    alike = [np.flatnonzero((slots_of_gpu == c) & (speed == s)) for c, s in sorted(set(zip(slots_of_gpu, speed, strict=True)))]
    # Alike GPUs may trade places, so only plans that give the heaviest expert to them in falling numbers are looked at.
    known = known.copy()
    for group in alike:
        known[group] = known[group[np.argsort(-(known[group] == heaviest).sum(axis=1), kind="stable")]]
    known_counts = counts_of(known[None], experts)[0]
    for e in range(experts):
        chosen = [model.new_bool_var("") for _ in range(most)]
        model.add_exactly_one(chosen)
        for k, this in enumerate(chosen, start=1):
            hint[this] = int(known_counts[e] == k)
            for g in range(gpus):
                copies[e, g, k] = model.new_int_var(0, min(k, int(slots_of_gpu[g])), "")
                hint[copies[e, g, k]] = int((known[g] == e).sum()) if known_counts[e] == k else 0
            model.add(LinearExpr.sum([copies[e, g, k] for g in range(gpus)]) == k * this)
    for group in alike:
        for g, h in pairwise(group):
            ks = range(1, most + 1)
            fewer = LinearExpr.sum([copies[heaviest, h, k] for k in ks])
            model.add(LinearExpr.sum([copies[heaviest, g, k] for k in ks]) >= fewer)
    for g in range(gpus):
        here = [(e, k) for e in range(experts) for k in range(1, most + 1)]
        on_gpu = [copies[e, g, k] for e, k in here]
        model.add(LinearExpr.sum(on_gpu) == int(slots_of_gpu[g]))
        for scenario in range(loads):
            # Rounded down: the integer optimum is not above the true one.
            units = [int(load[scenario, e] / k / speed[g] * UNITS * (1 - 1e-12)) for e, k in here]
            model.add(LinearExpr.weighted_sum(on_gpu, units) <= worst)
    model.minimize(worst)
    status, solver = solved(model, hint)
    if status not in (OPTIMAL, FEASIBLE):
        return known, bound
    layout = np.full(known.shape, -1, dtype=np.int64)
    for g, slots in enumerate(slots_of_gpu):
        layout[g, :slots] = [e for (e, gpu, _), copy in copies.items() if gpu == g for _ in range(solver.value(copy))]
    return layout, max(bound, solver.best_objective_bound / UNITS)


def _longest(load: Floats, speed: Floats) -> int:
    """Units of time that any one GPU needs for everything."""
    return int(load.sum(axis=1).max() / speed.min() * UNITS) + 1


def _free_model(load, slots_of_gpu, speed, known, bound, solved) -> tuple[Ints, float]:
    """Hosts of every expert, and for every load the part of each host, which may be nothing."""
    loads, experts = load.shape
    gpus = len(slots_of_gpu)
    model = CpModel()
    alike = bool((speed == speed[0]).all())
    # Speeds are rounded up and loads down, so that the integer optimum is below the true one, but for the last unit.
    speed_units = [1] * gpus if alike else [int(np.ceil(s / speed.max() * SPEED_UNITS)) for s in speed]
    per_unit = UNITS * (1 if alike else SPEED_UNITS) / (speed[0] if alike else speed.max())
    worst = model.new_int_var(max(int(bound * UNITS * (1 - 1e-9)) - 1, 0), _longest(load, speed), "")
    host = [[model.new_bool_var("") for _ in range(gpus)] for _ in range(experts)]
    for e in range(experts):
        model.add_bool_or(host[e])
    for g in range(gpus):
        model.add(LinearExpr.sum([host[e][g] for e in range(experts)]) <= int(slots_of_gpu[g]))
    for scenario in range(loads):
        units = [int(load[scenario, e] * per_unit * (1 - 1e-12)) for e in range(experts)]
        part = [[model.new_int_var(0, units[e], "") for _ in range(gpus)] for e in range(experts)]
        for e in range(experts):
            model.add(LinearExpr.sum(part[e]) == units[e])
            for g in range(gpus):
                model.add(part[e][g] <= units[e] * host[e][g])
        for g in range(gpus):
            model.add(LinearExpr.sum([part[e][g] for e in range(experts)]) <= speed_units[g] * worst)
    model.minimize(worst)
    hint = {host[e][g]: int((known[g] == e).any()) for e in range(experts) for g in range(gpus)}
    status, solver = solved(model, hint)
    if status not in (OPTIMAL, FEASIBLE):
        return known, bound
    layout = np.full(known.shape, -1, dtype=np.int64)
    for g, slots in enumerate(slots_of_gpu):
        here = [e for e in range(experts) if solver.boolean_value(host[e][g])]
        # Slots that are left over take further experts: a host more cannot hurt.
        here += [e for e in range(experts) if e not in here] + [0] * int(slots)
        layout[g, :slots] = here[:slots]
    return layout, max(bound, (solver.best_objective_bound - 1) / UNITS)
