"""A lower bound for groups of experts on GPUs: the Lagrangian at multipliers of the linear relaxation."""

import threading

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder
from scipy.optimize import linear_sum_assignment

from engine.placement.assignment import AssignmentInstance
from engine.result import Stop
from engine.solver import POLL_SECONDS


def relaxation_bound(
    instance: AssignmentInstance,
    slots: NDArray[np.int64],
    exact_slots: bool,
    floors: tuple[float, float],
    time_limit: float,
    stop: Stop,
) -> float:
    """Lower bound of max F + 2 max N in seconds: the linear relaxation with max F and max N not below their floors.

    The simplex code only proposes multipliers. The bound is the Lagrangian at them, whose minimum over the assignments
    is a transportation problem solved exactly, so no solver tolerance enters it. 0 if the simplex code ran out of time.
    """
    gpus, experts = instance.gpus, instance.experts
    unit = instance.cost(np.repeat(np.arange(gpus), slots)[:experts]) or 1.0
    weighted_sum, ones = model_builder.LinearExpr.weighted_sum, np.ones(max(gpus, experts))
    model = model_builder.Model()
    f, n = (model.new_num_var(floor / unit, 2.0, name) for floor, name in zip(floors, "fn", strict=True))
    x = [[model.new_num_var(0.0, 1.0, "") for _ in range(experts)] for _ in range(gpus)]
    for e in range(experts):
        model.add(weighted_sum([x[g][e] for g in range(gpus)], ones[:gpus]) == 1.0)
    loads = []
    for g in range(gpus):
        held = weighted_sum(x[g], ones[:experts])
        model.add(held == float(slots[g]) if exact_slots else held <= float(slots[g]))
        for seconds, limit, known in (
            (instance.compute[g], f, 0.0),
            (instance.receive[g], n, 0.0),
            (-instance.send_saved[g], n, instance.send_total[g]),
        ):
            row = weighted_sum([*x[g], limit], [*(seconds / unit), -1.0])
            loads.append(model.add(row <= -known / unit))
    model.minimize(f + 2 * n)
    solver = model_builder.Solver("glop")
    solver.set_time_limit_in_seconds(time_limit)
    outcome: list[model_builder.SolveStatus] = []
    helper = threading.Thread(target=lambda: outcome.append(solver.solve(model)), daemon=True)
    helper.start()
    while helper.is_alive():
        helper.join(POLL_SECONDS)
        if stop():
            solver.stop_search()
    if not outcome or outcome[0] != model_builder.SolveStatus.OPTIMAL:
        return 0.0
    on_f, on_receive, on_send = np.maximum(-np.array([solver.dual_value(row) for row in loads]), 0.0).reshape(gpus, 3).T
    on_f = on_f / max(on_f.sum(), 1.0)
    share = max((on_receive.sum() + on_send.sum()) / 2, 1.0)
    on_receive, on_send = on_receive / share, on_send / share
    price = on_f[:, None] * instance.compute + on_receive[:, None] * instance.receive
    per_slot = np.repeat(price - on_send[:, None] * instance.send_saved, slots, axis=0)
    taken = per_slot[linear_sum_assignment(per_slot)].sum()
    free_f, free_n = 1 - on_f.sum(), 2 - on_receive.sum() - on_send.sum()
    return float(on_send @ instance.send_total + taken + max(free_f, 0.0) * floors[0] + max(free_n, 0.0) * floors[1])
