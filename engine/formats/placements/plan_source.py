"""The plan file being read, with the model and GPUs that it is read for, and the way from its slots to a `Placement`; and the
default layouts of engines: vLLM's `--expert-placement-strategy` without a balancer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from engine.errors import InputError
from engine.formats.source import MAX_VALUES, fault, quoted
from engine.model import MoEModel
from engine.placement.baselines import linear_assignment, round_robin_assignment
from engine.plan import Placement

MAX_SLOTS = 65536
"""Slots of a layer; 4096 experts on each of 16 GPUs."""
MAX_JSON_BYTES = 16 * 1024**2
"""Limit of an engine's plan; a hundred layers of 16 384 slots take ten megabytes."""
MAX_JSON_PARTS = 500_000
"""Lists, objects and keys of a plan. Each takes tens of bytes and the time of the collector, which looks at all of them."""
WORDS = {"linear": "linear", "round-robin": "round-robin", "round_robin": "round-robin"}
"""Words that a person may write in place of a file; vLLM spells the second with an underscore."""


def parse_json(path: Path, data: bytes, place: str = "", most_bytes: int = MAX_JSON_BYTES) -> Any:
    """The content of JSON, of bounded size in memory; raises InputError."""
    if len(data) > most_bytes:
        raise fault(path, f"is longer than {most_bytes // 1024**2} MB, as no plan is", place)
    if sum(map(data.count, (b"[", b"{", b":"))) > MAX_JSON_PARTS:
        raise fault(path, f"has more than {MAX_JSON_PARTS} lists and keys, as no plan has", place)
    if data.count(b",") > MAX_VALUES:  # long columns in plans of the studio are texts without any
        raise fault(path, f"has more than {MAX_VALUES:,} numbers in lists, as no plan has", place)
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        cut_off = "; the file may be cut off" if str(error).startswith("EOF") else ""
        raise fault(path, f"not valid JSON ({error}){cut_off}", place) from None


@dataclass(frozen=True)
class PlanSource:
    """A plan file, the model that it places and how many GPUs share that model's experts. None is as many as the file says, or
    one where it says nothing, for a reader of its slots alone."""

    path: Path
    model: MoEModel
    gpus: int | None

    def fault(self, text: str, place: str = "") -> InputError:
        """See `engine.formats.source.fault`."""
        return fault(self.path, text, place)


@dataclass(frozen=True)
class Deployed:
    """The placement in a plan file, for a model and a number of GPUs.

    format: the file's kind, for people
    notes: parts that were left out, or read in a way that a person should know
    """

    placement: Placement
    format: str
    notes: tuple[str, ...] = ()


def whole_numbers_of(source: PlanSource, ids: object, place: str) -> list[int]:
    """`ids` if they are a list of whole numbers; raises InputError otherwise. JSON's true and 1.0 are none."""
    if not isinstance(ids, list):
        raise source.fault("a list of expert ids is needed", place)
    if len(ids) > MAX_SLOTS:
        raise source.fault(f"has {len(ids)} slots, at most {MAX_SLOTS} are read", place)
    if not set(map(type, ids)) <= {int}:
        slot, other = next((slot, other) for slot, other in enumerate(ids) if type(other) is not int)
        raise source.fault(f"slot {slot} is {quoted(other)}, not an expert id (a whole number)", place)
    return ids


def expert_ids(source: PlanSource, ids: object, place: str) -> list[int]:
    """The experts in the slots of a layer, each expert in one slot at least; raises InputError otherwise."""
    ids, experts = whole_numbers_of(source, ids, place), source.model.experts
    if ids and not 0 <= min(ids) <= max(ids) < experts:
        slot = next(slot for slot, expert in enumerate(ids) if not 0 <= expert < experts)
        raise source.fault(
            f"slot {slot} holds expert {quoted(ids[slot])}; the experts of {source.model.name} are 0 … {experts - 1}", place
        )
    if missing := set(range(experts)).difference(ids):
        raise source.fault(f"expert {min(missing)} is in no slot; every expert needs one in every layer", place)
    return ids


def even_placement(source: PlanSource, rows: Sequence[object], places: Sequence[str]) -> Placement:
    """Slots that go to the GPUs in equal blocks, slot j to GPU j // (slots / GPUs). Raises InputError for a row that is no list
    of experts, that leaves one out or has another length than the first, and for slots that do not divide over the GPUs.

    rows: the slots of every MoE layer
    places: the name of each row in messages
    """
    slots = [expert_ids(source, row, place) for row, place in zip(rows, places, strict=True)]
    for row, place in zip(slots, places, strict=True):
        if len(row) != len(slots[0]):
            raise source.fault(f"has {len(row)} slots, the first MoE layer {len(slots[0])}; all need as many", place)
    gpus = source.gpus or 1
    if len(slots[0]) % gpus:
        raise source.fault(f"{len(slots[0])} slots do not divide over {gpus} GPUs")
    return Placement.from_slots(
        np.array(slots, dtype=np.int64), np.full(gpus, len(slots[0]) // gpus), source.model.experts, source.model.moe_layers
    )


def field_of(source: PlanSource, content: dict, key: str, kind: type, place: str = "") -> Any:
    """`content[key]` if it is of this kind; raises InputError otherwise."""
    value = content.get(key)
    if type(value) is not kind:
        names = {dict: "an object {…}", list: "a list [ … ]", int: "a whole number"}
        raise source.fault(f"needs {names[kind]} under {quoted(key)}", place)
    return value


def check_number(source: PlanSource, content: dict, key: str, expected: int, why: str, place: str = "") -> None:
    """Raise InputError unless `content[key]`, if there is one, is as the slots say. why: the slots' word, for the message"""
    if key in content and content[key] != expected:
        raise source.fault(f"{key} is {quoted(content[key])}, but {why}", place)


def default_layout(word: str, model: MoEModel, gpus: int) -> Deployed:
    """One copy of every expert, the same in all layers: contiguous blocks, or dealt out one by one. The first GPUs hold one
    more if the experts do not divide: 30 on 8 are 4, 4, 4, 4, 4, 4, 3, 3 (vllm #21497)."""
    slots = np.full(gpus, model.experts // gpus)
    slots[: model.experts % gpus] += 1
    assign = {"linear": linear_assignment, "round-robin": round_robin_assignment}[WORDS[word]]
    row = assign(model.experts, slots)
    placement = Placement.from_gpu_of_expert(np.tile(row, (len(model.moe_layers), 1)), gpus, model.moe_layers)
    return Deployed(placement, f"{WORDS[word]} layout of the {model.experts} experts")
