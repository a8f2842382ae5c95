"""Recordings out: a writer for every format that can carry one, each the counterpart of a reader.

* `npz`: NumPy archives of everything that a recording holds but its name, which is the file's (see `numpy_files`)
* `npy`: one NumPy array, int16[token, layer, k] of routing, float64[layer, src, dst] of traffic
* `csv`, `parquet`, `loads-csv`: routing and traffic in long form, loads with a row a layer (see `tables`)
* `moe-balance`: JSON lines of that simulator, one a batch and layer: `{"layer", "batch_id", "origin_rows", "topk_experts"}`
* `lmdeploy`: a bare list of loads [decoder layer][expert], from which LMDeploy makes a placement of its own
* `sglang-statistics`, `sglang-recorder`: SGLang's `logical_count`, as JSON and as its recorder dumps it, `.pt`
  (srt/eplb/expert_distribution.py); `--init-expert-location` takes either. Rows count all decoder layers; those of dense
  layers are zero.
"""

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from engine.errors import InputError
from engine.files import replace_atomically
from engine.formats.numpy_files import FINDINGS
from engine.formats.source import one_clear_line
from engine.model import MoEModel
from engine.schema import json_text
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload

KINDS = {RoutingTrace: "routing by token", ExpertLoad: "expert loads", TrafficMatrix: "a traffic matrix"}
MOST_TOKENS = 1 << 18
"""In a batch: a line is parsed whole."""
MOST_COUNT = 2**31 - 1
"""The recorder's tensor is int32."""
TOKENS_AT_ONCE = 1 << 14
_Save = Callable[[Path, pa.Schema], pacsv.CSVWriter | pq.ParquetWriter]
_ANY = (RoutingTrace, ExpertLoad, TrafficMatrix)
_LOADS = (RoutingTrace, ExpertLoad)


@dataclass(frozen=True)
class Writer:
    """A format that recordings can be written in.

    name: the format's
    suffix: the files' extension
    title: in a sentence, after "as"
    carries: the kinds of recordings it can write
    write: writes the file and returns a phrase for each thing that it could not say; raises InputError for a recording
        that does not fit the format. The model is None if it is not known.
    """

    name: str
    suffix: str
    title: str
    carries: tuple[type[Workload], ...]
    write: Callable[[Workload, Path, MoEModel | None], tuple[str, ...]]


SCORES = "the gate's scores"


def unsaid(workload: Workload, **said: str) -> tuple[str, ...]:
    """The phrases for those parts that a workload has. said: by the part's name, the phrase for its loss"""
    return tuple(text for part, text in said.items() if getattr(workload, part) is not None)


def layer_numbers(workload: RoutingTrace | ExpertLoad, model: MoEModel | None) -> tuple[int, ...]:
    """The model layer of every layer; raises InputError if neither the recording nor the model says it."""
    if workload.model_layers is not None:
        return workload.model_layers
    if model is not None and workload.layers == len(model.moe_layers):
        return model.moe_layers
    if model is not None and workload.layers == model.layers:
        return tuple(range(model.layers))
    has = "" if model is None else f", and {model.name} has {len(model.moe_layers)} MoE layers, not {workload.layers}"
    raise InputError(
        f"{workload.name}: does not say which of the model's layers were recorded{has}; give the model that was recorded "
        "(--model)"
    )


def loads_of(workload: RoutingTrace | ExpertLoad, model: MoEModel | None) -> tuple[ExpertLoad, tuple[str, ...]]:
    """The loads in a recording, and phrases for the parts that a format of loads alone cannot say."""
    if isinstance(workload, ExpertLoad):
        return workload, ()
    loads = ExpertLoad(workload.name, workload.load, layer_numbers(workload, model))
    return loads, ("which token chose what: only counts are kept",)


def is_whole(counts: np.ndarray) -> bool:
    """True if these numbers (float64[...]) have no fractions."""
    return bool((counts == np.rint(counts)).all())


def write_batches(trace: RoutingTrace, path: Path, _model: MoEModel | None = None) -> tuple[str, ...]:
    """A batch for each sequence, in the order in which sequences begin; `origin_rows` are the source ranks, [] if they are
    not known. Layers are the model's if the recording says them, else they count from 0.

    Cannot carry: how many experts there are, phases, the numbers of sequences and how their tokens were interleaved. Without
    sequences the recording is one batch, which is read back as one sequence.
    """
    layers = trace.model_layers or range(trace.layers)
    batches = list(_batches(trace))
    with path.open("w", encoding="utf-8") as file:
        for number, tokens in enumerate(batches):
            rows = [] if trace.source_rank is None else trace.source_rank[tokens].tolist()
            for place, layer in enumerate(layers):
                line = {"layer": layer, "batch_id": number, "origin_rows": rows}
                line["topk_experts"] = trace.experts[tokens, place].tolist()
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return tuple(_lost(trace, batches))


