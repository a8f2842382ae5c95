"""Arrays in files: NumPy, PyTorch and the encoded choices of answers."""

import base64
import io
import json
import pickle
import struct
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import units
from engine.formats import check_recording, identify, members, numpy_files, read_workload, routed_experts, torch_files
from engine.formats.routed_experts import decode_int32, decode_lists, decode_npy
from tests.cases import mutations
from tests.cases.examples import examples
from tests.cases.files import refused
from tests.cases.plan_files import saved_tensors, with_pickle
from tests.cases.recordings import MODEL, holds
from tests.cases.refusals import refusal
from tests.cases.sglang import ROUTED_TEXT

EXPERTS = np.random.default_rng(0).integers(8, size=(20, 3, 2))


def npz(folder: Path, name: str = "trace.npz", **arrays: object) -> Path:
    np.savez(folder / name, **arrays)
    return folder / name


def npy(folder: Path, array: np.ndarray, **options: object) -> Path:
    np.save(folder / "array.npy", array, **options)
    return folder / "array.npy"


def test_experts_with_per_token_columns(tmp_path):
    columns = {"experts": EXPERTS, "sequence": np.arange(20) // 5, "source_rank": np.arange(20) % 4}
    path = npz(tmp_path, num_experts=16, weights=np.ones(EXPERTS.shape), **columns)
    trace = read_workload(path)
    assert (trace.name, trace.num_experts, trace.experts.dtype) == ("trace", 16, np.int16)
    holds(trace, **columns)
    assert members(path) == ()


def test_an_archive_of_one_recording(tmp_path):
    trace = read_workload(npz(tmp_path, experts=EXPERTS[:, :, 0]), name="mine")
    assert (trace.name, trace.k, trace.num_experts, trace.sequence) == ("mine", 1, EXPERTS[:, :, 0].max() + 1, None)
    np.testing.assert_array_equal(read_workload(npz(tmp_path, experts=EXPERTS.astype(float))).experts, EXPERTS)
    holds(read_workload(npz(tmp_path, routed_experts=EXPERTS)), sequence=np.zeros(20))
    experts = np.zeros((20, 4), int)
    experts[17, 3] = 64
    path = npz(tmp_path, experts=experts)
    refused(path, "token 17, layer 3: expert 64 is out of range, experts are 0 … 63", num_experts=64)
    assert read_workload(path, num_experts=128).num_experts == 128
    refused(npz(tmp_path, experts=experts, num_experts=65), "65 experts", "model has 128", num_experts=128)


def test_several_workloads_and_one_that_needs_no_name(tmp_path):
    path = npz(tmp_path, first=EXPERTS, second=EXPERTS[:, :, 0])
    assert members(path) == ("first", "second")
    assert read_workload(path, member="second").name == "trace::second"
    refused(path, "trace.npz::first", "trace.npz::second")
    refused(path, "'third'", "first, second", member="third")
    path = npz(tmp_path, only=EXPERTS)
    assert read_workload(path).name == "trace"
    assert members(path) == ("only",)


def findings(*entries: dict) -> np.ndarray:
    return np.frombuffer(json.dumps(entries).encode(), np.uint8)


def test_findings_of_a_file_are_single_lines_that_neither_hide_faults_nor_offer_remedies(tmp_path):
    experts = np.where(np.arange(60).reshape(20, 3, 1) % 3 == 1, 0, EXPERTS)
    for remedy in ("no-such-remedy", "drop-copies", "cut-profile-rows"):
        path = npz(tmp_path, experts=experts, findings=findings(SOUND | {"remedy": remedy}))
        stated, *checked = check_recording(read_workload(path))
        assert (stated.message, stated.remedy) == ("All is well.", None)
        assert checked == check_recording(read_workload(npz(tmp_path, "bare.npz", experts=experts)))
        assert "never-captured" in [finding.code for finding in checked]
    path = npz(tmp_path, experts=EXPERTS, findings=findings(SOUND | {"message": "All\nis \x1b[31mred."}))
    assert read_workload(path).origin.findings[0].message == "All is \ufffd[31mred."


SOUND = {"severity": "ok", "code": "idle-experts", "message": "All is well."}
FOUR = {"experts": np.zeros((4, 2, 2), np.int16)}
LOAD = {"expert_load": np.ones((2, 3))}


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"experts": np.where(np.arange(60).reshape(20, 3) == 54, -5, 0)}, ("token 18, layer 0", "-5", "negative")),
        ({"experts": np.full((4, 3), -1)}, ("every choice is −1",)),
        ({"experts": np.zeros(4, int)}, ("[tokens, layers, k]", "[4]")),
        ({"experts": np.zeros((0, 3, 2), int)}, ("[0, 3, 2]",)),
        ({"experts": np.zeros((3, 2000), int)}, ("2000 layers", "axes")),
        ({"experts": np.full((4, 3), 1.5)}, ("token 0, layer 0", "1.5")),
        ({"experts": np.full((4, 3), True)}, ("bool",)),
        ({"experts": np.full((4, 3), 40000)}, ("40000", "out of range")),
        ({"experts": EXPERTS, "sequence": np.zeros(3, int)}, ("sequence", "[20]", "[3]")),
        ({"experts": EXPERTS, "source_rank": np.full(20, -1)}, ("source_rank", "token 0")),
        ({"experts": EXPERTS, "num_experts": 4}, ("out of range", "0 … 3")),
        ({"first": EXPERTS.astype(float)}, ("'first'", "integers")),
        (FOUR | {"phase": np.array([0, 1, 2, 0])}, ("phase must be 0 or 1",)),
        (FOUR | {"phase": np.zeros(3)}, ("each of 4 tokens",)),
        (FOUR | {"model_layers": np.array([3])}, ("each of 2 layers",)),
        (FOUR | {"model_layers": np.array([3, 3])}, ("ascending",)),
        (FOUR | {"model_layers": np.array([0.5, 3])}, ("whole numbers",)),
        (FOUR | {"findings": findings(*[SOUND] * 257)}, ("at most 256",)),
        (FOUR | {"findings": findings(SOUND | {"severity": "fine"})}, ("severity",)),
        (FOUR | {"findings": np.frombuffer(b"\xff", np.uint8)}, ("findings",)),
        (FOUR | {"findings": np.zeros(3)}, ("JSON", "a megabyte of bytes")),
        (FOUR | {"findings": np.zeros(2**20 + 1, np.uint8)}, ("a megabyte of bytes",)),
        (LOAD | {"expert_load": np.ones(3)}, ("[layers, experts]",)),
        (LOAD | {"expert_load": np.ones((1001, 3))}, ("at most 1000",)),
        (LOAD | {"expert_load": -np.ones((2, 3))}, ("at least 0",)),
        (LOAD | {"by_step": np.zeros((2**23, 5), np.int8)}, ("numbers are read",)),
        (LOAD | {"by_step": np.ones((2, 3))}, ("by_step",)),
        (LOAD | {"by_step": np.ones((2, 2, 3))}, ("does not add up",)),
        (LOAD | {"by_source": np.full((1, 2, 3), np.nan)}, ("nan",)),
        ({"traffic_bytes": np.zeros((2**23, 5), np.int8)}, ("numbers are read",)),
        ({"traffic_bytes": np.ones((2, 3))}, ("square",)),
        ({"traffic_bytes": np.ones((2, 2)), "bytes_per_token": np.zeros(1)}, ("bytes_per_token",)),
        (np.arange(64).reshape(4, 16) % 5, ("4 tokens in 16 layers or loads of 4 layers", "--model", "'expert_load'")),
        (np.array([[1900, 2], [3, 4], [5, 6], [1, 8]]), ("4 tokens in 2 layers or loads of 4 layers",)),
        (np.full((3, 5, 20), 1300), ("numbers up to 1300 are counts, not choices",)),
        (np.full((3, 5, 70), 2), ("[steps, layers, slots]", "[layers, ranks, experts of a rank]")),
        (np.zeros((4, 4), int), ("float64", "[tokens, layers, 1]")),  # choices or traffic
        (np.array([[[0, -1.0], [0, 0]]]), ("layer 0, row 0, column 1", "-1")),
        (np.zeros((1, 1)), ("ranks",)),
    ],
)
def test_bad_arrays(tmp_path, arrays, parts):
    """Those of an archive, or one alone."""
    refused(npz(tmp_path, **arrays) if isinstance(arrays, dict) else npy(tmp_path, arrays), *parts)


