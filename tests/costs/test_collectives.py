"""Closed forms of all-to-all and all-reduce: against the simulation, against a ring run step by step, and by properties."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.catalogue import cluster_presets
from engine.cluster import Cluster, Node
from engine.costs import AlphaBeta, CostProfile, Datasheet, Line
from engine.network import Network
from engine.simulate.flows import all_to_all
from tests.cases.examples import examples
from tests.strategies import cluster_of, clusters, cost_models, make_gpu

COST = Datasheet()
CLOSE = 1e-7


def simulated(network: Network, size: float) -> float:
    """A uniform all-to-all run flow by flow."""
    traffic = np.full((network.gpus, network.gpus), size / network.gpus)
    return all_to_all("concurrent", None, traffic, network).seconds


def nodes_of(counts, link=None, link_latency=0.0, latency=0.0, send=1e6) -> Cluster:
    return Cluster(
        name="test",
        latency=latency,
        nodes=tuple(
            Node(
                name=f"node-{index}",
                gpus=(make_gpu(send=send),) * count,
                link_bandwidth=link,
                link_latency=link_latency,
            )
            for index, count in enumerate(counts)
        ),
    )


# All-to-all


@settings(max_examples=examples(150), deadline=None)
@given(clusters(least=1, most=7), st.floats(1.0, 1e7), st.data())
def test_a_uniform_all_to_all_takes_what_the_simulation_says(cluster, size, data):
    cost = data.draw(cost_models(cluster))
    expected = simulated(cost.network(cluster), size)
    assert float(cost.all_to_all(cluster, size)) == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize(
    "name", ["mixed-8", "exflow-4-nodes", "lancet-p3dn-2-nodes", "hgx-h100-8", "hgx-h100-and-l40s", "pipemoe-4-nodes"]
)
def test_it_does_on_the_clusters_of_the_catalogue(name):
    cluster = cluster_presets()[name].cluster
    sizes = np.array([1e3, 1e6, 1e9])
    expected = [simulated(Network.of(cluster), size) for size in sizes]
    np.testing.assert_allclose(COST.all_to_all(cluster, sizes), expected, rtol=CLOSE)


def test_the_own_part_does_not_travel():
    cluster = nodes_of((1, 1, 1, 1), latency=1e-3)
    assert float(COST.all_to_all(cluster, 4e6)) == pytest.approx(1e-3 + 3.0)


def test_links_and_fabric_work_side_by_side():
    # Of 4 parts of 1 MB one stays, one goes over a link (0.1 s + 0.5 s) and two over the fabric (0.2 s + 2 s).
    cluster = nodes_of((2, 2), link=2e6, link_latency=0.1, latency=0.2)
    assert float(COST.all_to_all(cluster, 4e6)) == pytest.approx(2.2)
    slow_links = nodes_of((2, 2), link=2e5, link_latency=0.1, latency=0.2)
    assert float(COST.all_to_all(slow_links, 4e6)) == pytest.approx(5.1)


def test_a_fitted_network_counts():
    line = Line(alpha=1.0, beta=1e-3)
    profile = CostProfile(name="p", origin="o", gemm={"type-0": line}, memory={"type-0": line}, network=line)
    assert float(AlphaBeta(profile).all_to_all(nodes_of((1, 1)), 2000.0)) == pytest.approx(2.0)


# All-reduce


def ring_step_by_step(hops: list[tuple[float, float]], size: float) -> float:
    """A ring all-reduce in 2 (P-1) steps, each of which waits for the slowest hop (latency, bandwidth) to pass a part."""
    parts = len(hops)
    return sum(max(start + size / parts / rate for start, rate in hops) for _ in range(2 * (parts - 1)))


@pytest.mark.parametrize("rates", [(1e6, 1e6), (1e6, 5e5, 8e5), (4e5,) * 7, (1e6, 1e6, 1e6, 1e6, 2e5)])
def test_without_start_up_a_ring_of_single_gpus_is_the_slowest_hop(rates):
    cluster = Cluster(
        name="test", nodes=tuple(Node(name=f"node-{at}", gpus=(make_gpu(send=rate),)) for at, rate in enumerate(rates))
    )
    hops = [(0.0, min(rate, rates[(at + 1) % len(rates)])) for at, rate in enumerate(rates)]
    assert float(COST.all_reduce(cluster, 6e6)) == pytest.approx(ring_step_by_step(hops, 6e6))


def test_a_large_all_reduce_starts_up_at_every_step_of_the_ring():
    cluster = nodes_of((1,) * 4, latency=0.01)
    assert float(COST.all_reduce(cluster, 1e8)) == pytest.approx(6 * 0.01 + 1.5 * 100)
    assert ring_step_by_step([(0.01, 1e6)] * 4, 1e8) == pytest.approx(float(COST.all_reduce(cluster, 1e8)))


def test_a_small_one_on_many_nodes_takes_the_tree():
    cluster = nodes_of((1,) * 64, latency=0.01)
    assert float(COST.all_reduce(cluster, 1.0)) == pytest.approx(2 * 6 * 0.01 + 2e-6)


def test_a_nodes_gpus_give_it_their_ports_together():
    fast_links = nodes_of((4, 4), link=1e9)
    assert float(COST.all_reduce(fast_links, 8e6)) == pytest.approx(2 * 7 / 8 * 8e6 / 4e6)
    assert float(COST.all_reduce(nodes_of((4, 4), link=1e6), 8e6)) == pytest.approx(2 * 7 / 8 * 8e6 / 1e6)
    # Without links every hop inside a node takes the GPU's own port too.
    assert float(COST.all_reduce(nodes_of((4, 4)), 8e6)) == pytest.approx(2 * 7 / 8 * 8e6 / 1e6)


def test_inside_one_node_the_fabric_does_not_count():
    node = nodes_of((4,), link=1e7, link_latency=1e-3, latency=9.0)
    assert float(COST.all_reduce(node, 8e6)) == pytest.approx(6e-3 + 1.5 * 0.8)


def test_hops_inside_a_node_start_up_as_links_do():
    cluster = nodes_of((2, 2), link=1e9, link_latency=1e-3, latency=1e-1)
    # A ring of four passes a part on six times: four times over a link, twice over the fabric.
    assert float(COST.all_reduce(cluster, 1e9)) == pytest.approx(4e-3 + 2e-1 + 1.5 * 1e9 / 2e6)


@settings(max_examples=examples(150), deadline=None)
@given(clusters(least=1, most=7), st.floats(1.0, 1e7))
def test_no_all_reduce_beats_what_must_leave_the_slowest_gpu(cluster, size):
    network, gpus = Network.of(cluster), len(cluster.gpus)
    way_out = np.where(network.link > 0, network.link, 0) + np.minimum(network.send, network.receive)
    # Patarasuk and Yuan, theorem 1, with all that a GPU could ever send through.
    least = 2 * (gpus - 1) / gpus * size / way_out.max()
    assert float(COST.all_reduce(cluster, size)) >= least * (1 - 1e-12)


# Both


both = pytest.mark.parametrize("collective", [COST.all_to_all, COST.all_reduce], ids=["all_to_all", "all_reduce"])


@both
@settings(max_examples=examples(60), deadline=None)
@given(clusters(least=1), st.lists(st.floats(0, 1e8), min_size=1, max_size=8))
def test_more_bytes_never_take_less_time_and_none_take_none(collective, cluster, sizes):
    sizes = np.sort(sizes)
    seconds = collective(cluster, sizes)
    assert np.all(np.diff(seconds) >= 0)
    np.testing.assert_array_equal(seconds, [float(collective(cluster, size)) for size in sizes])
    assert seconds.shape == sizes.shape
    assert float(collective(cluster, 0.0)) == 0
    if len(cluster.gpus) > 1:
        assert np.all(seconds[sizes > 1e-9] > 0)


@both
def test_one_gpu_talks_to_nobody(collective):
    assert collective(cluster_of(make_gpu(), latency=1.0), np.array([0.0, 5.0])).tolist() == [0, 0]


@both
def test_many_sizes_on_512_gpus_are_cheap(collective):
    cluster = nodes_of((8,) * 64, link=1e9, link_latency=1e-6, latency=1e-5)
    sizes = np.linspace(1, 1e9, 10_000)
    begin = time.process_time()
    collective(cluster, sizes)
    assert time.process_time() - begin < 0.5
