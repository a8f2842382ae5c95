"""Remedies for recordings, by the names in `Finding.remedy`: pure functions from workload to workload.

Each finds the parts to change by the rule of its check, so that it may follow another one, and leaves a note of its change in
the workload's origin. Checked again, a mended recording shows nothing of the kind.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from engine import units
from engine.errors import InputError
from engine.formats import arrays
from engine.formats.checks.copies import (
    blocks_in_turn,
    copies_of_rows,
    factor_of_counts,
    first_of_copies,
    is_rounded,
    ranks_alike,
    skew_of,
    tokens_of_ranks,
)
from engine.formats.checks.layers import empty_layers
from engine.formats.checks.profile_rows import padding_rows, profile_stretches
from engine.formats.checks.totals import silent_layers
from engine.formats.source import ok
from engine.plan import Placement
from engine.workload import DECODE, PREFILL, ExpertLoad, Finding, Origin, RoutingTrace, TrafficMatrix, Workload

_PHASES = {PREFILL: "prefill", DECODE: "decode"}
_REMEDY_OF_PHASE = {PREFILL: "keep-prefill", DECODE: "keep-decode"}


@dataclass(frozen=True)
class Remedy:
    """One way of mending.

    title: takes a workload that has the fault, returns the words for a button
    apply: returns the mended workload; raises InputError if there is nothing to mend, or nothing would be left
    automatic: True if it needs no decision and no further input; otherwise a person chooses it
    needs_placement: True if `apply` takes the placement that ran as its second argument
    """

    name: str
    title: Callable[[Workload], str]
    apply: Callable[..., Workload]
    automatic: bool = True
    needs_placement: bool = False


def mend(workload: Workload, findings: Iterable[Finding]) -> Workload:
    """The workload after all automatic remedies of these findings, each once; the workload itself if there are none. A remedy
    that finds nothing to mend, as an earlier one has settled it or the finding came from elsewhere, is left out."""
    named = {finding.remedy for finding in findings}
    for remedy in REMEDIES.values():
        if remedy.name in named and remedy.automatic:
            with suppress(InputError):
                workload = remedy.apply(workload)
    return workload


def what_was_done(workload: Workload) -> tuple[str, ...]:
    """The changes that remedies made to a workload, a sentence each, in their order."""
    seen = workload.origin.findings if workload.origin else ()
    return tuple(finding.message for finding in seen if finding.code in REMEDIES)


def cut_profile_rows(workload: Workload) -> RoutingTrace:
    """The trace without its stretches of identical tokens."""
    trace, cut = _trace(workload), 0
    while stretches := profile_stretches(trace):  # 5 % of fewer tokens are fewer
        keep = np.ones(trace.tokens, dtype=bool)
        for stretch in stretches:
            keep[stretch.first : stretch.end] = False
        if not keep.any():
            raise InputError(f"{trace.name}: there are only profile rows; record while requests are served")
        cut += int((~keep).sum())
        trace = trace.part(keep)
    if not cut:
        raise InputError(f"{trace.name}: has no profile rows to cut")
    skew = f"skew {skew_of(workload.load):.1f}× before, {skew_of(trace.load):.1f}× after"
    return _noted(trace, "cut-profile-rows", f"Cut {cut:,} tokens with identical choices ({skew}).", moved="tokens")


def _title_of_cut(workload: Workload) -> str:
    stretches = profile_stretches(_trace(workload))
    cut = sum(stretch.tokens for stretch in stretches)
    if len(stretches) == 1 and stretches[0].first == 0:
        return f"Cut the first {cut:,} tokens"
    return f"Cut {cut:,} tokens" + (f" in {len(stretches)} places" if len(stretches) > 1 else "")


def cut_padding_rows(workload: Workload) -> RoutingTrace:
    """The trace without padding between its tokens."""
    trace = before = _trace(workload)
    while padding := padding_rows(trace):  # without one row, another may stand out
        trace = trace.part(~padding.tokens)
    if trace is before:
        raise InputError(f"{trace.name}: has no padding rows to cut")
    skew = f"skew {skew_of(before.load):.2f}× before, {skew_of(trace.load):.2f}× after"
    cut = f"Cut {before.tokens - trace.tokens:,} padding rows ({units.share(1 - trace.tokens / before.tokens)}; {skew})."
    return _noted(trace, "cut-padding-rows", cut, moved="tokens")


def keep_phase(workload: Workload, phase: int) -> RoutingTrace:
    """The tokens of one phase, `PREFILL` or `DECODE`."""
    trace, word = _trace(workload), _PHASES[phase]
    if trace.phase is None:
        raise InputError(f"{trace.name}: does not say which token was routed in which phase")
    keep = trace.phase == phase
    if not keep.any():
        raise InputError(f"{trace.name}: has no tokens of {word}")
    kept = f"Kept the {int(keep.sum()):,} tokens of {word} out of {trace.tokens:,}."
    other = _REMEDY_OF_PHASE[DECODE if phase == PREFILL else PREFILL]
    return _noted(trace.part(keep), _REMEDY_OF_PHASE[phase], kept, moved="tokens", settled=(other,))


def drop_copies(workload: Workload) -> RoutingTrace | ExpertLoad:
    """One copy of tokens that several ranks recorded, dealt to those ranks in turn; the first of equal blocks, or of
    equal rows."""
    if isinstance(workload, ExpertLoad):
        return _one_share(workload)
    trace = _trace(workload)
    if alike := ranks_alike(trace):
        tokens_of, rank = tokens_of_ranks(trace), trace.source_rank.copy()
        keep = np.ones(trace.tokens, dtype=bool)
        for ranks in alike:
            for copy in ranks[1:]:
                keep[tokens_of[copy]] = False
            first = tokens_of[ranks[0]]
            rank[first] = np.asarray(ranks, dtype=rank.dtype)[np.arange(len(first)) % len(ranks)]
        kept = replace(trace, source_rank=rank).part(keep)
    elif (copies := blocks_in_turn(trace)) > 1:
        kept = trace.part(np.arange(trace.tokens // copies))
    elif (copies := copies_of_rows(trace)) > 1:
        kept = trace.part(first_of_copies(trace, copies))
    else:
        raise InputError(f"{trace.name}: no tokens come more than once")
    return _noted(kept, "drop-copies", f"Dropped {trace.tokens - kept.tokens:,} tokens that were copies.", moved="tokens")


def _one_share(loads: ExpertLoad) -> ExpertLoad:
    alike = ranks_alike(loads)
    if not alike:
        raise InputError(f"{loads.name}: no two ranks counted the same")
    by_source = loads.by_source.copy()
    for ranks in alike:
        by_source[ranks] /= len(ranks)
    load = by_source.sum(axis=0)
    # Steps are not known by rank; each keeps its share of every count.
    left = np.divide(load, loads.load, out=np.zeros_like(load), where=loads.load > 0)
    by_step = None if loads.by_step is None else loads.by_step * left
    text = f"Counted one copy of what {sum(map(len, alike))} ranks had in {len(alike)} groups that counted the same."
    return _noted(replace(loads, load=load, by_source=by_source, by_step=by_step), "drop-copies", text)


def divide_by_copies(workload: Workload) -> ExpertLoad:
    """The counts divided by the factor that they all have in common."""
    if not isinstance(workload, ExpertLoad) or is_rounded(workload) or (copies := factor_of_counts(workload)) == 1:
        raise InputError(f"{workload.name}: its counts are not multiples of one number of copies")
    scaled = {
        name: counts / copies for name in ("load", "by_source", "by_step") if (counts := getattr(workload, name)) is not None
    }
    return _noted(replace(workload, **scaled), "divide-by-copies", f"Divided all counts by {copies}.")


def drop_empty_layers(workload: Workload) -> Workload:
    """The workload without layers that no router wrote, or in which nothing moves between ranks."""
    empty = silent_layers(workload) if isinstance(workload, TrafficMatrix) else empty_layers(workload)
    if not len(empty):
        raise InputError(f"{workload.name}: has no empty layers")
    if len(empty) == workload.layers:
        raise InputError(f"{workload.name}: all layers are empty; record again")
    return _without_layers(workload, empty, "drop-empty-layers", f"Dropped {len(empty)} dense or empty layers.")


def drop_mtp_layer(workload: Workload) -> Workload:
    """The workload without its last layer."""
    if workload.layers < 2:
        raise InputError(f"{workload.name}: has one layer only")
    return _without_layers(workload, np.array([workload.layers - 1]), "drop-mtp-layer", "Dropped the MTP layer, the last.")


def number_layers_from_zero(workload: Workload) -> Workload:
    """The workload with every model layer one lower."""
    layers = None if isinstance(workload, TrafficMatrix) else workload.model_layers
    if not layers or min(layers) < 1:
        raise InputError(f"{workload.name}: its layers are not numbered from 1")
    lower = tuple(layer - 1 for layer in layers)
    return _noted(replace(workload, model_layers=lower), "number-layers-from-zero", "Numbered the layers from 0.")


def fold_slots(workload: Workload, placement: Placement) -> RoutingTrace | ExpertLoad:
    """The workload with experts in place of the physical slots that held them while the recording was made: slot j is the j-th
    of the placement, GPU after GPU. Raises InputError if the placement has other layers or fewer slots."""
    if isinstance(workload, TrafficMatrix):
        raise InputError(f"{workload.name}: a traffic matrix has no slots to fold")
    expert_of_slot = _experts_of_slots(workload, placement)
    layers, experts = np.arange(workload.layers), placement.experts
    text = f"Folded {expert_of_slot.shape[1]} slots to {experts} experts."
    if isinstance(workload, RoutingTrace):
        chosen = workload.experts
        folded = np.where(chosen >= 0, expert_of_slot[layers[:, None], np.maximum(chosen, 0)], np.int16(-1))
        return _noted(replace(workload, experts=folded, num_experts=experts), "fold-slots", text)
    columns = {}
    for name in ("load", "by_source", "by_step"):
        if (counts := getattr(workload, name)) is not None:
            # Slots that are not counted have no tokens.
            spare = [(0, 0)] * (counts.ndim - 1) + [(0, expert_of_slot.shape[1] - counts.shape[-1])]
            columns[name] = arrays.fold_slots(np.pad(counts, spare), expert_of_slot, experts)
    return _noted(replace(workload, **columns), "fold-slots", text)


def _experts_of_slots(workload: RoutingTrace | ExpertLoad, placement: Placement) -> np.ndarray:
    """The expert in every slot of the workload's layers, int16[layer, slot]."""
    rows = dict(zip(placement.model_layers, placement.experts_of_gpu, strict=True))
    named = workload.model_layers
    if named is None:
        if workload.layers != placement.layers:
            raise InputError(f"{workload.name}: has {workload.layers} layers, the plan that ran {placement.layers}")
        named = placement.model_layers
    if missing := [layer for layer in named if layer not in rows]:
        raise InputError(f"{workload.name}: the plan that ran has no layer {missing[0]}, which was recorded")
    held = [[expert for experts in rows[layer] for expert in experts] for layer in named]
    if len(set(map(len, held))) > 1:
        raise InputError(
            f"{workload.name}: the plan that ran has layers of different numbers of slots; it cannot have been this"
        )
    if len(held[0]) < workload.num_experts:
        raise InputError(
            f"{workload.name}: slots go up to {workload.num_experts - 1}, the plan that ran has {len(held[0])}; give the plan "
            "that ran while it was recorded"
        )
    return np.asarray(held, dtype=np.int16)


