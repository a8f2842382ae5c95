"""Whether ids counted are experts or a load balancer's slots. Nothing in the files tells them apart, and loads of slots read as
loads of experts look fine: the model decides, and the plan that ran says which slot held which expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.finding import Finding
from engine.formats.placements import tensorrt_llm
from engine.formats.placements.plan_source import PlanSource
from engine.formats.source import Source, fault, quoted

_ASSIGNMENTS = tensorrt_llm.ASSIGNMENTS.encode()


@dataclass(frozen=True)
class Slots:
    """What the slots of a plan hold. expert: int64[MoE layer, slot], of all MoE layers of the model; updates: after how many
    iterations a load balancer moved them, 0: never"""

    path: Path
    expert: np.ndarray
    updates: int


def slots_counted(source: Source, ids: int) -> Slots | None:
    """The plan that ran, where so many ids are its slots; None where they are experts. The plan is `source.deployed`, or a
    TensorRT-LLM YAML in the recording's folder with as many slots.

    Raises InputError where the ids are slots and no plan says of which experts, or that cannot be decided.
    """
    experts = source.num_experts or (source.model.experts if source.model else None)
    if source.deployed is not None:
        slots = _read(source, source.deployed)
        if slots.expert.shape[1] != ids:
            raise fault(source.deployed, f"has {slots.expert.shape[1]} slots per layer, but {ids} ids were counted")
        return slots
    if experts is None:
        return None
    if ids < experts:
        raise source.fault(f"counts {ids} experts, but the model has {experts}; give the model that was recorded")
    beside = _beside(source, ids)
    if ids > experts:
        what = f"counts {ids} ids, but the model has {experts} experts: a load balancer was on, and these are its slots"
        if not beside:
            raise source.fault(
                f"{what}; give the plan that ran (--deployed FILE, or its YAML in the same folder), or record without one"
            )
        if len(beside) > 1:
            names = " and ".join(slots.path.name for slots in beside[:3])
            raise source.fault(f"{what}; {names} differ, say which ran (--deployed)")
        return beside[0]
    if moved := [slots for slots in beside if (slots.expert != np.arange(experts)).any()]:
        raise source.fault(
            f"counts {ids} ids, which are the model's experts, or the slots of {moved[0].path.name} if that ran: give it with "
            "--deployed, or take it out of the folder"
        )
    return None


def _beside(source: Source, ids: int) -> list[Slots]:
    """The plans in the recording's folder that have so many slots, each once."""
    plans: dict[bytes, Slots] = {}
    if source.model is None:
        return []
    for path in sorted(source.path.parent.glob("*.y*ml")):
        if path.is_file() and path.stat().st_size <= tensorrt_llm.MAX_YAML_BYTES and _ASSIGNMENTS in path.read_bytes():
            slots = _read(source, path)
            if slots.expert.shape[1] == ids:
                plans.setdefault(slots.expert.tobytes(), slots)
    return list(plans.values())


def _read(source: Source, path: Path) -> Slots:
    if source.model is None:
        raise source.fault(f"the plan {path.name} can only be read for a model; open it first (--model)")
    if not path.is_file():
        raise fault(path, "there is no such file")
    if path.stat().st_size > tensorrt_llm.MAX_YAML_BYTES:
        raise fault(path, f"is larger than {tensorrt_llm.MAX_YAML_BYTES // 1024} KB, as no plan of TensorRT-LLM is")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise fault(path, "is not UTF-8 text; save it as UTF-8") from None
    content = tensorrt_llm.parse(path, text)
    placement = tensorrt_llm.read(PlanSource(path, source.model, gpus=1), content).placement
    updates = content.get("layer_updates_per_iter", "0")
    if not (isinstance(updates, str) and updates.isascii() and updates.isdigit() and len(updates) < 10):
        raise fault(path, f"layer_updates_per_iter is {quoted(updates)}, not a whole number")
    return Slots(path, np.array([row[0] for row in placement.experts_of_gpu], np.int64), int(updates))


def about_slots(slots: Slots | None, ids: int, source: Source) -> Sequence[Finding]:
    """What the ids counted are."""
    if slots is None and source.num_experts is None and source.model is None:
        message = (
            f"{ids} ids are counted, taken for experts: right if the model has {ids} experts and no load balancer was on. "
            "With a balancer they are slots; open the model (--model) first, which decides."
        )
        return (Finding(severity="warning", code="slots-or-experts", message=message),)
    if slots is None:
        message = (
            f"The {ids} ids counted are the model's experts, unless a load balancer without redundant slots had moved them "
            "while this was recorded."
        )
        return (Finding(severity="ok", code="slots-or-experts", message=message),)
    message = f"The {ids} ids counted are slots; {slots.path.name} says which expert each held, and those of one expert add up."
    folded = Finding(severity="ok", code="slots-or-experts", message=message)
    if not slots.updates:
        return (folded,)
    message = (
        f"{slots.path.name} has layer_updates_per_iter {slots.updates}: the balancer moved experts while this was recorded, so "
        "slots held other experts than it says; record with layer_updates_per_iter 0."
    )
    return (folded, Finding(severity="error", code="balancer-moved", message=message))
