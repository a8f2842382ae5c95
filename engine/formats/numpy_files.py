"""NumPy `.npz` and `.npy`: routing logs, and traffic matrices as `.npy`.

An `.npz` holds one of these:

* routing as `experts` int[tokens, layers, k] (or [tokens, layers] for top-1), with optional `sequence`, `source_rank`, `phase`
  [tokens] (0 prefill, 1 decode) or `is_prefill`, `model_layers` [layers], `weights` (the gate's scores,
  shaped like `experts`) and a scalar `num_experts`
* loads as `expert_load` [layers, experts], with optional `model_layers`, `by_source` and `by_step` [ranks or steps, layers,
  experts]
* traffic as `traffic_bytes` [layers, n, n] with a scalar `bytes_per_token`
* several recordings, each an integer array under a name of its own

The studio's own have `findings` too, as JSON in bytes. They are the file's word: checks of its numbers come in addition, and
alone offer remedies. Archives of single requests are read by `vllm.requests`.

In an `.npy`, and in an array under a name of its own, integers are a routing log [tokens, layers] or [tokens, layers, k], or
loads (see `bare_lists`), floats are loads, or traffic in bytes, [n, n] or [layers, n, n]. A square 2-D integer array could be
any and is refused. The header (see
numpy.lib.format) is a version, then a Python dict of shape and dtype.
"""

