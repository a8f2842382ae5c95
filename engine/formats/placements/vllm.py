"""vLLM's static expert mapping of pull request #41141: one line of JSON, `record_type` `eplb_initial_mapping`, with the slots
of every MoE layer by its index as a string. Its log of loads says under which mapping each was counted (`p2l_map`)."""

import json
import shlex

from engine.formats.placements.export import Written, even_slots
from engine.formats.placements.plan_source import (
    Deployed,
    PlanSource,
    check_number,
    even_placement,
    field_of,
    parse_json,
)
from engine.formats.source import quoted
from engine.model import MoEModel
from engine.plan import Placement

MAPPING, STATISTICS = "eplb_initial_mapping", "eplb_load_stats"
ASSIGNMENTS = "initial_global_assignments"


def write(placement: Placement, model: MoEModel, name: str) -> Written:
    """The line.

    Can not carry: different numbers of slots, an expert twice on a GPU, the MTP layer, which model layer an MoE layer is, and
    of a plan anything beside its placement. Raises InputError for such placements.
    """
    slots = even_slots(placement, model, "vLLM")
    redundant = slots.shape[1] - model.experts
    record = {
        "record_type": MAPPING,
        "version": 1,
        "num_redundant_experts": redundant,
        "num_slots": slots.shape[1],
        ASSIGNMENTS: {str(layer): row for layer, row in enumerate(slots.tolist())},
    }
    settings = {"num_redundant_experts": redundant, "initial_mapping_path": name, "disable_online_rebalancing": True}
    return Written(
        (json.dumps(record) + "\n").encode(),
        ("--enable-expert-parallel", "--enable-eplb", f"--eplb-config {shlex.quote(json.dumps(settings))}"),
        (
            "only a vLLM with pull request #41141, which is open, reads it; in its newer form the setting is "
            '"enable_online": false instead of "disable_online_rebalancing": true',
            f"tensor parallel size × data parallel size must be {placement.gpus}",
        ),
    )


def is_log(data: bytes) -> bool:
    """Whether these are lines of JSON records, as the first of them tells."""
    first = data.split(b"\n", 1)[0]
    return first.lstrip().startswith(b"{") and b'"record_type"' in first


def last_record(source: PlanSource, data: bytes) -> tuple[dict, str]:
    """The last record that has a mapping, and its line for messages. Lines of other records are not even parsed: a log of loads
    has a hundred megabytes of them."""
    at = max(data.rfind(f'"{kind}"'.encode()) for kind in (MAPPING, STATISTICS))
    if at < 0:
        raise source.fault(f"has no record {MAPPING!r} or {STATISTICS!r}, which alone say where experts are")
    begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
    number = data.count(b"\n", 0, at) + 1
    place = f"line {number}"
    record = parse_json(source.path, data[begin : end if end >= 0 else len(data)], place)
    if not isinstance(record, dict):
        raise source.fault("a JSON object {…} is needed", place)
    return record, place


def read(source: PlanSource, data: bytes) -> Deployed:
    """The initial mapping, or the one under which the last loads were counted, whichever comes last."""
    record, place = last_record(source, data)
    kind = record.get("record_type")
    if kind == STATISTICS:
        rows, layers = field_of(source, record, "p2l_map", list, place), len(source.model.moe_layers)
        notes = (f"it is the mapping of the last record of loads ({place}), as it was then",)
        if len(rows) == layers + 1:
            notes += (f"layer {layers} is the MTP layer's and left out",)
            rows = rows[:layers]
        if len(rows) != layers:
            raise source.fault(f"has {len(rows)} layers; {source.model.name} has {layers} MoE layers", place)
        places = [f"{place}, p2l_map, layer {layer}" for layer in range(layers)]
        return Deployed(even_placement(source, rows, places), "vLLM log of loads, its last mapping", notes)
    if kind != MAPPING:
        raise source.fault(f"the record is {quoted(kind)}, which says not where experts are", place)
    if record.get("version") != 1:
        raise source.fault(f"version {quoted(record.get('version'))} is not known here, 1 is", place)
    return _initial_mapping(source, record, place)


def _initial_mapping(source: PlanSource, record: dict, place: str) -> Deployed:
    named, layers = field_of(source, record, ASSIGNMENTS, dict, place), len(source.model.moe_layers)
    wanted, notes = [str(layer) for layer in range(layers)], ()
    for layer in wanted:
        if layer not in named:
            raise source.fault(
                f"there is no layer '{layer}'; {source.model.name} has {layers} MoE layers, counted from '0'", place
            )
    if further := [key for key in named if key not in wanted]:
        if further != [str(layers)]:
            raise source.fault(f"layer {quoted(further[0])} is no MoE layer of {source.model.name}", place)
        notes = (f"layer {layers} is the MTP layer's and left out",)
    places = [f"{place}, layer '{layer}'" for layer in wanted]
    placement = even_placement(source, [named[layer] for layer in wanted], places)
    slots = int(placement.slots[0].sum())
    check_number(source, record, "num_slots", slots, f"the layers list {slots}", place)
    redundant = slots - source.model.experts
    check_number(source, record, "num_redundant_experts", redundant, f"{slots} slots make {redundant}", place)
    return Deployed(placement, "vLLM initial mapping (pull request #41141)", notes)
