"""Tests of nccl-tests and rccl-tests, one by one, out of every form in which the binaries leave them.

**The text** that they print, with any other text of a job between. Comment lines begin with #: `# Collective test starting:
NAME` (since 2.17), the sizes asked for (`minBytes A maxBytes B step: 2(factor)`), one `#  Rank N Group M Pid … on HOST device …
[BUS] NAME` for every GPU, and the head of the table. A row is

    size count type redop root | time algbw busbw #wrong | time algbw busbw #wrong

in bytes, elements, µs and GB/s, out of place and then in place; without root before 2.11. The times out of place count. One
file may hold the output of several tests, one after another; tests of other binaries than `alltoall_perf`,
`all_reduce_perf` and `sendrecv_perf` are left out, with a note. Ranks in several groups (NCCL_TESTS_SPLIT) run the same test
side by side. The bus, not the device's number, tells GPUs of a host apart: numbers begin at 0 in every process that sees only
some of them.

**JSON** of `nccl-tests -J` (since 2.18): an object with `args`, `config` with the sizes and `devices`, and `results` with
`out_of_place` and `in_place` for each size.

**Records** of `rccl-tests -Z json` or `-Z csv`, which do not name GPUs: name, nodes, ranks, gpusPerRank, size, type, redop,
inPlace, time, algBw, busBw and wrong, one for each size and place.

A test that died leaves a file without its end, so that its sizes are counted against those asked for. Rows with wrong data
are left out.
"""

import csv
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from engine.errors import InputError
from engine.formats.format import Glance
from engine.formats.json_lines import lines, parse_value
from engine.formats.source import ESCAPE, MAX_JSON_BYTES, fault, quoted, read_json
from engine.schema import Frozen

OPERATIONS = {"alltoall_perf": "all_to_all", "all_reduce_perf": "all_reduce", "sendrecv_perf": "send_receive"}
"""The operation that each test times, for the tests that are read."""
MAX_LINE = 4096
MAX_RANKS = 200_000
"""Limit of the lines of ranks and heads of tests in a log: those of all pairs of 300 GPUs."""
MIN_BUS_BANDWIDTH = 1.0
"""GB/s below which the printed bandwidths are too short to tell a collective by their ratio."""

_TYPE = r"(?:u?int(?:8|32|64)|half|float|double|bfloat16|f8e\dm\d|fp8_e\dm\d)"
_LINE = re.compile(rf"(?:^|(?<=[\s:>|\]]))(?:#(?:\s|$)|\d+[ \t]+\d+[ \t]+{_TYPE}[ \t])")
"""The beginning of a line of a test, after the label that a launcher or a collector of logs put before it."""
_START = re.compile(r"#\s*Collective test starting:\s*(?:\S*/)?(\S+)")
_END = re.compile(r"#\s*Collective test concluded:")
_RANK = re.compile(r"#\s*Rank\s+(\d{1,9})\s")
_GROUP = re.compile(r"\sGroup\s+(\d{1,9})\s")
_HEAD = re.compile(r"#\s*size\s+count\s+type\s+redop\s")
_ROW = re.compile(rf"\d+\s+\d+\s+{_TYPE}\s")

_ROWS = re.compile(rf"\b\d+ +\d+ +{_TYPE} +[a-z]+ +-?\d".encode())
_SWEEP = re.compile(r"#\s*nThread\s.*?minBytes (\d{1,18}) maxBytes (\d{1,18}) step: (\d{1,18})\((factor|bytes)\)")
_REDUCED = re.compile(r"#\s*Reducing maxBytes to (\d{1,18})\s")
_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d{1,9})\s")
_CLOSED = re.compile(r"#\s*(?:Out of bounds values|Avg bus bandwidth)\s*:")
_FAILURE = re.compile(
    r"Test (?:[A-Z]+ )?failure(?: \S+:\d+)?|Test timeout(?: \(\d+s\))?|CANCELLED AT \S+(?: DUE TO [A-Z ]+)?"
    r"|Segmentation fault|Bus error|Out Of Memory|\bKilled\b"
)
_CUT = re.compile(r"failure|timeout|NCCL [A-Z]+ ")
"""Text that other processes write where a row waits for its times."""
_RESULTS = re.compile(r",?\s*\"results\"\s*:\s*\[")
_BETWEEN = re.compile(r"[\s,]*")
_JSON = ((b'"nccl_version"', b'"args"'), (b'"inPlace"', b'"busBw"'))
"""Keys of an object of nccl-tests, and of records of rccl-tests."""
_RECORD = {"size", "inplace", "time", "busbw"}
"""Columns by which records of rccl-tests are told."""
CPU_TIMES = "its times are those of the CPU (-C), not of the exchange; run it without -C"
CUT_OFF = "the file ends early"
SEVERAL_GPUS = "its ranks had several GPUs each (-g), and the records do not say how many all had; run one GPU a rank"


