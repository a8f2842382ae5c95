"""Checks of layers: those without tokens, with all mass on one expert, or with experts never used; and their numbers held
against the model's, for local numbers of pipeline stages, numbers from 1, an MTP layer, and layers of another model.
"""

from collections.abc import Iterator

import numpy as np

from engine.formats.checks.copies import name_of, never_written
from engine.formats.source import error, ok, warning
from engine.model import MoEModel
from engine.workload import ExpertLoad, Finding, RoutingTrace

DROP = "drop-empty-layers"
MOST_STAGES = 64
FEWEST_OF_EACH, FEWEST_CELLS = 16, 4
"""Tokens of a layer for each expert, and layers times experts of a rank, without which nothing shows that a rank is missing."""


def empty_layers(workload: RoutingTrace | ExpertLoad) -> np.ndarray:
    """The layers that no router wrote, int64[...]: those without any tokens, or with all of them at expert 0 of several."""
    total = workload.load.sum(axis=1)
    return np.flatnonzero((total == 0) | ((workload.load[:, 0] == total) & (workload.num_experts > 1)))


def check_layers(workload: RoutingTrace | ExpertLoad) -> Iterator[Finding]:
    """Findings on the spread of tokens over the experts of each layer."""
    load = workload.load
    total = load.sum(axis=1)
    empty = empty_layers(workload)
    # If no layer was captured there is nothing to keep.
    remedy = DROP if 0 < len(empty) < len(load) else None
    if (silent := np.flatnonzero(total == 0)).size:
        text = (
            f"{name_of('layer', silent)} received no tokens at all; the recorder missed it, or it is a dense layer: "
            "record again or drop it."
        )
        yield error("silent-layers", text, layers=tuple(silent.tolist()), remedy=remedy)
    unwritten = np.flatnonzero(never_written(workload)) if isinstance(workload, RoutingTrace) else silent[:0]
    if unwritten.size:
        yield error(
            "never-captured",
            f"In {name_of('layer', unwritten)} all {workload.k} choices of every token are expert 0, which no "
            "router makes: the layer is dense, or was never captured. "
            + ("Drop it." if remedy else "Record again with the engine's routing capture switched on."),
            layers=tuple(unwritten.tolist()),
            remedy=remedy,
        )
    zero = np.setdiff1d(empty, np.concatenate([silent, unwritten]))
    if zero.size:
        yield error(
            "expert-zero",
            f"In {name_of('layer', zero)} every token went to expert 0: a known capture fault (a buffer of zeros that "
            "was never written); record again with the engine's routing capture switched on"
            + (", or drop the layer if it is a dense one." if remedy else "."),
            layers=tuple(zero.tolist()),
            remedy=remedy,
        )
    if (single := np.flatnonzero((load[:, 1:].sum(axis=1) > 0) & (load.max(axis=1) == total))).size:
        yield warning(
            "single-expert",
            f"In {name_of('layer', single)} every token went to a single expert; check the recording first.",
            layers=tuple(single.tolist()),
        )
    idle = (load == 0).sum(axis=1)
    idle[empty] = 0
    if not idle.any():
        yield ok("idle-experts", f"All {load.shape[1]} experts of every layer with tokens were chosen.")
        return
    worst = int(idle.argmax())
    yield warning(
        "idle-experts",
        f"In {np.count_nonzero(idle)} of {len(load)} layers some experts were never chosen (layer {worst}: "
        f"{idle[worst]} of {load.shape[1]}); record more tokens to see how rare they are.",
        layers=tuple(np.flatnonzero(idle).tolist()),
    )


def ranks_not_counted(load: np.ndarray) -> Finding | None:
    """The finding on the same experts without tokens in every layer, which are just those of some expert-parallel ranks, in
    blocks or dealt in turn; None if there are none, or too few tokens to show it. load: float64[layer, expert]"""
    load = load[load.any(axis=1)]
    counted, experts = load.any(axis=0), load.shape[1]
    if counted.all() or not len(load) or load.sum(axis=1).min() < FEWEST_OF_EACH * experts:
        return None
    for ranks in range(2, experts // 2 + 1):
        own = experts // ranks
        for of_rank in () if experts % ranks else (counted.reshape(ranks, own), counted.reshape(own, ranks).T):
            there = of_rank.any(axis=1)
            if len(load) * own >= FEWEST_CELLS and (of_rank.all(axis=1) == there).all():
                idle, were = int((~counted).sum()), "was" if there.sum() == 1 else "were"
                return error(
                    "ranks-not-counted",
                    f"The same {idle} of {experts} experts (first: expert {(~counted).argmax()}) have no tokens in any layer, "
                    f"as where {there.sum()} of {ranks} expert-parallel ranks {were} counted: add the counts of all ranks.",
                )
    return None


def check_numbering(workload: RoutingTrace | ExpertLoad, model: MoEModel | None) -> Iterator[Finding]:
    """Findings on layers held against the model's; empty ones are left to `check_layers`."""
    if model is None:
        return
    written = np.setdiff1d(np.arange(workload.layers), empty_layers(workload))
    layers, moe = len(written), len(model.moe_layers)
    named = workload.model_layers
    if not layers:
        return
    if layers == moe:
        if workload.layers == moe and named is not None and named != model.moe_layers:
            yield _other_numbers(named, model)
    elif layers > moe and workload.layers == model.layers and named in (None, tuple(range(model.layers))):
        yield warning(
            "counts-in-dense-layers",
            f"All {layers} decoder layers have tokens, of which {model.name} has experts in {moe}: SGLang has counted "
            "passes of the MTP layer in layer 0 (sglang #19812); or this is another model's recording. Record without "
            "MTP, or leave the dense layers out.",
            layers=model.dense_layers,
        )
    elif layers == moe + 1 or (named is not None and layers > moe and named[-1] == model.layers):
        yield warning(
            "with-mtp-layer",
            f"The recording has {layers} MoE layers, {model.name} {moe}: the last is an MTP layer, which only drafts tokens "
            "and is not part of the model here. Drop it; writers of plans can copy a layer's placement for it.",
            layers=(int(written[-1]),),
            remedy="drop-mtp-layer",
        )
    elif layers < moe and not moe % layers and (stages := moe // layers) <= MOST_STAGES:
        yield error(
            "local-layers",
            f"The recording has {layers} MoE layers, {model.name} {moe}: as many as one of {stages} pipeline "
            "stages. Layers numbered within their stage are different layers under one number: give the "
            f"recording of each of the {stages} stages, or record without pipeline parallelism.",
        )
    else:
        yield error(
            "other-layers",
            f"The recording has {layers} MoE layers, {model.name} {moe}: it is of another model, or layers are missing; "
            "open its model, or record again.",
        )


def _other_numbers(named: tuple[int, ...], model: MoEModel) -> Finding:
    if named == tuple(layer + 1 for layer in model.moe_layers):
        return warning(
            "layers-from-one",
            f"The layers are numbered from {named[0]} to {named[-1]}, those of {model.name} from "
            f"{model.moe_layers[0]} to {model.moe_layers[-1]}: the recorder counts from 1. Number them from 0, or "
            "plans are written for the wrong layers.",
            remedy="number-layers-from-zero",
        )
    return warning(
        "other-layer-numbers",
        f"The layers are numbered {_span(named)}, the MoE layers of {model.name} {_span(model.moe_layers)}; plans take the "
        "model's numbers: check that the recording is of this model and names decoder layers, dense ones counted.",
    )


def _span(layers: tuple[int, ...]) -> str:
    consecutive = layers == tuple(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} … {layers[-1]}" + ("" if consecutive else " with gaps")
