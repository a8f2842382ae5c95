"""Synthetic routing and imbalance workloads have the skew they state; recordings at a glance."""

import numpy as np
import pytest

from engine.compare import inspection
from engine.compare.imbalance import PRESETS, ImbalanceRecipe, _subsets, hot_pool, imbalanced, load_of_steps
from engine.compare.inspection import inspect, predicted_share
from engine.compare.synthetic import Recipe, expert_of_rank, planted_placement, popularity, synthetic
from engine.errors import InputError
from engine.placement.transitions import kept, transitions
from engine.timeline import Balance
from engine.workload import RoutingTrace
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
    ("kind", "recipe", "said"),
    [
        (Recipe, (0, 1, 0), "tokens 0"),
        (Recipe, (10, -1, 0), "skew -1"),
        (Recipe, (10, 1, 1.1), "affinity 1.1"),
        (Recipe, (10**7, 1, 0), "tokens"),
        (Recipe, (10, 1, 0, -1), "seed"),
        (ImbalanceRecipe, ("w8", 100), "no preset 'w8'; there are w0, w1, w2, w3, w4, w5, w6, w7"),
        (ImbalanceRecipe, ("w1", 0), "tokens 0"),
        (ImbalanceRecipe, ("w6", 100, 101), "steps 101 is not between 1 and 100"),
        (ImbalanceRecipe, ("w6", 1000, 241), "steps 241 is not between 1 and 240"),
    ],
)
def test_recipes_that_cannot_be(kind, recipe, said: str) -> None:
    with pytest.raises(InputError, match=said):
        kind(*recipe)


def test_a_log_that_is_too_large_is_refused() -> None:
    with pytest.raises(InputError, match="ask for at most 104,166 tokens"):
        synthetic(make_model(60, 64, 8), Recipe(200_000, 1, 0))
    with pytest.raises(InputError, match=r"choices; ask for at most 62,500 tokens"):
        imbalanced(make_model(100, 16, 8), ImbalanceRecipe("w1", 65_536))


@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (300, 1), (4096, 8), (65_536, 128), (200_000, 128)])
def test_a_log_has_sequences_for_the_gpus_of_a_large_cluster(tokens, length):
    trace = synthetic(make_model(1, 8, 1), Recipe(tokens, 0.0, 0.0))
    assert np.bincount(trace.sequence).max() == length and trace.sources >= min(tokens, 512)
    assert (np.bincount(trace.rank_of_token(320), minlength=320) > 0).sum() == min(tokens, 320)


MANY_TOKENS = 24_000
EXPERTS = 16


@pytest.mark.parametrize("workload", PRESETS)
@pytest.mark.parametrize(("experts", "k"), [(16, 1), (16, 4), (8, 4), (7, 3), (12, 2)])
def test_tokens_choose_distinct_experts_of_the_model(workload, experts, k):
    trace = imbalanced(make_model(2, experts, k), ImbalanceRecipe(workload, 96))
    assert trace.experts.shape == (96, 2, k) and trace.num_experts == experts
    assert trace.experts.min() >= 0 and trace.experts.max() < experts
    assert all(len(set(row)) == k for row in trace.experts.reshape(-1, k).tolist())


def test_balanced_is_a_round_robin():
    trace = imbalanced(make_model(2, 6, 2), ImbalanceRecipe("w0", 9, steps=1))
    by_hand = [[0, 1], [2, 3], [4, 5]] * 3
    assert trace.experts[:, 0].tolist() == trace.experts[:, 1].tolist() == by_hand
    assert Balance.of(trace.load).worst == 1
    assert Balance.of(imbalanced(make_model(2, 6, 2), ImbalanceRecipe("w0", 99)).load).worst == 1, "has no steps"


@pytest.mark.parametrize(
    ("workload", "share", "hot"),
    [
        *(("w1", 0.75, range(4)), ("w2", 0.75, range(4)), ("w3", 0.75, range(0, 16, 2))),
        *(("w4", 1.0, range(16)), ("w5", 1.0, range(8, 16))),
    ],
)
def test_a_share_of_the_tokens_chooses_hot_experts(workload, share, hot):
    """And the others among all: within five standard deviations of as many tosses."""
    trace = imbalanced(make_model(3, EXPERTS, 2), ImbalanceRecipe(workload, MANY_TOKENS))
    load, expected = trace.load.mean(axis=0) / MANY_TOKENS, np.full(EXPERTS, (1 - share) * 2 / 16)
    expected[list(hot)] += share * 2 / len(hot)
    assert np.abs(load - expected).max() < 5 * np.sqrt(0.25 / (3 * MANY_TOKENS)) and (load[expected == 0] == 0).all()


