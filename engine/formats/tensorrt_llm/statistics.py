"""TensorRT-LLM's expert statistics: how often every rank chose every expert, by iteration and model layer.

`EXPERT_STATISTIC_ITER_RANGE=a-b` records the iterations a … b − 1 into `EXPERT_STATISTIC_PATH`, in the files that
`engine.formats.tensorrt_llm.files` describes. Ranks count before dispatch: with attention data parallelism each its own tokens,
without it each all tokens. A rank's file is read once and let go, for together they are larger than memory.

The ids counted are experts or a load balancer's slots. Nothing in the files tells them apart, and loads of slots read as loads
of experts look fine: the model decides, and the plan that ran says which slot held which expert.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.formats.arrays import expert_load, fold_slots
from engine.formats.format import Format, Glance
from engine.formats.placements import tensorrt_llm
from engine.formats.placements.plan_source import PlanSource
from engine.formats.source import Source, error, fault, ok, quoted, warning
from engine.formats.step_spans import split_steps
from engine.formats.tensorrt_llm.files import (
    Files,
    Meta,
    RankFile,
    is_counts,
    is_meta,
    is_tokens,
    read_counts,
    read_meta,
    read_tokens,
    sort_files,
)
from engine.workload import ExpertLoad, Finding, Origin

_ASSIGNMENTS = tensorrt_llm.ASSIGNMENTS.encode()
MOST_NUMBERS = 2**25
"""Limit of the sums of all ranks, which are held at once: 256 MB."""
NAME = "tensorrt-llm-statistics"


@dataclass(frozen=True)
class Slots:
    """The slots of a plan.

    expert: int64[MoE layer, slot]; of all MoE layers of the model
    updates: iterations after which a load balancer moved them, 0: never
    """

    path: Path
    expert: np.ndarray
    updates: int


def slots_counted(source: Source, ids: int) -> Slots | None:
    """The plan that ran, if so many ids are its slots; None if they are experts. The plan is `source.deployed`, or a
    TensorRT-LLM YAML in the recording's folder with as many slots.

    Raises InputError if the ids are slots and no plan says of which experts, or if that cannot be decided.
    """
    experts = source.num_experts or (source.model.experts if source.model else None)
    if source.deployed is not None:
        slots = _read(source, source.deployed)
        if slots.expert.shape[1] != ids:
            raise fault(source.deployed, f"has {slots.expert.shape[1]} slots per layer, but {ids} ids were counted")
        return slots
    if experts is None:
        return None
    if ids < experts:
        raise source.fault(f"counts {ids} experts, but the model has {experts}; give the model that was recorded")
    plans = _plans_in_folder(source, ids)
    if ids > experts:
        seen = f"counts {ids} ids, but the model has {experts} experts: a load balancer was on, and these are its slots"
        if not plans:
            raise source.fault(
                f"{seen}; give the plan that ran (--deployed FILE, or its YAML in the same folder), or record without one"
            )
        if len(plans) > 1:
            names = " and ".join(slots.path.name for slots in plans[:3])
            raise source.fault(f"{seen}; {names} differ, say which ran (--deployed)")
        return plans[0]
    if moved := [slots for slots in plans if (slots.expert != np.arange(experts)).any()]:
        raise source.fault(
            f"counts {ids} ids, which are the model's experts, or the slots of {moved[0].path.name} if that ran: give it with "
            "--deployed, or take it out of the folder"
        )
    return None


def _plans_in_folder(source: Source, ids: int) -> list[Slots]:
    """The plans in the recording's folder that have so many slots, each once."""
    plans: dict[bytes, Slots] = {}
    if source.model is None:
        return []
    for path in sorted(source.path.parent.glob("*.y*ml")):
        if path.is_file() and path.stat().st_size <= tensorrt_llm.MAX_YAML_BYTES and _ASSIGNMENTS in path.read_bytes():
            slots = _read(source, path)
            if slots.expert.shape[1] == ids:
                plans.setdefault(slots.expert.tobytes(), slots)
    return list(plans.values())


def _read(source: Source, path: Path) -> Slots:
    if source.model is None:
        raise source.fault(f"the plan {path.name} can only be read for a model; open it first (--model)")
    if not path.is_file():
        raise fault(path, "there is no such file")
    if path.stat().st_size > tensorrt_llm.MAX_YAML_BYTES:
        raise fault(path, f"is larger than {tensorrt_llm.MAX_YAML_BYTES // 1024} KB, as no plan of TensorRT-LLM is")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise fault(path, "is not UTF-8 text; save it as UTF-8") from None
    content = tensorrt_llm.parse(path, text)
    placement = tensorrt_llm.read(PlanSource(path, source.model, gpus=1), content).placement
    updates = content.get("layer_updates_per_iter", "0")
    if not (isinstance(updates, str) and updates.isascii() and updates.isdigit() and len(updates) < 10):
        raise fault(path, f"layer_updates_per_iter is {quoted(updates)}, not a whole number")
    return Slots(path, np.array([row[0] for row in placement.experts_of_gpu], np.int64), int(updates))


