"""Two ways to fill the all-to-alls one after the other: Lancet's best fit, and the closest sum of several dW at once."""

import numpy as np
from numpy.typing import NDArray

from engine.overlap.weight_gradients.instance import NOWHERE, WeightGradientInstance
from engine.result import Stop, never

STEPS_OF_ALLTOALL = 1024
"""Resolution of the sums of `closest_sums`, in parts of the all-to-all."""


def best_fit(
    instance: WeightGradientInstance, start: NDArray[np.int64] | None = None, stop: Stop = never
) -> NDArray[np.int64]:
    """Lancet's Algorithm 1 from line 10 on: int64[w], the all-to-all of every dW, -1 for none.

    All-to-alls in their order; each takes, while any of its time is not overlapped, the free dW whose duration is
    closest to that time (the first of several). The paper labels every instruction (lines 5 to 9), here only dW are
    looked at. start: int64[w], an assignment to go on from.
    """
    alltoall_of_dw = np.full(len(instance.dw), NOWHERE, dtype=np.int64) if start is None else start.copy()
    for alltoall, seconds in enumerate(instance.alltoall.tolist()):
        if stop():
            break
        left = seconds - instance.dw[alltoall_of_dw == alltoall].sum()
        free = np.flatnonzero(instance.allowed[:, alltoall] & (alltoall_of_dw == NOWHERE))
        while left > 0 and len(free):
            place = int(np.abs(left - instance.dw[free]).argmin())
            alltoall_of_dw[free[place]] = alltoall
            left -= instance.dw[free[place]]
            free = np.delete(free, place)
    return alltoall_of_dw


def closest_sums(instance: WeightGradientInstance, stop: Stop = never) -> NDArray[np.int64]:
    """int64[w]: all-to-alls by rising number of dW allowed under them; each takes the free dW whose sum is closest to it.

    The sums are those of rounded durations, all of them found by a subset-sum programme on the bits of integers. What
    stays open, for instance because only a dW of more than twice the time is left, is filled by `best_fit`.
    """
    alltoall_of_dw = np.full(len(instance.dw), NOWHERE, dtype=np.int64)
    for alltoall in np.argsort(instance.allowed.sum(axis=0), kind="stable").tolist():
        if stop():
            break
        seconds = instance.alltoall[alltoall]
        free = np.flatnonzero(instance.allowed[:, alltoall] & (alltoall_of_dw == NOWHERE))
        if seconds > 0 and len(free):
            # Limited before the division too, which could overflow.
            part = np.minimum(instance.dw[free], 3 * seconds) / seconds
            size = np.minimum(np.rint(part * STEPS_OF_ALLTOALL), 2 * STEPS_OF_ALLTOALL + 1)
            alltoall_of_dw[free[_closest(size.astype(np.int64).tolist())]] = alltoall
    return best_fit(instance, alltoall_of_dw, stop)


def _closest(sizes: list[int]) -> list[int]:
    """Which of `sizes` add up closest to STEPS_OF_ALLTOALL, of two equally close sums to the larger one."""
    mask, reachable = (1 << 2 * STEPS_OF_ALLTOALL + 1) - 1, [1]
    for size in sizes:
        reachable.append((reachable[-1] | reachable[-1] << size) & mask)
    nearest = (STEPS_OF_ALLTOALL + way * off for off in range(STEPS_OF_ALLTOALL + 1) for way in (1, -1))
    total = next(steps for steps in nearest if reachable[-1] >> steps & 1)
    chosen = []
    for place in reversed(range(len(sizes))):
        if not reachable[place] >> total & 1:
            chosen.append(place)
            total -= sizes[place]
    return chosen
