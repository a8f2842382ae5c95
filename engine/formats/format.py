"""An outside format: its name, the test that recognises its files by their content, and their reader.

A `Glance` is the look at a file that those tests share: each part is parsed when it is first asked for.
"""

import csv
import json
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from engine.formats.number_lists import loads
from engine.formats.source import MAGIC, MAX_CONTAINERS, PARSER_ERRORS, Source, read_json
from engine.workload import Workload

HEAD_BYTES = 64 * 1024
SEARCHED_BYTES = 4 * 1024**2
"""Part of a log that is searched for its marks: NCCL_DEBUG and launchers print before a test or a server does."""
MAX_LINE_BYTES = 16 * 1024**2
"""In one line of JSON; the loads of a few hundred layers fit many times."""
MAX_SAFETENSORS_HEADER = 16 * 1024**2
"""Names some 200,000 tensors, more than the largest models and recordings have."""
_TAG = re.compile(
    r"\[(?:\s*(?!true\b|false\b|null\b|NaN\b|Infinity\b)[A-Za-z]"  # [INFO], [rank 0]
    r"|\d+[-/:]"  # [2026-09-01 …]
    r"|[^\[\]{}\"]*\]\s*[^\s,\]\[])"  # [0] a word, [1,0]<stdout>:
)
"""Beginnings of lines of logs that no JSON has."""
Kind = (
    Literal["routing", "loads", "traffic", "plan", "cluster", "model"]
    | Literal["step", "measurements", "profile", "topology", "pairs", "graph"]
)
BELONGS = {
    "routing": "open it on the Workload page",
    "loads": "open it on the Workload page",
    "traffic": "open it on the Workload page",
    "plan": "open it on the Optimise page as what is deployed now",
    "cluster": "open it on the Cluster page",
    "model": "open it on the Workload page",
    "step": "open it on the Optimise page",
    "measurements": "use it as costs on the Cluster page",
    "profile": "use it as costs on the Cluster page",
    "topology": "open it on the Cluster page",
    "pairs": "open all of it at once on the Cluster page, or give it to detect --pairs",
    "graph": "give it to plan --graph",
    "measured-steps": "open it on the Cluster page under Trust, or give it to predict",
}
"""The place in the studio for each kind of file, and for formats that are used otherwise than others of their kind."""


