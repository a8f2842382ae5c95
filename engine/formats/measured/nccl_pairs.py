"""Logs of nccl-tests as costs, and a set of them as times of pairs of GPUs: the text that the binaries print, test by test,
with any other text of a job between them.

Comment lines begin with #: `# Collective test starting: NAME` (since 2.17), one `#  Rank N Group M Pid … on HOST device …
[BUS] NAME` for every GPU, and the head of the table. A row is

    size count type redop root | time algbw busbw #wrong | time algbw busbw #wrong

in bytes, elements, µs and GB/s, out of place and then in place; without root before 2.11. The times out of place count.
One file may hold the output of several tests, one after another; tests of other binaries than `alltoall_perf`,
`all_reduce_perf` and `sendrecv_perf` are left out, with a note. Ranks in several groups (NCCL_TESTS_SPLIT) run the same test
side by side. The bus, not the device's number, tells GPUs of a host apart: numbers begin at 0 in every process that sees only
some of them.

Logs with tests between two GPUs each, `sendrecv_perf` or `alltoall_perf`, make a set. The lines `# Rank` name host and bus of
both GPUs, so that the names of the files do not matter. A test sends both ways at once and prints one time, so that a pair has
one rate: the slope of a line through the bytes to the peer, with a start-up.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.cluster import MOST_GPUS
from engine.costs.alpha_beta import fit_line
from engine.costs.measured import CollectiveTimes, MeasuredTimes
from engine.costs.pair_cluster import PairTimes
from engine.errors import InputError
from engine.formats.format import FileSet, Format, Glance
from engine.formats.source import check_size, check_there, error, fault, ok, one_clear_line, quoted
from engine.workload import Finding

OPERATIONS = {"alltoall_perf": "all_to_all", "all_reduce_perf": "all_reduce", "sendrecv_perf": "send_receive"}
"""The operation that each test times, for the tests that are read."""
MAX_LINE = 4096
MAX_RANKS = 200_000
"""Limit of the lines of ranks and heads of tests in a log: those of all pairs of 300 GPUs."""
SEARCHED_BYTES = 4 * 1024**2
"""Part of a log that is searched for its first test: NCCL_DEBUG and launchers print before it does."""
MIN_BUS_BANDWIDTH = 1.0
"""GB/s below which the printed bandwidths are too short to tell a collective by their ratio."""

_LABEL = re.compile(r"(?:\[\d+,\d+\]<\w+>:|\d+:)\s*(?=#|\d+\s)")
"""The label of mpirun --tag-output and srun --label before each line."""
_START = re.compile(r"#\s*Collective test starting:\s*(?:\S*/)?(\S+)")
_END = re.compile(r"#\s*Collective test concluded:")
_RANK = re.compile(r"#\s*Rank\s+(\d{1,9})\s")
_GROUP = re.compile(r"\sGroup\s+(\d{1,9})\s")
_HEAD = re.compile(r"#\s*size\s+count\s+type\s+redop\s")
_ROW = re.compile(r"\d+\s+\d+\s+(u?int(8|32|64)|half|float|double|bfloat16|f8e\dm\d)\s")

_ROWS = re.compile(rb"^ *\d+ +\d+ +(?:u?int(?:8|32|64)|half|float|double|bfloat16|f8e\dm\d) +[a-z]+ ", re.MULTILINE)
SENDING = {"all_to_all": 0.5, "send_receive": 1.0}
"""The share of a GPU's buffer that goes to its one peer: half of it stays in an all-to-all."""
LEAST = 1e-18
"""Fewest seconds a byte: nothing is as fast as an exabyte a second."""
Key = tuple[str, str]
"""Host and bus of a GPU."""


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

    line: number of its first line
    binary: None if the print is of a version that does not name it
    rows: (bytes of each GPU's buffer, seconds)
    bus_shares: busbw / algbw of rows fast enough to tell
    damage: the fault of the first damaged row, and its place
    """

    line: int
    binary: str | None = None
    ranks: list[Rank] = field(default_factory=list)
    rows: list[tuple[float, float]] = field(default_factory=list)
    redops: set[str] = field(default_factory=set)
    bus_shares: list[float] = field(default_factory=list)
    damage: tuple[str, str] | None = None
    ended: bool = False

    @property
    def place(self) -> str:
        return f"test from line {self.line}"

    def unusable(self, path: Path) -> str | None:
        """The reason why its times cannot be used, None if they can."""
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
        """The operation that it times, of `OPERATIONS`: by its own word; else a sum with a busbw of 2 (n-1)/n of its algbw is
        an all-reduce, and others go by the file's name. None if nothing tells."""
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
    """True if a text has the head of nccl-tests' table, the line that names a test, or rows of the table."""
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
    """(the usable tests, one at least, notes on those left out); raises InputError, also for damaged rows."""
    usable, left_out = [], {}
    for test in read_tests(path):
        if reason := test.unusable(path):
            other = test.binary is not None and test.binary not in OPERATIONS
            key = f"{quoted(test.binary)} is not used for planning" if other else reason
            left_out.setdefault(key, []).append((test, reason))
        elif test.damage is not None:
            raise fault(path, *test.damage)
        else:
            usable.append(test)
    if not usable:
        test, reason = next(iter(left_out.values()))[0]
        raise fault(path, reason, test.place)
    return usable, [
        f"left out, from line {tests[0][0].line}{f' and {len(tests) - 1} more' if len(tests) > 1 else ''}: {reason}"
        for reason, tests in left_out.items()
    ]


def _comment(tests: list[NcclTest], number: int, text: str) -> bool:
    """Take the facts of a comment line; True if it adds a test or a rank. A new test begins at the line that names it, or at
    the first of its ranks."""
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
    try:
        size, (time, algorithm, bus) = float(cells[0]), map(float, cells[4 + with_root : 7 + with_root])
    except ValueError:
        reason = "a row needs size, count, type, redop, root and time, algbw, busbw"
        test.damage = test.damage or (reason, f"line {number}")
        return
    if not 0 <= time < float("inf"):
        test.damage = test.damage or (f"the time is {quoted(cells[4 + with_root])}", f"line {number}")
        return
    test.redops.add(cells[3])
    if algorithm >= MIN_BUS_BANDWIDTH:
        test.bus_shares.append(bus / algorithm)
    if 0 < size < float("inf") and time > 0:
        test.rows.append((size, time * 1e-6))


def read_pairs(paths: Sequence[Path]) -> tuple[PairTimes, list[str]]:
    """(the pairs in these logs, notes on the tests left out); raises InputError. Tests of one pair count together."""
    points: dict[frozenset[Key], list[tuple[float, float]]] = defaultdict(list)
    gpu_of: dict[Key, Rank] = {}
    left_out = 0
    for path in paths:
        with one_clear_line(path):
            check_there(path)
            check_size(path)
            for test in read_tests(path):
                if (share := _share(path, test)) is None:
                    left_out += 1
                    continue
                if test.damage is not None:
                    raise fault(path, *test.damage)
                if len(ranks := _gpus(test)) < 2:
                    raise fault(path, "both ranks are on one GPU, by their host and bus", test.place)
                gpu_of |= ranks
                points[frozenset(ranks)] += [(size * share, seconds) for size, seconds in test.rows]
    if not points:
        raise InputError(
            f"no test of sendrecv_perf or alltoall_perf between two GPUs in {len(paths)} file{'s' * (len(paths) > 1)}; run one "
            "with two ranks for every pair of GPUs and give all logs"
        )
    if len(gpu_of) > MOST_GPUS:
        raise InputError(f"{len(gpu_of)} GPUs in the logs, at most {MOST_GPUS} are possible")
    others = f"{left_out} test{'s' * (left_out > 1)} left out: of more than two GPUs, of other collectives, or without times"
    return _times(gpu_of, points), [others] if left_out else []


def pairs_in(path: Path) -> set[frozenset[Key]]:
    """The pairs of GPUs that a log has tests between; nothing here raises on damaged files, which reading them does. A test
    with both ranks on one GPU is a pair of one."""
    try:
        with one_clear_line(path):
            return {frozenset(_gpus(test)) for test in read_tests(path) if _share(path, test) is not None}
    except InputError:
        return set()


def _choose(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The logs with pairs, if they cover several: tests of one pair alone are times."""
    pairs_of = {path: pairs_in(path) for path in paths}
    covered = {pair for pairs in pairs_of.values() for pair in pairs if len(pair) == 2}
    return tuple(path for path, pairs in pairs_of.items() if pairs) if len(covered) > 1 else ()


SET = FileSet(Format("nccl-pairs", "pairwise nccl-tests output", "pairs", lambda _: False), _choose)


def findings_of_pairs(paths: Sequence[Path]) -> list[Finding]:
    """Findings on a set of logs: how many pairs it has, the tests left out, or the reason why nothing can be read off it."""
    try:
        pairs, notes = read_pairs(paths)
    except InputError as refused:
        return [error("no-pairs", str(refused))]
    gpus, hosts = len(pairs.hosts), len(set(pairs.hosts))
    count, all_pairs = int(np.isfinite(pairs.rate).sum()) // 2, gpus * (gpus - 1) // 2
    covers = f"{count} of the {all_pairs} pairs of {gpus} GPUs on {hosts} host{'s' * (hosts > 1)} were measured"
    severity = "ok" if count == all_pairs else "warning"
    return [Finding(severity=severity, code="pairs", message=covers), *(ok("pairs", note) for note in notes)]


def _share(path: Path, test: NcclTest) -> float | None:
    """The share of its buffer that a GPU sends to its peer in a test of two; None for other tests and without times."""
    if len(test.ranks) != 2 or test.unusable(path):
        return None
    return SENDING.get(test.operation(path) or "")


def _gpus(test: NcclTest) -> dict[Key, Rank]:
    return {(rank.host, rank.bus.lower()): rank for rank in test.ranks}


def _times(gpu_of: dict[Key, Rank], points: dict[frozenset[Key], list[tuple[float, float]]]) -> PairTimes:
    order = sorted(gpu_of, key=lambda key: [_natural(part) for part in key])
    place = {key: index for index, key in enumerate(order)}
    rate, start_up = np.full((2, len(order), len(order)), np.nan)
    for keys, times in points.items():
        first, second = (place[key] for key in keys)
        size, seconds = np.array(times).T
        if len(set(size)) > 1:
            line = fit_line(size, seconds)
            if line.beta < LEAST:
                pair = " and ".join(" ".join(key) for key in sorted(keys))
                raise InputError(f"{pair}: times that do not grow with the bytes; measure larger sizes")
            rate[first, second] = rate[second, first] = 1 / line.beta
            start_up[first, second] = start_up[second, first] = line.alpha
        else:  # the start-up stays in the rate
            rate[first, second] = rate[second, first] = min(float(np.median(size / seconds)), 1 / LEAST)
    gpus = [gpu_of[key] for key in order]
    smallest = min(size for times in points.values() for size, _ in times)
    hosts, buses, devices = (tuple(getattr(gpu, name) for gpu in gpus) for name in ("host", "bus", "device"))
    return PairTimes(hosts, buses, devices, rate, start_up, smallest)


def _natural(text: str) -> list[tuple[int, str]]:
    """A key by which node2 comes before node10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text.lower())]


def read_nccl_tests(path: Path) -> MeasuredTimes:
    """The times in the text, with notes on the tests left out; raises InputError. Sizes with a time of 0 (below a byte for
    each GPU) are left out."""
    tests, notes = usable_tests(path)
    collectives = [
        CollectiveTimes(operation=test.operation(path), ranks=len(test.ranks), points=tuple(test.rows)) for test in tests
    ]
    names = {rank.device for test in tests for rank in test.ranks}
    devices = ", ".join(sorted(names)) or "GPUs that are not named"
    nodes = max(len({rank.host for rank in test.ranks}) for test in tests)
    origin = f"nccl-tests on {devices}, {nodes} node{'s' if nodes > 1 else ''}"
    measured = {"name": path.stem[:80], "origin": origin[:300], "collectives": collectives}
    return MeasuredTimes.from_dict(measured | ({"notes": notes} if notes else {}), path.name)


FORMATS = (Format("nccl-tests", "what nccl-tests prints", "measurements", is_log, together=SET),)
