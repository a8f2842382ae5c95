"""Plan files that cannot be read, and plans that an engine cannot take: one line of advice each."""

import io
import json
import pickle
import shlex
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.formats.placements import TARGETS, open_plan_file, read_deployed, recognise, write_placement
from engine.plan import Plan, SendOrder, Travel
from engine.result import Provenance
from tests.cases import checkers
from tests.cases import plan_files as good
from tests.cases.files import refused
from tests.cases.plan_files import EVEN, NAMES, SINGLE, TINY, held_by, model_of, placed, saved_tensors
from tests.cases.refusals import refusal

ZEROS = "[0, 1, 2, 3, 0, 1]"


def line_of(content: str | bytes, gpus: int = 2, model=TINY) -> str:
    """The one line that reading this file must end with."""
    data = content if isinstance(content, bytes) else content.encode()
    return refused(Path("/somewhere/f.x"), read=lambda path: recognise(path, data).deployed(model, gpus))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "the file is empty"),
        ("hello", "is no plan that is known here"),
        ('{"a": 1}', "is no plan that is known here"),
        ('{"a": ', "; the file may be cut off"),
        (b"\xff\xfe\x00x", "not UTF-8"),
        (pickle.dumps([1]), "is a pickle, which is never unpickled"),
        (b"\x93NUMPY\x01\x00", "is a NumPy .npy array, not a plan"),
        (b"PK\x03\x04", "damaged"),
        ('{"logical_count": [[1, 2]]}', "holds the loads of experts (logical_count): a recording, not a plan"),
        ("[" * 5000, "not valid JSON"),
        ("initial_global_assignments: " + "[" * 5000, "nesting, aliases or tags"),
        ("initial_global_assignments: *x", "nesting, aliases or tags"),
        ("initial_global_assignments: !!python/object:os.system []", "nesting, aliases or tags"),
        ("initial_global_assignments: [1", "line 2: not valid YAML"),
        ("initial_global_assignments: 3", "needs an object {…} under 'initial_global_assignments'"),
        ("- initial_global_assignments", "needs the fields num_slots"),
        ("a: 1\na: 2\ninitial_global_assignments: {}", "a key comes twice"),
    ],
)
def test_what_is_no_plan(content, part):
    assert part in line_of(content)


def sglang_with(row: str) -> str:
    """SGLang's map with another row of its last layer."""
    return good.SGLANG.replace("[3, 2, 0, 2, 1, 3]", row)