def test_archives_as_numpy_never_writes_them(tmp_path):
    objects = np.array([{"a": 1}, None], dtype=object)
    refused(npy(tmp_path, objects, allow_pickle=True), "Python objects, which are never loaded")
    refused(npz(tmp_path, experts=objects), "Python objects, which are never loaded", "experts")
    path = npz(tmp_path, experts=EXPERTS)
    path.write_bytes(path.read_bytes()[:-40])
    refused(path, "damaged")
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.write(npy(tmp_path, EXPERTS), "experts.npy")
        refused(path, "compressed as NumPy never does")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in range(21):
            archive.writestr(f"{name}.npy", bytes(1024))
        for member in archive.infolist():
            member.file_size = 100 * 1024**2
    refused(path, "unpack to 2.1 GB", "limit")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**9, 1000)})
    (tmp_path / "array.npy").write_bytes(header.getvalue() + bytes(800))
    refused(tmp_path / "array.npy", "cut short", "800")


@pytest.mark.parametrize(("dtype", "tokens"), [(np.int16, 31), (np.uint8, 20), (np.int64, 6)])
def test_memory_of_ids_and_of_what_is_made_of_them(tmp_path, monkeypatch, dtype, tokens):
    monkeypatch.setattr(numpy_files, "MAX_ARRAY_BYTES", 1000)
    assert read_workload(npy(tmp_path, np.zeros((tokens, 4, 4), dtype))).tokens == tokens
    refused(npy(tmp_path, np.zeros((tokens + 1, 4, 4), dtype)), "needs", "cut the recording")


