"""CSV and Parquet tables: routing logs, traffic matrices and expert loads.

Told apart by the column names (any order, further columns are ignored):

* `token, layer, expert`, optionally `rank_in_topk`, `sequence`, `source_rank`, `phase`: a routing log in long form
* `layer, expert, count`: expert loads in long form
* `src, dst, bytes`, optionally `layer`: traffic in long form
* `expert_0, expert_1, …` or `0, 1, …`, optionally `layer`: expert loads, one row per layer
* numbers alone, from the first line on: n rows of n are traffic of one layer in bytes, others expert
  loads, but for n ± 1 rows of n, a matrix that may have lost a line

Cells are separated by commas, or by tabs where the first line has no comma; numbers alone also by blanks. A
first line of numbers is a row. Only `0, 1, …, n−1` is a header, as pandas writes one, unless it and the lines below it are a
square; then a finding names the assumption.
"""

import csv
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from engine.formats.arrays import MAX_EXPERTS, MAX_RANKS, expert_load, traffic_matrix, whole_numbers
from engine.formats.bare_lists import CHOICES, loads_of_table
from engine.formats.bare_lists import LOADS as LISTED_LOADS
from engine.formats.format import Format, Glance, of_one_file
from engine.formats.json_lines import lines, parse_value
from engine.formats.long_form import (
    ALSO_CALLED,
    LOADS,
    PHASES,
    ROUTING,
    TEXTS,
    TRAFFIC,
    loads_from_columns,
    routing_from_columns,
    traffic_from_columns,
)
from engine.formats.source import Source, line_ends, ok, quoted, warning
from engine.workload import Origin, Workload

_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_NUMBERS_ALONE = r"\s*([+-]?[\d.].*|[+-]?(nan|inf(inity)?)|)\s*"
"""A cell of a row: a number, even one that is written wrong, or nothing. No name of a column begins like that."""
_OF_EXPERT = r"(?:e(?:xpert)?[ _]?)?(\d{1,5})"
_MAX_LINE_BYTES = 1024**2
TEXT = pa.dictionary(pa.int32(), pa.string())
MAX_ROWS = 10_000_000
"""Twice the longest recordings that people save as tables; checking takes a hundred bytes a row."""
MAX_NUMBERS = 2**27
MAX_RECORDS = 500_000
"""Rows as objects of JSON, which Python parses one by one."""
IS_PREFILL = "is_prefill"
_LISTED = {*CHOICES, *LISTED_LOADS}


