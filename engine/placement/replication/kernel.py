"""Replicas of experts on GPUs, so that the slowest GPU of every layer is as fast as possible.

The balancing of Lina (section 5) and DeepSeek's EPLB at inference, taken further: replicas are counted and packed greedily,
then exchanged between GPUs under the true objective (`search`), which may be the worst of several workloads, and
an expert's tokens may be divided at will over its replicas (`divided`). Layers do not depend on each other.

Here more is better: the objective is the balancedness, ideal time over the time of the slowest GPU, and its bound is an
**upper** limit, `objective <= optimum <= bound`. `Result.gap` is made for costs and says 0 here; the gap in terms of
max / mean is bound / objective - 1.
"""

import time
from typing import Literal

import numpy as np

from engine.errors import InputError
from engine.placement.replication.bounds import ROUND_OFF, least_time
from engine.placement.replication.eplb import eplb
from engine.placement.replication.instance import ReplicationInstance, balancedness
from engine.placement.replication.search import search, search_free
from engine.result import Floats, Ints, Limits, Report, Result, Stop, never, result_of, status_of

Algorithm = Literal["best", "eplb"]
PROVEN_GAP = 1e-6
PROOF_SHARE = 0.4
"""Share of the work that the proof of one layer may take."""
LEAST_SECONDS = 0.05
"""Work below which no proof is begun."""
MOST_VARIABLES = 500
"""Variables up to which a proof is tried: above, a minute seldom ends in one or improves on the search."""


def replicate(
    instance: ReplicationInstance,
    limits: Limits = Limits(),
    stop: Stop = never,
    report: Report | None = None,
    *,
    algorithm: Algorithm = "best",
    close_enough: float = 1e-3,
    effort: int = 8,
) -> Result[Ints]:
    """Replicas onto GPUs; `solution` is physical_to_logical int64[layer, slot], slots in the order of their GPUs.

    The objective, to be maximised, is the least balancedness over layers and loads, the bound an upper limit of it.

    limits: the work is that of proofs, tried for small layers; the search ends by itself
    algorithm: "best", or "eplb" on the mean of the loads
    close_enough: relative distance from the bound at which a layer is left alone
    effort: attempts to improve layers that are further away, by other replica counts and otherwise

    Two replicas of an expert on one GPU are legal, and with an equal split sometimes best; except where CP-SAT finds
    that, "best" avoids them as long as another GPU has room. It never does worse than EPLB in any layer. Status OPTIMAL
    if objective and bound agree to 1e-6, TIME_LIMIT if the time ended the work before, CANCELLED if `stop` did, otherwise
    FEASIBLE. Raises InputError for "eplb" with unequal GPUs.
    """
    start = time.perf_counter()
    deadline, seed = start + limits.wall_seconds, limits.seed

    def over() -> bool:
        return stop() or time.perf_counter() > deadline

    if algorithm not in ("best", "eplb"):
        raise InputError(f"algorithm: must be 'best' or 'eplb', not '{algorithm}'")
    if algorithm == "eplb" and not instance.alike:
        raise InputError("algorithm: EPLB knows only GPUs of equal slots and speed; use 'best' for these")
    least = least_time(instance.relative, instance.slots_of_gpu, instance.speed)
    if instance.grouped:
        least = np.maximum(least, instance.groups_in_order[1])
    bound = 1.0 / np.maximum(least, 1.0)
    in_time = True
    if algorithm == "eplb":
        placed = _eplb(instance)
        reached = balancedness(placed, instance).min(axis=0)
    else:
        placed, reached = _best(instance, bound, close_enough, effort, seed, over)
        if report:
            report(float(reached.min()), float(bound.min()))
        if limits.exact and not instance.grouped:
            in_time = _prove(instance, placed, reached, bound, limits.seconds, deadline, seed, over, report)
    objective = float(reached.min())
    limit = max(float(bound.min()), objective)
    late = not in_time or time.perf_counter() > deadline
    status = status_of(limit <= objective * (1 + PROVEN_GAP), stop, late)
    options = {"algorithm": algorithm, "split": instance.split, "close_enough": close_enough, "effort": effort}
    options |= {"exact": limits.exact, "time_limit": limits.seconds}
    return result_of("replicate", start, status, objective, limit, placed, options, seed)


