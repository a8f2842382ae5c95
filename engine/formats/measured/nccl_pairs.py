"""nccl-tests as costs, and a set of them as times of pairs of GPUs. `nccl_tests` has the forms of a single test.

Logs with tests between two GPUs each, `sendrecv_perf` or `alltoall_perf`, make a set. The lines `# Rank` name host and bus of
both GPUs, so that the names of the files do not matter. A test sends both ways at once and prints one time, so that a pair has
one rate: the slope of a line through the bytes to the peer, with a start-up.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.cluster import MOST_GPUS
from engine.costs.alpha_beta import fit_line
from engine.costs.measured import CollectiveTimes, MeasuredTimes, medians
from engine.costs.pair_cluster import PairTimes
from engine.errors import InputError
from engine.formats.format import FileSet, Format
from engine.formats.measured.nccl_tests import OPERATIONS, NcclTest, Rank, is_log, read_tests
from engine.formats.source import check_size, check_there, error, fault, ok, one_clear_line, quoted
from engine.workload import Finding

SENDING = {"all_to_all": 0.5, "send_receive": 1.0}
"""The share of a GPU's buffer that goes to its one peer: half of it stays in an all-to-all."""
FLAWED = ("broke off", "is not whole", "data was wrong", "wrong in place")
"""Words of notes on tests that are not whole."""
LEAST = 1e-18
"""Fewest seconds a byte: nothing is as fast as an exabyte a second."""
Key = tuple[str, str]
"""Host and bus of a GPU."""


def read_pairs(paths: Sequence[Path]) -> tuple[PairTimes, list[str]]:
    """(the pairs in these logs, notes on the tests left out); raises InputError. Tests of one pair count together."""
    points: dict[frozenset[Key], list[tuple[float, float]]] = defaultdict(list)
    gpu_of: dict[Key, Rank] = {}
    left_out, notes = 0, []
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
                notes += [f"{path.name}: {note}" for note in test.notes()]
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
    return _times(gpu_of, points), [*([others] if left_out else []), *notes]


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
    if len(test.ranks) != 2 or test.nodes is not None or test.unusable(path):
        return None  # records do not name their GPUs
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
    notes = [note for test in usable for note in test.notes()]
    for reason, tests in left_out.items():
        first, more = tests[0][0].line, f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        notes.append(f"left out{f', from line {first}' if first else ''}{more}: {reason}")
    return usable, notes


def _nodes(test: NcclTest) -> int:
    return test.nodes or len({rank.host for rank in test.ranks})


def read_nccl_tests(path: Path) -> MeasuredTimes:
    """The times in the text, with notes on the tests left out; raises InputError. Sizes with a time of 0 (below a byte for
    each GPU) are left out."""
    tests, notes = usable_tests(path)
    together: dict[tuple[str, int], list[NcclTest]] = defaultdict(list)
    for test in tests:
        together[test.operation(path), len(test.ranks)].append(test)
    for (operation, ranks), alike in together.items():
        if len(spread := sorted({_nodes(test) for test in alike})) > 1:
            raise fault(
                path, f"tests of {operation} over {ranks} GPUs on {spread[0]} and on {spread[1]} nodes; keep one kind to a file"
            )
        if len(alike) > 1:
            notes.append(f"{len(alike)} tests of {operation} over {ranks} GPUs count together, by the median of each size")
    collectives = [
        CollectiveTimes(operation=operation, ranks=ranks, points=medians([row for test in alike for row in test.rows]))
        for (operation, ranks), alike in together.items()
    ]
    names = {rank.device for test in tests for rank in test.ranks if rank.device}
    devices = ", ".join(sorted(names)) or "GPUs that are not named"
    nodes = max(map(_nodes, tests))
    tool = "rccl-tests" if any(test.nodes for test in tests) else "nccl-tests"
    origin = f"{tool} on {devices}, {nodes} node{'s' if nodes > 1 else ''}"
    measured = {"name": path.stem[:80], "origin": origin[:300], "collectives": collectives}
    return MeasuredTimes.from_dict(measured | ({"notes": notes} if notes else {}), path.name)


FORMATS = (Format("nccl-tests", "what nccl-tests prints", "measurements", is_log, together=SET),)