import math
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Annotated, BinaryIO

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from engine.errors import InputError
from engine.formats.arrays import (
    MAX_EXPERTS,
    MAX_LAYERS,
    check_amount,
    check_amounts,
    expert_load,
    place_in,
    routing_trace,
    traffic_matrix,
    whole_numbers,
)
from engine.formats.bare_lists import loads_of_array, loads_of_named, named_numbers
from engine.formats.format import Format, Glance, of_one_file
from engine.formats.source import MAX_UNPACKED_BYTES, PARSER_ERRORS, Source, fault, ok, quoted
from engine.schema import first_fault
from engine.workload import DECODE, PREFILL, ExpertLoad, Finding, Origin, RoutingTrace, TrafficMatrix, Workload

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
FINDINGS = TypeAdapter(Annotated[tuple[Finding, ...], Field(max_length=256)])
"""Readers and remedies leave a few; each is a box on a page."""
MAX_FINDINGS_BYTES = 1024**2
MAX_ARRAY_BYTES = 1024**3
"""Memory of an array and the arrays made of it: int16 ids, or the search for fractions in floats."""
_MADE_OF = {"i": 2, "u": 2, "f": 32, "b": 1}
"""Bytes that are made of a number, by kind of number."""
_READ = {"experts", "sequence", "source_rank", "phase", "is_prefill", "model_layers", "weights", "num_experts", "findings"}
_READ |= {"expert_load", "by_source", "by_step", "traffic_bytes", "bytes_per_token"}
_SINGLE = ("experts", "expert_load", "traffic_bytes")
_Column = Callable[[str], np.ndarray | None]
"""An array of an archive by its name, None if there is none."""


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, True if its first index runs fastest, dtype) of the numbers that `file` is left in front of.

    Raises ValueError for versions after 2.0, which are for names that no plain numbers have, and the errors of NumPy
    (`PARSER_ERRORS`) for damaged headers.
    """
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f".npy version {version[0]}.{version[1]} is not a plain array of numbers")
    try:
        shape, fortran_order, dtype = _HEADERS[version](file)
    except TypeError:  # a header like {[]: 0}, which NumPy lets Python complain about
        raise ValueError("the header of the .npy is damaged") from None
    # True is an int to NumPy, until it makes an array of it.
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"the header of the .npy has a shape {shape}")
    return shape, fortran_order, dtype


def read_npy(source: Source) -> Workload:
    """A routing trace, loads or a traffic matrix, see above."""
    with source.path.open("rb") as file:
        array = _read_array(source.path, file, source.path.stat().st_size, "")
    return _unnamed(source, array)


def _unnamed(source: Source, array: np.ndarray) -> Workload:
    if array.ndim == 1 and len(array) > 1:
        raise source.fault(f"{len(array)} numbers in a row; loads are [layers, experts], choices [tokens, layers, k]")
    if array.dtype.kind == "f":
        check_amount(source, "traffic", array.shape)
    if loads := loads_of_array(source, array, "npy"):
        return loads
    if array.dtype.kind == "f":
        return traffic_matrix(source, array)
    if array.ndim == 2 and array.shape[0] == array.shape[1] > 1:
        raise source.fault(
            f"a square integer array {list(array.shape)} may be traffic, loads or routing; save a traffic matrix as float64, "
            "a routing log as [tokens, layers, 1], loads as .npz under the name expert_load"
        )
    return routing_trace(source, array)


def read_npz(source: Source) -> Workload:
    """The recording in an archive, or the one of several that `source.member` names."""
    with zipfile.ZipFile(source.path) as archive:
        names = array_names(source.path, archive)
        single = next((name for name in _SINGLE if name in names), None)
        if source.member is None and single is None and (named := _named(source, archive, names)):
            return named
        if source.member is None and single is None and len(names) > 1:
            choices = ", ".join(f"{source.path.name}::{name}" for name in names)
            raise source.fault(f"holds several workloads; pick one: {choices}")
        chosen = source.member if source.member is not None else single or names[0]
        if chosen not in names or (single and chosen != single):
            known = ", ".join([single] if single else names)
            raise source.fault(f"has no workload {quoted(chosen)}; it holds: {known}")
        if not single:
            array = read_member(source.path, archive, chosen)
            if array.dtype.kind not in "iu" or array.ndim not in (2, 3, 4):
                said = f"is {array.dtype} {list(array.shape)}; a workload is integers [tokens, layers, k]"
                raise source.fault(said, f"array {quoted(chosen)}")
            return loads_of_array(source, array, "npz") or routing_trace(source, array)

        read = [f"{name}.npy" for name in names]
        if (unpacked := sum(archive.getinfo(name).file_size for name in read)) > MAX_ARRAY_BYTES:
            raise source.fault(f"would unpack to {unpacked / 1024**3:.1f} GB; cut the recording to fewer tokens")

        def column(name: str) -> np.ndarray | None:
            return read_member(source.path, archive, name) if name in names else None

        array = read_member(source.path, archive, single)
        if single in ("expert_load", "traffic_bytes"):
            check_amount(source, single, array.shape)
        workload = _READERS[single](source, array, column)
        unread = ", ".join(quoted(name) for name in names if name not in _READ)
        said = (ok("unread-arrays", f"Arrays that are not read: {unread[:200]}."),) if unread else ()
        return replace(workload, origin=Origin(format="npz", findings=(*_findings(source, column), *said)))


def _named(source: Source, archive: zipfile.ZipFile, names: tuple[str, ...]) -> Workload | None:
    """The loads in arrays whose names tell, such as one a layer; None where they do not."""
    if sum(archive.getinfo(f"{name}.npy").file_size for name in names) > MAX_ARRAY_BYTES // _MADE_OF["f"]:
        return None
    try:
        content = {name: read_member(source.path, archive, name) for name in names}
    except InputError:  # texts among them
        return None
    found = named_numbers(content)
    return loads_of_named(source, found) if found and found.kind == "loads" and found.numbers.ndim == 2 else None


def _trace(source: Source, experts: np.ndarray, column: _Column) -> RoutingTrace:
    trace = routing_trace(source, experts, column("sequence"), column("source_rank"), _recorded(source, column))
    phase = column("phase")
    if phase is None and (prefill := column("is_prefill")) is not None:
        phase = np.where(prefill, PREFILL, DECODE)
    if phase is not None and (phase.shape != (trace.tokens,) or not np.isin(phase, (PREFILL, DECODE)).all()):
        raise source.fault(f"phase must be {PREFILL} or {DECODE} for each of {trace.tokens} tokens")
    if (scores := column("weights")) is not None:
        if scores.shape != experts.shape:
            raise source.fault(f"weights is {list(scores.shape)}, but experts is {list(experts.shape)}")
        scores = scores.reshape(trace.experts.shape).astype(np.float32)
        if not np.isfinite(scores).all():
            raise source.fault("weights holds a number that is infinite or none")
    layers = _model_layers(source, column, trace.layers)
    phase = None if phase is None else phase.astype(np.int8)
    return replace(trace, phase=phase, model_layers=layers, scores=scores)


def _loads(source: Source, load: np.ndarray, column: _Column) -> ExpertLoad:
    if load.ndim != 2 or not 0 < len(load) <= MAX_LAYERS or not 0 < load.shape[1] <= MAX_EXPERTS:
        raise source.fault(
            f"expert_load must be [layers, experts], at most {MAX_LAYERS} and {MAX_EXPERTS} of them, not {list(load.shape)}"
        )
    loads = expert_load(source, load.astype(np.float64), _model_layers(source, column, len(load)) or range(len(load)))
    parts = {}
    for name, axis in (("by_source", "rank"), ("by_step", "step")):
        if (counts := column(name)) is None:
            continue
        check_amount(source, name, counts.shape)
        if counts.shape[1:] != load.shape or not len(counts):
            raise source.fault(f"{name} must be [{axis}s, {load.shape[0]}, {load.shape[1]}], not {list(counts.shape)}")
        check_amounts(source, counts, "a load", place_in(f"{name}, {axis}", "layer", "expert"))
        if not np.allclose(counts.sum(axis=0), load, rtol=1e-6, atol=1e-6):
            raise source.fault(f"{name} does not add up to expert_load")
        parts[name] = counts[:, load.any(axis=1)].astype(np.float64)
    return replace(loads, **parts)


def _traffic(source: Source, amounts: np.ndarray, column: _Column) -> TrafficMatrix:
    matrix = traffic_matrix(source, amounts)
    if (stored := column("bytes_per_token")) is None:
        return matrix
    if stored.size != 1 or not (np.isfinite(stored) & (stored > 0)).all():
        raise source.fault("bytes_per_token must be one number above 0")
    return replace(matrix, bytes_per_token=float(stored.reshape(-1)[0]))


_READERS = {"experts": _trace, "expert_load": _loads, "traffic_bytes": _traffic}


def _model_layers(source: Source, column: _Column, layers: int) -> tuple[int, ...] | None:
    if (stored := column("model_layers")) is None:
        return None
    numbers = whole_numbers(source, stored.reshape(-1), "model_layers", place_in("entry"))
    if len(numbers) != layers or (numbers < 0).any() or (np.diff(numbers) <= 0).any():
        raise source.fault(f"model_layers must name each of {layers} layers, in ascending order from 0")
    return tuple(numbers.tolist())


def _findings(source: Source, column: _Column) -> tuple[Finding, ...]:
    if (stored := column("findings")) is None:
        return ()
    if stored.dtype != np.uint8 or stored.nbytes > MAX_FINDINGS_BYTES:
        raise source.fault("findings must be JSON in at most a megabyte of bytes")
    try:
        stated = FINDINGS.validate_json(stored.tobytes())
    except ValidationError as error:
        raise source.fault(f"findings: {first_fault(error)}") from None
    return tuple(finding.model_copy(update={"remedy": None}) for finding in stated)


def members(path: Path) -> tuple[str, ...]:
    """Names of the workloads inside an archive; () if it holds a single one without a name of its own."""
    with zipfile.ZipFile(path) as archive:
        names = array_names(path, archive)
    return () if any(name in names for name in _SINGLE) else names


def _recorded(source: Source, column: _Column) -> int | None:
    """The scalar `num_experts`, if the archive has one."""
    if (stored := column("num_experts")) is None:
        return None
    number = whole_numbers(source, stored.reshape(-1), "num_experts", place_in("entry"))
    if len(number) != 1 or number[0] < 1:
        raise source.fault("num_experts must be one whole number of at least 1")
    return int(number[0])


def array_names(path: Path, archive: zipfile.ZipFile) -> tuple[str, ...]:
    """Names of the arrays, once the directory of the archive shows that unpacking it is bearable; raises InputError."""
    unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > MAX_UNPACKED_BYTES:
        raise fault(
            path,
            f"would unpack to {unpacked / 1024**3:.1f} GB, more than the limit of {MAX_UNPACKED_BYTES // 1024**3} GB; "
            "cut the recording to fewer tokens",
        )
    if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in archive.infolist()):
        raise fault(path, "is compressed as NumPy never does; load it and save it again with numpy.savez_compressed")
    names = tuple(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
    if not names:
        raise fault(path, "holds no arrays")
    return names


def read_member(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array of numbers in an archive; raises InputError for anything else."""
    with archive.open(f"{name}.npy") as file:
        return _read_array(path, file, archive.getinfo(f"{name}.npy").file_size, f"array {quoted(name)}")


