"""vLLM's static expert mapping of pull request #41141: one line of JSON, `record_type` `eplb_initial_mapping`, with the slots
of every MoE layer by its index as a string. Its log of loads says under which mapping each was counted (`p2l_map`).

Expert maps of HYGON's vLLM plugin, version 2: a map for every model architecture that runs, the MTP model's apart.
`{"version": 2, "model_maps": {"<architecture>": {"physical_to_logical_map": [[…slots] × MoE layers]}}}`

The log that a server of vLLM or vLLM-Ascend prints: every EP rank says which experts it holds, the same in all layers, as it
starts: `[EP Rank 0/8] … Local/global number of experts: 16/128. Experts local to global index map: 0->0, 1->1, …`. With
redundant experts these are physical slots: slot E + i holds expert i modulo E. EPLB, which moves experts later, prints
`EPLB step: … balancedness=0.3413`, mean over maximum of the tokens of a rank.

vLLM-Ascend's expert map (vllm_ascend/eplb, @182b75e): the experts of every device of every MoE layer, as JSON.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np

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
from engine.formats.source import ok, quoted, warning
from engine.model import MoEModel
from engine.plan import Placement
from engine.workload import Finding

MAPPING, STATISTICS = "eplb_initial_mapping", "eplb_load_stats"
ASSIGNMENTS = "initial_global_assignments"
_RANK_MAP = re.compile(
    rb"\[EP Rank (\d{1,6})/(\d{1,6})\][^\n]*?Local/global number of experts: (\d{1,6})/(\d{1,6})\."
    rb"[^\n]*?index map:\s*((?:\d{1,6}->\d{1,6}(?:,\s*)?)*)"
)
_STRATEGY = re.compile(rb"Expert placement strategy: (linear|round_robin)\b")
_BALANCE = re.compile(rb"balancedness=(\d\.\d{1,9})")
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
            "only a vLLM with pull request #41141, which is open, reads it (0.33.0 refuses the setting); in its newer form the "
            "setting is "
            '"enable_online": false instead of "disable_online_rebalancing": true',
            f"tensor × data (× prefill context) parallel size must be {placement.gpus}",
        ),
    )


def is_log(data: bytes) -> bool:
    """True if these are lines of JSON records, as the first of them tells."""
    first = data.split(b"\n", 1)[0]
    return first.lstrip().startswith(b"{") and b'"record_type"' in first


def is_server_log(data: bytes) -> bool:
    """True if the text has a rank's map of experts."""
    return _RANK_MAP.search(data) is not None


def _maps(data: bytes) -> tuple[dict[int, list[int]], int, int]:
    """(the slots of each EP rank of the last start, ranks, slots of a layer)"""
    held: dict[int, list[int]] = {}
    size = slots = 0
    for found in _RANK_MAP.finditer(data):
        rank, ranks, local, total = (int(number) for number in found.groups()[:4])
        if (ranks, total) != (size, slots):  # another start, or another model
            held, size, slots = {}, ranks, total
        pairs = [pair.split(b"->") for pair in found[5].split(b",") if pair.strip()]
        if len(pairs) == local and rank < ranks:  # else the line was cut
            held[rank] = [int(slot) for _, slot in pairs]
    return held, size, slots


def facts_of_server_log(data: bytes) -> list[Finding]:
    """Findings on the facts in such a log, the first on its maps."""
    held, size, slots = _maps(data)
    said = f"it has the expert maps of {len(held)} of {size} EP ranks, {slots} experts a layer"
    if len(held) < size:
        missing = sorted(set(range(size)) - set(held))
        without = f"rank {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        facts = [warning("log", f"{said}: it is no plan without {without}; give the whole log, of all nodes in one file")]
    else:
        facts = [ok("log", said)]
    if balance := _BALANCE.findall(data):
        told = f"EPLB's last balancedness was {balance[-1].decode()}, mean over maximum of the tokens of a rank"
        facts.append(ok("log", told))
    return facts


def read_server_log(source: PlanSource, data: bytes) -> Deployed:
    """The maps of all EP ranks of the last start; raises InputError that says which are missing."""
    held, size, slots = _maps(data)
    experts = source.model.experts
    if missing := sorted(set(range(size)) - set(held)):
        strategy = _STRATEGY.search(data)
        word = strategy[1].decode().replace("_", "-") if strategy else ""
        instead = f"; the log says '{word}' and so may you, in place of the file" if word and slots == experts else ""
        raise source.fault(f"has the expert maps of {len(held)} of {size} EP ranks, not of rank {missing[0]}{instead}")
    if source.gpus not in (None, size):
        raise source.fault(f"is of {size} EP ranks, but there are {source.gpus} GPUs")
    if not experts <= slots <= 2 * experts:
        raise source.fault(f"places {slots} experts; {source.model.name} has {experts}")
    row = [[slot if slot < experts else slot - experts for slot in held[rank]] for rank in range(size)]
    expert_ids(source, [expert for gpu in row for expert in gpu], "expert maps")
    notes = [
        "it is the map as the server starts, the same in all layers",
        *(fact.message for fact in facts_of_server_log(data)[1:]),
    ]
    if (redundant := slots - experts) or b"EPLB step" in data:
        notes[0] += "; EPLB moves experts later"
    if redundant:
        notes.append(f"{redundant} slots are redundant: slot {experts} + i holds expert i when the server starts")
    layers = source.model.moe_layers
    placement = Placement(experts=experts, experts_of_gpu=(tuple(map(tuple, row)),) * len(layers), model_layers=layers)
    return Deployed(placement, "expert maps in a log of vLLM", tuple(notes))


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
            "only vLLM-Ascend's first model runner takes it, up to 0.26.0rc1 at least: set VLLM_USE_V2_MODEL_RUNNER=0; the "
            "second is not made for maps and refuses to record them",
            "an MTP layer gets the number of slots that layer 0 has",
        ),
    )