def _batches(trace: RoutingTrace) -> Iterator[np.ndarray]:
    """The tokens of each batch, int64[...]."""
    if trace.sequence is None:
        order, starts = np.arange(trace.tokens), np.array([0])
    else:
        order = np.argsort(trace.sequence, kind="stable")
        starts = np.unique(trace.sequence[order], return_index=True)[1]
    for tokens in sorted(np.split(order, starts[1:]), key=lambda tokens: tokens[0]):
        yield from np.split(tokens, range(MOST_TOKENS, len(tokens), MOST_TOKENS))


def _lost(trace: RoutingTrace, batches: list[np.ndarray]) -> Iterator[str]:
    if trace.experts.max() + 1 < trace.num_experts:
        yield "how many experts a layer has"
    if trace.sequence is None:
        yield f"that sequences are not known: the recording is {len(batches)} batch{'es'[: 2 * (len(batches) > 1)]}"
    else:
        if (np.diff(np.concatenate(batches)) < 0).any():
            yield "how tokens of several sequences were interleaved"
        if len(batches) > len(np.unique(trace.sequence)):
            yield f"which batches were one sequence: those of more than {MOST_TOKENS:,} tokens are several"
        elif any(trace.sequence[tokens[0]] != number for number, tokens in enumerate(batches)):
            yield "the numbers of the sequences, which count from 0"
    yield from unsaid(trace, phase="which tokens were prefill and which decode", scores=SCORES)


def write_npy(workload: RoutingTrace | TrafficMatrix, path: Path, _model: MoEModel | None = None) -> tuple[str, ...]:
    """One array. Cannot carry: how many experts there are (it reads back as the largest id + 1, or the open model's),
    sequences, source ranks, phases, the numbers of layers; of traffic the bytes of a token copy."""
    with path.open("wb") as file:
        np.save(file, workload.bytes if isinstance(workload, TrafficMatrix) else workload.experts, allow_pickle=False)
    if isinstance(workload, TrafficMatrix):
        return ("how many bytes a token copy is",)
    fewer = () if workload.experts.max() + 1 == workload.num_experts else ("how many experts a layer has",)
    return fewer + unsaid(
        workload,
        sequence="which sequence a token belongs to",
        source_rank="which rank a token came from",
        phase="which tokens were prefill and which decode",
        model_layers="which layers of the model were recorded",
        scores=SCORES,
    )


def write_npz(workload: Workload, path: Path, _model: MoEModel | None = None) -> tuple[str, ...]:
    """Compressed arrays, see `engine.formats.numpy_files`. The findings of the reader and of remedies are kept, the format
    that the recording was read from is not. Layers of loads without any tokens are left out when it is read."""
    # NumPy compresses as hard as it can, which takes several times as long for a few per cent.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        match workload:
            case RoutingTrace():
                parts = {"experts": workload.experts, "num_experts": np.int64(workload.num_experts)}
                optional = ("sequence", "source_rank", "phase", "model_layers")
            case ExpertLoad():
                parts = {"expert_load": workload.load}
                optional = ("model_layers", "by_source", "by_step")
            case TrafficMatrix():
                parts = {"traffic_bytes": workload.bytes, "bytes_per_token": np.float64(workload.bytes_per_token)}
                optional = ()
        if isinstance(workload, RoutingTrace) and workload.scores is not None:
            parts["weights"] = workload.scores
        parts |= {name: np.asarray(part) for name in optional if (part := getattr(workload, name)) is not None}
        if workload.origin and workload.origin.findings:
            parts["findings"] = np.frombuffer(FINDINGS.dump_json(workload.origin.findings), np.uint8)
        for name, array in parts.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return ()


