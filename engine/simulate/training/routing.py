"""Where the tokens of a training step go under a placement: what every GPU sends, and how many rows every expert gets."""

from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.plan import Placement
from engine.problem import Problem
from engine.workload import RoutingTrace


@dataclass(frozen=True, eq=False)
class Routing:
    """One step's tokens, layer by layer.

    groups: how many copies of all experts there are; the GPUs of a copy are neighbours and exchange tokens only among
        themselves (expert packing, Lina §4.2)
    traffic: float64[layer, src, dst] bytes of the dispatch, the diagonal is what stays
    rows: float64[layer, gpu, slot]: token copies that every slot's expert gets; nan = no such slot
    even: whether every GPU sends every other of its group as much, and every expert gets as many
    """

    groups: int
    traffic: np.ndarray
    rows: np.ndarray
    even: bool


def expert_groups(placement: Placement) -> int:
    """How many groups of neighbouring GPUs hold every expert exactly once in every layer; 1 where replicas lie otherwise."""
    slots, gpus = placement.slots, placement.gpus
    copies = slots[0].sum() / placement.experts
    groups = int(copies)
    if groups < 2 or groups != copies or gpus % groups or np.any(slots.sum(axis=1) != slots[0].sum()):
        return 1
    size = gpus // groups
    for row in placement.experts_of_gpu:
        for first in range(0, gpus, size):
            held = [expert for experts in row[first : first + size] for expert in experts]
            if sorted(held) != list(range(placement.experts)):
                return 1
    return groups


def route(problem: Problem, placement: Placement, irregular: bool) -> Routing:
    """The routing of `problem.step` under a placement.

    Balanced, or as recorded and scaled to the step's tokens, every rank by itself. No more than the capacity is kept of
    what one GPU has for one expert; unless `irregular`, buffers are filled up to the capacity and sent whole (Lancet §6).
    """
    step, model, gpus = problem.step, problem.model, len(problem.cluster.gpus)
    copies = step.tokens * model.experts_per_token
    demand = np.full((placement.layers, gpus, placement.experts), copies / placement.experts)
    if step.routing == "recorded":
        # A rank for which nothing was recorded is taken to route like a balanced one.
        held = problem.demand.sum(axis=2, keepdims=True)
        demand = np.where(held > 0, copies * problem.demand / np.where(held > 0, held, 1), demand)
    capacity = step.capacity(model)
    kept = np.minimum(demand, capacity)
    if np.isfinite(capacity) and not irregular:
        kept = np.full_like(demand, capacity)
    return _routing(kept, placement, model.bytes_per_token)


def route_parts(problem: Problem, placement: Placement, parts: int) -> list[Routing]:
    """The routing of every part when each rank's recorded tokens are cut into `parts` runs of equal length, in their order,
    sequence after sequence. Real tokens only; an expert that an earlier part has filled takes no more from a later
    one, so that exactly the tokens of the uncut step are kept (capacity passing, Lancet §2.3).

    Raises InputError unless the routing is recorded, token by token.
    """
    trace, step, model, gpus = problem.workload, problem.step, problem.model, len(problem.cluster.gpus)
    if step.routing != "recorded" or not isinstance(trace, RoutingTrace):
        raise InputError("the parts of a step are only known from a routing log; set routing to recorded and open one")
    rank = trace.rank_of_token(gpus)
    order = np.lexsort((np.arange(trace.tokens), trace.sequence if trace.sequence is not None else rank, rank))
    held = np.bincount(rank, minlength=gpus)
    place = np.empty(trace.tokens, dtype=np.int64)
    place[order] = np.arange(trace.tokens) - np.repeat(np.cumsum(held) - held, held)
    part = place * parts // np.maximum(held[rank], 1)
    counts = np.zeros((parts, trace.layers, gpus, trace.num_experts))
    for layer in range(trace.layers):
        chosen = trace.experts[:, layer, :].astype(np.int64)
        key = np.where(chosen >= 0, ((part * gpus + rank) * trace.num_experts)[:, None] + chosen, -1)
        flat = np.bincount(key[key >= 0], minlength=parts * gpus * trace.num_experts)
        counts[:, layer] = flat.reshape(parts, gpus, trace.num_experts)
    routed = counts.sum(axis=(0, 3), keepdims=True)
    copies = step.tokens * model.experts_per_token
    fair = np.full_like(counts, copies / parts / trace.num_experts)
    scaled = np.where(routed > 0, copies * counts / np.where(routed > 0, routed, 1), fair)
    filled = np.minimum(np.cumsum(scaled, axis=0), step.capacity(model))
    return [_routing(kept, placement, model.bytes_per_token) for kept in np.diff(filled, axis=0, prepend=0.0)]


def _routing(kept: np.ndarray, placement: Placement, bytes_per_token: float) -> Routing:
    """kept: float64[layer, src, expert] token copies that are sent."""
    gpus, groups, share = placement.gpus, expert_groups(placement), placement.share
    size = gpus // groups
    traffic, rows = np.zeros((placement.layers, gpus, gpus)), []
    for first in range(0, gpus, size):
        here = slice(first, first + size)
        own = (
            share[:, :, here] * groups
        )  # of several groups each holds one of an expert's replicas, which takes all here
        traffic[:, here, here] = kept[:, here, :] @ own * bytes_per_token
        rows.append(np.einsum("lre,leg->lge", kept[:, here, :], own))
    per_expert = np.concatenate(rows, axis=1)
    slots = np.full((placement.layers, gpus, placement.slots.max()), np.nan)
    for layer, row in enumerate(placement.experts_of_gpu):
        for gpu, experts in enumerate(row):
            own = sorted(set(experts))  # an expert twice on one GPU is one expert with all its rows
            slots[layer, gpu, : len(own)] = per_expert[layer, gpu, own]
    blocks = [traffic[:, first : first + size, first : first + size] for first in range(0, gpus, size)]
    even = not np.isnan(slots).any() and all(_same(block) for block in (slots, *blocks))
    return Routing(groups, traffic, slots, even)


def _same(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= 1e-9 * np.abs(values).max(initial=0))
