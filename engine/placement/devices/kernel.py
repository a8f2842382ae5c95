"""Hosts of the experts of one layer, several for popular ones: the largest load least.

Lina section 5.2 decides this for every layer and batch; equation 1 and first-fit decreasing (`pack_devices`) are its
answer, kept as the method "lina". First fit aims at few devices, not at even ones, so "best" minimises the largest load
itself: local search, and CP-SAT where the instance is small enough for a proof.
"""

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.errors import InputError
from engine.placement.devices.search import (
    Hosting,
    Hosts,
    check_slots,
    largest_load,
    pack_devices,
    replicas_of_expert,
    search,
    usual_kicks,
)
from engine.result import Floats, Ints, Limits, Report, Result, Stop, never, relative_gap, result_of, status_of

PROVEN_GAP = 1e-9
CP_SAT_CHOICES = 1500
"""(expert, number of hosts, device) choices up to which CP-SAT is tried."""
CP_SAT_SECONDS = 10.0
"""The most work that CP-SAT gets: a proof that takes longer hardly ever comes."""
SEARCH_SHARE = 0.4
CP_SAT_UNITS = 2**30
"""Integer units of the known objective in the model. With 2^32 and more CP-SAT 9.15 calls wrong answers of small models
optimal (32-bit sums in its presolve)."""


@dataclass(frozen=True, eq=False)
class DevicesInstance:
    """The experts of one layer and the devices to host them; every expert is hosted, also one of popularity 0.

    popularity: float64[expert] in any unit, finite, at least 0

    Raises InputError for bad values and for more experts than devices x max_experts_per_device.
    """

    popularity: Floats
    devices: int
    max_experts_per_device: int

    def __post_init__(self) -> None:
        popularity = np.asarray(self.popularity, dtype=np.float64)
        with np.errstate(over="ignore"):
            total = popularity.sum()
        if popularity.ndim != 1 or not np.isfinite(total) or (popularity.size and popularity.min() < 0):
            raise InputError("popularity: wanted one value of at least 0 for each expert, with a finite sum")
        check_slots(len(popularity), self.devices, self.max_experts_per_device)
        object.__setattr__(self, "popularity", popularity)


def replicate_devices(
    instance: DevicesInstance,
    limits: Limits = Limits(),
    stop: Stop = never,
    report: Report | None = None,
    *,
    method: Literal["best", "lina"] = "best",
    kicks: int | None = None,
) -> Result[Hosting]:
    """Experts on devices; an expert on r devices puts 1/r of its popularity on each; `objective` is the largest load.

    limits: the work is CP-SAT's, which with exact follows the search of "best"; the search ends by itself
    method: "best", or "lina": equation 1 with the popularity scaled to a sum of 1, then first-fit decreasing
    kicks: restarts of the search of "best", by default as many as take about half a second

    `solution` lists the experts of every device, in rising order, none twice on a device. Status OPTIMAL if the bound
    is met to 1e-9, or, where only CP-SAT could prove it, to (max_experts_per_device + 1) / 2^30 of the search's answer, the
    most that rounding to integers may take (the bound is proven in any case), TIME_LIMIT if a limit ended search or proof,
    FEASIBLE if none was tried, CANCELLED if `stop` answered True. Raises InputError for another method.
    """
    start = time.perf_counter()
    popularity, devices, seed = instance.popularity, instance.devices, limits.seed
    if method not in ("best", "lina"):
        raise InputError(f"method: '{method}' is not one of best, lina")
    cap = min(instance.max_experts_per_device, len(popularity))
    # Inside the most popular expert weighs 1: the smallest and largest floats are safe from under- and overflow.
    unit = float(popularity.max()) or 1.0
    weight = popularity / unit
    bound = lower_bound(weight, devices, cap)
    options = {"method": method, "devices": devices, "max_experts_per_device": instance.max_experts_per_device}
    limited, rounding = False, 0.0
    if method == "lina":
        share = devices * (weight / (weight.sum() or 1.0))
        hosts = np.zeros((len(weight), devices), dtype=bool)
        for device, held in enumerate(pack_devices(share, devices, cap, seed)):
            hosts[list(held), device] = True
    else:
        kicks = usual_kicks(len(weight), devices) if kicks is None else kicks
        options |= {"exact": limits.exact, "kicks": kicks, "time_limit": limits.seconds}

        def found(objective: float, bound: float) -> None:
            if report:
                report(objective * unit, bound * unit)

        hosts, bound, limited, rounding = _best(weight, devices, cap, bound, kicks, limits, stop, found)
    objective, bound = largest_load(hosts, popularity), bound * unit
    proven = relative_gap(objective, bound) <= PROVEN_GAP or objective - bound <= rounding * unit
    solution = tuple(tuple(np.flatnonzero(column).tolist()) for column in hosts.T)
    status, bound = status_of(proven, stop, limited), min(bound, objective)
    return result_of("replicate_devices", start, status, objective, bound, solution, options, seed)


