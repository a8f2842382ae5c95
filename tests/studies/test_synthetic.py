"""Synthetic routing: what is measured in it is what was asked for."""

import numpy as np
import pytest

from engine.compare.inspection import predicted_share
from engine.compare.synthetic import Recipe, expert_of_rank, planted_placement, popularity, synthetic
from engine.errors import InputError
from engine.placement.transitions import kept, transitions
from tests.strategies import make_model

TOKENS = 20_000


def trace_of(skew: float, affinity: float, k: int = 1, seed: int = 0, layers: int = 4, experts: int = 12):
    return synthetic(make_model(layers, experts, k), Recipe(TOKENS, skew, affinity, seed))


@pytest.mark.parametrize("k", [1, 3])
def test_tokens_choose_distinct_experts_and_the_log_says_that_it_is_synthetic(k: int) -> None:
    trace = trace_of(1.0, 0.5, k)
    assert trace.experts.shape == (TOKENS, 4, k) and trace.experts.dtype == np.int16
    assert trace.experts.min() == 0 and trace.experts.max() == 11
    assert all(len(set(row)) == k for row in trace.experts[:500].reshape(-1, k).tolist())
    assert trace.name == "synthetic, skew 1, affinity 0.5, 20,000 tokens"
    assert trace.digest == trace_of(1.0, 0.5, k).digest != trace_of(1.0, 0.5, k, seed=1).digest


def test_popularity_is_the_power_law_in_every_layer() -> None:
    trace, wanted = trace_of(1.2, 0.7), popularity(12, 1.2)
    measured = np.take_along_axis(trace.load, expert_of_rank(4, 12, 0), axis=1) / TOKENS
    assert np.abs(measured - wanted).max() < 5 * np.sqrt(0.25 / TOKENS)
    assert popularity(12, 0) == pytest.approx(1 / 12)
    assert popularity(5, 1.0)[0] / popularity(5, 1.0)[3] == pytest.approx(4)


@pytest.mark.parametrize("k", [1, 3])
def test_measured_skew_goes_up_with_skew(k: int) -> None:
    skews = [(load := trace_of(skew, 0.3, k).load).max() / load.mean() for skew in (0, 0.4, 0.8, 1.2, 2.0)]
    assert (np.diff(skews) > 0).all() and skews[0] < 1.1


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_measured_affinity_goes_up_with_affinity(skew: float) -> None:
    predicted, stays = [], []
    place = planted_placement(4, 12, 3, 0)
    for affinity in (0.0, 0.3, 0.6, 0.9, 1.0):
        trace = trace_of(skew, affinity)
        predicted.append(predicted_share(trace).mean())
        stays.append(kept(place, transitions(trace.experts, 12)))
    assert (np.diff(stays) > 0).all() and stays[-1] == 1
    assert (np.diff(predicted) > -0.01).all() and predicted[-1] == 1
    assert predicted[0] == pytest.approx(popularity(12, skew)[0], abs=0.02), "the most popular one is the best guess"


def test_without_affinity_layers_are_independent() -> None:
    """Chi-squared over all pairs of neighbouring experts stays within what chance does to it."""
    trace = trace_of(0.7, 0.0)
    for pairs in transitions(trace.experts, 12):
        expected = np.outer(pairs.sum(axis=1), pairs.sum(axis=0)) / pairs.sum()
        freedom = 11 * 11
        assert ((pairs - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_the_planted_placement_is_even_and_keeps_chains() -> None:
    place = planted_placement(3, 12, 4, 5)
    assert all(np.bincount(row).tolist() == [3, 3, 3, 3] for row in place)
    ranks = expert_of_rank(3, 12, 5)
    homes = np.take_along_axis(place, ranks, axis=1)
    assert (homes == homes[0]).all()
    assert np.bincount(homes[0], popularity(12, 1.0)).max() < 0.45


@pytest.mark.parametrize(
    "recipe, said",
    [
        ((0, 1, 0), "tokens 0"),
        ((10, -1, 0), "skew -1"),
        ((10, 1, 1.1), "affinity 1.1"),
        ((10, float("nan"), 0), "skew nan"),
        ((10**7, 1, 0), "tokens"),
        ((10, 1, 0, -1), "seed"),
    ],
)
def test_recipes_that_cannot_be(recipe, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Recipe(*recipe)


def test_a_log_that_is_too_large_is_refused() -> None:
    with pytest.raises(InputError, match="ask for at most 104,166 tokens"):
        synthetic(make_model(60, 64, 8), Recipe(200_000, 1, 0))


@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (300, 1), (4096, 8), (65_536, 128), (200_000, 128)])
def test_a_log_has_sequences_for_the_gpus_of_a_large_cluster(tokens, length):
    trace = synthetic(make_model(1, 8, 1), Recipe(tokens, 0.0, 0.0))
    assert np.bincount(trace.sequence).max() == length and trace.sources >= min(tokens, 512)
    assert (np.bincount(trace.rank_of_token(320), minlength=320) > 0).sum() == min(tokens, 320)
