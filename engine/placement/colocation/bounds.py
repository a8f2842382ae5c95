"""Lower bounds for pairs of experts on mixed GPUs: projections onto two of the three indices, and a weighted mean."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from engine.placement.bottleneck import bottleneck_assignment, with_slack
from engine.placement.colocation.search import Triples
from engine.result import Stop

ROUND_OFF = 1e-11


def projections(cost: NDArray[np.float64], stop: Stop) -> tuple[float, list[Triples]]:
    """A lower bound of the largest cost float64[gpu, expert of a, expert of b], and a state from each projection.

    With one index free to choose its best the other two are a bottleneck assignment, and its largest weight is a bound;
    completed by an assignment of the index left out it is a state.
    """
    gpu = np.arange(len(cost))
    bounds, states = [float(cost.min())], []
    for left_out in range(3):
        if stop():
            break
        weight = cost.min(axis=left_out)
        assignment, bound = bottleneck_assignment(weight, gpu, stop)
        bounds.append(bound)
        assignment = with_slack(weight, float(weight[gpu, assignment].max()))
        if left_out == 0:
            pair = assigned(cost[:, gpu, assignment])
            states.append((pair, assignment[pair]))
        elif left_out == 1:
            states.append((assigned(cost[gpu, :, assignment]), assignment))
        else:
            states.append((assignment, assigned(cost[gpu, assignment, :])))
    return max(bounds), states or [(gpu, gpu)]


def assigned(weight: NDArray[np.float64]) -> NDArray[np.int64]:
    """column_of_row int64[row] with the least largest weight float64[row, column], and of these the least sum."""
    _, most = bottleneck_assignment(weight, np.arange(len(weight)))
    return with_slack(weight, most)


def weighted_mean(cost: NDArray[np.float64]) -> float:
    """A lower bound of the largest cost float64[gpu, expert of a, expert of b]: no mean is above the largest.

    The GPUs' costs are weighted so that the GPUs weigh alike over all pairs. A state's weighted mean is at least the
    least sum over pairs of experts of their least weighted cost on any GPU, a linear assignment. For costs (load of a +
    load of b) / speed the weights become the speeds and the bound all loads over all speeds.
    """
    mean = cost.mean(axis=(1, 2))
    if cost.min() < 0 or mean.min() <= 0:
        return float(cost.min())
    weight = 1 / mean
    weight /= weight.sum()
    least = (weight[:, None, None] * cost).min(axis=0)
    return float(least[linear_sum_assignment(least)].sum()) * (1 - ROUND_OFF)
