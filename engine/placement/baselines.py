"""Placements of experts that look at little or nothing, to compare the exact ones with.

All take `slots`: int64[gpu], the experts each GPU takes, and return gpu_of_expert int64[expert]. They raise InputError
where the slots cannot hold the experts.
"""

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError


def sorted_assignment(
    tokens_of_expert: NDArray[np.float64], speed: NDArray[np.float64], slots: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The rule of Aurora Theorem 5.1: experts by falling tokens onto GPUs by falling performance.

    The theorem has one expert to a GPU. With more the GPUs are dealt to in rounds, the fastest first in each, those without
    a free slot left out. Ties go to the lower index.

    tokens_of_expert: float64[expert]
    speed: float64[gpu], any unit, higher is faster
    """
    tokens_of_expert, speed = np.asarray(tokens_of_expert), np.asarray(speed)
    slots = _slots(slots, len(tokens_of_expert))
    if speed.shape != slots.shape:
        raise InputError(f"speed: {speed.size} values for {len(slots)} GPUs")
    fastest_first = np.argsort(-speed, kind="stable")
    deal = np.concatenate([fastest_first[slots[fastest_first] > turn] for turn in range(slots.max())])
    gpu_of_expert = np.empty(len(tokens_of_expert), dtype=np.int64)
    gpu_of_expert[np.argsort(-tokens_of_expert, kind="stable")] = deal[: len(tokens_of_expert)]
    return gpu_of_expert


def round_robin_assignment(experts: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Experts dealt to the GPUs one by one in GPU order, those without a free slot left out."""
    slots = _slots(slots, experts)
    deal = np.concatenate([np.flatnonzero(slots > turn) for turn in range(slots.max())])
    return deal[:experts]


def random_assignment(experts: int, slots: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Random GPU assignment (RGA in Aurora section 8): every way to fill the slots is equally likely."""
    slots = _slots(slots, experts)
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(slots)), slots))[:experts]


def linear_assignment(experts: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Contiguous blocks of experts in GPU order, as frameworks place them by default."""
    slots = _slots(slots, experts)
    return np.repeat(np.arange(len(slots)), slots)[:experts]


def _slots(slots: NDArray[np.int64], experts: int) -> NDArray[np.int64]:
    slots = np.asarray(slots, dtype=np.int64)
    if slots.ndim != 1 or slots.size == 0 or slots.min() < 0 or slots.sum() < experts or experts < 1:
        raise InputError(f"slots: {slots.sum()} places for {experts} experts; every expert needs one")
    return slots
