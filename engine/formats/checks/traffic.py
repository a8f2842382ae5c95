"""Layers and ranks of a traffic matrix between which nothing moves."""

from collections.abc import Iterator

import numpy as np

from engine.finding import Finding
from engine.formats.checks.layers import DROP
from engine.formats.checks.words import name_of
from engine.workload import TrafficMatrix


def silent_layers(matrix: TrafficMatrix) -> np.ndarray:
    """int64[...]: layers that move no bytes between ranks."""
    return np.flatnonzero(~_remote(matrix).any(axis=(1, 2)))


def _remote(matrix: TrafficMatrix) -> np.ndarray:
    """float64[layer, src, dst]: bytes without what stays on its rank."""
    return np.where(np.eye(matrix.bytes.shape[1], dtype=bool), 0.0, matrix.bytes)


def check_traffic(matrix: TrafficMatrix) -> Iterator[Finding]:
    """What nobody sends or receives."""
    ranks = matrix.bytes.shape[1]
    silent = silent_layers(matrix)
    if silent.size:
        yield Finding(
            severity="error",
            code="silent-layers",
            message=f"{name_of('layer', silent)} moves no bytes between ranks; record it again or drop it.",
            layers=tuple(silent.tolist()),
            remedy=DROP if len(silent) < matrix.layers else None,
        )
    remote = _remote(matrix)
    for axis, does in ((2, "sends"), (1, "receives")):
        if (idle := np.flatnonzero(remote.sum(axis=(0, axis)) == 0)).size:
            yield Finding(
                severity="warning",
                code="silent-ranks",
                message=f"{name_of('rank', idle)} {does} nothing in any layer; check that its file was recorded.",
            )
    if not silent.size:
        yield Finding(
            severity="ok",
            code="traffic",
            message=f"Traffic between {ranks} ranks in {matrix.layers} layer{'s' * (matrix.layers > 1)}.",
        )