def about_slots(slots: Slots | None, ids: int, source: Source) -> Iterator[Finding]:
    """Findings on the meaning of the ids."""
    if slots is None and source.num_experts is None and source.model is None:
        yield warning(
            "slots-or-experts",
            f"{ids} ids are counted, taken for experts: right if the model has {ids} experts and no load balancer was on. "
            "With a balancer they are slots; open the model (--model) first, which decides.",
        )
    elif slots is None:
        yield ok(
            "slots-or-experts",
            f"The {ids} ids counted are the model's experts, unless a load balancer without redundant slots had moved them "
            "while this was recorded.",
        )
    else:
        says = f"{slots.path.name} says which expert each held, and those of one expert add up."
        yield ok("slots-or-experts", f"The {ids} ids counted are slots; {says}")
    if slots is not None and slots.updates:
        yield error(
            "balancer-moved",
            f"{slots.path.name} has layer_updates_per_iter {slots.updates}: the balancer moved experts while this was "
            "recorded, so slots held other experts than it says; record with layer_updates_per_iter 0.",
        )


@dataclass(frozen=True)
class Sums:
    """Sums over the counts of all ranks.

    layers: int64[layer]; the model layers counted
    iterations: number of iterations
    ranks: those with a file
    by_rank: float64[rank, layer, id]
    by_span: float64[span, layer, id]; spans of equal numbers of iterations in their order
    layers_of_rank, digest_of_rank: the layers that each rank recorded, and a digest of its counts
    """

    layers: np.ndarray
    iterations: int
    ranks: tuple[int, ...]
    by_rank: np.ndarray
    by_span: np.ndarray
    layers_of_rank: tuple[frozenset[int], ...]
    digest_of_rank: tuple[bytes, ...]


def add_up(files: Mapping[int, RankFile], ids: int | None) -> Sums:
    """The sums over the files of ranks. Raises InputError. ids: number that is counted, None: as many as the first file has"""
    iterations = np.unique(np.concatenate([file.iteration for file in files.values()]))
    layers = np.unique(np.concatenate([file.layer for file in files.values()]))
    by_rank, by_span, digests = np.empty(0), np.empty(0), []
    for place, file in enumerate(files.values()):
        counts = read_counts(file.source, ids)
        if not place:
            ids = counts.copies.shape[1]
            if len(files) > MOST_NUMBERS // (len(layers) * ids):
                raise file.source.fault(
                    f"{len(files)} ranks with {len(layers)} layers of {ids} ids are more than can be held; give fewer ranks"
                )
            spans = split_steps(iterations, len(layers) * ids)
            span_of_iteration = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
            by_rank = np.zeros((len(files), len(layers), ids))
            by_span = np.zeros((len(spans), len(layers), ids))
        layer = np.searchsorted(layers, counts.layer)
        _add(by_rank[place], layer, counts.copies)
        span = span_of_iteration[np.searchsorted(iterations, counts.iteration)]
        _add(by_span.reshape(-1, ids), span * len(layers) + layer, counts.copies)
        order = np.lexsort((counts.layer, counts.iteration))
        hasher = hashlib.blake2b(digest_size=16)
        for part in (counts.iteration, counts.layer, counts.copies):
            hasher.update(np.ascontiguousarray(part[order]))
        digests.append(hasher.digest())
    sets = tuple(frozenset(file.layer.tolist()) for file in files.values())
    return Sums(layers, len(iterations), tuple(files), by_rank, by_span, sets, tuple(digests))


def _add(into: np.ndarray, row: np.ndarray, copies: np.ndarray) -> None:
    """Add records (int64[record, id]) to the rows (int64[record]) of float64[row, id]."""
    order = np.argsort(row, kind="stable")
    rows, starts = np.unique(row[order], return_index=True)
    into[rows] += np.add.reduceat(copies[order], starts, axis=0)


def read(sources: Sequence[Source]) -> ExpertLoad:
    """Loads of the decoder's MoE layers, by source rank and by spans of iterations. Raises InputError.

    The MTP layer, which comes after the model's last one, is left out, and so are copies of tensor-parallel ranks; findings
    say so.
    """
    files = sort_files(sources)
    source = next(iter(files.counts.values())).source
    meta = read_meta(files.meta) if files.meta else None
    model = source.model
    if meta and model and meta.experts_per_token != model.experts_per_token:
        raise source.fault(
            f"was recorded with {meta.experts_per_token} experts per token, {model.name} has {model.experts_per_token}; give "
            "the model that was recorded"
        )
    sums = add_up(files.counts, meta.ids if meta else None)
    copies = _copies(sums)
    by_source = _by_source(sums, copies, meta)
    layers = np.arange(len(sums.layers))  # places of the decoder's layers
    if model is not None:
        layers = np.flatnonzero(sums.layers < model.layers)
        dense = sorted(set(sums.layers.tolist()) & set(model.dense_layers))
        if dense or not len(layers):
            which = f"layer {dense[0]}, which is dense in" if dense else f"layer {sums.layers[0]}, but no MoE layer of"
            raise source.fault(f"has counts of {which} {model.name}; give the model that was recorded")
    total = sums.by_span.sum(axis=0) / copies[:, None]
    slots = slots_counted(source, ids := total.shape[1])
    load = _of_experts(total[layers], source, sums.layers[layers], slots)
    others = f"{len(files.further)} files of tensors that are no counts are left out"
    findings = (
        *about_slots(slots, ids, source),
        *_about_ranks(sums, copies, by_source is not None, meta),
        *_about_layers(source, sums.layers, layers, total),
        *_about_tokens(files, sums, meta),
        *(ok("further-tensors", f"{others} ({one.path.name}).") for one in files.further[:1]),
    )
    workload = expert_load(source, load, tuple(sums.layers[layers].tolist()))
    kept = layers[load.any(axis=1)]
    parts = {"by_source": by_source, "by_step": sums.by_span / copies[:, None] if len(sums.by_span) > 1 else None}
    folded = {
        name: _of_experts(counts[:, kept], source, sums.layers[kept], slots)
        for name, counts in parts.items()
        if counts is not None
    }
    return replace(workload, **folded, origin=Origin(format=NAME, findings=findings))


