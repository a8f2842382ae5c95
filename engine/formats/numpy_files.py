"""NumPy `.npz` and `.npy`: routing logs, and traffic matrices as `.npy`.

An `.npz` holds one recording as `experts` int[tokens, layers, k] (or [tokens, layers] for top-1), with optional
`sequence`, `source_rank`, `weights` and a scalar `num_experts`; or one request as `routed_experts` int[tokens, layers,
k]; or several recordings, each an integer array under a name of its own.

In an `.npy` the kind of number decides: integers are a routing log [tokens, layers] or [tokens, layers, k], floats are
traffic in bytes, [n, n] or [layers, n, n]. A square 2-D integer array could be either and is refused.
"""

import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.formats.arrays import place_in, routing_trace, traffic_matrix, whole_numbers
from engine.formats.source import MAX_UNPACKED_BYTES, Source, fault, quoted
from engine.workload import RoutingTrace, TrafficMatrix

_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_SINGLE = ("experts", "routed_experts")


def read_npy(source: Source) -> RoutingTrace | TrafficMatrix:
    """A routing trace or a traffic matrix, see above."""
    with source.path.open("rb") as file:
        array = _read_array(source.path, file, source.path.stat().st_size, "")
    if array.dtype.kind == "f":
        return traffic_matrix(source, array)
    if array.ndim == 2 and array.shape[0] == array.shape[1] > 1:
        raise source.fault(
            f"a square integer array {list(array.shape)} may be traffic or routing; save a traffic matrix as float64, "
            "a routing log as [tokens, layers, 1]"
        )
    return routing_trace(source, array)


def read_npz(source: Source) -> RoutingTrace:
    """The recording in an archive, or the one of several that `source.member` names."""
    with zipfile.ZipFile(source.path) as archive:
        names = _array_names(source.path, archive)
        single = next((name for name in _SINGLE if name in names), None)
        if source.member is None and single is None and len(names) > 1:
            choices = ", ".join(f"{source.path.name}::{name}" for name in names)
            raise source.fault(f"holds several workloads; pick one: {choices}")
        chosen = source.member if source.member is not None else single or names[0]
        if chosen not in names or (single and chosen != single):
            known = ", ".join([single] if single else names)
            raise source.fault(f"has no workload {quoted(chosen)}; it holds: {known}")
        if not single:
            return routing_trace(source, _named_workload(source, archive, chosen))

        def column(name: str) -> np.ndarray | None:
            return _read_member(source.path, archive, name) if name in names else None

        experts = _read_member(source.path, archive, single)
        if single == "routed_experts":
            # One request is one sequence, whatever else the archive holds.
            return routing_trace(source, experts, np.zeros(experts.shape[:1], np.int32))
        if (weights := column("weights")) is not None and weights.shape != experts.shape:
            raise source.fault(f"weights is {list(weights.shape)}, but experts is {list(experts.shape)}")
        return routing_trace(source, experts, column("sequence"), column("source_rank"), _recorded(source, column))


def members(path: Path) -> tuple[str, ...]:
    """Names of the workloads inside an archive; () when it holds a single one without a name of its own."""
    with zipfile.ZipFile(path) as archive:
        names = _array_names(path, archive)
    return () if any(name in names for name in _SINGLE) else names


def _recorded(source: Source, column: Callable[[str], np.ndarray | None]) -> int | None:
    """The scalar `num_experts`, if the archive has one."""
    if (stored := column("num_experts")) is None:
        return None
    number = whole_numbers(source, stored.reshape(-1), "num_experts", place_in("entry"))
    if len(number) != 1 or number[0] < 1:
        raise source.fault("num_experts must be one whole number of at least 1")
    return int(number[0])


def _named_workload(source: Source, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    array = _read_member(source.path, archive, name)
    if array.dtype.kind not in "iu" or array.ndim not in (2, 3):
        raise source.fault(
            f"is {array.dtype} {list(array.shape)}; a workload is integers [tokens, layers, k]", f"array {quoted(name)}"
        )
    return array


def _array_names(path: Path, archive: zipfile.ZipFile) -> tuple[str, ...]:
    """Names of the arrays, once the directory of the archive shows that unpacking it is bearable."""
    unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > MAX_UNPACKED_BYTES:
        raise fault(
            path,
            f"would unpack to {unpacked / 1024**3:.1f} GB, more than the limit of {MAX_UNPACKED_BYTES // 1024**3} GB; "
            "cut the recording to fewer tokens",
        )
    names = tuple(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
    if not names:
        raise fault(path, "holds no arrays")
    return names


def _read_member(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as file:
        return _read_array(path, file, archive.getinfo(f"{name}.npy").file_size, f"array {quoted(name)}")


def _read_array(path: Path, file: BinaryIO, size: int, place: str) -> np.ndarray:
    """The array in a `.npy` stream of `size` bytes. NumPy allocates what the header claims, so the claim is held
    against the size first."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADER_READERS:
        raise fault(path, f".npy version {version[0]}.{version[1]} is not a plain array of numbers", place)
    shape, _, dtype = _HEADER_READERS[version](file)
    if dtype.hasobject:
        raise fault(path, "contains Python objects, which are never loaded; save an array of numbers", place)
    if dtype.kind not in "iuf":
        raise fault(path, f"holds {dtype}, not integers or floats", place)
    claimed, present = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or claimed > present:
        raise fault(path, f"is cut short: shape {list(shape)} needs {claimed} bytes, there are {present}", place)
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)