def _trace(workload: Workload) -> RoutingTrace:
    if not isinstance(workload, RoutingTrace):
        raise InputError(f"{workload.name}: needs routing by token, this is a recording of another kind")
    return workload


def _without_layers(workload: Workload, dropped: np.ndarray, remedy: str, text: str) -> Workload:
    """The workload without some of its layers. dropped: int64[...], layers of the workload"""
    keep = np.setdiff1d(np.arange(workload.layers), dropped)
    match workload:
        case RoutingTrace():
            counts = {name: getattr(workload, name) for name in ("experts", "scores")}
            fields = {name: np.ascontiguousarray(count[:, keep]) for name, count in counts.items() if count is not None}
        case ExpertLoad():
            counts = {name: getattr(workload, name) for name in ("load", "by_source", "by_step")}
            fields = {name: count[..., keep, :] for name, count in counts.items() if count is not None}
        case TrafficMatrix():
            fields = {"bytes": workload.bytes[keep]}
    if not isinstance(workload, TrafficMatrix) and workload.model_layers is not None:
        fields["model_layers"] = tuple(workload.model_layers[layer] for layer in keep)
    return _noted(replace(workload, **fields), remedy, text, moved="layers")


def _noted(workload: Workload, remedy: str, text: str, moved: str = "", settled: tuple[str, ...] = ()) -> Workload:
    """The workload with a finding on its remedy in its origin, in place of the reader's findings of the kind.

    moved: `tokens` or `layers`: their old numbers are left out of the reader's other findings
    settled: other remedies with findings that no longer hold
    """
    origin = workload.origin or Origin(format="recording")
    unsaid = {"tokens": {"rows": None}, "layers": {"layers": ()}}.get(moved, {})
    others = [finding.model_copy(update=unsaid) for finding in origin.findings if finding.remedy not in (remedy, *settled)]
    done = ok(remedy, text)
    return replace(workload, origin=origin.model_copy(update={"findings": (*others, done)}))


