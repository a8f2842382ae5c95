"""Which number of spare slots is advised, and that noise never advises more of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compare.judge import RESAMPLES, deviation
from engine.compare.redundancy import Knee, RedundancyPoint, knee
from tests.cases.examples import examples
from tests.strategies import seeds


def points(*gains: float, noise: np.ndarray | float = 0.0) -> list[RedundancyPoint]:
    """From four slots on, two GPUs with one more each at a time. noise: float64[point, draw], or alike everywhere; the first
    point is the one that gains are over, and has none."""
    noise = np.broadcast_to(noise, (len(gains), RESAMPLES))
    return [
        RedundancyPoint(
            slots=4 + 2 * turn,
            spare=2 * turn,
            slots_of_gpu=2 + turn,
            balancedness=1.0,
            least_balancedness=1.0,
            planned_balancedness=1.0,
            seconds=1.0,
            gain=gain,
            memory_bytes=0.0,
            gpu_bytes=0.0,
            error=deviation(noise[turn]) if turn else 0.0,
            gain_worst=gain,
            draws=gain + noise[turn] if turn else np.zeros(RESAMPLES),
        )
        for turn, gain in enumerate(gains)
    ]


ALTERNATING = np.resize([0.05, -0.05], RESAMPLES)
"""Noise with a standard deviation of 0.05 · √(24 / 23)."""


@pytest.mark.parametrize(
    ("gains", "slots", "rule"),
    [
        ((0.0, 0.09, 0.1), 6, "enough"),  # nine tenths of the most
        ((0.0, 0.089, 0.1), 8, "enough"),
        ((0.0, 0.1, 0.05), 6, "enough"),  # more is worse
        ((0.0, 0.009, 0.0099), 4, "too little"),
        ((0.0, 0.0, 0.01), 8, "enough"),
        ((0.0, -0.1, -0.2), 4, "too little"),
        ((0.0,), 4, "too little"),
    ],
)
def test_the_knee_where_nothing_is_noise(gains, slots, rule):
    advised = knee(points(*gains))
    assert (advised.slots, advised.rule) == (slots, rule)


def test_a_gain_that_may_as_well_be_nothing_advises_no_spare_slots():
    """8 % more, plus or minus twice 5 %."""
    advised = knee(points(0.0, 0.04, 0.08, noise=ALTERNATING))
    assert (advised.slots, advised.rule) == (4, "noise")
    assert advised.reason == (
        "the most that any number of spare slots brings may as well be nothing (+8.0 % with 8 slots, 95 % interval "
        "-2.0 % to +18.0 %)"
    )


def test_what_cannot_be_told_from_nearly_the_most_is_enough():
    """Nine tenths of 20 % are 4 % more than 14 %; that the noise of the two is of opposite sign leaves open."""
    opposite = np.stack([ALTERNATING * 0, -ALTERNATING, ALTERNATING])
    advised = knee(points(0.0, 0.14, 0.2, noise=opposite))
    assert (advised.slots, advised.rule) == (6, "as good")
    assert advised.reason == (
        "the fewest whose gain cannot be told from 90 % of the most that any number brings (+20.0 % with 8 slots, 95 % "
        "interval +10.0 % to +30.0 %)"
    )


def test_what_differs_alike_in_every_draw_is_told_apart():
    """The same noise at both numbers: in every draw the larger one gains 6 % more, less a tenth of the noise."""
    advised = knee(points(0.0, 0.14, 0.2, noise=ALTERNATING))
    assert (advised.slots, advised.rule) == (8, "enough")
    assert advised.reason.startswith(
        "the fewest that bring 90 % of the most that any number brings (+20.0 % with 8 slots"
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(-0.3, 0.5), min_size=1, max_size=6), seeds, st.floats(0, 0.2), st.floats(1, 5))
def test_more_noise_never_advises_more_slots(gains, seed, size, more):
    noise = size * np.random.default_rng(seed).standard_normal((len(gains) + 1, RESAMPLES))
    fewer, advised = (knee(points(0.0, *gains, noise=scale * noise)).slots for scale in (more, 1.0))
    assert fewer <= advised <= knee(points(0.0, *gains)).slots


def test_advice_survives_json():
    advised = knee(points(0.0, 0.09, 0.1))
    assert Knee.from_json(advised.to_json(), "advice") == advised
