"""What ports reach, from measurements whose truth is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster import Cluster, Efficiency, Node, shares
from engine.costs import CollectiveTimes, Datasheet
from engine.costs.pair_cluster import fit_ports, with_fit
from engine.errors import InputError
from engine.network import Network
from engine.simulate.flows import all_to_all
from tests.cases.examples import examples
from tests.strategies import efficiencies, make_gpu, seeds

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


@settings(max_examples=examples(40), deadline=None)
@given(efficiencies())
def test_simulated_measurements_give_the_shares_that_they_were_made_with(efficiency):
    fit = fit_ports(simulated(efficiency), RATE)
    assert fit.start_up == pytest.approx(START_UP, rel=1e-6) and fit.error < 1e-6
    assert [sends for sends, _ in fit.points] == [1, 2, 4, 7]
    for sends, share in fit.points:
        assert share == pytest.approx(float(shares(efficiency.fabric, sends)), rel=1e-6)


@settings(max_examples=examples(20), deadline=None)
@given(seeds)
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
    ("collectives", "fault"),
    [
        ([], "needs times of all-to-alls"),
        (
            [CollectiveTimes(operation="all_reduce", ranks=4, points=((1e3, 1.0), (1e6, 2.0)))],
            "needs times of all-to-alls",
        ),
        ([CollectiveTimes(operation="all_to_all", ranks=4, points=((1e3, 1.0),))], "two different sizes"),
        ([CollectiveTimes(operation="all_to_all", ranks=4, points=((1e3, 2.0), (1e6, 1.0)))], "do not grow"),
    ],
)
def test_what_says_nothing_of_ports_is_refused(collectives, fault):
    with pytest.raises(InputError, match=fault):
        fit_ports(collectives, None)


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
