"""Which expert of one model shares a GPU with which expert of another, on a cluster of equal GPUs: exact.

Aurora section 6.2. A pair's weight is what its GPU sends or receives of the summed all-to-all of both models, whichever
is more, and the largest weight decides the time of that all-to-all (Theorem 4.2). Where every expert receives as much
as it sends, pairing the heaviest of one model with the lightest of the other is optimal (Theorem 6.2); in general it is
a bottleneck assignment.
"""

import time

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError
from engine.placement.bottleneck import bottleneck_assignment, with_slack
from engine.result import Provenance, Result, Status, Stop, library_versions, never

MOST_SMOOTHED = 1024
"""Experts up to which the sum of weights is made least too: that is one assignment, which nothing can stop."""


def colocate(
    send_a: NDArray[np.float64],
    recv_a: NDArray[np.float64],
    send_b: NDArray[np.float64],
    recv_b: NDArray[np.float64],
    stop: Stop = never,
) -> Result[NDArray[np.int64]]:
    """Pair the experts of two models so that the largest pair weight is least, proven.

    send_a, recv_a, send_b, recv_b: float64[expert], what an expert's GPU sends and receives for it, all in one unit of
    bytes, tokens or seconds, finite and at least 0; both models have as many experts.

    `solution` is partner int64[expert of a], the expert of b beside each. Of all optimal pairings it is one with the least
    sum of weights, for up to 1024 experts and while there is time. When `stop` answers True the status is CANCELLED, with
    the best pairing so far. Raises InputError for wrong shapes and values.
    """
    start = time.perf_counter()
    send_a, recv_a, send_b, recv_b = _checked(send_a=send_a, recv_a=recv_a, send_b=send_b, recv_b=recv_b)
    weight = pair_weight(send_a, recv_a, send_b, recv_b)
    if not np.isfinite(weight).all():
        raise InputError("loads are too large: what a pair sends or receives in all is not a finite number")
    partner = sorted_colocation(np.maximum(send_a, recv_a), np.maximum(send_b, recv_b))
    everyone = np.arange(len(partner))
    one_number = np.array_equal(send_a, recv_a) and np.array_equal(send_b, recv_b)
    bound = float(weight[everyone, partner].max())
    if not one_number:
        partner, bound = bottleneck_assignment(weight, partner, stop)
    objective = float(weight[everyone, partner].max())
    # With one number an expert every pairing has the same sum.
    if objective == bound and not one_number and len(partner) <= MOST_SMOOTHED and not stop():
        partner = with_slack(weight, objective)
    return Result(
        status=Status.OPTIMAL if objective == bound else Status.CANCELLED,
        objective=objective,
        bound=bound,
        runtime=time.perf_counter() - start,
        solution=partner,
        provenance=Provenance(optimiser="colocate", versions=library_versions()),
    )


def pair_weight(
    send_a: NDArray[np.float64], recv_a: NDArray[np.float64], send_b: NDArray[np.float64], recv_b: NDArray[np.float64]
) -> NDArray[np.float64]:
    """float64[expert of a, expert of b]: the more of what a pair sends and what it receives; all given float64[expert]."""
    with np.errstate(over="ignore"):  # what is infinite then is refused
        return np.maximum(send_a[:, None] + send_b, recv_a[:, None] + recv_b)


def sorted_colocation(load_a: NDArray[np.float64], load_b: NDArray[np.float64]) -> NDArray[np.int64]:
    """The rule of Aurora Theorem 6.2: the popular experts of a beside the unpopular of b; partner int64[expert of a].

    load_a, load_b: float64[expert]. Optimal where one number an expert decides; ties go to the lower index.
    """
    partner = np.empty(len(load_a), dtype=np.int64)
    partner[np.argsort(load_a, kind="stable")] = np.argsort(-np.asarray(load_b), kind="stable")
    return partner


def random_colocation(experts: int, seed: int) -> NDArray[np.int64]:
    """Random expert colocation (REC in Aurora section 8): partner int64[expert of a], every pairing equally likely."""
    return np.random.default_rng(seed).permutation(experts)


def _checked(**loads: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    loads = {name: np.asarray(load, dtype=np.float64) for name, load in loads.items()}
    experts = loads["send_a"].size
    for name, load in loads.items():
        if load.ndim != 1 or load.size != experts or not experts:
            raise InputError(f"{name}: shape {load.shape}; wanted one value for each of the {experts or 'n'} experts")
        if not np.isfinite(load).all() or load.min() < 0:
            raise InputError(f"{name}: every value must be finite and at least 0")
    return list(loads.values())
