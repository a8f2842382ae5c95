"""Can a recording be trusted? What a person should know before planning on it, and how to mend it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload

LOAD_TOLERANCE = 0.01
"""Part by which the layers of a load may differ: live counters are not read at one instant."""


@dataclass(frozen=True)
class Finding:
    """One sentence on a recording. error: plans made on it would be wrong; warning: they may be."""

    level: Literal["ok", "warning", "error"]
    text: str


def check_recording(workload: Workload) -> list[Finding]:
    """Findings on a workload, never empty. Layers are MoE layers, as in the workload."""
    match workload:
        case RoutingTrace():
            return list(_trace(workload))
        case ExpertLoad():
            return list(_load(workload))
        case TrafficMatrix():
            return list(_traffic(workload))


def _trace(trace: RoutingTrace) -> Iterator[Finding]:
    outside = (trace.experts < -1) | (trace.experts >= trace.num_experts)
    if outside.any():
        token, layer, _ = np.argwhere(outside)[0]
        yield Finding(
            "error",
            f"{outside.sum()} expert ids lie outside 0 … {trace.num_experts - 1}, the first at token {token}, layer "
            f"{layer}; fold physical slots back to logical experts, or correct the number of experts.",
        )
        return
    load, expected = trace.load, trace.tokens * trace.k
    padding = (trace.experts < 0).sum(axis=(0, 2))
    yield _conservation(load, expected, padding)
    if padding.any():
        share, worst = padding.sum() / trace.experts.size, int(padding.argmax())
        yield Finding(
            "warning" if share > 0.1 else "ok",
            f"{share:.1%} of the choices are padding (−1), most in layer {worst} ({padding[worst] / expected:.1%})."
            + (" Record without capacity limits, or drop the padded tokens." if share > 0.1 else ""),
        )
    yield from _layers(load)
    yield from _repeated_choices(trace)
    yield from _origins(trace)


def _conservation(load: np.ndarray, expected: int, padding: np.ndarray) -> Finding:
    """load: float64[layer, expert]; expected: tokens × k; padding: int64[layer]"""
    off = np.flatnonzero(load.sum(axis=1) != expected - padding)
    if not off.size:
        less = " less the padding" if padding.any() else ""
        return Finding("ok", f"Every layer's counts add up to tokens × k = {expected}{less}.")
    layer = off[0]
    return Finding(
        "error",
        f"Layer {layer} counts {load[layer].sum():.0f} choices, but tokens × k less padding is "
        f"{expected - padding[layer]}; record the layer again.",
    )


def _layers(load: np.ndarray) -> Iterator[Finding]:
    """Layers without tokens, with all mass on one expert, with experts never used. load: float64[layer, expert]"""
    total = load.sum(axis=1)
    if (silent := np.flatnonzero(total == 0)).size:
        yield Finding(
            "error",
            f"{_name('layer', silent)} received no tokens at all; the recorder missed it, or it is a dense layer: "
            "record again or drop it.",
        )
    single = np.flatnonzero((total > 0) & (load.max(axis=1) == total)) if load.shape[1] > 1 else np.empty(0, np.int64)
    if (zero := single[load[single].argmax(axis=1) == 0]).size:
        yield Finding(
            "error",
            f"In {_name('layer', zero)} every token went to expert 0: a known capture fault (a buffer of zeros that "
            "was never written); record again with the engine's routing capture switched on.",
        )
    if (other := np.setdiff1d(single, zero)).size:
        yield Finding(
            "warning", f"In {_name('layer', other)} every token went to a single expert; check the recording first."
        )
    idle = (load == 0).sum(axis=1) * (total > 0)
    if idle.any():
        worst = int(idle.argmax())
        yield Finding(
            "warning",
            f"In {np.count_nonzero(idle)} of {len(load)} layers some experts were never chosen (layer {worst}: "
            f"{idle[worst]} of {load.shape[1]}); record more tokens to see how rare they are.",
        )
    else:
        yield Finding("ok", f"All {load.shape[1]} experts of every layer with tokens were chosen.")


def _repeated_choices(trace: RoutingTrace) -> Iterator[Finding]:
    repeated = np.zeros(trace.experts.shape[:2], bool)
    for choice in range(1, trace.k):
        for earlier in range(choice):
            same = trace.experts[:, :, choice] == trace.experts[:, :, earlier]
            repeated |= same & (trace.experts[:, :, choice] >= 0)
    if repeated.any():
        token, layer = np.argwhere(repeated)[0]
        yield Finding(
            "error",
            f"{repeated.sum()} times a token chose the same expert twice in one layer (first: token {token}, layer "
            f"{layer}); a top-k router cannot do that, so the axes or the id folding of the recording are wrong.",
        )


def _origins(trace: RoutingTrace) -> Iterator[Finding]:
    if trace.source_rank is not None:
        present = np.unique(trace.source_rank)
        ranks = int(present[-1]) + 1
        if gaps := ranks - len(present):
            missing = int((present != np.arange(len(present))).argmax())
            yield Finding(
                "warning",
                f"{gaps} of {ranks} source ranks have no tokens (first: rank {missing}); add the missing ranks' files, "
                "or drop source_rank to spread the tokens evenly.",
            )
        else:
            yield Finding("ok", f"All {ranks} source ranks have tokens.")
    elif trace.sequence is not None and trace.tokens > 1 and (trace.sequence == trace.sequence[0]).all():
        yield Finding(
            "warning", "All tokens belong to one sequence, so they would all start on one GPU; record several requests."
        )


def _load(workload: ExpertLoad) -> Iterator[Finding]:
    total = workload.load.sum(axis=1)
    usual = float(np.median(total))
    worst = int(np.abs(total - usual).argmax())
    apart = abs(total[worst] - usual) / usual
    if apart > LOAD_TOLERANCE:
        yield Finding(
            "warning",
            f"Layer {worst} counted {total[worst]:.0f} token copies, the median layer {usual:.0f}; every layer sees "
            "the same tokens, so some were dropped, or recorded over different steps: record all layers together.",
        )
    else:
        same = f", equal to within {apart:.2g} of it" if apart else ""
        yield Finding("ok", f"Every layer counted {usual:.0f} token copies{same}.")
    yield from _layers(workload.load)


def _traffic(workload: TrafficMatrix) -> Iterator[Finding]:
    ranks = workload.bytes.shape[1]
    remote = np.where(np.eye(ranks, dtype=bool), 0.0, workload.bytes)
    silent = np.flatnonzero(remote.sum(axis=(1, 2)) == 0)
    if silent.size:
        yield Finding("error", f"{_name('layer', silent)} moves no bytes between ranks; record it again or drop it.")
    for axis, does in ((2, "sends"), (1, "receives")):
        if (idle := np.flatnonzero(remote.sum(axis=(0, axis)) == 0)).size:
            yield Finding(
                "warning", f"{_name('rank', idle)} {does} nothing in any layer; check that its file was recorded."
            )
    if not silent.size:
        yield Finding("ok", f"Traffic between {ranks} ranks in {workload.layers} layers.")


def _name(what: str, numbers: np.ndarray) -> str:
    """`layer 3` or `layer 3 (and 4 more)`."""
    return f"{what} {numbers[0]}" + (f" (and {len(numbers) - 1} more)" if len(numbers) > 1 else "")
