"""Whatever is in the files of a recording, the answer is a workload or one clear line."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from tests.formats.fuzzing import any_input, workload_or_one_line

IN_RANGE = st.tuples(st.integers(0, 3), st.integers(0, 4)).map(lambda key: f"{key[0]}_{key[1]}")
KEYS = st.sampled_from([IN_RANGE] * 19 + [st.sampled_from(["0_1000", "9999999999_1", "1_-1", "weight", ""])]).flatmap(
    lambda keys: keys
)
ROWS = st.tuples(st.just(np.int64), st.just((4,)), st.integers(0, 9))
ODD_ROWS = st.tuples(
    st.sampled_from([np.int64, np.int32, np.float32, np.uint8, np.bool_]),
    st.sampled_from([(4,), (3,), (0,), (), (4, 4), (70_000,)]),
    st.integers(-1, 9),
)
TENSORS = st.dictionaries(
    KEYS, st.sampled_from([ROWS] * 9 + [ODD_ROWS]).flatmap(lambda rows: rows), min_size=1, max_size=6
)
META = st.dictionaries(
    st.sampled_from(["num_experts", "num_experts_per_token", "ep_size", "experts_per_rank", "other"]),
    st.sampled_from([0, 1, 2, 4, -1, 2**70, 1.5, None, "4", [4]]),
)
TOKENS = st.dictionaries(KEYS, st.sampled_from([0, 1, 4, -1, 2**70, 1.5, None, "4"]), max_size=4)
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=9)), max_size=3)


def written(tensors: dict[str, tuple]) -> bytes:
    return save({key: np.full(shape, value).astype(kind) for key, (kind, shape, value) in tensors.items()})


def edited(data: bytes, edits: list[tuple[int, bytes]]) -> bytes:
    for place, put in edits:
        at = place % (len(data) + 1)
        data = data[:at] + put + data[at + len(put) :]
    return data


@given(st.lists(TENSORS, min_size=1, max_size=3), META, TOKENS, EDITS)
@any_input
def test_any_recording(ranks, meta, tokens, edits):
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "meta_info.json").write_text(json.dumps({"num_experts": 4, "num_experts_per_token": 2} | meta))
        for rank, tensors in enumerate(ranks):
            (folder / f"rank{rank}.safetensors").write_bytes(edited(written(tensors), edits if not rank else []))
        if tokens:
            (folder / "rank0_numtokens.json").write_text(json.dumps(tokens))
        workload_or_one_line(folder)


HEADER = st.dictionaries(
    KEYS,
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["I64", "I64", "I32", "F64", "X9", 1]),
            "shape": st.sampled_from([[4], [4], [2**40], [-1], [], [2, 2], "4"]),
            "data_offsets": st.sampled_from([[0, 32], [32, 64], [0, 64], [0, 2**60], [64, 0], [0], None]),
        }
    ),
    min_size=1,
    max_size=3,
)


@given(HEADER, st.sampled_from([0, 0, 0, 1, -1, 2**31, 2**63]), st.sampled_from([32, 64, 96, 31, 0]))
@any_input
def test_any_header(header, further, size):
    """A header that claims what it will, its length included, over so many bytes of counts."""
    text = json.dumps(header).encode()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rank0.safetensors"
        path.write_bytes((len(text) + further).to_bytes(8, "little") + text + b"\1" + bytes(size)[1:])
        workload_or_one_line(path)
