"""Experts that fire together in one place, so that a token's row goes to few GPUs or nodes.

If an engine sends one row of a token to each GPU (or node) that has one of its experts, a placement sends as many rows as there
are such GPUs. So experts that tokens choose together belong together, with a cap on the load of a GPU: without one the
same few GPUs get all popular experts.
"""

import math

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.placement.coactivation import CoactivationInstance, coactivation, with_copies
from engine.placement.coactivation.kernel import compile_ahead
from engine.plan import Placement
from engine.problem import Problem
from engine.result import Limits, Result, Stop
from engine.simulate.work import Load
from engine.systems.base import Draft, Note, Notes, Report, System, proof_of
from engine.systems.eplb import slots_per_gpu
from engine.systems.options import Options, Order, Redundant, Seed, Spare, TimeLimit
from engine.systems.pieces import best_order, experts_per_gpu, linear_placement, to_placement
from engine.timeline import balancedness
from engine.units import at_most, digits, share
from engine.workload import RoutingTrace

PORT_WEIGHT = 0.3
"""Weight of the busiest port against all rows: it decides the seconds of an all-to-all."""
BUSIEST = "busiest GPU's tokens, against the mean"


class CoactivationOptions(Options):
    cap: float = Field(
        1.1,
        ge=1,
        le=1000,
        title="Load limit (× mean)",
        description="tokens of the most loaded GPU of a layer, at most, as a multiple of the mean",
    )
    redundant: Redundant = Field(
        0, description="spare slots of a layer, on every GPU or in all, filled with copies where they save rows"
    )
    spare: Spare = "per GPU"
    order: Order = "concurrent"
    time_limit: TimeLimit = Field(10.0, description="seconds for search and bound together, and as many for copies")
    seed: Seed = 0


def coactivate(problem: Problem, options: CoactivationOptions, stop: Stop, report: Report) -> Draft:
    """Fewest rows under a cap on load, on nodes between nodes first and then inside them, and in spare slots the copies that
    save most of the rest."""
    instance = instance_of(problem, options.cap)
    spare = slots_per_gpu(problem, options.redundant, "even", options.spare) - instance.expert_count // instance.gpus
    report(0.1, "bringing experts together that fire together", None, None)
    compile_ahead()  # before the clock starts
    guard = options.guard(stop)
    limits = Limits(options.time_limit, wall=math.inf, seed=options.seed)
    result = coactivation(instance, limits, guard, port_weight=PORT_WEIGHT)
    placement, notes = to_placement(result.solution, problem), notes_of(result, instance, problem)
    limited = guard.cut
    if spare.any():
        report(0.5, "adding copies", None, None)
        copying = options.guard(stop)
        holds = with_copies(instance, result.solution, spare, options.time_limit, copying)
        limited |= copying.cut
        placement = placement_of(holds, problem)
        notes |= notes_of_copies(holds, spare, placement, instance, problem)
    ordered = best_order(placement, problem, options.order, stop, report)
    return ordered.draft(notes, stop(), limited)


def placement_of(holds: np.ndarray, problem: Problem) -> Placement:
    """The placement with these copies. holds: bool[layer, expert, gpu]"""
    rows = tuple(tuple(tuple(np.flatnonzero(gpu).tolist()) for gpu in layer.T) for layer in holds)
    return Placement(experts=holds.shape[1], experts_of_gpu=rows, model_layers=problem.model.moe_layers)


def instance_of(problem: Problem, cap: float | None) -> CoactivationInstance:
    """The placement problem. Raises InputError where rows are not shared, tokens are not known, or GPUs take unequal numbers of
    experts."""
    trace, travel = problem.workload, problem.travel
    if travel is None or travel.unit == "copies":
        raise InputError(
            "every copy of a token travels on its own, so experts gain nothing by being together; choose one row per GPU or "
            "one per node as how tokens travel"
        )
    if not isinstance(trace, RoutingTrace):
        raise InputError(f"which experts fire together is seen in tokens, but {trace.name} has none; use a routing log")
    gpus, slots = len(problem.cluster.gpus), experts_per_gpu(problem)
    if np.any(slots != slots[0]):
        raise InputError(f"{trace.num_experts} experts do not divide equally over {gpus} GPUs")
    sizes = set(problem.stops.sizes.tolist())
    if travel.unit == "node" and len(sizes) > 1:
        listed = ", ".join(map(str, sorted(sizes)))
        raise InputError(f"one row per node needs nodes of equal size here; the cluster's have {listed} GPUs")
    experts = np.ascontiguousarray(trace.experts.transpose(1, 0, 2))
    # In a cluster of one node all rows stay inside it: GPUs count.
    unit = "gpu" if problem.stops.count == 1 else travel.unit
    return CoactivationInstance(experts, problem.gpu_of_token, gpus, sizes.pop(), unit, cap, trace.num_experts)


def notes_of(result: Result, instance: CoactivationInstance, problem: Problem) -> Notes:
    """Rows saved against contiguous blocks, the distance to the fewest, and the effect on balance."""
    linear = linear_placement(problem).gpu_of_expert
    before, rows = float(instance.rows(linear).sum()), result.objective
    where = {"gpu": "GPUs", "node": "nodes"}[instance.travel]
    tokens = float((instance.experts >= 0).any(axis=2).sum()) or 1.0
    text = f"{digits(rows / tokens)} per token to other {where}, {digits(before / tokens)} with contiguous blocks"
    if before:
        most = 1 - min(result.bound, before) / before
        text += f" ({share(1 - rows / before)} saved; {at_most(most)} is possible, proven)"
    load = instance.imbalance(result.solution)
    return {"rows": Note(text), "fewest rows": Note(proof_of(result)), BUSIEST: _busiest(load)}


def _busiest(load: np.ndarray) -> Note:
    """load: float64[layer]"""
    return Note(f"{digits(float(load.mean()))} on average over layers, {digits(float(load.max()))} in the worst")


def notes_of_copies(
    holds: np.ndarray, spare: np.ndarray, placement: Placement, instance: CoactivationInstance, problem: Problem
) -> Notes:
    """The number of copies and their use, by how tokens travel.

    holds: bool[layer, expert, gpu]
    spare: int64[gpu] slots of a layer
    """
    count = int(holds.sum()) - holds.shape[0] * holds.shape[1]
    load, travel = Load(problem, placement, problem.travel), problem.travel
    group, where = (problem.stops.of_gpu, "nodes") if instance.travel == "node" else (np.arange(instance.gpus), "GPUs")
    rows = load.traffic.sum(axis=0)[group[:, None] != group].sum() / travel.row_bytes(problem.model)[0]
    tokens = float((instance.experts >= 0).any(axis=2).sum()) or 1.0
    text = (
        f"{count:,} in {holds.shape[0] * int(spare.sum()):,} spare slots, a heuristic without a bound; with them "
        f"{digits(float(rows / tokens))} per token to other {where}"
    )
    if travel.replicas != "fewest":
        text += f" ({travel.replicas_in_words}); they are made for engines that choose copies per token"
    return {"copies": Note(text), BUSIEST: _busiest(1 / balancedness(load.served.sum(axis=1)))}


SYSTEMS = (
    System(
        name="coactivation",
        title="Co-activation",
        summary="experts that fire together share a GPU or node: fewer rows where a row serves several experts",
        paper="DeepEP's way of sending",
        recipe=coactivate,
        options=CoactivationOptions,
    ),
)
