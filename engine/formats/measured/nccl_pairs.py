"""A set of nccl-tests logs with tests between two GPUs each, `sendrecv_perf` or `alltoall_perf`, as times of pairs.

The lines `# Rank` name host and bus of both GPUs, so that the names of the files do not matter. A test sends both ways at once
and prints one time, so that a pair has one rate: the slope of a line through the bytes to the peer, beside a start-up.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.cluster import MOST_GPUS
from engine.costs.alpha_beta import fit_line
from engine.costs.pair_cluster import PairTimes
from engine.errors import InputError
from engine.finding import Finding
from engine.formats.format import FileSet, Format
from engine.formats.measured.nccl_log import NcclTest, Rank, read_tests
from engine.formats.source import check_size, check_there, fault, one_clear_line

SENDING = {"all_to_all": 0.5, "send_receive": 1.0}
"""What of a GPU's buffer goes to its one peer: of an all-to-all half of it stays."""

LEAST = 1e-18
"""Seconds a byte: nothing is as fast as an exabyte a second."""

Key = tuple[str, str]
"""Host and bus of a GPU."""


def read_pairs(paths: Sequence[Path]) -> tuple[PairTimes, list[str]]:
    """The pairs in these logs, and notes on what was left out; raises InputError. Tests of one pair count together."""
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
                ranks = _pair(path, test)
                gpu_of |= ranks
                points[frozenset(ranks)] += [(size * share, seconds) for size, seconds in test.rows]
    if not points:
        raise InputError(
            f"no test of sendrecv_perf or alltoall_perf between two GPUs in {len(paths)} file{'s' * (len(paths) > 1)}; run one "
            "with two ranks for every pair of GPUs and give all logs"
        )
    if len(gpu_of) > MOST_GPUS:
        raise InputError(f"{len(gpu_of)} GPUs in the logs, at most {MOST_GPUS} are possible")
    notes = (
        [
            f"{left_out} test{'s' * (left_out > 1)} left out: of more than two GPUs, of other collectives, or without times"
        ]
        if left_out
        else []
    )
    return _times(gpu_of, points), notes


def pairs_in(path: Path) -> set[frozenset[Key]]:
    """The pairs of GPUs that a log has tests between; nothing here raises on damaged files, which reading them does. A test
    whose two ranks are on one GPU is a pair of one."""
    try:
        with one_clear_line(path):
            return {frozenset(_gpus(test)) for test in read_tests(path) if _share(path, test) is not None}
    except InputError:
        return set()


def _choose(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The logs with pairs, where they cover several: tests of one pair alone are times."""
    pairs_of = {path: pairs_in(path) for path in paths}
    covered = {pair for pairs in pairs_of.values() for pair in pairs if len(pair) == 2}
    return tuple(path for path, pairs in pairs_of.items() if pairs) if len(covered) > 1 else ()


SET = FileSet(Format("nccl-pairs", "pairwise nccl-tests output", "pairs", lambda _: False), _choose)


def findings_of_pairs(paths: Sequence[Path]) -> list[Finding]:
    """What is to be said of a set of logs: how many pairs it has, what was left out, or why nothing can be read off it."""
    try:
        pairs, notes = read_pairs(paths)
    except InputError as error:
        return [Finding(severity="error", code="no-pairs", message=str(error))]
    gpus, hosts = len(pairs.hosts), len(set(pairs.hosts))
    count, all_pairs = int(np.isfinite(pairs.rate).sum()) // 2, gpus * (gpus - 1) // 2
    covers = f"{count} of the {all_pairs} pairs of {gpus} GPUs on {hosts} host{'s' * (hosts > 1)} were measured"
    severity = "ok" if count == all_pairs else "warning"
    return [
        Finding(severity=severity, code="pairs", message=covers),
        *(Finding(severity="ok", code="pairs", message=note) for note in notes),
    ]


def _share(path: Path, test: NcclTest) -> float | None:
    """What of its buffer a GPU sends to its peer in a test of two; None of any other test, and of one without times."""
    if len(test.ranks) != 2 or test.unusable(path):
        return None
    return SENDING.get(test.operation(path) or "")


def _gpus(test: NcclTest) -> dict[Key, Rank]:
    return {(rank.host, rank.bus.lower()): rank for rank in test.ranks}


def _pair(path: Path, test: NcclTest) -> dict[Key, Rank]:
    """Both GPUs of a test; raises InputError where they are one, and for damaged rows."""
    if test.damage is not None:
        text, line = test.damage
        raise fault(path, text, f"line {line}")
    ranks = _gpus(test)
    if len(ranks) < 2:
        raise fault(path, "both ranks are on one GPU, by their host and bus", test.place)
    return ranks


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
