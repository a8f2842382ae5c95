"""What ports reach with several sends: the document, and the shares that it tells."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster import Cluster, Efficiency, contention_points, shares
from engine.errors import InputError
from engine.network import Network
from tests.strategies import cluster_of, clusters, efficiencies, make_gpu


@given(efficiencies(), st.integers(1, 20))
def test_shares_never_rise_and_meet_their_points(efficiency, most):
    table = efficiency.table(most)
    assert table.shape == (2, most) and np.all(table > 0) and np.all(table <= 1)
    assert np.all(np.diff(table, axis=1) <= 1e-15)
    for points, row in zip((efficiency.fabric, efficiency.links), table, strict=True):
        for sends, share in points:
            if sends <= most:
                assert row[sends - 1] == pytest.approx(share)
    assert efficiency.is_none == (efficiency.table(20).min() == 1)


def test_every_further_send_costs_as_much_time():
    assert 1 / shares(contention_points(0.1, 8), np.arange(1, 11)) == pytest.approx(
        [1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.7, 1.7]
    )
    assert contention_points(0.1, 1) == ((1, 1.0),)


@pytest.mark.parametrize(
    ("points", "fault"),
    [
        ([[1, 0.5], [2, 0.6]], "larger share"),
        ([[2, 0.5], [2, 0.5]], "ascending"),
        ([[0, 0.5]], "greater than or equal to 1"),
        ([[1, 1.5]], "less than or equal to 1"),
        ([], "at least 1 item"),
    ],
)
def test_faulty_points_are_named(points, fault):
    with pytest.raises(InputError, match=fault):
        Efficiency.from_dict({"fabric": points}, "file")


@given(clusters())
def test_a_cluster_keeps_its_efficiency_and_one_without_is_written_as_ever(cluster):
    assert Cluster.from_json(cluster.to_json(), "file") == cluster
    assert ("efficiency" in cluster.to_json()) == (cluster.efficiency is not None)


def test_a_network_has_the_rates_of_one_send_and_shares_of_those():
    cluster = cluster_of(*[make_gpu(send=1e6)] * 3, efficiency=Efficiency(fabric=((1, 0.8), (2, 0.4))))
    network = Network.of(cluster)
    assert network.send.tolist() == network.receive.tolist() == [8e5] * 3
    assert network.share.tolist() == [[1, 0.5], [1, 1]] and network.contended
    assert network.rate(np.array([0, 0, 5]), np.array([1, 2, 9])).tolist() == [8e5, 4e5, 4e5]
    again = network.with_efficiency(Efficiency(fabric=contention_points(1.0, 2)))
    assert again.send.tolist() == [8e5] * 3 and again.share[0].tolist() == [1, 0.25]


def test_it_says_what_it_is():
    assert Efficiency(fabric=((1, 0.9), (8, 0.5)), origin="by hand").in_words == (
        "ports reach 90 % of their rate with 1 send, 50 % with 8; links reach their full rate (by hand)"
    )
