"""Placements of experts that look at little or nothing, to compare the exact ones with or to begin a search from.

All take `slots`: int64[gpu], the experts each GPU takes, and return gpu_of_expert int64[expert]. They raise InputError
where the slots cannot hold the experts.
"""

import numpy as np

from engine.errors import InputError
from engine.result import Floats, Ints


def sorted_assignment(tokens_of_expert: Floats, speed: Floats, slots: Ints) -> Ints:
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


def round_robin_assignment(experts: int, slots: Ints) -> Ints:
    """Experts dealt to the GPUs one by one in GPU order, those without a free slot left out."""
    slots = _slots(slots, experts)
    deal = np.concatenate([np.flatnonzero(slots > turn) for turn in range(slots.max())])
    return deal[:experts]


def random_assignment(experts: int, slots: Ints, seed: int) -> Ints:
    """Random GPU assignment (RGA in Aurora section 8): every way to fill the slots is equally likely."""
    slots = _slots(slots, experts)
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(slots)), slots))[:experts]


def linear_assignment(experts: int, slots: Ints) -> Ints:
    """Contiguous blocks of experts in GPU order, as frameworks place them by default."""
    slots = _slots(slots, experts)
    return np.repeat(np.arange(len(slots)), slots)[:experts]


def heaviest_first(load: Floats, slots: Ints) -> Ints:
    """The heaviest experts first, each to the GPU with the least load that has a free slot. load: [expert], in any unit."""
    place, held, left = np.empty(len(load), dtype=np.int64), np.zeros(len(slots)), slots.copy()
    for expert in np.argsort(-load, kind="stable"):
        gpu = int(np.where(left > 0, held, np.inf).argmin())
        place[expert] = gpu
        held[gpu] += load[expert]
        left[gpu] -= 1
    return place


def _slots(slots: Ints, experts: int) -> Ints:
    slots = np.asarray(slots, dtype=np.int64)
    if slots.ndim != 1 or slots.size == 0 or slots.min() < 0 or slots.sum() < experts or experts < 1:
        raise InputError(f"slots: {slots.sum()} places for {experts} experts; every expert needs one")
    return slots
