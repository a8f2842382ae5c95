"""Where a token's experts are likely to be, from loads alone: held against all sets of experts, one by one."""

from itertools import combinations
from math import comb, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.communication.travel import touched_by_chance
from tests.cases.examples import examples
from tests.strategies import seeds


def by_enumeration(weight: np.ndarray, k: int, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probability of every expert and of every place, over all sets of k experts."""
    sets = list(combinations(range(len(weight)), k))
    chance = np.array([prod(weight[expert] for expert in chosen) for chosen in sets])
    chance /= chance.sum()
    present = np.array(
        [sum(p for p, chosen in zip(chance, sets, strict=True) if e in chosen) for e in range(len(weight))]
    )
    missed = np.array([prod(1 - share[expert] for expert in chosen) for chosen in sets])
    return present, 1 - chance @ missed


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(2, 7), st.integers(1, 3), st.integers(1, 3), seeds)
def test_against_all_sets(experts, k, places, seed):
    k, rng = min(k, experts), np.random.default_rng(seed)
    weight = rng.gamma(1.5, size=experts) + 0.05
    share = rng.dirichlet(np.ones(places), experts)
    present, touched = by_enumeration(weight, k, share)
    # Loads are all that is known of the weights
    assert touched_by_chance(present * 1000, k, share) == pytest.approx(touched, abs=2e-4)


def test_equal_loads_are_combinatorics():
    """256 experts, 8 a token, 4 nodes of 64: 4 · (1 − C(192, 8) / C(256, 8))."""
    touched = touched_by_chance(np.ones(256), 8, np.eye(4)[np.arange(256) // 64])
    assert touched.sum() == pytest.approx(4 * (1 - comb(192, 8) / comb(256, 8)), rel=1e-9)


def test_many_layers_at_once_are_each_by_itself():
    rng = np.random.default_rng(3)
    load, share = rng.zipf(1.6, (5, 24)).clip(0, 40).astype(float), np.eye(6)[np.arange(24) // 4]
    whole = touched_by_chance(load, 4, share)
    for layer in range(5):
        assert whole[layer] == pytest.approx(touched_by_chance(load[layer], 4, share), abs=1e-4)


def test_an_expert_that_every_token_has_and_one_that_none_has():
    share = np.eye(3)
    assert touched_by_chance(np.array([100.0, 100.0, 0.0]), 2, share) == pytest.approx([1, 1, 0], abs=1e-4)
    # More copies than tokens can have: the recording counted something twice, and the rest is shared out
    assert touched_by_chance(np.array([150.0, 25.0, 25.0]), 2, share) == pytest.approx([1, 0.5, 0.5], abs=1e-4)
    assert touched_by_chance(np.zeros(3), 2, share).tolist() == [0, 0, 0]