def lower_bound(weight: Floats, devices: int, cap: int) -> float:
    """A largest load that no hosting can be under. weight: float64[expert].

    The mean; the largest replica where the slots are shared out to make it smallest; and, where experts fill so many
    slots that no device has less than c of them, the heaviest piece with the lightest c - 1 others.
    """
    experts, slots = len(weight), devices * cap
    replica = (weight / replicas_of_expert(weight, devices, slots)).max()
    most_hosts = min(devices, slots - experts + 1)
    company = max(experts - (devices - 1) * cap, 1) - 1
    smallest_pieces = np.sort(weight) / most_hosts
    together = smallest_pieces[-1] + smallest_pieces[:company].sum()
    return float(max(weight.sum() / devices, replica, together))


def _best(
    weight: Floats, devices: int, cap: int, bound: float, kicks: int, limits: Limits, stop: Stop, found: Report
) -> tuple[Hosts, float, bool, float]:
    """(hosts, a lower bound, True if a time limit ended the search or the proof, loss of the bound by rounding)."""
    deadline = time.perf_counter() + limits.wall_seconds
    search_ends = time.perf_counter() + SEARCH_SHARE * limits.wall_seconds

    def report(objective: float, proven: float = 0.0) -> None:
        found(objective, min(max(bound, proven), objective))

    target, seed = bound * (1 + PROVEN_GAP), limits.seed
    hosts = search(weight, devices, cap, kicks, seed, target, lambda: stop() or time.perf_counter() > search_ends, report)
    objective = largest_load(hosts, weight)
    cut_short = objective > target and time.perf_counter() > search_ends
    if objective <= target or not limits.exact or stop():
        return hosts, bound, cut_short, 0.0
    fewest = np.maximum(np.ceil(weight / objective * (1 - PROVEN_GAP)), 1).astype(np.int64)
    most = np.minimum(devices, devices * cap - (fewest.sum() - fewest))
    if np.sum(most - fewest + 1) * devices > CP_SAT_CHOICES:
        return hosts, bound, cut_short, 0.0

    seconds, left = min(CP_SAT_SECONDS, (1 - SEARCH_SHARE) * limits.seconds), max(0.0, deadline - time.perf_counter())
    rest = Limits(seconds, left, seed)
    exact_hosts, proven, ended = best_hosts(weight, cap, hosts, fewest, most, bound, rest, stop, report)
    if largest_load(exact_hosts, weight) < objective:
        hosts = exact_hosts
    # A unit for each piece on a device, and one for the arithmetic on floats before they are rounded.
    return hosts, max(bound, proven), not ended, (cap + 1) * objective / CP_SAT_UNITS


def best_hosts(
    weight: Floats, cap: int, hosts: Hosts, fewest: Ints, most: Ints, bound: float, limits: Limits, stop: Stop, report: Report
) -> tuple[Hosts, float, bool]:
    """(hosts at least as good up to rounding, a lower bound, True if the search came to its end).

    Pieces are rounded down, so that the optimum of the integer model is at most the true one.

    fewest, most: int64[expert], the numbers of hosts that an answer better than `hosts` can have
    """
    from ortools.sat.python.cp_model import FEASIBLE, OPTIMAL, CpModel, LinearExpr

    from engine.solver import solve

    experts, devices = hosts.shape
    objective = largest_load(hosts, weight)
    scale = CP_SAT_UNITS / objective
    model = CpModel()
    largest = model.new_int_var(int(bound * scale * (1 - PROVEN_GAP)), CP_SAT_UNITS, "largest")
    pieces: list[list[tuple[object, int]]] = [[] for _ in range(devices)]
    hint, chosen = {}, [[[] for _ in range(devices)] for _ in range(experts)]
    # The devices are alike: the expert with the largest piece takes the first ones.
    leader = int((weight / fewest).argmax())
    now = hosts[:, np.argsort(~hosts[leader], kind="stable")]
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
    status, solver = solve(model, limits, stop, lambda best, low: report(best / scale, low / scale), hint=hint)
    if status not in (OPTIMAL, FEASIBLE):
        return hosts, 0.0, False
    hosts_found = np.array([[any(solver.boolean_value(is_host) for is_host in cell) for cell in row] for row in chosen])
    return hosts_found, solver.best_objective_bound / scale, status == OPTIMAL
