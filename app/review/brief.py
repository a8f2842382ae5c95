"""The brief of a plan: everything that a decision needs, computed from the plan and its inputs alone, and in sentences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from app.charts.theme import NAME, shortened
from engine.compare.baseline import baseline_of, travelling_like
from engine.compare.figures import Metrics, Migration, gap_over_placements, metrics, migration, proof_of_plan
from engine.compare.standing import Risk, Standing, gain_in_words, standing_of
from engine.goal import Goal
from engine.launch.preparation.launch import PLACES
from engine.plan import Offload, Overlap, Pipeline, Placement, Plan, Priority, SendOrder, Travel
from engine.problem import Problem
from engine.result import not_bounded
from engine.simulate import simulate
from engine.store.team import Run
from engine.timeline import Timeline
from engine.units import ratio, seconds, share, size

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
    """One sentence for each part of the plan. move: cost of deploying it, if known."""
    sentences = [_placement(plan.placement, plan.goal is Goal.TWO_MODELS)]
    if plan.goal is Goal.TWO_MODELS:
        sentences.append(_beside(plan.placement, plan.placement_b))
    if plan.token_gpus is not None:
        sentences.append("Keeps each model to GPUs of its own: its tokens start there too.")
    if move is not None:
        sentences.append(_move(move))
    if plan.goal is not Goal.TRAINING:
        sentences.append(_order(plan.send_order, plan.send_order_b))
        sentences += _travel(plan.travel, plan.placement.single)
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
        sentences += [*_pipeline(plan.pipeline), *_overlap(plan.overlap), *_offload(plan.offload), _priority(plan.priority)]
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
        f"weights, {seconds(move.seconds)} layer after layer."
    )


def _order(order: SendOrder, second: SendOrder | None) -> str:
    phases = [schedule.phases for send_order in (order, second) if send_order for schedule in send_order.dispatch]
    mean = f"{np.mean(phases):.3g}" if phases else ""
    manner = ORDERS[order.mode].format(phases="one phase" if mean == "1" else f"{mean} phases")
    return f"Sends the bytes of every dispatch and combine {manner}."


def _travel(travel: Travel | None, single: bool) -> list[str]:
    """single: True if no expert has a copy, so that no rule is needed"""
    if travel is None:
        return []
    sentence = f"Counts on an engine that sends {ROWS[travel.unit]}"
    formats = [f"{dtype} {way}" for dtype, way in ((travel.dispatch, "in dispatch"), (travel.combine, "in combine")) if dtype]
    said = [sentence + (f", as {' and '.join(formats)}" if formats else "") + "."]
    if travel.replicas == "fewest":
        said.append(f"Has it send each token to the copies of its experts that touch fewest {TOUCHED[travel.unit]}.")
    elif travel.replicas and not single:
        said.append(f"Counts on an engine that sends {travel.replicas_in_words}.")
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


def _offload(offload: Offload | None) -> list[str]:
    if offload is None:
        return []
    return [
        f"Keeps {_count(offload.experts, 'expert')} of every GPU and layer in the host's memory: copied in for each pass, and "
        f"updated by the host."
    ]


def _priority(priority: Priority) -> str:
    cut = (
        f"fused into buckets of {size(priority.bucket)}"
        if priority.bucket is not None
        else f"cut into pieces of at most {size(priority.micro_op)}"
    )
    return f"All-reduces of gradients are {cut} and {POLICIES[priority.policy]}."


Simulate = Callable[[Plan, Problem], Timeline]


@dataclass(frozen=True, eq=False)
class Scored:
    """A plan with its simulated timeline and figures."""

    plan: Plan
    timeline: Timeline
    figures: Metrics


@dataclass(frozen=True, eq=False)
class Brief:
    """A plan against its baseline.

    own: the plan, in a pass or a training step
    baseline: the plan that it is compared with
    standing: the headline for the goal that it was saved for
    """

    problem: Problem
    own: Scored
    baseline: Scored
    standing: Standing

    @property
    def words(self) -> list[str]:
        return words(self.own.plan, self.standing.move)

    @property
    def risks(self) -> tuple[Risk, ...]:
        """All that is held out, worst first."""
        return self.standing.risks or ()


def brief_of(plan: Plan, problem: Problem, simulate: Simulate = simulate, in_use: Plan | None = None) -> Brief:
    """Return the brief of a pass or a training step, with nothing held out. Raises InputError when the plan does not fit.

    in_use: the plan of the placement in use, if it is known
    """
    problem = travelling_like(plan, problem)
    own, baseline = _scored(plan, problem, simulate), _scored(baseline_of(problem, in_use), problem, simulate)
    move = None
    if problem.goal is Goal.INFERENCE:
        before, after = baseline.plan.placement, plan.placement
        move = migration(before, after, problem, baseline.figures.total, own.figures.total)
    standing = standing_of(plan, own.figures, baseline.plan, baseline.figures, problem, move)
    return Brief(problem, own, baseline, standing)


def _scored(plan: Plan, problem: Problem, simulate: Simulate) -> Scored:
    timeline = simulate(plan, problem)
    return Scored(plan, timeline, metrics(plan, problem, timeline))


def named_pair(brief: Brief) -> dict[str, Timeline]:
    """The timelines of a plan and of its baseline, by unlike names."""
    name, base = brief.own.plan.name, brief.baseline.plan.name
    return {name: brief.own.timeline, base if base != name else f"{base} (baseline)": brief.baseline.timeline}


def parts_of(scored: Scored) -> dict[str, float]:
    """Seconds by kind of event in a pass; of a training step, and of two models, by what overlaps."""
    if scored.plan.goal is Goal.INFERENCE:
        return {kind: value for kind, value in scored.figures.seconds.items() if value}
    return {kind: value for kind, value in scored.timeline.decomposition().items() if value}


def headline(brief: Brief) -> str:
    """The decision to be made, in a sentence, without the plan's name, which stands above it and in the chart."""
    standing = replace(brief.standing, deployed=shortened(brief.standing.deployed, NAME))
    return f"{seconds(standing.seconds)} per {standing.span}, {standing.against}"


