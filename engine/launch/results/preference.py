"""The plan of several in one job that the measurement prefers, and a test that it is more than noise.

The plans ran in turn, A B A B, so pass i of one and pass i of another are neighbours in time: a slow spell of the
machine slows both, and their ratio is free of it. Two plans are told apart by the mean of the logarithms of these
ratios. Its Student interval (95 %, passes - 1 degrees of freedom) says how far chance may have moved it; a sign test,
which assumes no distribution at all, is reported too.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from engine.launch.results.run import MeasuredPlan
from engine.units import ratio, share

CONFIDENCE = 0.95

APART = 1.10
"""Predictions that differ by less than this do not say how the measurement should rank two plans."""


@dataclass(frozen=True)
class Pair:
    """Two plans of one job by their places among its plans, the one with the shorter median pass first.

    times: time of the slower one over that of the faster one, geometric mean over the passes
    low, high: its interval at `CONFIDENCE`, None after a single pass
    agreeing: passes of all `passes` in which the faster one was faster
    chance: probability of passes that agree as much, whichever way, if both were equally fast
    predicted_times: as predicted
    """

    faster: int
    slower: int
    times: float
    low: float | None
    high: float | None
    agreeing: int
    passes: int
    chance: float
    predicted_times: float

    @property
    def decided(self) -> bool:
        """True if the faster one is faster by more than noise."""
        return self.low is not None and self.low > 1

    @property
    def ahead(self) -> bool:
        """True if noise is not ruled out, but the faster one was so in every pass of several, and clearly."""
        return not self.decided and self.passes > 1 and self.agreeing == self.passes and self.times > APART

    @property
    def as_predicted(self) -> bool | None:
        """True if the prediction ranks them as the measurement does; None if it does not tell them apart."""
        if 1 / APART <= self.predicted_times <= APART:
            return None
        return self.predicted_times > 1


@dataclass(frozen=True)
class Preference:
    """The plans of a job, ranked.

    order: their places, the shortest median pass first
    pairs: every two of them
    """

    names: tuple[str, ...]
    order: tuple[int, ...]
    pairs: tuple[Pair, ...]

    @property
    def decided(self) -> bool:
        """True if the first one is faster than every other by more than noise."""
        return all(pair.decided for pair in self.pairs if pair.faster == self.order[0])

    @property
    def ranked_alike(self) -> bool | None:
        """True if the measurement ranks the plans as predicted wherever predictions differ by more than `APART`; None
        if they nowhere do."""
        verdicts = [pair.as_predicted for pair in self.pairs if pair.as_predicted is not None]
        return all(verdicts) if verdicts else None

    @property
    def lines(self) -> list[str]:
        """The finding in words, a line each."""
        best, comparisons = self.names[self.order[0]], []
        of_best = [pair for pair in self.pairs if pair.faster == self.order[0]]
        for pair in of_best:
            about = f"pass by pass, {self.names[pair.slower]} takes {ratio(pair.times)} as long"
            if pair.low is not None:
                about += f" ({ratio(pair.low)} to {ratio(pair.high)} at {share(CONFIDENCE)} confidence)"
            about += f", longer in {pair.agreeing} of {pair.passes} passes (p = {pair.chance:.2g})"
            few = "too few passes to rule out noise" if pair.ahead else "within the noise"
            comparisons.append(about if pair.decided else f"{about}: {few}")
        first = f"measured, {best} is the fastest"
        if not self.decided and all(pair.decided or pair.ahead for pair in of_best):
            first += " in every pass"
        elif not self.decided:
            close = [self.names[pair.slower] for pair in of_best if not (pair.decided or pair.ahead)]
            first = f"too close to call: {', '.join([best, *close[:-1]])} and {close[-1]} differ by less than the noise"
            if self.pairs[0].passes == 1:
                first = f"measured, {best} has the lowest time, but a single pass does not tell it from noise"
        ahead = all(pair.decided or pair.ahead for pair in of_best)
        worst = max(of_best, key=lambda pair: pair.times)
        measured = f"{self.names[worst.slower]} takes {ratio(worst.times)} as long"
        if self.ranked_alike is None:
            within = f"within {share(APART - 1)} of each other"
            ranked = f"the predictions, {within}, rank nothing"
            if not ahead and self.pairs[0].passes > 1:
                ranked = f"as predicted: {within}"
            elif worst.times > APART:
                ranked += f": {measured}, predicted {ratio(worst.predicted_times)}"
        elif self.ranked_alike:
            ranked = f"as predicted: {measured}, predicted {ratio(worst.predicted_times)}"
            if not ahead:
                ranked = f"the ranking held where predictions differ by more than {share(APART - 1)}"
        else:
            ranked = "; ".join(
                f"{self.names[pair.slower]} was predicted to be faster than {self.names[pair.faster]} "
                f"({ratio(1 / pair.predicted_times)}), but is slower"
                for pair in self.pairs
                if pair.as_predicted is False
            )
        return [first, *comparisons, ranked]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        pairs = [asdict(pair) | {"decided": pair.decided, "foretold": pair.as_predicted} for pair in self.pairs]
        told = {name: getattr(self, name) for name in ("decided", "ranked_alike", "lines")}
        return {"order": list(self.order), "pairs": pairs} | told


def prefer(runs: Sequence[MeasuredPlan]) -> Preference:
    """Compare the plans of one job, pass by pass."""
    from scipy.stats import binomtest, t

    passes = np.array([run.totals for run in runs])
    order = np.argsort(np.median(passes, axis=1), kind="stable").tolist()
    pairs = []
    for faster, slower in combinations(order, 2):
        log = np.log(passes[slower] / passes[faster])
        count, middle = len(log), float(log.mean())
        low = high = None
        if count > 1:
            reach = float(t.ppf((1 + CONFIDENCE) / 2, count - 1) * log.std(ddof=1) / np.sqrt(count))
            low, high = float(np.exp(middle - reach)), float(np.exp(middle + reach))
        agreeing, unlike = int((log > 0).sum()), int((log != 0).sum())
        chance = float(binomtest(agreeing, unlike).pvalue) if unlike else 1.0
        predicted = runs[slower].predicted.total / runs[faster].predicted.total
        pairs.append(Pair(faster, slower, float(np.exp(middle)), low, high, agreeing, count, chance, predicted))
    return Preference(tuple(run.plan.name for run in runs), tuple(order), tuple(pairs))
