"""How balanced any replication can be at best.

All limits are of the time of the slowest GPU in units of the ideal (see `search`), and hold for both ways to
split an expert's tokens, whether or not two replicas of it share a GPU.
"""

import numpy as np
from numpy.typing import NDArray

from engine.placement.replication.greedy import greedy_counts

ROUND_OFF = 1e-12
"""By how much a limit gives way, so that no sum of floats can put it above the optimum."""


def least_time(
    load: NDArray[np.float64], slots_of_gpu: NDArray[np.int64], speed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """float64[row] time below which the slowest GPU cannot come under the worst load.

    load: float64[row, load, expert]; slots_of_gpu: int64[gpu]; speed: float64[gpu].
    """
    bound = _fewest_replicas(load.max(axis=1), slots_of_gpu, speed)
    for bound_of_load in (
        load.sum(axis=2) / speed.sum(),
        _reach(load, slots_of_gpu, speed),
        _crowd(load, slots_of_gpu, speed),
    ):
        bound = np.maximum(bound, bound_of_load.max(axis=1))
    return bound * (1 - ROUND_OFF)


def _fewest_replicas(
    greatest: NDArray[np.float64], slots_of_gpu: NDArray[np.int64], speed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """float64[row]: n hosts give an expert at most the speed of the n fastest GPUs, and there are only so many slots.

    greatest: float64[row, expert], the greatest load of the expert in any of the loads, for they share the counts.
    """
    fastest = np.cumsum(-np.sort(-speed[slots_of_gpu > 0]))
    slots = int(slots_of_gpu.sum())
    capacity = np.r_[1.0, fastest, np.full(max(slots - len(fastest), 0), fastest[-1])]
    count = greedy_counts(greatest, slots, capacity)
    return (greatest / capacity[count]).max(axis=1)


def _reach(
    load: NDArray[np.float64], slots_of_gpu: NDArray[np.int64], speed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """float64[row, load]: some GPUs with c slots together take at most the c heaviest experts, the others the rest."""
    heaviest = np.cumsum(-np.sort(-load, axis=2), axis=2)
    heaviest = np.concatenate([np.zeros_like(heaviest[..., :1]), heaviest], axis=2)
    bound = np.zeros(load.shape[:2])
    for order in (np.argsort(slots_of_gpu, kind="stable"), np.argsort(slots_of_gpu / speed, kind="stable")):
        slots = np.minimum(np.cumsum(slots_of_gpu[order])[:-1], load.shape[2])
        others = speed.sum() - np.cumsum(speed[order])[:-1]
        rest = heaviest[..., -1:] - heaviest[..., slots]
        bound = np.maximum(bound, (rest / others).max(axis=2, initial=0.0))
    return bound


def _crowd(
    load: NDArray[np.float64], slots_of_gpu: NDArray[np.int64], speed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """float64[row, load]: the k heaviest experts find no more GPUs than the slots that the others leave them."""
    experts, spare = load.shape[2], int(slots_of_gpu.sum()) - load.shape[2]
    fastest = np.cumsum(-np.sort(-speed[slots_of_gpu > 0]))
    hosts = np.minimum(spare + np.arange(1, experts + 1), len(fastest))
    return (np.cumsum(-np.sort(-load, axis=2), axis=2) / fastest[hosts - 1]).max(axis=2)
