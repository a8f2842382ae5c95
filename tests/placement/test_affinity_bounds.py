"""Limits on kept hops: never under what a placement keeps, at whatever iteration, and close where they should be."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.placement.affinity.bounds import Window, keep_limit, spectral, spectral_limits
from engine.placement.affinity.exact import chain_optimum
from engine.placement.affinity.kernel import AffinityInstance, affinity
from tests.cases.examples import examples
from tests.placement.affinity_cases import permutation_affinity, planted_affinity, topic_affinity

pytestmark = pytest.mark.slow

FAR = 1e9


def most_kept(counts: np.ndarray, gpus: int) -> float:
    """Hops the best placement keeps on its GPUs, by dynamic programming."""
    place = chain_optimum(counts, 1.0 - np.eye(gpus), gpus)
    return counts.sum() - AffinityInstance(counts, gpus).cost(place)


@settings(max_examples=examples(20), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(2, 6, 3), (3, 6, 2), (4, 8, 4), (3, 4, 4), (5, 4, 2)]),
    st.sampled_from([0.1, 0.6, 1.0]),
    st.sampled_from([1.0, 1e-3, 1e6]),
)
def test_no_limit_is_under_the_optimum(seed, shape, strength, scale):
    layers, experts, gpus = shape
    counts = scale * permutation_affinity(layers, experts, 300, strength, seed)
    optimum = most_kept(counts, gpus)
    assert spectral_limits(counts, gpus).sum() >= optimum * (1 - 1e-12)
    window = Window(counts, gpus)
    for _ in range(6):
        for _ in range(8):
            window.iterate()
        assert window.evaluate() >= optimum * (1 - 1e-12)
    limit = keep_limit(counts, gpus, spectral_limits(counts, gpus), 0.05, time.perf_counter() + FAR, 0.0)
    assert limit >= optimum * (1 - 1e-12)


def test_windows_end_closer_than_spectra():
    """8 experts on 4 GPUs over 12 layers: the optimum is known, and triangle rules bring the limit within 2 %."""
    counts = permutation_affinity(12, 8, 2000)
    optimum = most_kept(counts, 4)
    cost = counts.sum() - optimum
    window = Window(counts, 4)
    limits = []
    for _ in range(15):
        for _ in range(10):
            window.iterate()
        limits.append(window.evaluate())
    fast = spectral_limits(counts, 4).sum()
    assert optimum <= limits[-1] < fast
    assert cost / (counts.sum() - fast) - 1 > 2 * (cost / (counts.sum() - limits[-1]) - 1)
    assert cost / (counts.sum() - limits[-1]) < 1.05
    assert limits == sorted(limits, reverse=True)


def test_exact_for_uniform_and_for_perfect_transitions():
    assert spectral(np.full((12, 12), 5.0), 4) == pytest.approx(12 * 12 * 5 / 4)
    counts, _ = planted_affinity(3, 12, 4, 3000, 1.0)
    assert spectral(counts[0], 4) == pytest.approx(counts[0].sum())


def test_a_bound_lies_between_nothing_and_the_objective_with_nodes():
    for costs in ((1.0, 4.0), (2.0, 2.5), (3.0, 1.0)):
        instance = AffinityInstance(topic_affinity(4, 24, 3000), 6, 2, *costs)
        result = affinity(instance, time_limit=0.6)
        assert 0 < result.bound <= result.objective
        # Any placement at all obeys it.
        rng = np.random.default_rng(0)
        for _ in range(20):
            assert instance.cost(np.array([rng.permutation(24) % 6 for _ in range(4)])) >= result.bound


def test_bounds_with_nodes_hold_against_the_optimum(monkeypatch):
    """The exact method is switched off, so that the bound comes from the limits; then it is asked."""
    optima = {}
    instances = [
        AffinityInstance(permutation_affinity(4, 8, 500, seed=seed), 4, 2, *costs)
        for seed, costs in enumerate([(1.0, 1.0), (1.0, 5.0), (2.0, 1.0), (0.5, 0.75), (0.0, 1.0)])
    ]
    for at, instance in enumerate(instances):
        optima[at] = affinity(instance).objective
    monkeypatch.setattr("engine.placement.affinity.kernel._exact", lambda *_: None)
    for at, instance in enumerate(instances):
        result = affinity(instance, time_limit=0.6)
        assert result.bound <= optima[at] + 1e-9
        assert result.objective == pytest.approx(optima[at])
        assert result.bound >= 0.6 * optima[at]


@pytest.mark.clock
def test_work_ends_at_the_clock_when_told_and_once_it_is_enough():
    counts = permutation_affinity(6, 32, 5000)
    fast = spectral_limits(counts, 8)
    start = time.perf_counter()
    assert keep_limit(counts, 8, fast, 100.0, start, 0.0) == fast.sum()
    assert keep_limit(counts, 8, fast, 100.0, start + FAR, 0.0, stop=lambda: True) == fast.sum()
    assert keep_limit(counts, 8, fast, 100.0, start + FAR, fast.sum()) == fast.sum()
    assert time.perf_counter() - start < 1
