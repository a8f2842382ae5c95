"""The best groups of experts on GPUs of a small instance, proven by CP-SAT."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python.cp_model import FEASIBLE, OPTIMAL, CpModel, LinearExpr

from engine.placement.assignment import AssignmentInstance
from engine.result import Stop
from engine.solver import solve

CP_SAT_UNITS = 2**30
"""Integer units of the known objective in the model: rounding costs under 2e-7 of it even with 50 experts on a GPU. With
2^32 and more CP-SAT 9.15 calls wrong answers of small models optimal (32-bit sums in its presolve)."""


def best_groups(
    instance: AssignmentInstance,
    slots: NDArray[np.int64],
    exact_slots: bool,
    best: NDArray[np.int64],
    seconds: float,
    seed: int,
    stop: Stop,
    on_progress: Callable[[float, float], None],
) -> tuple[NDArray[np.int64], float]:
    """An assignment int64[expert] at least as good as `best` up to rounding, and a lower bound in seconds.

    Loads are rounded down and savings up, so that the optimum of the integer model is at most the true one.
    """
    objective, gpus, experts = instance.cost(best), instance.gpus, instance.experts
    scale = CP_SAT_UNITS / objective
    # The product of two floats may land just above a whole number it should stay below: give way before rounding.
    slack = 1e-6

    def down(value: NDArray[np.float64]) -> NDArray[np.int64]:
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
        model,
        seconds,
        seed,
        stop,
        hint,
        linearization_level=2,
        on_progress=lambda objective, bound: on_progress(objective / scale, bound / scale),
    )
    if status not in (OPTIMAL, FEASIBLE):
        return best, 0.0
    chosen = np.array([[solver.boolean_value(variable) for variable in row] for row in x])
    return chosen.argmax(axis=0), solver.best_objective_bound / scale
