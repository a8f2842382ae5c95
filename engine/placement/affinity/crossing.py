"""The best placement that takes every layer from one of several placements, GPUs renamed where it changes over.

Good placements tend to agree on much and to be better in different stretches of layers. With all hops alike the names of
the GPUs after a layer are free, so the kept hops between layer l of one placement and layer l + 1 of another are an
assignment problem over GPUs, and dynamic programming over the layers picks the sources.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment


def cross(
    counts: NDArray[np.float64], places: NDArray[np.int64], gpus: int, within: NDArray[np.float64] | None = None
) -> NDArray[np.int64]:
    """Placement int64[layer, expert] that keeps at least as many hops on GPUs as each of int64[member, layer, expert].

    counts: float64[layer - 1, expert, expert]; within: float64[member, layer], hops kept between experts of the layer
    (None: there are none).
    """
    members, layers, _ = places.shape
    within = np.zeros((members, layers)) if within is None else within
    value = within[:, 0].copy()
    origin = np.empty((layers - 1, members), dtype=np.int64)
    for layer, count in enumerate(counts):
        shared = _shared(count, places[:, layer], places[:, layer + 1], gpus)
        joined = np.empty((members, members))
        for first in range(members):
            for second in range(members):
                row, column = linear_sum_assignment(shared[first, :, second], maximize=True)
                joined[first, second] = shared[first, row, second, column].sum()
        joined += value[:, None]
        origin[layer] = joined.argmax(axis=0)
        value = joined.max(axis=0) + within[:, layer + 1]
    source = [int(value.argmax())]
    for row in origin[::-1]:
        source.append(int(row[source[-1]]))
    source.reverse()
    place = np.empty(places.shape[1:], dtype=np.int64)
    place[0] = places[source[0], 0]
    for layer, count in enumerate(counts):
        following = places[source[layer + 1], layer + 1]
        shared = _shared(count, place[None, layer], following[None], gpus)[0, :, 0]
        before, after = linear_sum_assignment(shared, maximize=True)
        name = np.empty(gpus, dtype=np.int64)
        name[after] = before
        place[layer + 1] = name[following]
    return place


def _shared(
    count: NDArray[np.float64], before: NDArray[np.int64], after: NDArray[np.int64], gpus: int
) -> NDArray[np.float64]:
    """Hops float64[member, gpu, member, gpu] between the GPUs of int64[member, expert] and those one layer on."""
    here = (before[:, None, :] == np.arange(gpus)[:, None]).astype(np.float64).reshape(-1, count.shape[0])
    there = (after[:, None, :] == np.arange(gpus)[:, None]).astype(np.float64).reshape(-1, count.shape[0])
    return (here @ count @ there.T).reshape(len(before), gpus, len(after), gpus)
