"""The loads and sizes that engines' placements are compared on: DeepSeek-R1 on 32 ranks in four nodes, 288 slots a layer."""

import numpy as np

from engine.catalogue import model_presets
from tests.engines.wheels import Row

RANKS, NODES, SPARE, GROUPS = 32, 4, 32, 8
MODEL = model_presets()["DeepSeek-R1"].model
SLOTS = MODEL.experts + SPARE
TIED = 1e-6
"""Busiest GPUs that differ by less, of 1, carry the same load: loads were compared in single precision."""


def loads_of(layers: int, experts: int) -> np.ndarray:
    """float64[layer, expert]: skewed loads, drawn."""
    return np.random.default_rng(0).lognormal(0.0, 1.0, (layers, experts)) * 1000


LOAD = loads_of(len(MODEL.moe_layers), MODEL.experts)


def served(slots: np.ndarray, load: np.ndarray = LOAD, ranks: int = RANKS) -> np.ndarray:
    """float64[layer, rank] loads of a placement, int[layer, slot], if the copies of an expert share equally."""
    copies = np.stack([np.bincount(row, minlength=MODEL.experts) for row in slots])
    return np.take_along_axis(load / copies, slots, axis=1).reshape(len(slots), ranks, -1).sum(axis=2)


def placements_row(
    compared: str, package: str, ours: np.ndarray, theirs: np.ndarray, load: np.ndarray = LOAD, ranks: int = RANKS
) -> Row:
    """The row of two placements by the same algorithm, int[layer, slot]: layers with the same experts on every rank, and how
    far the busiest rank of the others differs, which holds if they tie."""
    held = [np.sort(each.reshape(len(each), ranks, -1)) for each in (ours, theirs)]
    other = (held[0] != held[1]).any(axis=(1, 2))
    most = [served(each, load, ranks).max(axis=1) for each in (ours, theirs)]
    apart = float(np.abs(most[0] / most[1] - 1)[other].max(initial=0))
    said = f"{int((~other).sum())} of {len(ours)}" + (f"; busiest rank of the others within {apart:.1g}" if other.any() else "")
    return Row(f"{compared}, layers alike", package, said, apart <= TIED)
