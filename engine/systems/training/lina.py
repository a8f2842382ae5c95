"""Lina in training (Li et al., 2023, §4): all-to-alls before all-reduces by micro-ops, pipelined with the experts, and as many
experts on a GPU as make their computation as long as the all-to-alls, in the host's memory where the GPU's is too small."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from engine.goal import Goal
from engine.placement.experts_per_device import pack_experts, packing_choices
from engine.plan import Offload, Pipeline, Placement, Priority, SendOrder, expert_groups
from engine.problem import MEMORY_SHARE, Problem
from engine.result import Provenance, Stop
from engine.simulate.training import MAX_PARTS, PricedStep, price_step, simulate_step
from engine.simulate.training.offload import fewest_on_host
from engine.simulate.training.step import bytes_per_parameter, step_state_bytes
from engine.systems.base import Draft, Note, Notes, Report, System
from engine.systems.options import Options
from engine.systems.pieces import linear_placement
from engine.systems.training.baselines import Bucket
from engine.systems.training.coordinator import Look, coordinate
from engine.units import seconds, share, size


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
    packing: Literal["best", "lina", "coordinator", "off"] = Field(
        "best",
        description="experts on a GPU, in powers of two: best: what makes the step shortest; lina: the paper's rule, until the "
        "experts fill the all-to-alls, which does not see that packed experts must be all-reduced; coordinator: where the "
        "paper's coordinator stops, which doubles them every four steps by measured micro-ops; off: as few as hold all",
    )
    offload: Literal["off", "full", "packed"] = Field(
        "off",
        title="Experts in host memory",
        description="off: packed experts must fit the GPUs' memory; full: what does not fit lies in the host's memory; packed: "
        "all experts beyond the fewest lie there",
    )
    bucket_mb: Bucket = 25.0


def lina(problem: Problem, options: LinaOptions, stop: Stop, report: Report) -> Draft:
    """Packing first, then the network's policy and the degree that micro-ops of the wanted size give."""
    notes: Notes = {}
    choices = {linear_placement(problem).slots.max(): linear_placement(problem)}
    if options.packing != "off":
        choices = packings(problem, options, notes)
    if options.packing == "coordinator" and len(choices) > 1:
        looks = list(coordinate(problem, choices[min(choices)], lambda placement: _if_it_fits(problem, placement, options)))
        notes |= {f"step {look.step}": _of_look(look) for look in looks}
        choices = {looks[-1].experts: looks[-1].draft.placement} if looks else {min(choices): choices[min(choices)]}
    tried: dict[float, Draft] = {}
    for step, (experts, placement) in enumerate(choices.items()):
        draft = scheduled(problem, placement, options)
        took = simulate_step(draft.plan("trial", Provenance(optimiser="lina")), problem).total
        tried.setdefault(took, draft)
        if len(choices) > 1:
            notes[f"step with {experts} experts on a GPU"] = Note(took, "s")
        report((step + 1) / len(choices), f"tried {experts} experts on a GPU", min(tried))
        if stop():
            break
    best = tried[min(tried)]
    degree = best.pipeline.forward[0] if best.pipeline else 1
    notes["micro-ops of an all-to-all"] = Note(str(degree))
    if best.offload is not None:
        held = step_state_bytes(problem, best.placement, best.offload).max()
        notes["experts in the host's memory"] = Note(
            f"{best.offload.experts} of each GPU and layer; the GPU holds {size(held)} of weights, gradients and momentum, "
            f"not {size(step_state_bytes(problem, best.placement).max())}"
        )
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
    offload = offload_of(problem, placement, options.offload)
    return Draft(placement, SendOrder(mode="concurrent"), priority=priority, pipeline=pipeline, offload=offload)


def offload_of(problem: Problem, placement: Placement, wanted: str) -> Offload | None:
    """The experts that lie in the host's memory.

    wanted: "full" (as few as make room; all where even that is not enough), "packed" (all beyond the fewest that hold every
        expert) or "off"
    """
    most = int(placement.slots.max())
    experts = {"off": 0, "packed": most // expert_groups(placement) * (expert_groups(placement) - 1)}.get(wanted)
    if experts is None:
        choices = [step_state_bytes(problem, placement, Offload(experts=count) if count else None) for count in range(most + 1)]
        fewest = fewest_on_host(np.array(choices), problem.cluster.values("memory") * MEMORY_SHARE, most)
        experts = most if fewest is None else fewest
    return Offload(experts=experts) if experts else None


def _if_it_fits(problem: Problem, placement: Placement, options: LinaOptions) -> Draft | None:
    """The plan's parts with a placement; None if its weights, gradients and momentum are more than a GPU's memory."""
    draft = scheduled(problem, placement, options)
    held = step_state_bytes(problem, placement, draft.offload)
    return draft if (held <= problem.cluster.values("memory") * MEMORY_SHARE).all() else None


def _of_look(look: Look) -> Note:
    """A look of the coordinator for people."""
    if look.packs:
        then = f"doubled by an exchange of {size(look.moved)} a GPU, {seconds(look.exchange)}"
    elif look.ffn < look.alltoall:
        then = "more do not fit"
    else:
        then = "so it stays"
    return Note(
        f"{look.experts} experts on a GPU: {seconds(look.ffn)} of experts to {seconds(look.alltoall)} of all-to-all in a "
        f"micro-op, a step {seconds(look.seconds)}; {then}"
    )


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


def packings(problem: Problem, options: LinaOptions, notes: Notes) -> dict[int, Placement]:
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
    micro_op = options.micro_op_mb * 1e6
    times = np.array([_micro_op_seconds(problem, placement, micro_op) for placement in placements.values()])
    each = model.bytes_per_expert / model.bytes_per_number * bytes_per_parameter(model) * problem.workload.layers
    held = step_state_bytes(problem, linear_placement(problem))
    room = (problem.cluster.values("memory") * MEMORY_SHARE - held).min()
    room = max(0.0, room + choices[0] * each)
    if options.offload != "off":
        room = _room_with_host(problem, placements, options) * each
    packing = pack_experts(*times.T, experts, gpus, each, room).solution
    if packing.experts_per_device is None:
        notes["packing"] = Note(
            f"left out: not even the {size(packing.memory[0])} of weights, gradients and momentum of the fewest experts fit "
            "beside the rest; the times hold as if they did"
        )
        return {int(choices[0]): placements[int(choices[0])]}
    rows = zip(packing.choices, packing.efficiency, packing.memory, packing.needs_offloading, strict=True)
    for choice, efficiency, memory, too_much in rows:
        more = ", more than fits (offload=full keeps the rest in the host's memory)" if too_much else ""
        notes[f"{choice} experts on a GPU"] = Note(f"fill {share(efficiency)} of an all-to-all; {size(memory)}{more}")
    if options.packing == "lina":
        return {packing.experts_per_device: placements[packing.experts_per_device]}
    both = zip(placements.items(), packing.needs_offloading, strict=True)
    return {choice: placement for (choice, placement), too_much in both if not too_much}


def _room_with_host(problem: Problem, placements: dict[int, Placement], options: LinaOptions) -> int:
    """The most experts on a GPU that fit with the host's help; packings with fewer fit too."""
    return max((choice for choice, placement in placements.items() if _if_it_fits(problem, placement, options)), default=0)


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
    for operator, times in zip(priced.graph.operators, priced.seconds, strict=True):
        if operator.phase == "forward" and operator.kind in totals:
            totals[operator.kind] += times[part].max() / placement.layers
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
