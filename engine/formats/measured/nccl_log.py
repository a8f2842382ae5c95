"""Text that the binaries of nccl-tests print, test by test, whatever else a job wrote between them.

Comment lines begin with #: `# Collective test starting: NAME` (since 2.17), one `#  Rank N Group M Pid … on HOST device …
[BUS] NAME` for every GPU, and the head of the table. A row is

    size count type redop root | time algbw busbw #wrong | time algbw busbw #wrong

in bytes, elements, µs and GB/s, out of place and then in place; without root before 2.11. The times out of place count.
One file may hold the output of several tests, one after another. Ranks in several groups (NCCL_TESTS_SPLIT) run the same test
side by side. The bus, not the device's number, tells GPUs of a host apart: numbers begin at 0 in every process that sees only
some of them.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from engine.formats.glance import Glance
from engine.formats.source import fault, quoted

OPERATIONS = {"alltoall_perf": "all_to_all", "all_reduce_perf": "all_reduce", "sendrecv_perf": "send_receive"}
"""The tests that are read, and what they time."""
MAX_LINE = 4096
MAX_RANKS = 200_000
"""Lines of ranks and heads of tests in a log: those of all pairs of 300 GPUs."""
SEARCHED_BYTES = 4 * 1024**2
"""Of a log's beginning: NCCL_DEBUG and launchers print before the first test does."""
MIN_BUS_BANDWIDTH = 1.0
"""GB/s below which the printed bandwidths are too short to tell a collective by their ratio."""

_LABEL = re.compile(r"(?:\[\d+,\d+\]<\w+>:|\d+:)\s*(?=#|\d+\s)")
"""What mpirun --tag-output and srun --label put before each line."""
_START = re.compile(r"#\s*Collective test starting:\s*(?:\S*/)?(\S+)")
_END = re.compile(r"#\s*Collective test concluded:")
_RANK = re.compile(r"#\s*Rank\s+(\d{1,9})\s")
_GROUP = re.compile(r"\sGroup\s+(\d{1,9})\s")
_HEAD = re.compile(r"#\s*size\s+count\s+type\s+redop\s")
_ROW = re.compile(r"\d+\s+\d+\s+(u?int(8|32|64)|half|float|double|bfloat16|f8e\dm\d)\s")