def test_an_array_alone_may_be_traffic_of_one_layer(tmp_path):
    assert read_workload(npy(tmp_path, np.arange(9.0).reshape(3, 3))).bytes.shape == (1, 3, 3)


def saved(folder, content, **options):
    path = folder / "file.pt"
    torch.save(content, path, **options)
    return path


torch_refused = partial(refused, read=torch_files.load)


def test_tensors_numbers_lists_and_none(tmp_path):
    content = {"a": torch.arange(3, dtype=torch.int32), "b": [1, 2.5, None, "x", (True,)], "c": {"d": torch.ones(2)}}
    path = saved(tmp_path, content)
    loaded = torch_files.load(path)
    assert loaded["b"] == content["b"]
    numbers = torch_files.array_of(tmp_path, loaded["a"], "a")
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [0, 1, 2]
    assert torch_files.load(tmp_path / "elsewhere.pt", io.BytesIO(path.read_bytes()))["b"] == content["b"]
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float64, torch.float16, torch.bfloat16):
        tensor = torch_files.load(saved(tmp_path, torch.tensor([0, 1], dtype=dtype)))
        assert torch_files.array_of(tmp_path, tensor, "").tolist() == [0, 1]


def test_tensors_that_claim_more_than_is_stored_or_is_read(tmp_path, monkeypatch):
    tensor = torch_files.load(saved(tmp_path, torch.zeros(1).expand(10**9, 10**9)))
    assert "more numbers than are stored" in refusal(torch_files.array_of, tmp_path, tensor, "here")
    assert "here: must be a tensor, not list" in refusal(torch_files.array_of, tmp_path, [1], "here")
    path = saved(tmp_path, torch.arange(4, dtype=torch.int32))
    path.write_bytes(with_pickle(path.read_bytes(), lambda data: data.replace(b"K\x04t", b"J\x00\x00\x00\x10t")))
    torch_refused(path, "damaged")
    path = saved(tmp_path, [torch.zeros(100), list(range(1000))])
    monkeypatch.setattr(torch_files, "MAX_PICKLE_BYTES", 1000)
    torch_refused(path, "lists beside the tensors")
    monkeypatch.setattr(torch_files, "MAX_FILE_BYTES", 100)
    torch_refused(path, "would unpack to more")


