"""Text that `alltoall_perf` and `all_reduce_perf` of nccl-tests print: sizes and times of a collective.

Comment lines begin with #: `# Collective test starting: NAME` (since 2.17), one `#  Rank N … on HOST device …` for every
GPU, and the head of the table. A row is

    size count type redop root | time algbw busbw #wrong | time algbw busbw #wrong

in bytes, elements, µs and GB/s, out of place and then in place; without root before 2.11. The times out of place count.
Older prints do not name the collective: a sum whose busbw is 2 (n-1)/n of its algbw is an all-reduce; an all-to-all looks
like an all-gather and must be named by the file. One file may hold the output of several tests, one after another.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from engine.costs.measured import CollectiveTimes, MeasuredTimes
from engine.formats.source import fault, quoted

EXTENSIONS = (".txt", ".log", ".out")
OPERATIONS = {"alltoall_perf": "all_to_all", "all_reduce_perf": "all_reduce"}
MAX_LINE = 4096
MIN_BUS_BANDWIDTH = 1.0
"""GB/s below which the printed bandwidths are too short to tell a collective by their ratio."""

_START = re.compile(r"#\s*Collective test starting:\s*(?:\S*/)?(\S+)")
_RANK = re.compile(r"#\s*Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)")
_HEAD = re.compile(r"#\s*size\s+count\s+type\s+redop\s")
_ROW = re.compile(r"\d+\s+\d+\s+(u?int(8|32|64)|half|float|double|bfloat16|f8e\dm\d)\s")


@dataclass
class _Test:
    """One test's part of the file. operation: None until it is known."""

    line: int
    operation: str | None = None
    ranks: list[int] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    rows: list[tuple[float, float]] = field(default_factory=list)
    redops: set[str] = field(default_factory=set)
    bus_shares: list[float] = field(default_factory=list)


def read_nccl_tests(path: Path) -> MeasuredTimes:
    """The times in the text; raises InputError. Sizes with a time of 0 (below a byte for each GPU) are left out."""
    tests = _tests(path)
    collectives = []
    for test in tests:
        where = f"test from line {test.line}"
        if not test.ranks:
            raise fault(
                path, "no '# Rank N … on HOST device …' lines before the rows: how many GPUs were there?", where
            )
        if sorted(test.ranks) != list(range(len(test.ranks))):
            raise fault(
                path,
                f"{len(test.ranks)} processes, but their ranks do not count from 0 to {len(test.ranks) - 1}: each ran "
                "its own test; build nccl-tests with MPI=1",
                where,
            )
        if len(test.ranks) < 2:
            raise fault(path, "one GPU talks to nobody; run the test on two or more", where)
        operation = test.operation or _recognised(path, test, where)
        if not test.rows:
            raise fault(path, "no rows of sizes and times; did the test end?", where)
        collectives.append(CollectiveTimes(operation=operation, ranks=len(test.ranks), points=tuple(test.rows)))
    devices = ", ".join(sorted(set().union(*(test.devices for test in tests)))) or "GPUs that are not named"
    nodes = max(len(test.hosts) for test in tests)
    origin = f"nccl-tests on {devices}, {nodes} node{'s' if nodes > 1 else ''}"
    return MeasuredTimes.from_dict(
        {"name": path.stem[:80], "origin": origin[:300], "collectives": collectives}, path.name
    )


def _tests(path: Path) -> list[_Test]:
    tests: list[_Test] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            text = line[:MAX_LINE].strip()
            if text.startswith("#"):
                _comment(path, tests, number, text)
            elif _ROW.match(text):
                if not tests:
                    raise fault(path, "rows without the '#' lines before them; keep the whole output", f"line {number}")
                _row(path, tests[-1], number, text.split())
    if not tests:
        raise fault(path, "this is not the output of nccl-tests: no '# Rank' lines and no rows of sizes and times")
    return tests


def _comment(path: Path, tests: list[_Test], number: int, text: str) -> None:
    """Take what a comment line says. A new test begins where it is named, or at the first of its ranks."""
    if match := _START.match(text):
        if match[1] not in OPERATIONS:
            raise fault(path, f"{quoted(match[1])} is not a test of {' or '.join(OPERATIONS)}", f"line {number}")
        tests.append(_Test(number, OPERATIONS[match[1]]))
    elif match := _RANK.match(text):
        if not tests or tests[-1].rows:
            tests.append(_Test(number))
        tests[-1].ranks.append(int(match[1]))
        tests[-1].hosts.add(match[2])
        tests[-1].devices.add(match[3].strip())
    elif _HEAD.match(text) and tests and tests[-1].rows:
        tests.append(_Test(number))


def _row(path: Path, test: _Test, number: int, cells: list[str]) -> None:
    with_root = re.fullmatch(r"-?\d+", cells[4]) is not None if len(cells) > 4 else False
    try:
        size, (time, algorithm, bus) = float(cells[0]), map(float, cells[4 + with_root : 7 + with_root])
    except ValueError:
        raise fault(
            path, "a row needs size, count, type, redop, root and time, algbw, busbw", f"line {number}"
        ) from None
    if not 0 <= time < float("inf"):
        raise fault(path, f"the time is {quoted(cells[4 + with_root])}", f"line {number}")
    test.redops.add(cells[3])
    if algorithm >= MIN_BUS_BANDWIDTH:
        test.bus_shares.append(bus / algorithm)
    if size > 0 and time > 0:
        test.rows.append((size, time * 1e-6))


def _recognised(path: Path, test: _Test, where: str) -> str:
    """The operation of a test that is not named."""
    gpus = len(test.ranks)
    if "none" not in test.redops:
        share = sorted(test.bus_shares)[len(test.bus_shares) // 2] if test.bus_shares else None
        if share is not None and abs(share / (2 * (gpus - 1) / gpus) - 1) < 0.1:
            return "all_reduce"
        raise fault(path, "a reduction, but by its bandwidths no all-reduce; use all_reduce_perf", where)
    if "alltoall" in re.sub(r"[^a-z]", "", path.stem.lower()):
        return "all_to_all"
    raise fault(
        path,
        "the output does not say which collective it is; if it is alltoall_perf, put 'alltoall' in the file's name, or "
        "add a line '# Collective test starting: alltoall_perf'",
        where,
    )
