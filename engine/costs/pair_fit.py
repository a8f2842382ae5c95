"""Ports that meet a matrix of measured pair rates best, as far as a rate for each port can.

Between GPUs of different nodes a pair has the slower of its two ports (see `engine.network`). The fit is in the logarithms:
twice as fast and half as fast are as wrong.
"""

import numpy as np
from scipy.optimize import isotonic_regression

MAX_SWEEPS = 200


def fit_bottlenecks(rate: np.ndarray) -> np.ndarray:
    """float64[gpu]: rates of ports of which the slower one of each pair comes nearest to what was measured.

    rate: float64[gpu, gpu] bytes/s, symmetric, NaN where a pair was not measured; the diagonal does not count. A GPU that no
    pair was measured with gets NaN. The sum of squared differences of logarithms is brought down from three starts, by turns
    exactly for each GPU alone and exactly for all in the order that they have, until nothing moves: a local minimum, and an
    exact answer (difference 0) where there is one, as the fastest rate of every GPU is one of the starts. The fastest port is
    drawn as fast as it was seen to be.
    """
    measured = np.isfinite(rate) & ~np.eye(len(rate), dtype=bool)
    known = measured.any(axis=1)
    fitted = np.full(len(rate), np.nan)
    if not known.any():
        return fitted
    logs = np.where(measured, np.log(np.where(measured, rate, 1.0)), np.nan)[np.ix_(known, known)]
    starts = np.nanmax(logs, axis=1), np.nanmedian(logs, axis=1), _slowest_first(logs)
    settled = [_settle(logs, start) for start in starts]
    fitted[known] = np.exp(min(settled, key=lambda ports: _misfit(logs, ports)))
    return fitted


def _slowest_first(logs: np.ndarray) -> np.ndarray:
    """float64[gpu]: each port the mean of its pairs with those that are faster, the slowest of all that are left in turn."""
    ports, left = np.nanmean(logs, axis=1), np.arange(len(logs))
    while len(left) > 1:
        pairs = logs[np.ix_(left, left)]
        count = np.isfinite(pairs).sum(axis=1)
        if not count.any():
            break
        mean = np.where(count, np.nansum(pairs, axis=1) / np.maximum(count, 1), np.inf)
        slowest = int(np.argmin(mean))
        ports[left[slowest]] = mean[slowest]
        left = np.delete(left, slowest)
    return ports


def _settle(logs: np.ndarray, ports: np.ndarray) -> np.ndarray:
    best = _misfit(logs, ports)
    for _ in range(MAX_SWEEPS):
        ports = min(ports, _all_in_order(logs, ports), key=lambda tried: _misfit(logs, tried))
        for gpu in range(len(ports)):
            peers = np.flatnonzero(np.isfinite(logs[gpu]))
            ports[gpu] = _best_port(logs[gpu, peers], ports[peers])
        before, best = best, _misfit(logs, ports)
        if before - best <= 1e-12 * max(before, 1.0):
            break
    return ports


def _all_in_order(logs: np.ndarray, ports: np.ndarray) -> np.ndarray:
    """The best ports (float64[gpu]) of those that rise in the order of these: then each pair has the port of the earlier one,
    and what remains is an isotonic regression of the means."""
    order = np.argsort(ports, kind="stable")
    later = np.triu(logs[np.ix_(order, order)], 1)
    later[np.tril_indices(len(order))] = np.nan
    count = np.isfinite(later).sum(axis=1)
    mean = np.where(count, np.nansum(later, axis=1) / np.maximum(count, 1), ports[order])
    rising = isotonic_regression(
        mean, weights=np.maximum(count, 1e-9)
    ).x  # without a later pair a port is only in order
    fitted = np.empty(len(order))
    fitted[order] = rising
    return fitted


def _best_port(wanted: np.ndarray, peers: np.ndarray) -> float:
    """The x with the least sum of (min(x, peers) - wanted)², the largest such x. wanted, peers: float64[peer]."""
    order = np.argsort(peers)
    wanted, peers = wanted[order], peers[order]
    count = np.arange(len(peers), 0, -1)
    after = np.cumsum(wanted[::-1])[::-1]  # of the peers from here on, which are faster than x in this stretch
    squares = np.cumsum((wanted**2)[::-1])[::-1]
    slower = np.concatenate([[0.0], np.cumsum((peers - wanted) ** 2)[:-1]])
    below = np.concatenate([[-np.inf], peers[:-1]])
    x = np.clip(after / count, below, peers)
    cost = slower + squares - 2 * x * after + count * x**2
    ties = np.flatnonzero(cost <= cost.min() + 1e-15)
    return float(x[ties[-1]])


def _misfit(logs: np.ndarray, ports: np.ndarray) -> float:
    return float(np.nansum((np.minimum(ports[:, None], ports) - logs) ** 2))
