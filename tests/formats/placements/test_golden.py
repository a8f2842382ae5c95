"""A file of every engine's, written by hand from its documented form, and what it says."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.formats.placements import open_plan_file, read_deployed, recognise
from engine.plan import Plan, SendOrder
from engine.result import Provenance
from tests.formats.placements.cases import EVEN, TINY, held_by, model_of

SGLANG = '{"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1], [3, 2, 0, 2, 1, 3]]}'
SGLANG_MTP = SGLANG.replace("]]}", "], [0, 1, 2, 3, 0, 1]]}")

TENSORRT_LLM = """\
num_slots: 6
layer_updates_per_iter: 0
initial_global_assignments:
  1: [0, 1, 2, 3, 0, 1]
  2:
  - 3
  - 2
  - 0
  - 2
  - 1
  - 3
"""
TENSORRT_LLM_MTP = TENSORRT_LLM + "  3: [0, 1, 2, 3, 0, 1]\n"
TENSORRT_LLM_ALIAS = """\
initial_global_assignments:
  1: &id001 [0, 1, 2, 3, 0, 1]
  2: [3, 2, 0, 2, 1, 3]
  3: *id001
layer_updates_per_iter: 0
num_slots: 6
"""

VLLM = (
    '{"record_type": "eplb_initial_mapping", "version": 1, "num_redundant_experts": 2, "num_slots": 6, '
    '"initial_global_assignments": {"0": [0, 1, 2, 3, 0, 1], "1": [3, 2, 0, 2, 1, 3]}}\n'
)
VLLM_MTP = VLLM.replace("]}}", '], "2": [0, 1, 2, 3, 0, 1]}}')
META = '{"record_type": "eplb_load_meta", "version": 1, "model": "tiny", "num_ranks": 2, "num_layers": 2}\n'
STATS = (
    '{"record_type": "eplb_load_stats", "version": 1, "step": 7, "num_ranks": 2, '
    '"expert_load": [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]], "p2l_map": [[0, 1, 2, 3, 2, 3], [0, 1, 2, 3, 2, 3]]}\n'
)
LATER = STATS.replace('"step": 7', '"step": 8').replace(
    "[[0, 1, 2, 3, 2, 3], [0, 1, 2, 3, 2, 3]]", "[[0, 1, 2, 3, 0, 1], [3, 2, 0, 2, 1, 3]]"
)

HYGON = (
    '{"version": 2, "model_maps": {'
    '"TinyForCausalLM": {"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], [3, 2, 0, 2, 1, 3]]}, '
    '"TinyMTPModel": {"physical_to_logical_map": [[0, 1, 2, 3, 2, 3]]}}}'
)
HYGON_LEGACY = '{"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], [3, 2, 0, 2, 1, 3]]}'

ASCEND = """{"moe_layer_count": 2, "layer_list": [
  {"layer_id": 0, "device_count": 2, "device_list": [
    {"device_id": 0, "device_expert": [0, 1, 2]}, {"device_id": 1, "device_expert": [3, 0, 1]}]},
  {"layer_id": 1, "device_count": 2, "device_list": [
    {"device_id": 1, "device_expert": [2, 1, 3]}, {"device_id": 0, "device_expert": [3, 2, 0]}]}]}"""
ASCEND_MTP = ASCEND.replace(
    "]}]}]}",
    ']}]}, {"layer_id": 2, "device_count": 2, "device_list": ['
    '{"device_id": 0, "device_expert": [0, 1, 2]}, {"device_id": 1, "device_expert": [3, 0, 1]}]}]}',
)

TABLE = """\
model_layer,expert,gpu,what
1,0,0,
1,1,0,
1,2,0,
2,3,0,spare
2,2,0,
2,0,0,
1,3,1,
1,0,1,
1,1,1,
2,2,1,
2,1,1,
2,3,1,
"""

WITH_REPLICAS = {
    "sglang": (SGLANG, ""),
    "sglang with MTP": (SGLANG_MTP, "layer 3, after the last decoder layer, is the MTP layer's and left out"),
    "tensorrt-llm": (TENSORRT_LLM, ""),
    "tensorrt-llm with MTP": (TENSORRT_LLM_MTP, "layer 3 is the MTP layer's and left out"),
    "tensorrt-llm with an alias": (TENSORRT_LLM_ALIAS, "layer 3 is the MTP layer's and left out"),
    "vllm": (VLLM, ""),
    "vllm with MTP": (VLLM_MTP, "layer 2 is the MTP layer's and left out"),
    "vllm log": (META + STATS + LATER, "the mapping of the last record of loads (line 3)"),
    "vllm log, another record at its end": (META + LATER + '{"record_type": "bench_run_start"}\n', "(line 2)"),
    "vllm log, old": (STATS + LATER.rstrip(), "the mapping of the last record of loads (line 2)"),
    "hygon": (HYGON, "the map of 'TinyMTPModel' is left out"),
    "hygon, legacy": (HYGON_LEGACY, "its 2 rows are MoE layers; SGLang would ask for all 3 decoder layers"),
    "ascend": (ASCEND, ""),
    "ascend with MTP": (ASCEND_MTP, "layer 2 is the MTP layer's and left out"),
    "table": (TABLE, ""),
    "table, as a spreadsheet saves it": ("\ufeff" + TABLE.replace("\n", "\r\n"), ""),
}


@pytest.mark.parametrize("case", WITH_REPLICAS)
def test_two_layers_with_replicas(case, tmp_path):
    text, note = WITH_REPLICAS[case]
    path = tmp_path / "deployed.txt"  # told by its content
    path.write_bytes(text.encode())
    assert read_deployed(path, TINY, 2) == EVEN
    notes = open_plan_file(path).deployed(TINY, 2).notes
    assert len(notes) == bool(note) and all(note in text for text in notes)


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sglang_as_pt(dtype):
    rows = json.loads(SGLANG)["physical_to_logical_map"]
    for value in (torch.tensor(rows, dtype=dtype), rows):
        content = saved({"physical_to_logical_map": value})
        assert recognise(Path("map.pt"), content).deployed(TINY, 2).placement == EVEN


def test_the_map_that_ran_last_in_a_recorder_dump():
    rows = torch.tensor(json.loads(SGLANG)["physical_to_logical_map"], dtype=torch.int32)
    record = {"forward_pass_id": 3, "rank": 0, "gatherer_key": "primary", "global_physical_count": torch.ones(3, 6)}
    content = saved({"records": [record], "last_physical_to_logical_map": rows})
    read = recognise(Path("dump.pt"), content).deployed(TINY, 2)
    assert read.placement == EVEN and "recorder" in read.format


def test_exflow_and_a_permutation():
    """Layer 1: GPU 0 has the experts 3 and 1. Layer 2: GPU 0 has 0 and 2."""
    exflow = "Expert,Node\n0,1\n1,0\n2,1\n3,0\n4,0\n5,1\n6,0\n7,1\n"
    assert held_by(recognise(Path("x"), exflow.encode()).deployed(TINY, 2).placement) == [
        [[1, 3], [0, 2]],
        [[0, 2], [1, 3]],
    ]
    # Expert 0 moves to position 2, expert 1 to 1, expert 2 to 3 and expert 3 to 0.
    permutation = "[[2, 1, 3, 0], [0, 2, 1, 3]]"
    assert held_by(recognise(Path("x"), permutation.encode()).deployed(TINY, 2).placement) == [
        [[3, 1], [0, 2]],
        [[0, 2], [1, 3]],
    ]


def test_a_plan_of_the_studio(tmp_path):
    plan = Plan(
        name="p", placement=EVEN, send_order=SendOrder(mode="concurrent"), provenance=Provenance(optimiser="test")
    )
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert open_plan_file(path).plan == plan
    assert read_deployed(path, TINY, 2) == EVEN


def test_default_layouts_as_vllm_has_them():
    """30 experts on 8 ranks, vllm #21497."""
    model = model_of(2, (0,), 30)
    linear, dealt = (held_by(read_deployed(word, model, 8))[0] for word in ("linear", "round-robin"))
    assert list(map(len, linear)) == list(map(len, dealt)) == [4, 4, 4, 4, 4, 4, 3, 3]
    assert [expert for held in linear for expert in held] == list(range(30))
    assert dealt == [list(range(rank, 30, 8)) for rank in range(8)]
    assert read_deployed("round_robin", model, 8) == read_deployed(Path("round-robin"), model, 8)
    more_gpus = read_deployed("linear", model_of(1, (), 2), 3)
    assert held_by(more_gpus) == [[[0], [1], []]]
    assert np.array_equal(more_gpus.slots, [[1, 1, 0]])


def test_a_dead_slot_of_ascend_is_left_out():
    """The second copy on a device takes the first one's place in its table."""
    twice = ASCEND.replace('"device_expert": [3, 0, 1]', '"device_expert": [3, 0, 3]')
    read = recognise(Path("map.json"), twice.encode()).deployed(TINY, 2)
    assert held_by(read.placement)[0] == [[0, 1, 2], [3, 0]]
    assert read.notes == ("1 slots with a second copy of an expert on the same device are dead and left out",)


def test_an_expert_twice_on_a_gpu_may_run_elsewhere():
    """DeepSeek's EPLB lays experts out like this, and SGLang serves it."""
    row = "[0, 0, 2, 3, 1, 1]"
    content = f'{{"physical_to_logical_map": [{row}, {row}, {row}]}}'
    assert held_by(recognise(Path("x"), content.encode()).deployed(TINY, 2).placement)[0] == [[0, 0, 2], [3, 1, 1]]