class Rank(NamedTuple):
    """One GPU of a test, as its line names it."""

    rank: int
    group: int
    host: str
    bus: str
    device: str


@dataclass
class NcclTest:
    """One test's part of a log.

    line: number of its first line, 0 in JSON and records
    binary: None if the print is of a version that does not name it
    rows: (bytes of each GPU's buffer, seconds)
    bus_shares: busbw / algbw of rows fast enough to tell
    damage: the fault of the first damaged row, and its place
    flaw: the reason why none of its times can be used, as its head tells
    asked: sizes that it was asked for, 0: not known
    seen: rows by type, operation and root, those with wrong data too
    wrong: rows left out because their data was wrong
    out_of_bounds: wrong results by its last lines
    by_row: True if rows say how much of their data was wrong
    cut_after: rows before the first damaged one
    closed: True if its last lines are there
    failure: the words with which it died
    nodes: their number where GPUs are not named, else None
    """

    line: int
    binary: str | None = None
    ranks: list[Rank] = field(default_factory=list)
    rows: list[tuple[float, float]] = field(default_factory=list)
    bus_shares: list[float] = field(default_factory=list)
    damage: tuple[str, str] | None = None
    ended: bool = False
    flaw: str | None = None
    asked: int = 0
    seen: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    wrong: int = 0
    out_of_bounds: int = 0
    by_row: bool = False
    cut_after: int | None = None
    closed: bool = False
    failure: str = ""
    nodes: int | None = None

    @property
    def place(self) -> str:
        return f"test from line {self.line}" if self.line else f"test {self.binary or ''}".rstrip()

    def add(
        self, kind: tuple[str, str, str], size: float, micros: float, bandwidths: tuple[float, float], wrong: float
    ) -> None:
        """Take the row of a size.

        kind: type, operation and root
        micros: µs
        bandwidths: of the algorithm and the bus, GB/s
        wrong: elements with wrong data. Old versions print a rounding error there, far below 1
        """
        self.seen[kind] += 1
        if wrong >= 1:
            self.wrong += 1
            return
        if bandwidths[0] >= MIN_BUS_BANDWIDTH:
            self.bus_shares.append(bandwidths[1] / bandwidths[0])
        if 0 < size < float("inf") and micros > 0:
            self.rows.append((size, micros * 1e-6))

    def notes(self) -> list[str]:
        """The ways in which it is not whole, a sentence each."""
        have, notes = max(self.seen.values(), default=0), []
        if self.failure or have < self.asked or not (self.closed or self.asked):
            ended = "is not whole" if self.closed and not self.failure else "broke off"
            why = f" ({quoted(self.failure)})" if self.failure else ""
            sizes = f"of the {self.asked} sizes that it was asked for" if self.asked else "size" + "s" * (have != 1)
            notes.append(f"the {self.place} {ended}{why}: {have} {sizes} {'is' if have == 1 else 'are'} there")
        if self.wrong:
            rows = sum(self.seen.values())
            notes.append(f"the {self.place}: left out {self.wrong} of {rows} rows, as their data was wrong (#wrong)")
        elif self.out_of_bounds:
            wrong = f"{self.out_of_bounds} results were wrong in place, none out of place"
            notes.append(f"the {self.place}: {wrong}; only times out of place are used")
        return notes

    def unusable(self, path: Path) -> str | None:
        """The reason why its times cannot be used, None if they can."""
        numbers = [rank.rank for rank in self.ranks]
        if self.binary is not None and self.binary not in OPERATIONS:
            return f"{quoted(self.binary)} is not a test of {' or '.join(OPERATIONS)}"
        if self.flaw is not None:
            return self.flaw
        if self.out_of_bounds and not self.wrong and not self.by_row:
            return f"its data was wrong ({self.out_of_bounds} values out of bounds), and it does not say at which sizes"
        if not numbers:
            return "no '# Rank N … on HOST device …' lines before the rows, nor ranks: how many GPUs were there?"
        if len({rank.group for rank in self.ranks}) > 1:
            return "its ranks ran in several groups side by side (NCCL_TESTS_SPLIT), which disturb each other"
        if sorted(numbers) != list(range(len(numbers))):
            return (
                f"{len(numbers)} processes, but their ranks do not count from 0 to {len(numbers) - 1}: each ran its own "
                "test; build nccl-tests with MPI=1"
            )
        if len(numbers) < 2:
            return "one GPU talks to nobody; run the test on two or more"
        if self.operation(path) is None:
            if "none" not in {redop for _, redop, _ in self.seen}:
                return "a reduction, but by its bandwidths no all-reduce; use all_reduce_perf"
            return (
                "the output does not say which collective it is; if it is alltoall_perf, put 'alltoall' in the file's name, "
                "or add a line '# Collective test starting: alltoall_perf' (sendrecv_perf alike)"
            )
        if not self.rows and self.damage is None:
            return "the data of all its sizes was wrong" if self.wrong else "no rows of sizes and times; did the test end?"
        return None

    def operation(self, path: Path) -> str | None:
        """The operation that it times, of `OPERATIONS`: by its own word; else a sum with a busbw of 2 (n-1)/n of its algbw is
        an all-reduce, and others go by the file's name. None if nothing tells."""
        if self.binary is not None:
            return OPERATIONS.get(self.binary)
        if "none" not in {redop for _, redop, _ in self.seen}:
            if (gpus := len(self.ranks)) < 2:
                return None
            share = sorted(self.bus_shares)[len(self.bus_shares) // 2] if self.bus_shares else None
            reduces = share is not None and abs(share / (2 * (gpus - 1) / gpus) - 1) < 0.1
            return "all_reduce" if reduces else None
        letters = re.sub(r"[^a-z]", "", path.stem.lower())
        return next((OPERATIONS[f"{name}_perf"] for name in ("alltoall", "sendrecv") if name in letters), None)


def is_log(glance: Glance) -> bool:
    """True if a text has the head of nccl-tests' table, the line that names a test, or rows of the table, and for JSON of
    nccl-tests and records of rccl-tests."""
    if not glance.is_text:
        return False
    if glance.is_json:
        return any(all(key in glance.head for key in keys) for keys in _JSON)
    marked = b"out-of-place" in glance.beginning or b"# Collective test starting:" in glance.beginning
    return marked or b"#  Rank  0 " in glance.head or _ROWS.search(glance.head) is not None or set(glance.columns) >= _RECORD


def read_tests(path: Path) -> list[NcclTest]:
    """All tests in a log, in their order, one at least; raises InputError."""
    glance = Glance(path)
    if glance.is_json:
        if documents := _documents(path):
            return [_of_json(path, document, document["results"], True) for document in documents]
        document, results, whole = _parsed(path)
        return [_of_json(path, document, results, whole)] if document else _of_records(path, results, whole)
    if set(glance.columns) >= _RECORD:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _of_records(path, list(csv.DictReader(file, skipinitialspace=True)), True)
    return _of_text(path)


def _of_text(path: Path) -> list[NcclTest]:
    tests: list[NcclTest] = []
    sweep: list[str] = []
    stray, ranks = None, 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            text = ESCAPE.sub("", line[:MAX_LINE]).strip()
            if begins := _LINE.search(text):
                text = text[begins.start() :]
            if text.startswith("#"):
                ranks += _comment(tests, sweep, number, text)
                if ranks > MAX_RANKS:
                    raise fault(path, f"more than {MAX_RANKS:,} ranks and tests; split the log", f"line {number}")
                continue
            if tests and not (tests[-1].closed or tests[-1].failure) and (failure := _FAILURE.search(text)):
                tests[-1].failure = failure[0]
            if _ROW.match(text):
                if not tests:
                    stray = stray or number
                elif not tests[-1].ended:
                    _row(tests[-1], number, text.split())
    for test in tests:
        if test.cut_after == sum(test.seen.values()) and not test.closed:
            test.damage = None  # the last line that it wrote before it died
    if tests:
        return tests
    if stray:
        raise fault(path, "rows without the '#' lines before them; keep the whole output", f"line {stray}")
    raise fault(path, "this is not the output of nccl-tests: no '# Rank' lines and no rows of sizes and times")


def _sizes(low: int, high: int, step: int, by_factor: bool) -> int:
    """The number of sizes that a test was asked for, 0 if it cannot be told."""
    if low < 1 or step < 1 + by_factor:
        return 0
    if not by_factor:
        return max(0, (high - low) // step + 1)
    count = 0
    while low <= high:
        low, count = low * step, count + 1
    return count


def _comment(tests: list[NcclTest], sweep: list[str], number: int, text: str) -> bool:
    """Take the facts of a comment line; True if it adds a test or a rank. A new test begins at the line that names it, or at
    the first of its ranks.

    sweep: smallest and largest size, step and its kind, from their line until the table begins
    """
    if match := _START.match(text):
        tests.append(NcclTest(number, _binary(match[1])))
        return True
    if (match := _RANK.match(text)) and (rank := _rank(int(match[1]), text)):
        if not tests or tests[-1].rows or tests[-1].ended:
            tests.append(NcclTest(number))
        tests[-1].ranks.append(rank)
        return True
    if match := _SWEEP.match(text):
        sweep[:] = match.groups()
    elif (match := _REDUCED.match(text)) and sweep:
        sweep[1] = match[1]
    elif not tests:
        return False
    elif _END.match(text):
        tests[-1].ended = tests[-1].closed = True
    elif _CLOSED.match(text):
        tests[-1].closed = True
        if match := _BOUNDS.match(text):
            tests[-1].out_of_bounds = int(match[1])
    elif _HEAD.match(text):
        if began := bool(tests[-1].rows):
            tests.append(NcclTest(number))
        if sweep:
            low, high, step, kind = sweep
            tests[-1].asked = _sizes(int(low), int(high), int(step), kind == "factor")
            sweep.clear()
        tests[-1].by_row = "#wrong" in text
        tests[-1].flaw = CPU_TIMES if "cputime" in text else None
        return began
    return False


def _binary(name: str) -> str:
    """The test of this name: of a binary with a suffix (NAME_SUFFIX=_mpi), or of the collective in a record."""
    name = name.rsplit("/", 1)[-1]
    letters = re.sub(r"[^a-z]", "", name.lower().partition("_perf")[0])
    return next((binary for binary in OPERATIONS if re.sub("_perf|_", "", binary) == letters), name)


def _rank(number: int, text: str) -> Rank | None:
    """The GPU of a line `# Rank N Group M Pid … on HOST device 0 [BUS] NAME`, None for other lines."""
    process, _, rest = text.partition(" on ")
    host, on_device, rest = rest.partition(" device ")
    _, opened, rest = rest.partition("[")
    bus, closed, device = rest.partition("]")
    if not (on_device and opened and closed and len(host.split()) == 1):
        return None
    group = _GROUP.search(process)
    return Rank(number, int(group[1]) if group else 0, host.strip(), bus.strip(), device.strip())


def _row(test: NcclTest, number: int, cells: list[str]) -> None:
    with_root = re.fullmatch(r"-?\d+", cells[4]) is not None if len(cells) > 4 else False
    after = cells[4 + with_root :]
    if not test.closed and (not after or _CUT.search(" ".join(after))):
        return  # the test died while this size ran
    try:
        size, (time, algorithm, bus) = float(cells[0]), map(float, after[:3])
    except ValueError:
        reason = "a row needs size, count, type, redop, root and time, algbw, busbw"
        test.damage = test.damage or (reason, f"line {number}")
        test.cut_after = test.cut_after or sum(test.seen.values())
        return
    if not 0 <= time < float("inf"):
        test.damage = test.damage or (f"the time is {quoted(after[0])}", f"line {number}")
        return
    root = cells[4] if with_root else ""
    test.add((cells[2], cells[3], root), size, time, (algorithm, bus), _count(after[3] if len(after) > 3 else None))


def _count(cell: object) -> float:
    """The number of wrong elements that a cell says, 0 if nothing was checked (N/A)."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return 0.0


def _documents(path: Path) -> list[dict]:
    """The objects with results that a file has side by side, in a list, under a key or one a line; [] if none is whole."""
    try:
        values = [read_json(path)]
    except InputError:
        try:
            values = [parse_value(path, number, line) for number, line in lines(path, MAX_JSON_BYTES)]
        except InputError:
            return []

    def inside(value: object, depth: int) -> list[dict]:
        if isinstance(value, dict) and isinstance(value.get("results"), list):
            return [value] if all(isinstance(row, dict) for row in value["results"]) else []
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [found for part in parts for found in inside(part, depth + 1)] if depth < 5 else []

    return inside(values, 0)


def _parsed(path: Path) -> tuple[dict, list, bool]:
    """(all that stands before the results in JSON, {} for records; the results; True if the file has its end). Raises
    InputError."""
    try:
        content = read_json(path)
    except InputError:
        text = path.read_text(encoding="utf-8", errors="replace") if path.stat().st_size <= MAX_JSON_BYTES else ""
        begin = re.match(r"\ufeff?\s*\[", text) or _RESULTS.search(text)
        if begin is None:
            raise
        before = text[: begin.start()] + "}" if begin.re is _RESULTS else "{}"
        results, at, decoder = [], begin.end(), json.JSONDecoder()
        try:
            while True:
                value, at = decoder.raw_decode(text, _BETWEEN.match(text, at).end())
                results.append(value)
        except ValueError:
            return json.loads(before), [row for row in results if isinstance(row, dict)], False
    document = content if isinstance(content, dict) else {}
    results = document.get("results") if document else content
    if not isinstance(results, list) or not all(isinstance(row, dict) for row in results):
        raise fault(path, "needs a list of objects under 'results'")
    return document, results, True


class _Device(Frozen, extra="ignore"):
    rank: int
    group: int = 0
    hostname: str
    device_hex: str
    device_info: str


class _Record(Frozen, extra="ignore", allow_inf_nan=True):
    name: str = ""
    size: float
    type: str
    redop: str
    root: str | int = ""
    inplace: int
    time: float
    algbw: float
    busbw: float
    wrong: str | float | None = None
    ranks: int | None = Field(default=None, ge=1, le=MAX_RANKS)
    nodes: int | None = Field(default=None, ge=1)
    gpusperrank: int = 1


def _take(test: NcclTest, record: _Record, place: str) -> None:
    """Add a record to its test; those in place only say if their data was right."""
    wrong = _count(record.wrong)
    if record.inplace:
        test.out_of_bounds += wrong >= 1
    elif not 0 <= record.time < float("inf"):
        test.damage = test.damage or (f"the time is {record.time}", place)
    else:
        kind = (record.type, record.redop, str(record.root))
        test.add(kind, record.size, record.time, (record.algbw, record.busbw), wrong)


def _of_json(path: Path, document: dict, results: list, whole: bool) -> NcclTest:
    config = document["config"] if isinstance(document.get("config"), dict) else {}
    arguments = document["args"] if isinstance(document.get("args"), list) else []
    names = [_binary(str(name)) for name in (*arguments[:1], *(row.get("experiment_name") for row in results[:1])) if name]
    test = NcclTest(0, next((name for name in names if name in OPERATIONS), names[0] if names else None), by_row=True)
    devices = config.get("devices", document.get("devices"))  # within the configuration, as the binaries write it
    for at, device in enumerate(devices[:MAX_RANKS] if isinstance(devices, list) else ()):
        test.ranks.append(Rank(*_Device.from_dict(device, f"{path.name}, device {at}").model_dump().values()))
    low, high, factor, step = (
        int(_count(config.get(key))) for key in ("minimum_bytes", "maximum_bytes", "step_factor", "step_bytes")
    )
    test.asked = _sizes(low, min(high, 1 << 62), factor if factor > 1 else step, factor > 1)
    test.closed, test.failure = whole and "out_of_bounds" in document, "" if whole else CUT_OFF
    for at, row in enumerate(results):
        for in_place, name in enumerate(("out_of_place", "in_place")):
            if isinstance(side := row.get(name), dict):
                test.flaw = CPU_TIMES if "cpu_time" in side else test.flaw
                rates = {"time": side.get("time", 0.0), "algbw": side.get("alg_bw"), "busbw": side.get("bus_bw")}
                flat = row | rates | {"inplace": in_place, "wrong": side.get("nwrong")}
                _take(test, _Record.from_dict(flat, f"{path.name}, result {at}"), f"result {at}")
    return test


def _of_records(path: Path, rows: list[dict], whole: bool) -> list[NcclTest]:
    tests: dict[tuple[str, int | None], NcclTest] = {}
    for at, row in enumerate(rows):
        lower = {str(key).strip().lower(): cell for key, cell in row.items()}
        record = _Record.from_dict(lower, f"{path.name}, record {at}")
        if (key := (record.name, record.ranks)) not in tests:
            ranks = [Rank(rank, 0, "", "", "") for rank in range(record.ranks or 0)]
            tests[key] = NcclTest(0, _binary(record.name), ranks, nodes=record.nodes or 1, by_row=True, closed=whole)
        tests[key].flaw = SEVERAL_GPUS if record.gpusperrank > 1 else tests[key].flaw
        _take(tests[key], record, f"record {at}")
    if not tests:
        raise fault(path, "has no record of a test")
    if not whole:
        next(reversed(tests.values())).failure = CUT_OFF
    return list(tests.values())
