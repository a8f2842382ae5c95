"""Lina in training (Li et al., 2023, §4): all-to-alls before all-reduces by micro-ops, pipelined with the experts, and as many
experts on a GPU as make their computation as long as the all-to-alls."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from engine.goal import Goal
from engine.placement.experts_per_device import pack_experts, packing_choices
from engine.plan import Pipeline, Placement, Priority, SendOrder, expert_groups
from engine.problem import MEMORY_SHARE, Problem
from engine.result import Provenance, Stop
from engine.simulate.training import MAX_PARTS, PricedStep, price_step, simulate_step
from engine.simulate.training.step import bytes_per_parameter, step_state_bytes
from engine.systems.base import Draft, Note, Notes, Report, System
from engine.systems.options import Options
from engine.systems.pieces import linear_placement
from engine.systems.training.baselines import Bucket
from engine.units import share, size


class LinaOptions(Options):
    micro_op_mb: float = Field(
        30.0,
        ge=0.01,
        le=1e6,
        title="Micro-op size (MB)",
        description="MB of a micro-op of an all-to-all or all-reduce (the paper's 30)",
    )
    policy: Literal["priority", "naive", "fixed", "fair"] = Field(
        "priority",
        title="Priority policy",
        description="priority: Lina; naive: all-to-alls first, but nothing cut (Fig. 7b); fixed: all-reduces only between "
        "pairs of all-to-alls (Fig. 7c); fair: both share the network (Fig. 7a)",
    )
    pipelining: bool = Field(True, description="cut all-to-alls into micro-ops too, and the experts with them (Fig. 8b)")
    packing: Literal["best", "lina", "off"] = Field(
        "best",
        description="experts on a GPU, in powers of two: best: what makes the step shortest; lina: the paper's rule, until the "
        "experts fill the all-to-alls, which does not see that packed experts must be all-reduced; off: as few as hold all",
    )
    bucket_mb: Bucket = 25.0


def lina(problem: Problem, options: LinaOptions, stop: Stop, report: Report) -> Draft:
    """Packing first, then the network's policy and the degree that micro-ops of the wanted size give."""
    notes: Notes = {}
    choices = {linear_placement(problem).slots.max(): linear_placement(problem)}
    if options.packing != "off":
        choices = packings(problem, options.micro_op_mb * 1e6, options.packing == "lina", notes)
    tried: dict[float, Draft] = {}
    for step, (experts, placement) in enumerate(choices.items()):
        draft = scheduled(problem, placement, options)
        seconds = simulate_step(draft.plan("trial", Provenance(optimiser="lina")), problem).total
        tried.setdefault(seconds, draft)
        if len(choices) > 1:
            notes[f"step with {experts} experts on a GPU"] = Note(seconds, "s")
        report((step + 1) / len(choices), f"tried {experts} experts on a GPU", min(tried))
        if stop():
            break
    best = tried[min(tried)]
    degree = best.pipeline.forward[0] if best.pipeline else 1
    notes["micro-ops of an all-to-all"] = Note(str(degree))
    return replace(best, notes=notes, cancelled=stop())


def scheduled(problem: Problem, placement: Placement, options: LinaOptions) -> Draft:
    """The network's policy and the micro-ops, for a placement."""
    micro_op, policy, layers = options.micro_op_mb * 1e6, options.policy, placement.layers
    degree = _degree(price_step(problem, placement), micro_op) if options.pipelining else 1
    pipeline = Pipeline(forward=(degree,) * layers, backward=(degree,) * layers) if degree > 1 else None
    cut = policy == "priority"
    priority = Priority(
        policy="priority" if policy in ("priority", "naive") else policy,
        micro_op=micro_op if cut else None,
        bucket=None if cut else options.bucket_mb * 1e6,
    )
    return Draft(placement, SendOrder(mode="concurrent"), priority=priority, pipeline=pipeline)


def _degree(priced: PricedStep, micro_op: float) -> int:
    """Parts of the largest all-to-all, so that none is larger than a micro-op."""
    exchanges = [place for place, operator in enumerate(priced.graph.operators) if operator.kind == "dispatch"]
    largest = priced.sent[exchanges].max(initial=0.0)
    return min(MAX_PARTS, max(1, math.ceil(largest / micro_op)))