def test_whatever_holds_more_than_tensors_is_refused(tmp_path):
    for content in (bytearray(3), torch.zeros(2).to_sparse(), torch.Size([1])):
        torch_refused(saved(tmp_path, content), "holds more than tensors")
    path = tmp_path / "other.pt"
    path.write_bytes(with_pickle(saved_tensors({}), lambda _: b"cos\nsystem\n(S'true'\ntR."))
    torch_refused(path, "os system")
    path.write_bytes(with_pickle(saved_tensors({}), bytes, zipfile.ZIP_DEFLATED))
    torch_refused(path, "is compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "y")
    torch_refused(path, "not what torch.save writes")


def test_files_before_version_1_6_are_bare_pickles(tmp_path):
    path = saved(tmp_path, {"logical_count": torch.ones(2)}, _use_new_zipfile_serialization=False)
    refused(path, "Python pickle, which is never loaded", read=identify)
    path.write_bytes(pickle.dumps({"logical_count": [1]}))
    refused(path, "Python pickle", read=identify)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy_text(array: np.ndarray) -> str:
    return base64_of(mutations.npy(array))


def test_choices_by_hand():
    experts = decode_int32(ROUTED_TEXT, 3, 2)  # as SGLang's buffer holds them, the first layer being dense
    assert experts.dtype == np.int16
    assert experts.tolist() == [[[-1, -1], [3, 7], [255, 1]], [[-1, -1], [0, 4], [2, 0]], [[-1, -1], [9, 8], [7, 6]]]
    # Narrower numbers where the server says so.
    assert decode_int32(NARROW, 3, 2, "uint8").tolist() == [[[-1, -1], [3, 7], [255, 1]]]
    assert decode_int32(base64_of(struct.pack("<2H", 511, 300)), 1, 2, dtype="uint16").tolist() == [[[511, 300]]]
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 1, 2), }"
    header += b" " * (128 - 10 - len(header) - 1) + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes([5, 0, 200, 199])
    assert decode_npy(base64_of(data)).tolist() == [[[5, 0]], [[200, 199]]]
    ids = np.array([[[0, 0], [0, 3]], [[3, 0], [0, 0]]], np.uint8)
    assert decode_npy(npy_text(ids)).tolist() == [[[-1, -1], [0, 3]], [[3, 0], [-1, -1]]]
    assert decode_lists([[[5, 0], [0, 0]]]).tolist() == [[[5, 0], [-1, -1]]]
    assert decode_int32(base64_of(struct.pack("<3i", 0, 1, -1)), 1, 1).tolist() == [[[0]], [[1]], [[-1]]]


@given(
    *(st.integers(1, 5), st.integers(1, 4), st.integers(2, 3), st.randoms(use_true_random=False)),
    *(st.sampled_from(["<u2", ">u2", "<i4", "<i8"]), st.sampled_from("CF")),
)
@settings(max_examples=examples(30))
def test_both_strings_carry_the_same_choices_in_any_width_and_order(rows, layers, k, random, dtype, order):
    ids = np.array([[random.sample(range(300), k) for _ in range(layers)] for _ in range(rows)], np.int32)
    np.testing.assert_array_equal(decode_int32(base64_of(ids.tobytes()), layers, k), ids)
    np.testing.assert_array_equal(decode_npy(npy_text(ids.astype(dtype, order=order))), ids)


NARROW = base64_of(bytes([0, 0, 3, 7, 255, 1]))
TERABYTES = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000, 61, 8), }\n"


@pytest.mark.parametrize(
    ("decode", "arguments", "part"),
    [
        (decode_int32, (ROUTED_TEXT[:-4], 3, 2), "no whole number of tokens of 3 layers × 2"),
        (decode_int32, (ROUTED_TEXT, 0, 2), "no whole number"),
        (decode_int32, (ROUTED_TEXT[:-3], 3, 2), "not base64, or was cut short"),
        (decode_int32, ("é", 3, 2), "not base64"),
        (decode_int32, ("", 3, 2), "at least one of each"),
        (decode_int32, (None, 3, 2), "base64 text is needed, not NoneType"),
        (decode_int32, (base64_of(struct.pack("<2i", 4, -2)), 1, 1), "expert -2 is out of range 0 … 4095 (token 1, layer 0)"),
        (decode_int32, (base64_of(struct.pack("<i", 32768)), 1, 1), "expert 32768 is out of range"),
        (decode_int32, (base64_of(bytes(4004)), 1001, 1), "at most 1000 layers"),
        (decode_int32, (NARROW, 3, 2, "float32"), "dtype 'float32' is not one of int32, uint16, uint8"),
        (decode_lists, ([[[1, 2], [3]]],), "differ in length"),
        (decode_lists, ({"data": "AAAA"},), "whole numbers"),
        (decode_lists, ([[1, 2]],), "at least one of each"),
        (decode_npy, (ROUTED_TEXT,), "bare int32 needs layers and k"),
        (decode_npy, (base64_of(b"\x93NUMPY\x03\x00"),), "version 3.0"),
        (decode_npy, (base64_of(b"\x93NUMPY\x01\x00\x08\x00{'a': (("),), "no readable .npy"),
        (decode_npy, (npy_text(np.array([[[None]]])),), "holds object"),
        (decode_npy, (npy_text(np.zeros((2, 2), int)),), "not [2, 2]"),
        (decode_npy, (npy_text(np.zeros((2, 1, 65), int)),), "at most 1000 layers and 64 experts"),
        (decode_npy, (npy_text(np.ones((3, 2, 2), np.uint8))[:-4],), "is cut short or too long: uint8 [3, 2, 2] needs 12"),
        (decode_npy, (npy_text(np.full((1, 1, 2), -3)),), "expert -3 is out of range"),
        (decode_npy, (base64_of(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(TERABYTES)) + TERABYTES),), "there are 0"),
    ],
)  # fmt: skip
def test_bad_choices(decode, arguments, part):
    message = refusal(decode, *arguments)
    assert message.startswith("routed_experts: ") and part in message