MAP = "physical_to_logical_map"
LAYER_2 = f", {MAP}, layer 2: "


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (sglang_with("[3, 2, 0, 2, 1, -1]"), LAYER_2 + "slot 5 holds expert '-1'; the experts of tiny are 0 … 3"),
        (sglang_with("[3, 2, 0, 2, 2, 3]"), LAYER_2 + "expert 1 is in no slot; every expert needs one in every layer"),
        (sglang_with("[3, 2, 0, 1]"), LAYER_2 + "has 4 slots, the first MoE layer 6; all need as many"),
        (good.SGLANG.replace(f"[{ZEROS}", "[[0, 1, 2, 3]"), f", {MAP}, layer 0: this dense layer has another number of slots"),
        (sglang_with("[3, 2, 0, 2, 1, true]"), LAYER_2 + "slot 5 is 'True', not an expert id (a whole number)"),
        (sglang_with("7"), LAYER_2 + "a list of expert ids is needed"),
        (good.SGLANG.replace("}", ', "version": 1}'), f": SGLang takes no other key beside '{MAP}'"),
        (f'{{"{MAP}": [{ZEROS}]}}', f", {MAP}: has 1 rows; tiny has 3 decoder layers, dense ones included"),
        (saved_tensors({MAP: torch.ones(3, 6)}), f", {MAP}: must be whole numbers"),
        (saved_tensors({MAP: torch.arange(6)}), f", {MAP}: must be [layers, slots], not [6]"),
        (
            saved_tensors({MAP: torch.zeros(1, dtype=torch.int64).expand(3, 2**40)}),
            f", {MAP}: [3, 1099511627776] has more numbers than are stored",
        ),
        (good.VLLM.replace('"0"', '"5"'), ", line 1: there is no layer '0'; tiny has 2 MoE layers, counted from '0'"),
        (good.VLLM.replace("]}}", f'], "9": {ZEROS}}}}}'), ", line 1: layer '9' is no MoE layer of tiny"),
        (good.VLLM.replace('"num_slots": 6', '"num_slots": 8'), ", line 1: num_slots is '8', but the layers list 6"),
        (good.VLLM.replace('experts": 2', 'experts": 1'), ", line 1: num_redundant_experts is '1', but 6 slots make 2"),
        (good.VLLM.replace('"version": 1', '"version": 3'), ", line 1: version '3' is not known here, 1 is"),
        (good.VLLM_META, ": has no record 'eplb_initial_mapping' or 'eplb_load_stats'"),
        (good.VLLM_META + good.VLLM_STATS[:-40], ", line 2: not valid JSON"),
        (good.VLLM_META + good.VLLM_STATS.replace("p2l_map", "p2l"), ", line 2: needs a list [ … ] under 'p2l_map'"),
        (good.HYGON.replace('"version": 2', '"version": 3'), ": version '3' is not known here, 2 is"),
        (
            good.HYGON.replace("], [3, 2, 0, 2, 1, 3]", "]"),
            ", model_maps: one map with 2 layers is needed, the MoE layers of tiny; it has 'TinyForCausalLM' with 1",
        ),
        (
            good.ASCEND.replace('"layer_list": [', '"layer_list": [{}, {}, '),
            ", layer_list: has 4 layers; tiny has 2 MoE layers",
        ),
        (
            good.ASCEND.replace('{"device_id": 0, "device_expert": [0, 1, 2]}, ', ""),
            ", layer_list, entry 0: has 1 devices; there are 2 GPUs",
        ),
        (
            good.ASCEND.replace("[3, 2, 0]", "[3, 2, 0, 1]"),
            ", layer_list: every device list needs the same length; vLLM-Ascend makes one tensor of them",
        ),
        (
            good.TENSORRT_LLM.replace("  1:", "  0:"),
            ", initial_global_assignments: there is no model layer 1; tiny has the MoE layers 1 … 2",
        ),
        (good.TENSORRT_LLM + "  7: [0]\n", ", initial_global_assignments: layer 7 is no MoE layer of tiny, nor its MTP layer"),
        (good.TENSORRT_LLM.replace("num_slots: 6", "num_slots: 5"), ": num_slots is '5', but the layers list 6"),
        (good.TENSORRT_LLM + "ep_size: 2\n", ": TensorRT-LLM knows no field 'ep_size' here"),
        (
            good.TENSORRT_LLM.replace(ZEROS, "[0, 1, 2, 3, 0, 1_0]"),
            ", initial_global_assignments, layer 1: slot 5 is '1_0', not a whole number of at least 0",
        ),
        ("[[0, 1, 2, 3]]", ": has 1 rows; tiny has 2 MoE layers"),
        ("[[0, 1, 2, 3], [0, 1, 2, 2]]", ", layer 1: is no permutation of 0 … 3, the positions of 4 experts"),
        (good.TABLE.replace("2,3,0,spare", "0,3,0,spare"), ", line 5: model layer 0 is no MoE layer of tiny"),
        (good.TABLE.replace("1,3,1,", "1,4,1,"), ", line 8: expert 4 is out of range, experts are 0 … 3"),
        (good.TABLE.replace("1,3,1,", "1,3,2,"), ", line 8: GPU 2 is out of range, GPUs are 0 … 1"),
        (good.TABLE.replace("1,3,1,", "1,0,1,"), ", model layer 1: expert 3 is on no GPU"),
        (good.TABLE.replace("1,3,1,", "1,x,1,"), ", line 8: expert is 'x', not a whole number of at least 0"),
        (good.TABLE.replace("1,3,1,", "1,3"), ", line 8: has 2 columns, the header 4"),
        ("Expert,Node\n0,0\n1,0\n2,1\n3,1\n", ": has 1 layers of 4 experts; tiny has 2 MoE layers"),
    ],
)
def test_the_line_of_every_fault(content, line):
    assert line_of(content).startswith("f.x" + line)