def write_json(workload: RoutingTrace | ExpertLoad, path: Path, model: MoEModel | None = None) -> tuple[str, ...]:
    """`{"logical_count": [layer][expert]}`, or [step][layer][expert] of loads by steps; without steps but with sources, by
    rank as coupled balancers write it (`"logical_count_layout": "rank_layer_expert"`).

    Cannot carry: tokens, and sources of loads that have steps. Raises InputError if it is not known which of the model's
    layers were recorded.
    """
    counts, layout, lost = _table(workload, model)
    rows = counts.astype(np.int64) if is_whole(counts) else counts
    path.write_text(json_text({"logical_count": rows.tolist()} | layout), encoding="utf-8")
    return lost


def write_torch(workload: RoutingTrace | ExpertLoad, path: Path, model: MoEModel | None = None) -> tuple[str, ...]:
    """The same as tensors: `rank`, `logical_count` int32[step, layer, expert] (int64 by rank, and for counts that need it)
    and `average_utilization_rate_over_window`, which is None. Fractions are rounded."""
    import torch  # which takes seconds to load

    counts, layout, lost = _table(workload, model)
    if not is_whole(counts):
        lost = (*lost, "the fractions of counts, which are rounded")
    kind = np.int64 if layout or counts.max() > MOST_COUNT else np.int32
    steps = np.rint(counts).astype(kind).reshape(-1, *counts.shape[-2:])
    content = {"rank": 0, "logical_count": torch.from_numpy(steps), "average_utilization_rate_over_window": None}
    torch.save(content | layout, path)
    return lost


def write_lmdeploy(workload: RoutingTrace | ExpertLoad, path: Path, model: MoEModel | None = None) -> tuple[str, ...]:
    """A bare JSON list [decoder layer][expert], dense rows zero, as LMDeploy 0.18.0 reads the loads that its load balancer
    places experts by (`LMDEPLOY_EPLB_EXPERTS_STATISTIC_FILE`).

    Cannot carry: tokens, steps, sources, fractions. Raises InputError if it is not known which of the model's layers were
    recorded.
    """
    loads, lost = loads_of(workload, model)
    numbers = layer_numbers(loads, model)
    rows = np.zeros((max(model.layers if model else 0, max(numbers) + 1), loads.num_experts), dtype=np.int64)
    rows[list(numbers)] = np.rint(loads.load)
    path.write_text(json_text(rows.tolist()), encoding="utf-8")
    fractions = () if is_whole(loads.load) else ("the fractions of counts, which are rounded",)
    parts = unsaid(loads, by_source="how much came from which rank", by_step="how loads changed from step to step")
    return (*lost, *parts, *fractions)


def _table(workload: RoutingTrace | ExpertLoad, model: MoEModel | None) -> tuple[np.ndarray, dict[str, str], tuple[str, ...]]:
    """(float64[..., decoder layer, expert], the key that says how it is laid out, phrases for the parts that it lacks)"""
    loads, lost = loads_of(workload, model)
    layers = layer_numbers(loads, model)
    counts, layout = loads.load, {}
    if loads.by_step is not None:
        counts = loads.by_step
        lost += () if loads.by_source is None else ("how much came from which rank",)
    elif loads.by_source is not None:
        counts, layout = loads.by_source, {"logical_count_layout": "rank_layer_expert"}
    table = np.zeros((*counts.shape[:-2], max(max(layers) + 1, model.layers if model else 0), counts.shape[-1]))
    table[..., layers, :] = counts
    return table, layout, lost


def write_table(workload: Workload, path: Path, model: MoEModel | None, save: _Save) -> tuple[str, ...]:
    """Routing as `token, layer, rank_in_topk, expert` with `sequence` and `source_rank` if they are known, loads as
    `layer, expert_0, …`, traffic as `layer, src, dst, bytes`.

    Cannot carry: of routing how many experts there are, phases and the numbers of layers, which count from 0; of loads
    the sources and steps; of traffic the bytes of a token copy.
    """
    match workload:
        case ExpertLoad():
            return write_loads(workload, path, model, save)
        case TrafficMatrix():
            layer, src, dst = (axis.ravel() for axis in np.indices(workload.bytes.shape))
            table = pa.table({"layer": layer, "src": src, "dst": dst, "bytes": workload.bytes.ravel()})
            with save(path, table.schema) as file:
                file.write_table(table)
            return ("how many bytes a token copy is",)
    names = ["token", "layer", "rank_in_topk", "expert"]
    names += [name for name in ("sequence", "source_rank") if getattr(workload, name) is not None]
    schema = pa.schema([(name, pa.int16() if name == "expert" else pa.int32()) for name in names])
    with save(path, schema) as file:
        for start in range(0, workload.tokens, TOKENS_AT_ONCE):
            part = workload.experts[start : start + TOKENS_AT_ONCE]
            token, layer, rank = (axis.ravel().astype(np.int32) for axis in np.indices(part.shape, np.int32))
            token += start
            columns = [token, layer, rank, part.ravel()]
            columns += [getattr(workload, name)[token].astype(np.int32) for name in names[4:]]
            file.write_table(pa.table(columns, schema=schema))
    fewer = () if workload.experts.max() + 1 == workload.num_experts else ("how many experts a layer has",)
    model_layers = "which layers of the model were recorded; they count from 0"
    phases = "which tokens were prefill and which decode"
    return fewer + unsaid(workload, phase=phases, model_layers=model_layers, scores=SCORES)


