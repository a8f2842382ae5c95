"""An opponent for the affinity placement: alternating exact assignments from many random starts.

A start places one random layer at random, the other layers one by one from there, each an exact assignment given the
last; then even layers given the odd ones and odd ones given the even ones in turn, until nothing gains. Written for the
comparison on its own, sharing no code with the kernel.
"""

import time

import numpy as np
from scipy.optimize import linear_sum_assignment


def alternating(counts: np.ndarray, gpus: int, seconds: float, seed: int = 0) -> tuple[np.ndarray, int]:
    """(best placement int64[layer, expert], number of starts) for counts float64[layer - 1, expert, expert]."""
    rng = np.random.default_rng(seed)
    layers, experts = len(counts) + 1, counts.shape[1]
    best, most, starts, began = None, -1.0, 0, time.perf_counter()

    def placed(affinity: np.ndarray) -> np.ndarray:
        """Exact for one layer; affinity: float64[expert, gpu]."""
        return linear_sum_assignment(np.repeat(-affinity, experts // gpus, axis=1))[1] // (experts // gpus)

    def pull(place: np.ndarray, layer: int, others: list[int]) -> np.ndarray:
        total = np.zeros((experts, gpus))
        for other in others:
            count = counts[layer] if other > layer else counts[other].T
            np.add.at(total.T, place[other], count.T)
        return total

    while best is None or time.perf_counter() - began < seconds:
        starts += 1
        place = np.empty((layers, experts), dtype=np.int64)
        first = int(rng.integers(layers))
        place[first] = rng.permutation(experts) % gpus
        for layer in range(first + 1, layers):
            place[layer] = placed(pull(place, layer, [layer - 1]))
        for layer in range(first - 1, -1, -1):
            place[layer] = placed(pull(place, layer, [layer + 1]))
        last = -1.0
        while True:
            for layer in [*range(0, layers, 2), *range(1, layers, 2)]:
                beside = [other for other in (layer - 1, layer + 1) if 0 <= other < layers]
                place[layer] = placed(pull(place, layer, beside))
            same = place[:-1, :, None] == place[1:, None, :]
            now = float(counts[same].sum())
            if now <= last:
                break
            last = now
        if last > most:
            best, most = place.copy(), last
    return best, starts
