"""Search by dividing the dW of two all-to-alls anew, again and again."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.overlap.weight_gradients.instance import NOWHERE, WeightGradientInstance
from engine.result import Stop

MOST_ANEW = 12
"""dW that are divided anew at once; all 2^12 divisions are looked at."""
WARM, COOL = 0.02, 0.005
"""Temperature at the beginning and at the end, in median dW durations: about what a step may lose."""
STEPS_OF_PAIR = 25
MOST_STEPS = 40_000
STEPS_PER_POLL = 64


def usual_steps(alltoalls: int) -> int:
    """Steps after which the search hardly gets better."""
    return min(STEPS_OF_PAIR * (alltoalls + 1) * alltoalls // 2, MOST_STEPS)


def exchange_search(
    instance: WeightGradientInstance,
    start: NDArray[np.int64],
    target: float,
    steps: int,
    seed: int,
    stop: Stop,
    on_incumbent: Callable[[NDArray[np.int64]], None],
) -> NDArray[np.int64]:
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


def subset_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[2^n]: at every number the sum of the values at its set bits, the first value at the lowest."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums, sums + value])
    return sums