_ROWS = re.compile(rb"^ *\d+ +\d+ +(?:u?int(?:8|32|64)|half|float|double|bfloat16|f8e\dm\d) +[a-z]+ ", re.MULTILINE)


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

    line: where it begins; binary: None where the print is of a version that does not name it; rows: (bytes of each GPU's
    buffer, seconds); bus_shares: busbw / algbw of rows fast enough to tell; damage: the first row that is none, and its line
    """

    line: int
    binary: str | None = None
    ranks: list[Rank] = field(default_factory=list)
    rows: list[tuple[float, float]] = field(default_factory=list)
    redops: set[str] = field(default_factory=set)
    bus_shares: list[float] = field(default_factory=list)
    damage: tuple[str, int] | None = None
    ended: bool = False

    @property
    def place(self) -> str:
        return f"test from line {self.line}"

    def unusable(self, path: Path) -> str | None:
        """Why its times say nothing, None where they do."""
        numbers = [rank.rank for rank in self.ranks]
        if self.binary is not None and self.binary not in OPERATIONS:
            return f"{quoted(self.binary)} is not a test of {' or '.join(OPERATIONS)}"
        if not numbers:
            return "no '# Rank N … on HOST device …' lines before the rows: how many GPUs were there?"
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
            if "none" not in self.redops:
                return "a reduction, but by its bandwidths no all-reduce; use all_reduce_perf"
            return (
                "the output does not say which collective it is; if it is alltoall_perf, put 'alltoall' in the file's name, "
                "or add a line '# Collective test starting: alltoall_perf' (sendrecv_perf alike)"
            )
        if not self.rows and self.damage is None:
            return "no rows of sizes and times; did the test end?"
        return None

    def operation(self, path: Path) -> str | None:
        """What it times, of `OPERATIONS`: as it says; else a sum whose busbw is 2 (n-1)/n of its algbw is an all-reduce, and
        others are what the file's name says. None where nothing tells."""
        if self.binary is not None:
            return OPERATIONS.get(self.binary)
        if "none" not in self.redops:
            if (gpus := len(self.ranks)) < 2:
                return None
            share = sorted(self.bus_shares)[len(self.bus_shares) // 2] if self.bus_shares else None
            reduces = share is not None and abs(share / (2 * (gpus - 1) / gpus) - 1) < 0.1
            return "all_reduce" if reduces else None
        letters = re.sub(r"[^a-z]", "", path.stem.lower())
        return next((OPERATIONS[f"{name}_perf"] for name in ("alltoall", "sendrecv") if name in letters), None)


def is_log(glance: Glance) -> bool:
    """Whether a text has the head of nccl-tests' table, the line that names a test, or rows of the table."""
    if not glance.is_text:
        return False
    with glance.path.open("rb") as file:
        text = file.read(SEARCHED_BYTES)
    marked = b"out-of-place" in text or b"# Collective test starting:" in text
    return marked or b"#  Rank  0 " in glance.head or _ROWS.search(glance.head) is not None


def read_tests(path: Path) -> list[NcclTest]:
    """All tests in a log, in their order, one at least; raises InputError."""
    tests: list[NcclTest] = []
    stray, ranks = None, 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            text = line[:MAX_LINE].strip()
            if label := _LABEL.match(text):
                text = text[label.end() :]
            if text.startswith("#"):
                ranks += _comment(tests, number, text)
                if ranks > MAX_RANKS:
                    raise fault(path, f"more than {MAX_RANKS:,} ranks and tests; split the log", f"line {number}")
            elif _ROW.match(text):
                if not tests:
                    stray = stray or number
                elif not tests[-1].ended:
                    _row(tests[-1], number, text.split())
    if tests:
        return tests
    if stray:
        raise fault(path, "rows without the '#' lines before them; keep the whole output", f"line {stray}")
    raise fault(path, "this is not the output of nccl-tests: no '# Rank' lines and no rows of sizes and times")


def usable_tests(path: Path) -> tuple[list[NcclTest], list[str]]:
    """The tests whose times count, one at least, and notes on those left out; raises InputError, also for damaged rows."""
    usable, left_out = [], {}
    for test in read_tests(path):
        if reason := test.unusable(path):
            other = test.binary is not None and test.binary not in OPERATIONS
            key = f"{quoted(test.binary)} is not used for planning" if other else reason
            left_out.setdefault(key, []).append((test, reason))
        elif test.damage is not None:
            text, line = test.damage
            raise fault(path, text, f"line {line}")
        else:
            usable.append(test)
    if not usable:
        test, reason = next(iter(left_out.values()))[0]
        raise fault(path, reason, test.place)
    return usable, [_left_out(reason, [test for test, _ in tests]) for reason, tests in left_out.items()]


def _left_out(reason: str, tests: list[NcclTest]) -> str:
    first, more = tests[0].line, len(tests) - 1
    return f"left out, from line {first}{f' and {more} more' if more else ''}: {reason}"


def _comment(tests: list[NcclTest], number: int, text: str) -> bool:
    """Take what a comment line says, and whether it adds a test or a rank. A new test begins where it is named, or at the first
    of its ranks."""
    if match := _START.match(text):
        tests.append(NcclTest(number, match[1]))
        return True
    if (match := _RANK.match(text)) and (rank := _rank(int(match[1]), text)):
        if not tests or tests[-1].rows or tests[-1].ended:
            tests.append(NcclTest(number))
        tests[-1].ranks.append(rank)
        return True
    if _END.match(text) and tests:
        tests[-1].ended = True
    elif _HEAD.match(text) and tests and tests[-1].rows:
        tests.append(NcclTest(number))
        return True
    return False


def _rank(number: int, text: str) -> Rank | None:
    """The GPU of a line `# Rank N Group M Pid … on HOST device 0 [BUS] NAME`, None of other lines."""
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
    try:
        size, (time, algorithm, bus) = float(cells[0]), map(float, cells[4 + with_root : 7 + with_root])
    except ValueError:
        test.damage = test.damage or ("a row needs size, count, type, redop, root and time, algbw, busbw", number)
        return
    if not 0 <= time < float("inf"):
        test.damage = test.damage or (f"the time is {quoted(cells[4 + with_root])}", number)
        return
    test.redops.add(cells[3])
    if algorithm >= MIN_BUS_BANDWIDTH:
        test.bus_shares.append(bus / algorithm)
    if 0 < size < float("inf") and time > 0:
        test.rows.append((size, time * 1e-6))