@dataclass(frozen=True)
class CsvTable:
    """A CSV file with its header read (None: there is none)."""

    source: Source
    header: tuple[str, ...] | None
    width: int
    separator: str = ","
    format: str = "csv"

    def read(self, kinds: dict[int, pa.DataType], words: bool = False) -> list[np.ndarray]:
        """One array for each column in `kinds` (by position), int64 or float64; every cell is filled and a number.

        words: take the slow way, which finds the cell at fault
        """
        names = [str(position) for position in range(self.width)]
        first_line = next(number for number, _ in _lines(self.source.path))
        _check_rows(self.source, line_ends(self.source.path) - (self.header is not None), len(kinds))
        try:
            table = pacsv.read_csv(
                self.source.path,
                pacsv.ReadOptions(column_names=names, skip_rows=first_line - (self.header is None)),
                pacsv.ParseOptions(delimiter=self.separator),
                convert_options=pacsv.ConvertOptions(
                    include_columns=[names[position] for position in kinds],
                    column_types={names[at]: pa.string() if words and kind != TEXT else kind for at, kind in kinds.items()},
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )
        except pa.ArrowInvalid:
            if words:
                raise
            self._check_shape()
            return self.read(kinds, words=True)
        if table.num_rows == 0:
            raise self.source.fault("has a header but no rows")
        columns, unread = [], dict(zip(table.column_names, table.columns, strict=True))
        del table  # so that each column goes when it has been taken out
        for position, kind in kinds.items():
            column = unread.pop(names[position])
            if column.null_count:
                row = pc.index(pc.is_null(column), True).as_py()
                raise self.source.fault(f"{self.title(position)} is empty", self.place(row))
            if kind == TEXT:
                columns.append(self._of_texts(column, position))
            else:
                columns.append((self._numbers(column, position, kind) if words else column).to_numpy())
        return columns

    def has_text(self, position: int) -> bool:
        """True if the first row has a text in a column."""
        line = next(itertools.islice(_lines(self.source.path), 1, None), (0, b""))[1]
        cells = _cells(line.decode(errors="replace"), self.separator)
        return position < len(cells) and re.match(_NUMBER, cells[position]) is None

    def _of_texts(self, column: pa.ChunkedArray, position: int) -> np.ndarray:
        """Phases by their words, and a number for each other text in the order in which they come: int64[row]."""
        coded = column.unify_dictionaries().combine_chunks()
        words = [str(word).strip().lower() for word in coded.dictionary.to_pylist()]
        if self.header[position] in ("phase", IS_PREFILL):
            phases = [_phase(self.source, word) for word in words]
            return np.array(phases)[coded.indices.to_numpy()]
        return coded.indices.to_numpy().astype(np.int64)

    def title(self, position: int) -> str:
        """The name of a column in messages."""
        return f"column {position + 1}" if self.header is None else f"column '{self.header[position]}'"

    def place(self, row: int) -> str:
        """`line N` of a data row; blank lines are not rows but do count as lines."""
        wanted = row if self.header is None else row + 1
        lines = (number for number, _ in _lines(self.source.path))
        return f"line {next(itertools.islice(lines, wanted, None), wanted + 1)}"

    def _check_shape(self) -> None:
        """Raise InputError at the first line with another number of columns."""
        for number, line in _lines(self.source.path):
            text = line.decode("latin-1")
            width = len(_cells(text, self.separator)) if '"' in text else text.count(self.separator) + 1
            if width != self.width:
                raise self.source.fault(f"has {width} columns, the first line {self.width}", f"line {number}")

    def _numbers(self, column: pa.ChunkedArray, position: int, kind: pa.DataType) -> pa.ChunkedArray:
        """Text as numbers of `kind`. Whole numbers may be written `3.0`, as pandas does in tables with gaps."""
        numeric = pc.match_substring_regex(column, _NUMBER)
        if not pc.all(numeric).as_py():
            row = pc.index(numeric, False).as_py()
            wanted = "a whole number" if pa.types.is_integer(kind) else "a number"
            raise self.source.fault(f"{self.title(position)} is {quoted(column[row].as_py())}, not {wanted}", self.place(row))
        numbers = pc.cast(pc.utf8_trim_whitespace(column), pa.float64())
        return _whole(self, numbers, position) if pa.types.is_integer(kind) else numbers


@dataclass(frozen=True)
class ParquetTable:
    """A Parquet file, with the methods of `CsvTable`."""

    source: Source
    file: pq.ParquetFile
    header: tuple[str, ...]
    format: str = "parquet"

    def is_text(self, position: int) -> bool:
        """True for a column of texts."""
        kind = self.file.schema_arrow.field(position).type
        return not (pa.types.is_integer(kind) or pa.types.is_floating(kind))

    def has_text(self, position: int) -> bool:
        """False: texts of a Parquet file are refused, as each takes no room in it but all of it in memory."""
        return False

    def read(self, kinds: dict[int, pa.DataType]) -> list[np.ndarray]:
        rows = self.file.metadata.num_rows
        if rows == 0:
            raise self.source.fault("has no rows")
        _check_rows(self.source, rows, len(kinds))
        names = self.file.schema_arrow.names
        for position in kinds:  # before reading: a repeated text takes no room in the file, but all of it in memory
            if self.is_text(position):
                raise self.source.fault(f"{self.title(position)} is {self.file.schema_arrow.field(position).type}, not numbers")
        columns = []
        for position, kind in kinds.items():
            column = self.file.read(columns=[names[position]]).column(0)
            if column.null_count:
                row = pc.index(pc.is_null(column), True).as_py()
                raise self.source.fault(f"{self.title(position)} is empty", self.place(row))
            if pa.types.is_integer(kind) and pa.types.is_floating(column.type):
                column = _whole(self, pc.cast(column, pa.float64()), position)
            columns.append(pc.cast(column, kind).to_numpy())
        return columns

    def title(self, position: int) -> str:
        """The name of a column in messages."""
        return f"column '{self.header[position]}'"

    def place(self, row: int) -> str:
        """`row N`, counted from 0."""
        return f"row {row}"


Table = CsvTable | ParquetTable


def read_csv(source: Source, is_loads: bool = False) -> Workload:
    """A routing trace, traffic matrix or expert load from a CSV file. is_loads: True if bare numbers are known to be loads"""
    line = next((line for _, line in _lines(source.path)), b"")
    if not line.strip():
        raise source.fault("holds no numbers")
    if len(line) >= _MAX_LINE_BYTES:
        raise source.fault("the first line is over a megabyte long; a table has one row a line")
    try:
        first_line = line.decode()
    except UnicodeDecodeError:
        raise source.fault("is not UTF-8 text; save it as UTF-8", "line 1") from None
    if "\r" in first_line:
        raise source.fault("lines end in a carriage return alone; end them in a line feed", "line 1")
    if "," not in first_line and "\t" not in first_line and ";" in first_line:
        raise source.fault("the columns are separated by semicolons; separate them by commas or tabs", "line 1")
    separator = _separator(first_line)
    cells = _cells(first_line, separator)
    if not all(re.fullmatch(_NUMBERS_ALONE, cell, re.IGNORECASE) for cell in cells):
        return _by_columns(CsvTable(source, _header(source, cells), len(cells), separator))
    if len(cells) > MAX_RANKS:
        raise source.fault(f"the first line has {len(cells)} numbers; a traffic matrix may have {MAX_RANKS}")
    bare = CsvTable(source, None, len(cells), separator)
    amounts = np.column_stack(bare.read(dict.fromkeys(range(len(cells)), pa.float64())))
    counted = len(cells) > 1 and cells == tuple(str(at) for at in range(len(cells)))
    if is_loads and not counted:
        return loads_of_table(source, amounts, "csv", lambda index: f"{bare.place(index[0])}, column {index[1] + 1}")
    if amounts.shape[0] == amounts.shape[1]:
        traffic = traffic_matrix(source, amounts, lambda index: f"{bare.place(index[0])}, column {index[1] + 1}")
        assumed = warning(
            "assumed-traffic",
            f"The first line, 0 … {len(cells) - 1}, was taken for bytes that GPU 0 sends, as {len(cells)} rows of "
            f"{len(cells)} numbers are a traffic matrix. If it heads columns of expert loads, call them expert_0, expert_1, …",
        )
        return replace(traffic, origin=Origin(format="csv", findings=(assumed,))) if counted else traffic
    if counted:
        return _by_columns(CsvTable(source, cells, len(cells), separator))
    rows, columns = amounts.shape
    if abs(rows - columns) == 1:  # a matrix that lost a line must not pass for loads
        raise source.fault(
            f"has {rows} rows of {columns} numbers: a traffic matrix must be square; if they are expert loads, a row per "
            "layer, head the columns expert_0, expert_1, …"
        )
    return loads_of_table(source, amounts, "csv", lambda index: f"{bare.place(index[0])}, column {index[1] + 1}")


def read_parquet(source: Source) -> Workload:
    """A routing trace, traffic matrix or expert load from a Parquet file."""
    with pq.ParquetFile(source.path) as file:
        names = tuple(str(name) for name in file.schema_arrow.names)
        return _by_columns(ParquetTable(source, file, _header(source, names)))


def read_records(source: Source) -> Workload:
    """The same from JSON objects with a key a column, as a list or one a line. A list under a name of choices is as many rows,
    and one of loads a row for each expert."""
    content = _records_in(Glance(source.path).json)
    if content is None:
        content = [parse_value(source.path, number, line) for number, line in lines(source.path, _MAX_LINE_BYTES)]
    rows, sequences = [], {}
    for number, record in enumerate(content, 1):
        if not isinstance(record, dict):
            raise source.fault("is no JSON object as the first one is", f"record {number}")
        values = {str(key).lower(): value for key, value in record.items()}
        plain = {key: value for key, value in values.items() if type(value) in (int, float)}
        for key, value in values.items():
            if key in ("phase", IS_PREFILL) and isinstance(value, str | bool):
                plain["phase"] = _phase(source, str(value))
            elif isinstance(value, str) and key in ("sequence", *ALSO_CALLED["sequence"]):
                plain[key] = sequences.setdefault(value, len(sequences))
            elif isinstance(value, str):
                plain[key] = int(value) if re.fullmatch(r"\d{1,18}", value) else value
        name = next((name for name, value in values.items() if isinstance(value, list | np.ndarray) and name in _LISTED), None)
        of_list = ("expert", "rank_in_topk") if name in CHOICES else ("count", "expert")
        listed = [dict(zip(of_list, (value, at), strict=True)) for at, value in enumerate(values[name])] if name else [{}]
        rows += [plain | each for each in listed]
        if len(rows) > MAX_RECORDS:
            raise source.fault(f"more than {MAX_RECORDS:,} rows as JSON; save them as CSV, Parquet or .npz")
    try:
        table, held = pa.Table.from_pylist(rows), BytesIO()
        pq.write_table(table, held)
    except pa.ArrowException:
        raise source.fault("a value is a number in one record and something else in another") from None
    with pq.ParquetFile(held) as file:
        return _by_columns(ParquetTable(source, file, _header(source, tuple(table.column_names)), "records"))


def _phase(source: Source, word: str) -> int:
    """The phase that a word names; raises InputError."""
    if (phase := PHASES.get(word.strip().lower())) is None:
        raise source.fault(f"column 'phase' is {quoted(word)}; it is prefill or decode, or 0 or 1")
    return phase


def _records_in(content: object) -> list | None:
    """A list of objects, which may stand under the only key of an object."""
    content = next(iter(content.values())) if isinstance(content, dict) and len(content) == 1 else content
    return content if isinstance(content, list) and content and isinstance(content[0], dict) else None


def _is_records(glance: Glance) -> bool:
    """True if the first object has the columns of a table in long form."""
    records = _records_in(glance.json)
    keys = {str(key).lower() for key in (glance.record if records is None else records[0])}
    if records is None and not glance.record:
        return False
    has = {name for name in ("token", "layer", "expert", "count") if keys & {name, *ALSO_CALLED[name]}}
    return {"layer", "expert"} <= has or ("layer" in has and bool(keys & _LISTED)) or set(TRAFFIC.needed) <= keys


def _by_columns(table: Table) -> Workload:
    """The workload that the column names promise."""
    at = {name: position for position, name in enumerate(table.header)}
    for name, others in ALSO_CALLED.items():
        other = next((other for other in others if other in at), None)
        if name not in at and other and not (isinstance(table, ParquetTable) and table.is_text(at[other])):
            at[name] = at[other]
    if "phase" not in at and IS_PREFILL in at and not (isinstance(table, ParquetTable) and table.is_text(at[IS_PREFILL])):
        at["phase"] = at[IS_PREFILL]
    counted = set(LOADS.needed) <= set(at) and "token" not in at
    for form, read in (
        *(((LOADS, loads_from_columns),) if counted else ()),
        (ROUTING, routing_from_columns),
        (TRAFFIC, traffic_from_columns),
    ):
        if not set(form.telling) & set(at):
            continue
        if missing := [name for name in form.needed if name not in at]:
            raise table.source.fault(
                f"column '{missing[0]}' is missing; {form.title} needs {', '.join(form.needed)} "
                f"(found: {', '.join(table.header)[:120]})"
            )
        names = [name for name in form.needed + form.optional if name in at]
        kinds = {at[name]: pa.float64() if name in ("bytes", "count") else pa.int64() for name in names}
        kinds |= {at[name]: TEXT for name in TEXTS if name in names and table.has_text(at[name])}
        columns = dict(zip(names, table.read(kinds), strict=True))
        if at.get("phase") == at.get(IS_PREFILL, -1) and kinds[at["phase"]] != TEXT:
            columns["phase"] = 1 - columns["phase"]
        workload = read(table.source, columns, table.place)
        unread = ", ".join(quoted(name) for at, name in enumerate(table.header) if at not in kinds and name)
        said = (ok("unread-columns", f"Columns that are not read: {unread[:200]}."),) if unread else ()
        return replace(workload, origin=Origin(format=table.format, findings=said))
    numbered = [(int(match[1]), at[name]) for name in at if (match := re.fullmatch(_OF_EXPERT, name))]
    if not numbered:
        raise table.source.fault(
            "the columns must be token, layer, expert (routing), or layer, expert, count (loads), or src, dst, bytes "
            f"(traffic), or expert_0, expert_1, … (loads); found: {', '.join(table.header)[:120]}"
        )
    return _loads(table, numbered, at.get("layer"))


def _loads(table: Table, numbered: list[tuple[int, int]], layer: int | None) -> Workload:
    """Expert loads, one row per layer. numbered: every expert with the position of its column."""
    source, experts = table.source, dict(numbered)
    if len(experts) < len(numbered):
        raise source.fault("two columns are for the same expert")
    if missing := set(range(max(experts) + 1)) - set(experts):
        raise source.fault(f"column 'expert_{min(missing)}' is missing; there must be one for every expert")
    kinds = dict.fromkeys((experts[expert] for expert in range(len(experts))), pa.float64())
    columns = table.read(kinds if layer is None else {**kinds, layer: pa.int64()})
    load = np.column_stack(columns[: len(experts)])
    model_layers = np.arange(len(load)) if layer is None else columns[-1]
    order = np.argsort(model_layers, kind="stable")
    if (model_layers < 0).any():
        raise source.fault("layers count from 0", table.place(int((model_layers < 0).argmax())))
    if (again := np.flatnonzero(np.diff(model_layers[order]) == 0)).size:
        row = int(order[again[0] + 1])
        raise source.fault(f"layer {model_layers[row]} appears twice", table.place(row))
    return expert_load(
        source,
        load[order],
        tuple(model_layers[order].tolist()),
        lambda index: f"{table.place(int(order[index[0]]))}, {table.title(experts[index[1]])}",
    )


def _whole(table: Table, numbers: pa.ChunkedArray, position: int) -> pa.ChunkedArray:
    """Floats without a fraction as int64; raises InputError at the first that has one."""
    title = table.title(position)
    return pa.chunked_array([whole_numbers(table.source, numbers.to_numpy(), title, lambda index: table.place(index[0]))])


def _check_rows(source: Source, rows: int, columns: int) -> None:
    """Raise InputError for more rows, or numbers in them, than are computed with."""
    if rows > MAX_ROWS or rows * columns > MAX_NUMBERS:
        most = f"{MAX_ROWS:,} rows, {MAX_NUMBERS:,} numbers"
        raise source.fault(f"{rows:,} rows of {columns} columns are more than is read ({most}); save it as .npz, or cut it")


def _separator(line: str) -> str:
    if "," in line or "\t" in line:
        return "," if "," in line else "\t"
    return " " if len(cells := line.strip().split(" ")) > 1 and all(re.match(_NUMBER, cell) for cell in cells) else ","


def _cells(line: str, separator: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in next(csv.reader([line], delimiter=separator)))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, text) of the lines that are not blank, which are those that pyarrow reads."""
    with path.open("rb") as file:
        file.seek(3 if file.read(3) == b"\xef\xbb\xbf" else 0)
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), 1):
            if line := line.rstrip(b"\r\n"):
                yield number, line


def _header(source: Source, names: tuple[str, ...]) -> tuple[str, ...]:
    """Column names in lower case; raises InputError for too many, and for two alike."""
    if len(names) > MAX_EXPERTS:
        raise source.fault(f"{len(names)} columns are too many (at most {MAX_EXPERTS})")
    lower = tuple(name.strip().lower() for name in names)
    if len(set(lower)) < len(lower):
        twice = next(name for at, name in enumerate(lower) if name in lower[:at])
        raise source.fault(f"two columns are called {quoted(twice)}")
    return lower


def _is_csv(glance: Glance) -> bool:
    """True for a file with the extension, and for other texts with numbers or the name of a column in the first line."""
    if not glance.is_text or glance.is_json:
        return False
    columns = glance.columns
    if _separator(glance.first_line) != ",":
        columns = tuple(cell.lower() for cell in _cells(glance.first_line, _separator(glance.first_line)))
    also = (*ALSO_CALLED["token"], *ALSO_CALLED["layer"], *ALSO_CALLED["expert"])
    named = (set(ROUTING.telling) | set(TRAFFIC.telling) | {"layer", *also}) & set(columns)
    return (
        glance.path.suffix.lower() in (".csv", ".tsv")
        or bool(named)
        or (len(columns) > 1 and all(re.fullmatch(rf"{_NUMBER}|{_OF_EXPERT}", cell) for cell in columns[not columns[0] :]))
    )


FORMATS = (
    Format("records", "a table as JSON", "routing", _is_records, of_one_file(read_records)),
    Format("parquet", "a Parquet table", "routing", lambda glance: glance.magic == ".parquet", of_one_file(read_parquet)),
    Format("csv", "a CSV table", "routing", _is_csv, of_one_file(read_csv)),
)
