"""Limits on kept hops: never below the hops that any placement keeps, at any iteration, and close for known families."""

import time

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.placement.affinity import bounds
from engine.placement.affinity.exact import chain_optimum
from engine.placement.affinity.kernel import AffinityInstance, affinity
from engine.result import Limits
from tests.cases.examples import tried
from tests.cases.placements import permutation_affinity, topic_affinity

FAR = 1e9


def most_kept(counts: np.ndarray, gpus: int) -> float:
    """Hops the best placement keeps on its GPUs, by dynamic programming."""
    place = chain_optimum(counts, 1.0 - np.eye(gpus), gpus)
    return counts.sum() - AffinityInstance(counts, gpus).cost(place)


@tried(
    20,
    st.integers(0, 2**32 - 1),
    st.sampled_from([(2, 6, 3), (3, 6, 2), (4, 8, 4), (3, 4, 4), (5, 4, 2)]),
    st.sampled_from([0.1, 0.6, 1.0]),
    st.sampled_from([1.0, 1e-3, 1e6]),
)
def test_no_limit_is_under_the_optimum(seed, shape, strength, scale):
    layers, experts, gpus = shape
    counts = scale * permutation_affinity(layers, experts, 300, strength, seed)
    optimum = most_kept(counts, gpus)
    assert bounds.spectral_limits(counts, gpus).sum() >= optimum * (1 - 1e-12)
    window = bounds.Window(counts, gpus)
    for step in range(48):
        window.iterate()
        assert step % 8 or window.evaluate() >= optimum * (1 - 1e-12)
    limit = bounds.keep_limit(counts, gpus, bounds.spectral_limits(counts, gpus), 0.05, time.perf_counter() + FAR, 0.0)
    assert limit >= optimum * (1 - 1e-12)


def test_windows_end_closer_than_spectra():
    """8 experts on 4 GPUs over 12 layers: the optimum is known, and triangle rules bring the limit within 2 %."""
    counts = permutation_affinity(12, 8, 2000)
    optimum = most_kept(counts, 4)
    window, limits = bounds.Window(counts, 4), []
    for _ in range(15):
        for _ in range(10):
            window.iterate()
        limits.append(window.evaluate())
    windows, spectra = (
        (counts.sum() - optimum) / (counts.sum() - most) for most in (limits[-1], bounds.spectral_limits(counts, 4).sum())
    )
    assert 1 <= windows < 1.05 and spectra - 1 > 2 * (windows - 1)
    assert limits == sorted(limits, reverse=True)


@pytest.mark.parametrize(("seed", "costs"), list(enumerate([(1.0, 1.0), (1.0, 5.0), (2.0, 1.0), (0.5, 0.75), (0.0, 1.0)])))
def test_bounds_with_nodes_hold_against_the_optimum(monkeypatch, seed, costs):
    """The exact method is switched off, so that the bound comes from the limits; then it is asked."""
    instance = AffinityInstance(permutation_affinity(4, 8, 500, seed=seed), 4, 2, *costs)
    optimum = affinity(instance).objective
    monkeypatch.setattr("engine.placement.affinity.kernel._exact", lambda *_: None)
    result = affinity(instance, Limits(0.3, wall=FAR))
    assert result.bound <= optimum + 1e-9
    assert result.objective == pytest.approx(optimum)
    assert result.bound >= 0.6 * optimum


def limit_of(counts: np.ndarray, gpus: int) -> float:
    return bounds.heavy_limit(counts, gpus, bounds.spectral_limits(counts, gpus), FAR, time.perf_counter() + FAR, 0.0)


@tried(
    40,
    st.integers(0, 2**32 - 1),
    st.sampled_from([(3, 6, 3), (4, 6, 2), (3, 8, 4), (3, 8, 2), (3, 9, 3), (5, 4, 4), (4, 4, 2)]),
    st.sampled_from(["permutation", "topic", "random", "sparse"]),
    st.sampled_from([1.0, 1e-3, 1e6]),
)
def test_no_heavy_limit_is_under_the_optimum(seed, shape, kind, scale):
    layers, experts, gpus = shape
    rng = np.random.default_rng(seed)
    if kind == "permutation":
        counts = permutation_affinity(layers, experts, 300, rng.choice([0.3, 0.8, 1.0]), seed)
    elif kind == "topic":
        counts = topic_affinity(layers, experts, 300, 3, seed)
    else:
        counts = rng.random((layers - 1, experts, experts))
        counts *= rng.random(counts.shape) < (0.2 if kind == "sparse" else 1.0)
    counts = scale * counts
    least = most_kept(counts, gpus) * (1 - 1e-12)
    assert least <= limit_of(counts, gpus) <= bounds.spectral_limits(counts, gpus).sum() * (1 + 1e-12)
    for heavy in bounds.HEAVY_PER_EXPERT:
        limit, _ = bounds.triple_limit(counts[0], counts[1], gpus, heavy)
        assert limit >= most_kept(counts[:2], gpus) * (1 - 1e-12)


def test_closer_than_spectra_where_few_counts_are_heavy():
    """Three strong successors for every expert, four experts on a GPU: the limit comes within 15 % of a plan's cost."""
    counts = permutation_affinity(5, 128, 150_000)
    result = affinity(AffinityInstance(counts, 32), Limits(0.5, wall=60))
    plain = bounds.spectral_limits(counts, 32).sum()
    tight = limit_of(counts, 32)
    assert result.objective / (counts.sum() - plain) > 1.3
    assert 1 <= result.objective / (counts.sum() - tight) < 1.15


def test_gains_of_sets_against_plain_loops():
    rng = np.random.default_rng(1)
    heavy = rng.integers(0, 9, (7, 7)) * (rng.random((7, 7)) < 0.4) * 1.0
    price, sets = heavy.max(axis=0) * 0.8, bounds._connected((heavy @ heavy.T > 0), 3)
    for row, gain in zip(sets, bounds._gains(sets, heavy, price, 3), strict=True):
        brings = np.sort(np.maximum(heavy[row[row < 7]].sum(axis=0) - price, 0.0))
        assert gain == pytest.approx(brings[-3:].sum())


def test_too_many_sets_fall_back_on_the_spectra():
    popular = np.random.default_rng(0).random((2, 256, 256)) ** 3
    popular[:, :3] += 1.0
    popular[:, :, :3] += 1.0
    limits = bounds.spectral_limits(popular, 64)
    assert all(bounds.triple_limit(*popular, 64, heavy)[0] == np.inf for heavy in bounds.HEAVY_PER_EXPERT)
    assert limit_of(popular, 64) == limits.sum()


def test_limits_end_at_the_clock_when_told_and_once_it_is_enough():
    counts = permutation_affinity(9, 64, 50_000)
    plain = bounds.spectral_limits(counts, 16)
    usual = {"seconds": FAR, "deadline": time.perf_counter() + FAR, "enough": 0.0}
    for change in ({"stop": lambda: True}, {"deadline": 0.0}, {"enough": np.inf}, {"seconds": 0.0}):
        assert bounds.heavy_limit(counts, 16, plain, **usual | change) == plain.sum()
        if "seconds" not in change:
            assert bounds.keep_limit(counts, 16, plain, **usual | {"seconds": 100.0} | change) == plain.sum()
    heard = []
    tight = bounds.heavy_limit(counts, 16, plain, **usual, on_limit=heard.append)
    assert heard == sorted(heard, reverse=True)
    assert heard[-1] == tight < plain.sum()
