"""What a rank needs in memory for a forward pass through MoE layers, before it runs."""

from collections.abc import Sequence
from typing import NamedTuple

from engine.launch.preparation.memory import RankMemory
from engine.launch.rank.instructions import POOL_STRIDE, RankInstructions
from engine.launch.rank.tiers import uses_nodes
from engine.model import MoEModel
from engine.plan import Placement, Plan
from engine.workload import RoutingTrace

LARGEST_MEASURED = 2.0
"""Rows that the machine is measured with at the start, at most, relative to the mean rank's."""


class Part(NamedTuple):
    """One model of a plan. sent, received: copies of the rank that sends (receives) most in a layer"""

    plan: Plan
    model: MoEModel
    trace: RoutingTrace
    placement: Placement
    sent: float
    received: float


def forward_memory(instructions: RankInstructions, traces: Sequence[RoutingTrace]) -> RankMemory:
    """Of the fullest rank, which is taken to be the fullest in everything; of several plans one runs at a time."""
    models = [instructions.model] if instructions.model_b is None else [instructions.model, instructions.model_b]
    pools = [_pool(model, traces[0].layers) for model in {model.digest: model for model in models}.values()]
    plans = [_parts(plan, models, traces, instructions.ranks) for plan in instructions.plans]
    at_work = max(sum(map(_at_work, parts)) for parts in plans)
    # Every plan keeps the output of its last pass, and all its routes.
    outputs = sum(_output(part, instructions.ranks) for parts in plans for part in parts)
    compared = max(_compared(part) for parts in plans for part in parts)
    return RankMemory(
        device=sum(pools) + outputs + at_work,
        compared=max(0.0, compared - at_work),
        host=sum(trace.experts.nbytes + 4.0 * trace.tokens for trace in traces)
        + sum(_routes(part) for parts in plans for part in parts),
        # Random numbers are made in 32 bits.
        through_host=4.0 * max(pool / model.bytes_per_number for pool, model in zip(pools, models, strict=False))
        + 4.0 * max(trace.tokens * model.d_model for trace, model in zip(traces, models, strict=True)),
        # In both directions, each rounded up to a power of two.
        staged=max(sum(2.0 * (p.sent + p.received) * p.model.bytes_per_token for p in parts) for parts in plans),
    )


def _parts(plan: Plan, models: Sequence[MoEModel], traces: Sequence[RoutingTrace], ranks: int) -> list[Part]:
    placements = (plan.placement, plan.placement_b)
    return [
        Part(plan, model, trace, placement, *_copies(plan, trace, placement, ranks))
        for model, trace, placement in zip(models, traces, placements, strict=False)
    ]


def _copies(plan: Plan, trace: RoutingTrace, placement: Placement, ranks: int) -> tuple[float, float]:
    """(sent, received) of the busiest rank in a layer."""
    demand = trace.demand(ranks)
    # Where tokens choose their copies one may serve all that choose its expert.
    chooses = plan.travel is not None and plan.travel.replicas is not None
    share = placement.share > 0 if chooses else placement.share
    received = float((demand.sum(axis=1)[:, None, :] @ share).max())
    return float(demand.sum(axis=2).max()) if plan.execution == "vanilla" else received, received


def _pool(model: MoEModel, layers: int) -> float:
    """What all experts are cut from, and the routers."""
    strides = POOL_STRIDE * (layers * model.experts + 1)
    return model.bytes_per_expert + (strides + layers * model.d_model * model.experts) * model.bytes_per_number


def _at_work(part: Part) -> float:
    """A layer's experts, and the rows at hand."""
    model, number = part.model, part.model.bytes_per_number
    computed = max(part.received, LARGEST_MEASURED * part.trace.tokens * model.experts_per_token / part.placement.gpus)
    # What is passed on for others lies in a pool: in each of two hops about as much as a rank sends or receives itself.
    copies = 9.0 if uses_nodes(part.plan) else 6.0
    total = float(part.placement.slots.max()) * model.bytes_per_expert
    total += copies * (part.sent + part.received) * model.bytes_per_token
    # Inner rows before, in and after the activation.
    total += computed * (model.ffn_matrices + 1) * model.d_ff * number
    # All tokens, as they are made, and after both all-gathers of a context-coherent pass.
    gathered = 1 if part.plan.execution == "vanilla" else 4
    return total + part.trace.tokens * model.d_model * (4 + number * gathered)


def _output(part: Part, ranks: int) -> float:
    held = part.trace.tokens / (ranks if part.plan.execution == "vanilla" else 1)
    return held * part.model.bytes_per_token


def _compared(part: Part) -> float:
    """On rank 0 all tokens of all ranks with all that becomes of them in a layer, expert after expert, in 32 bits; a model in
    shorter numbers is computed in those first."""
    model, wide = part.model, max(part.model.bytes_per_number, 4.0)
    gathered = 5 if part.plan.execution == "vanilla" else 8
    rows = float(part.trace.demand(1).max())
    total = part.trace.tokens * (model.d_model * (8 + gathered * wide) + 2 * 4.0 * model.experts)
    total += rows * (model.d_model * (8 + 3 * wide) + (model.ffn_matrices + 1) * model.d_ff * wide)
    return total + model.bytes_per_expert * (1 + wide / model.bytes_per_number) + 8.0 * part.trace.experts.size


def _routes(part: Part) -> float:
    """Token, choice, expert and rank of every copy of all ranks in both exchanges of every layer, as int64, and as much
    again of one layer while it is laid out."""
    copies = part.trace.tokens * part.trace.k
    return 64.0 * copies * (part.trace.layers + 2)
