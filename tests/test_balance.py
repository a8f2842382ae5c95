"""Overload factors over layers: small cases by hand, and what holds for all loads."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engine.timeline import PERCENTILES, Balance, balancedness, over_layers
from tests.cases.examples import examples

LOAD = np.array([[1, 1, 1, 1], [3, 1, 0, 0], [2, 1, 1, 0], [0, 0, 0, 0], [8, 0, 0, 0]], dtype=np.float64)
"""Of mean 1, 1, 1, 0 and 2: overload factors 1, 3, 2, 1 (no load) and 4."""

LOADS = arrays.arrays(
    np.float64, st.tuples(st.integers(1, 9), st.integers(1, 6)), elements=st.integers(0, 1000).map(float)
)


def test_every_layer_by_hand():
    assert Balance.of(LOAD).overload == (1, 3, 2, 1, 4)


def test_figures_over_layers_by_hand():
    """Sorted 1 1 2 3 4: the 50th percentile is the third, the 75th the fourth, the 90th at 3.6 of 4 intervals."""
    balance = Balance.of(LOAD)
    assert balance.factors == pytest.approx({"mean": 2.2, "p50": 2, "p75": 3, "p90": 3 + 0.6, "p95": 3 + 0.8, "max": 4})
    assert balance.imbalance_ratio == pytest.approx(1.2)
    assert balance.balancedness == pytest.approx((1 + 1 / 3 + 1 / 2 + 1 + 1 / 4) / 5)
    assert over_layers(balance.factors) == "p50 2×, p75 3×, p90 3.6×, p95 3.8×, worst 4×"


def test_a_single_layer_is_every_percentile():
    balance = Balance.of(LOAD[1:2])
    assert set(balance.factors.values()) == {3.0}


def test_as_json():
    """Imbalance ratios are the overload factors less 1, figure by figure."""
    content = json.loads(json.dumps(Balance.of(LOAD).to_dict()))
    assert content["overload_factor_of_layer"] == [1, 3, 2, 1, 4]
    assert list(content["overload_factor"]) == ["mean", *(f"p{percentile}" for percentile in PERCENTILES), "max"]
    assert content["imbalance_ratio"] == pytest.approx(
        {name: factor - 1 for name, factor in content["overload_factor"].items()}
    )


@given(LOADS)
@settings(max_examples=examples(60), deadline=None)
def test_between_even_and_all_on_one(load):
    balance = Balance.of(load)
    figures = [balance.percentiles[f"p{percentile}"] for percentile in PERCENTILES]
    assert min(balance.overload) + 1e-12 >= 1 and balance.worst <= load.shape[1] * (1 + 1e-12)
    assert figures == sorted(figures) and figures[-1] <= balance.worst * (1 + 1e-12)
    assert balance.balancedness == pytest.approx(balancedness(load).mean())
    assert 1 / balance.balancedness <= balance.mean * (1 + 1e-12), "the harmonic mean is not above the other"


@given(LOADS, st.randoms(use_true_random=False))
@settings(max_examples=examples(40), deadline=None)
def test_units_names_of_gpus_and_order_of_layers_do_not_matter(load, random):
    order = random.sample(range(len(load)), len(load))
    other = Balance.of(load[order][:, ::-1] * 4096)
    assert other.factors == pytest.approx(Balance.of(load).factors)
