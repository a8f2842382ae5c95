"""An upper limit of the overlap, two ways to fill the all-to-alls one after the other, and a search by pairs of them.

The limit: the same problem where a dW may be split over several all-to-alls is a maximum flow. The two ways are Lancet's best
fit, and the closest sum of several dW at once. The search divides the dW of two all-to-alls anew, again and again.
"""

import math
from collections.abc import Callable

import numpy as np

from engine.overlap.weight_gradients.instance import NOWHERE, WeightGradientInstance
from engine.result import Bools, Floats, Ints, Stop, never

CAPACITY = 2**30
"""Units of all dW or all all-to-alls together, whichever is more: SciPy's flows are 32-bit integers."""
STEPS_OF_ALLTOALL = 1024
"""Resolution of the sums of `closest_sums`, in parts of the all-to-all."""
MOST_ANEW = 12
"""dW that are divided anew at once; all 2^12 divisions are looked at."""
WARM, COOL = 0.02, 0.005
"""Temperature at the beginning and at the end, in median dW durations: about the loss that a step may bring."""
STEPS_OF_PAIR = 25
MOST_STEPS = 40_000
STEPS_PER_POLL = 64


def cut_bound(instance: WeightGradientInstance) -> float:
    """Seconds of overlap that no assignment can exceed, also none that splits a dW at will.

    The flow is found in rounded units, but its minimum cut is added up in seconds, and every cut of a network limits its
    flow: rounding can make the bound a little higher than the maximum flow, never too low. (Lower by round-off: 1e-15.)
    """
    cut = _cut(instance)
    useful = instance.allowed[:, ~cut].any(axis=1)
    return math.fsum(instance.alltoall[cut].tolist()) + math.fsum(instance.dw[useful].tolist())


def _cut(instance: WeightGradientInstance) -> Bools:
    """bool[m]: the all-to-alls with an edge into the sink that is in a minimum cut of the rounded network."""
    import scipy.sparse as sp
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

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


def best_fit(instance: WeightGradientInstance, start: Ints | None = None, stop: Stop = never) -> Ints:
    """Lancet's Algorithm 1 from line 10 on: int64[w], the all-to-all of every dW, -1 for none.

    All-to-alls in their order; each takes, while any of its time is not overlapped, the free dW with the duration
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


def closest_sums(instance: WeightGradientInstance, stop: Stop = never) -> Ints:
    """int64[w]: all-to-alls by rising number of dW allowed under them; each takes the free dW with the sum closest to it.

    The sums are those of rounded durations, all of them found by a subset-sum programme on the bits of integers. Time that
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
    """The places of `sizes` that add up closest to STEPS_OF_ALLTOALL, of two equally close sums to the larger one."""
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


def usual_steps(alltoalls: int) -> int:
    """Steps after which the search hardly gets better."""
    return min(STEPS_OF_PAIR * (alltoalls + 1) * alltoalls // 2, MOST_STEPS)


def exchange_search(
    instance: WeightGradientInstance,
    start: Ints,
    target: float,
    steps: int,
    seed: int,
    stop: Stop,
    on_incumbent: Callable[[Ints], None],
) -> Ints:
    """int64[w], no worse than `start`, int64[w], after at most `steps` steps; ends when the overlap reaches `target`.

    A step takes two all-to-alls, or one and the dW that run under none, and draws a division of their dW, the more
    likely the more it overlaps (Gibbs sampling, slowly cooled). Every division of a dozen dW is known by its sum, so a
    step sees thousands of neighbours, among them exchanges of several dW for several. A heuristic: it proves nothing.
    """
    w, m = instance.allowed.shape
    rng = np.random.default_rng(seed)
    # Running under none is one more all-to-all that takes no time.
    seconds = np.append(instance.alltoall, 0.0)
    allowed = np.hstack([instance.allowed, np.ones((w, 1), dtype=bool)])
    here = np.where(start == NOWHERE, m, start)
    gain = np.minimum(seconds, np.bincount(here, instance.dw, m + 1))
    best, most = here.copy(), gain.sum()
    typical = float(np.median(instance.dw[instance.dw > 0])) if instance.dw.any() else 1.0
    for step in range(steps):
        if most >= target or (step % STEPS_PER_POLL == 0 and stop()):
            break
        p, q = rng.choice(m + 1, 2, replace=False).tolist()
        of_p, of_q = here == p, here == q
        movable = np.flatnonzero((of_p | of_q) & allowed[:, p] & allowed[:, q])
        if not len(movable):
            continue
        if len(movable) > MOST_ANEW:
            movable = rng.choice(movable, MOST_ANEW, replace=False)
        of_p[movable] = of_q[movable] = False
        to_p = subset_sums(instance.dw[movable])
        gain_p = np.minimum(seconds[p], instance.dw[of_p].sum() + to_p)
        gain_q = np.minimum(seconds[q], instance.dw[of_q].sum() + (to_p[-1] - to_p))
        temperature = typical * WARM * (COOL / WARM) ** (step / steps)
        chosen = int((gain_p + gain_q + temperature * rng.gumbel(size=len(to_p))).argmax())
        here[movable] = np.where(chosen >> np.arange(len(movable)) & 1, p, q)
        gain[p], gain[q] = gain_p[chosen], gain_q[chosen]
        if gain.sum() > most:
            best, most = here.copy(), gain.sum()
            on_incumbent(np.where(best == m, NOWHERE, best))
    return np.where(best == m, NOWHERE, best)


def subset_sums(values: Floats) -> Floats:
    """float64[2^n]: at every number the sum of the values at its set bits, the first value at the lowest."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums, sums + value])
    return sums