def test_files_for_other_sizes(tmp_path):
    plan = {"placement": EVEN.model_dump(), "send_order": {"mode": "concurrent"}}
    plan |= {"name": "p", "provenance": {"optimiser": "t"}}
    assert line_of(json.dumps(plan), gpus=4) == "f.x: is for 2 GPUs, but there are 4"
    assert line_of(json.dumps(plan), model=model_of(3, (), 4)) == "f.x: is for 2 MoE layers, but there are 3"
    assert line_of(json.dumps(plan | {"nmae": 1})).startswith("f.x: nmae")
    for content in (good.SGLANG, good.VLLM, good.TENSORRT_LLM):
        assert line_of(content, gpus=4) == "f.x: 6 slots do not divide over 4 GPUs"


class Evil:
    def __reduce__(self):
        return print, ("unpickled",)


def test_other_archives_of_which_nothing_is_called(capsys):
    for other in (Evil(), bytearray(5)):
        assert "holds more than tensors" in line_of(saved_tensors({MAP: torch.zeros(3, 6), "x": other}))
    assert "is a pickle" in line_of(pickle.dumps(Evil()))
    assert "holds a Tensor, not a dict" in line_of(saved_tensors(torch.ones(2)))
    assert "has 'a'" in line_of(saved_tensors({"a": torch.ones(2)}))
    assert capsys.readouterr().out == ""
    file = io.BytesIO()
    np.savez(file, experts=np.zeros(3))
    assert "is a zip archive, but not what torch.save writes" in line_of(file.getvalue())
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(5_000_000))
    assert len(file.getvalue()) < 10_000 and "is compressed" in line_of(file.getvalue())
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "not what torch.save writes" in line_of(file.getvalue())


def test_files_that_are_not_there(tmp_path):
    for path, part in ((tmp_path / "no.json", "there is no such file"), (tmp_path, "is a folder")):
        assert part in refusal(open_plan_file, path)
        assert part in refusal(read_deployed, str(path), TINY, 2)


ENGINES = {
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "vllm": "vLLM",
    "vllm-ascend": "vLLM-Ascend",
    "megatron": "Megatron-Core",
    "exflow": "ExFlow",
}
WITH_REPLICAS = [target for target in ENGINES if target not in SINGLE]


def advice_of(target, placement, model=TINY, name="", mtp=False) -> str:
    return refusal(write_placement, target, placement, model, name or NAMES[target][0], mtp)


@pytest.mark.parametrize("target", ENGINES)
def test_uneven_plans(target):
    uneven = placed([[0, 1, 2], [3]], [[0, 1, 2], [3]])
    assert advice_of(target, uneven) == (
        f"{ENGINES[target]} needs as many slots on every GPU, but layer 0 (model layer 1) has 3 on GPU 0; 1 on GPU 1; also "
        "uneven: layer 1; export its even projection instead (--even)"
    )


@pytest.mark.parametrize("target", WITH_REPLICAS)
def test_numbers_of_slots_that_gpus_do_not_divide_name_the_nearest(target):
    assert advice_of(target, placed([[0, 1, 2], [3, 0]], [[0, 1, 2], [3, 1]])).endswith(
        "; plan with 0 or 2 redundant experts in all instead of 1, or export its even projection instead (--even)"
    )


def test_uneven_layers_and_gpus_are_named_in_runs():
    model = model_of(6, (), 4)
    even, uneven = [[0], [1], [2], [3]], [[0, 1], [2], [3], []]
    placement = placed(even, uneven, uneven, uneven, even, uneven, model=model)
    assert "layer 1 (model layer 1) has 2 on GPU 0; 1 on GPUs 1, 2; 0 on GPU 3; also uneven: layers 2, 3, 5;" in advice_of(
        "sglang", placement, model
    )


