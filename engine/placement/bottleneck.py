"""Bottleneck assignment: a perfect matching of rows to columns whose largest weight is least, by threshold search."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from engine.placement.assignment import Matching
from engine.result import Stop, never


def bottleneck_assignment(
    weight: NDArray[np.float64], known: NDArray[np.int64], stop: Stop = never
) -> tuple[NDArray[np.int64], float]:
    """column_of_row int64[row] with the least largest weight, and a proven lower bound of that weight.

    weight: float64[row, column], square and finite; known: int64[row], a perfect matching to start from, which is also
    the answer unless there is a better one. The bound equals the answer's largest weight unless `stop` answered True.
    """
    rows = np.arange(len(weight))
    best = np.asarray(known, dtype=np.int64)
    most = float(weight[rows, best].max())
    unavoidable = max(weight.min(axis=0).max(), weight.min(axis=1).max())
    values = np.unique(weight[(weight >= unavoidable) & (weight < most)])
    matching = Matching(weight, weight, stop)
    matching.expert_of_gpu, matching.gpu_of_expert = best.tolist(), np.argsort(best).tolist()
    # No matching stays below values[low], one stays within values[high] (`most` beyond the end). Whether there is
    # anything better at all is asked first: in a local search there seldom is.
    low, high = 0, len(values)
    middle = high - 1
    while low < high and not stop():
        fits = matching.fit(values[middle], values[middle])
        if fits is None:
            break
        if fits:
            best = np.array(matching.expert_of_gpu)
            high = int(np.searchsorted(values, weight[rows, best].max()))
        else:
            low = middle + 1
        middle = (low + high) // 2
    return best, float(values[low]) if low < len(values) else most


def with_slack(weight: NDArray[np.float64], most: float) -> NDArray[np.int64]:
    """column_of_row int64[row] of the least sum of weights among the perfect matchings without a weight above `most`.

    There must be such a matching. Every row whose weight falls gains slack under the bottleneck.
    """
    return linear_sum_assignment(np.where(weight <= most, weight, np.inf))[1].astype(np.int64)