def packed_placement(problem: Problem, experts_per_gpu: int) -> Placement:
    """Experts in contiguous blocks of so many on every GPU, starting over as soon as all are placed: groups of neighbours
    that hold every expert once."""
    gpus, experts = len(problem.cluster.gpus), problem.workload.num_experts
    slots = np.tile(np.arange(gpus * experts_per_gpu) % experts, (problem.workload.layers, 1))
    return Placement.from_slots(slots, np.full(gpus, experts_per_gpu), experts, linear_placement(problem).model_layers)


def packings(problem: Problem, micro_op: float, by_the_paper: bool, notes: Notes) -> dict[int, Placement]:
    """The placements to try, by experts on a GPU: all that fit, or the one of the paper's rule. Experts stay as they are where
    they do not divide evenly."""
    model, gpus, experts = problem.model, len(problem.cluster.gpus), problem.workload.num_experts
    choices = packing_choices(experts, gpus)
    if problem.graph is not None or any(experts % choice or gpus % (experts // choice) for choice in choices):
        notes["packing"] = Note(f"left out: {experts} experts on {gpus} GPUs make no groups of equal GPUs")
        return {int(choices[0]): linear_placement(problem)}
    placements = {int(choice): packed_placement(problem, int(choice)) for choice in choices}
    unknown = [choice for choice, placement in placements.items() if choice > choices[0] and _lacks_groups(problem, placement)]
    if unknown:
        notes["packing"] = Note(f"left out: {_lacks_groups(problem, placements[unknown[0]])}")
        return {int(choices[0]): placements[int(choices[0])]}
    seconds = np.array([_micro_op_seconds(problem, placement, micro_op) for placement in placements.values()])
    each = model.bytes_per_expert / model.bytes_per_number * bytes_per_parameter(model) * problem.workload.layers
    held = step_state_bytes(problem, linear_placement(problem))
    room = (problem.cluster.values("memory") * MEMORY_SHARE - held).min()
    packing = pack_experts(*seconds.T, experts, gpus, each, max(0.0, room + choices[0] * each)).solution
    if packing.experts_per_device is None:
        notes["packing"] = Note(
            f"left out: not even the {size(packing.memory[0])} of weights, gradients and momentum of the fewest experts fit "
            "beside the rest; the times hold as if they did"
        )
        return {int(choices[0]): placements[int(choices[0])]}
    rows = zip(packing.choices, packing.efficiency, packing.memory, packing.needs_offloading, strict=True)
    for choice, efficiency, memory, too_much in rows:
        more = ", more than fits (the paper would move it to the host, which is not modelled)" if too_much else ""
        notes[f"{choice} experts on a GPU"] = Note(f"fill {share(efficiency)} of an all-to-all; {size(memory)}{more}")
    if by_the_paper:
        return {packing.experts_per_device: placements[packing.experts_per_device]}
    both = zip(placements.items(), packing.needs_offloading, strict=True)
    return {choice: placement for (choice, placement), too_much in both if not too_much}


def _lacks_groups(problem: Problem, placement: Placement) -> str | None:
    """Why the costs do not know the collectives inside and across a placement's groups of GPUs, None where they do."""
    gpus = len(problem.cluster.gpus)
    apart = gpus // expert_groups(placement)
    groups = [list(range(first, first + apart)) for first in range(0, gpus, apart)]
    groups += [list(range(first, gpus, apart)) for first in range(apart)]  # the same experts
    parts = dict.fromkeys(problem.cluster.part(group) for group in groups if len(group) > 1)
    return next((reason for part in parts if (reason := problem.cost.lacks_network(part))), None)


def _micro_op_seconds(problem: Problem, placement: Placement, micro_op: float) -> tuple[float, float]:
    """Seconds of a layer's micro-op of the experts and of its all-to-all in the forward pass, mean over the layers."""
    priced = price_step(problem, placement)
    part, totals = _degree(priced, micro_op) - 1, {"experts": 0.0, "dispatch": 0.0}
    for operator, seconds in zip(priced.graph.operators, priced.seconds, strict=True):
        if operator.phase == "forward" and operator.kind in totals:
            totals[operator.kind] += seconds[part].max() / placement.layers
    return totals["experts"], totals["dispatch"]


SYSTEMS = (
    System(
        name="lina",
        title="Lina (training)",
        summary="all-to-alls before all-reduces by micro-ops, pipelined with packed experts",
        paper="Lina §4",
        recipe=lina,
        options=LinaOptions,
        goals=(Goal.TRAINING,),
        preselected=True,
    ),
)