@pytest.mark.parametrize("target", WITH_REPLICAS)
def test_layers_with_different_totals_and_an_expert_twice_on_a_gpu(target):
    assert advice_of(target, placed([[0, 1], [2, 3]], [[0, 1, 2], [2, 3, 0]])) == (
        f"{ENGINES[target]} needs as many slots in every layer, but layer 0 (model layer 1) has 4 and layer 1 (model layer 2) "
        "has 6; export its even projection instead (--even)"
    )
    assert advice_of(target, placed([[0, 1, 2], [3, 0, 1]], [[0, 1, 2], [3, 0, 3]])) == (
        f"{ENGINES[target]} can not use a second copy of an expert on one GPU, but layer 1 (model layer 2) has expert 3 twice "
        "on GPU 1; export its even projection instead (--even)"
    )


@pytest.mark.parametrize("target", SINGLE)
def test_replicas_where_there_are_none(target):
    assert advice_of(target, EVEN) == (
        f"{ENGINES[target]} has no replicas, but layer 0 (model layer 1) has 6 copies of 4 experts; plan with redundant=0"
    )


@pytest.mark.parametrize("target", [target for target in TARGETS if target not in SINGLE])
def test_another_model(target):
    assert advice_of(target, EVEN, model_of(4, (0,), 4)) == "the plan places 2 MoE layers, but the model tiny has 3"
    assert advice_of(target, EVEN, model_of(3, (0,), 5)) == "the plan places 4 experts per layer, but the model tiny has 5"
    assert advice_of(target, EVEN, model_of(3, (1,), 4)) == "layer 0 of the plan is model layer 1, of the model tiny it is 0"


def test_names_that_an_engine_would_not_open():
    said = advice_of("sglang", EVEN, name="map.txt")
    assert said == "map.txt: SGLang reads its expert locations by extension; call the file .json or .pt"
    assert advice_of("vllm-ascend", EVEN, name="map.txt") == "map.txt: vLLM-Ascend only takes expert maps that are called .json"
    assert "only TensorRT-LLM" in advice_of("sglang", EVEN, mtp=True)


def test_what_to_add_for_each_engine():
    lines = {target: write_placement(target, EVEN, TINY, NAMES[target][0]).lines for target in WITH_REPLICAS}
    slots = ("--ep-num-redundant-experts 2", "--tp-size 2", "--ep-size 2", "--ep-dispatch-algorithm dynamic")
    assert lines["sglang"] == ("--init-expert-location plan.json", *slots)
    config = ("moe_config:", "  load_balancer: plan.yaml")
    assert lines["trtllm"] == (*config, "enable_attention_dp: true", "moe_expert_parallel_size: 2")
    *flags, (option, settings) = map(shlex.split, lines["vllm"])
    assert flags == [["--enable-expert-parallel"], ["--enable-eplb"]] and option == "--eplb-config"
    carried = {"num_redundant_experts": 2, "initial_mapping_path": "plan.jsonl"}
    assert json.loads(settings) == carried | {"disable_online_rebalancing": True}
    _, (option, settings) = map(shlex.split, lines["vllm-ascend"])
    assert option == "--additional-config"
    assert json.loads(settings) == {"eplb_config": {"expert_map_path": "plan.json"}}
    single = placed([[0, 1], [2, 3]], [[0, 1], [2, 3]])
    assert "--ep-dispatch-algorithm dynamic" not in write_placement("sglang", single, TINY).lines
    assert write_placement("megatron", single, TINY).lines == ("--expert-model-parallel-size 2",)


