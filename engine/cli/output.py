"""The output of a command: files, the answer with its tables, progress; and the signals that stop it."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import InputError
from engine.files import write_atomically
from engine.schema import json_text

if TYPE_CHECKING:
    from engine.result import Stop
    from engine.systems.base import Report
from engine.units import ratio, share


def write(path: Path, content: str | bytes) -> None:
    """Write an output file. Raises InputError if it cannot be written."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def answer(options: argparse.Namespace, content: Any, as_text: Callable[[Any], str]) -> None:
    """Print the answer as JSON or as text."""
    print(json_text(content) if options.json else as_text(content))


@contextlib.contextmanager
def progress() -> Iterator["Report"]:
    """A `Report` for people: one line of standard error that is written over, and ended before anything else is printed."""
    shown = ""

    def report(done: float, message: str, incumbent: float | None = None, bound: float | None = None) -> None:
        nonlocal shown
        line = f"{done:4.0%} {message}"
        print("\r" + line.ljust(len(shown)), end="", file=sys.stderr, flush=True)
        shown = line

    try:
        yield report
    finally:
        if shown:
            print(file=sys.stderr)


@contextlib.contextmanager
def stopped_by_signals(*more: signal.Signals) -> Iterator["Stop"]:
    """A `Stop` that SIGTERM, Ctrl-C and `more` turn true, so that the best found so far is still answered."""
    received: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT, *more)
    handlers = [signal.signal(number, lambda number, frame: received.append(number)) for number in signals]
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in zip(signals, handlers, strict=True):
            signal.signal(number, handler)


OVERLOAD = "\noverload: largest / mean GPU load, p50 · p95 · worst over layers"
"""The meaning of a column of overload factors."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns of even width, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def gap(gap: float | None) -> str:
    """A gap as a share; a bound of 0 has none."""
    return "—" if gap is None else share(gap)


def overload(figures: dict[str, Any]) -> str:
    factors = figures["balance"]["overload_factor"]
    return " · ".join(ratio(factors[name]) for name in ("p50", "p95", "max"))