def bound_in_words(brief: Brief) -> list[str]:
    """The gain that any plan could have at most, as far as it is proven."""
    figures, claim = brief.own.figures, brief.own.plan.claim
    what = "schedule" if brief.problem.goal is Goal.TRAINING else "order of sends"
    if figures.unbounded:
        sentences = [f"Order of sends {not_bounded(figures.unbounded)}."]
    else:
        bound = seconds(figures.order_bound)
        sentences = [f"No {what} of this placement is faster than {bound}: {_above(figures.order_gap)}."]
    if (gap := gap_over_placements(brief.own.plan, figures)) is not None:
        sentences.append(
            "According to its optimiser (not rechecked here), no other placement with as many slots per GPU and no replicas is "
            f"faster than {seconds(figures.bound)}: {_above(gap)}."
        )
    elif figures.bound is None and claim is not None and not (figures.unbounded and claim.scope == "order"):
        sentences.append("Its optimiser's own bound was computed for other inputs, or cannot be true, and is not used here.")
    proof = proof_of_plan(brief.own.plan, figures)
    stopped = f" ({proof.stopped})" if proof.stopped else ""
    optimal = f"Nothing about this plan is proven optimal{stopped}."
    if proof.proven not in ("nothing", "no bound on order") or proof.is_near:
        optimal = f"Proven optimal: {proof.in_words}."
    return [*sentences, optimal]


def _above(gap: float) -> str:
    return f"the plan is {share(gap)} above that" if gap > 1e-9 else "the plan meets that"


def cost_in_words(brief: Brief) -> str:
    """The cost of deploying the plan."""
    if (move := brief.standing.move) is None:
        return "What deploying it costs is not computed for two models or a training step."
    if not move.copies:
        return "Nothing has to move."
    moving = f"{move.copies:,} expert copies, {size(move.bytes)}, {seconds(move.seconds)} of moving"
    return f"{moving}; it pays back {brief.standing.payback}."


def risk_in_words(brief: Brief) -> str:
    """The gain or loss on all that is held out."""
    standing = brief.standing
    if not standing.is_held_out:
        if standing.risks is None:
            return "Not scored yet on the other recordings that are open: judge the plan."
        return "Nothing was held out: what it gains under other traffic is unknown."
    worst = standing.risks[0]
    more = f", the worst of {len(standing.risks)} held-out recordings" if len(standing.risks) > 1 else ", held out"
    phase = f" Judged on {standing.other_phase}, for want of other recordings." if standing.other_phase else ""
    return f"On {worst.recording}{more}: {seconds(worst.seconds)}, {gain_in_words(worst.gain, standing.deployed)}.{phase}"


def launches_in_words(runs: Sequence[Run]) -> str:
    """Measured over predicted time of the newest launch of the plan, and the span of all; runs: newest first."""
    done = [run for run in runs if run.predicted and run.measured]
    if not done:
        return "Not measured yet: no launch of this plan has ended."
    newest, factors = done[0], [run.measured / run.predicted for run in done]
    where = PLACES.get(newest.place, newest.place)
    text = (
        f"Launched on {where}: {seconds(newest.measured)} for {seconds(newest.predicted)} predicted there, {ratio(factors[0])}"
    )
    more = f"; {len(done)} launches, {ratio(min(factors))} to {ratio(max(factors))}" if len(done) > 1 else ""
    return f"{text}{more}."
