"""Proof for any eligibility by CP-SAT."""

import math

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python.cp_model import FEASIBLE, OPTIMAL, CpModel, LinearExpr

from engine.overlap.weight_gradients.instance import NOWHERE, WeightGradientInstance
from engine.result import Stop
from engine.solver import solve

FIRST_SHARE = 0.2
"""Share of the time for a first attempt without the full linear relaxation."""
UNITS_EXPONENT = 30
"""The bound is 2^29 to 2^30 integer units. With 2^36 and more CP-SAT 9.15 calls wrong answers of small models optimal."""


def rounding(instance: WeightGradientInstance) -> float:
    """How far, relative to the optimum, the limit found by CP-SAT may be above it: a unit for each duration."""
    return sum(instance.allowed.shape) * 2.0 ** (2 - UNITS_EXPONENT)


def best_assignment(
    instance: WeightGradientInstance, known: NDArray[np.int64], bound: float, seconds: float, seed: int, stop: Stop
) -> tuple[NDArray[np.int64], float]:
    """(alltoall_of_dw int64[w], proven upper limit of the overlap), within `seconds`.

    known: int64[w], a good answer, which comes back if none is found; bound: a limit that is already proven, above 0.
    Durations are rounded up to whole units, so the optimum of the integers is not below the true one.
    """
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
    first = FIRST_SHARE * seconds
    status, solver = solve(model, first, seed, stop, hint, linearization_level=1)
    if status != OPTIMAL and not stop():
        status, solver = solve(model, seconds - first, seed, stop, hint, linearization_level=2)
    if status not in (OPTIMAL, FEASIBLE):
        return known, bound
    alltoall_of_dw = np.full_like(known, NOWHERE)
    for (i, j), chosen in under.items():
        if solver.boolean_value(chosen):
            alltoall_of_dw[i] = j
    return alltoall_of_dw, min(bound, solver.best_objective_bound * unit)
