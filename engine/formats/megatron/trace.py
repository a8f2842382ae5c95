"""Megatron-Core's router traces (`--moe-routing-trace-path`): `router_trace_rank{r}.jsonl`, the choices of a rank's tokens.

Tokens of a micro-batch (one record a layer; several a step in training) are put together over layers and pipeline stages. The
MTP block is never mixed with the decoder, and tokens that several ranks recorded count once.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from engine.formats.arrays import routing_trace
from engine.formats.format import Format
from engine.formats.megatron.records import Records, Stages, pipeline_stages, read_records
from engine.formats.source import Source, error, ok, warning
from engine.workload import Finding, Origin, RoutingTrace

NAME = "megatron-router-trace"
_TELLING_COPIES = 4
"""Copies of each expert that are no accident if all experts have as many."""
MOST_TEXT = 512 * 1024**2
"""Limit of all ranks' files in bytes: some 13 million rows of 8 choices."""


@dataclass(frozen=True)
class MicroBatches:
    """Tokens that went through all layers together, in order of steps and then of sources.

    step, tokens: int64[micro-batch]
    source: int64[micro-batch]; the place among the ranks of a stage
    experts: int16[token, layer, k]
    incomplete: number that were left out for want of a layer, or with other numbers of tokens in it
    why: the reason, in words
    """

    step: np.ndarray
    source: np.ndarray
    tokens: np.ndarray
    experts: np.ndarray
    incomplete: int
    why: str


def read(sources: Sequence[Source]) -> RoutingTrace:
    """The decoder's trace; its source ranks are data-parallel ranks. Raises InputError, also if the number of pipeline stages
    is open."""
    source = sources[0]
    if sum(file.path.stat().st_size for file in sources) > MOST_TEXT:
        raise source.fault(
            f"is one of {len(sources)} files of more than {MOST_TEXT // 1024**2} MB together; record fewer steps "
            "(--moe-routing-trace-max-…)"
        )
    ranks = sorted((read_records(file) for file in sources), key=lambda records: records.rank)
    for before, records in pairwise(ranks):
        if before.rank == records.rank:
            raise records.source.fault(f"is of rank {records.rank}, as is {before.source.path.name}; give one run's files")
    decoder = [records for records in ranks if not records.is_mtp.all()]
    if not decoder:
        raise source.fault("has layers of multi-token prediction (MTP) alone; give the decoder's ranks too")
    if len(widths := sorted({records.experts.shape[1] for records in decoder})) > 1:
        raise source.fault(f"its ranks have {widths[0]} and {widths[-1]} experts per token; give the files of one run")
    stages = pipeline_stages(source, decoder)
    batches = _micro_batches(source, decoder, stages)
    kept, copies, recomputed = _first_seen(batches)
    experts = batches.experts if kept.all() else batches.experts[np.repeat(kept, batches.tokens)]
    source_rank = np.unique(batches.source[kept], return_inverse=True)[1]
    trace = routing_trace(source, experts, source_rank=np.repeat(source_rank, batches.tokens[kept]))
    findings = tuple(_findings(stages, ranks, batches, copies, recomputed))
    if _is_padded(trace):
        findings += (
            error(
                "padded-to-capacity",
                "Every expert has as many tokens as every other in every layer: inputs were padded to a capacity "
                "(--moe-pad-expert-input-to-capacity), and the tracer writes the padded places, under tokens that they do not "
                "belong to. These are no router's choices; record without padding.",
            ),
        )
    return replace(trace, model_layers=stages.model_layers, origin=Origin(format=NAME, findings=findings))


