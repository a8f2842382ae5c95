"""What a top-k router cannot have chosen, and choices that are not there."""

from collections.abc import Iterator

import numpy as np

from engine import units
from engine.finding import Finding
from engine.workload import RoutingTrace

ROWS_AT_ONCE = 1 << 16
"""What stays in the processor's cache."""


def ids_outside(trace: RoutingTrace) -> Finding | None:
    """Ids that are no expert's: nothing else can be said of such a recording."""
    if trace.experts.min(initial=0) >= -1 and trace.experts.max(initial=0) < trace.num_experts:
        return None
    outside = (trace.experts < -1) | (trace.experts >= trace.num_experts)
    token, layer, _ = np.argwhere(outside)[0]
    return Finding(
        severity="error",
        code="ids-out-of-range",
        message=(
            f"{outside.sum()} expert ids lie outside 0 … {trace.num_experts - 1}, the first at token {token}, layer "
            f"{layer}; fold physical slots back to logical experts, or correct the number of experts."
        ),
    )


def check_choices(trace: RoutingTrace) -> Iterator[Finding]:
    """Whether every layer counts tokens × k, how much of it is padding, and experts chosen twice by one token."""
    expected, padded = trace.tokens * trace.k, trace.experts.min(initial=0) < 0
    padding = (trace.experts < 0).sum(axis=(0, 2)) if padded else np.zeros(trace.layers, dtype=np.int64)
    yield _conservation(trace.load, expected, padding)
    if padded:
        share, worst = padding.sum() / trace.experts.size, int(padding.argmax())
        yield Finding(
            severity="warning" if share > 0.1 else "ok",
            code="padding",
            message=(
                f"{units.share(share)} of the choices are padding (−1), most in layer {worst} "
                f"({units.share(padding[worst] / expected)})."
                + (" Record without capacity limits, or drop the padded tokens." if share > 0.1 else "")
            ),
        )
    yield from _repeated_choices(trace)


def _conservation(load: np.ndarray, expected: int, padding: np.ndarray) -> Finding:
    """load: float64[layer, expert]; expected: tokens × k; padding: int64[layer]"""
    off = np.flatnonzero(load.sum(axis=1) != expected - padding)
    if not off.size:
        less = " less the padding" if padding.any() else ""
        return Finding(
            severity="ok",
            code="conservation",
            message=f"Every layer's counts add up to tokens × k = {expected:,}{less}.",
        )
    layer = int(off[0])
    return Finding(
        severity="error",
        code="conservation",
        message=(
            f"Layer {layer} counts {load[layer].sum():,.0f} choices, but tokens × k less padding is "
            f"{expected - padding[layer]:,}; record the layer again."
        ),
        layers=tuple(off.tolist()),
    )


def _repeated_choices(trace: RoutingTrace) -> Iterator[Finding]:
    """Layers that nobody wrote, all of whose choices are expert 0, are for `check_layers` to name."""
    written = np.flatnonzero(~never_written(trace))
    rows = trace.experts.reshape(-1, trace.k)
    repeated = np.concatenate(
        [_repeats(rows[start : start + ROWS_AT_ONCE]) for start in range(0, len(rows), ROWS_AT_ONCE)]
    ).reshape(trace.tokens, trace.layers)
    if not repeated[:, written].any():
        return
    token, place = np.argwhere(repeated[:, written])[0]
    layers = written[repeated[:, written].any(axis=0)]
    yield Finding(
        severity="error",
        code="repeated-choices",
        message=(
            f"{repeated[:, written].sum()} times a token chose the same expert twice in one layer (first: token {token}, layer "
            f"{written[place]}); a top-k router cannot do that, so the axes or the id folding of the recording are wrong."
        ),
        layers=tuple(layers.tolist()),
    )


def _repeats(rows: np.ndarray) -> np.ndarray:
    """bool[row]: whether an expert is in a row (int16[row, k]) twice."""
    choices = np.ascontiguousarray(rows.T)
    twice = np.zeros(len(rows), dtype=bool)
    for at, choice in enumerate(choices):
        for earlier in choices[:at]:
            same = choice == earlier
            if same.any():
                twice |= same & (choice >= 0)
    return twice


def never_written(trace: RoutingTrace) -> np.ndarray:
    """bool[layer]: all choices are expert 0, more than there are tokens, so that some token would have chosen it twice:
    a buffer of zeros in which nobody wrote, as SGLang's is for dense layers (srt/layers/topk_capturer_base.py)."""
    total = trace.load.sum(axis=1)
    return (trace.load[:, 0] == total) & (total > trace.tokens)
