"""Routing as the simulator moe-balance reads it, in JSON lines, one a (layer, batch):
`{"layer", "batch_id", "origin_rows": [token], "topk_experts": [token][k], "topk_weights"?}`.

origin_rows says which data-parallel row held each token, and is [] if that is open. The converter from a server's recording
writes every request once for each row, `origin_row`, with the same experts: those are copies of one request, not more tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.formats.arrays import MAX_EXPERTS, MAX_K, MAX_LAYERS, MAX_RANKS, model_layers_named, routing_trace
from engine.formats.format import Format, Glance
from engine.formats.json_lines import records
from engine.formats.number_lists import array_of_lists
from engine.formats.source import Source, in_order, quoted, warning, without_ids
from engine.workload import Origin, RoutingTrace

NAME = "moe-balance"
_Key = tuple[str, str]
"""A batch's batch_id, and the row that it was copied for."""


@dataclass(frozen=True)
class _Batch:
    """The choices of a batch in one layer.

    experts: int16[token, k]
    row: int32[token], or None if that is open
    """

    source: Source
    place: str
    experts: np.ndarray
    row: np.ndarray | None


def read_batches(sources: Sequence[Source]) -> RoutingTrace:
    """A trace with a sequence for each batch, and with source ranks if every batch says which row held its tokens.

    Raises InputError if a batch lacks a layer, or has other tokens in one.
    """
    batches: dict[_Key, dict[int, _Batch]] = {}
    for source in in_order(sources):
        for number, record in records(source.path, arrays=True):
            layer, key, batch = _batch(source, f"line {number}", record)
            layers = batches.setdefault(key, {})
            if layer in layers:
                raise source.fault(f"layer {layer} of batch {quoted(key[0])} is there twice", batch.place)
            layers[layer] = batch
    numbers = sorted({layer for layers in batches.values() for layer in layers})
    if len(numbers) > MAX_LAYERS:
        raise sources[0].fault(f"names {len(numbers)} layers, at most {MAX_LAYERS} are possible")
    kept, copies = _without_copies(batches)
    blocks = [_block(key, layers, numbers) for key, layers in kept.items()]
    for block in blocks:
        if (k := block[0].experts.shape[1]) != (first := blocks[0][0].experts.shape[1]):
            raise block[0].source.fault(f"has k = {k}, the first batch {first}", block[0].place)
    experts = np.concatenate([np.stack([batch.experts for batch in block], axis=1) for block in blocks])
    sequence = np.repeat(np.arange(len(blocks)), [len(block[0].experts) for block in blocks])
    rows = None if copies or any(block[0].row is None for block in blocks) else [block[0].row for block in blocks]
    trace = routing_trace(sources[0], experts, sequence, None if rows is None else np.concatenate(rows))
    left_out = warning(
        "copies-left-out",
        f"{copies} of {len(batches)} batches are the same request written for another row of the mesh, left out; which rank "
        "held a token is open.",
    )
    origin = Origin(format=NAME, findings=(left_out,) if copies else ())
    return replace(trace, model_layers=model_layers_named(sources[0], numbers), origin=origin)


def _batch(source: Source, place: str, record: dict) -> tuple[int, _Key, _Batch]:
    layer, name = record.get("layer"), record.get("batch_id")
    if type(layer) is not int or layer < 0:
        raise source.fault(f"'layer' is {quoted(layer)}, not a number from 0", place)
    if type(name) not in (int, str):
        raise source.fault(f"'batch_id' is {quoted(name)}, neither a number nor a text", place)
    experts = array_of_lists(record.get("topk_experts"), 2)
    if experts is None or not experts.size or experts.shape[1] > MAX_K:
        raise source.fault(f"'topk_experts' must be whole numbers [tokens][k], k at most {MAX_K}", place)
    if experts.min() < -1 or experts.max() >= MAX_EXPERTS:
        raise source.fault(f"'topk_experts' holds ids outside 0 … {MAX_EXPERTS - 1}", place)
    row, rows = None, record.get("origin_rows")
    if isinstance(rows, np.ndarray) or rows:
        row = array_of_lists(rows, 1)
        if row is None or row.shape != (len(experts),) or row.min() < 0 or row.max() >= MAX_RANKS:
            raise source.fault(
                f"'origin_rows' must be empty or name the row of each of {len(experts)} tokens, 0 … {MAX_RANKS - 1}", place
            )
        row = row.astype(np.int32)
    return layer, (str(name), str(record.get("origin_row", ""))), _Batch(source, place, experts.astype(np.int16), row)


def _without_copies(batches: dict[_Key, dict[int, _Batch]]) -> tuple[dict[_Key, dict[int, _Batch]], int]:
    """(the batches, how many others were left out that are the same request written for another row)"""
    first_of: dict[str, _Key] = {}
    kept = {}
    for key, layers in batches.items():
        original = batches[first_of.setdefault(key[0], key)]
        same = key != first_of[key[0]] and layers.keys() == original.keys()
        if not (same and all(np.array_equal(layers[layer].experts, original[layer].experts) for layer in layers)):
            kept[key] = layers
    return kept, len(batches) - len(kept)


def _block(key: _Key, layers: dict[int, _Batch], numbers: list[int]) -> list[_Batch]:
    """The choices of a batch in all layers; raises InputError unless its tokens are the same in each."""
    reference = layers[min(layers)]
    for number in numbers:
        if number not in layers:
            raise reference.source.fault(f"batch {quoted(key[0])} has no line of layer {number}; every batch needs every layer")
        batch = layers[number]
        if batch.experts.shape != reference.experts.shape:
            raise batch.source.fault(
                f"has {len(batch.experts)} tokens with k = {batch.experts.shape[1]}, but in layer {min(layers)} batch "
                f"{quoted(key[0])} has {len(reference.experts)} with k = {reference.experts.shape[1]}",
                batch.place,
            )
        if not np.array_equal([] if batch.row is None else batch.row, [] if reference.row is None else reference.row):
            raise batch.source.fault(f"'origin_rows' differ from those of layer {min(layers)}", batch.place)
    return [layers[number] for number in numbers]


def _tells(glance: Glance) -> bool:
    return {"layer", "batch_id", "topk_experts"} <= glance.record.keys()


FORMATS = (Format(NAME, "a routing trace of moe-balance", "routing", _tells, read_batches, without_ids),)
