"""vLLM's static expert mapping of pull request #41141: one line of JSON, `record_type` `eplb_initial_mapping`, with the slots
of every MoE layer by its index as a string. Its log of loads says under which mapping each was counted (`p2l_map`).

Expert maps of HYGON's vLLM plugin, version 2: a map for every model architecture that runs, the MTP model's apart.
`{"version": 2, "model_maps": {"<architecture>": {"physical_to_logical_map": [[…slots] × MoE layers]}}}`

vLLM-Ascend's expert map (vllm_ascend/eplb, @182b75e): the experts of every device of every MoE layer, as JSON.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.formats.placements.export import Written, even_slots
from engine.formats.placements.plan_source import (
    Deployed,
    PlanSource,
    check_number,
    even_placement,
    expert_ids,
    field_of,
    parse_json,
    whole_numbers_of,
)
from engine.formats.placements.sglang import KEY, of_moe_layers
from engine.formats.source import quoted
from engine.model import MoEModel
from engine.plan import Placement

MAPPING, STATISTICS = "eplb_initial_mapping", "eplb_load_stats"
ASSIGNMENTS = "initial_global_assignments"
MAPS = "model_maps"
COUNT, LAYERS = "moe_layer_count", "layer_list"


def write(placement: Placement, model: MoEModel, name: str) -> Written:
    """The line.

    Can not carry: different numbers of slots, an expert twice on a GPU, the MTP layer, which model layer an MoE layer is, and
    of a plan anything but its placement. Raises InputError for such placements.
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
    """True if these are lines of JSON records, as the first of them tells."""
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


def read_plugin(source: PlanSource, content: dict[str, Any]) -> Deployed:
    """The one map that has as many rows as the model MoE layers; the others are left out."""
    if content.get("version", 2) != 2:
        raise source.fault(f"version {quoted(content['version'])} is not known here, 2 is")
    maps = field_of(source, content, MAPS, dict)
    rows_of = {
        name: field_of(source, about, KEY, list, f"{MAPS}, {quoted(name)}")
        for name, about in maps.items()
        if isinstance(about, dict)
    }
    layers = len(source.model.moe_layers)
    fitting = [name for name, rows in rows_of.items() if len(rows) == layers]
    if len(fitting) != 1:
        has = ", ".join(f"{quoted(name)} with {len(rows)}" for name, rows in list(rows_of.items())[:6]) or "none"
        raise source.fault(f"one map with {layers} layers is needed, the MoE layers of {source.model.name}; it has {has}", MAPS)
    deployed = of_moe_layers(source, rows_of[fitting[0]], "vLLM plugin (HYGON) map")
    left = tuple(f"the map of {quoted(name)} is left out" for name in list(maps)[:6] if name != fitting[0])
    return Deployed(deployed.placement, deployed.format, left)


def write_ascend(placement: Placement, model: MoEModel, name: str) -> Written:
    """The map.

    Can not carry: different numbers of slots, an expert twice on a GPU (the second copy takes the first one's place in the
    device's table, which leaves a dead slot), which model layer an MoE layer is, and of a plan anything but its placement.
    Raises InputError for such placements and for a name without `.json`.
    """
    if Path(name).suffix != ".json":
        raise InputError(f"{name}: vLLM-Ascend only takes expert maps that are called .json")
    slots = even_slots(placement, model, "vLLM-Ascend")
    rows = slots.reshape(placement.layers, placement.gpus, -1).tolist()
    layers = [
        {
            "layer_id": layer,
            "device_count": placement.gpus,
            "device_list": [{"device_id": gpu, "device_expert": held} for gpu, held in enumerate(row)],
        }
        for layer, row in enumerate(rows)
    ]
    settings = json.dumps({"eplb_config": {"expert_map_path": name}})
    return Written(
        json.dumps({COUNT: placement.layers, LAYERS: layers}).encode(),
        ("--enable-expert-parallel", f"--additional-config {shlex.quote(settings)}"),
        (
            "only vLLM-Ascend's first model runner takes it; the second (MRv2) refuses maps that are given and records none",
            "an MTP layer gets the number of slots that layer 0 has",
        ),
    )


def read_ascend(source: PlanSource, content: dict[str, Any]) -> Deployed:
    """The layers of the model; one more, `layer_id` = `moe_layer_count`, is the MTP layer's and left out, and so is a second
    copy of an expert on a device, which is dead."""
    listed, wanted = field_of(source, content, LAYERS, list), len(source.model.moe_layers)
    by_id: dict[int, dict] = {}
    for at, layer in enumerate(listed):
        if not isinstance(layer, dict):
            raise source.fault("an object with layer_id and device_list is needed", f"{LAYERS}, entry {at}")
        number = field_of(source, layer, "layer_id", int, f"{LAYERS}, entry {at}")
        if by_id.setdefault(number, layer) is not layer:
            raise source.fault(f"layer_id {number} comes twice", LAYERS)
    missing = [layer for layer in range(wanted) if layer not in by_id]
    further = sorted(set(by_id) - set(range(wanted)))
    if missing or further not in ([], [wanted]):
        raise source.fault(
            f"has the layers {', '.join(map(str, sorted(by_id)[:4]))} … ({len(by_id)} in all); {source.model.name} has the MoE "
            f"layers 0 … {wanted - 1}",
            LAYERS,
        )
    notes = (f"layer {wanted} is the MTP layer's and left out",) if further else ()
    rows = [_devices(source, by_id[layer], f"layer {layer}") for layer in range(wanted)]
    if len({len(held) for row in rows for held in row}) > 1:
        raise source.fault("every device list needs the same length; vLLM-Ascend makes one tensor of them", LAYERS)
    alive = [[list(dict.fromkeys(held)) for held in row] for row in rows]
    if dead := sum(len(held) for row in rows for held in row) - sum(len(held) for row in alive for held in row):
        notes += (f"{dead} slots with a second copy of an expert on the same device are dead and left out",)
    placement = Placement(
        experts=source.model.experts,
        experts_of_gpu=tuple(tuple(map(tuple, row)) for row in alive),
        model_layers=source.model.moe_layers,
    )
    return Deployed(placement, "vLLM-Ascend expert map", notes)


def _devices(source: PlanSource, layer: dict[str, Any], place: str) -> list[list[int]]:
    """The experts of every device of a layer, by device."""
    listed = field_of(source, layer, "device_list", list, place)
    held: dict[int, list[int]] = {}
    for at, device in enumerate(listed):
        if not isinstance(device, dict):
            raise source.fault("an object with device_id and device_expert is needed", f"{place}, device_list {at}")
        number = field_of(source, device, "device_id", int, f"{place}, device_list {at}")
        where = f"{place}, device {number}"
        if number in held:
            raise source.fault("this device comes twice", where)
        held[number] = whole_numbers_of(source, device.get("device_expert"), where)
    if sorted(held) != list(range(source.gpus)):
        raise source.fault(f"has {len(held)} devices; wanted are the devices 0 … {source.gpus - 1}", place)
    row = [held[gpu] for gpu in range(source.gpus)]
    expert_ids(source, [expert for experts in row for expert in experts], place)
    return row
