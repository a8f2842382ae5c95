"""TensorRT-LLM's expert statistics: how often every rank chose every expert, by iteration and model layer.

`EXPERT_STATISTIC_ITER_RANGE=a-b` records the iterations a … b − 1 into `EXPERT_STATISTIC_PATH`, in the files that
`engine.formats.tensorrt_llm.files` describes. Ranks count before dispatch: with attention data parallelism each its own tokens,
without it each all tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from engine.finding import Finding, Origin
from engine.formats.arrays import expert_load
from engine.formats.format import Format
from engine.formats.slots import fold_slots
from engine.formats.source import Source
from engine.formats.tensorrt_llm.files import (
    Files,
    Meta,
    is_counts,
    is_meta,
    is_tokens,
    read_meta,
    read_tokens,
    sort_files,
)
from engine.formats.tensorrt_llm.slots import Slots, about_slots, slots_counted
from engine.formats.tensorrt_llm.sums import Sums, add_up
from engine.workload import ExpertLoad

NAME = "tensorrt-llm-statistics"


def read(sources: Sequence[Source]) -> ExpertLoad:
    """Loads of the decoder's MoE layers, by source rank and by spans of iterations. Raises InputError.

    The MTP layer, which comes after the model's last one, is left out, and so are copies of tensor-parallel ranks; findings
    say so.
    """
    files = sort_files(sources)
    source = next(iter(files.counts.values())).source
    meta = read_meta(files.meta) if files.meta else None
    _check_model(source, meta)
    sums = add_up(files.counts, meta.ids if meta else None)
    copies = _copies(sums)
    by_source = _by_source(sums, copies, meta)
    layers = _decoder_layers(source, sums)
    total = sums.by_span.sum(axis=0) / copies[:, None]
    slots = slots_counted(source, ids := total.shape[1])
    load = _of_experts(total[layers], source, sums.layers[layers], slots)
    findings = (
        *about_slots(slots, ids, source),
        *_about_ranks(sums, copies, by_source is not None, meta),
        *_about_layers(source, sums.layers, layers, total),
        *_about_tokens(files, sums, meta),
        *_about_files(files),
    )
    workload = expert_load(source, load, tuple(sums.layers[layers].tolist()))
    kept = layers[load.any(axis=1)]
    parts = {"by_source": by_source, "by_step": sums.by_span / copies[:, None] if len(sums.by_span) > 1 else None}
    return replace(
        workload,
        **{
            name: _of_experts(counts[:, kept], source, sums.layers[kept], slots)
            for name, counts in parts.items()
            if counts is not None
        },
        origin=Origin(format=NAME, findings=findings),
    )


def _of_experts(counts: np.ndarray, source: Source, layers: np.ndarray, slots: Slots | None) -> np.ndarray:
    """float64[..., layer, expert] of float64[..., layer, id]. layers: int64[layer], model layers."""
    if slots is None:
        return counts
    rows = np.searchsorted(source.model.moe_layers, layers)
    return fold_slots(counts, slots.expert[rows], source.model.experts)


def _check_model(source: Source, meta: Meta | None) -> None:
    """Raise InputError for a recording that is not of the open model, which decides what its ids and layers are."""
    model = source.model
    if meta and model and meta.experts_per_token != model.experts_per_token:
        raise source.fault(
            f"was recorded with {meta.experts_per_token} experts per token, {model.name} has {model.experts_per_token}; give "
            "the model that was recorded"
        )


def _copies(sums: Sums) -> np.ndarray:
    """int64[layer]: how many ranks counted the same tokens. Tensor-parallel ranks without attention data parallelism do; those
    of a pipeline stage have its layers."""
    copies = np.ones(len(sums.layers), np.int64)
    for layers in set(sums.layers_of_rank):
        digests = {
            digest for digest, own in zip(sums.digest_of_rank, sums.layers_of_rank, strict=True) if own == layers
        }
        others = any(layers & own for own in sums.layers_of_rank if own != layers)
        if len(digests) == 1 and not others:
            copies[np.isin(sums.layers, list(layers))] = sums.layers_of_rank.count(layers)
    return copies


def _by_source(sums: Sums, copies: np.ndarray, meta: Meta | None) -> np.ndarray | None:
    """float64[source rank, layer, id], where every rank is there and counted tokens of its own. Ranks with other layers are
    other pipeline stages, in which a source has the same place."""
    stages = Counter(sums.layers_of_rank)
    disjoint = sum(map(len, stages)) == len(sums.layers)
    if len(set(stages.values())) > 1 or not disjoint or copies.max() > 1 or sums.ranks != tuple(range(len(sums.ranks))):
        return None
    width = len(sums.ranks) // len(stages)
    if width < 2 or (meta and meta.ranks and width < meta.ranks):
        return None
    by_source, place_in = np.zeros((width, *sums.by_rank.shape[1:])), Counter()
    for layers, amounts in zip(sums.layers_of_rank, sums.by_rank, strict=True):
        by_source[place_in[layers]] += amounts
        place_in[layers] += 1
    return by_source


def _decoder_layers(source: Source, sums: Sums) -> np.ndarray:
    """int64[...]: places in `sums.layers` of the decoder's layers, which are all of them where no model says otherwise."""
    model = source.model
    if model is None:
        return np.arange(len(sums.layers))
    decoder = np.flatnonzero(sums.layers < model.layers)
    dense = sorted(set(sums.layers.tolist()) & set(model.dense_layers))
    if dense or not len(decoder):
        which = f"layer {dense[0]}, which is dense in" if dense else f"layer {sums.layers[0]}, but no MoE layer of"
        raise source.fault(f"has counts of {which} {model.name}; give the model that was recorded")
    return decoder