def _of_experts(counts: np.ndarray, source: Source, layers: np.ndarray, slots: Slots | None) -> np.ndarray:
    """The counts of experts, float64[..., layer, expert], from those of ids, float64[..., layer, id].

    layers: int64[layer]; model layers
    """
    if slots is None:
        return counts
    rows = np.searchsorted(source.model.moe_layers, layers)
    return fold_slots(counts, slots.expert[rows], source.model.experts)


def _copies(sums: Sums) -> np.ndarray:
    """The number of ranks that counted the same tokens, int64[layer]. Tensor-parallel ranks without attention data parallelism
    do; those of a pipeline stage have its layers."""
    copies = np.ones(len(sums.layers), np.int64)
    for layers in set(sums.layers_of_rank):
        digests = {digest for digest, own in zip(sums.digest_of_rank, sums.layers_of_rank, strict=True) if own == layers}
        others = any(layers & own for own in sums.layers_of_rank if own != layers)
        if len(digests) == 1 and not others:
            copies[np.isin(sums.layers, list(layers))] = sums.layers_of_rank.count(layers)
    return copies


def _by_source(sums: Sums, copies: np.ndarray, meta: Meta | None) -> np.ndarray | None:
    """The loads by source, float64[source rank, layer, id], if every rank is there and counted tokens of its own; else None.
    Ranks with other layers are other pipeline stages, in which a source has the same place."""
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


def _about_layers(source: Source, recorded: np.ndarray, decoder: np.ndarray, total: np.ndarray) -> Iterator[Finding]:
    """Findings on layers that are left out or missing.

    recorded: int64[layer]; model layers
    decoder: int64[...]; places in it
    total: float64[layer, id]
    """
    further = np.setdiff1d(np.arange(len(recorded)), decoder)
    if len(further):
        copies = total[further].sum()
        numbers = ", ".join(map(str, recorded[further][:4].tolist()))
        yield warning(
            "mtp-left-out",
            f"Layer {numbers} comes after the model's last one, as that of multi-token prediction (MTP) does; its "
            f"{copies:.0f} token copies are left out. A plan for it needs a row of its own.",
        )
    if source.model and (missing := sorted(set(source.model.moe_layers) - set(recorded.tolist()))):
        yield error(
            "missing-layers",
            f"{len(missing)} MoE layers of {source.model.name} are not in the recording (first: model layer {missing[0]}); "
            "add the files of all ranks, or record again.",
        )


def _about_ranks(sums: Sums, copies: np.ndarray, sources: bool, meta: Meta | None) -> Iterator[Finding]:
    if copies.max() > 1:
        yield warning(
            "tensor-parallel-copies",
            f"{copies.max()} ranks counted the same tokens, as tensor-parallel ranks do without attention data "
            "parallelism; they count once here. Which rank a token came from is not known.",
        )
        return
    missing = sorted(set(range(sums.ranks[-1] + 1)) - set(sums.ranks))
    if missing or (meta and meta.ranks and len(sums.ranks) < meta.ranks):
        expected = max(meta.ranks or 0 if meta else 0, sums.ranks[-1] + 1)
        yield warning(
            "missing-ranks",
            f"Files of {len(sums.ranks)} of {expected} ranks are here, so some tokens are not counted; add those of the "
            "others.",
        )
    elif sources:
        yield ok("source-ranks", "Every rank counted its own tokens, so sources are as recorded.")


def _about_tokens(files: Files, sums: Sums, meta: Meta | None) -> Iterator[Finding]:
    """Findings on counts that must add up to tokens × k, if ranks say how many tokens they had."""
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
                yield error(
                    "conservation",
                    f"Rank {rank} counts {counted:.0f} token copies in model layer {layer}, but its tokens × k are "
                    f"{copies[layer]}; record again.",
                )
                return
    yield ok("conservation", "The counts of ranks add up to tokens × k in every layer.")


def _tells(glance: Glance) -> bool:
    return is_counts(glance) or is_meta(glance) or is_tokens(glance)


FORMATS = (Format(NAME, "TensorRT-LLM's expert statistics", "loads", _tells, read, lambda path: ""),)
