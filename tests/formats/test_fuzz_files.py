"""Archives, NumPy files and tables that are nearly right: each gives a workload or one clear line."""

import base64
import io
import json
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats import members, parts, read_workload
from engine.formats.routed_experts import decode_int32, decode_lists, decode_npy
from tests.cases.files import json_lines, saver
from tests.cases.fuzzing import answer_or_one_line, any_input, workload_or_one_line
from tests.cases.mutations import PIECES, VALUES, changed_text, damaged, json_texts, mutated, npy, npy_files, zips

saved = saver("trace.npz")
LINES = json_lines({"layer": layer, "batch_id": 0, "origin_rows": [], "topk_experts": [[0, 1], [2, 3]]} for layer in (0, 1))
FILES = {
    "README.md": b"What this is",
    "loads.json": json.dumps({"logical_count": [[0, 0], [1, 2]]}).encode(),
    "deep/er/trace.npy": npy(np.arange(12).reshape(3, 2, 2)),
    "batches.jsonl": LINES.encode(),
    "request-1.npz": b"PK\x05\x06" + bytes(18),
}
ODD_NAMES = (*("../outside.json", "/absolute.json", "a\\b.json", ".hidden", ".", "..", "a/"), "x" * 300, "é\n.json", "a\x00b")
NAMES = st.sampled_from((*FILES, *ODD_NAMES))


@st.composite
def packed(draw: st.DrawFn, files: dict[str, bytes], form: str) -> bytes:
    if form == "zip":
        return draw(zips(files or {"empty.txt": b""}))
    file = io.BytesIO()
    with tarfile.open(
        fileobj=file, mode="w:gz" if form == "tar.gz" else "w", format=draw(st.sampled_from((0, 1, 2)))
    ) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name[:90])
            entry.size = len(data)
            entry.type = draw(
                st.sampled_from([tarfile.REGTYPE] * 6 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, b"S"])
            )
            entry.linkname = draw(st.sampled_from(("README.md", "/etc/passwd", "../..")))
            archive.addfile(entry, io.BytesIO(data))
    return draw(damaged(file.getvalue()))


@pytest.mark.parametrize("form", ["zip", "tar", "tar.gz"])
@given(data=st.data(), names=st.sets(NAMES, max_size=3))
@any_input
def test_any_archive(form, data, names):
    files = {name: data.draw(st.sampled_from(sorted(FILES.values()))) if name not in FILES else FILES[name] for name in names}
    with TemporaryDirectory() as folder:
        path, scratch, again = Path(folder, "packed"), Path(folder, "scratch"), Path(folder, "again")
        for into in (scratch, again):
            into.mkdir()
        path.write_bytes(data.draw(packed(files, form)))
        workload_or_one_line(path, partial(read_workload, scratch=scratch))
        answer_or_one_line(lambda: parts([path], again))
        assert {inside.name for inside in Path(folder).iterdir()} == {"packed", "scratch", "again"}


