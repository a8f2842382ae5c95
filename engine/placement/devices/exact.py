"""The best hosts of a small layer's experts, proven by CP-SAT."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python.cp_model import FEASIBLE, OPTIMAL, CpModel, LinearExpr

from engine.placement.devices.search import Hosts, largest_load
from engine.result import Stop
from engine.solver import solve

PROVEN_GAP = 1e-9
CP_SAT_UNITS = 2**30
"""Integer units of the known objective in the model. With 2^32 and more CP-SAT 9.15 calls wrong answers of small models
optimal (32-bit sums in its presolve)."""


def best_hosts(
    weight: NDArray[np.float64],
    cap: int,
    hosts: Hosts,
    fewest: NDArray[np.int64],
    most: NDArray[np.int64],
    bound: float,
    seconds: float,
    seed: int,
    stop: Stop,
    on_progress: Callable[[float, float], None],
) -> tuple[Hosts, float, bool]:
    """Hosts at least as good up to rounding, a lower bound, and whether the search came to its end.

    fewest, most: int64[expert], the numbers of hosts that an answer better than `hosts` can have. Pieces are rounded
    down, so that the optimum of the integer model is at most the true one.
    """
    experts, devices = hosts.shape
    objective = largest_load(hosts, weight)
    scale = CP_SAT_UNITS / objective
    model = CpModel()
    largest = model.new_int_var(int(bound * scale * (1 - PROVEN_GAP)), CP_SAT_UNITS, "largest")
    pieces: list[list[tuple[object, int]]] = [[] for _ in range(devices)]
    hint, chosen = {}, [[[] for _ in range(devices)] for _ in range(experts)]
    # The devices are alike: the expert with the largest piece takes the first ones.
    leader = int((weight / fewest).argmax())
    now = _leader_first(hosts, leader)
    for expert in range(experts):
        counts = range(int(fewest[expert]), int(most[expert]) + 1)
        is_count = [model.new_bool_var("") for _ in counts]
        model.add_exactly_one(is_count)
        for count, it_is in zip(counts, is_count, strict=True):
            here = [model.new_bool_var("") for _ in range(devices)]
            model.add(LinearExpr.sum(here) == count * it_is)
            size = int(weight[expert] / count * scale * (1 - 1e-15))
            as_now = now[expert].sum() == count
            hint[it_is] = int(as_now)
            for device, variable in enumerate(here):
                pieces[device].append((variable, size))
                chosen[expert][device].append(variable)
                hint[variable] = int(as_now and now[expert, device])
                if expert == leader:
                    model.add(variable == it_is) if device < count else model.add(variable == 0)
    for held in pieces:
        variables = [variable for variable, _ in held]
        model.add(LinearExpr.sum(variables) <= cap)
        model.add(LinearExpr.weighted_sum(variables, [size for _, size in held]) <= largest)
    model.minimize(largest)
    status, solver = solve(
        model, seconds, seed, stop, hint, on_progress=lambda best, low: on_progress(best / scale, low / scale)
    )
    if status not in (OPTIMAL, FEASIBLE):
        return hosts, 0.0, False
    hosts_found = np.array([[any(solver.boolean_value(is_host) for is_host in cell) for cell in row] for row in chosen])
    return hosts_found, solver.best_objective_bound / scale, status == OPTIMAL


def _leader_first(hosts: Hosts, leader: int) -> Hosts:
    """The same state with the devices of the expert `leader` in front."""
    return hosts[:, np.argsort(~hosts[leader], kind="stable")]
