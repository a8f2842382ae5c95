"""Recorded arrivals of requests: Mooncake's traces (JSON lines, milliseconds), and CSV tables with seconds.

{"timestamp": 27482, "input_length": 6955, "output_length": 52, …}
timestamp,input_length,output_length
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.formats.source import check_there, fault, one_clear_line, quoted
from engine.serving.arrivals import MOST_REQUESTS, Requests

COLUMNS = ("timestamp", "input_length", "output_length")


def read_requests(path: Path) -> Requests:
    """The requests of a trace, by time, the first at 0. Raises InputError."""
    with one_clear_line(path):
        check_there(path)
        return _read(path, path.suffix.lower() in (".jsonl", ".json"))


def _read(path: Path, lines: bool) -> Requests:
    rows = []
    for place, row in _of_lines(path) if lines else _of_table(path):
        try:
            numbers = [float(row[name]) for name in COLUMNS]
        except (KeyError, TypeError, ValueError):
            raise fault(path, f"needs the numbers {', '.join(COLUMNS)}, not {quoted(row)}", place) from None
        if not (np.isfinite(numbers).all() and numbers[0] >= 0 and min(numbers[1:]) >= 1):
            raise fault(path, "a time of 0 or more, and at least one token in and out, are needed", place)
        rows.append(numbers)
        if len(rows) > MOST_REQUESTS:
            raise fault(path, f"has more than {MOST_REQUESTS:,} requests; cut it")
    if not rows:
        raise fault(path, "has no requests")
    table = np.array(rows)[np.argsort([row[0] for row in rows], kind="stable")]
    seconds = (table[:, 0] - table[0, 0]) / (1e3 if lines else 1.0)
    return Requests(seconds, table[:, 1].astype(np.int64), table[:, 2].astype(np.int64))


def _of_lines(path: Path) -> Iterator[tuple[str, dict]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if not isinstance(row, dict):
                    raise fault(path, "is no JSON object in a line of its own", f"line {number}")
                yield f"line {number}", row


def _of_table(path: Path) -> Iterator[tuple[str, dict]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        rows.fieldnames = [(name or "").strip().lower() for name in rows.fieldnames or ()]
        if lacking := [name for name in COLUMNS if name not in rows.fieldnames]:
            raise fault(path, f"the columns {', '.join(lacking)} are missing; arrivals have {', '.join(COLUMNS)}")
        yield from ((f"line {rows.line_num}", row) for row in rows)