def _about_layers(source: Source, recorded: np.ndarray, decoder: np.ndarray, total: np.ndarray) -> Iterator[Finding]:
    """recorded: int64[layer], model layers; decoder: int64[...], places in it; total: float64[layer, id]"""
    further = np.setdiff1d(np.arange(len(recorded)), decoder)
    if len(further):
        copies = total[further].sum()
        numbers = ", ".join(map(str, recorded[further][:4].tolist()))
        yield Finding(
            severity="warning",
            code="mtp-left-out",
            message=(
                f"Layer {numbers} comes after the model's last one, as that of multi-token prediction (MTP) does; its "
                f"{copies:.0f} token copies are left out. A plan for it needs a row of its own."
            ),
        )
    if source.model and (missing := sorted(set(source.model.moe_layers) - set(recorded.tolist()))):
        yield Finding(
            severity="error",
            code="missing-layers",
            message=(
                f"{len(missing)} MoE layers of {source.model.name} are not in the recording (first: model layer {missing[0]}); "
                "add the files of all ranks, or record again."
            ),
        )


def _about_ranks(sums: Sums, copies: np.ndarray, sources: bool, meta: Meta | None) -> Iterator[Finding]:
    if copies.max() > 1:
        yield Finding(
            severity="warning",
            code="tensor-parallel-copies",
            message=(
                f"{copies.max()} ranks counted the same tokens, as tensor-parallel ranks do without attention data "
                "parallelism; they count once here. Which rank a token came from is not known."
            ),
        )
        return
    missing = sorted(set(range(sums.ranks[-1] + 1)) - set(sums.ranks))
    if missing or (meta and meta.ranks and len(sums.ranks) < meta.ranks):
        expected = max(meta.ranks or 0 if meta else 0, sums.ranks[-1] + 1)
        yield Finding(
            severity="warning",
            code="missing-ranks",
            message=(
                f"Files of {len(sums.ranks)} of {expected} ranks are here, so some tokens are not counted; add those of the "
                "others."
            ),
        )
    elif sources:
        yield Finding(
            severity="ok", code="source-ranks", message="Every rank counted its own tokens, so sources are as recorded."
        )


def _about_tokens(files: Files, sums: Sums, meta: Meta | None) -> Iterator[Finding]:
    """Whether counts add up to tokens × k, where ranks say how many tokens they had."""
    if not files.tokens or meta is None:
        return
    for place, rank in enumerate(sums.ranks):
        if rank not in files.tokens:
            continue
        copies = dict.fromkeys(sums.layers.tolist(), 0)
        for (_, layer), tokens in read_tokens(files.tokens[rank]).items():
            copies[layer] = copies.get(layer, 0) + tokens * meta.experts_per_token
        for at, layer in enumerate(sums.layers.tolist()):
            if copies[layer] != (counted := sums.by_rank[place, at].sum()):
                yield Finding(
                    severity="error",
                    code="conservation",
                    message=(
                        f"Rank {rank} counts {counted:.0f} token copies in model layer {layer}, but its tokens × k are "
                        f"{copies[layer]}; record again."
                    ),
                )
                return
    yield Finding(
        severity="ok", code="conservation", message="The counts of ranks add up to tokens × k in every layer."
    )


def _about_files(files: Files) -> Iterator[Finding]:
    if files.further:
        yield Finding(
            severity="ok",
            code="further-tensors",
            message=f"{len(files.further)} files of tensors that are no counts are left out ({files.further[0].path.name}).",
        )


FORMATS = (
    Format(
        NAME,
        "TensorRT-LLM's expert statistics",
        "loads",
        lambda glance: is_counts(glance) or is_meta(glance) or is_tokens(glance),
        read,
        lambda path: "",
    ),
)