@pytest.mark.parametrize(
    ("target", "rule", "line", "note", "carried"),
    [
        ("sglang", None, "--ep-dispatch-algorithm dynamic", "without an all-to-all backend; with one", True),
        ("sglang", "nearest-static", "--ep-dispatch-algorithm static", "as the dispatch algorithm 'static' does", True),
        ("sglang", "nearest-static", "--deepep-mode low_latency", "as the dispatch algorithm 'static' does", True),
        ("sglang", "lp", "--ep-dispatch-algorithm lp", "as the dispatch algorithm 'lp' does", True),
        ("sglang", "fixed", "--ep-dispatch-algorithm dynamic", "a rule for copies that SGLang does not have", False),
        ("sglang", "nearest-static", "--tp-size 2", "all-to-all backend", True),  # else it is no EP size
        ("vllm-ascend", None, "--enable-expert-parallel", "one fixed copy of an expert", True),
        ("vllm-ascend", "fixed", "--enable-expert-parallel", "count on --tensor-parallel-size 1", True),
    ],
)
def test_a_plan_is_exported_with_the_rule_of_copies_that_it_was_made_for(target, rule, line, note, carried):
    parts = {"name": "p", "send_order": SendOrder(mode="concurrent"), "provenance": Provenance(optimiser="t")}
    exported = write_placement(target, Plan(placement=EVEN, travel=Travel(replicas=rule), **parts), TINY)
    assert line in exported.lines and any(note in said for said in exported.notes)
    assert carried == (not any(said.startswith("not carried: how tokens travel") for said in exported.notes))


def test_a_rule_for_copies_is_not_missed_where_there_are_none():
    single = placed([[0, 1], [2, 3]], [[0, 1], [2, 3]])
    parts = {"name": "p", "send_order": SendOrder(mode="concurrent"), "provenance": Provenance(optimiser="t")}
    plan = Plan(placement=single, travel=Travel(replicas="fixed"), **parts)
    assert not [
        note for target in NAMES for note in write_placement(target, plan, TINY, NAMES[target][0]).notes if "travel" in note
    ]


def test_a_permutation_across_the_groups_of_a_router_is_named():
    grouped = TINY.model_copy(update={"expert_groups": 2})
    mixed, whole = placed([[0, 2], [1, 3]], [[0, 1], [2, 3]]), placed([[2, 3], [0, 1]], [[0, 1], [2, 3]])
    assert "1 of 2 layers mix the 2 groups" in " ".join(write_placement("megatron", mixed, grouped).notes)
    moved = placed([[3, 2], [1, 0]], [[0, 1], [2, 3]])  # the order within a GPU is free
    assert json.loads(write_placement("megatron", moved, grouped).files["plan.json"])[0] == [2, 3, 0, 1]
    for placement, model in ((whole, grouped), (mixed, TINY), (moved, grouped)):
        assert "groups" not in " ".join(write_placement("megatron", placement, model).notes)


def test_what_no_engine_can_carry_is_said():
    notes = {target: " ".join(write_placement(target, EVEN, TINY, NAMES[target][0]).notes) for target in WITH_REPLICAS}
    assert "attention data parallelism" in notes["trtllm"] and "DeepseekV3ForCausalLM" in notes["trtllm"]
    assert "for lack of layer 3" in notes["trtllm"]
    with_mtp = write_placement("trtllm", EVEN, TINY, "x.yaml", mtp=True)
    assert "layer 3 is the MTP layer's, a copy of layer 2" in " ".join(with_mtp.notes)
    assert checkers.tensorrt_llm(with_mtp.files["x.yaml"], (1, 2), 4, 2, mtp=3) == held_by(EVEN)
    assert "#41141" in notes["vllm"] and "first model runner" in notes["vllm-ascend"]
    parts = {"name": "p", "send_order": SendOrder(mode="concurrent"), "provenance": Provenance(optimiser="t")}
    plan = Plan(placement=EVEN, travel=Travel(unit="node"), **parts)
    left = [note for note in write_placement("sglang", plan, TINY).notes if note.startswith("not carried: ")]
    assert left == ["not carried: how tokens travel (one row per node): the engine's own dispatch decides"]
    coherent = Plan(placement=placed([[0, 1], [2, 3]], [[0, 1], [2, 3]]), execution="context-coherent", **parts)
    notes = write_placement("vllm", coherent, TINY).notes
    assert any(note.startswith("not carried: context-coherent") for note in notes)