def test_finds(tmp_path):
    path = tmp_path / "packed.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("loads.json", "é\n.json"):
            archive.writestr(name, FILES["loads.json"])
    assert workload_or_one_line(path, partial(read_workload, scratch=tmp_path)).startswith("2 recordings (loads and é)")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("nameless", b"1")
        archive.infolist()[0].filename = ""  # in the directory at the end, which counts
        archive.writestr("loads.json", FILES["loads.json"])
    assert not isinstance(workload_or_one_line(path, partial(read_workload, scratch=tmp_path)), str)
    path = tmp_path / "trace.npz"
    for count in (2_000_000, 2**31, 2**62):  # more experts than any model has
        np.savez(path, experts=np.zeros((1, 1000, 1), int), num_experts=count)
        assert "num_experts" in workload_or_one_line(path)
    np.savez(path, experts=np.full((1, 1000, 1), 4095))  # the largest id in many layers
    assert not isinstance(workload_or_one_line(path), str)
    for header in ("{'descr': '<i8', 'fortran_order': False, 'shape': (True, 3, 2)}", "{[]: 0}", "{'shape': (-1,)}"):
        data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(48)
        assert "damaged" in workload_or_one_line(saved(tmp_path, data, "array.npy"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("experts.npy", npy(EXPERTS))
    data = path.read_bytes()
    assert isinstance(workload_or_one_line(saved(tmp_path, data[:60] + bytes(20) + data[80:])), str)


EXPERTS = np.array([[[0, 3], [1, 2], [4, 7]], [[5, 1], [0, 2], [6, 7]], [[3, 2], [1, 0], [5, 4]], [[0, 1], [2, 3], [4, 5]]])
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
    """Read as a page does: the names inside, and the first of them."""
    names = answer_or_one_line(lambda: members(path))
    member = names[0] if isinstance(names, tuple) and names else None
    workload_or_one_line(path, partial(read_workload, member=member, **options))


@pytest.mark.parametrize("kind", SEEDS)
@given(data=st.data(), num_experts=st.sampled_from([None, None, 8]))
@any_input
def test_any_archive_of_arrays(tmp_path, kind, data, num_experts):
    arrays = dict(SEEDS[kind])
    if data.draw(st.booleans()):
        arrays["findings"] = np.frombuffer(data.draw(json_texts(data.draw(mutated(FINDINGS)))), np.uint8)
    for name in data.draw(st.sets(st.sampled_from(sorted(arrays)), max_size=2)):
        del arrays[name]
    changed = data.draw(st.sets(st.sampled_from(sorted(arrays)), max_size=2)) if arrays else ()
    files = {f"{name}.npy": data.draw(npy_files(array)) if name in changed else npy(array) for name, array in arrays.items()}
    read_all(saved(tmp_path, data.draw(zips(files or {"notes.txt": b""}))), num_experts=num_experts)


ARRAYS = [EXPERTS, EXPERTS[:, :, 0], EXPERTS[:, :, :1].astype(np.uint8), SEEDS["traffic"]["traffic_bytes"], np.eye(3)]


@given(data=st.data(), array=st.sampled_from(ARRAYS))
@any_input
def test_any_array(tmp_path, data, array):
    read_all(saved(tmp_path, data.draw(damaged(data.draw(npy_files(array)))), "array.npy"))


@given(data=st.data(), form=st.sampled_from(["npy", "int32", "lists", "text"]), layers=st.integers(0, 4), k=st.integers(0, 3))
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


ROUTING = {
    "token": [0, 0, 0, 0, 1, 1, 1, 1],
    "layer": [3, 3, 7, 7, 3, 3, 7, 7],
    "rank_in_topk": [0, 1, 0, 1, 0, 1, 0, 1],
    "expert": [2, 0, 1, 3, -1, 1, 2, 0],
    "sequence": [0, 0, 0, 0, 5, 5, 5, 5],
    "source_rank": [1, 1, 1, 1, 0, 0, 0, 0],
}
COLUMNS = {
    "routing": ROUTING,
    "routing without ranks": {name: ROUTING[name] for name in ("expert", "layer", "token")},
    "traffic": {"layer": [0, 0, 1, 1], "src": [0, 1, 0, 2], "dst": [1, 2, 2, 0], "bytes": [1.0, 2.5, 3e9, 0.0]},
    "loads": {"layer": [1, 0, 2], "expert_0": [1.0, 2, 0], "expert_1": [4.0, 5, 6], "expert_2": [0.0, 1, 2]},
    "numbered loads": {"1": [1, 2, 3, 4], "0": [4, 5, 6, 7]},
}


def text_of(columns: dict[str, list]) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in (columns, *zip(*columns.values(), strict=True)))


TEXTS = {kind: text_of(columns) for kind, columns in COLUMNS.items()} | {
    "traffic without a head": "0,1,2\n3,0,4e2\n5,6.5,0\n",
    "quoted": '\ufeff"token","layer","expert"\r\n"0","0","1"\r\n"1","0","3.0"\r\n',
}
WORDS = (
    *PIECES,
    *ROUTING,
    *("src", "dst", "bytes", "expert_0", "expert_9", "expert_99999", "3.0", "1e3", "-0", "4095", "32767"),
)


@pytest.mark.parametrize("kind", TEXTS)
@given(data=st.data(), num_experts=st.sampled_from([None, None, 4]))
@any_input
def test_any_csv(tmp_path, kind, data, num_experts):
    path = saved(tmp_path, data.draw(damaged(data.draw(changed_text(TEXTS[kind], WORDS)).encode())), "table.csv")
    workload_or_one_line(path, partial(read_workload, num_experts=num_experts))


TYPES = (pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.string(), pa.bool_(), pa.decimal128(38, 2))
NUMBERS = (None, float("nan"), float("inf"), -1.0, 0.0, 0.5, 1e308, 2.0**53, 2.0**63, 4095.0, 4096.0, 32767.0)


@st.composite
def changed_columns(draw: st.DrawFn, columns: dict[str, list]) -> pa.Table:
    """A table with columns left out, called otherwise, of other types, with odd numbers, lists or groups in them."""
    arrays = {name: pa.array(values) for name, values in columns.items()}
    for name in draw(st.lists(st.sampled_from(sorted(arrays)), max_size=3)):
        match draw(st.sampled_from(("drop", "name", "type", "number", "lists", "dictionary", "struct"))):
            case "drop":
                arrays.pop(name, None)
            case "name":
                other = draw(st.sampled_from((name.upper(), f" {name}", "expert_7", "layer", "", "é")))
                arrays[other] = pa.array(columns[name])
            case "type":
                arrays[name] = pa.array(columns[name]).cast(draw(st.sampled_from(TYPES)), safe=False)
            case "number":
                values = [float(value) for value in columns[name]]
                values[draw(st.integers(0, len(values) - 1))] = draw(st.sampled_from(NUMBERS))
                arrays[name] = pa.array(values)
            case "lists":
                arrays[name] = pa.array([[value] for value in columns[name]])
            case "dictionary":
                arrays[name] = pa.array(columns[name]).dictionary_encode()
            case "struct":
                arrays[name] = pa.array([{"a": value} for value in columns[name]])
    return pa.table(arrays)


@pytest.mark.parametrize("kind", COLUMNS)
@given(
    data=st.data(),
    num_experts=st.sampled_from([None, None, 4]),
    compression=st.sampled_from(["none", "snappy", "gzip", "zstd", "brotli", "lz4"]),
    rows=st.sampled_from([1, 3, 1000]),
)
@any_input
def test_any_parquet(tmp_path, kind, data, num_experts, compression, rows):
    file = io.BytesIO()
    pq.write_table(data.draw(changed_columns(COLUMNS[kind])), file, row_group_size=rows, compression=compression)
    path = saved(tmp_path, data.draw(damaged(file.getvalue())), "table.parquet")
    workload_or_one_line(path, partial(read_workload, num_experts=num_experts))


@pytest.mark.parametrize("layers", [3, 16, 1001])
def test_few_rows_that_name_the_largest_cluster(tmp_path, layers):
    text = "layer,src,dst,bytes\n" + "".join(f"{layer},0,4095,1\n" for layer in range(layers))
    said = workload_or_one_line(saved(tmp_path, text, "traffic.csv"))
    assert f"[{layers}, 4096, 4096], at most 33,554,432 numbers are read" in said
