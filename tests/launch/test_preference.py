"""Which plan the measurement prefers: against the textbook's formulas, and what noise must not decide."""

from dataclasses import dataclass
from math import comb, exp, log, sqrt
from types import SimpleNamespace

import numpy as np
import pytest

from engine.launch.results.preference import APART, prefer

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 6: 2.571}
"""Student's t by passes: the 97.5 % point with passes - 1 degrees of freedom, from a table."""


@dataclass
class TimedPlan:
    """What `prefer` reads of a `Measured`."""

    name: str
    totals: tuple[float, ...]
    predicted_seconds: float = 1.0

    @property
    def plan(self):
        return SimpleNamespace(name=self.name)

    @property
    def predicted(self):
        return SimpleNamespace(total=self.predicted_seconds)


def test_plans_are_ranked_by_their_median_and_compared_two_by_two():
    preference = prefer(
        [TimedPlan("slow", (3.0, 3.1, 3.2)), TimedPlan("quick", (1.0, 1.1, 9.0)), TimedPlan("middle", (2.0, 2.1, 1.9))]
    )
    assert preference.order == (1, 2, 0)
    assert [(pair.faster, pair.slower) for pair in preference.pairs] == [(1, 2), (1, 0), (2, 0)]


@pytest.mark.parametrize("passes", T_95)
def test_the_interval_is_students_of_the_logarithms_of_paired_passes(passes):
    rng = np.random.default_rng(passes)
    quick = rng.uniform(1, 2, passes)
    factor = rng.uniform(1.05, 1.15, passes)
    (pair,) = prefer([TimedPlan("a", tuple(quick * factor)), TimedPlan("b", tuple(quick))]).pairs
    ratios = [log(value) for value in factor]
    mean = sum(ratios) / passes
    reach = T_95[passes] * sqrt(sum((value - mean) ** 2 for value in ratios) / (passes - 1) / passes)
    assert pair.times == pytest.approx(exp(mean))
    assert (pair.low, pair.high) == pytest.approx((exp(mean - reach), exp(mean + reach)), rel=1e-3)
    assert pair.decided == (pair.low > 1)


@pytest.mark.parametrize(("longer", "passes"), [(3, 3), (2, 3), (5, 6), (6, 6), (2, 4)])
def test_luck_is_that_of_tossed_coins(longer, passes):
    other = (2.0,) * longer + (0.9,) * (passes - longer)
    (pair,) = prefer([TimedPlan("a", (1.0,) * passes), TimedPlan("b", other)]).pairs
    most = max(longer, passes - longer)
    both_sides = 2 * sum(comb(passes, heads) for heads in range(most, passes + 1)) / 2**passes
    assert (pair.agreeing, pair.passes) == (longer, passes)
    assert pair.chance == pytest.approx(min(1.0, both_sides))


def test_what_slows_both_plans_down_is_no_noise():
    drift = np.array([1.0, 1.6, 0.8, 2.5])
    steady = np.array([1.1, 1.11, 1.09, 1.1])
    preference = prefer([TimedPlan("a", tuple(drift)), TimedPlan("b", tuple(drift * steady))])
    assert preference.decided and preference.pairs[0].times == pytest.approx(1.1, rel=0.01)
    mixed = prefer([TimedPlan("a", tuple(drift)), TimedPlan("b", tuple(drift[::-1] * steady))])
    assert not mixed.decided


def test_one_pass_decides_nothing_and_equal_passes_do_not_either():
    (pair,) = prefer([TimedPlan("a", (1.0,)), TimedPlan("b", (5.0,))]).pairs
    assert (pair.low, pair.high, pair.decided) == (None, None, False) and pair.times == pytest.approx(5)
    (pair,) = prefer([TimedPlan("a", (1.0, 2.0)), TimedPlan("b", (1.0, 2.0))]).pairs
    assert (pair.agreeing, pair.chance, pair.decided, pair.times) == (0, 1.0, False, 1.0)


def test_predictions_are_held_against_the_ranking_only_where_they_tell_plans_apart():
    def alike(*predictions: float) -> bool | None:
        plans = [TimedPlan(f"plan {at}", (1.0 + at, 1.0 + at), value) for at, value in enumerate(predictions)]
        return prefer(plans).ranked_alike

    near = APART * 0.999
    assert alike(1.0, 1.2, 1.5) is True
    assert alike(1.0, near) is None and alike(near, 1.0) is None
    assert alike(APART * 1.001, 1.0) is False
    assert alike(1.0, 2.0, 1.5) is False
    assert alike(1.0, near, 2.0) is True and alike(near, 1.0, 2.0) is True


def test_it_is_told_in_words():
    runs = [
        TimedPlan("slow", (2.0, 2.02, 2.01), 2.2),
        TimedPlan("quick", (1.0, 1.01, 1.0), 1.0),
        TimedPlan("like quick", (1.02, 1.0, 1.01), 3.0),
    ]
    preference = prefer(runs)
    first, *others, ranked = preference.lines
    assert first == "too close to call: quick and like quick differ by less than the noise"
    near = prefer([TimedPlan("a", (1.0, 1.02, 1.01), 1.0), TimedPlan("b", (1.02, 1.0, 1.01), 1.01)])
    assert near.lines[-1] == "as predicted: within 10 % of each other"
    once = prefer([TimedPlan("a", (1.0,), 1.0), TimedPlan("b", (2.0,), 1.01)])
    assert "a single pass does not tell" in once.lines[0] and "rank nothing" in once.lines[-1]
    assert "like quick takes 1.01× as long" in others[0] and others[0].endswith("within the noise")
    assert (
        "pass by pass, slow takes 2× as long (1.99× to 2.02× at 95 % confidence)" in others[1]
        and "longer in 3 of 3 passes (p = 0.25)" in others[1]
    )
    assert ranked == "slow was predicted to be faster than like quick (1.36×), but is slower"
    assert prefer(runs[:2]).lines[0] == "measured, quick is the fastest"
    assert "the same way" in prefer(runs[:2]).lines[-1]
    answer = preference.to_dict()
    assert answer["order"] == [1, 2, 0] and answer["lines"] == preference.lines and not answer["decided"]
    assert answer["pairs"][0]["slower"] == 2 and answer["pairs"][2]["foretold"] is False