def _read_array(path: Path, file: BinaryIO, size: int, place: str) -> np.ndarray:
    """The array in a `.npy` stream of `size` bytes; raises InputError."""
    shape, dtype = _checked_header(path, file, size, place)
    made = 0 if dtype == np.int16 else _MADE_OF[dtype.kind]
    if (needed := math.prod(shape) * (dtype.itemsize + made)) > MAX_ARRAY_BYTES:
        raise fault(path, f"{dtype} {list(shape)} needs {needed / 1024**3:.1f} GB; cut the recording to fewer tokens", place)
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def _checked_header(path: Path, file: BinaryIO, size: int, place: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a `.npy` stream of `size` bytes. NumPy allocates as much as the header claims, so that is held
    against the size first."""
    try:
        shape, _, dtype = read_header(file)
    except PARSER_ERRORS as error:
        raise fault(path, f"is damaged ({str(error)[:160]})", place) from None
    if dtype.hasobject:
        raise fault(path, "contains Python objects, which are never loaded; save an array of numbers", place)
    if dtype.kind not in "iufb":
        raise fault(path, f"holds {dtype}, not numbers: save numbers (of phases 0 is prefill, 1 decode)", place)
    claimed, present = math.prod(shape) * dtype.itemsize, size - file.tell()
    if claimed > present:
        raise fault(path, f"is cut short: shape {list(shape)} needs {claimed} bytes, there are {present}", place)
    return shape, dtype


def _is_npz(glance: Glance) -> bool:
    return bool(glance.archived) and all(name.endswith(".npy") for name in glance.archived)


FORMATS = (
    Format("npz", "a NumPy archive of routing", "routing", _is_npz, of_one_file(read_npz), members=members),
    Format("npy", "a NumPy array", "routing", lambda glance: glance.magic == ".npy", of_one_file(read_npy)),
)
