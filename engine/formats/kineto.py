"""Chrome traces of the PyTorch profiler (Kineto), `.json` or `.json.gz`: GEMMs and collectives of one rank.

What counts, repetitions of a size by their median:

* GEMMs: operators `aten::mm` and `aten::addmm` with `Input Dims` and `Input type` (record_shapes=True). With a GPU their
  time is that of the kernels that carry the operator's `External id`, without one the operator's own.
* Collectives: kernels with `Collective name`, `In msg nelems`, `dtype` and `Group size`; on a CPU the `gloo:` ranges with
  `Input Dims`. A rank that is early waits inside its collective for the others, and the trace cannot tell: profile ranks that
  arrive together.
"""

import gzip
import json
import re
from collections import defaultdict
from math import isfinite, prod
from pathlib import Path
from typing import Any

from engine.costs.measured import CollectiveTimes, GemmTimes, MeasuredTimes, medians
from engine.formats.source import fault, one_line

MAX_TRACE_BYTES = 512 * 1024**2
"""Of the JSON text; parsed it takes about ten times as much memory."""

GEMMS = {"aten::mm": 0, "aten::addmm": 1}
"""Operators, and which of their inputs is A."""

DTYPES = {"float": "fp32", "c10::bfloat16": "bf16", "c10::half": "fp16"}
"""`Input type` in lower case."""

COLLECTIVES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoallv": "all_to_all",
}

ELEMENT_BYTES = {
    "float": 4,
    "half": 2,
    "bfloat16": 2,
    "double": 8,
    "byte": 1,
    "char": 1,
    "bool": 1,
    "short": 2,
    "int": 4,
    "long": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "c10::bfloat16": 2,
    "c10::half": 2,
}
"""By torch's name of the dtype, in lower case."""

GPU_NAMES = (
    (r"\bA100-SXM4-80GB\b", "A100-80"),
    (r"\bA100-SXM4-40GB\b", "A100-40"),
    (r"\bH100 80GB HBM3\b", "H100"),
    (r"\bH200$", "H200"),
    (r"\bB200$", "B200"),
    (r"\bL40S$", "L40S"),
    (r"\bV100-SXM2-32GB\b", "V100-32"),
    (r"\bV100-SXM2-16GB\b", "V100-16"),
    (r"\bRTX 2080 Ti$", "RTX 2080 Ti"),
)
"""Pattern in the device's name, and the catalogue's type. PCIe and NVL versions are other GPUs and keep their own names."""


def is_trace(data: dict[str, Any]) -> bool:
    """Whether a JSON object is a Chrome trace."""
    return "traceEvents" in data


def read_gzip(path: Path) -> dict[str, Any]:
    """The JSON object in a gzip file; raises InputError when it is something else, or larger than `MAX_TRACE_BYTES`."""
    with gzip.open(path) as file:
        text = file.read(MAX_TRACE_BYTES + 1)
    if len(text) > MAX_TRACE_BYTES:
        raise fault(path, f"unpacks to more than {MAX_TRACE_BYTES // 1024**2} MB; profile fewer steps")
    data = json.loads(text)
    if not isinstance(data, dict):
        raise fault(path, "a JSON object {…} is needed")
    return data


def read_kineto(data: dict[str, Any], path: Path) -> MeasuredTimes:
    """The times in a trace; `path` is where it came from. Raises InputError when it has neither GEMMs nor collectives."""
    events = data.get("traceEvents")
    if not isinstance(events, list):
        raise fault(path, "'traceEvents' is not a list")
    on_gpu = any(isinstance(event, dict) and event.get("cat") == "kernel" for event in events)
    events = [event for event in events if _complete(event)]
    gpu = _gpu_type(data) if on_gpu else "CPU"
    gemm = _gemms(events, on_gpu)
    collectives = _collectives(events, on_gpu, _world_size(data))
    if not gemm and not collectives:
        raise fault(
            path,
            "no GEMMs with shapes and no all-to-all or all-reduce with sizes in this trace; profile with "
            "record_shapes=True, on GPUs with CUDA activities and NCCL",
        )
    return MeasuredTimes(
        name=one_line(path.name.removesuffix(".gz").removesuffix(".json"))[:80] or "trace",
        origin=f"PyTorch profiler trace on {gpu}"[:300],
        gemm=tuple(GemmTimes(gpu=gpu, dtype=dtype, points=medians(points)) for dtype, points in gemm.items()),
        collectives=tuple(
            CollectiveTimes(operation=operation, ranks=ranks, points=medians(points))
            for (operation, ranks), points in collectives.items()
        ),
    )


