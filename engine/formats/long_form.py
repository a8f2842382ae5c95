"""Tables with one row a fact, as columns: (token, layer, expert) is one routing choice, (layer, expert, count) one load,
(layer, src, dst, bytes) one flow. Whole columns are checked at once; only a fault looks for its row."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from engine.formats import arrays
from engine.formats.source import Source
from engine.workload import DECODE, PREFILL, ExpertLoad, RoutingTrace, TrafficMatrix

Columns = dict[str, np.ndarray]
PlaceOfRow = Callable[[int], str]


@dataclass(frozen=True)
class Form:
    """The columns that make a table.

    title: in a sentence
    telling: any of them gives it away
    needed: all of them must be there
    optional: read if they are there
    """

    title: str
    telling: tuple[str, ...]
    needed: tuple[str, ...]
    optional: tuple[str, ...]


ROUTING = Form(
    "a routing log", ("token", "expert"), ("token", "layer", "expert"), ("rank_in_topk", "sequence", "source_rank", "phase")
)
LOADS = Form("expert loads", ("count",), ("layer", "expert", "count"), ())
TEXTS = ("sequence", "phase")
"""Columns that may hold texts: ids of requests, and the words of `PHASES`."""
PHASES = {"prefill": 0, "extend": 0, "prompt": 0, "true": 0, "decode": 1, "generate": 1, "false": 1}
"""Words of phases; true and false are those of `is_prefill`."""
ALSO_CALLED = {
    "token": ("token_id", "token_idx", "token_index"),
    "layer": ("layer_id", "layer_idx", "layer_index", "moe_layer"),
    "expert": ("expert_id", "expert_idx", "expert_index"),
    "rank_in_topk": ("topk_rank", "topk_idx", "k_idx"),
    "sequence": ("sequence_id", "seq_id", "request", "request_id"),
    "source_rank": ("src_rank", "dp_rank"),
    "count": ("counts", "token_count", "num_tokens", "tokens", "load"),
}
"""Other names of columns, by the one that counts where a table has it."""
TRAFFIC = Form("traffic", ("src", "dst", "bytes"), ("src", "dst", "bytes"), ("layer",))


def routing_from_columns(source: Source, columns: Columns, place: PlaceOfRow) -> RoutingTrace:
    """A trace from columns, int64[row]: `token`, `layer`, `expert` (-1 = no choice) and any of `rank_in_topk`, `sequence`,
    `source_rank` and `phase` (0 prefill, 1 decode).

    Tokens and layers are renumbered 0, 1, … in ascending order. Without `rank_in_topk` a token's choices are ranked as
    they come. Every token must have the same number of rows in every layer. Tokens may be numbered within their sequences.
    """
    _check_range(source, columns, "token", 0, 2**62, place)
    _check_range(source, columns, "layer", 0, 2**62, place)
    limit = arrays.MAX_EXPERTS if source.num_experts is None else source.num_experts + source.zero_experts
    _check_range(source, columns, "expert", -1, limit, place)
    columns, of_sequence = _numbered_through(columns)
    tokens, token = _renumber(columns["token"])
    layers, layer = _renumber(columns["layer"])
    if len(layers) > arrays.MAX_LAYERS:
        raise source.fault(f"names {len(layers)} layers, at most {arrays.MAX_LAYERS} are possible")
    sequence, source_rank, phase = (
        _column_of_token(source, columns, name, tokens, token, place) for name in ("sequence", "source_rank", "phase")
    )
    if phase is not None and phase.max() > DECODE:
        row = int((columns["phase"] > DECODE).argmax())
        raise source.fault(f"phase must be {PREFILL} (prefill) or {DECODE} (decode), not {columns['phase'][row]}", place(row))
    pair = token * len(layers) + layer

    def name_of(pair: int) -> str:
        token = int(tokens[pair // len(layers)])
        named = f"sequence {token // of_sequence}, token {token % of_sequence}" if of_sequence else f"token {token}"
        return f"{named}, layer {layers[pair % len(layers)]}"

    pairs, rows = len(tokens) * len(layers), len(pair)
    if pairs > rows or not (counts := np.bincount(pair, minlength=pairs)).all():
        present = np.append(np.unique(pair), -1)
        missing = int((present != np.arange(len(present))).argmax())
        raise source.fault("there is no row; every token needs every layer (expert −1 for no choice)", name_of(missing))
    if "rank_in_topk" in columns:
        _check_range(source, columns, "rank_in_topk", 0, arrays.MAX_K, place)
        rank = columns["rank_in_topk"]
        _check_distinct(source, pair * arrays.MAX_K + rank, lambda row: f"{name_of(pair[row])}, rank {rank[row]}", place)
    else:
        order = np.argsort(pair, kind="stable")
        rank = np.empty(rows, np.int64)
        rank[order] = np.arange(rows) - (np.cumsum(counts) - counts)[pair[order]]
    k = int(np.bincount(np.minimum(counts, arrays.MAX_K + 1)).argmax())
    if k > arrays.MAX_K:
        raise source.fault(f"has {counts[0]} rows, at most {arrays.MAX_K} are possible", name_of(0))
    if (uneven := counts != k).any():
        at = int(uneven.argmax())
        raise source.fault(
            f"has {counts[at]} rows where most have {k}; every token needs as many choices in every layer "
            "(expert −1 for no choice)",
            name_of(at),
        )
    if rank.max() >= k:
        row = int((rank >= k).argmax())
        raise source.fault(f"rank_in_topk is {rank[row]}; it counts from 0, with k = {k} up to {k - 1}", place(row))
    experts = np.empty(pairs * k, np.int16)
    experts[pair * k + rank] = columns["expert"]
    trace = arrays.routing_trace(source, experts.reshape(len(tokens), len(layers), k), sequence, source_rank)
    return trace if phase is None else replace(trace, phase=phase.astype(np.int8))


def _numbered_through(columns: Columns) -> tuple[Columns, int]:
    """(columns with tokens that are numbered through the recording, numbers for the tokens of a sequence: 0 if they were)"""
    if "sequence" not in columns or columns["sequence"].min() < 0:
        return columns, 0
    token, sequence = columns["token"], columns["sequence"]
    value, at, of_sequence = np.empty_like(token), _renumber(token)[1], int(token.max()) + 1
    value[at] = sequence
    if (value[at] == sequence).all() or of_sequence * (int(sequence.max()) + 1) >= 2**62:
        return columns, 0
    return columns | {"token": sequence * of_sequence + token}, of_sequence


def loads_from_columns(source: Source, columns: Columns, place: PlaceOfRow) -> ExpertLoad:
    """Loads from columns: `layer`, `expert` int64[row] and `count` float64[row]; several rows of an expert add up, and one
    without a row has no tokens."""
    _check_range(source, columns, "layer", 0, arrays.MAX_LAYERS * 10, place)
    known = source.num_experts and source.num_experts + source.zero_experts
    _check_range(source, columns, "expert", 0, known or arrays.MAX_EXPERTS, place)
    arrays.check_amounts(source, columns["count"], "column 'count'", lambda index: place(index[0]))
    layers, layer = _renumber(columns["layer"])
    highest = int(columns["expert"].max()) + 1
    of_model = source.num_experts or (source.model.experts if source.model else 0)
    experts = of_model if highest <= of_model else known or highest
    load = np.bincount(layer * experts + columns["expert"], columns["count"], len(layers) * experts)
    return arrays.expert_load(source, load.reshape(len(layers), experts), tuple(layers.tolist()))


def traffic_from_columns(source: Source, columns: Columns, place: PlaceOfRow) -> TrafficMatrix:
    """Traffic from columns: `src`, `dst` int64[row], `bytes` float64[row] and `layer` int64[row] (without it: one layer).
    Ranks are 0 … the largest one named; a pair that has no row sends nothing."""
    src, dst = columns["src"], columns["dst"]
    for name in ("src", "dst"):
        _check_range(source, columns, name, 0, 2**62, place)
    if "layer" in columns:
        _check_range(source, columns, "layer", 0, 2**62, place)
    ranks = int(max(src.max(), dst.max())) + 1
    arrays.check_ranks(source, ranks)
    layers, layer = _renumber(columns.get("layer", np.zeros_like(src)))
    arrays.check_amount(source, "traffic", (len(layers), ranks, ranks))
    key = (layer * ranks + src) * ranks + dst
    _check_distinct(source, key, lambda row: f"layer {layers[layer[row]]}, from rank {src[row]} to rank {dst[row]}", place)
    arrays.check_amounts(source, columns["bytes"], "column 'bytes'", lambda index: place(index[0]))
    amounts = np.zeros(len(layers) * ranks**2)
    amounts[key] = columns["bytes"]
    return arrays.traffic_matrix(source, amounts.reshape(len(layers), ranks, ranks))


def _check_range(source: Source, columns: Columns, name: str, low: int, end: int, place: PlaceOfRow) -> None:
    """Raise InputError unless every number of an int64 column is in low … end − 1."""
    column = columns[name]
    if column.min() >= low and column.max() < end:
        return
    row = int(((column < low) | (column >= end)).argmax())
    if name == "expert" and column[row] >= 0:
        raise source.fault(f"expert {column[row]} is out of range, experts are 0 … {end - 1}", place(row))
    least = "−1 (no choice)" if low == -1 else "0"
    most = f" and at most {end - 1}" if name == "rank_in_topk" else ""
    raise source.fault(f"column '{name}' must be at least {least}{most}, not {column[row]}", place(row))


def _renumber(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the distinct values in ascending order, int64[row] the index of every row's value among them)"""
    low, span = int(column.min()), int(column.max()) - int(column.min()) + 1
    if span > 2 * len(column) + 1000:
        return np.unique(column, return_inverse=True)
    # Values lie close together, so a look-up table beats sorting by far.
    from_low = column - low if low else column
    present = np.zeros(span, bool)
    present[from_low] = True
    values = np.flatnonzero(present) + low
    return values, from_low if len(values) == span else (np.cumsum(present) - 1)[from_low]


def _column_of_token(
    source: Source, columns: Columns, name: str, tokens: np.ndarray, token: np.ndarray, place: PlaceOfRow
) -> np.ndarray | None:
    """A column by token, int64[token], from its rows, which must agree for each token; None without such a column."""
    if (column := columns.get(name)) is None:
        return None
    _check_range(source, columns, name, 0, 2**31, place)
    value = np.empty(len(tokens), np.int64)
    value[token] = column
    differs = value[token] != column
    if differs.any():
        row = int(differs.argmax())
        raise source.fault(
            f"token {tokens[token[row]]} has {name} {column[row]} here and {value[token[row]]} elsewhere; "
            "number the tokens through the whole recording",
            place(row),
        )
    return value


def _check_distinct(source: Source, key: np.ndarray, describe: Callable[[int], str], place: PlaceOfRow) -> None:
    """Raise InputError if a number of int64[row] appears twice."""
    if np.all(key[1:] > key[:-1]):
        return
    order = np.argsort(key, kind="stable")
    again = key[order[1:]] == key[order[:-1]]
    if again.any():
        row = int(order[1:][again].min())
        raise source.fault(f"a second row for {describe(row)}", place(row))