def test_a_text_over_the_limit_is_not_decoded(monkeypatch):
    monkeypatch.setattr(routed_experts, "MAX_FILE_BYTES", 63)
    assert "more than the limit" in refusal(decode_int32, ROUTED_TEXT, 3, 2)


COUNTS = np.random.default_rng(1).integers(5000, size=(2, 6, 16)) + 1


@pytest.mark.parametrize(
    ("numbers", "model", "load"),
    [
        (COUNTS[0], MODEL, COUNTS[0]),
        (COUNTS[0] % 7, MODEL, COUNTS[0] % 7),  # small enough for ids
        (COUNTS[0] / 2, MODEL, COUNTS[0] / 2),
        (COUNTS[0] + 5000, None, COUNTS[0] + 5000),  # no expert has such an id
        (np.array([[1, 9, 0, 0, 2], [6, 2, 2, 2, 0]]), None, [[1, 9, 0, 0, 2], [6, 2, 2, 2, 0]]),  # 12 tokens in both
        (COUNTS, MODEL, COUNTS.sum(axis=0)),  # a window of steps
        (COUNTS[0].reshape(6, 4, 4), MODEL, COUNTS[0]),  # four ranks
    ],
)
def test_loads_without_a_name(tmp_path, numbers, model, load):
    for path in (
        (npy(tmp_path, numbers), npz(tmp_path, arr_0=numbers)) if numbers.dtype.kind == "i" else (npy(tmp_path, numbers),)
    ):
        read = read_workload(path, model=model)
        np.testing.assert_array_equal(read.load, load)
        assert "assumed-counts" in [finding.code for finding in read.origin.findings]
    steps = len(numbers) if numbers.shape == COUNTS.shape else None
    assert (None if read.by_step is None else len(read.by_step)) == steps


def test_a_window_that_was_not_filled_and_steps_of_ranks(tmp_path):
    steps = np.concatenate([COUNTS[1:], 0 * COUNTS, COUNTS[:1]])  # a ring: the oldest step follows the empty ones
    by_rank = steps.reshape(4, 6, 4, 4)
    torch.save(torch.tensor(by_rank), tmp_path / "steps.pt")
    for save in (lambda: npy(tmp_path, steps), lambda: npz(tmp_path, arr_0=by_rank), lambda: tmp_path / "steps.pt"):
        read = read_workload(save(), model=MODEL)
        np.testing.assert_array_equal(read.by_step, COUNTS)
        assert [finding.code for finding in read.origin.findings] == ["assumed-counts", "empty-steps"]


def test_slots_and_choices_among_arrays_of_counts(tmp_path):
    slots = read_workload(npy(tmp_path, np.tile(COUNTS, (1, 1, 2))[:, :, :20]), model=MODEL)
    assert "slot-ids" in [finding.code for finding in check_recording(slots, MODEL)]
    choices = np.argsort(np.random.default_rng(2).random((40, 6, 16)), axis=2)[:, :, :2]
    np.testing.assert_array_equal(read_workload(npy(tmp_path, choices), model=MODEL).experts, choices)


@pytest.mark.parametrize("spare", [8, 1])
def test_choices_without_computation_are_no_load(tmp_path, spare):
    model = MODEL.model_copy(update={"zero_experts": spare})
    chosen = np.argsort(np.random.default_rng(3).random((400, 6, 16 + spare)), axis=2)[:, :, :2]
    counts = np.stack([np.bincount(chosen[:, layer].ravel(), minlength=16 + spare) for layer in range(6)])
    for path in (npz(tmp_path, experts=chosen), npz(tmp_path, "loads.npz", expert_load=counts, model_layers=[*range(2, 8)])):
        for options in ({}, {"num_experts": 16}):
            read = read_workload(path, model=model, **options)
            assert read.num_experts == 16
            np.testing.assert_array_equal(read.load, counts[:, :16])
            found = {finding.code: finding for finding in check_recording(read, model)}
            share = counts[:, 16:].sum() / counts.sum()
            assert found["zero-experts"].message.startswith(units.share(share))
            # Layers counted other numbers, as tokens chose the rest otherwise.
            assert {finding.severity for finding in (*found.values(), *check_recording(read))} == {"ok"}
    refused(
        npz(tmp_path, experts=chosen + spare), f"is out of range, experts are 0 … {15 + spare}", model=model, num_experts=16
    )