def read_ascend(source: PlanSource, content: dict[str, Any]) -> Deployed:
    """The layers of the model, and their devices, by place as vLLM-Ascend's loader takes them, whatever `layer_id` and
    `device_id` say; one layer more is the MTP layer's and left out, and so is a second copy of an expert on a device, which is
    dead, unless slots alone are asked for."""
    listed, wanted = field_of(source, content, LAYERS, list), len(source.model.moe_layers)
    if len(listed) not in (wanted, wanted + 1):
        raise source.fault(f"has {len(listed)} layers; {source.model.name} has {wanted} MoE layers", LAYERS)
    notes = (f"layer {wanted} is the MTP layer's and left out",) if len(listed) > wanted else ()
    rows = [_devices(source, layer, f"{LAYERS}, entry {at}") for at, layer in enumerate(listed[:wanted])]
    if len({len(held) for row in rows for held in row}) > 1:
        raise source.fault("every device list needs the same length; vLLM-Ascend makes one tensor of them", LAYERS)
    moved = sum(layer.get("layer_id", at) != at for at, layer in enumerate(listed[:wanted]))
    moved += sum(
        device.get("device_id", at) != at for layer in listed[:wanted] for at, device in enumerate(layer["device_list"])
    )
    if moved:
        notes += (f"{moved} entries are not at the place of their layer_id or device_id; vLLM-Ascend goes by place",)
    alive = rows if source.gpus is None else [[list(dict.fromkeys(held)) for held in row] for row in rows]
    if dead := sum(len(held) for row in rows for held in row) - sum(len(held) for row in alive for held in row):
        notes += (f"{dead} slots with a second copy of an expert on the same device are dead and left out",)
    placement = Placement(
        experts=source.model.experts,
        experts_of_gpu=tuple(tuple(map(tuple, row)) for row in alive),
        model_layers=source.model.moe_layers,
    )
    return Deployed(placement, "vLLM-Ascend expert map", notes)


def read_expert_map(source: PlanSource, table: np.ndarray) -> Deployed:
    """The map of vLLM's pull request #14544 (`expert_map.pth`). Raises InputError unless every rank has a row.

    table: int[MoE layer, rank, expert]; the expert's place on the rank, -1 where the rank does not hold it. Columns after the
        model's experts stand for redundant ones and are -1
    """
    experts, layers = source.model.experts, len(source.model.moe_layers)
    gpus = source.gpus or table.shape[1]
    if table.dtype.kind not in "iu" or table.shape[:2] != (layers, gpus) or table.shape[2] < experts:
        raise source.fault(
            f"must be whole numbers [{layers} MoE layers, {gpus} ranks, {experts} experts], not {table.dtype} "
            f"{list(table.shape)}"
        )
    if table.min() < -1 or (table[:, :, experts:] >= 0).any():
        raise source.fault(f"holds places below -1, or experts beyond the {experts} of {source.model.name}")
    rows = []
    for layer, places in enumerate(table):
        row = [[int(expert) for expert in np.argsort(of_rank, kind="stable") if of_rank[expert] >= 0] for of_rank in places]
        expert_ids(source, [expert for held in row for expert in held], f"layer {layer}")
        rows.append(tuple(map(tuple, row)))
    placement = Placement(experts=experts, experts_of_gpu=tuple(rows), model_layers=source.model.moe_layers)
    return Deployed(placement, "vLLM expert map (pull request #14544)")


def _devices(source: PlanSource, layer: object, place: str) -> list[list[int]]:
    """The experts of every device of a layer, in the order of the list."""
    if not isinstance(layer, dict):
        raise source.fault("an object with layer_id and device_list is needed", place)
    row = []
    for at, device in enumerate(field_of(source, layer, "device_list", list, place)):
        if not isinstance(device, dict):
            raise source.fault("an object with device_id and device_expert is needed", f"{place}, device_list {at}")
        row.append(whole_numbers_of(source, device.get("device_expert"), f"{place}, device_list {at}"))
    if source.gpus not in (None, len(row)):
        raise source.fault(f"has {len(row)} devices; there are {source.gpus} GPUs", place)
    expert_ids(source, [expert for experts in row for expert in experts], place)
    return row
