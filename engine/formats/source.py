"""The file being read: the checks before any parsing, and the one way to complain about it.

Names tell which files of a folder belong together: those of one run differ in numbers and ids alone.
"""

import csv
import json
import lzma
import re
import struct
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from engine.errors import InputError, one_line
from engine.formats.number_lists import loads
from engine.model import MoEModel
from engine.workload import Finding

MAX_FILE_BYTES = 200 * 1024**2
MAX_UNPACKED_BYTES = 2 * 1024**3
"""Limit of an unpacked file in memory; a few kilobytes can claim to hold terabytes."""
MAX_JSON_BYTES = 64 * 1024**2
"""Limit of a text that is parsed whole: lists of short numbers take twenty times as much in memory."""
MAX_CONTAINERS = 4_000_000
"""Lists and objects in such a text: each takes a hundred bytes or more in memory, and as little as two in the text."""
MAX_KEYS = 2_000_000
"""In such a text, colons in other texts included: of one object with a million of them, each takes 300 bytes."""
MAX_VALUES = 20_000_000
"""Numbers and texts in such a text, which take forty bytes or more each."""

MAGIC = {
    ".npz": (b"PK", "a NumPy .npz archive"),
    ".npy": (b"\x93NUMPY", "a NumPy .npy array"),
    ".parquet": (b"PAR1", "a Parquet file"),
    ".gz": (b"\x1f\x8b", "a gzip file"),
}
"""First bytes of the binary formats, and their titles."""

