"""Weight-gradient computations (dW) under the all-to-alls of a backward pass, so that most time is overlapped.

Lancet section 4. Maximise sum_j min(t_j, sum of the dW under j): several subset-sum problems at once, NP-hard, where a sum that
is too long costs nothing by itself. The paper fills one all-to-all after the other ("greedy"). "best" begins with that or with
closest sums and divides the dW of two all-to-alls anew, again and again, which mostly meets the bound. If not, it goes through
the states after each all-to-all, where eligible sets are nested as in a backward pass, and as a last resort asks CP-SAT.

Here more is better: `bound` is an **upper** limit, `objective <= optimum <= bound`. `Result.gap` is made for costs and
says 0 here; the gain that may be left, relative to the answer, is `bound / objective - 1`.
"""

import time
from functools import partial
from typing import Literal, get_args

from engine.errors import InputError
from engine.overlap.weight_gradients.bounds import best_fit, closest_sums, cut_bound, exchange_search, usual_steps
from engine.overlap.weight_gradients.exact import best_assignment, best_nested, rounding
from engine.overlap.weight_gradients.instance import WeightGradientInstance, overlap, without_idle
from engine.result import Ints, Limits, Report, Result, Stop, never, result_of, status_of

Algorithm = Literal["greedy", "best"]
PROVEN_GAP = 1e-9
ROUND_OFF = 1e-12
SEARCH_SHARE, PROOF_SHARE = 0.4, 0.6
"""Shares of the time limit that exchanges may take when a proof is to follow, and CP-SAT at most: as long as all before it
takes no more than the rest, its limits are the same however fast the machine is."""
FEW_STATES, ALL_STATES = 300, 10**6
"""Collections of waiting dW kept by `best_nested`: first few for a better answer, then all for the proof."""
MOST_CHOICES = 20_000
"""Eligible pairs of a dW and an all-to-all up to which CP-SAT is tried."""


def schedule_weight_gradients(
    instance: WeightGradientInstance,
    limits: Limits = Limits(),
    stop: Stop = never,
    report: Report | None = None,
    *,
    algorithm: Algorithm = "best",
) -> Result[Ints]:
    """The all-to-all of every dW; `solution` is int64[w], -1 where a dW runs under none.

    `objective` is the overlapped time in seconds, `bound` an upper limit of it: a minimum cut of the network in which a dW
    may be split over several all-to-alls, or the limit that a proof found.

    limits: the work is CP-SAT's, all else ends by itself; exact: prove after the search of "best", by states if the eligible
        sets are nested, else by CP-SAT
    algorithm: "best", or "greedy", Lancet's Algorithm 1 without anything added or taken away

    In an answer of "best" every dW that runs under an all-to-all hides something that the others there leave, and it is
    never worse than "greedy". Status OPTIMAL if objective and bound agree to 1e-9, or, where only CP-SAT could prove it, to
    4 (w + m) / 2^30, the most that its rounding to integers may take (relative; `objective` is added up from the durations
    as given, and `bound` is proven for these in any case), TIME_LIMIT if a limit ended search or proof, CANCELLED if `stop`
    answered True, otherwise FEASIBLE. Raises InputError for another algorithm.
    """
    begin = time.perf_counter()
    if algorithm not in get_args(Algorithm):
        raise InputError(f"algorithm: must be 'best' or 'greedy', not '{algorithm}'")
    relative, unit = instance.relative()
    bound, limited, close = cut_bound(relative), False, PROVEN_GAP
    alltoall_of_dw = best_fit(instance)
    if algorithm == "best":
        work = _Work(relative, alltoall_of_dw, bound, limits, stop, report, unit)
        work.run(limits.exact)
        alltoall_of_dw = without_idle(instance, work.best)
        bound, limited, close = work.bound, work.limited, work.close
    objective = overlap(instance, alltoall_of_dw)
    bound = max(bound * unit, objective)
    status = status_of(bound <= objective * (1 + close), stop, limited)
    options = {"algorithm": algorithm, "exact": limits.exact, "time_limit": limits.seconds}
    name = "schedule_weight_gradients"
    return result_of(name, begin, status, objective, bound, alltoall_of_dw, options, limits.seed)


class _Work:
    """The best assignment so far int64[w] of a relative instance, its overlap, and the proven bound."""

    def __init__(
        self,
        instance: WeightGradientInstance,
        start: Ints,
        bound: float,
        limits: Limits,
        stop: Stop,
        report: Report | None,
        unit: float,
    ) -> None:
        self.instance, self.bound, self.limits, self.stop = instance, bound, limits, stop
        self.on_progress, self.unit = report, unit
        self.begin, self.limited, self.close = time.perf_counter(), False, PROVEN_GAP
        self.best, self.objective = start, overlap(instance, start)
        self.report()

    @property
    def proven(self) -> bool:
        return self.bound <= self.objective * (1 + self.close)

    def take(self, alltoall_of_dw: Ints) -> None:
        objective = overlap(self.instance, alltoall_of_dw)
        if objective > self.objective:
            self.best, self.objective = alltoall_of_dw, objective
            self.report()

    def report(self) -> None:
        if self.on_progress:
            self.on_progress(self.objective * self.unit, max(self.bound, self.objective) * self.unit)

    def over(self, share: float = 1.0) -> bool:
        return self.stop() or time.perf_counter() > self.begin + share * self.limits.wall_seconds

    def run(self, exact: bool) -> None:
        """One step after the other until one of them proves the answer."""
        for step in (self.fill, self.exchange, self.states, self.integers):
            if self.proven or self.over():
                break
            step(exact)
        # CP-SAT is only ended by a limit.
        self.limited |= not self.proven and self.over()

    def fill(self, exact: bool) -> None:
        self.take(closest_sums(self.instance, self.over))

    def exchange(self, exact: bool) -> None:
        target, steps = self.bound * (1 - ROUND_OFF), usual_steps(len(self.instance.alltoall))
        share = SEARCH_SHARE if exact else 1.0
        stop = partial(self.over, share)
        self.take(exchange_search(self.instance, self.best, target, steps, self.limits.seed, stop, self.take))
        self.limited = stop()

    def states(self, exact: bool) -> None:
        for width in (FEW_STATES, ALL_STATES)[: 1 + exact]:
            alltoall_of_dw, bound = best_nested(self.instance, self.objective, width, self.over)
            self.bound = min(self.bound, bound)
            if alltoall_of_dw is not None:
                self.take(alltoall_of_dw)
            if self.proven:
                break

    def integers(self, exact: bool) -> None:
        seconds = PROOF_SHARE * self.limits.seconds
        left = self.begin + self.limits.wall_seconds - time.perf_counter()
        if exact and left > 0 and self.instance.allowed.sum() <= MOST_CHOICES:
            limits = Limits(seconds, left, self.limits.seed)
            alltoall_of_dw, bound = best_assignment(self.instance, self.best, self.bound, limits, self.stop)
            self.bound = min(self.bound, bound)
            self.take(alltoall_of_dw)
            self.close = max(PROVEN_GAP, rounding(self.instance))
            self.limited = not self.proven
