"""CSV and Parquet tables, in the forms that `engine.formats.tables` reads: routing and traffic in long form, loads with a row
a layer."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from engine.formats import traffic
from engine.formats.writers.writer import Writer, loads_of, unsaid
from engine.model import MoEModel
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload

TOKENS_AT_ONCE = 1 << 14

_Save = Callable[[Path, pa.Schema], pacsv.CSVWriter | pq.ParquetWriter]


def write_table(workload: Workload, path: Path, model: MoEModel | None, save: _Save) -> tuple[str, ...]:
    """Routing as `token, layer, rank_in_topk, expert` with `sequence` and `source_rank` where they are known, loads as
    `layer, expert_0, …`, traffic as `layer, src, dst, bytes`.

    Cannot carry: of routing how many experts there are, phases and the numbers of layers, which count from 0; of loads what
    came from which source or in which step; of traffic the bytes of a token copy.
    """
    match workload:
        case RoutingTrace():
            return _write_routing(workload, path, save)
        case ExpertLoad():
            return write_loads(workload, path, model, save)
        case TrafficMatrix():
            (traffic.write_parquet if save is pq.ParquetWriter else traffic.write_csv)(workload, path)
            return ("how many bytes a token copy is",)


def _write_routing(trace: RoutingTrace, path: Path, save: _Save) -> tuple[str, ...]:
    names = ["token", "layer", "rank_in_topk", "expert"]
    names += [name for name in ("sequence", "source_rank") if getattr(trace, name) is not None]
    schema = pa.schema([(name, pa.int16() if name == "expert" else pa.int32()) for name in names])
    with save(path, schema) as file:
        for start in range(0, trace.tokens, TOKENS_AT_ONCE):
            part = trace.experts[start : start + TOKENS_AT_ONCE]
            token, layer, rank = (axis.ravel().astype(np.int32) for axis in np.indices(part.shape, np.int32))
            token += start
            columns = [token, layer, rank, part.ravel()]
            columns += [getattr(trace, name)[token].astype(np.int32) for name in names[4:]]
            file.write_table(pa.table(columns, schema=schema))
    fewer = () if trace.experts.max() + 1 == trace.num_experts else ("how many experts a layer has",)
    return fewer + unsaid(
        trace,
        phase="which tokens were prefill and which decode",
        model_layers="which layers of the model were recorded; they count from 0",
    )


def write_loads(
    workload: RoutingTrace | ExpertLoad, path: Path, model: MoEModel | None, save: _Save
) -> tuple[str, ...]:
    """Only loads, also of routing: one row per layer with the layer of the model, one column an expert."""
    loads, lost = loads_of(workload, model)
    names = ["layer", *(f"expert_{expert}" for expert in range(loads.num_experts))]
    columns = [np.asarray(loads.model_layers, np.int64), *loads.load.T]
    table = pa.table([np.ascontiguousarray(column) for column in columns], names=names)
    with save(path, table.schema) as file:
        file.write_table(table)
    parts = unsaid(loads, by_source="how much came from which rank", by_step="how loads changed from step to step")
    return lost + parts


WRITERS = (
    Writer(
        "csv",
        ".csv",
        "a CSV table",
        (RoutingTrace, ExpertLoad, TrafficMatrix),
        partial(write_table, save=pacsv.CSVWriter),
    ),
    Writer(
        "parquet",
        ".parquet",
        "a Parquet table",
        (RoutingTrace, ExpertLoad, TrafficMatrix),
        partial(write_table, save=pq.ParquetWriter),
    ),
    Writer(
        "loads-csv",
        ".csv",
        "a CSV table of loads",
        (RoutingTrace, ExpertLoad),
        partial(write_loads, save=pacsv.CSVWriter),
    ),
)