def steps_of(workload: str, steps: int = 12) -> np.ndarray:
    """float64[step, expert]: the share of a step's tokens that choose each expert."""
    trace = imbalanced(make_model(1, EXPERTS, 2), ImbalanceRecipe(workload, MANY_TOKENS, steps))
    loads = load_of_steps(trace, steps)
    assert loads.sum(axis=0).tolist() == trace.load.tolist()
    assert loads[1, 0].tolist() == np.bincount(trace.experts[MANY_TOKENS // steps :][: MANY_TOKENS // steps].ravel()).tolist()
    return loads[:, 0] / (MANY_TOKENS / steps)


def test_the_hotspot_rotates_every_three_steps():
    hottest = np.argsort(-steps_of("w6"), axis=1)[:, :4]
    assert [sorted(row) for row in hottest.tolist()] == [
        [4 * quarter + i for i in range(4)] for quarter in range(4) for _ in range(3)
    ]
    pool, of_four = hot_pool("w6", 10, 4, 6)  # it wraps where quarters do not divide the experts
    assert pool.tolist() == [8, 9, 0, 1] and of_four == (False, True, True, True)


def test_every_fourth_step_is_a_burst():
    first_quarter = steps_of("w7")[:, :4].sum(axis=1) / 2
    expected = np.where(np.arange(12) % 4 == 3, 0.5 + 0.5 / 4, 1 / 4)
    assert first_quarter == pytest.approx(expected, abs=0.05)


def test_which_tokens_choose_hot_experts():
    """Tokens 1, 2 and 3 of every four; in a burst the even ones."""
    hot = imbalanced(make_model(1, 64, 1), ImbalanceRecipe("w1", 4000, 1)).experts[:, 0, 0] < 16
    assert hot.reshape(-1, 4)[:, 1:].all() and 0 < hot.reshape(-1, 4)[:, 0].mean() < 0.5
    burst = imbalanced(make_model(1, 64, 1), ImbalanceRecipe("w7", 4000, 4)).experts[3000:, 0, 0] < 16
    assert burst[::2].all() and 0 < burst[1::2].mean() < 0.5


def test_spread_where_half_the_experts_are_too_few():
    assert hot_pool("w3", 4, 3, 0)[0].tolist() == [0, 1, 2, 3]
    assert hot_pool("w3", 7, 2, 0)[0].tolist() == [0, 2, 4]
    with pytest.raises(InputError, match=r"W5_zero_expert_rank leaves 2 of 4 experts to choose from, fewer than the 3"):
        imbalanced(make_model(1, 4, 3), ImbalanceRecipe("w5", 10, 1))


def test_subsets_are_equally_likely_in_any_order():
    """Chi-squared over the 24 ways to take 3 of 4 numbers one after another stays within the bounds of chance."""
    drawn = _subsets(np.random.default_rng(0), 48_000, 4, 3)
    counts = np.unique(drawn @ [16, 4, 1], return_counts=True)[1]
    assert len(counts) == 24 and ((counts - 2000) ** 2 / 2000).sum() < 23 + 5 * np.sqrt(2 * 23)


@pytest.mark.parametrize("workload", [preset for preset in PRESETS if preset != "w0"])
def test_the_same_seed_makes_the_same_log(workload):
    model = make_model(2, 16, 2)
    same = [ImbalanceRecipe(workload, 256).draw(model) for _ in range(2)]
    assert same[0].digest == same[1].digest != ImbalanceRecipe(workload, 256, seed=1).draw(model).digest
    assert (same[0].experts[:, 0] != same[0].experts[:, 1]).any(), "layers are drawn one by one"


def test_logs_say_that_they_are_synthetic_and_their_sequences_end_with_their_step():
    assert ImbalanceRecipe("w1", 4096).name == "synthetic W1_hot_expert_set, 4,096 tokens"
    assert ImbalanceRecipe("w6", 4096, 6, 3).name == "synthetic W6_rotating_hotspot, 4,096 tokens in 6 steps, seed 3"
    trace = imbalanced(make_model(1, 8, 1), ImbalanceRecipe("w6", 6000, 3))
    assert np.bincount(trace.sequence).tolist() == ([11] * 181 + [9]) * 3


def test_the_share_that_is_foretold_by_hand():
    first_choices = np.array([[0, 1, 1], [0, 1, 2], [0, 2, 1], [3, 3, -1]])
    trace = RoutingTrace("by hand", first_choices[:, :, None].astype(np.int16), 4)
    assert predicted_share(trace) == pytest.approx([3 / 4, 2 / 3])


def test_both_ways_to_count_agree_and_the_largest_id_takes_no_table_of_all_pairs(monkeypatch):
    trace = RoutingTrace("one token", np.full((1, 40, 1), 32767, np.int16), 32768)
    assert inspect(trace).predicted.tolist() == [1.0] * 39
    rng = np.random.default_rng(0)
    trace = RoutingTrace("drawn", rng.integers(-1, 12, (50, 6, 2)).astype(np.int16), 12)
    in_a_table = predicted_share(trace)
    monkeypatch.setattr(inspection, "MOST_CELLS", 0)
    np.testing.assert_array_equal(predicted_share(trace), in_a_table)