def write_loads(workload: RoutingTrace | ExpertLoad, path: Path, model: MoEModel | None, save: _Save) -> tuple[str, ...]:
    """Loads alone, also those of routing: a row for each layer, with the layer of the model, and a column for each expert."""
    loads, lost = loads_of(workload, model)
    names = ["layer", *(f"expert_{expert}" for expert in range(loads.num_experts))]
    columns = [np.asarray(loads.model_layers, np.int64), *loads.load.T]
    table = pa.table([np.ascontiguousarray(column) for column in columns], names=names)
    with save(path, table.schema) as file:
        file.write_table(table)
    parts = unsaid(loads, by_source="how much came from which rank", by_step="how loads changed from step to step")
    return lost + parts


WRITERS: dict[str, Writer] = {
    writer.name: writer
    for writer in (
        Writer("npz", ".npz", "a NumPy archive", _ANY, write_npz),
        Writer("npy", ".npy", "a NumPy array", (RoutingTrace, TrafficMatrix), write_npy),
        Writer("csv", ".csv", "a CSV table", _ANY, partial(write_table, save=pacsv.CSVWriter)),
        Writer("parquet", ".parquet", "a Parquet table", _ANY, partial(write_table, save=pq.ParquetWriter)),
        Writer("loads-csv", ".csv", "a CSV table of loads", _LOADS, partial(write_loads, save=pacsv.CSVWriter)),
        Writer("moe-balance", ".jsonl", "JSON lines of moe-balance", (RoutingTrace,), write_batches),
        Writer("sglang-statistics", ".json", "SGLang's statistics as JSON", _LOADS, write_json),
        Writer("lmdeploy", ".json", "the loads that LMDeploy places experts by", _LOADS, write_lmdeploy),
        Writer("sglang-recorder", ".pt", "a dump of SGLang's recorder", _LOADS, write_torch),
    )
}
"""By the name of the format that each writes. A suffix means the first writer that has it."""


@dataclass(frozen=True)
class Converted:
    """A recording that was written.

    path: the file
    format: its name
    lost: a phrase for each thing that the file does not say of the recording
    size: bytes
    """

    path: Path
    format: str
    lost: tuple[str, ...]
    size: int


def writer_for(path: Path, to: str | None = None) -> Writer:
    """The writer of this name, or the one that the file's suffix means; raises InputError."""
    if to is not None:
        if to not in WRITERS:
            raise InputError(f"there is no format {to!r} to write; there are {', '.join(WRITERS)}")
        return WRITERS[to]
    for writer in WRITERS.values():
        if path.suffix.lower() == writer.suffix:
            return writer
    suffixes = ", ".join(dict.fromkeys(writer.suffix for writer in WRITERS.values()))
    raise InputError(f"{path.name}: which format? End the name in {suffixes}, or name the format (--to)")


def write_recording(workload: Workload, path: Path, to: str | None = None, model: MoEModel | None = None) -> Converted:
    """Write a recording, whole or not at all; raises InputError if the format cannot carry one of its kind.

    to: one of `WRITERS`; without it the suffix decides
    model: the model that was recorded, for formats that number its layers
    """
    writer = writer_for(path, to)
    if not isinstance(workload, writer.carries):
        able = [other.name for other in WRITERS.values() if isinstance(workload, other.carries)]
        raise InputError(
            f"{workload.name}: is {KINDS[type(workload)]}, which {writer.title} cannot carry; {', '.join(able)} can"
        )
    with one_clear_line(path), replace_atomically(path) as draft:
        lost = writer.write(workload, draft, model)
        size = draft.stat().st_size
    return Converted(path, writer.name, lost, size)
