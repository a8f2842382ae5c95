"""Shared by all writers of plans: the file with its lines and notes, the rules that all engines have, and the parts of a plan
that no file of a serving engine can carry: everything but the placement of its experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError
from engine.model import MoEModel
from engine.plan import Placement, Plan, Travel, redundant_experts

PROJECT = "export its even projection instead (--even)"
_ORDERS = {
    "sequential": "one send after another",
    "matched": "phases in which each GPU has one peer",
    "shared": "phases that share the ports",
    "joint": "phases of two models together",
    "two-tier": "phases between nodes",
}


@dataclass(frozen=True)
class Export:
    """A plan as an engine takes it.

    files: content by file name
    lines: to add to the engine's command line or configuration, as they are typed
    notes: the parts of the plan that the engine can not carry, and its conditions, for people
    """

    files: Mapping[str, bytes]
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """The content of one file with its lines and notes; see `Export`."""

    content: bytes
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_model(placement: Placement, model: MoEModel) -> None:
    """Raise InputError unless the placement is of this model's own MoE layers and experts."""
    for noun, mine, theirs in (
        ("MoE layers", placement.layers, len(model.moe_layers)),
        ("experts per layer", placement.experts, model.experts),
    ):
        if mine != theirs:
            raise InputError(f"the plan places {mine} {noun}, but the model {model.name} has {theirs}")
    for layer, (said, own) in enumerate(zip(placement.model_layers, model.moe_layers, strict=True)):
        if said != own:
            raise InputError(f"layer {layer} of the plan is model layer {said}, of the model {model.name} it is {own}")


def even_slots(placement: Placement, model: MoEModel, engine: str) -> NDArray[np.int64]:
    """The expert of every slot, GPU after GPU, int64[MoE layer, slot], of a plan with as many slots on every GPU in every
    layer and no expert twice on a GPU. Raises InputError for another plan, which names the layers and GPUs at fault.

    engine: its name, for messages
    """
    check_model(placement, model)
    refuse_uneven(placement, engine)
    for layer, row in enumerate(placement.experts_of_gpu):
        for gpu, held in enumerate(row):
            if len(set(held)) < len(held):
                expert = next(expert for expert in held if held.count(expert) > 1)
                raise InputError(
                    f"{engine} can not use a second copy of an expert on one GPU, but {_layer(placement, layer)} has "
                    f"expert {expert} twice on GPU {gpu}; {PROJECT}"
                )
    return np.array([[expert for held in row for expert in held] for row in placement.experts_of_gpu], dtype=np.int64)


def refuse_uneven(placement: Placement, engine: str) -> None:
    """Raise InputError unless every GPU has as many slots in every layer."""
    slots = placement.slots
    if (slots == slots[0, 0]).all():
        return
    uneven = np.flatnonzero((slots != slots[:, :1]).any(axis=1))
    if len(uneven):
        layer = int(uneven[0])
        counts = sorted(set(slots[layer].tolist()), reverse=True)
        held = "; ".join(f"{count} on {_named('GPU', np.flatnonzero(slots[layer] == count))}" for count in counts)
        also = f"; also uneven: {_named('layer', uneven[1:])}" if len(uneven) > 1 else ""
        spare = int(slots[layer].sum()) - placement.experts
        near = redundant_experts(placement.experts, spare, placement.gpus) if spare else [0]
        # Frameworks of training have no redundant experts, nor have plans for them.
        advice = f"plan with {' or '.join(map(str, near))} redundant experts in all instead of {spare}, or " * (
            spare not in near
        )
        raise InputError(
            f"{engine} needs as many slots on every GPU, but {_layer(placement, layer)} has {held}{also}; "
            f"{advice if spare else ''}{PROJECT}"
        )
    other = int((slots[:, 0] != slots[0, 0]).argmax())
    totals = slots.sum(axis=1)
    raise InputError(
        f"{engine} needs as many slots in every layer, but {_layer(placement, 0)} has {totals[0]} and "
        f"{_layer(placement, other)} has {totals[other]}; {PROJECT}"
    )


def refuse_replicas(placement: Placement, engine: str) -> None:
    """Raise InputError if an expert has more than one copy."""
    copies = placement.slots.sum(axis=1)
    if (copies > placement.experts).any():
        layer = int((copies > placement.experts).argmax())
        raise InputError(
            f"{engine} has no replicas, but {_layer(placement, layer)} has {copies[layer]} copies of "
            f"{placement.experts} experts; plan with redundant=0"
        )


def _layer(placement: Placement, layer: int) -> str:
    return f"layer {layer} (model layer {placement.model_layers[layer]})"


def _named(noun: str, numbers: NDArray[np.int64]) -> str:
    """Ascending numbers with runs drawn together, as in `GPUs 0 … 3, 7`."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    ranges = (f"{run[0]} … {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(ranges)}"


def not_carried(plan: Plan, runs_rule: bool = False) -> tuple[str, ...]:
    """A line for people for every part of the plan that stays behind. runs_rule: True if the engine uses copies by the rule
    that the plan was made for."""
    parts = []
    if plan.send_order.mode != "concurrent":
        parts.append(f"the order of its sends ({_ORDERS[plan.send_order.mode]}): engines send all at once")
    if plan.execution != "vanilla":
        parts.append("context-coherent execution: the engine brings tokens back after every layer")
    alone = {"replicas": None, "ranks_per_node": None} if runs_rule else {}
    travel = (plan.travel or Travel()).model_copy(update=alone)
    if travel != Travel():
        parts.append(f"how tokens travel ({travel.in_words}): the engine's own dispatch decides")
    if plan.placement_b is not None:
        parts.append("the second model's placement")
    if plan.reaction is not None:
        parts.append("the reaction at run time: the placement stays as it is")
    if plan.priority is not None:
        parts.append("the schedule of the training step")
    return tuple(f"not carried: {part}" for part in parts)
