"""Chrome traces of the PyTorch profiler (Kineto), `.json` or `.json.gz`: GEMMs and collectives of one rank.

These count, repetitions of a size by their median:

* GEMMs: operators `aten::mm` and `aten::addmm` with `Input Dims` and `Input type` (record_shapes=True). With a GPU their
  time is that of the kernels that carry the operator's `External id`, without one the operator's own.
* Collectives: kernels with `Collective name`, `In msg nelems`, `dtype` and `Group size`; on a CPU the `gloo:` ranges with
  `Input Dims`. A rank that is early waits inside its collective for the others, and the trace cannot tell: profile ranks that
  arrive together.
* Kernels of DeepEP (see `deepxtrace`): how many there are and how long they took.

`read_members` takes JSON that is too large to hold member by member, and event by event, so that a trace may be much larger
than the memory that is left.
"""

import gzip
import io
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import TextIO

from engine.catalogue.links import type_of
from engine.costs.measured import CollectiveTimes, GemmTimes, MeasuredTimes, medians
from engine.errors import one_line
from engine.formats.format import Format, Glance
from engine.formats.measured.deepxtrace import ExchangeKernel, exchange_note, exchange_times, kernel_of
from engine.formats.source import fault, quoted

PIECE = 1024**2
"""Characters that are read at a time."""
MAX_VALUE = 16 * 1024**2
"""Limit in characters of one element, or of one member that is no such list."""

_NUMBER = re.compile(r"[-+.\deE]*")
_BLANKS = re.compile(r"[ \t\r\n]*")
_scan = json.JSONDecoder(strict=False).scan_once
MAX_TRACE_BYTES = 1024**3
"""Limit of the JSON text, unpacked."""
GEMMS = {"aten::mm": 0, "aten::addmm": 1}
"""Operators, and which of their inputs is A."""
DTYPES = {"float": "fp32", "c10::bfloat16": "bf16", "c10::half": "fp16"}
"""`Input type` in lower case."""
COLLECTIVES = {
    name: operation
    for operation, names in (
        ("all_reduce", "allreduce all_reduce"),
        ("all_to_all", "alltoall all_to_all all_to_allv alltoallv"),
    )
    for name in names.split()
}
ELEMENT_BYTES = {
    name: size
    for size, names in (
        (1, "byte char bool float8_e4m3fn float8_e5m2"),
        (2, "half bfloat16 short c10::bfloat16 c10::half"),
        (4, "float int"),
        (8, "double long"),
    )
    for name in names.split()
}
"""By torch's name of the dtype, in lower case."""


def read_members(file: TextIO, path: Path, key: str, most: int) -> Iterator[tuple[str, object]]:
    """(key, value) of every member of the object in `file`; for the member `key`, a list, (key, element) of each element.
    Raises InputError, which names `path`, for other text and for more than `most` characters."""
    text = _Text(file, path, most)
    if text.next() != "{":
        raise fault(path, "a JSON object {…} is needed")
    for _ in _separated(text, "}"):
        name = text.value()
        if not isinstance(name, str):
            raise fault(path, "not valid JSON (a key must be a text)")
        text.expect(":")
        if name != key:
            yield name, text.value()
        elif text.next() != "[":
            raise fault(path, f"{quoted(key)} is not a list")
        else:
            for _ in _separated(text, "]"):
                yield name, text.value()
    if text.next():
        raise fault(path, "not valid JSON (more after its end)")


