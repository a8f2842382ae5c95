"""Port rates out of the rates of pairs: exact where ports explain them, and nearly the best of all otherwise."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from engine.costs.pair_cluster import fit_bottlenecks
from tests.cases.examples import examples

rates = st.sampled_from([1e9, 1.5e9, 3e9, 12.5e9, 50e9])


def pairs_of(ports: np.ndarray) -> np.ndarray:
    return np.minimum(ports[:, None], ports)


def misfit(rate: np.ndarray, ports: np.ndarray) -> float:
    between = ~np.eye(len(rate), dtype=bool) & np.isfinite(rate)
    return float((np.log(pairs_of(ports) / rate)[between] ** 2).sum())


@given(st.lists(rates, min_size=2, max_size=9))
@settings(max_examples=examples(50), deadline=None)
def test_pairs_that_ports_explain_are_met(ports):
    rate = pairs_of(np.array(ports))
    fitted = fit_bottlenecks(rate)
    between = ~np.eye(len(rate), dtype=bool)
    assert pairs_of(fitted)[between] == pytest.approx(rate[between])


@given(st.integers(2, 7), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(50), deadline=None)
def test_no_single_port_can_be_improved(gpus, seed):
    random = np.random.default_rng(seed)
    rate = np.exp(random.normal(20, 1, (gpus, gpus)))
    rate = np.minimum(rate, rate.T)
    fitted = fit_bottlenecks(rate)
    reached = misfit(rate, fitted)
    for gpu in range(gpus):
        for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
            other = fitted.copy()
            other[gpu] *= factor
            assert misfit(rate, other) >= reached - 1e-9


def least_misfit(rate: np.ndarray) -> float:
    """The least of all, over every order of the ports: in an order each port has the pairs with later ones to itself."""
    logs, gpus, least = np.log(rate), len(rate), np.inf
    for order in permutations(range(gpus)):
        later = [logs[gpu, list(order[place + 1 :])] for place, gpu in enumerate(order[:-1])]
        ports = isotonic_regression([pairs.mean() for pairs in later], weights=[len(pairs) for pairs in later]).x
        least = min(least, 2 * sum(((pairs - port) ** 2).sum() for pairs, port in zip(later, ports, strict=True)))
    return least


def test_the_fit_is_nearly_the_best_of_all():
    """Rates without any sense to them, which are the hardest: measured ones mostly have few levels."""
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(40):
        rate = np.exp(random.normal(20, 1, (5, 5)))
        rate = np.minimum(rate, rate.T)
        ratios.append(misfit(rate, fit_bottlenecks(rate)) / least_misfit(rate))
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) <= 1.01 and np.mean(np.array(ratios) <= 1 + 1e-9) >= 0.9


def test_gpus_without_a_pair_have_no_rate():
    rate = np.full((3, 3), np.nan)
    assert np.isnan(fit_bottlenecks(rate)).all()
    rate[0, 1] = rate[1, 0] = 5e9
    assert fit_bottlenecks(rate) == pytest.approx([5e9, 5e9, np.nan], nan_ok=True)
