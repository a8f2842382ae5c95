"""JSON lines, whole and broken."""

from pathlib import Path

import pyarrow as pa
import pytest

from engine.errors import InputError
from engine.formats import json_lines
from engine.formats.json_lines import columns, line_of_row, records


def written(folder: Path, data: bytes) -> Path:
    path = folder / "lines.jsonl"
    path.write_bytes(data)
    return path


def test_objects_with_their_line_numbers(tmp_path):
    path = written(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n\n  {"a": [2, 3]}\n{"a": "\xc3\xa9"}')
    assert list(records(path)) == [(1, {"a": 1}), (3, {"a": [2, 3]}), (4, {"a": "é"})]


def test_lines_before_a_broken_one_are_read(tmp_path):
    lines = records(written(tmp_path, b'{"a": 1}\n{"a": '))
    assert next(lines) == (1, {"a": 1})
    with pytest.raises(InputError, match=r"^lines.jsonl, line 2: is not valid JSON, or was cut short"):
        next(lines)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "holds no JSON lines"),
        (b" \n\r\n", "holds no JSON lines"),
        (b"[1]\n", "line 1: a JSON object"),
        (b"{}\n\n3\n", "line 3: a JSON object"),
        (b'{"a": "\xff"}', "line 1: is not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "line 1: the JSON is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 1: is not valid JSON, or was cut short (a number of too many digits)"),
        (b'{"a": 1} {"a": 2}', "line 1: is not valid JSON"),
    ],
)
def test_broken_lines(tmp_path, data, part):
    with pytest.raises(InputError) as caught:
        list(records(written(tmp_path, data)))
    assert part in str(caught.value)


def test_a_line_may_be_so_long_and_no_longer(tmp_path):
    path = written(tmp_path, b'{"a": 1}\n{"a": 22}\n')
    assert len(list(records(path, longest=10))) == 2
    with pytest.raises(InputError, match="line 2: has more than"):
        list(records(path, longest=9))


SCHEMA = pa.schema([("name", pa.string()), ("at", pa.int64()), ("ids", pa.list_(pa.int64()))])


@pytest.mark.parametrize("odd", ["", ', "odd": 1, "odd": 2'])
def test_columns_whichever_parser_reads_them(tmp_path, odd):
    """pyarrow refuses a key that stands twice."""
    path = written(
        tmp_path, f'\n{{"at": 1, "ids": [3, 4]{odd}}}\n\n{{"name": "x", "ids": null, "w": [NaN]}}\n'.encode()
    )
    assert columns(path, SCHEMA).to_pylist() == [
        {"name": None, "at": 1, "ids": [3, 4]},
        {"name": "x", "at": None, "ids": None},
    ]
    assert [line_of_row(path, row) for row in (0, 1)] == ["line 2", "line 4"]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"at": 1.5}', "'at' is '1.5', not a whole number"),
        ('{"at": true}', "'at' is 'True', not a whole number"),
        ('{"at": 9223372036854775808}', "not a whole number"),
        ('{"ids": [1, 2.5]}', "not a list of whole numbers"),
        ('{"ids": {"a": 1}}', "not a list of whole numbers"),
        ('{"name": 3}', "not a text"),
        ('{"name": "\\ud800"}', "not a text"),
        ("[]", "a JSON object"),
    ],
)
def test_columns_of_another_type(tmp_path, line, part):
    with pytest.raises(InputError) as caught:
        columns(written(tmp_path, b'{"at": 1}\n\n' + line.encode() + b"\n"), SCHEMA)
    assert "line 3" in str(caught.value)
    assert part in str(caught.value)


def test_more_lists_than_memory_may_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_CONTAINERS", 4)
    path = written(tmp_path, b'{"a": [[], []]}\n{"a": [[], [], []]}\n')
    with pytest.raises(InputError, match="line 2: has more than 4 lists"):
        list(records(path))
