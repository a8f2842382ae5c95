"""JSON lines: one object a line, read a line at a time, so that memory holds one of them."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pajson

from engine.formats.format import MAX_LINE_BYTES
from engine.formats.number_lists import loads
from engine.formats.source import MAX_CONTAINERS, fault, quoted

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLOCK_BYTES = 4 * 1024**2
_CHUNK = 16_384


def records(path: Path, longest: int = MAX_LINE_BYTES, arrays: bool = False) -> Iterator[tuple[int, dict]]:
    """(line number from 1, object) of every line that is not blank, in order. Raises InputError at the first line that is no
    JSON object, is cut short or too long, and for a file without any.

    longest: bytes of a line, with its end, that are parsed at most
    arrays: as in `parse_value`
    """
    empty = True
    for number, line in lines(path, longest):
        empty = False
        yield number, parse(path, number, line, arrays)
    if empty:
        raise fault(path, "holds no JSON lines")


def lines(path: Path, longest: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, text) of every line that is not blank; raises InputError for one of more than `longest` bytes."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(longest + 1), b""), start=1):
            if len(line) > longest:
                raise fault(path, f"has more than {longest / 1024**2:.0f} MB; write fewer tokens a line", f"line {number}")
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if text := line.strip():
                yield number, text


def parse(path: Path, number: int, line: bytes, arrays: bool = False) -> dict:
    """The JSON object in line `number`; raises InputError. arrays: as in `parse_value`"""
    record = parse_value(path, number, line, arrays)
    if not isinstance(record, dict):
        raise fault(path, "a JSON object {…} a line is needed", f"line {number}")
    return record


def parse_value(path: Path, number: int, line: bytes, arrays: bool = False) -> object:
    """The JSON in line `number`; raises InputError. arrays: lists of numbers may come as arrays, see `number_lists.loads`"""
    if arrays and (value := loads(line, MAX_CONTAINERS)) is not None:
        return value
    if line.count(b"[") + line.count(b"{") > MAX_CONTAINERS:
        raise fault(path, f"has more than {MAX_CONTAINERS:,} lists; write fewer tokens a line", f"line {number}")
    try:
        return json.loads(line)
    except UnicodeDecodeError:
        raise fault(path, "is not UTF-8 text; save it as UTF-8", f"line {number}") from None
    except RecursionError:
        raise fault(path, "the JSON is nested too deeply", f"line {number}") from None
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number of too many digits"
        cut = "; if the recording broke off here, delete the line" if number > 1 else ""
        raise fault(path, f"is not valid JSON, or was cut short ({reason}){cut}", f"line {number}") from None


def columns(path: Path, schema: pa.Schema) -> pa.Table:
    """The keys that `schema` names as columns, with a row for each line; null if a line has no such key, other keys are left
    out. Six times as quick as `records` for lines that are short and alike. Raises InputError at the first that does not fit.
    """
    try:
        with path.open("rb") as file:
            table = pajson.read_json(
                file,
                pajson.ReadOptions(block_size=_BLOCK_BYTES),
                pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
        return table.select(schema.names)
    except pa.ArrowInvalid:  # Python's parser finds the line, or is content with it
        rows = (_row(path, number, record, schema) for number, record in records(path))
        chunks = iter(lambda: list(islice(rows, _CHUNK)), [])
        return pa.Table.from_batches((pa.RecordBatch.from_pylist(chunk, schema) for chunk in chunks), schema)


def line_of_row(path: Path, row: int) -> str:
    """`line N` of a row of `columns`; blank lines are no rows but do count as lines."""
    return f"line {next(islice(lines(path), row, None), (row + 1, b''))[0]}"


def _row(path: Path, number: int, record: dict, schema: pa.Schema) -> dict:
    """The values of a record that `schema` names; raises InputError for another type, which pyarrow would round or cut."""
    row = {field.name: record.get(field.name) for field in schema}
    for field in schema:
        if not _fits(row[field.name], field.type):
            wanted = {pa.string(): "a text", pa.int64(): "a whole number"}
            wanted |= {pa.list_(pa.int64()): "a list of whole numbers", pa.list_(pa.float64()): "a list of numbers"}
            raise fault(path, f"'{field.name}' is {quoted(row[field.name])}, not {wanted[field.type]}", f"line {number}")
    return row


def _fits(value: object, kind: pa.DataType) -> bool:
    if value is None:
        return True
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(_fits(item, kind.value_type) for item in value)
    if pa.types.is_string(kind):
        return isinstance(value, str) and value.isprintable()
    if pa.types.is_floating(kind):
        return type(value) in (int, float)
    return type(value) is int and -(2**63) <= value < 2**63
