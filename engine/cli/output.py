"""The output of a command: files, the answer with its tables, progress; and the signals that stop it."""

import argparse
import contextlib
import io
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import InputError
from engine.files import is_device, write_atomically
from engine.result import NOT_BOUNDED
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


def check_output(path: Path) -> None:
    """Raise InputError if no file can be written at a path: to be asked before the work that it is to hold."""
    if path.is_dir():
        raise InputError(f"{path} cannot be written: it is a folder")
    if is_device(path):
        return
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def check_folder(path: Path) -> None:
    """Raise InputError if a folder cannot be made at a path with those above it, or no file be written into it."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be made: {error.strerror}; name a folder with -o") from None


def answer(options: argparse.Namespace, content: Any, as_text: Callable[[Any], str]) -> None:
    """Print the answer as JSON or as text."""
    print(json_text(content) if options.json else as_text(content))


def error(text: str) -> None:
    """Print one line about bad input on standard error, as it is: neither wrapped nor read as markup."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble(("error:", "bold red"), " ", text), soft_wrap=True)


@contextlib.contextmanager
def progress() -> Iterator["Report"]:
    """A `Report` for people on standard error: a bar with the remaining time on a terminal, otherwise a line a message."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TaskProgressColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def report(done: float, message: str, incumbent: float | None = None, bound: float | None = None) -> None:
            if bar.disable and message != bar.tasks[task].description:
                print(f"{done:4.0%} {message}", file=sys.stderr, flush=True)
            bar.update(task, completed=done, description=message)

        yield report


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
    """Columns of even width, the first to the left, the others to the right; as wide as it has to be."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(header):
        drawn.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=sys.maxsize, color_system=None)
    with console.capture() as text:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def columns(rows: Iterable[dict[str, Any]], cells: dict[str, str | Callable[[dict[str, Any]], str]]) -> str:
    """A table with a line for each of the rows.

    cells: by the header of a column its key in the rows, or a function from a row to the text
    """
    written = [cell if callable(cell) else lambda row, key=cell: str(row[key]) for cell in cells.values()]
    return table(list(cells), [[cell(row) for cell in written] for row in rows])


def gap(gap: float | None) -> str:
    """A gap as a share; a bound of 0 has none."""
    return "—" if gap is None else share(gap)


def order_gap(figures: dict[str, Any]) -> str:
    """The gap above the bound on orders as a share, or that there is none."""
    return NOT_BOUNDED if figures["unbounded"] else gap(figures["order_gap"])


def overload(figures: dict[str, Any]) -> str:
    factors = figures["balance"]["overload_factor"]
    return " · ".join(ratio(factors[name]) for name in ("p50", "p95", "max"))
