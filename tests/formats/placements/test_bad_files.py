"""Every way in which a plan file can be wrong, each with its one line."""

import io
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import InputError
from engine.formats.placements import open_plan_file, read_deployed, recognise
from tests.formats.placements.cases import EVEN, TINY, model_of
from tests.formats.placements.test_golden import ASCEND, HYGON, META, SGLANG, STATS, TABLE, TENSORRT_LLM, VLLM, saved

ZEROS = "[0, 1, 2, 3, 0, 1]"


def line_of(content: str | bytes, gpus: int = 2, model=TINY) -> str:
    """The one line that reading this file must end with."""
    data = content if isinstance(content, bytes) else content.encode()
    with pytest.raises(InputError) as caught:
        recognise(Path("/somewhere/f.x"), data).deployed(model, gpus)
    message = str(caught.value)
    assert message.startswith("f.x") and "\n" not in message
    return message


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
        ("initial_global_assignments: " + "{a: " * 5000, "nesting, aliases or tags"),
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


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            SGLANG.replace("[3, 2, 0, 2, 1, 3]", "[3, 2, 0, 2, 1, -1]"),
            "f.x, physical_to_logical_map, layer 2: slot 5 holds expert '-1'; the experts of tiny are 0 … 3",
        ),
        (
            SGLANG.replace("[3, 2, 0, 2, 1, 3]", "[3, 2, 0, 2, 2, 3]"),
            "f.x, physical_to_logical_map, layer 2: expert 1 is in no slot; every expert needs one in every layer",
        ),
        (
            SGLANG.replace("[3, 2, 0, 2, 1, 3]", "[3, 2, 0, 1]"),
            "f.x, physical_to_logical_map, layer 2: has 4 slots, the first MoE layer 6; all need as many",
        ),
        (
            SGLANG.replace("[[0, 1, 2, 3, 0, 1]", "[[0, 1, 2, 3]"),
            "f.x, physical_to_logical_map, layer 0: this dense layer has another number of slots",
        ),
        (
            SGLANG.replace("[3, 2, 0, 2, 1, 3]", "[3, 2, 0, 2, 1, true]"),
            "f.x, physical_to_logical_map, layer 2: slot 5 is 'True', not an expert id (a whole number)",
        ),
        (
            SGLANG.replace("[3, 2, 0, 2, 1, 3]", "7"),
            "f.x, physical_to_logical_map, layer 2: a list of expert ids is needed",
        ),
        (SGLANG.replace("}", ', "version": 1}'), "f.x: SGLang takes no other key beside 'physical_to_logical_map'"),
        (
            f'{{"physical_to_logical_map": [{ZEROS}]}}',
            "f.x, physical_to_logical_map: has 1 rows; tiny has 3 decoder layers, dense ones included",
        ),
        (VLLM.replace('"0"', '"5"'), "f.x, line 1: there is no layer '0'; tiny has 2 MoE layers, counted from '0'"),
        (VLLM.replace("]}}", f'], "9": {ZEROS}}}}}'), "f.x, line 1: layer '9' is no MoE layer of tiny"),
        (VLLM.replace('"num_slots": 6', '"num_slots": 8'), "f.x, line 1: num_slots is '8', but the layers list 6"),
        (
            VLLM.replace('"num_redundant_experts": 2', '"num_redundant_experts": 1'),
            "f.x, line 1: num_redundant_experts is '1', but 6 slots make 2",
        ),
        (VLLM.replace('"version": 1', '"version": 3'), "f.x, line 1: version '3' is not known here, 1 is"),
        (META, "f.x: has no record 'eplb_initial_mapping' or 'eplb_load_stats'"),
        (META + STATS[:-40], "f.x, line 2: not valid JSON"),
        (META + STATS.replace("p2l_map", "p2l"), "f.x, line 2: needs a list [ … ] under 'p2l_map'"),
        (HYGON.replace('"version": 2', '"version": 3'), "f.x: version '3' is not known here, 2 is"),
        (
            HYGON.replace("], [3, 2, 0, 2, 1, 3]", "]"),
            "f.x, model_maps: one map with 2 layers is needed, the MoE layers of tiny; it has 'TinyForCausalLM' with 1",
        ),
        (ASCEND.replace('"layer_id": 1', '"layer_id": 0'), "f.x, layer_list: layer_id 0 comes twice"),
        (ASCEND.replace('"layer_id": 1', '"layer_id": 3'), "f.x, layer_list: has the layers 0, 3 … (2 in all)"),
        (
            ASCEND.replace('"device_id": 1', '"device_id": 2', 1),
            "f.x, layer 0: has 2 devices; wanted are the devices 0 … 1",
        ),
        (
            ASCEND.replace("[3, 2, 0]", "[3, 2, 0, 1]"),
            "f.x, layer_list: every device list needs the same length; vLLM-Ascend makes one tensor of them",
        ),
        (
            TENSORRT_LLM.replace("  1:", "  0:"),
            "f.x, initial_global_assignments: there is no model layer 1; tiny has the MoE layers 1 … 2",
        ),
        (
            TENSORRT_LLM + "  7: [0]\n",
            "f.x, initial_global_assignments: layer 7 is no MoE layer of tiny, nor its MTP layer",
        ),
        (TENSORRT_LLM.replace("num_slots: 6", "num_slots: 5"), "f.x: num_slots is '5', but the layers list 6"),
        (TENSORRT_LLM + "ep_size: 2\n", "f.x: TensorRT-LLM knows no field 'ep_size' here"),
        (
            TENSORRT_LLM.replace("[0, 1, 2, 3, 0, 1]", "[0, 1, 2, 3, 0, 1_0]"),
            "f.x, initial_global_assignments, layer 1: slot 5 is '1_0', not a whole number of at least 0",
        ),
        ("[[0, 1, 2, 3]]", "f.x: has 1 rows; tiny has 2 MoE layers"),
        ("[[0, 1, 2, 3], [0, 1, 2, 2]]", "f.x, layer 1: is no permutation of 0 … 3, the positions of 4 experts"),
        (TABLE.replace("2,3,0,spare", "0,3,0,spare"), "f.x, line 5: model layer 0 is no MoE layer of tiny"),
        (TABLE.replace("1,3,1,", "1,4,1,"), "f.x, line 8: expert 4 is out of range, experts are 0 … 3"),
        (TABLE.replace("1,3,1,", "1,3,2,"), "f.x, line 8: GPU 2 is out of range, GPUs are 0 … 1"),
        (TABLE.replace("1,3,1,", "1,0,1,"), "f.x, model layer 1: expert 3 is on no GPU"),
        (TABLE.replace("1,3,1,", "1,x,1,"), "f.x, line 8: expert is 'x', not a whole number of at least 0"),
        (TABLE.replace("1,3,1,", "1,3"), "f.x, line 8: has 2 columns, the header 4"),
        ("Expert,Node\n0,0\n1,0\n2,1\n3,1\n", "f.x: has 1 layers of 4 experts; tiny has 2 MoE layers"),
    ],
)
def test_the_line_of_every_fault(content, line):
    assert line_of(content).startswith(line)


