"""Tables of measurements as AIConfigurator collects them (Parquet, `*_perf.parquet`), told by their columns.

* `gemm_perf`: `gemm_dtype`, `m`, `n`, `k`, `latency` in ms on `device`.
* `nccl_perf`: `op_name` (alltoall, all_reduce, …), `nccl_dtype`, `num_gpus` of one node, `message_size` in elements of the
  buffer that every GPU holds, `latency` in ms. 16-bit rows count; eight-bit ones of as many bytes take as long.

The others have times that measured times have no place for. Each is named, with the place that uses the same table of the
package aiconfigurator-core. The columns are those of its version 0.12.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.catalogue.links import type_of
from engine.costs.measured import MeasuredTimes
from engine.errors import one_line
from engine.formats.format import Format, Glance
from engine.formats.source import fault, quoted

if TYPE_CHECKING:
    import pandas as pd

MILLISECONDS = 1e-3
GEMM_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}
"""Formats with scales of their own for blocks (fp8_block, nvfp4) are other kernels, and no dtype here."""
COLLECTIVES = {"alltoall": "all_to_all", "all_reduce": "all_reduce"}
HALF_BYTES = 2
MAX_ROWS = 500_000
"""The largest of the package has 95,000."""
FALLBACK_GPU = "GPU"

_DEEPEP = "the cost source deepep reads such tables from the package aiconfigurator-core"
_SERVING = "experts of a step of serving are timed by such tables of the package aiconfigurator-core"
_TRUST = "'trust' holds predictions against such tables of the package aiconfigurator-core"
NAMED = (
    ("moe", "whole MoE layers on one GPU", _SERVING, "moe_dtype inter_size moe_ep_size distribution latency"),
    ("deepep-normal", *("DeepEP's exchanges, the normal kernels", _DEEPEP, "dispatch_transmit_us combine_transmit_us")),
    ("deepep-low-latency", *("DeepEP's exchanges, the low-latency kernels", _DEEPEP, "dispatch_avg_t_us combine_avg_t_us")),
    (
        "trtllm-exchange",
        *("TensorRT-LLM's exchanges over NVLink", _TRUST, "op_name moe_dtype num_tokens topk moe_ep_size latency"),
    ),
    ("other", "another operation", "no times here are read off it", "op_name kernel_source"),
)
"""(name, content, use, columns), the more telling first."""


def read_gemms(path: Path) -> MeasuredTimes:
    """The GEMMs of a `gemm_perf`, by device and dtype; raises InputError."""
    rows, notes = _rows(path, ("gemm_dtype",), ("m", "n", "k", "latency"))
    known = rows.gemm_dtype.isin(GEMM_DTYPES)
    if not known.any():
        raise fault(path, f"GEMMs of {_few(rows.gemm_dtype)} only; those of {', '.join(GEMM_DTYPES)} are read")
    if not known.all():
        notes.append(f"left out: {(~known).sum()} GEMMs of {_few(rows.gemm_dtype[~known])}")
    gemm = []
    for (gpu, dtype), points in rows[known].groupby(["gpu", "gemm_dtype"], observed=True):
        table = points.groupby(["m", "n", "k"]).latency.median().reset_index().to_numpy()
        table[:, 3] *= MILLISECONDS
        gemm.append({"gpu": gpu, "dtype": GEMM_DTYPES[dtype], "points": table.tolist()})
    return _measured(path, rows, notes, gemm=gemm)


def read_collectives(path: Path) -> MeasuredTimes:
    """The all-to-alls and all-reduces of an `nccl_perf`; raises InputError."""
    rows, notes = _rows(path, ("op_name", "nccl_dtype"), ("num_gpus", "message_size", "latency"))
    known = rows.op_name.isin(COLLECTIVES) & (rows.nccl_dtype == "half") & (rows.num_gpus >= 2)
    if not known.any():
        raise fault(path, f"no alltoall or all_reduce of 16-bit rows; it has {_few(rows.op_name)} of {_few(rows.nccl_dtype)}")
    if rows.gpu[known].nunique() > 1:
        raise fault(path, f"collectives on {_few(rows.gpu[known])}; keep one device, as times of collectives do not name it")
    if not known.all():
        others = sorted(set(rows.op_name[~rows.op_name.isin(COLLECTIVES)]))
        names = f"{', '.join(map(quoted, others[:4]))} and " if others else ""
        notes.append(f"left out: {(~known).sum()} rows, {names}those that are not 16-bit")
    collectives = []
    for (operation, gpus), points in rows[known].groupby(["op_name", "num_gpus"], observed=True):
        table = points.groupby("message_size").latency.median().reset_index().to_numpy() * (HALF_BYTES, MILLISECONDS)
        collectives.append({"operation": COLLECTIVES[operation], "ranks": int(gpus), "points": table.tolist()})
    return _measured(path, rows[known], [*notes, "measured on GPUs of one node"], collectives=collectives)


def refuse(path: Path) -> MeasuredTimes:
    """Always raise InputError, which names the content of a table of another kind and its use."""
    columns = set(Glance(path).columns)
    content, use = next((content, use) for _, content, use, telling in NAMED if columns.issuperset(telling.split()))
    raise fault(path, f"is a table of {content}, which measured times have no place for; {use}")


def _rows(path: Path, texts: tuple[str, ...], numbers: tuple[str, ...]) -> "tuple[pd.DataFrame, list[str]]":
    """(these columns of a table, for the rows with texts and with numbers above 0, notes on the others); `gpu` is the
    catalogue's name of the device. Raises InputError."""
    schema, rows = pq.read_schema(path), pq.read_metadata(path).num_rows
    if not 0 < rows <= MAX_ROWS:
        raise fault(path, f"has {rows:,} rows; between 1 and {MAX_ROWS:,} are read")
    indexed = [*texts, *(["device"] if "device" in schema.names else [])]
    for name in (*indexed, *numbers):
        if schema.names.count(name) != 1:
            raise fault(path, f"needs one column '{name}'; names are in small letters")
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not (is_number if name in numbers else pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise fault(path, f"column '{name}' is {kind}, not {'numbers' if name in numbers else 'texts'}")
    # A repeated text takes no room in the file, but all of it in memory where it is not read as an index of texts.
    file = pq.ParquetFile(path, read_dictionary=indexed)
    table = file.read(columns=[*indexed, *numbers]).to_pandas()
    table["gpu"] = _gpus(table.device.cat) if "device" in table else FALLBACK_GPU
    values = table[list(numbers)].astype("float64")
    whole = ((values > 0) & (values < float("inf"))).all(axis=1) & table[list(texts)].notna().all(axis=1)
    if not whole.any():
        raise fault(path, f"no row has numbers above 0 in {', '.join(numbers)}")
    table[list(numbers)] = values
    return table[whole], [f"left out: {(~whole).sum()} rows without a time"] if not whole.all() else []


def _gpus(devices: "pd.Series.cat") -> np.ndarray:
    """The catalogue's name of every row's device, or its own, object[row]."""
    names = [type_of(name) or one_line(name)[:80] or FALLBACK_GPU for name in map(str, devices.categories)]
    return np.array([*names, FALLBACK_GPU], dtype=object)[devices.codes]  # -1, no text: the last


def _measured(path: Path, rows: "pd.DataFrame", notes: list[str], **parts: list) -> MeasuredTimes:
    origin = f"AIConfigurator's measurements on {_few(rows.gpu)}"
    content = {"name": one_line(path.stem)[:80], "origin": origin[:300], **parts}
    return MeasuredTimes.from_dict(content | ({"notes": notes} if notes else {}), path.name)


def _few(values: "pd.Series") -> str:
    names = sorted(set(values.astype(object)))
    return ", ".join(map(quoted, names[:4])) + (" …" if len(names) > 4 else "")


def _format(name: str, content: str, columns: str) -> Format:
    telling = set(columns.split())
    return Format(
        f"aiconfigurator-{name}",
        f"AIConfigurator's times of {content}",
        "measurements",
        lambda glance: glance.magic == ".parquet" and telling <= set(glance.columns),
    )


FORMATS = (
    _format("gemm", "GEMMs", "gemm_dtype m n k latency"),
    _format("nccl", "collectives", "op_name nccl_dtype num_gpus message_size latency"),
    *(_format(name, content, columns) for name, content, _, columns in NAMED),
)
