"""An upper limit of the overlap: the same problem where a dW may be split over several all-to-alls is a maximum flow."""

import math

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from engine.overlap.weight_gradients.instance import WeightGradientInstance

CAPACITY = 2**30
"""Units of all dW or all all-to-alls together, whichever is more: SciPy's flows are 32-bit integers."""


def cut_bound(instance: WeightGradientInstance) -> float:
    """Seconds of overlap that no assignment can exceed, also none that splits a dW at will.

    The flow is found in rounded units, but its minimum cut is added up in seconds, and every cut of a network limits its
    flow: rounding can make the bound a little higher than the maximum flow, never too low. (Lower by round-off: 1e-15.)
    """
    return cut_value(instance, _cut(instance))


def cut_value(instance: WeightGradientInstance, cut: NDArray[np.bool_]) -> float:
    """Seconds of the all-to-alls in `cut`, bool[m], and of the dW that may run under any other."""
    useful = instance.allowed[:, ~cut].any(axis=1)
    return math.fsum(instance.alltoall[cut].tolist()) + math.fsum(instance.dw[useful].tolist())


def _cut(instance: WeightGradientInstance) -> NDArray[np.bool_]:
    """bool[m]: the all-to-alls whose edges into the sink are in a minimum cut of the rounded network."""
    w, m = instance.allowed.shape
    unit = max(instance.alltoall.sum(), instance.dw.sum()) / CAPACITY
    if unit == 0:
        return np.zeros(m, dtype=bool)
    dw, alltoall = instance.allowed.nonzero()
    source, sink = w + m, w + m + 1
    tail = np.concatenate([np.full(w, source), dw, w + np.arange(m)])
    head = np.concatenate([np.arange(w), w + alltoall, np.full(m, sink)])
    between = np.full(len(dw), CAPACITY)
    seconds = np.concatenate([instance.dw, instance.alltoall]) / unit
    capacity = np.concatenate([seconds[:w], between, seconds[w:]]).astype(np.int32)
    network = sp.csr_array((capacity, (tail, head)), shape=(sink + 1, sink + 1))
    residual = network - maximum_flow(network, source, sink).flow
    residual.eliminate_zeros()
    reached = np.zeros(sink + 1, dtype=bool)
    reached[breadth_first_order(residual, source, return_predecessors=False)] = True
    return reached[w : w + m]
