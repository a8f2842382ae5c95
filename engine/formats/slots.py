"""Loads of physical slots, which hold copies of experts, as loads of experts."""

import numpy as np


def fold_slots(counts: np.ndarray, physical_to_logical: np.ndarray, experts: int) -> np.ndarray:
    """float64[..., layer, expert]: what the slots of every expert counted together.

    counts: float64[..., layer, slot]; physical_to_logical: int[layer, slot], the expert in every slot, where each of the
    `experts` has a slot in every layer
    """
    folded = np.empty((*counts.shape[:-1], experts))
    for layer, expert_of_slot in enumerate(physical_to_logical):
        order = np.argsort(expert_of_slot, kind="stable")
        first_slot = np.searchsorted(expert_of_slot[order], np.arange(experts))
        folded[..., layer, :] = np.add.reduceat(counts[..., layer, order], first_slot, axis=-1)
    return folded
