"""Writes traffic matrices in the forms that `tables` and `numpy_files` read."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from engine.formats.source import one_clear_line
from engine.workload import TrafficMatrix


def write_csv(matrix: TrafficMatrix, path: Path) -> None:
    """Long form `layer, src, dst, bytes`, one row for every pair of ranks; raises InputError when `path` cannot be
    written. The bytes per token are not part of the file."""
    with one_clear_line(path):
        pacsv.write_csv(_long_form(matrix), path)


def write_parquet(matrix: TrafficMatrix, path: Path) -> None:
    """The same columns as `write_csv`."""
    with one_clear_line(path):
        pq.write_table(_long_form(matrix), path)


def write_npy(matrix: TrafficMatrix, path: Path) -> None:
    """float64[layer, src, dst] in bytes; raises InputError when `path` cannot be written."""
    with one_clear_line(path), path.open("wb") as file:
        np.save(file, matrix.bytes, allow_pickle=False)


def _long_form(matrix: TrafficMatrix) -> pa.Table:
    layer, src, dst = (axis.ravel() for axis in np.indices(matrix.bytes.shape))
    return pa.table({"layer": layer, "src": src, "dst": dst, "bytes": matrix.bytes.ravel()})
