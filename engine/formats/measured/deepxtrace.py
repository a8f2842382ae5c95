"""DeepEP in logs and in traces.

Logs of DeepXTrace (src/deepxtrace/diagnose.py; DeepEP pull request 311) say how long every rank waited for every other one in
DeepEP's low-latency kernels.

    [TIME] [Diagnose] InstanceID: ID EPSize: 16, diagnose: {…}, Dispatch Wait Recv Cost Per Token Matrix[src_rank, dst_rank]
    [TIME] rank=0 [     458      436  2089715 …]

One head for each window and part, then, if details are on (DEEPEP_DIAGNOSE_LOG_DETAILS), a row for every rank, bare in the
pull request. Row i, column j is the time that i waited for j, summed and in the clock's ticks, so only ratios mean anything.

Profiler traces have DeepEP's kernels by their names: `void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, …)`. Namespaces
are the three sets of kernels (csrc/kernels/api.cuh): intranode, internode, and internode_ll for low latency; those of
DeepSeek's own traces are called dpsk::ep and end in _ll. Of the template's numbers count: the first of intranode kernels, the
GPUs (intranode.cu); the first of internode ones, the nodes (internode.cu); the largest of those for low latency, the width of
a token (internode_ll.cu), which their other numbers never reach.

A name does not say how many tokens went, and no operator of PyTorch around the kernel does. Low-latency kernels with a receive
hook are launched twice, to send and to receive; each launch counts here. Waiting for a late rank is in the durations.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from engine import units
from engine.costs.measured import ExchangeTimes
from engine.formats.format import Format
from engine.formats.source import fault

MAX_RANKS = 1024
MAX_LINE = 64 * 1024
SLOW = 3.0
"""Multiple of the mean of all waits from which a column or row is slow: DeepXTrace's own threshold."""

MARK = "Wait Recv Cost Per Token Matrix"

_SIZE = re.compile(r"\bEPSize: ?(\d{1,6})\b")
_ROW = re.compile(r"(?:^|\brank=\d+\s*)\[([\s\d]+)\]\s*$")
Part = Literal["notify", "dispatch", "combine"]
_NAME = re.compile(r"\b(?:deep_ep|dpsk::ep)::(intranode|internode|internode_ll)::(\w+)\s*(?:<(.{0,400}?)>\s*\()?")
_PARTS: dict[str, Part] = {"notify": "notify", "cached_notify": "notify", "dispatch": "dispatch", "combine": "combine"}
"""Parts by the beginning of a kernel's name. Others, such as barriers, exchange nothing."""
_NUMBER = re.compile(r"\s*(?:\((?:unsigned )?(?:int|long)\))?\s*(\d{1,9})[uUlL]*\s*")
MIN_WIDTH = 512


@dataclass(frozen=True, eq=False)
class Waits:
    """One window.

    part: "dispatch" or "combine"
    ticks: float64[rank, rank]; how long the row's rank waited for the column's
    """

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


def refuse(path: Path) -> None:
    """Always raise InputError, which says who is slow in the last window of each part: such a log has no times to plan with."""
    said = []
    for window in {window.part: window for window in read_waits(path)}.values():
        slow = [f"all wait for rank {rank} ({times:.1f} times the mean)" for rank, times in window.slow()]
        slow += [f"rank {rank} waits for all ({times:.1f} times the mean)" for rank, times in window.waiting()]
        said.append(f"last {window.part} over {len(window.ticks)} ranks: {', '.join(slow) or 'no rank is slow'}")
    raise fault(path, f"is a log of DeepXTrace, whose waits are no times to plan with; {'; '.join(said)}")


FORMATS = (
    Format(
        *("deepxtrace", "a log of DeepXTrace, who waited for whom", "measurements"),
        lambda glance: glance.is_text and MARK.encode() in glance.beginning,
    ),
)


class ExchangeKernel(NamedTuple):
    """The facts in a kernel's name.

    kernels: the set that it is of
    gpus, nodes, width: None if it does not say
    """

    kernels: Literal["intranode", "internode", "low-latency"]
    part: Part
    gpus: int | None
    nodes: int | None
    width: int | None


def kernel_of(name: str) -> ExchangeKernel | None:
    """The exchange that a kernel of this name is part of, None for others."""
    if (match := _NAME.search(name)) is None:
        return None
    place, function, arguments = match.groups()
    part = next((part for beginning, part in _PARTS.items() if function.startswith(beginning)), None)
    if part is None:
        return None
    numbers = [int(found[1]) for text in (arguments or "").split(",") if (found := _NUMBER.fullmatch(text))]
    if place == "internode_ll" or function.endswith("_ll"):
        width = max(numbers, default=0)
        return ExchangeKernel("low-latency", part, None, None, width if width >= MIN_WIDTH else None)
    first = numbers[0] if numbers and numbers[0] > 0 else None
    if place == "intranode":
        return ExchangeKernel("intranode", part, first, None, None)
    return ExchangeKernel("internode", part, None, first, None)


def exchange_times(durations: Mapping[ExchangeKernel, Sequence[float]]) -> tuple[ExchangeTimes, ...]:
    """The number and durations of launches by kind of kernel. durations: seconds of every launch"""
    times = []
    for kernel, seconds in durations.items():
        low, median, high = np.quantile(seconds, (0.1, 0.5, 0.9)).tolist()
        about = {key: value for key, value in kernel._asdict().items() if value is not None}
        times.append(ExchangeTimes(**about, launches=len(seconds), median=median, low=low, high=high))
    return tuple(times)


def exchange_note(times: ExchangeTimes) -> str:
    """`58 DeepEP intranode dispatch kernels over 8 GPUs: 131 µs in the median (…); …`."""
    over = f" over {times.gpus} GPUs" if times.gpus else f" over {times.nodes} nodes" if times.nodes else ""
    wide = f" of {times.width} wide tokens" if times.width else ""
    return (
        f"{times.launches} DeepEP {times.kernels} {times.part} kernels{over}{wide}: {units.seconds(times.median)} in the "
        f"median, {units.seconds(times.low)} to {units.seconds(times.high)} for four in five; a trace does not say how "
        "many tokens they moved, so nothing is timed by them"
    )
