"""Plan files that are nearly right: each gives a placement or one clear line."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.placements import recognise
from tests.cases import mutations
from tests.cases import plan_files as golden
from tests.cases.fuzzing import answer_or_one_line, any_input
from tests.cases.mutations import changed_text, damaged, json_texts, mutated
from tests.cases.plan_files import PLAN, TINY, saved_tensors, with_pickle

JSON = {
    "sglang": golden.SGLANG,
    "hygon": golden.HYGON,
    "ascend": golden.ASCEND_MTP,
    "megatron": "[[2, 1, 3, 0], [0, 2, 1, 3]]",
    "studio": json.dumps(PLAN),
    "vllm": golden.VLLM,
}
TEXT = JSON | {
    "vllm server's log": golden.rank_map(0, [0, 1]) + golden.rank_map(1, [2, 3]),
    "vllm log": golden.VLLM_META + golden.VLLM_STATS + golden.VLLM_LATER,
    "tensorrt-llm": golden.TENSORRT_LLM_ALIAS,
    "exflow": "Expert,Node\n0,1\n1,0\n2,1\n3,0\n4,0\n5,1\n6,0\n7,1\n",
    "table": golden.TABLE,
}
READERS = (*TEXT, "sglang .pt")

PIECES = (
    *mutations.PIECES,
    *("\n  - ", "&a ", "*a", "!!int ", "? ", "|"),
    *("physical_to_logical_map", "initial_global_assignments", '"record_type"', "eplb_load_stats", "layer_list"),
    *("model_layer,gpu,expert", "Expert,Node"),
)


@st.composite
def _torch_file(draw: st.DrawFn) -> bytes:
    """`torch.save` of something like a map, or such a file with bytes of its pickle or of the archive changed."""
    rows = json.loads(golden.SGLANG)["physical_to_logical_map"]
    dtypes = st.sampled_from((torch.int64, torch.int32, torch.uint8, torch.float32, torch.bool, torch.complex64))
    shapes = st.sampled_from(((3, 6), (18,), (3, 6, 1), (0, 6), (3, 0), (1, 18)))
    odd = st.builds(lambda dtype, shape: torch.ones(shape).to(dtype), dtypes, shapes)
    content = draw(
        st.one_of(
            st.builds(lambda dtype: torch.tensor(rows).to(dtype), dtypes),
            mutated(rows),
            odd,
            st.just(torch.ones(1, dtype=torch.int64).expand(3, 2**30)),
        )
    )
    keys = ("physical_to_logical_map", "last_physical_to_logical_map", "records", "x")
    data = golden.saved_tensors({draw(st.sampled_from(keys)): content, **draw(st.sampled_from(({}, {"y": 1})))})
    match draw(st.sampled_from(("whole", "bytes", "pickle"))):
        case "bytes":
            return draw(damaged(data))
        case "pickle":
            return with_pickle(data, lambda pickled: draw(damaged(pickled)))
    return data


def plan_files(reader: str) -> st.SearchStrategy[bytes]:
    """Files that this reader nearly takes."""
    if reader == "sglang .pt":
        return _torch_file()
    text = st.builds(str.encode, changed_text(TEXT[reader], PIECES))
    if reader not in JSON:
        return text
    return st.one_of(mutated(json.loads(JSON[reader])).flatmap(json_texts), text)


def outcome_of(content: bytes, gpus: int) -> str:
    """`read`, or the message of the one line; whatever else happens is a find."""
    placement = answer_or_one_line(lambda: recognise(Path("f.x"), content).deployed(TINY, gpus).placement)
    if isinstance(placement, str):
        assert placement.startswith("f.x")
        return placement
    assert (placement.layers, placement.gpus, placement.experts) == (2, gpus, 4)
    assert all({expert for held in row for expert in held} == set(range(4)) for row in placement.experts_of_gpu)
    return "read"


@pytest.mark.parametrize("reader", READERS)
@given(data=st.data())
@any_input
def test_a_placement_or_one_line(reader, data):
    outcome_of(data.draw(plan_files(reader)), data.draw(st.sampled_from((1, 2, 3))))


@given(st.binary(max_size=200), st.sampled_from((b"", b"PK\x03\x04", b"{", b"[", b"\x80\x02", b"Expert,Node\n")))
@any_input
def test_any_bytes(content, beginning):
    outcome_of(beginning + content, 2)


def test_finds():
    assert outcome_of(b'{"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], null, [3, 2, 0, 2, 1, 3]]}', 1) != "read"
    # PyTorch's own unpickler raises IndexErrors on these, and warns of protocols.
    data = saved_tensors({"physical_to_logical_map": torch.zeros(3, 6, dtype=torch.int64)})
    for other in (b"\x80\x02", b"\x80}", b"\x80\x39}"):
        assert outcome_of(with_pickle(data, lambda pickled, new=other: pickled.replace(b"\x80\x02}", new)), 1) != "read"
