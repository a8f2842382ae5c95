"""`.npz` and `.npy` files, good and bad."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from engine.formats import check_recording, members, numpy_files, read_workload
from tests.formats.faults import refused

pytestmark = pytest.mark.slow

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared recordings are not here")

EXPERTS = np.random.default_rng(0).integers(8, size=(20, 3, 2))


def npz(folder: Path, name: str = "trace.npz", **arrays: object) -> Path:
    np.savez(folder / name, **arrays)
    return folder / name


def npy(folder: Path, array: np.ndarray, **options: object) -> Path:
    np.save(folder / "array.npy", array, **options)
    return folder / "array.npy"


def test_experts_with_per_token_columns(tmp_path):
    path = npz(
        tmp_path,
        experts=EXPERTS,
        sequence=np.arange(20) // 5,
        source_rank=np.arange(20) % 4,
        num_experts=16,
        weights=np.ones(EXPERTS.shape),
    )
    trace = read_workload(path)
    assert (trace.name, trace.num_experts, trace.experts.dtype) == ("trace", 16, np.int16)
    np.testing.assert_array_equal(trace.experts, EXPERTS)
    np.testing.assert_array_equal(trace.sequence, np.arange(20) // 5)
    np.testing.assert_array_equal(trace.source_rank, np.arange(20) % 4)
    assert members(path) == ()


def test_top_1_and_experts_not_recorded(tmp_path):
    trace = read_workload(npz(tmp_path, experts=EXPERTS[:, :, 0]), name="mine")
    assert (trace.name, trace.k, trace.num_experts, trace.sequence) == ("mine", 1, EXPERTS[:, :, 0].max() + 1, None)


def test_whole_floats_are_experts(tmp_path):
    np.testing.assert_array_equal(read_workload(npz(tmp_path, experts=EXPERTS.astype(float))).experts, EXPERTS)


def test_request_is_one_sequence(tmp_path):
    trace = read_workload(npz(tmp_path, routed_experts=EXPERTS))
    np.testing.assert_array_equal(trace.sequence, np.zeros(20))


def test_several_workloads(tmp_path):
    path = npz(tmp_path, first=EXPERTS, second=EXPERTS[:, :, 0])
    assert members(path) == ("first", "second")
    assert read_workload(path, member="second").name == "trace::second"
    refused(path, "trace.npz::first", "trace.npz::second")
    refused(path, "'third'", "first, second", member="third")


def test_only_workload_needs_no_name(tmp_path):
    path = npz(tmp_path, only=EXPERTS)
    assert read_workload(path).name == "trace"
    assert members(path) == ("only",)


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"experts": np.where(np.arange(60).reshape(20, 3) == 54, -5, 0)}, ("token 18, layer 0", "-5", "negative")),
        ({"experts": np.full((4, 3), -1)}, ("every choice is −1",)),
        ({"experts": np.zeros(4, int)}, ("[tokens, layers, k]", "[4]")),
        ({"experts": np.zeros((0, 3, 2), int)}, ("[0, 3, 2]",)),
        ({"experts": np.zeros((3, 2000), int)}, ("2000 layers", "axes")),
        ({"experts": np.full((4, 3), 1.5)}, ("token 0, layer 0", "1.5")),
        ({"experts": np.full((4, 3), np.nan)}, ("whole numbers", "nan")),
        ({"experts": np.full((4, 3), True)}, ("bool",)),
        ({"experts": np.full((4, 3), 40000)}, ("40000", "out of range")),
        ({"experts": EXPERTS, "sequence": np.zeros(3, int)}, ("sequence", "[20]", "[3]")),
        ({"experts": EXPERTS, "source_rank": np.full(20, -1)}, ("source_rank", "token 0")),
        ({"experts": EXPERTS, "weights": np.zeros(3)}, ("weights",)),
        ({"experts": EXPERTS, "num_experts": 4}, ("out of range", "0 … 3")),
        ({"first": EXPERTS.astype(float)}, ("'first'", "integers")),
    ],
)
def test_bad_arrays(tmp_path, arrays, parts):
    refused(npz(tmp_path, **arrays), *parts)


def findings(*entries: dict) -> np.ndarray:
    return np.frombuffer(json.dumps(entries).encode(), np.uint8)


SOUND = {"severity": "ok", "code": "idle-experts", "message": "All is well."}


def test_findings_of_a_file_neither_hide_faults_nor_offer_remedies(tmp_path):
    experts = np.where(np.arange(60).reshape(20, 3, 1) % 3 == 1, 0, EXPERTS)
    for remedy in ("no-such-remedy", "drop-copies", "cut-profile-rows"):
        path = npz(tmp_path, experts=experts, findings=findings(SOUND | {"remedy": remedy}))
        stated, *checked = check_recording(read_workload(path))
        assert (stated.message, stated.remedy) == ("All is well.", None)
        assert checked == check_recording(read_workload(npz(tmp_path, "bare.npz", experts=experts)))
        assert "never-captured" in [finding.code for finding in checked]


def test_findings_of_a_file_are_single_lines(tmp_path):
    path = npz(tmp_path, experts=EXPERTS, findings=findings(SOUND | {"message": "All\nis \x1b[31mred."}))
    assert read_workload(path).origin.findings[0].message == "All is \ufffd[31mred."


@pytest.mark.parametrize(
    ("stated", "parts"),
    [
        (findings(*[SOUND] * 257), ("at most 256",)),
        (findings(SOUND | {"severity": "fine"}), ("severity",)),
        (findings(SOUND | {"message": 7}), ("message",)),
        (findings(SOUND)[:-1], ("findings",)),
        (np.arange(4.0), ("a megabyte of bytes",)),
        (np.zeros(2**20 + 1, np.uint8), ("a megabyte of bytes",)),
    ],
)
def test_bad_findings(tmp_path, stated, parts):
    refused(npz(tmp_path, experts=EXPERTS, findings=stated), "trace.npz", *parts)


def test_expert_out_of_the_models_range(tmp_path):
    experts = np.zeros((20, 4), int)
    experts[17, 3] = 64
    path = npz(tmp_path, experts=experts)
    refused(path, "token 17, layer 3: expert 64 is out of range, experts are 0 … 63", num_experts=64)
    assert read_workload(path, num_experts=128).num_experts == 128
    refused(npz(tmp_path, experts=experts, num_experts=65), "65 experts", "model has 128", num_experts=128)


def test_unknown_bytes_named_npz(tmp_path):
    (tmp_path / "trace.npz").write_bytes(b"\0\1\2")
    refused(tmp_path / "trace.npz", "is not a NumPy .npz archive")


def test_truncated_npz(tmp_path):
    path = npz(tmp_path, experts=EXPERTS)
    path.write_bytes(path.read_bytes()[:-40])
    refused(path, "damaged")


def test_pickles_are_never_loaded(tmp_path):
    objects = np.array([{"a": 1}, None], dtype=object)
    refused(npy(tmp_path, objects, allow_pickle=True), "Python objects, which are never loaded")
    refused(npz(tmp_path, experts=objects), "Python objects, which are never loaded", "experts")


def test_zip_bomb(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in range(21):
            archive.writestr(f"{name}.npy", bytes(100 * 1024**2))
    assert path.stat().st_size < 10 * 1024**2
    refused(path, "unpack to 2.1 GB", "limit")


@pytest.mark.parametrize(("dtype", "tokens"), [(np.int16, 31), (np.uint8, 20), (np.int64, 6)])
def test_memory_of_ids_and_of_what_is_made_of_them(tmp_path, monkeypatch, dtype, tokens):
    monkeypatch.setattr(numpy_files, "MAX_ARRAY_BYTES", 1000)
    assert read_workload(npy(tmp_path, np.zeros((tokens, 4, 4), dtype))).tokens == tokens
    refused(npy(tmp_path, np.zeros((tokens + 1, 4, 4), dtype)), "needs", "cut the recording")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_that_numpy_does_not_write(tmp_path, method):
    path = tmp_path / "trace.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.write(npy(tmp_path, EXPERTS), "experts.npy")
    refused(path, "compressed as NumPy never does")


def test_header_that_claims_too_much(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**9, 1000)})
    (tmp_path / "array.npy").write_bytes(header.getvalue() + bytes(800))
    refused(tmp_path / "array.npy", "cut short", "800")


def test_npy_integers_are_routing(tmp_path):
    assert read_workload(npy(tmp_path, EXPERTS)).k == 2
    assert read_workload(npy(tmp_path, EXPERTS[:, :, 0].astype(np.uint8))).k == 1


def test_npy_floats_are_traffic(tmp_path):
    amounts = np.arange(18.0).reshape(2, 3, 3)
    traffic = read_workload(npy(tmp_path, amounts), bytes_per_token=4.0)
    np.testing.assert_array_equal(traffic.bytes, amounts)
    assert traffic.bytes_per_token == 4.0
    assert read_workload(npy(tmp_path, amounts[0])).bytes.shape == (1, 3, 3)


def test_square_integers_are_ambiguous(tmp_path):
    refused(npy(tmp_path, np.zeros((4, 4), int)), "float64", "[tokens, layers, 1]")


@pytest.mark.parametrize(
    ("amounts", "parts"),
    [
        (np.zeros((3, 4)), ("square", "[3, 4]")),
        (np.array([[0, 1], [np.nan, 0]]), ("row 1, column 0", "nan")),
        (np.array([[[0, -1.0], [0, 0]]]), ("layer 0, row 0, column 1", "-1")),
        (np.zeros((1, 1)), ("ranks",)),
    ],
)
def test_bad_traffic(tmp_path, amounts, parts):
    refused(npy(tmp_path, amounts), *parts)


@needs_data
def test_real_recordings():
    path = DATA / "deepseek-v2-lite-routing.npz"
    assert members(path) == ("intent", "summary")
    assert read_workload(path, member="summary", num_experts=64).experts.shape == (8479, 26, 6)
    beta = read_workload(DATA / "tiny-moe" / "beta-code.npz")
    assert (beta.experts.shape, beta.num_experts, len(np.unique(beta.sequence))) == ((12288, 8, 2), 16, 96)
