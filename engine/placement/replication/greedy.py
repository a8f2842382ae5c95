"""Replica counts and a first packing, greedily, for many layers at once.

Rows are layers, or nodes of layers. A layout is int64[row, gpu, place]: which expert has the slot, -1 where a GPU has
fewer slots than the largest one.
"""

import numpy as np
from numpy.typing import NDArray


def greedy_counts(load: NDArray[np.float64], slots: int, capacity: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64[row, expert] replicas, at least 1 each and `slots` in all, so that max load / capacity[replicas] is least.

    load: float64[row, expert]; capacity: float64[most replicas + 1], rising in the number of replicas, entry 0 unused.
    Replica by replica to the expert with the greatest quotient, which no other counts can undercut. Ties: lower index.
    """
    count = np.ones(load.shape, dtype=np.int64)
    quotient, row = load / capacity[1], np.arange(len(load))
    if len(capacity) == 2:
        quotient[:] = -1.0
    for _ in range(slots - load.shape[1]):
        expert = quotient.argmax(axis=1)
        count[row, expert] += 1
        now = count[row, expert]
        full = now == len(capacity) - 1
        quotient[row, expert] = np.where(full, -1.0, load[row, expert] / capacity[now])
    return count


def counts_of(expert: NDArray[np.int64], experts: int) -> NDArray[np.int64]:
    """int64[row, expert]: replicas of every expert."""
    rows = len(expert)
    flat = np.where(expert < 0, experts, expert).reshape(rows, -1) + np.arange(rows)[:, None] * (experts + 1)
    return np.bincount(flat.ravel(), minlength=rows * (experts + 1)).reshape(rows, experts + 1)[:, :experts]


def equal_weights(expert: NDArray[np.int64], load: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[row, load, gpu, place] where load float64[row, load, expert] divides equally over the replicas."""
    share = load / np.maximum(counts_of(expert, load.shape[2]), 1)[:, None]
    rows, loads = load.shape[:2]
    flat = np.maximum(expert, 0).reshape(rows, 1, -1)
    weight = np.take_along_axis(share, np.broadcast_to(flat, (rows, loads, flat.shape[2])), axis=2)
    return np.where(expert[:, None] < 0, 0.0, weight.reshape(rows, loads, *expert.shape[1:]))


def packed(
    load: NDArray[np.float64], count: NDArray[np.int64], slots_of_gpu: NDArray[np.int64], speed: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Longest processing time first: each replica, heaviest first, where it ends soonest; int64[row, gpu, place].

    load: float64[row, expert]; count: int64[row, expert], which adds up to the slots in every row.
    """
    rows, experts = load.shape
    gpus, slots, row = len(slots_of_gpu), int(slots_of_gpu.sum()), np.arange(rows)
    share = load / count
    heaviest_first = np.argsort(-share, axis=1, kind="stable")
    ordered_count = np.take_along_axis(count, heaviest_first, axis=1)
    ordered = np.repeat(heaviest_first.ravel(), ordered_count.ravel()).reshape(rows, slots)
    weights = np.take_along_axis(share, ordered, axis=1)
    layout = np.full((rows, gpus, int(slots_of_gpu.max())), -1, dtype=np.int64)
    held = np.zeros((rows, gpus), dtype=np.int64)
    total = np.zeros((rows, gpus))
    has = np.zeros((rows, experts, gpus), dtype=bool)
    full = np.broadcast_to(np.where(slots_of_gpu == 0, np.inf, 0.0), (rows, gpus)).copy()
    repeats = count.max() > 1
    again = 4.0 * load.sum(axis=1, keepdims=True).max() / speed.min() + 1.0
    for step in range(slots):
        expert, weight = ordered[:, step], weights[:, step]
        end = (total + weight[:, None]) / speed + full
        if repeats:
            end += has[row, expert] * again
        gpu = end.argmin(axis=1)
        layout[row, gpu, held[row, gpu]] = expert
        has[row, expert, gpu] = True
        total[row, gpu] += weight
        held[row, gpu] += 1
        full[row, gpu] = np.where(held[row, gpu] == slots_of_gpu[gpu], np.inf, 0.0)
    return layout
