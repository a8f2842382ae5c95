"""Experts on devices with replicas against every hosting, simple rules, and changes that must not matter."""

from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError, InputError
from engine.placement.devices import kernel
from engine.placement.devices.kernel import DevicesInstance, lower_bound, replicate_devices
from engine.placement.devices.search import pack_devices, replicas_of_expert
from engine.result import Limits, Status
from tests.cases.examples import tried
from tests.oracles.placing import check_devices

EXACT = 1e-9
ROUNDED = 1e-8
"""Loss of a bound to CP-SAT's rounding to integers, for a handful of experts on a device."""


def brute_force(popularity: np.ndarray, devices: int, cap: int) -> float:
    """The least largest load over all hostings, devices being alike."""
    experts = len(popularity)
    held = [np.isin(range(experts), some) for size in range(cap + 1) for some in combinations(range(experts), size)]
    every = map(np.array, combinations_with_replacement(held, devices))
    return min((hosted @ (popularity / hosted.sum(axis=0))).max() for hosted in every if hosted.any(axis=0).all())


def zipf(experts: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, experts + 1) ** rng.uniform(0.6, 1.2)
    return rng.permutation(popularity / popularity.sum())


@st.composite
def instances(draw, experts: int = 4, devices: int = 3) -> tuple[np.ndarray, int, int]:
    experts, devices = draw(st.integers(1, experts)), draw(st.integers(1, devices))
    cap = draw(st.integers(-(-experts // devices), experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        return rng.integers(0, 6, experts).astype(np.float64), devices, cap
    return rng.exponential(size=experts) ** 2, devices, cap


@tried(100, instances())
def test_best_equals_every_hosting_and_no_bound_and_no_other_way_lies(case):
    optimum = brute_force(*case)
    assert lower_bound(*case) <= optimum * (1 + EXACT)
    for options in ({"method": "lina"}, {"limits": Limits(exact=False), "kicks": 0}, {"limits": Limits(exact=False)}, {}):
        result = replicate_devices(DevicesInstance(*case), **options)
        assert check_devices(result.solution, *case) == pytest.approx(result.objective, rel=EXACT)
        assert result.bound <= optimum * (1 + EXACT) and optimum <= result.objective * (1 + EXACT)
        if options:
            assert (result.status is Status.OPTIMAL) == (result.gap <= EXACT)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(optimum, rel=ROUNDED)
    assert optimum * (1 - ROUNDED) <= result.bound <= result.objective


@tried(100, st.integers(1, 24), st.integers(1, 12), st.integers(0, 4), st.integers(0, 2**32 - 1), st.sampled_from([0, 0.5, 1]))
def test_every_size_is_legal(experts, devices, more, seed, zeros):
    """Also where every slot is needed, and with experts that nobody asks for."""
    rng = np.random.default_rng(seed)
    popularity = rng.exponential(size=experts) ** 3 * (rng.random(experts) >= zeros)
    cap = -(-experts // devices) + more
    packed = pack_devices(devices * popularity / max(popularity.sum(), 1.0), devices, cap, seed % 5)
    check_devices(packed, popularity, devices, cap)
    instance = DevicesInstance(popularity, devices, cap)
    for options in ({"method": "lina", "limits": Limits(seed=seed % 5)}, {"limits": Limits(exact=False), "kicks": 1}):
        result = replicate_devices(instance, **options)
        assert check_devices(result.solution, popularity, devices, cap) == pytest.approx(result.objective, rel=EXACT)
        assert result.bound <= result.objective
        assert result.bound >= popularity.sum() / devices * (1 - EXACT)
        assert result.solution == replicate_devices(instance, **options).solution
        assert all(list(held) == sorted(held) for held in result.solution)


@pytest.mark.parametrize(
    ("experts", "devices", "cap", "level"), [(16, 16, 2, 1.06), (16, 16, 4, 1.012), (64, 16, 5, 1.004), (16, 8, 4, 1.01)]
)
def test_search_is_near_the_mean_and_beats_lina(experts, devices, cap, level):
    over_mean = []
    for seed in range(4):
        popularity = zipf(experts, seed)
        best = replicate_devices(DevicesInstance(popularity, devices, cap), Limits(exact=False), kicks=10)
        lina = replicate_devices(DevicesInstance(popularity, devices, cap), method="lina")
        assert best.objective < lina.objective
        over_mean.append(best.objective * devices)
    assert np.mean(over_mean) <= level


def test_the_search_changes_how_many_replicas_experts_have():
    """Without kicks: 1.057 over the mean, 1.084 by handing over and swapping alone."""
    objectives = [
        replicate_devices(DevicesInstance(zipf(16, seed), 16, 2), Limits(exact=False), kicks=0).objective for seed in range(8)
    ]
    assert np.mean(objectives) * 16 <= 1.065


def test_a_proof_where_no_hosting_meets_the_simple_bounds():
    popularity = zipf(6, 1)
    result = replicate_devices(DevicesInstance(popularity, 4, 2), kicks=10)
    assert result.status is Status.OPTIMAL
    assert result.objective > lower_bound(popularity, 4, 2) * (1 + 1e-6)
    assert result.objective == pytest.approx(brute_force(popularity, 4, 2), rel=EXACT)


def test_cp_sat_is_given_numbers_it_can_count_with(monkeypatch):
    """In units of 2^-32 of the objective and finer CP-SAT 9.15 proved 0.8216 here, after a search that found nothing good."""
    popularity = np.array([0.42765555659426135, 0.2110666264115244, 0.09972858876490742, 0.7935027583474412])
    wrong = []
    for first in combinations(range(4), 2):
        start = np.isin(np.arange(4), first)
        monkeypatch.setattr(kernel, "search", lambda *_, start=start: np.stack([start, ~start], axis=1))
        result = replicate_devices(DevicesInstance(popularity, 2, 3))
        wrong.append(result.bound > popularity.max() or result.objective > popularity.max() * (1 + ROUNDED))
        assert result.status is Status.OPTIMAL
    assert not any(wrong) and brute_force(popularity, 2, 3) == popularity.max()


@pytest.mark.parametrize(("above", "status"), [(4e-9, Status.FEASIBLE), (2e-9, Status.OPTIMAL)])
def test_only_what_rounding_can_take_is_forgiven(monkeypatch, above, status):
    """A unit of 2^-30 for each of two experts on a device and one for round-off: 2.8e-9 of the objective."""
    instance = DevicesInstance(zipf(6, 1), 4, 2)
    objective = replicate_devices(instance, Limits(exact=False), kicks=10).objective / zipf(6, 1).max()
    monkeypatch.setattr(kernel, "best_hosts", lambda weight, cap, hosts, *_: (hosts, objective * (1 - above), True))
    assert replicate_devices(instance, kicks=10).status is status


@tried(60, instances(6, 5), st.integers(0, 12))
def test_counts_make_the_largest_replica_smallest(case, more):
    popularity, devices, _ = case
    replicas = len(popularity) + more
    count = replicas_of_expert(popularity, devices, replicas)
    assert count.min() >= 1 and count.max() <= devices and count.sum() <= replicas
    # Any smaller largest replica needs more replicas than there are, or more devices.
    largest = (popularity / count).max()
    if largest > 0:
        needed = np.maximum(np.ceil(popularity / (largest * (1 - 1e-9))), 1)
        assert needed.sum() > replicas or needed.max() > devices


@pytest.mark.parametrize(
    ("wanted", "devices", "cap", "hosting"),
    [
        # n_e = 1.5, 0.9, 0.6: two pieces of 0.75 and 0.9 and 0.6; one that fits nowhere goes to the emptiest device.
        ([1.5, 0.9, 0.6], 3, 3, ((1,), (0, 2), (0,))),
        # The second piece of expert 0 (0.6) fits nowhere; the emptiest device has the first.
        ([1.2, 0.9, 0.9], 3, 3, ((0, 1), (2,), (0,))),
        # Small pieces are put together, and the last device stays free.
        ([0.5, 0.4, 0.4, 0.3], 3, 4, ((0, 1), (2, 3), ())),
        # Experts without an estimate: the two free devices take them in turn ...
        ([1, 0, 0, 0.9, 0], 4, 2, ((0,), (3,), (1, 4), (2,))),
    ],
)
def test_packing_by_hand(wanted, devices, cap, hosting):
    assert pack_devices(np.array(wanted, dtype=float), devices, cap) == hosting


def test_packing_without_estimates_or_popularity():
    # ... and when those are full any device with a free slot may.
    crowded = [pack_devices(np.array([2.0, 0.6, 0, 0, 0, 0, 0, 0]), 4, 3, seed) for seed in (*range(8), 5)]
    assert all(hosting[3][:3] == (2, 3, 4) for hosting in crowded)
    assert len(set(crowded)) > 1 and crowded[5] == crowded[8]
    for method in ("lina", "best"):
        result = replicate_devices(DevicesInstance(np.zeros(5), 3, 2), method=method)
        assert (result.objective, result.bound, result.status) == (0, 0, Status.OPTIMAL)
        assert check_devices(result.solution, np.zeros(5), 3, 2) == 0


def test_lina_leaves_a_slot_for_everybody():
    """n_e asks for seven devices for expert 0, yet the other eleven experts need eleven of the twelve slots."""
    popularity = np.array([77.0] + [1.0] * 11)
    hosting = pack_devices(popularity * 4 / popularity.sum(), 4, 3)
    assert check_devices(hosting, popularity, 4, 3) == pytest.approx(79)
    for method in ("lina", "best"):
        result = replicate_devices(DevicesInstance(popularity, 4, 3), Limits(exact=False), method=method)
        assert result.objective == pytest.approx(79)


def test_incumbents_improve_and_are_reported():
    seen = []
    instance, limits = DevicesInstance(zipf(16, 2), 8, 3), Limits(exact=False)
    result = replicate_devices(instance, limits, report=lambda *figures: seen.append(figures), kicks=20)
    assert seen and seen[-1][0] == pytest.approx(result.objective)
    assert [objective for objective, _ in seen] == sorted((objective for objective, _ in seen), reverse=True)
    assert all(bound <= objective for objective, bound in seen)


@pytest.mark.parametrize(
    ("hosting", "message"),
    [
        ([[0, 1]], "1 devices instead of 2"),
        ([[0], [0]], "expert 1 is on no device"),
        ([[0, 1], [1, 1]], "an expert twice"),
        ([[0, 1], [2]], "expert 2, which does not exist"),
        ([[0, 1], []], "hosts 2 experts instead of at most 1"),
    ],
)
def test_the_check_sees_every_broken_rule(hosting, message):
    with pytest.raises(IllegalError, match=message):
        check_devices(hosting, [1.0, 1.0], 2, 1 if "at most 1" in message else 2)


def test_bad_input_is_named():
    for arguments, says in ((([], 2, 2), "0 experts"), (([1.0], 0, 2), "0 devices"), (([1.0], 2, 0), "0 experts per device")):
        with pytest.raises(InputError, match=says):
            DevicesInstance(*arguments)
    for devices_of_expert, says in (([1.5, 1.5], "at most 2, the devices there are; the sum is 3"), ([0] * 5, "do not fit")):
        with pytest.raises(InputError, match=says):
            pack_devices(np.array(devices_of_expert), 2, 2)
