"""Folders and archives of recordings that are nearly right: one workload or one clear line."""

import io
import json
import tarfile
import tempfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats import parts, read_workload
from tests.formats.fuzzing import answer_or_one_line, any_input, workload_or_one_line
from tests.formats.mutations import damaged, npy, zips

LINES = "".join(
    json.dumps({"layer": layer, "batch_id": 0, "origin_rows": [], "topk_experts": [[0, 1], [2, 3]]}) + "\n"
    for layer in (0, 1)
)
FILES = {
    "README.md": b"What this is",
    "loads.json": json.dumps({"logical_count": [[0, 0], [1, 2]]}).encode(),
    "deep/er/trace.npy": npy(np.arange(12).reshape(3, 2, 2)),
    "batches.jsonl": LINES.encode(),
    "request-1.npz": b"PK\x05\x06" + bytes(18),
}
ODD_NAMES = (
    "../outside.json",
    "/absolute.json",
    "a\\b.json",
    ".hidden",
    ".",
    "..",
    "a/",
    "x" * 300,
    "é\n.json",
    "a\x00b",
)
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
    files = {
        name: data.draw(st.sampled_from(sorted(FILES.values()))) if name not in FILES else FILES[name] for name in names
    }
    with tempfile.TemporaryDirectory() as folder:
        path, scratch, again = Path(folder, "packed"), Path(folder, "scratch"), Path(folder, "again")
        for into in (scratch, again):
            into.mkdir()
        path.write_bytes(data.draw(packed(files, form)))
        workload_or_one_line(path, partial(read_workload, scratch=scratch))
        answer_or_one_line(lambda: parts([path], again))
        assert {inside.name for inside in Path(folder).iterdir()} == {"packed", "scratch", "again"}


def test_names_with_line_ends(tmp_path):
    path = tmp_path / "packed.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("loads.json", "é\n.json"):
            archive.writestr(name, FILES["loads.json"])
    assert workload_or_one_line(path, partial(read_workload, scratch=tmp_path)).startswith("2 recordings (loads and é)")


def test_a_file_without_a_name(tmp_path):
    path = tmp_path / "packed.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("nameless", b"1")
        archive.infolist()[0].filename = ""  # in the directory at the end, which is what counts
        archive.writestr("loads.json", FILES["loads.json"])
    assert not isinstance(workload_or_one_line(path, partial(read_workload, scratch=tmp_path)), str)