def test_slots_that_do_not_divide_over_the_gpus():
    for content in (SGLANG, VLLM, TENSORRT_LLM):
        assert line_of(content, gpus=4) == "f.x: 6 slots do not divide over 4 GPUs"


def test_a_plan_of_ours_for_other_sizes(tmp_path):
    plan = {"placement": EVEN.model_dump(), "send_order": {"mode": "concurrent"}}
    plan |= {"name": "p", "provenance": {"optimiser": "t"}}
    assert line_of(json.dumps(plan), gpus=4) == "f.x: is for 2 GPUs, but there are 4"
    assert line_of(json.dumps(plan), model=model_of(3, (), 4)) == "f.x: is for 2 MoE layers, but there are 3"
    assert line_of(json.dumps(plan | {"nmae": 1})).startswith("f.x: nmae")


class Evil:
    def __reduce__(self):
        return print, ("unpickled",)


def test_nothing_in_a_pt_file_is_called(capsys):
    rows = torch.tensor(json.loads(SGLANG)["physical_to_logical_map"])
    assert "holds more than tensors" in line_of(saved({"physical_to_logical_map": rows, "x": Evil()}))
    assert "holds more than tensors" in line_of(saved({"physical_to_logical_map": rows, "x": bytearray(5)}))
    assert "is a pickle" in line_of(pickle.dumps(Evil()))
    assert capsys.readouterr().out == ""


def test_tensors_that_are_no_map():
    key = "physical_to_logical_map"
    assert f"f.x, {key}: must be whole numbers" in line_of(saved({key: torch.ones(3, 6)}))
    assert f"f.x, {key}: must be [layers, slots], not [6]" in line_of(saved({key: torch.arange(6)}))
    huge = torch.zeros(1, dtype=torch.int64).expand(3, 2**40)
    assert f"f.x, {key}: [3, 1099511627776] has more numbers than are stored" in line_of(saved({key: huge}))
    assert "holds a Tensor, not a dict" in line_of(saved(torch.ones(2)))
    assert "has 'a'" in line_of(saved({"a": torch.ones(2)}))


def test_other_zip_archives():
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
        with pytest.raises(InputError, match=part):
            open_plan_file(path)
        with pytest.raises(InputError, match=part):
            read_deployed(str(path), TINY, 2)