REMEDIES: dict[str, Remedy] = {
    remedy.name: remedy
    for remedy in (
        Remedy("fold-slots", lambda _: "Fold slots to experts", fold_slots, automatic=False, needs_placement=True),
        Remedy("drop-empty-layers", lambda _: "Drop the empty layers", drop_empty_layers),
        Remedy("drop-mtp-layer", lambda _: "Drop the MTP layer", drop_mtp_layer),  # the last layer that is not empty
        Remedy("number-layers-from-zero", lambda _: "Number the layers from 0", number_layers_from_zero),
        Remedy("drop-copies", lambda _: "Keep one copy", drop_copies),
        Remedy(
            "divide-by-copies",
            lambda loads: (
                f"Divide all counts by {factor_of_counts(loads)}" if isinstance(loads, ExpertLoad) else "Divide the counts"
            ),
            divide_by_copies,
        ),
        Remedy("cut-profile-rows", _title_of_cut, cut_profile_rows),
        Remedy("cut-padding-rows", lambda _: "Cut the padding rows", cut_padding_rows),
        Remedy("keep-prefill", lambda _: "Keep the prefill", partial(keep_phase, phase=PREFILL), automatic=False),
        Remedy("keep-decode", lambda _: "Keep the decode", partial(keep_phase, phase=DECODE), automatic=False),
    )
}
"""In the order in which they are applied."""
