"""What a look at a file takes for its first line, and for its whole."""

from pathlib import Path

import numpy as np
import pytest

from engine.formats import format, number_lists
from engine.formats.format import Glance


def look_at(folder: Path, text: bytes) -> Glance:
    path = folder / "file"
    path.write_bytes(text)
    return Glance(path)


@pytest.mark.parametrize("after", [b"", b"\n", b" \n\n"])
def test_one_object_on_a_line_is_the_whole_file(tmp_path, after):
    look = look_at(tmp_path, b'\n {"a": [1]}' + after)
    assert look.record == look.json == {"a": [1]}
    assert look.keys == {"a"}


@pytest.mark.parametrize("after", [b'\n{"a": 2}\n', b"\n\n3", b"\n" * 70_000 + b"x"])
def test_what_follows_an_object_makes_lines_of_the_file(tmp_path, after):
    look = look_at(tmp_path, b'{"a": [1]}' + after)
    assert look.record == {"a": [1]}
    assert look.json is None
    assert look.keys == frozenset()


def test_an_object_over_several_lines(tmp_path):
    look = look_at(tmp_path, b'{\n"a": {}\n}\n')
    assert (look.record, look.json) == ({}, {"a": {}})


def test_a_first_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(format, "MAX_LINE_BYTES", 12)
    look = look_at(tmp_path, b'{"a": {"b": {}}}')
    assert look.first_line == '{"a": {"b":'
    assert (look.record, look.json) == ({}, {"a": {"b": {}}})


def test_lists_of_ids_are_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(number_lists, "SHORTEST", 0)
    for text in (b'{"topk_experts": [[1, 2]]}', b'{\n"topk_experts": [[1, 2]]}'):
        look = look_at(tmp_path, text)
        assert isinstance(look.json["topk_experts"], np.ndarray)
        assert look.json["topk_experts"].tolist() == [[1, 2]]