def _eplb(instance: ReplicationInstance) -> Ints:
    return eplb(instance.loads.mean(axis=0), instance.slots, instance.gpus, instance.nodes, instance.groups)


def _best(
    instance: ReplicationInstance, bound: Floats, close_enough: float, effort: int, seed: int, stop: Stop
) -> tuple[Ints, Floats]:
    """(physical_to_logical int64[layer, slot], least balancedness float64[layer])."""
    load, nodes = instance.relative, instance.nodes if instance.grouped else 1
    layers, loads, experts = load.shape
    # Every node is a problem of its own, with its part of the experts in the order of their nodes.
    expert_at = instance.experts_in_order
    share = experts // nodes
    local = np.take_along_axis(load, expert_at[:, None], axis=2)
    local = local.reshape(layers, loads, nodes, share).swapaxes(1, 2).reshape(layers * nodes, loads, share)
    speed, slots_of_gpu = (each[: instance.gpus // nodes] for each in (instance.speed, instance.slots_of_gpu))
    target = np.repeat((1 + close_enough) / bound, nodes)
    layout = search(local, slots_of_gpu, speed, target, effort, seed, stop)
    if instance.split == "free":
        layout = search_free(layout, local, speed, target, seed, stop)
    layout = layout.reshape(layers, nodes, instance.gpus // nodes, -1)
    first = np.arange(nodes)[:, None, None] * share
    at = np.where(layout < 0, 0, layout + first).reshape(layers, -1)
    expert = np.take_along_axis(expert_at, at, axis=1).reshape(layers, instance.gpus, -1)
    placed = instance.slots_in(np.where(layout.reshape(expert.shape) < 0, -1, expert))
    reached = balancedness(placed, instance).min(axis=0)
    if instance.alike:
        usual = _eplb(instance)
        usual_reached = balancedness(usual, instance).min(axis=0)
        better = usual_reached > reached * (1 + ROUND_OFF)
        placed[better], reached[better] = usual[better], usual_reached[better]
    return placed, reached


def _prove(
    instance: ReplicationInstance,
    placed: Ints,
    reached: Floats,
    bound: Floats,
    seconds: float,
    deadline: float,
    seed: int,
    stop: Stop,
    report: Report | None,
) -> bool:
    """Improve layers, and their bounds, in place by CP-SAT, the least balanced first, until the least one is proven.

    False if a limit left the least one unproven; True also where the layers are too large to try.

    seconds: work on all layers
    deadline: of time.perf_counter
    """
    loads, _, experts = instance.loads.shape
    cells = loads + 1 if instance.split == "free" else int(instance.slots_of_gpu.sum()) - experts + 1
    if experts * instance.gpus * cells > MOST_VARIABLES:
        return True
    from engine.placement.replication.exact import best_layout  # see engine.solver

    tried, most = np.zeros(len(reached), dtype=bool), PROOF_SHARE * seconds
    spent: list[float] = []
    while not stop():
        layer = int(np.where(tried, np.inf, reached).argmin())
        if reached.min() * (1 + PROVEN_GAP) >= bound.min():
            return True
        if tried[layer] or seconds - sum(spent) < LEAST_SECONDS:
            return False
        tried[layer] = True
        alone, known = instance.of_layer(layer), instance.layout(placed[[layer]])[0]
        rest = Limits(min(most, seconds - sum(spent)), max(0.0, deadline - time.perf_counter()), seed)
        layout, least = best_layout(alone, known, 1.0 / bound[layer], rest, stop, spent.append)
        candidate = instance.slots_in(layout[None])
        value = float(balancedness(candidate, alone).min())
        if value > reached[layer]:
            placed[layer], reached[layer] = candidate[0], value
        bound[layer] = min(bound[layer], 1.0 / least)
        if report:
            report(float(reached.min()), max(float(bound.min()), float(reached.min())))
    return False
