"""NumPy files that are nearly right: each gives a workload or one clear line."""

import base64
import tempfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats import members, read_workload
from engine.formats.routed_experts import decode_int32, decode_lists, decode_npy
from tests.formats.fuzzing import answer_or_one_line, any_input, workload_or_one_line
from tests.formats.mutations import VALUES, damaged, json_texts, mutated, npy, npy_files, zips

pytestmark = pytest.mark.slow

EXPERTS = np.array(
    [[[0, 3], [1, 2], [4, 7]], [[5, 1], [0, 2], [6, 7]], [[3, 2], [1, 0], [5, 4]], [[0, 1], [2, 3], [4, 5]]]
)
LOAD = np.array([[4.0, 0, 2, 1], [0, 0, 0, 0], [1, 1, 3, 2]])
FINDINGS = [{"severity": "warning", "code": "profile-rows", "message": "two rows are alike", "rows": [0, 2]}]
SEEDS = {
    "routing": {
        "experts": EXPERTS,
        "sequence": np.array([0, 0, 1, 1]),
        "source_rank": np.array([0, 1, 0, 1]),
        "phase": np.array([0, 0, 1, 1]),
        "model_layers": np.array([1, 2, 5]),
        "weights": np.full(EXPERTS.shape, 0.5, np.float32),
        "num_experts": np.array(8),
    },
    "loads": {
        "expert_load": LOAD,
        "model_layers": np.array([0, 3, 4]),
        "by_source": np.stack([LOAD / 2, LOAD / 2]),
        "by_step": np.stack([LOAD * 0, LOAD]),
    },
    "traffic": {"traffic_bytes": np.arange(18.0).reshape(2, 3, 3), "bytes_per_token": np.array(2.0)},
    "several": {"mathematics": EXPERTS, "code": EXPERTS[:2, :, :1]},
}  # fmt: skip


def read_all(path: Path, **options: object) -> None:
    """As a page does: what is inside, and the first of it."""
    names = answer_or_one_line(lambda: members(path))
    member = names[0] if isinstance(names, tuple) and names else None
    workload_or_one_line(path, partial(read_workload, member=member, **options))


@pytest.mark.parametrize("kind", SEEDS)
@given(data=st.data(), num_experts=st.sampled_from([None, None, 8]))
@any_input
def test_any_archive(kind, data, num_experts):
    arrays = dict(SEEDS[kind])
    if data.draw(st.booleans()):
        arrays["findings"] = np.frombuffer(data.draw(json_texts(data.draw(mutated(FINDINGS)))), np.uint8)
    for name in data.draw(st.sets(st.sampled_from(sorted(arrays)), max_size=2)):
        del arrays[name]
    changed = data.draw(st.sets(st.sampled_from(sorted(arrays)), max_size=2)) if arrays else ()
    files = {
        f"{name}.npy": data.draw(npy_files(array)) if name in changed else npy(array) for name, array in arrays.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.npz")
        path.write_bytes(data.draw(zips(files or {"notes.txt": b""})))
        read_all(path, num_experts=num_experts)


ARRAYS = [EXPERTS, EXPERTS[:, :, 0], EXPERTS[:, :, :1].astype(np.uint8), SEEDS["traffic"]["traffic_bytes"], np.eye(3)]


@given(data=st.data(), array=st.sampled_from(ARRAYS))
@any_input
def test_any_array(data, array):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "array.npy")
        path.write_bytes(data.draw(damaged(data.draw(npy_files(array)))))
        read_all(path)


@given(
    data=st.data(),
    form=st.sampled_from(["npy", "int32", "lists", "text"]),
    layers=st.integers(0, 4),
    k=st.integers(0, 3),
)
@any_input
def test_any_routed_experts(data, form, layers, k):
    ids = EXPERTS.astype(data.draw(st.sampled_from(["u1", "<i4", ">i2", "<i8"])))
    dtype = data.draw(st.sampled_from(["int32", "uint8", "uint16", "float"]))
    match form:
        case "npy":
            content = base64.b64encode(data.draw(damaged(data.draw(npy_files(ids))))).decode()
        case "int32":
            content = base64.b64encode(data.draw(damaged(ids.tobytes()))).decode()
        case "text":
            content = data.draw(damaged(base64.b64encode(npy(ids)))).decode("latin-1")
        case "lists":
            content = data.draw(mutated(ids.tolist(), VALUES))
    for decode in (decode_npy, partial(decode_int32, layers=layers, k=k, dtype=dtype), decode_lists):
        choices = answer_or_one_line(lambda decode=decode: decode(content))
        assert isinstance(choices, str) or (choices.dtype == np.int16 and choices.ndim == 3)


@pytest.mark.parametrize("count", [2_000_000, 2**31, 2**62])
def test_more_experts_than_any_model_has(tmp_path, count):
    path = tmp_path / "trace.npz"
    np.savez(path, experts=np.zeros((1, 1000, 1), int), num_experts=count)
    assert "num_experts" in workload_or_one_line(path)


def test_the_largest_id_in_many_layers(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, experts=np.full((1, 1000, 1), 4095))
    assert not isinstance(workload_or_one_line(path), str)


@pytest.mark.parametrize(
    "header", ["{'descr': '<i8', 'fortran_order': False, 'shape': (True, 3, 2)}", "{[]: 0}", "{'shape': (-1,)}"]
)
def test_odd_headers(tmp_path, header):
    path = tmp_path / "array.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(48))
    assert "damaged" in workload_or_one_line(path)


def test_damaged_lzma(tmp_path):
    path = tmp_path / "trace.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("experts.npy", npy(EXPERTS))
    data = bytearray(path.read_bytes())
    data[60:80] = bytes(20)
    path.write_bytes(data)
    assert isinstance(workload_or_one_line(path), str)
