"""The rules by which engines load plan files, from their documentation alone, without our readers and writers.

Each checker asserts the rules and returns the slots [MoE layer][GPU] as the engine would hold them.
"""

import csv
import io
import json

import numpy as np
import torch
import yaml

Held = list[list[list[int]]]


def blocks(row: list[int], experts: int, gpus: int) -> list[list[int]]:
    """Slot j on GPU j // (slots / GPUs); every expert somewhere, none twice on a GPU, no −1."""
    assert all(type(expert) is int and 0 <= expert < experts for expert in row)
    assert set(row) == set(range(experts)) and len(row) % gpus == 0
    each = len(row) // gpus
    held = [row[gpu * each : (gpu + 1) * each] for gpu in range(gpus)]
    assert all(len(set(slots)) == each for slots in held)
    return held


def sglang(content: bytes, layers: int, dense: tuple[int, ...], experts: int, gpus: int) -> Held:
    if content.startswith(b"PK"):
        data = {key: value.tolist() for key, value in torch.load(io.BytesIO(content), weights_only=True).items()}
    else:
        data = json.loads(content)
    assert list(data) == ["physical_to_logical_map"]
    rows = data["physical_to_logical_map"]
    assert len(rows) == layers and len({len(row) for row in rows}) == 1
    held = [blocks(row, experts, gpus) for row in rows]
    return [row for layer, row in enumerate(held) if layer not in dense]


def tensorrt_llm(content: bytes, moe_layers: tuple[int, ...], experts: int, gpus: int, mtp: int | None = None) -> Held:
    data = yaml.safe_load(content)
    assert list(data) == ["num_slots", "layer_updates_per_iter", "initial_global_assignments"]
    assert data["layer_updates_per_iter"] == 0
    rows = data["initial_global_assignments"]
    assert list(rows) == [*moe_layers, *([mtp] if mtp is not None else [])]
    assert all(type(key) is int for key in rows) and {len(row) for row in rows.values()} == {data["num_slots"]}
    return [blocks(rows[layer], experts, gpus) for layer in rows][: len(moe_layers)]


def vllm(content: bytes, layers: int, experts: int, gpus: int) -> Held:
    (line,) = content.decode().splitlines()
    record = json.loads(line)
    assert set(record) == {*("record_type", "version", "num_redundant_experts", "num_slots", "initial_global_assignments")}
    assert (record["record_type"], record["version"]) == ("eplb_initial_mapping", 1)
    assert record["num_redundant_experts"] == record["num_slots"] - experts
    rows = record["initial_global_assignments"]
    assert list(rows) == [str(layer) for layer in range(layers)]
    assert {len(row) for row in rows.values()} == {record["num_slots"]}
    return [blocks(row, experts, gpus) for row in rows.values()]


def vllm_ascend(content: bytes, layers: int, experts: int, gpus: int) -> Held:
    data = json.loads(content)
    assert set(data) == {"moe_layer_count", "layer_list"} and data["moe_layer_count"] == layers
    assert [layer["layer_id"] for layer in data["layer_list"]] == list(range(layers))
    held = []
    for layer in data["layer_list"]:
        assert set(layer) == {"layer_id", "device_count", "device_list"} and layer["device_count"] == gpus
        assert [device["device_id"] for device in layer["device_list"]] == list(range(gpus))
        held.append(blocks([e for device in layer["device_list"] for e in device["device_expert"]], experts, gpus))
        assert [device["device_expert"] for device in layer["device_list"]] == held[-1]
    torch.tensor(held)  # as vLLM-Ascend reads it
    return held


def megatron(content: bytes, layers: int, experts: int, gpus: int) -> Held:
    """The experts that each rank's contiguous block holds once every expert is at its new position."""
    perm = np.array(json.loads(content))
    assert perm.shape == (layers, experts) and (np.sort(perm, axis=1) == np.arange(experts)).all()
    return [blocks(np.argsort(row).tolist(), experts, gpus) for row in perm]


def exflow(content: bytes, layers: int, experts: int, gpus: int) -> Held:
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert [int(row["Expert"]) for row in rows] == list(range(layers * experts))
    held: Held = [[[] for _ in range(gpus)] for _ in range(layers)]
    for row in rows:
        layer, expert = divmod(int(row["Expert"]), experts)
        held[layer][int(row["Node"])].append(expert)
    assert {len(slots) for row in held for slots in row} == {experts // gpus}
    return held


def table(content: bytes, moe_layers: tuple[int, ...], experts: int, gpus: int) -> Held:
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    held: Held = [[[] for _ in range(gpus)] for _ in moe_layers]
    for row in rows:
        layer, slots = int(row["layer"]), held[int(row["layer"])]
        assert int(row["model_layer"]) == moe_layers[layer]
        assert int(row["slot"]) == sum(map(len, slots))
        slots[int(row["gpu"])].append(int(row["expert"]))
    for layer, slots in enumerate(held):
        everywhere = [expert for experts_of in slots for expert in experts_of]
        assert set(everywhere) == set(range(experts))
        mine = [row for row in rows if int(row["layer"]) == layer]
        for expert in range(experts):
            copies = [int(row["copy"]) for row in mine if int(row["expert"]) == expert]
            assert copies == list(range(everywhere.count(expert)))
        assert all(int(row["copies"]) == everywhere.count(int(row["expert"])) for row in mine)
    return held