class _Text:
    """A window into a text, with `start` at the first character that was not taken yet."""

    def __init__(self, file: TextIO, path: Path, most: int) -> None:
        self.file, self.path, self.left = file, path, most
        self.window, self.start, self.ended = "", 0, False

    def next(self) -> str:
        """The next character that is no blank, which stays; "" at the end."""
        while True:
            self.start = _BLANKS.match(self.window, self.start).end()
            if self.start < len(self.window):
                return self.window[self.start]
            if self.ended:
                return ""
            self._read_on()

    def expect(self, characters: str) -> str:
        """Take the next character, which must be one of these."""
        if (character := self.next()) not in characters or not character:
            where = f"{quoted(character)} instead of {' or '.join(characters)}" if character else "it ends in the middle"
            raise fault(self.path, f"not valid JSON ({where})")
        self.start += 1
        return character

    def value(self) -> object:
        """Take the next value."""
        self.next()
        while True:
            try:
                value, end = _scan(self.window, self.start)
            except (StopIteration, json.JSONDecodeError) as error:
                if self.ended or len(self.window) - self.start > MAX_VALUE:
                    why = error.msg if isinstance(error, json.JSONDecodeError) else "a value is missing"
                    raise fault(self.path, f"not valid JSON, or cut off ({why})") from None
            else:
                # A number may go on in the part that was not read yet.
                cut = _NUMBER.match(self.window, end).end() == len(self.window)
                if not cut or self.ended or len(self.window) - self.start > MAX_VALUE:
                    self.start = end
                    return value
            self._read_on()

    def _read_on(self) -> None:
        """Double the window, so that a long value is not begun over and over."""
        piece = self.file.read(max(PIECE, len(self.window) - self.start))
        self.left -= len(piece)
        if self.left < 0:
            raise fault(self.path, "unpacks to more than is read; profile fewer steps")
        self.window, self.start, self.ended = self.window[self.start :] + piece, 0, not piece


def _separated(text: _Text, end: str) -> Iterator[None]:
    """Yield once for each part between an opening bracket, which is next, commas and `end`; the caller takes the part."""
    text.start += 1
    if text.next() == end:
        text.start += 1
        return
    while True:
        yield
        if text.expect("," + end) == end:
            return


def read_kineto(path: Path) -> MeasuredTimes:
    """The times in a trace; raises InputError if it has neither GEMMs nor collectives nor kernels of DeepEP."""
    trace, about = _Events(), {}
    with gzip.open(path) if Glance(path).magic == ".gz" else path.open("rb") as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace")
        for key, value in read_members(text, path, "traceEvents", MAX_TRACE_BYTES):
            if key == "traceEvents":
                trace.take(value)
            elif key in ("distributedInfo", "deviceProperties"):
                about[key] = value
    gpu = _gpu_type(about) if trace.on_gpu else "CPU"
    gemm, collectives = trace.gemms(), trace.collectives(_world_size(about))
    exchanges = exchange_times(trace.exchanges)
    if not gemm and not collectives and not exchanges:
        raise fault(
            path,
            "no GEMMs with shapes and no all-to-all or all-reduce with sizes in this trace; profile with "
            "record_shapes=True, on GPUs with CUDA activities and NCCL",
        )
    return MeasuredTimes(
        name=one_line(path.name.removesuffix(".gz").removesuffix(".json"))[:80] or "trace",
        origin=f"PyTorch profiler trace on {gpu}"[:300],
        gemm=tuple(GemmTimes(gpu=gpu, dtype=dtype, points=medians(points)) for dtype, points in gemm.items()),
        collectives=tuple(
            CollectiveTimes(operation=operation, ranks=ranks, points=medians(points))
            for (operation, ranks), points in collectives.items()
        ),
        exchanges=exchanges or None,
        notes=(*map(exchange_note, exchanges), *trace.left_out()) or None,
    )


