"""Measured times as a CSV table, for whoever has a stopwatch of their own.

Columns, in any order, those that an operation does not need left empty or out:

    operation            gpu  dtype  m  n  k  bytes  ranks  seconds
    gemm                  x     x    x  x  x                   x
    memory                x                     x              x
    all_to_all                                  x      x       x
    all_reduce                                  x      x       x
    send_receive                                x      x       x

bytes: moved through memory, or the buffer that each GPU holds (of an all-to-all its own part included; in a send_receive it
goes to one peer, while another sends as much); dtype: fp32, bf16, fp16 or fp8. Several rows of one size count by their median.
"""

import csv
import math
from pathlib import Path
from typing import get_args

from engine.costs.measured import CollectiveTimes, Dtype, GemmTimes, MeasuredTimes, MemoryTimes, medians
from engine.formats.format import Format, Glance
from engine.formats.source import fault, quoted

NEEDED = {
    "gemm": ("gpu", "dtype", "m", "n", "k"),
    "memory": ("gpu", "bytes"),
    "all_to_all": ("ranks", "bytes"),
    "all_reduce": ("ranks", "bytes"),
    "send_receive": ("ranks", "bytes"),
}
"""Columns of each operation, apart from the seconds."""


def read_measurements(path: Path) -> MeasuredTimes:
    """The times in the table; raises InputError."""
    points_of: dict[tuple, list[tuple[float, ...]]] = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        rows.fieldnames = [(name or "").strip().lower() for name in rows.fieldnames or ()]
        for column in ("operation", "seconds"):
            if column not in rows.fieldnames:
                raise fault(
                    path,
                    f"column '{column}' is missing; measured times have operation, seconds and, as needed, gpu, "
                    "dtype, m, n, k, bytes, ranks",
                )
        for row in rows:
            where = f"line {rows.line_num}"
            operation = (row["operation"] or "").strip().lower()
            if operation not in NEEDED:
                raise fault(path, f"operation {quoted(operation)}; known are {', '.join(NEEDED)}", where)
            key, point = [operation], []
            for column in (*NEEDED[operation], "seconds"):
                cell = (row.get(column) or "").strip()
                if not cell:
                    raise fault(path, f"{operation} needs a value in column '{column}'", where)
                if column in ("gpu", "dtype"):
                    key.append(cell)
                elif column == "ranks":
                    key.append(int(_number(path, column, cell, where, least=2, whole=True)))
                else:
                    point.append(_number(path, column, cell, where))
            if operation == "gemm" and key[2] not in get_args(Dtype):
                raise fault(path, f"dtype {quoted(key[2])}; known are {', '.join(get_args(Dtype))}", where)
            points_of.setdefault(tuple(key), []).append(tuple(point))
    if not points_of:
        raise fault(path, "has a header but no rows")
    tables = {key: medians(points) for key, points in points_of.items()}
    return MeasuredTimes(
        name=path.stem[:80],
        origin=f"table {path.name}"[:300],
        gemm=tuple(GemmTimes(gpu=key[1], dtype=key[2], points=table) for key, table in tables.items() if key[0] == "gemm"),
        memory=tuple(MemoryTimes(gpu=key[1], points=table) for key, table in tables.items() if key[0] == "memory"),
        collectives=tuple(
            CollectiveTimes(operation=key[0], ranks=key[1], points=table)
            for key, table in tables.items()
            if key[0] not in ("gemm", "memory")
        ),
    )


def _number(path: Path, column: str, cell: str, where: str, least: float = 0.0, whole: bool = False) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    fits = math.isfinite(number) and number >= least and number > 0 and (not whole or number == int(number))
    if not fits:
        wanted = f"a whole number of {least:g} or more" if whole else "a number above 0"
        raise fault(path, f"column '{column}' is {quoted(cell)}, not {wanted}", where)
    return number


def _tells(glance: Glance) -> bool:
    return "operation" in glance.columns and bool({"seconds", "bytes", "ranks"} & set(glance.columns))


FORMATS = (Format("measured-times-table", "a table of measured times", "measurements", _tells),)