def _complete(event: object) -> bool:
    """Whether this is an event with a duration and details."""
    if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("args"), dict):
        return False
    seconds = event.get("dur")
    return isinstance(seconds, int | float) and isfinite(seconds) and seconds > 0


def _gemms(events: list[dict], on_gpu: bool) -> dict[str, list[tuple[float, ...]]]:
    """By dtype: (m, n, k, seconds)."""
    kernels: dict[object, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel" and isinstance(event["args"].get("External id"), int):
            kernels[event["args"]["External id"]] += event["dur"]
    gemms = defaultdict(list)
    for event in events:
        if event.get("cat") != "cpu_op" or event.get("name") not in GEMMS:
            continue
        about = event["args"]
        dims, types, first = about.get("Input Dims"), about.get("Input type"), GEMMS[event["name"]]
        match dims[first : first + 2] if isinstance(dims, list) else None:
            case [[int(m), int(k)], [int(inner), int(n)]] if inner == k and min(m, n, k) > 0:
                pass
            case _:
                continue
        dtype = types[first] if isinstance(types, list) and len(types) > first else None
        duration = kernels.get(about.get("External id"), 0.0) if on_gpu else event["dur"]
        if isinstance(dtype, str) and dtype.lower() in DTYPES and duration > 0:
            gemms[DTYPES[dtype.lower()]].append((m, n, k, duration * 1e-6))
    return gemms


def _collectives(events: list[dict], on_gpu: bool, world: int) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """By operation and number of ranks: (bytes, seconds)."""
    collectives = defaultdict(list)
    for event in events:
        about, name = event["args"], event.get("name")
        if on_gpu and event.get("cat") == "kernel":
            operation, ranks = about.get("Collective name"), about.get("Group size")
            count, dtype = about.get("In msg nelems"), about.get("dtype")
        elif not on_gpu and isinstance(name, str) and name.startswith("gloo:"):
            operation, ranks, types = name.removeprefix("gloo:"), world, about.get("Input type")
            count = _elements(about.get("Input Dims"))
            dtype = types[0] if isinstance(types, list) and types else None
        else:
            continue
        if not isinstance(operation, str) or operation.lower() not in COLLECTIVES or not isinstance(dtype, str):
            continue
        if not isinstance(ranks, int) or ranks < 2 or not isinstance(count, int) or dtype.lower() not in ELEMENT_BYTES:
            continue
        if (size := count * ELEMENT_BYTES[dtype.lower()]) > 0:
            collectives[COLLECTIVES[operation.lower()], ranks].append((size, event["dur"] * 1e-6))
    return collectives


def _elements(dims: object) -> int | None:
    """Elements of the first tensor, None where its shape is not recorded."""
    first = dims[0] if isinstance(dims, list) and dims else None
    if isinstance(first, list) and first and all(isinstance(size, int) for size in first):
        return prod(first)
    return None


def _world_size(data: dict[str, Any]) -> int:
    about = data.get("distributedInfo")
    size = about.get("world_size") if isinstance(about, dict) else None
    return size if isinstance(size, int) else 0


def _gpu_type(data: dict[str, Any]) -> str:
    """The catalogue's name of the first device, or its own name."""
    devices = data.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    if not isinstance(name, str) or not name.strip():
        return "GPU"
    name = one_line(name)
    return next((kind for pattern, kind in GPU_NAMES if re.search(pattern, name)), name[:80])
