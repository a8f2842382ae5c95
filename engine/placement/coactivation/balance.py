"""Experts on GPUs for the least load of the busiest one: where a search under a cap begins, and whether the cap can be kept."""

import math

import numpy as np
from numpy.typing import NDArray

from engine.placement.replication import ReplicationInstance, replicate


def balanced(
    load: NDArray[np.int64], gpus: int, most_load: int, seconds: float, seed: int, hurry: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], int]:
    """(gpu_of_expert int64[expert], equally many on each GPU; tokens that the busiest GPU has in any placement at least).

    load: int64[expert], tokens. Within `most_load` wherever that was found possible;
    hurry: bool[1], set by another thread to end.
    """
    place = heaviest_first(load, gpus)
    if np.bincount(place, weights=load).max() <= most_load:
        return place, 0
    # Slots for one replica of each expert: what is left of replication is balance.
    instance = ReplicationInstance(load[None, None].astype(np.float64), len(load), gpus)
    result = replicate(instance, time_limit=seconds, seed=seed, stop=lambda: bool(hurry[0]))
    place[result.solution[0]] = np.arange(len(load)) // (len(load) // gpus)
    return place, math.ceil(load.sum() / gpus / result.bound * (1 - 1e-9))


def heaviest_first(load: NDArray[np.int64], gpus: int) -> NDArray[np.int64]:
    """The heaviest experts first, each to the GPU with the least load that has room: int64[expert]."""
    place = np.empty(len(load), dtype=np.int64)
    busy, room = np.zeros(gpus), np.full(gpus, len(load) // gpus)
    for expert in np.argsort(-load, kind="stable"):
        gpu = np.where(room > 0, busy, np.inf).argmin()
        place[expert] = gpu
        busy[gpu] += load[expert]
        room[gpu] -= 1
    return place
