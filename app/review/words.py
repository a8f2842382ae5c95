"""What a plan does, in sentences for whoever decides on it."""

import numpy as np

from engine.goal import Goal
from engine.plan import Overlap, Pipeline, Placement, Plan, Priority, SendOrder, Travel
from engine.simulate.migration import Migration
from engine.units import seconds, size

ORDERS = {
    "matched": "in {phases} per layer, in which a GPU sends to at most one other and receives from at most one",
    "joint": "in {phases} per layer, both models' sends together, in which a GPU sends to at most one other and receives "
    "from at most one",
    "shared": "in {phases} per layer, in which a GPU serves several others at once, each at a constant rate",
    "two-tier": "in {phases} per layer, in which a node sends to at most one other over all its ports, and its GPUs relay "
    "for each other over their links",
    "sequential": "one after another: every GPU works through its own list of receivers",
    "concurrent": "all at once, a plain all-to-all",
}
ROWS = {
    "copies": "every copy of a token on its own",
    "gpu": "a token once to each GPU that has one of its experts",
    "node": "a token once to each node that has one of its experts, and spreads it there over the node's links",
}
TOUCHED = {"gpu": "GPUs", "node": "nodes"}
POLICIES = {
    "fair": "share the network fairly with all-to-alls",
    "priority": "wait for all-to-alls, which go first",
    "fifo": "take the network in the order of their arrival",
    "fixed": "take the network in a fixed order",
}


def words(plan: Plan, move: Migration | None) -> list[str]:
    """One sentence a part of the plan. move: what deploying it costs, where that is known."""
    sentences = [_placement(plan.placement, plan.goal is Goal.TWO_MODELS)]
    if plan.goal is Goal.TWO_MODELS:
        sentences.append(_beside(plan.placement, plan.placement_b))
    if plan.token_gpus is not None:
        sentences.append("Keeps each model to GPUs of its own: its tokens start there too.")
    if move is not None:
        sentences.append(_move(move))
    if plan.goal is not Goal.TRAINING:
        sentences.append(_order(plan.send_order, plan.send_order_b))
        sentences += _travel(plan.travel)
    if plan.execution == "context-coherent":
        sentences.append(
            "Keeps the contexts of all tokens on every GPU: one all-gather spreads the prompts, a token goes on from the GPU "
            "of its first expert, and one all-gather ends the pass."
        )
    if plan.reaction is not None:
        sentences.append(
            f"Is a start: at run time Lina predicts the next experts from the last {plan.reaction.path_length} of a token's "
            f"path and places up to {plan.reaction.max_experts_per_device} experts per device anew."
        )
    if plan.goal is Goal.TRAINING:
        sentences += [*_pipeline(plan.pipeline), *_overlap(plan.overlap), _priority(plan.priority)]
    return sentences


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _placement(placement: Placement, first_of_two: bool) -> str:
    copies = (placement.share > 0).sum(axis=2)
    whose = "the first model's " if first_of_two else ""
    sentence = (
        f"Places {whose}{_count(placement.experts, 'expert')} of {_count(placement.layers, 'MoE layer')} on "
        f"{_count(placement.gpus, 'GPU')}"
    )
    if placement.single:
        sentence += ", every expert on one GPU"
    else:
        sentence += (
            f", {int((copies > 1).sum()):,} of {copies.size:,} with replicas (up to "
            f"{_count(int(copies.max()), 'copy').replace('copys', 'copies')})"
        )
    least, most = int(placement.slots.min()), int(placement.slots.max())
    held = _count(most, "expert") if least == most else f"{least} to {most} experts"
    return f"{sentence}; each GPU holds {held} per layer."


def _beside(placement: Placement, second: Placement) -> str:
    return (
        f"Puts the second model's {_count(second.experts, 'expert')} of {_count(second.layers, 'MoE layer')} on the same "
        f"GPUs, beside the first model's."
    )


def _move(move: Migration) -> str:
    if not move.copies:
        return "Moves no expert: every one stays where it is."
    return (
        f"Moves {move.copies:,} expert {'copy' if move.copies == 1 else 'copies'} to another GPU: {size(move.bytes)} of "
        f"weights, {seconds(move.seconds)} through the busiest port."
    )


def _order(order: SendOrder, second: SendOrder | None) -> str:
    phases = [schedule.phases for send_order in (order, second) if send_order for schedule in send_order.dispatch]
    mean = f"{np.mean(phases):.3g}" if phases else ""
    manner = ORDERS[order.mode].format(phases="one phase" if mean == "1" else f"{mean} phases")
    return f"Sends the bytes of every dispatch and combine {manner}."


def _travel(travel: Travel | None) -> list[str]:
    if travel is None:
        return []
    sentence = f"Counts on an engine that sends {ROWS[travel.unit]}"
    formats = [
        f"{dtype} {way}" for dtype, way in ((travel.dispatch, "in dispatch"), (travel.combine, "in combine")) if dtype
    ]
    said = [sentence + (f", as {' and '.join(formats)}" if formats else "") + "."]
    if travel.replicas:
        said.append(f"Has it send each token to the copies of its experts that touch fewest {TOUCHED[travel.unit]}.")
    return said


def _pipeline(pipeline: Pipeline | None) -> list[str]:
    if pipeline is None or max(pipeline.forward + pipeline.backward) == 1:
        return []
    spans = [
        f"{min(parts)}" if min(parts) == max(parts) else f"{min(parts)} to {max(parts)}"
        for parts in (pipeline.forward, pipeline.backward)
    ]
    return [
        f"Cuts the tokens of every MoE layer into {spans[0]} parts forward and {spans[1]} backward, so that one part is "
        f"sent while another is computed."
    ]


def _overlap(overlap: Overlap | None) -> list[str]:
    if overlap is None:
        return []
    sentences = []
    if overlap.ranges:
        parts = [stretch.parts for stretch in overlap.ranges]
        sentences.append(
            f"Cuts {_count(len(parts), 'stretch').replace('stretchs', 'stretches')} of the forward pass into up to "
            f"{max(parts)} parts that run as a pipeline."
        )
    if overlap.under:
        sentences.append(
            f"Runs {_count(len(overlap.under), 'weight-gradient operator')} under all-to-alls of the backward pass."
        )
    if overlap.irregular:
        sentences.append("Sends only real tokens, not buffers filled up to the capacity.")
    return sentences


def _priority(priority: Priority) -> str:
    cut = (
        f"fused into buckets of {size(priority.bucket)}"
        if priority.bucket is not None
        else f"cut into pieces of at most {size(priority.micro_op)}"
    )
    return f"All-reduces of gradients are {cut} and {POLICIES[priority.policy]}."
