"""Plan files that are nearly right: golden ones of every reader with their structure, their text or their bytes changed."""

import io
import json
import zipfile
from typing import Any

import torch
from hypothesis import strategies as st

from tests.formats import mutations
from tests.formats.mutations import changed_text, damaged, json_texts, mutated
from tests.formats.placements import test_golden as golden
from tests.formats.placements.cases import EVEN

PLAN = {
    "name": "p",
    "placement": EVEN.model_dump(mode="json"),
    "send_order": {"mode": "concurrent"},
    "provenance": {"optimiser": "t"},
}
JSON = {
    "sglang": golden.SGLANG,
    "hygon": golden.HYGON,
    "ascend": golden.ASCEND_MTP,
    "megatron": "[[2, 1, 3, 0], [0, 2, 1, 3]]",
    "studio": json.dumps(PLAN),
    "vllm": golden.VLLM,
}
TEXT = JSON | {
    "vllm log": golden.META + golden.STATS + golden.LATER,
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
    data = golden.saved({draw(st.sampled_from(keys)): content, **draw(st.sampled_from(({}, {"y": 1})))})
    match draw(st.sampled_from(("whole", "bytes", "pickle"))):
        case "bytes":
            return draw(damaged(data))
        case "pickle":
            return with_pickle(data, lambda pickled: draw(damaged(pickled)))
    return data


def with_pickle(data: bytes, change: Any) -> bytes:
    """The archive with its `data.pkl` changed and all checksums right."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for member in old.infolist():
            content = old.read(member)
            new.writestr(member.filename, change(content) if member.filename.endswith("data.pkl") else content)
    return file.getvalue()


def plan_files(reader: str) -> st.SearchStrategy[bytes]:
    """Files that are nearly what this reader takes."""
    if reader == "sglang .pt":
        return _torch_file()
    text = st.builds(str.encode, changed_text(TEXT[reader], PIECES))
    if reader not in JSON:
        return text
    return st.one_of(mutated(json.loads(JSON[reader])).flatmap(json_texts), text)