PARSER_ERRORS = (
    *(ValueError, OSError, EOFError, MemoryError, RecursionError, OverflowError, NotImplementedError, RuntimeError),
    *(SyntaxError, csv.Error, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(tarfile.TarError, pa.ArrowException),
)
"""Errors that zipfile, tarfile, json, csv, NumPy and pyarrow raise on damaged files."""
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_BEFORE = re.compile(
    rf"^(?:[ \t]*(?:\[pod/[\w./-]+\]|\[(?:default|rank)\d+\]:"  # kubectl --prefix, torchrun
    rf"|\[\d+,\d+\](?:<\w+>)?:|\d{{1,6}}:(?=[ \t])"  # mpirun --tag-output, srun --label
    rf"|\[?{_TIME}\]?|(?:stdout|stderr) [FP](?=[ \t])"  # docker and kubelet
    rf"|[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d(?: [\w.-]+ [\w.@/-]+\[\d+\]:)?"  # journald, syslog
    rf"|\(\w+ pid=\d+[^)\n]*\)|[\w.-]+-\d+ +\|(?=[ \t])))+ ?",  # Ray and vLLM, docker compose
    re.MULTILINE,
)
"""Labels that launchers and collectors of logs put before each line."""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_JSON_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_WORD = r"(?<![0-9A-Za-z])(?=[A-Za-z]*\d[A-Za-z]*\d)[0-9A-Za-z]{12,}(?![0-9A-Za-z])"
_ID = re.compile(rf"{_UUID}|{_WORD}|\d+")


def fault(path: Path, text: str, place: str = "") -> InputError:
    """The InputError `FILE, PLACE: TEXT` on one line."""
    where = f"{path.name or path}, {place}" if place else path.name or path
    return InputError(one_line(f"{where}: {text}"))


def ok(code: str, message: str, **further: Any) -> Finding:
    """A finding that is good to know. further: the other fields of `Finding`"""
    return Finding(severity="ok", code=code, message=message, **further)


def warning(code: str, message: str, **further: Any) -> Finding:
    """A finding that plans may be wrong. further: the other fields of `Finding`"""
    return Finding(severity="warning", code=code, message=message, **further)


def error(code: str, message: str, **further: Any) -> Finding:
    """A finding that plans would be wrong. further: the other fields of `Finding`"""
    return Finding(severity="error", code=code, message=message, **further)


def quoted(value: object) -> str:
    """A value out of a file, short enough for a message."""
    text = str(value)
    return f"'{text[:40]}…'" if len(text) > 40 else f"'{text}'"


@dataclass(frozen=True)
class Source:
    """A workload file, with facts about it from elsewhere.

    name: the workload's
    member: the one to take of several workloads inside the file, None if that was not said
    num_experts: logical experts per layer of the open model, None if there is none
    bytes_per_token: bytes of one token copy, for traffic matrices, which do not record it
    model: the open model, None if there is none. A recording need not be of it
    stages: pipeline stages of the run that was recorded, None if that was not said
    deployed: the plan that ran while it was recorded, for counts of its slots, None if that was not said
    """

    path: Path
    name: str
    member: str | None = None
    num_experts: int | None = None
    bytes_per_token: float = 1.0
    model: MoEModel | None = None
    stages: int | None = None
    deployed: Path | None = None

    @property
    def zero_experts(self) -> int:
        """Ids of the open model after those of its experts, for choices without computation."""
        return (self.model.zero_experts or 0) if self.model else 0

    def fault(self, text: str, place: str = "") -> InputError:
        """See `fault`."""
        return fault(self.path, text, place)


@contextmanager
def one_clear_line(path: Path) -> Iterator[None]:
    """Turn every error that a parser raises about `path` into an InputError."""
    try:
        yield
    except InputError as error:
        # Names and keys out of the file may be part of the message, line ends and all.
        raise InputError(one_line(str(error))) from None
    except MemoryError:
        raise fault(path, "too large to hold in memory; cut the recording to fewer tokens") from None
    except RecursionError:
        raise fault(path, "the JSON is nested too deeply") from None
    except PARSER_ERRORS as error:
        # Only the operating system numbers its errors; pyarrow raises bare OSErrors on damaged files.
        if isinstance(error, OSError) and error.errno is not None:
            raise fault(path, f"cannot be read or written ({error.strerror})") from None
        raise fault(path, f"damaged or not what its extension says ({str(error)[:160]})") from None


def check_file(path: Path, extensions: Collection[str]) -> str:
    """The extension of `path` in lower case; raises InputError unless the file is there, of a known kind and a bearable size,
    and begins as its extension promises."""
    check_there(path)
    extension = path.suffix.lower()
    if extension not in extensions:
        raise fault(path, f"unknown extension {quoted(extension)}; known here: {', '.join(sorted(extensions))}")
    check_size(path)
    check_beginning(path, extension)
    return extension


def check_there(path: Path) -> None:
    """Raise InputError unless `path` is a regular file."""
    if path.is_dir():
        raise fault(path, "is a folder; give a file")
    if not path.exists():
        raise fault(path, "there is no such file")
    if not path.is_file():
        raise fault(path, "is not a regular file")


def check_size(path: Path) -> None:
    """Raise InputError for a file that is empty or too large."""
    size = path.stat().st_size
    if size == 0:
        raise fault(path, "the file is empty")
    if size > MAX_FILE_BYTES:
        raise fault(
            path,
            f"{size / 1024**2:.0f} MB, more than the limit of {MAX_FILE_BYTES // 1024**2} MB; "
            "cut the recording to fewer tokens, or save it as .npz or Parquet, which are smaller",
        )


def check_beginning(path: Path, extension: str) -> None:
    """Raise InputError unless the file begins as files of this extension do."""
    with path.open("rb") as file:
        head = file.read(4096)
    actual = next((kind for kind, (magic, _) in MAGIC.items() if head.startswith(magic)), None)
    if extension in MAGIC and actual != extension:
        is_instead = f"it is {MAGIC[actual][1]}" if actual else "text?" if b"\0" not in head else "an unknown binary format"
        raise fault(path, f"is not {MAGIC[extension][1]} although it is named {extension} ({is_instead})")
    if extension not in MAGIC:
        if actual:
            raise fault(path, f"is {MAGIC[actual][1]}, not text; name it {actual}")
        if b"\0" in head:
            raise fault(path, "is not UTF-8 text; save it as UTF-8")


def plain(text: str) -> str:
    """A text of lines without colours and the labels that launchers and collectors of logs put before them."""
    return _BEFORE.sub("", ESCAPE.sub("", text.replace("\r\n", "\n")))


def line_ends(path: Path) -> int:
    """The number of line feeds in a file."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1024**2), b""))


def read_json(path: Path, most: int = MAX_JSON_BYTES, arrays: bool = False) -> object:
    """The JSON in a file; raises InputError for anything else, and for more than `most` bytes.

    arrays: lists of numbers may come as arrays, see `number_lists.loads`
    """
    if (size := path.stat().st_size) > most:
        raise fault(
            path,
            f"{size / 1024**2:.0f} MB of JSON, more than the limit of {most // 1024**2} MB; cut it to fewer steps or tokens",
        )
    content = path.read_bytes()
    if arrays and (value := loads(content, MAX_CONTAINERS)) is not None:
        return value
    if content.count(b"[") + content.count(b"{") > MAX_CONTAINERS:
        raise fault(path, f"has more than {MAX_CONTAINERS:,} lists and objects; cut it to fewer steps or tokens")
    if content.count(b":") > MAX_KEYS:
        raise fault(path, f"has more than {MAX_KEYS:,} keys; cut it to fewer steps or tokens")
    if content.count(b",") > MAX_VALUES:
        raise fault(path, f"has more than {MAX_VALUES:,} numbers and texts; cut it to fewer steps or tokens")
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        ends_early = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        cut_off = "; the file may be cut off" if ends_early else ""
        raise fault(path, f"not valid JSON ({error.msg}){cut_off}", f"line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise fault(path, "is not UTF-8 text; save it as UTF-8") from None


def read_json_object(path: Path, most: int = MAX_JSON_BYTES, arrays: bool = False) -> dict:
    """As `read_json`, for a file that must hold an object."""
    data = read_json(path, most, arrays)
    if not isinstance(data, dict):
        raise fault(path, f"a JSON object {{…}} is needed, this is {_JSON_KINDS.get(type(data), 'a number')}")
    return data


def without_ids(path: Path) -> str:
    """The file's name with `#` for every UUID, long word with several digits (a request's id) and number in it:
    `routes-layer12.jsonl` and `routes-layer3.jsonl` are both `routes-layer#.jsonl`."""
    return _ID.sub("#", path.name)


def in_order(sources: Sequence[Source]) -> list[Source]:
    """The files by the numbers in their names and folders, which follow time more often than the order of letters does: 2
    before 10."""
    names = {source: f"{source.path.parent.name}/{source.path.name}" for source in sources}
    return sorted(sources, key=lambda source: [part.zfill(20) for part in re.split(r"(\d+)", names[source])])
