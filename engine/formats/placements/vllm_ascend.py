"""vLLM-Ascend's expert map (vllm_ascend/eplb, @182b75e): the experts of every device of every MoE layer, as JSON."""

import json
import shlex
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.formats.placements.export import Written, even_slots
from engine.formats.placements.plan_source import Deployed, PlanSource, expert_ids, field_of, whole_numbers_of
from engine.model import MoEModel
from engine.plan import Placement

COUNT, LAYERS = "moe_layer_count", "layer_list"


def write(placement: Placement, model: MoEModel, name: str) -> Written:
    """The map.

    Can not carry: different numbers of slots, an expert twice on a GPU (the second copy takes the first one's place in the
    device's table, which leaves a dead slot), which model layer an MoE layer is, and of a plan anything beside its placement.
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


def read(source: PlanSource, content: dict[str, Any]) -> Deployed:
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