@dataclass
class _Events:
    """The events so far that count.

    kernels: µs by `External id`
    operators: (id, dtype, m, n, k, µs) of GEMMs
    on_device, on_host: (operation, ranks, bytes, seconds) of collectives; ranks 0 if the trace's world counts
    exchanges: seconds by kernel
    others: number of collectives of other kinds
    """

    on_gpu: bool = False
    kernels: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    operators: list[tuple[object, str, int, int, int, float]] = field(default_factory=list)
    on_device: list[tuple[str, int, int, float]] = field(default_factory=list)
    on_host: list[tuple[str, int, int, float]] = field(default_factory=list)
    exchanges: dict[ExchangeKernel, list[float]] = field(default_factory=lambda: defaultdict(list))
    others: Counter[str] = field(default_factory=Counter)

    def take(self, event: object) -> None:
        if not isinstance(event, dict):
            return
        category, name = event.get("cat"), event.get("name")
        self.on_gpu |= category == "kernel"
        duration = event.get("dur")
        if not isinstance(event.get("args"), dict) or not isinstance(duration, int | float) or not isinstance(name, str):
            return
        if event.get("ph") != "X" or not isfinite(duration) or duration <= 0:
            return
        if category == "kernel":
            self._take_kernel(event, name)
        elif category == "cpu_op" and name in GEMMS:
            self._take_operator(event)
        elif name.startswith("gloo:"):
            match event["args"].get("Input Dims"):
                case [[_, *_] as shape, *_] if all(isinstance(size, int) for size in shape):
                    count = prod(shape)
                case _:
                    count = None
            types = event["args"].get("Input type")
            dtype = types[0] if isinstance(types, list) and types else None
            self._take_collective(self.on_host, name.removeprefix("gloo:"), 0, count, dtype, duration)

    def _take_kernel(self, event: dict, name: str) -> None:
        about = event["args"]
        if isinstance(about.get("External id"), int):
            self.kernels[about["External id"]] += event["dur"]
        if "Collective name" in about:
            operation, ranks = about["Collective name"], about.get("Group size")
            if isinstance(ranks, int) and ranks > 1:
                count, dtype = about.get("In msg nelems"), about.get("dtype")
                self._take_collective(self.on_device, operation, ranks, count, dtype, event["dur"])
        elif (kernel := kernel_of(name)) is not None:
            self.exchanges[kernel].append(event["dur"] * 1e-6)

    def _take_operator(self, event: dict) -> None:
        about, first = event["args"], GEMMS[event["name"]]
        dims, types = about.get("Input Dims"), about.get("Input type")
        match dims[first : first + 2] if isinstance(dims, list) else None:
            case [[int(m), int(k)], [int(inner), int(n)]] if inner == k and min(m, n, k) > 0:
                dtype = types[first] if isinstance(types, list) and len(types) > first else None
                if isinstance(dtype, str) and dtype.lower() in DTYPES:
                    self.operators.append((about.get("External id"), DTYPES[dtype.lower()], m, n, k, event["dur"]))

    def _take_collective(
        self, into: list, operation: object, ranks: int, count: object, dtype: object, duration: float
    ) -> None:
        if not isinstance(operation, str):
            return
        if operation.lower() not in COLLECTIVES:
            self.others[operation[:40]] += 1
        elif isinstance(count, int) and count > 0 and isinstance(dtype, str) and dtype.lower() in ELEMENT_BYTES:
            size = count * ELEMENT_BYTES[dtype.lower()]
            into.append((COLLECTIVES[operation.lower()], ranks, size, duration * 1e-6))

    def gemms(self) -> dict[str, list[tuple[float, ...]]]:
        """(m, n, k, seconds) by dtype."""
        gemms = defaultdict(list)
        for number, dtype, m, n, k, own in self.operators:
            duration = own
            if self.on_gpu:
                duration = self.kernels.get(number, 0.0) if isinstance(number, int) else 0.0
            if duration > 0:
                gemms[dtype].append((m, n, k, duration * 1e-6))
        return gemms

    def collectives(self, world: int) -> dict[tuple[str, int], list[tuple[float, float]]]:
        """(bytes, seconds) by operation and number of ranks."""
        collectives = defaultdict(list)
        for operation, ranks, size, seconds in self.on_device if self.on_gpu else self.on_host:
            if (ranks or world) > 1:
                collectives[operation, ranks or world].append((size, seconds))
        return collectives

    def left_out(self) -> list[str]:
        """A note on the collectives that the trace has and nothing here is timed by."""
        if not self.others:
            return []
        names = ", ".join(f"{count} × {quoted(name)}" for name, count in self.others.most_common(6))
        return [f"left out, as not used for planning: {names}"]


def _world_size(data: dict) -> int:
    match data.get("distributedInfo"):
        case {"world_size": int(size)}:
            return size
    return 0


def _gpu_type(data: dict) -> str:
    """The catalogue's name of the first device, or its own name."""
    match data.get("deviceProperties"):
        case [{"name": str(name)}, *_] if name.strip():
            return type_of(one_line(name)) or one_line(name)[:80]
    return "GPU"


def _tells(glance: Glance) -> bool:
    if glance.magic != ".gz" and not glance.is_text:
        return False
    head = glance.head
    if glance.magic == ".gz":
        try:
            with gzip.open(glance.path) as file:
                head = file.read(len(head))
        except (OSError, EOFError, zlib.error):
            return False
    begins = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
    return begins and (b'"traceEvents"' in head or (b'"schemaVersion"' in head and b'"deviceProperties"' in head))


FORMATS = (Format("profiler-trace", "a trace of the PyTorch profiler", "profile", _tells),)
