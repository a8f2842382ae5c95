"""Measured pairs of GPUs: lines fitted to them, shares of ports, and the costs that come of them."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from engine.cluster import Cluster, Efficiency, Node, shares
from engine.costs import CollectiveTimes, Datasheet
from engine.costs.pair_cluster import MeasuredPairs, PairTimes, draw_pairs, fit_bottlenecks, fit_ports, with_fit
from engine.errors import InputError
from engine.network import Network
from engine.simulate.flows import all_to_all
from tests.cases.examples import tried
from tests.strategies import efficiencies, make_gpu, seeds

rates = st.sampled_from([1e9, 1.5e9, 3e9, 12.5e9, 50e9])


def pairs_of(ports: np.ndarray) -> np.ndarray:
    return np.minimum(ports[:, None], ports)


def misfit(rate: np.ndarray, ports: np.ndarray) -> float:
    between = ~np.eye(len(rate), dtype=bool) & np.isfinite(rate)
    return float((np.log(pairs_of(ports) / rate)[between] ** 2).sum())


@tried(50, st.lists(rates, min_size=2, max_size=9))
def test_pairs_that_ports_explain_are_met(ports):
    rate = pairs_of(np.array(ports))
    fitted = fit_bottlenecks(rate)
    between = ~np.eye(len(rate), dtype=bool)
    assert pairs_of(fitted)[between] == pytest.approx(rate[between])


def senseless(random: np.random.Generator, gpus: int) -> np.ndarray:
    """float64[gpu, gpu]: rates without any sense to them, which are the hardest: measured ones mostly have few levels."""
    rate = np.exp(random.normal(20, 1, (gpus, gpus)))
    return np.minimum(rate, rate.T)


def least_misfit(rate: np.ndarray) -> float:
    """The least of all, over every order of the ports: in an order each port has the pairs with later ones to itself."""
    logs, gpus, least = np.log(rate), len(rate), np.inf
    for order in permutations(range(gpus)):
        later = [logs[gpu, list(order[place + 1 :])] for place, gpu in enumerate(order[:-1])]
        ports = isotonic_regression([pairs.mean() for pairs in later], weights=[len(pairs) for pairs in later]).x
        least = min(least, 2 * sum(((pairs - port) ** 2).sum() for pairs, port in zip(later, ports, strict=True)))
    return least


def test_the_fit_is_nearly_the_best_of_all():
    random = np.random.default_rng(0)
    rates = [senseless(random, 5) for _ in range(40)]
    ratios = [misfit(rate, fit_bottlenecks(rate)) / least_misfit(rate) for rate in rates]
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) <= 1.01 and np.mean(np.array(ratios) <= 1 + 1e-9) >= 0.9


def test_gpus_without_a_pair_have_no_rate():
    rate = np.full((3, 3), np.nan)
    assert np.isnan(fit_bottlenecks(rate)).all()
    rate[0, 1] = rate[1, 0] = 5e9
    assert fit_bottlenecks(rate) == pytest.approx([5e9, 5e9, np.nan], nan_ok=True)


RATE, START_UP = 1e6, 2e-4
SIZES = np.array([1e2, 1e3, 1e4, 1e5, 1e6])


def nodes_of(counts, link=None, efficiency=None, latency=START_UP) -> Cluster:
    nodes = tuple(
        Node(name=f"node-{place}", gpus=(make_gpu(send=RATE),) * count, link_bandwidth=link, link_latency=latency)
        for place, count in enumerate(counts)
    )
    return Cluster(name="bench", nodes=nodes, latency=latency, efficiency=efficiency)


def simulated(efficiency: Efficiency, ranks=(2, 3, 5, 8)) -> list[CollectiveTimes]:
    """Sends to the next rank, and all-to-alls over several numbers of ranks."""
    times = []
    for count in ranks:
        network = Network.of(nodes_of([count], efficiency=efficiency))
        ring = np.roll(np.eye(count), 1, axis=1)
        for operation, unit in (("send_receive", ring), ("all_to_all", np.ones((count, count)) / count)):
            points = [(size, all_to_all("concurrent", None, unit * size, network).seconds) for size in SIZES]
            times.append(CollectiveTimes(operation=operation, ranks=count, points=points))
    return [times[0], *times[1::2]]


@tried(40, efficiencies())
def test_simulated_measurements_give_the_shares_that_they_were_made_with(efficiency):
    fit = fit_ports(simulated(efficiency), RATE)
    assert fit.start_up == pytest.approx(START_UP, rel=1e-6) and fit.error < 1e-6
    assert [sends for sends, _ in fit.points] == [1, 2, 4, 7]
    for sends, share in fit.points:
        assert share == pytest.approx(float(shares(efficiency.fabric, sends)), rel=1e-6)


@tried(20, seeds)
def test_noise_of_three_per_cent_moves_shares_by_little(seed):
    rng = np.random.default_rng(seed)
    truth = Efficiency(fabric=((1, 0.9), (7, 0.45)))
    noisy = [
        times.model_copy(update={"points": [(size, s * rng.normal(1, 0.03)) for size, s in times.points]})
        for times in simulated(truth)
    ]
    fit = fit_ports(noisy, RATE)
    told = [share for _, share in fit.points]
    assert told == sorted(told, reverse=True) and max(told) <= 1
    for sends, share in fit.points:
        assert share == pytest.approx(float(shares(truth.fabric, sends)), rel=0.1)
    assert fit.error < 0.1


def test_sends_to_one_peer_beside_one_all_to_all_are_enough_and_shares_alone_need_no_rate():
    fewest, *_, most = simulated(Efficiency(fabric=((1, 0.5), (7, 0.25))))
    fit = fit_ports([fewest, most], None)
    assert fit.points == ((1, pytest.approx(1.0)), (7, pytest.approx(0.5)))


def test_a_cluster_with_its_fit_takes_what_was_measured():
    truth = Efficiency(fabric=((1, 0.8), (7, 0.4)))
    measured = simulated(truth)
    fitted, _ = with_fit(nodes_of([8], latency=0), measured, None, "bench.log")
    assert fitted.efficiency.origin == "bench.log" and fitted.latency == pytest.approx(START_UP)
    for size, seconds in measured[-1].points:
        assert float(Datasheet().all_to_all(fitted, size)) == pytest.approx(seconds, rel=1e-6)


def test_links_are_fitted_where_they_join_all_or_where_one_says_so():
    measured = simulated(Efficiency(fabric=((1, 1.0), (7, 0.5))))
    inside, _ = with_fit(nodes_of([8], link=RATE, latency=0), measured, None, "log")
    assert inside.efficiency.links[-1] == (7, pytest.approx(0.5)) and inside.efficiency.fabric == ((1, 1.0),)
    assert inside.nodes[0].link_latency == pytest.approx(START_UP) and inside.latency == 0
    several = nodes_of([4, 4], link=RATE, efficiency=inside.efficiency)
    with pytest.raises(InputError, match="say which of them was measured"):
        with_fit(several, measured, None, "log")
    both, _ = with_fit(several, measured, "fabric", "log", relative=True)
    assert both.efficiency.links == inside.efficiency.links and both.latency == several.latency
    assert both.efficiency.fabric[-1] == (7, pytest.approx(0.5))
    with pytest.raises(InputError, match="have no links"):
        with_fit(nodes_of([8]), measured, "links", "log")


@pytest.mark.parametrize(
    ("measured", "fault"),
    [
        ({}, "needs times of all-to-alls"),
        ({"all_reduce": ((1e3, 1.0), (1e6, 2.0))}, "needs times of all-to-alls"),
        ({"all_to_all": ((1e3, 1.0),)}, "at least two sizes"),
        ({"all_to_all": ((1e3, 2.0), (1e6, 1.0))}, "do not grow"),
    ],
)
def test_what_says_nothing_of_ports_is_refused(measured, fault):
    with pytest.raises(InputError, match=fault):
        fit_ports([CollectiveTimes(operation=name, ranks=4, points=points) for name, points in measured.items()], None)


def test_what_an_all_to_all_takes_to_post_its_sends_is_no_contention():
    sizes = SIZES.tolist()
    one = CollectiveTimes(operation="send_receive", ranks=5, points=[(size, START_UP + size / RATE) for size in sizes])
    four = [(size, 4 * START_UP + size * 4 / 5 / RATE) for size in sizes]
    fit = fit_ports([one, CollectiveTimes(operation="all_to_all", ranks=5, points=four)], RATE)
    assert fit.points == ((1, pytest.approx(1)), (4, pytest.approx(1))) and fit.start_up == pytest.approx(START_UP)


@given(st.integers(2, 9))
def test_a_single_all_to_all_is_a_share_for_all_numbers_of_sends(ranks):
    points = tuple((size, START_UP + 2 * size * (ranks - 1) / ranks / RATE) for size in SIZES)
    fit = fit_ports([CollectiveTimes(operation="all_to_all", ranks=ranks, points=points)], RATE)
    assert fit.points == ((ranks - 1, pytest.approx(0.5)),)


NAN = np.nan


def times_of(hosts: list[str], rate: np.ndarray) -> PairTimes:
    """rate: float64[gpu, gpu], of which the part above the diagonal counts."""
    above = np.triu(np.where(np.eye(len(rate), dtype=bool), NAN, rate), 1)
    both = np.where(np.triu(np.ones_like(rate), 1) > 0, above, above.T)
    np.fill_diagonal(both, NAN)
    buses = tuple(f"{gpu:02x}" for gpu in range(len(hosts)))
    return PairTimes(tuple(hosts), buses, ("NVIDIA H200",) * len(hosts), both, np.full_like(both, 1e-5), 1024.0)


RATES = st.integers(2, 6).flatmap(
    lambda gpus: st.lists(st.sampled_from([NAN, 1e9, 25e9, 300e9]), min_size=gpus**2, max_size=gpus**2).map(
        lambda cells: np.reshape(cells, (gpus, gpus))
    )
)


@tried(50, RATES, st.integers(1, 3))
def test_what_was_kept_is_what_was_measured(rate, of_a_host):
    assume(np.isfinite(rate[np.triu_indices(len(rate), 1)]).any())
    times = times_of([f"h{gpu // of_a_host}" for gpu in range(len(rate))], rate)
    drawn = draw_pairs(times, "drawn")
    kept = MeasuredPairs.of(times)
    again = MeasuredPairs.from_json(kept.to_json(), "kept").beside(drawn.cluster)
    for name in ("measured", "drawn"):
        np.testing.assert_array_equal(getattr(again, name), getattr(drawn, name))
    assert again.names == drawn.names
    assert again.is_partial == bool(np.isnan(rate[np.triu_indices(len(rate), 1)]).any())


def test_an_edited_cluster_is_held_against_them_and_another_is_not():
    times = times_of(["a", "a", "b"], np.array([[NAN, 100e9, 10e9], [NAN, NAN, 10e9], [NAN, NAN, NAN]]))
    kept, cluster = MeasuredPairs.of(times), draw_pairs(times, "drawn").cluster
    first, second = cluster.nodes
    slower = first.model_copy(update={"link_bandwidth": 50e9})
    beside = kept.beside(cluster.model_copy(update={"nodes": (slower, second)}))
    assert beside.difference[0, 1] == pytest.approx(-0.5) and beside.difference[0, 2] == pytest.approx(0)
    assert beside.worst(1) == [(0, 1)]
    for nodes in ((first,), (second, first), (first.model_copy(update={"gpus": first.gpus[:1]}), second)):
        assert kept.beside(cluster.model_copy(update={"nodes": nodes})) is None
    long_names = times_of(["node" * 40, "b"], np.array([[NAN, 10e9], [NAN, NAN]]))
    assert MeasuredPairs.of(long_names).beside(draw_pairs(long_names, "drawn").cluster) is not None


@pytest.mark.parametrize(
    "fault",
    [
        {"buses": ["0"]},
        {"rate": [1e9]},
        {"first": [0, 1], "second": [1, 1]},
        {"first": [0, 1], "second": [1, 3]},
        {"first": [-1, 1]},
        {"rate": [1e9, 0]},
        {"hosts": ["a"]},
        {"first": [], "second": [], "rate": []},
    ],
)
def test_what_fits_nothing_is_refused(fault):
    fine = {"hosts": ["a", "a", "b"], "buses": ["0", "1", "2"], "first": [0, 1], "second": [1, 2], "rate": [1e9, 2e9]}
    MeasuredPairs.from_dict(fine, "kept")
    with pytest.raises(InputError, match=r"^kept: "):
        MeasuredPairs.from_dict(fine | fault, "kept")
