"""Recordings reduced to token counts, and overload factors over layers."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engine.errors import InputError
from engine.timeline import PERCENTILES, Balance, balancedness, over_layers
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, digest_of
from tests.cases.examples import tried
from tests.cases.refusals import refusal
from tests.strategies import seeds


@st.composite
def recordings(draw, ranks: int | None = None):
    """A trace with or without sequences and source ranks; ranks: how many ranks it may name."""
    rng = np.random.default_rng(draw(seeds))
    tokens, layers, experts = draw(st.integers(0, 30)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    k = draw(st.integers(1, experts))
    chosen = np.argsort(rng.random((tokens, layers, experts)), axis=2)[:, :, :k].astype(np.int16)
    chosen[rng.random(chosen.shape) < draw(st.sampled_from((0.0, 0.3)))] = -1
    sequence = rng.integers(0, 5, tokens).astype(np.int32) * 10 if draw(st.booleans()) else None
    source = rng.integers(0, ranks, tokens).astype(np.int32) if ranks and draw(st.booleans()) else None
    return RoutingTrace("recorded", chosen, experts, sequence, source)


def counted(trace: RoutingTrace, ranks: int) -> np.ndarray:
    """Demand one choice at a time."""
    rank = trace.rank_of_token(ranks)
    demand = np.zeros((trace.layers, ranks, trace.num_experts))
    for token, layer, choice in np.ndindex(trace.experts.shape):
        if (expert := trace.experts[token, layer, choice]) >= 0:
            demand[layer, rank[token], expert] += 1
    return demand


@tried(150, st.integers(1, 5).flatmap(lambda ranks: st.tuples(st.just(ranks), recordings(ranks))))
def test_demand_counts_every_choice_once(case):
    ranks, trace = case
    demand = trace.demand(ranks)
    assert demand.dtype == np.float64
    np.testing.assert_array_equal(demand, counted(trace, ranks))
    np.testing.assert_array_equal(demand.sum(axis=1), trace.load)
    assert demand.sum(axis=(1, 2)).tolist() == np.count_nonzero(trace.experts >= 0, axis=(0, 2)).tolist()
    assert trace.demand(ranks) is demand and not demand.flags.writeable
    np.testing.assert_array_equal(trace.demand(ranks + 1), counted(trace, ranks + 1))
    np.testing.assert_array_equal(trace.demand(ranks), demand)


@tried(60, recordings(), st.integers(1, 7))
def test_sequences_go_to_ranks_in_turn_and_stay_whole(trace, ranks):
    rank = trace.rank_of_token(ranks)
    if trace.sequence is None:
        assert rank.tolist() == [token % ranks for token in range(trace.tokens)]
    else:
        place = {name: index for index, name in enumerate(sorted(set(trace.sequence.tolist())))}
        assert rank.tolist() == [place[name] % ranks for name in trace.sequence.tolist()]


def test_recorded_ranks_count_and_must_exist_but_for_the_load_and_padding_belongs_to_nobody():
    trace = RoutingTrace("log", np.zeros((4, 1, 1), dtype=np.int16), 2, source_rank=np.array([0, 2, 2, 1]))
    assert trace.rank_of_token(3).tolist() == [0, 2, 2, 1]
    assert trace.demand(4)[0, :, 0].tolist() == [1, 1, 2, 0]
    with pytest.raises(InputError, match=r"log: tokens come from source rank 2.*only 2 GPUs \(ranks 0 … 1\); add GPUs"):
        trace.demand(2)
    assert trace.load.tolist() == [[4, 0]]
    assert RoutingTrace("log", np.full((3, 2, 2), -1, dtype=np.int16), 4).demand(2).sum() == 0


@tried(60, st.integers(0, 40), recordings(4))
def test_spread_takes_tokens_from_everywhere(tokens, trace):
    part = trace.spread(tokens)
    assert part.tokens == min(tokens, trace.tokens)
    if not part.tokens:
        return
    chosen, widest = np.arange(part.tokens) * trace.tokens // part.tokens, -(-trace.tokens // part.tokens)
    assert len(set(chosen)) == part.tokens and np.diff(chosen, append=trace.tokens).max() <= widest
    np.testing.assert_array_equal(part.experts, trace.experts[chosen])
    if trace.source_rank is not None:
        np.testing.assert_array_equal(part.source_rank, trace.source_rank[chosen])
    assert (part.sequence is None) == (trace.sequence is None)
    assert (part.digest == trace.digest) == (part.tokens == trace.tokens)


@tried(100, seeds, st.integers(1, 8))
def test_loads_come_from_all_ranks_alike(seed, ranks):
    load = np.random.default_rng(seed).integers(0, 100, (2, 5)).astype(float)
    recorded = ExpertLoad("load", load, (1, 2))
    demand = recorded.demand(ranks)
    np.testing.assert_allclose(demand.sum(axis=1), load)
    assert np.ptp(demand, axis=1).max() == 0
    assert (recorded.layers, recorded.num_experts, recorded.k) == (2, 5, None)


def test_traffic_is_demand_in_bytes():
    recorded = TrafficMatrix("matrix", np.arange(18.0).reshape(2, 3, 3), 2.0)
    np.testing.assert_array_equal(recorded.demand(3), recorded.bytes / 2)
    np.testing.assert_array_equal(recorded.load, recorded.demand(3).sum(axis=1))
    assert (recorded.layers, recorded.num_experts, recorded.k) == (2, 3, None)
    assert refusal(recorded.demand, 4).startswith("matrix: a traffic matrix between 3 ranks cannot be laid on 4 GPUs")


# Digests


@tried(60, recordings(3))
def test_digests_know_the_content_and_not_the_name(trace):
    assert replace(trace, name="another name", experts=trace.experts.copy()).digest == trace.digest
    assert replace(trace, num_experts=trace.num_experts + 1).digest != trace.digest
    if trace.tokens:
        changed = trace.experts.copy()
        changed[0, 0, 0] = 0 if changed[0, 0, 0] else -1
        assert replace(trace, experts=changed).digest != trace.digest


def test_digests_tell_columns_apart_and_look_at_shape_dtype_and_memory_layout_rightly():
    experts, column = np.zeros((2, 1, 1), dtype=np.int16), np.array([0, 1], dtype=np.int32)
    digests = {
        RoutingTrace("x", experts, 2).digest,
        RoutingTrace("x", experts, 2, sequence=column).digest,
        RoutingTrace("x", experts, 2, source_rank=column).digest,
        ExpertLoad("x", np.zeros((1, 2)), (0,)).digest,
        ExpertLoad("x", np.zeros((1, 2)), (1,)).digest,
        TrafficMatrix("x", np.zeros((1, 2, 2)), 1.0).digest,
        TrafficMatrix("x", np.zeros((1, 2, 2)), 2.0).digest,
    }
    assert len(digests) == 7
    table = np.arange(6)
    assert digest_of(table.reshape(2, 3)) != digest_of(table.reshape(3, 2))
    assert digest_of(table.astype(np.int32)) != digest_of(table.astype(np.int64))
    assert digest_of(np.asfortranarray(table.reshape(2, 3))) == digest_of(table.reshape(2, 3))
    assert digest_of("ab", "c") != digest_of("a", "bc")


LOAD = np.array([[1, 1, 1, 1], [3, 1, 0, 0], [2, 1, 1, 0], [0, 0, 0, 0], [8, 0, 0, 0]], dtype=np.float64)
"""Means 1, 1, 1, 0 and 2: overload factors 1, 3, 2, 1 (no load) and 4."""

LOADS = arrays.arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(1, 6)), elements=st.integers(0, 1000).map(float))


def test_figures_over_layers_by_hand_and_as_json():
    """Sorted 1 1 2 3 4: the 50th percentile is the third, the 75th the fourth, the 90th at 3.6 of 4 intervals. Imbalance ratios
    are the overload factors less 1, figure by figure."""
    balance = Balance.of(LOAD)
    assert balance.overload == (1, 3, 2, 1, 4)
    assert balance.factors == pytest.approx({"mean": 2.2, "p50": 2, "p75": 3, "p90": 3 + 0.6, "p95": 3 + 0.8, "max": 4})
    assert balance.imbalance_ratio == pytest.approx(1.2)
    assert balance.balancedness == pytest.approx((1 + 1 / 3 + 1 / 2 + 1 + 1 / 4) / 5)
    assert over_layers(balance.factors) == "p50 2×, p75 3×, p90 3.6×, p95 3.8×, worst 4×"
    assert set(Balance.of(LOAD[1:2]).factors.values()) == {3.0}, "a single layer is every percentile"
    content = json.loads(json.dumps(balance.to_dict()))
    assert content["overload_factor_of_layer"] == [1, 3, 2, 1, 4]
    assert list(content["overload_factor"]) == ["mean", *(f"p{percentile}" for percentile in PERCENTILES), "max"]
    assert content["imbalance_ratio"] == pytest.approx(
        {name: factor - 1 for name, factor in content["overload_factor"].items()}
    )


@tried(60, LOADS, st.randoms(use_true_random=False))
def test_between_even_and_all_on_one_whatever_the_units_names_of_gpus_and_order_of_layers(load, random):
    balance, order = Balance.of(load), random.sample(range(len(load)), len(load))
    assert Balance.of(load[order][:, ::-1] * 4096).factors == pytest.approx(balance.factors)
    figures = [balance.percentiles[f"p{percentile}"] for percentile in PERCENTILES]
    assert min(balance.overload) + 1e-12 >= 1 and balance.worst <= load.shape[1] * (1 + 1e-12)
    assert figures == sorted(figures) and figures[-1] <= balance.worst * (1 + 1e-12)
    assert balance.balancedness == pytest.approx(balancedness(load).mean())
    assert 1 / balance.balancedness <= balance.mean * (1 + 1e-12), "the harmonic mean is not above the other"
