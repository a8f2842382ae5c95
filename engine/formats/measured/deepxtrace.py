"""Logs of DeepXTrace (src/deepxtrace/diagnose.py; DeepEP pull request 311): how long every rank waited for every other one in
DeepEP's low-latency kernels.

    [TIME] [Diagnose] InstanceID: ID EPSize: 16, diagnose: {…}, Dispatch Wait Recv Cost Per Token Matrix[src_rank, dst_rank]
    [TIME] rank=0 [     458      436  2089715 …]

One head for each window and part, then, where details are on (DEEPEP_DIAGNOSE_LOG_DETAILS), a row for every rank, bare in the
pull request. Row i, column j is what i waited for j, summed and in the clock's ticks, so that only ratios say something.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.formats.format import Format
from engine.formats.source import fault

MAX_RANKS = 1024
MAX_LINE = 64 * 1024
SLOW = 3.0
"""Times the mean of all waits from which on a column or row is slow: DeepXTrace's own threshold."""

MARK = "Wait Recv Cost Per Token Matrix"

_SIZE = re.compile(r"\bEPSize: ?(\d{1,6})\b")
_ROW = re.compile(r"(?:^|\brank=\d+\s*)\[([\s\d]+)\]\s*$")


@dataclass(frozen=True, eq=False)
class Waits:
    """One window. part: "dispatch" or "combine"; ticks: float64[rank, rank], how long the row's rank waited for the column's"""

    part: str
    ticks: np.ndarray

    def slow(self) -> list[tuple[int, float]]:
        """Ranks that all others wait for: (rank, times the mean)."""
        return _above(self.ticks.mean(axis=0))

    def waiting(self) -> list[tuple[int, float]]:
        """Ranks that wait for all others: (rank, times the mean)."""
        return _above(self.ticks.mean(axis=1))


def _above(means: np.ndarray) -> list[tuple[int, float]]:
    if not means.any():
        return []
    times = means / means.mean()
    return [(int(rank), float(times[rank])) for rank in np.flatnonzero(times > SLOW)]


def read_waits(path: Path) -> list[Waits]:
    """All windows of a log, in their order; raises InputError."""
    windows = [Waits(part, np.array(rows, dtype=np.float64)) for part, rows in _windows(path)]
    if not windows:
        raise fault(path, "no rows of waits; record with DEEPEP_DIAGNOSE_LOG_DETAILS=1")
    return windows


def _windows(path: Path) -> Iterator[tuple[str, list[list[int]]]]:
    size, part, rows, at = 0, "", [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            text = line[:MAX_LINE].strip()
            if MARK in text and (head := _SIZE.search(text)):
                size, rows, at = int(head[1]), [], number
                part = "dispatch" if f"Dispatch {MARK}" in text else "combine"
                if not 2 <= size <= MAX_RANKS:
                    raise fault(path, f"EPSize {size}; between 2 and {MAX_RANKS} ranks are read", f"line {number}")
            elif size and (row := _ROW.search(text)):
                cells = [int(cell) for cell in row[1].split()]
                if len(cells) != size:
                    raise fault(path, f"{len(cells)} waits in a row of {size} ranks (line {at})", f"line {number}")
                rows.append(cells)
                if len(rows) == size:
                    yield part, rows
                    size = 0


def in_words(windows: list[Waits]) -> str:
    """Who is slow in the last window of each part, for people."""
    said = []
    for window in {window.part: window for window in windows}.values():
        slow = [f"all wait for rank {rank} ({times:.1f} times the mean)" for rank, times in window.slow()]
        slow += [f"rank {rank} waits for all ({times:.1f} times the mean)" for rank, times in window.waiting()]
        said.append(f"last {window.part} over {len(window.ticks)} ranks: {', '.join(slow) or 'no rank is slow'}")
    return "; ".join(said)


def refuse(path: Path) -> None:
    """Say what such a log tells, which is nothing to plan with: always raises InputError."""
    raise fault(path, f"is a log of DeepXTrace, whose waits are no times to plan with; {in_words(read_waits(path))}")


FORMATS = (
    Format(
        "deepxtrace",
        "a log of DeepXTrace, who waited for whom",
        "measurements",
        lambda glance: glance.is_text and MARK.encode() in glance.head,
    ),
)
