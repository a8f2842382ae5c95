"""Limits from a few heavy counts: never under what a placement keeps, and far closer than spectra where counts are sparse."""

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.placement.affinity.bounds import (
    HEAVY_PER_EXPERT,
    _charges,
    _connected,
    _gains,
    heavy_limit,
    spectral_limits,
    triple_limit,
)
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


def limit_of(counts: np.ndarray, gpus: int) -> float:
    return heavy_limit(counts, gpus, spectral_limits(counts, gpus), FAR, time.perf_counter() + FAR, 0.0)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(3, 6, 3), (4, 6, 2), (3, 8, 4), (3, 8, 2), (3, 9, 3), (5, 4, 4), (4, 4, 2)]),
    st.sampled_from(["permutation", "topic", "random", "sparse"]),
    st.sampled_from([1.0, 1e-3, 1e6]),
)
def test_no_limit_is_under_the_optimum(seed, shape, kind, scale):
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
    assert least <= limit_of(counts, gpus) <= spectral_limits(counts, gpus).sum() * (1 + 1e-12)
    for heavy in HEAVY_PER_EXPERT:
        limit, _ = triple_limit(counts[0], counts[1], gpus, heavy)
        assert limit >= most_kept(counts[:2], gpus) * (1 - 1e-12)


def test_closer_than_spectra_where_few_counts_are_heavy():
    """Three strong successors for every expert, four experts on a GPU: the limit comes within 15 % of a plan's cost."""
    counts = permutation_affinity(7, 256, 400_000)
    result = affinity(AffinityInstance(counts, 64), time_limit=6.0)
    plain = spectral_limits(counts, 64).sum()
    tight = limit_of(counts, 64)
    assert result.objective / (counts.sum() - plain) > 1.3
    assert 1 <= result.objective / (counts.sum() - tight) < 1.15


def test_a_planted_placement_of_perfect_affinity_is_proven():
    counts, _ = planted_affinity(5, 16, 4, 20_000, 1.0)
    assert counts.sum() <= limit_of(counts, 4) <= counts.sum() * (1 + 1e-9)


def test_connected_sets_are_all_and_no_others():
    rng = np.random.default_rng(0)
    for _ in range(20):
        shared = np.triu(rng.random((9, 9)) < 0.25, 1)
        shared |= shared.T
        wanted = {
            group
            for size in (2, 3, 4)
            for group in combinations(range(9), size)
            if _reaches_all(shared[np.ix_(group, group)])
        }
        sets = _connected(shared, 4)
        assert len(sets) == len(wanted)
        assert {tuple(int(expert) for expert in row if expert < 9) for row in sets} == wanted


def _reaches_all(shared: np.ndarray) -> bool:
    return bool((np.linalg.matrix_power(shared + np.eye(len(shared)), len(shared)) > 0).all())


def test_gains_and_charges_against_plain_loops():
    rng = np.random.default_rng(1)
    heavy = rng.integers(0, 9, (7, 7)) * (rng.random((7, 7)) < 0.4) * 1.0
    price = heavy.max(axis=0) * 0.8
    sets = _connected((heavy @ heavy.T > 0), 3)
    gains = _gains(sets, heavy, price, 3)
    for row, gain in zip(sets, gains, strict=True):
        group = row[row < 7]
        brings = np.sort(np.maximum(heavy[group].sum(axis=0) - price, 0.0))
        assert gain == pytest.approx(brings[-3:].sum())
    # Whatever the division into groups of three, its gains are covered.
    gain_of = {tuple(row[row < 7].tolist()): gain for row, gain in zip(sets, gains, strict=True)}
    charge = _charges(sets, gains, 7)
    for first in combinations(range(7), 3):
        for second in combinations(sorted(set(range(7)) - set(first)), 3):
            assert gain_of.get(first, 0.0) + gain_of.get(second, 0.0) <= charge + 1e-9


def test_too_many_sets_fall_back_on_the_spectra():
    popular = np.random.default_rng(0).random((2, 256, 256)) ** 3
    popular[:, :3] += 1.0
    popular[:, :, :3] += 1.0
    limits = spectral_limits(popular, 64)
    assert all(triple_limit(*popular, 64, heavy)[0] == np.inf for heavy in HEAVY_PER_EXPERT)
    assert limit_of(popular, 64) == limits.sum()


def test_work_ends_when_told_and_once_it_is_enough():
    counts = permutation_affinity(9, 64, 50_000)
    plain = spectral_limits(counts, 16)
    start = time.perf_counter()
    for options in ({"stop": lambda: True}, {"deadline": start}, {"seconds": 0.0}, {"enough": plain.sum()}):
        usual = {"seconds": FAR, "deadline": start + FAR, "enough": 0.0}
        assert heavy_limit(counts, 16, plain, **(usual | options)) == plain.sum()
    heard = []
    tight = heavy_limit(counts, 16, plain, FAR, start + FAR, 0.0, on_limit=heard.append)
    assert heard == sorted(heard, reverse=True)
    assert heard[-1] == tight < plain.sum()
