"""The search over exchanges: never worse than where it began, always legal, and at the optimum of small problems."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.placement.exchange_search import exchange_search
from tests.cases.examples import examples

GPUS, EXPERTS = 3, 6


def planted(seed: int):
    """A random objective of a placement that does not add up over experts."""
    cost = np.random.default_rng(seed).random((GPUS, EXPERTS, EXPERTS))
    return lambda row: float(max(cost[g][np.ix_(row == g, row == g)].sum() for g in range(GPUS)))


def legal(exact: bool, slots: np.ndarray):
    for row in product(range(GPUS), repeat=EXPERTS):
        held = np.bincount(row, minlength=GPUS)
        if np.all(held == slots) if exact else np.all(held <= slots):
            yield np.array(row)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_it_is_legal_repeatable_and_no_worse_than_its_starts(seed, exact):
    slots = np.array([2, 2, 2]) if exact else np.array([4, 3, 2])
    seconds, starts = planted(seed), list(legal(exact, slots))[:2]
    place = exchange_search(starts, slots, exact, seconds, 50, seed)
    held = np.bincount(place, minlength=GPUS)
    assert np.all(held == slots) if exact else np.all(held <= slots)
    assert seconds(place) <= min(map(seconds, starts))
    np.testing.assert_array_equal(place, exchange_search(starts, slots, exact, seconds, 50, seed))


@pytest.mark.parametrize("exact", [True, False])
def test_it_finds_the_optimum_of_most_small_problems(exact):
    slots = np.array([2, 2, 2]) if exact else np.array([4, 3, 2])
    rows, hits = list(legal(exact, slots)), 0
    for seed in range(12):
        seconds = planted(seed)
        place = exchange_search(rows[:1], slots, exact, seconds, 600, seed)
        hits += seconds(place) <= min(map(seconds, rows)) * (1 + 1e-12)
    assert hits >= 10


def test_a_stop_returns_the_best_start():
    rows = list(legal(True, np.array([2, 2, 2])))
    seconds = planted(3)
    place = exchange_search(rows[:5], np.array([2, 2, 2]), True, seconds, 10**9, stop=lambda: True)
    assert seconds(place) == min(map(seconds, rows[:5]))
