"""Plans that an engine can not load are refused with the layers and GPUs at fault; what belongs beside a file is said."""

import json
import re
import shlex

import pytest

from engine.errors import InputError
from engine.formats.placements import TARGETS, write_placement
from engine.plan import Plan, SendOrder, Travel
from engine.result import Provenance
from tests.formats.placements.cases import EVEN, NAMES, SINGLE, TINY, model_of, placed

ENGINES = {
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "vllm": "vLLM",
    "vllm-ascend": "vLLM-Ascend",
    "megatron": "Megatron-Core",
    "exflow": "ExFlow",
}
WITH_REPLICAS = [target for target in ENGINES if target not in SINGLE]


def line_of(target, placement, model=TINY, name="", mtp=False) -> str:
    with pytest.raises(InputError) as caught:
        write_placement(target, placement, model, name or NAMES[target][0], mtp)
    return str(caught.value)


@pytest.mark.parametrize("target", ENGINES)
def test_uneven_plans(target):
    uneven = placed([[0, 1, 2], [3]], [[0, 1, 2], [3]])
    assert line_of(target, uneven) == (
        f"{ENGINES[target]} needs as many slots on every GPU, but layer 0 (model layer 1) has 3 on GPU 0; 1 on GPU 1; also "
        "uneven: layer 1; export its even projection instead (--even)"
    )


def test_uneven_layers_and_gpus_are_named_in_runs():
    model = model_of(6, (), 4)
    even, uneven = [[0], [1], [2], [3]], [[0, 1], [2], [3], []]
    placement = placed(even, uneven, uneven, uneven, even, uneven, model=model)
    assert (
        "layer 1 (model layer 1) has 2 on GPU 0; 1 on GPUs 1, 2; 0 on GPU 3; also uneven: layers 2, 3, 5;"
        in line_of("sglang", placement, model)
    )


@pytest.mark.parametrize("target", WITH_REPLICAS)
def test_layers_with_different_totals(target):
    assert line_of(target, placed([[0, 1], [2, 3]], [[0, 1, 2], [2, 3, 0]])) == (
        f"{ENGINES[target]} needs as many slots in every layer, but layer 0 (model layer 1) has 4 and layer 1 (model layer 2) "
        "has 6; export its even projection instead (--even)"
    )


@pytest.mark.parametrize("target", WITH_REPLICAS)
def test_an_expert_twice_on_a_gpu(target):
    assert line_of(target, placed([[0, 1, 2], [3, 0, 1]], [[0, 1, 2], [3, 0, 3]])) == (
        f"{ENGINES[target]} can not use a second copy of an expert on one GPU, but layer 1 (model layer 2) has expert 3 twice "
        "on GPU 1; export its even projection instead (--even)"
    )


@pytest.mark.parametrize("target", SINGLE)
def test_replicas_where_there_are_none(target):
    assert line_of(target, EVEN) == (
        f"{ENGINES[target]} has no replicas, but layer 0 (model layer 1) has 6 copies of 4 experts; plan with redundant=0"
    )


@pytest.mark.parametrize("target", [target for target in TARGETS if target not in SINGLE])
def test_another_model(target):
    assert line_of(target, EVEN, model_of(4, (0,), 4)) == "the plan places 2 MoE layers, but the model tiny has 3"
    assert (
        line_of(target, EVEN, model_of(3, (0,), 5)) == "the plan places 4 experts per layer, but the model tiny has 5"
    )
    assert line_of(target, EVEN, model_of(3, (1,), 4)) == (
        "layer 0 of the plan is model layer 1, of the model tiny it is 0"
    )


def test_names_that_an_engine_would_not_open():
    assert line_of("sglang", EVEN, name="map.txt") == (
        "map.txt: SGLang reads its expert locations by extension; call the file .json or .pt"
    )
    assert line_of("vllm-ascend", EVEN, name="map.txt") == (
        "map.txt: vLLM-Ascend only takes expert maps that are called .json"
    )
    assert "only TensorRT-LLM" in line_of("sglang", EVEN, mtp=True)


def test_what_to_add_for_each_engine():
    lines = {target: write_placement(target, EVEN, TINY, NAMES[target][0]).lines for target in WITH_REPLICAS}
    assert lines["sglang"] == (
        "--init-expert-location plan.json",
        "--ep-num-redundant-experts 2",
        "--ep-size 2",
        "--ep-dispatch-algorithm dynamic",
    )
    assert lines["trtllm"] == (
        "moe_config:",
        "  load_balancer: plan.yaml",
        "enable_attention_dp: true",
        "moe_expert_parallel_size: 2",
    )
    *flags, (option, settings) = map(shlex.split, lines["vllm"])
    assert flags == [["--enable-expert-parallel"], ["--enable-eplb"]] and option == "--eplb-config"
    assert json.loads(settings) == {
        "num_redundant_experts": 2,
        "initial_mapping_path": "plan.jsonl",
        "disable_online_rebalancing": True,
    }
    _, (option, settings) = map(shlex.split, lines["vllm-ascend"])
    assert option == "--additional-config"
    assert json.loads(settings) == {"eplb_config": {"expert_map_path": "plan.json"}}
    single = placed([[0, 1], [2, 3]], [[0, 1], [2, 3]])
    assert "--ep-dispatch-algorithm dynamic" not in write_placement("sglang", single, TINY).lines
    assert write_placement("megatron", single, TINY).lines == ("--expert-model-parallel-size 2",)


def test_what_no_engine_can_carry_is_said():
    notes = {target: " ".join(write_placement(target, EVEN, TINY, NAMES[target][0]).notes) for target in WITH_REPLICAS}
    assert "attention data parallelism" in notes["trtllm"] and "DeepseekV3ForCausalLM" in notes["trtllm"]
    assert "for lack of layer 3" in notes["trtllm"]
    assert "layer 3 is the MTP layer's, a copy of layer 2" in " ".join(
        write_placement("trtllm", EVEN, TINY, "x.yaml", mtp=True).notes
    )
    assert "#41141" in notes["vllm"] and "first model runner" in notes["vllm-ascend"]
    plan = Plan(
        name="p",
        placement=EVEN,
        send_order=SendOrder(mode="concurrent"),
        travel=Travel(unit="node"),
        provenance=Provenance(optimiser="t"),
    )
    left = [note for note in write_placement("sglang", plan, TINY).notes if note.startswith("not carried: ")]
    assert left == ["not carried: how tokens travel (one row per node): the engine's own dispatch decides"]
    coherent = Plan(
        name="p",
        placement=placed([[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        send_order=SendOrder(mode="concurrent"),
        execution="context-coherent",
        provenance=Provenance(optimiser="t"),
    )
    assert any(
        re.match("not carried: context-coherent", note) for note in write_placement("vllm", coherent, TINY).notes
    )