class Glance:
    """The parts of a file that show without reading it as a recording. A part that the file does not have is None or empty;
    nothing here raises on damaged files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB."""
        with self.path.open("rb") as file:
            return file.read(HEAD_BYTES)

    @cached_property
    def beginning(self) -> bytes:
        """The first 4 MiB."""
        with self.path.open("rb") as file:
            return file.read(SEARCHED_BYTES)

    @cached_property
    def magic(self) -> str | None:
        """`.npz`, `.npy`, `.parquet` or `.gz` by the first bytes; `.npz` is any zip archive."""
        return next((kind for kind, (magic, _) in MAGIC.items() if self.head.startswith(magic)), None)

    @cached_property
    def is_text(self) -> bool:
        return self.magic is None and b"\0" not in self.head

    @cached_property
    def archived(self) -> tuple[str, ...]:
        """Names in a zip archive."""
        if self.magic != ".npz":
            return ()
        try:
            with zipfile.ZipFile(self.path) as archive:
                return tuple(archive.namelist())
        except PARSER_ERRORS:
            return ()

    @cached_property
    def is_torch(self) -> bool:
        """True if `torch.save` wrote it: a zip archive with a `data.pkl`."""
        return any(name.endswith("/data.pkl") for name in self.archived)

    @cached_property
    def pickled(self) -> bytes:
        """The first 64 KiB of the structure that `torch.save` writes, never loaded: keys stand in it as texts."""
        if not self.is_torch:
            return b""
        try:
            with zipfile.ZipFile(self.path) as archive:
                name = next(name for name in self.archived if name.endswith("/data.pkl"))
                with archive.open(name) as file:
                    return file.read(HEAD_BYTES)
        except PARSER_ERRORS:
            return b""

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors in a safetensors file."""
        if len(self.head) < 9 or self.head[8:9] != b"{":
            return ()
        (size,) = struct.unpack("<Q", self.head[:8])
        if not 2 <= size <= min(MAX_SAFETENSORS_HEADER, self.path.stat().st_size - 8):
            return ()
        try:
            with self.path.open("rb") as file:
                header = json.loads(file.read(8 + size)[8:])
        except PARSER_ERRORS:
            return ()
        return tuple(name for name in header if name != "__metadata__") if isinstance(header, dict) else ()

    @cached_property
    def first_line(self) -> str:
        """The first line that is not blank, at most `MAX_LINE_BYTES` of it; "" for a binary file."""
        return self._first_line[0].decode(errors="replace").strip()

    @cached_property
    def _first_line(self) -> tuple[bytes, bool]:
        """(the first line that is not blank, True if anything follows it)"""
        if not self.is_text:
            return b"", False
        with self.path.open("rb") as file:
            for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
                if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                    return text, any(rest.strip() for rest in iter(lambda: file.read(HEAD_BYTES), b""))
        return b"", False

    @cached_property
    def record(self) -> dict:
        """The JSON object in the first line if that line is whole, as in a file of JSON lines. Lists of numbers may be
        arrays, here and in `json`."""
        line = self.first_line
        if not line.startswith("{") or not line.endswith("}"):
            return {}
        try:
            text = line.encode()
            record = loads(text, MAX_CONTAINERS) or json.loads(text)
        except PARSER_ERRORS:
            return {}
        return record if isinstance(record, dict) else {}

    @cached_property
    def is_json(self) -> bool:
        """True if the text begins as JSON does, whole or not. A log whose lines begin with a tag, `[INFO]`, does not."""
        return self.first_line[:1] in ("{", "[") and _TAG.match(self.first_line) is None

    @cached_property
    def json(self) -> object:
        """The JSON in the whole file."""
        if not self.is_json:
            return None
        if self.record:
            return None if self._first_line[1] else self.record
        try:
            return read_json(self.path, arrays=True)
        except PARSER_ERRORS:  # an InputError is a ValueError
            return None

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of the JSON object in the file."""
        return frozenset(self.json) if isinstance(self.json, dict) else frozenset()

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The lengths of a JSON list of lists of numbers, by the first list of each level; () for others."""
        shape, inner = [], self.json
        while isinstance(inner, list) and inner:
            shape.append(len(inner))
            inner = inner[0]
        return tuple(shape) if shape and isinstance(inner, int | float) and not isinstance(inner, bool) else ()

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Column names in lower case: those of a Parquet file, or the cells of the first line of a text with commas."""
        try:
            if self.magic == ".parquet":
                names = pq.read_schema(self.path).names
            elif self.is_text and not self.is_json:
                names = next(csv.reader([self.first_line]))
            else:
                names = []
        except (*PARSER_ERRORS, pa.ArrowException):
            return ()
        return tuple(str(name).strip().lower() for name in names)


@dataclass(frozen=True)
class FileSet:
    """Files of one format that mean more together than alone.

    format: the set's
    choose: takes files, returns those that belong to the set, () if they make none
    """

    format: "Format"
    choose: Callable[[Sequence[Path]], tuple[Path, ...]]


@dataclass(frozen=True)
class Format:
    """An outside format.

    title: in a sentence, after "it is"
    tells: True if a file is one of these, by its content
    read: reads the recording in one file, or in all files of one recording; None for files that are not recordings
    recording_of: a key that the files of one recording in one folder share, such as their name without the rank; None if
        every file is a recording of its own
    members: names of the workloads inside a file, () if it holds a single one; None if files of this format always do
    together: the set that its files may make, whatever their folders
    """

    name: str
    title: str
    kind: Kind
    tells: Callable[[Glance], bool]
    read: Callable[[Sequence[Source]], Workload] | None = None
    recording_of: Callable[[Path], str] | None = None
    members: Callable[[Path], tuple[str, ...]] | None = None
    together: FileSet | None = None

    @property
    def is_recording(self) -> bool:
        return self.read is not None

    @property
    def belongs(self) -> str:
        """The place in the studio for such a file."""
        return BELONGS.get(self.name, BELONGS[self.kind])


def of_one_file(read: Callable[[Source], Workload]) -> Callable[[Sequence[Source]], Workload]:
    """A reader of single files, made callable as `Format.read`."""

    def read_only(sources: Sequence[Source]) -> Workload:
        (source,) = sources
        return read(source)

    return read_only