def _micro_batches(source: Source, ranks: Sequence[Records], stages: Stages) -> MicroBatches:
    """The tokens of all ranks with their layers joined.

    In the table, int64[7, record], the first three rows name a micro-batch (step, source, which one of the step), the others
    say where its tokens in a layer are: column of the layer, rank's file, row there, and how many.
    """
    width = len(ranks) // len(stages.layers)
    first_column = np.cumsum([0, *map(len, stages.layers)])
    parts = []
    for place, records in enumerate(ranks):
        own = np.flatnonzero(~records.is_mtp)
        step, layer = records.step[own], records.layer[own]
        # Which micro-batch of its step: how often the same layer was recorded before in the same step.
        order, at = np.lexsort((layer, step)), np.arange(len(own))
        first = np.r_[True, (np.diff(step[order]) != 0) | (np.diff(layer[order]) != 0)]
        occurrence = np.empty(len(own), np.int64)
        occurrence[order] = at - np.maximum.accumulate(np.where(first, at, 0))
        column = first_column[place // width] + np.searchsorted(stages.layers[place // width], layer)
        name = step, np.full(len(own), place % width), occurrence
        parts.append(np.stack([*name, column, np.full(len(own), place), records.start[own], records.tokens[own]]))
    table = np.concatenate(parts, axis=1)
    table = table[:, np.lexsort(table[[3, 2, 1, 0]])]
    starts = np.flatnonzero(np.r_[True, (table[:3, 1:] != table[:3, :-1]).any(axis=0)])
    tokens = table[6]
    layers = int(first_column[-1])
    counts = np.diff(np.r_[starts, table.shape[1]])
    lacks = counts < layers
    other = np.maximum.reduceat(tokens, starts) != np.minimum.reduceat(tokens, starts)
    step, last = table[:2, starts], np.full(table[1].max() + 1, -1)
    np.maximum.at(last, step[1], step[0])
    amid = lacks & (step[0] < last[step[1]])  # the run may have ended in its last step
    if amid.any():  # which of a step's micro-batches lacks the layer is not known, so none of them can be put together
        _, name = np.unique(step, axis=1, return_inverse=True)
        other |= np.isin(name, name[lacks])
    whole = ~lacks & ~other
    begun = starts[whole & (tokens[starts] > 0)]
    unrecorded = _unrecorded(table, last, layers)
    if not len(begun):
        raise source.fault(
            "no step has all layers with the same tokens; give the files of all ranks of one run. A layer in which a capacity "
            f"factor dropped choices is not recorded{unrecorded}: record without one"
        )
    tokens_of = tokens[begun]
    return MicroBatches(
        step=table[0, begun],
        source=table[1, begun],
        tokens=tokens_of,
        experts=_gathered(ranks, table[4:6, begun[:, None] + np.arange(layers)], tokens_of),
        incomplete=int((~whole).sum()),
        why=_why(
            {table[3, start : start + count].tobytes() for start, count in zip(starts[amid], counts[amid], strict=True)},
            lacks,
            unrecorded,
        ),
    )


def _unrecorded(table: np.ndarray, last: np.ndarray, layers: int) -> str:
    """The layers of micro-batches that were not recorded before the last steps, in words; "" for none.

    table: int64[7, record] as in `_micro_batches`
    last: int64[source]; the last step of each
    """
    step, source, occurrence = table[:3]
    batches = np.zeros(len(last), np.int64)
    np.maximum.at(batches, source, occurrence + 1)
    before = step < last[source]
    expected = int(batches[np.unique(table[:2, before], axis=1)[1]].sum()) * layers
    missing = expected - int(before.sum())
    return (
        f", here at least {missing} of {expected} layers of micro-batches ({100 * missing / expected:.0f} %)" if missing else ""
    )


def _why(layers: set[bytes], lacks: np.ndarray, unrecorded: str) -> str:
    """The reason for which micro-batches are incomplete, as far as their layers tell.

    layers: those of the micro-batches that lack one before the last step
    lacks: bool[micro-batch]; True for one that lacks a layer
    unrecorded: number of layers that were left out, in words
    """
    if len(layers) > 1:
        return (
            "not always the same layer: the tracer leaves out a layer in which a capacity factor dropped choices "
            f"(--moe-expert-capacity-factor){unrecorded}, so only steps without drops are left; record without one"
        )
    if layers:
        return "always the same: layers in CUDA graphs are not recorded (--cuda-graph-impl none)"
    return "the run ended in its last step" if lacks.any() else "files of several runs may be mixed"


def _gathered(ranks: Sequence[Records], origin: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The choices, int16[token, layer, k].

    origin: int64[2, micro-batch, layer]; the file, and the row in it where tokens begin
    tokens: int64[micro-batch]
    """
    file, row = origin
    begin = np.cumsum(tokens) - tokens
    experts = np.empty((int(tokens.sum()), file.shape[1], ranks[0].experts.shape[1]), np.int16)
    for place, records in enumerate(ranks):
        for column in np.flatnonzero((file == place).any(axis=0)):
            mine = np.flatnonzero(file[:, column] == place)
            within = np.arange(tokens[mine].sum()) - np.repeat(np.cumsum(tokens[mine]) - tokens[mine], tokens[mine])
            into = within + np.repeat(begin[mine], tokens[mine])
            experts[into, column] = records.experts[within + np.repeat(row[mine, column], tokens[mine])]
    return experts


def _is_padded(trace: RoutingTrace) -> bool:
    """True if the rows are places of experts that were padded to a capacity: equally many of each, cut into rows of k in the
    order of tokens and experts, so that rows begin amid a token's and descend. Routers' own choices are not that even."""
    even = (trace.load == trace.load[:, :1]).all() and trace.load.min() >= _TELLING_COPIES
    return bool(even and (np.diff(trace.experts, axis=2) <= 0).any())


def _first_seen(batches: MicroBatches) -> tuple[np.ndarray, int, int]:
    """(True for every micro-batch that counts, bool[micro-batch], number of sources that recorded another's tokens, number of
    micro-batches recorded again when activations were recomputed)"""
    begin = np.cumsum(batches.tokens) - batches.tokens
    digests = [
        hashlib.blake2b(np.ascontiguousarray(batches.experts[start : start + number]), digest_size=16).digest()
        for start, number in zip(begin.tolist(), batches.tokens.tolist(), strict=True)
    ]
    kept = np.ones(len(digests), bool)
    seen: set[tuple[int, int, bytes]] = set()
    of_source: dict[int, dict[int, list[bytes]]] = {}
    for place, key in enumerate(zip(batches.source.tolist(), batches.step.tolist(), digests, strict=True)):
        kept[place] = key not in seen
        seen.add(key)
        if kept[place]:
            of_source.setdefault(key[0], {}).setdefault(key[1], []).append(key[2])
    recomputed = int((~kept).sum())
    common = sorted(set.intersection(*(set(steps) for steps in of_source.values())))
    firsts: dict[tuple, int] = {}
    for source, steps in of_source.items():
        content = tuple(tuple(steps[step]) for step in common) or (source,)
        firsts.setdefault(content, source)
    kept &= np.isin(batches.source, list(firsts.values()))
    return kept, len(of_source) - len(firsts), recomputed


def _findings(
    stages: Stages, all_ranks: Sequence[Records], batches: MicroBatches, copies: int, recomputed: int
) -> Iterator[Finding]:
    ranks = [records for records in all_ranks if not records.is_mtp.all()]
    if len(stages.layers) > 1:
        yield ok(
            "pipeline-stages", f"{len(ranks)} ranks are {len(stages.layers)} pipeline stages, whose layers follow one another."
        )
    missing = sorted(set(range(ranks[-1].rank + 1)) - {records.rank for records in ranks})
    if missing:
        yield warning(
            "missing-ranks",
            f"The files of {len(missing)} ranks are missing (first: rank {missing[0]}), so their tokens are not counted; "
            "add them.",
        )
    if stages.model_layers is None:
        yield warning(
            "layer-numbering",
            "Layers may be counted from 0 or from 1, so which model layers these are is not known; open the model first "
            "(--model).",
        )
    if copies:
        yield warning(
            "tensor-parallel-copies",
            f"{copies} ranks recorded the same tokens as another one, as tensor-parallel ranks do; their copies are left out.",
        )
    if recomputed:
        yield warning(
            "recomputed-copies",
            f"{recomputed} micro-batches were recorded twice in a step, as recomputing activations does; the second is "
            "left out.",
        )
    if batches.incomplete:
        yield warning(
            "incomplete-steps",
            f"{batches.incomplete} of {len(batches.tokens) + batches.incomplete} micro-batches lack a layer, or have other "
            f"numbers of tokens in it, and are left out with those that cannot be told from them; {batches.why}.",
        )
    if mtp := sum(int(records.tokens[records.is_mtp].sum()) for records in all_ranks):
        yield warning(
            "mtp-left-out",
            f"{mtp} rows of multi-token prediction (MTP) are left out: it is a layer of its own, with other tokens than "
            "the decoder's.",
        )
    if any(records.sidecars for records in all_ranks):
        yield ok(
            "sidecars", "Hidden states or logits were saved beside it (.bin); they are not read, the choices are all here."
        )


FORMATS = (
    Format(
        NAME,
        "Megatron-Core's router trace",
        "routing",
        lambda glance: {"step", "layer", "rank", "top_indices"} <= glance.record.keys(),
        read,
        lambda path: re.sub(r"rank\d+", "rank", path.name),
    ),
)
