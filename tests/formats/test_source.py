"""Files that are refused before parsing, and files of random bytes."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from engine.formats import members, read_cluster, read_model, read_plan, read_workload, source, split_member
from tests.formats.faults import refused
from tests.formats.fuzzing import answer_or_one_line, any_input

EXTENSIONS = (".npz", ".npy", ".csv", ".parquet", ".json")
BEGINNINGS = (
    b"",
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"\x93NUMPY\x01\x00",
    b"\x93NUMPY\x01\x00\x46\x00{'descr': '<i8', ",
    b"PAR1",
    b"token,layer,expert\n",
    b"src,dst,bytes\n",
    b"expert_0,expert_1\n",
    b"1,2\n",
    b'{"logical_count":',
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\n\n",
)


def test_missing_file(tmp_path):
    refused(tmp_path / "none.csv", "no such file")


def test_empty_folder(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    refused(tmp_path / "folder.csv", "is an empty folder")


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_empty_file(tmp_path, extension):
    path = tmp_path / f"trace{extension}"
    path.touch()
    refused(path, "empty")


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_too_large_a_file_is_not_read(tmp_path, extension):
    path = tmp_path / f"huge{extension}"
    with path.open("wb") as file:
        file.truncate(300 * 1024**2)
    refused(path, "300 MB", "200 MB", "cut the recording")


@pytest.mark.parametrize("extension", [".npz", ".npy", ".parquet", ".log", ""])
def test_content_counts_not_the_name(tmp_path, extension):
    path = tmp_path / f"trace{extension}"
    path.write_text("token,layer,expert\n0,0,1\n")
    assert read_workload(path).experts.tolist() == [[[1]]]
    with path.open("wb") as file:
        np.save(file, np.zeros((3, 2), int))
    assert read_workload(path).experts.shape == (3, 2, 1)


@pytest.mark.parametrize("extension", [".npz", ".npy", ".parquet"])
def test_unknown_bytes_under_a_binary_name(tmp_path, extension):
    path = tmp_path / f"trace{extension}"
    path.write_bytes(b"\0\1\2\3")
    refused(path, "is not", extension)


def test_utf16_text(tmp_path):
    (tmp_path / "trace.csv").write_text("token,layer,expert\n0,0,1\n", encoding="utf-16")
    refused(tmp_path / "trace.csv", "UTF-8")


def test_newline_in_the_file_name_stays_out_of_the_message(tmp_path):
    path = tmp_path / "a\nb.csv"
    with pytest.raises(InputError) as caught:
        read_workload(path)
    assert "\n" not in str(caught.value)


def test_newline_in_a_key_stays_out_of_the_message(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(r'{"name": "x", "nodes": [], "a\nb": 1}')
    refused(path, read=read_cluster)


def test_split_member():
    assert split_member("a/b.npz::intent") == (Path("a/b.npz"), "intent")
    assert split_member("a/b.npz") == (Path("a/b.npz"), None)
    for text in ("b.npz::", "::intent"):
        with pytest.raises(InputError):
            split_member(text)


def test_member_of_a_file_that_has_none(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("token,layer,expert\n0,0,1\n")
    refused(path, "one workload", member="intent")
    assert members(path) == ()


@given(
    st.sampled_from(EXTENSIONS),
    st.sampled_from(BEGINNINGS),
    st.binary(max_size=300) | st.text('0123456789,.-eE\n" \r[]{}:nai', max_size=200).map(str.encode),
    st.sampled_from((b"", b"PAR1")),
)
@any_input
def test_random_bytes_parse_or_are_refused(extension, beginning, middle, end):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"fuzz{extension}"
        path.write_bytes(beginning + middle + end)
        for read in (read_workload, members, *((read_cluster, read_model, read_plan) if extension == ".json" else ())):
            answer = answer_or_one_line(lambda read=read: read(path))
            assert not isinstance(answer, str) or answer.startswith(path.name)


@pytest.mark.parametrize("limit", ["MAX_KEYS", "MAX_VALUES"])
def test_more_parts_than_memory_may_hold(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(source, limit, 2)
    path = tmp_path / "cluster.json"
    path.write_text('{"a": 1, "b": 2, "c": [3, 4]}')
    refused(path, "has more than 2", read=read_cluster)
