"""Layers without tokens, with all mass on one expert, with experts never used."""

from collections.abc import Iterator

import numpy as np

from engine.finding import Finding
from engine.formats.checks.choices import never_written
from engine.formats.checks.words import name_of
from engine.workload import ExpertLoad, RoutingTrace

DROP = "drop-empty-layers"


def empty_layers(workload: RoutingTrace | ExpertLoad) -> np.ndarray:
    """int64[...]: layers that no router wrote: without any tokens, or with all of them at expert 0 of several."""
    total = workload.load.sum(axis=1)
    return np.flatnonzero((total == 0) | ((workload.load[:, 0] == total) & (workload.num_experts > 1)))


def check_layers(workload: RoutingTrace | ExpertLoad) -> Iterator[Finding]:
    """How tokens are spread over the experts of each layer."""
    load = workload.load
    total = load.sum(axis=1)
    empty = empty_layers(workload)
    # Where no layer was captured there is nothing to keep.
    remedy = DROP if 0 < len(empty) < len(load) else None
    if (silent := np.flatnonzero(total == 0)).size:
        yield Finding(
            severity="error",
            code="silent-layers",
            message=(
                f"{name_of('layer', silent)} received no tokens at all; the recorder missed it, or it is a dense layer: "
                "record again or drop it."
            ),
            layers=tuple(silent.tolist()),
            remedy=remedy,
        )
    unwritten = np.flatnonzero(never_written(workload)) if isinstance(workload, RoutingTrace) else silent[:0]
    if unwritten.size:
        yield Finding(
            severity="error",
            code="never-captured",
            message=(
                f"In {name_of('layer', unwritten)} all {workload.k} choices of every token are expert 0, which no "
                "router makes: the layer is dense, or was never captured. "
                + ("Drop it." if remedy else "Record again with the engine's routing capture switched on.")
            ),
            layers=tuple(unwritten.tolist()),
            remedy=remedy,
        )
    yield from _single_expert(load, np.setdiff1d(empty, np.concatenate([silent, unwritten])), remedy)
    yield _idle_experts(load, np.setdiff1d(np.arange(len(load)), empty))


def _single_expert(load: np.ndarray, zero: np.ndarray, remedy: str | None) -> Iterator[Finding]:
    """load: float64[layer, expert]; zero: int64[...], layers with all mass on expert 0"""
    if zero.size:
        yield Finding(
            severity="error",
            code="expert-zero",
            message=(
                f"In {name_of('layer', zero)} every token went to expert 0: a known capture fault (a buffer of zeros that "
                "was never written); record again with the engine's routing capture switched on"
                + (", or drop the layer if it is a dense one." if remedy else ".")
            ),
            layers=tuple(zero.tolist()),
            remedy=remedy,
        )
    rest = load[:, 1:]
    if (single := np.flatnonzero((rest.sum(axis=1) > 0) & (load.max(axis=1) == load.sum(axis=1)))).size:
        yield Finding(
            severity="warning",
            code="single-expert",
            message=f"In {name_of('layer', single)} every token went to a single expert; check the recording first.",
            layers=tuple(single.tolist()),
        )


def _idle_experts(load: np.ndarray, written: np.ndarray) -> Finding:
    """load: float64[layer, expert]; written: int64[...], layers that some router wrote"""
    idle = np.zeros(len(load), dtype=np.int64)
    idle[written] = (load[written] == 0).sum(axis=1)
    if not idle.any():
        return Finding(
            severity="ok",
            code="idle-experts",
            message=f"All {load.shape[1]} experts of every layer with tokens were chosen.",
        )
    worst = int(idle.argmax())
    return Finding(
        severity="warning",
        code="idle-experts",
        message=(
            f"In {np.count_nonzero(idle)} of {len(load)} layers some experts were never chosen (layer {worst}: "
            f"{idle[worst]} of {load.shape[1]}); record more tokens to see how rare they are."
        ),
        layers=tuple(np.flatnonzero(idle).tolist()),
    )
