"""The copy that serves a rank's tokens, read off each engine's rule expert by expert, with Python's own generator."""

import random

import numpy as np

from engine.plan import Placement, Travel


def copies_of_rank(placement: Placement, travel: Travel, rank: int) -> list[list[int | None]]:
    """[MoE layer][expert]: a GPU, None where all copies serve in turn. travel: a rule that looks at ranks, other than `lp`"""
    per_node, generator, table = travel.ranks_per_node or placement.gpus, random.Random(42), []
    moe = dict(zip(placement.model_layers, placement.experts_of_gpu, strict=True))
    for layer in range(max(moe) + 1):
        row = moe.get(layer) or _dense_row(placement)
        table.append([])
        for expert in range(placement.experts):
            copies = [gpu for gpu, held in enumerate(row) for each in held if each == expert]
            found = _nearest(copies, rank, per_node)
            if travel.replicas == "fixed":
                alive = sorted(set(copies))
                found = alive[rank % len(alive)]
            elif found is None and travel.replicas == "nearest-static":
                others = [each for each in range(placement.gpus) if _nearest(copies, each, per_node) is None]
                times, rest = divmod(len(others), len(copies))
                dealt = copies * times + generator.sample(copies, rest)
                generator.shuffle(dealt)
                found = dealt[others.index(rank)]
            table[-1].append(found)
    return [table[layer] for layer in moe]


def _nearest(copies: list[int], rank: int, per_node: int) -> int | None:
    """The GPU of the only copy, the rank's own, or the first of its node if others are elsewhere."""
    in_node = [gpu for gpu in copies if gpu // per_node == rank // per_node]
    if len(copies) == 1:
        return copies[0]
    if rank in copies:
        return rank
    return in_node[0] if 0 < len(in_node) < len(copies) else None


def _dense_row(placement: Placement) -> list[list[int]]:
    """The experts in turn, in the slots of the first layer."""
    sizes = placement.slots[0]
    row = np.arange(sizes.sum()) % placement.experts
    return [part.tolist() for part in np.split(row, np.cumsum(sizes)[:-1])]
