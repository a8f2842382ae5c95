"""Routing as the loggers of two vLLM forks write it (VLLM_LOG_MOE), in JSON lines: first
`{"type": "meta", "model_id", "top_k", "layers_logged", …}`, then a line a token
`{"type": "route", "req_id", "token_idx", "layer", "topk_ids": [k], "topk_weights": [k]}`.

A server logs one layer, so the layers of a recording are several files. token_idx restarts at every forward pass and req_id
counts passes: the place of a line among those of its layer is all that says which token it is of.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.formats.arrays import MAX_EXPERTS, MAX_K, MAX_LAYERS, first, model_layers_named, routing_trace
from engine.formats.format import Format, Glance
from engine.formats.json_lines import columns, line_of_row
from engine.formats.source import Source, error, ok, quoted, warning, without_ids
from engine.workload import Finding, Origin, RoutingTrace

NAME = "route-log"
_SCHEMA = pa.schema(
    [
        *(("type", pa.string()), ("token_idx", pa.int64()), ("layer", pa.int64()), ("topk_ids", pa.list_(pa.int64()))),
        ("topk_weights", pa.list_(pa.float64())),
    ]
)


@dataclass(frozen=True)
class _Layer:
    """The log of one layer.

    experts: int16[token, k]
    place_in_pass: int64[token]; the token_idx
    scores: float32[token, k]; None unless every line has as many as choices
    """

    source: Source
    number: int
    experts: np.ndarray
    place_in_pass: np.ndarray
    scores: np.ndarray | None


def read_routes(sources: Sequence[Source]) -> RoutingTrace:
    """A trace of the layers in all files; requests are not told apart.

    Raises InputError if layers have other numbers of tokens, or one is there twice.
    """
    layers: dict[int, _Layer] = {}
    for source in sources:
        for layer in _layers(source):
            if layer.number in layers:
                raise source.fault(
                    f"holds layer {layer.number}, and so does {layers[layer.number].source.path.name}; give one run's files"
                )
            layers[layer.number] = layer
    ordered = [layers[number] for number in sorted(layers)]
    reference = ordered[0]
    for layer in ordered:
        if layer.experts.shape != reference.experts.shape:
            raise layer.source.fault(
                f"has {len(layer.experts)} tokens with k = {layer.experts.shape[1]} in layer {layer.number}, but layer "
                f"{reference.number} ({reference.source.path.name}) {len(reference.experts)} with k = "
                f"{reference.experts.shape[1]}; log every layer while the same requests are served in the same order"
            )
    experts = np.stack([layer.experts for layer in ordered], axis=1)
    said = (Glance(source.path).record.get("num_experts") for source in sources)  # in the first line of one
    recorded = next((number for number in said if type(number) is int and 1 <= number <= MAX_EXPERTS), None)
    trace = routing_trace(sources[0], experts, recorded_experts=recorded)
    model_layers = model_layers_named(sources[0], [layer.number for layer in ordered])
    scores = [layer.scores for layer in ordered if layer.scores is not None]
    known = np.stack(scores, axis=1) if len(scores) == len(ordered) else None
    origin = Origin(format=NAME, findings=tuple(_findings(ordered)))
    return replace(trace, model_layers=model_layers, scores=known, origin=origin)


def _layers(source: Source) -> Iterator[_Layer]:
    """The layers in one file."""
    table = columns(source.path, _SCHEMA)
    row_of_line = np.flatnonzero(pc.fill_null(pc.equal(table["type"], "route"), False).to_numpy(zero_copy_only=False))
    if not len(row_of_line):
        raise source.fault("holds no lines of type 'route': no token was logged")
    table = table.take(pa.array(row_of_line))
    token_idx, layer = (_whole(source, table, key, row_of_line) for key in ("token_idx", "layer"))
    experts = _choices(source, table, row_of_line)
    scores = _scores(table, experts)
    numbers = np.unique(layer)
    if numbers[0] < 0 or len(numbers) > MAX_LAYERS:
        raise source.fault(f"layer numbers count from 0, and there are at most {MAX_LAYERS}; {quoted(numbers[0])} is not one")
    for number in numbers:
        rows = slice(None) if len(numbers) == 1 else layer == number
        yield _Layer(source, int(number), experts[rows], token_idx[rows], None if scores is None else scores[rows])


def _whole(source: Source, table: pa.Table, key: str, row_of_line: np.ndarray) -> np.ndarray:
    """The numbers under a key, int64[line]; raises InputError for a line without one."""
    if table[key].null_count:
        row = pc.index(pc.is_null(table[key]), True).as_py()
        raise source.fault(f"needs a whole number '{key}'", line_of_row(source.path, int(row_of_line[row])))
    return table[key].to_numpy()


def _choices(source: Source, table: pa.Table, row_of_line: np.ndarray) -> np.ndarray:
    """The choices of every line, int16[line, k]; raises InputError."""
    lengths = pc.fill_null(pc.list_value_length(table["topk_ids"]), 0).to_numpy()
    k = int(lengths[0])
    odd = lengths != k
    if odd.any() or not 1 <= k <= MAX_K:
        row = int(odd.argmax())
        text = f"'topk_ids' has {lengths[row]} experts, the first line {k}; every token has as many, 1 … {MAX_K}"
        raise source.fault(text, line_of_row(source.path, int(row_of_line[row])))
    said = Glance(source.path).record.get("top_k")
    if isinstance(said, int) and said != k:
        raise source.fault(f"'topk_ids' has {k} experts, but the first line says top_k is {said}")
    flat = pc.list_flatten(table["topk_ids"])
    ids = pc.fill_null(flat, MAX_EXPERTS).to_numpy().reshape(-1, k)
    faulty = (ids < -1) | (ids >= MAX_EXPERTS)
    if faulty.any():
        row, choice = first(faulty)
        raise source.fault(
            f"expert {flat[row * k + choice].as_py()} is out of range 0 … {MAX_EXPERTS - 1}",
            line_of_row(source.path, int(row_of_line[row])),
        )
    return ids.astype(np.int16)


def _scores(table: pa.Table, experts: np.ndarray) -> np.ndarray | None:
    """The scores of every line, float32[line, k]; None unless all are there and finite."""
    flat = pc.list_flatten(table["topk_weights"])
    lengths = pc.fill_null(pc.list_value_length(table["topk_weights"]), -1).to_numpy()
    if (lengths != experts.shape[1]).any() or flat.null_count:
        return None
    scores = flat.to_numpy().reshape(experts.shape).astype(np.float32)
    return scores if np.isfinite(scores).all() else None


def _findings(layers: list[_Layer]) -> Iterator[Finding]:
    numbers = ", ".join(str(layer.number) for layer in layers[:8]) + (" …" if len(layers) > 8 else "")
    yield ok(
        "layers-logged",
        f"Layer {numbers} was logged; a plan from this recording is of no other layer."
        if len(layers) == 1
        else f"{len(layers)} layers were logged: {numbers}.",
    )
    reference = layers[0]
    apart = [at for at, layer in enumerate(layers) if not np.array_equal(layer.place_in_pass, reference.place_in_pass)]
    if apart:
        layer = layers[apart[0]]
        token = int((layer.place_in_pass != reference.place_in_pass).argmax())
        yield error(
            "layers-not-aligned",
            f"Layers {reference.number} and {layer.number} were logged over other forward passes (they part at token "
            f"{token}): a row is not one token. Loads of each layer hold, affinity between layers does not; log every "
            "layer while the same requests are served one at a time, in the same order.",
            rows=(token, len(layer.place_in_pass)),
            layers=tuple(apart),
        )
    elif len({layer.source.path for layer in layers}) > 1:
        yield warning(
            "layers-of-several-runs",
            "Each layer was logged in a run of its own. Their passes have the same numbers of tokens, but nothing else "
            "shows that a row is the same token in every layer; affinity between layers holds only if it is.",
        )


def _tells(glance: Glance) -> bool:
    record = glance.record
    is_meta = record.get("type") == "meta" and ("top_k" in record or "layers_logged" in record)
    return is_meta or (record.get("type") == "route" and "topk_ids" in record)


FORMATS = (Format(NAME, "a routing log of a vLLM fork", "routing", _tells, read_routes, without_ids),)
