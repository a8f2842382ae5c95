"""Compiled flows: exact ones against a plain implementation, windowed ones against exact ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster import Cluster, Node
from engine.communication.order import random_order, shortest_first
from engine.errors import StoppedError
from engine.network import Network, off_diagonal
from engine.plan import SendOrder
from engine.plan.plan import replay
from engine.result import never
from engine.simulate import fabric as fabric_module
from engine.simulate import flows as flows_module
from engine.simulate.fabric import Fabric
from engine.simulate.flows import Flows, all_to_all
from engine.simulate.inference import exchanges
from engine.simulate.work import Work
from tests.cases.examples import examples
from tests.oracles.communication import check_flows
from tests.simulate import reference
from tests.simulate.test_flows import contended
from tests.strategies import make_gpu, networks, seeds

pytestmark = pytest.mark.slow

KINDS = ("uniform", "skewed", "sparse", "replicated")
MAKESPAN, FLOW = 2e-3, 1e-2
"""How far a windowed run may be from the exact one, relative to the whole."""


def traffic_of(kind: str, gpus: int, seed: int) -> np.ndarray:
    """float64[src, dst] bytes."""
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        return off_diagonal(rng.random((gpus, gpus)) * 1e6)
    if kind == "skewed":
        return off_diagonal(rng.pareto(1.2, (gpus, gpus)) * 1e5)
    if kind == "sparse":
        return off_diagonal(rng.random((gpus, gpus)) * 1e6 * (rng.random((gpus, gpus)) < 0.1))
    tokens = rng.multinomial(16_384, rng.dirichlet(np.full(4 * gpus, 0.3)), gpus)
    return off_diagonal(tokens @ np.eye(gpus)[np.arange(4 * gpus) % gpus] * 7168.0)


def network_of(
    gpus: int, mixed: bool, seed: int, latency: float = 5e-6, node: int = 8, contention: float = 0.0
) -> Network:
    """Nodes of `node` GPUs with links of their own; mixed: ports of three rates, and no links in every other node; contention:
    see `lost`."""
    rng = np.random.default_rng(seed)
    rates = [rng.choice([12.5e9, 25e9, 50e9], gpus) if mixed else np.full(gpus, 50e9) for _ in range(2)]
    nodes = np.arange(gpus) // node
    link = np.where((nodes % 2 == 1) & mixed, 0.0, 450e9)
    network = Network(*rates, link, nodes, latency, np.full(gpus, latency / 3))
    return contended(network, contention) if contention else network


def sends_of(mode: str, schedule, traffic: np.ndarray) -> tuple[np.ndarray, ...]:
    """src, dst, bytes and the lane of every send."""
    if mode == "concurrent":
        src, dst = np.nonzero(traffic)
        return src, dst, traffic[src, dst], np.arange(len(src))
    src, dst, size, _ = replay(schedule, traffic)
    return src, dst, size, src


@settings(max_examples=examples(80), deadline=None)
@given(networks(most=16), st.sampled_from(KINDS), seeds, st.sampled_from(("concurrent", "random", "shortest")))
def test_exact_flows_are_those_of_the_plain_implementation(network, kind, seed, order):
    traffic = traffic_of(kind, network.gpus, seed)
    mode = "concurrent" if order == "concurrent" else "sequential"
    schedule = {"random": random_order(traffic, seed), "shortest": shortest_first(traffic)}.get(order)
    compiled = all_to_all(mode, schedule, traffic, network)
    src, dst, size, lane = sends_of(mode, schedule, traffic)
    plain = reference.run(network, src, dst, size, lane)
    assert compiled.exact and np.array_equal(compiled.src, plain.src) and np.array_equal(compiled.dst, plain.dst)
    for column in ("start", "end", "bytes"):
        assert getattr(compiled, column) == pytest.approx(getattr(plain, column), rel=1e-9, abs=1e-9 * plain.seconds)


@pytest.mark.parametrize("contention", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_windowed_flows_are_close_to_exact_ones_on_64_gpus(kind, mixed, contention, monkeypatch):
    traffic, network = traffic_of(kind, 64, 7), network_of(64, mixed, 7, contention=contention)
    windowed, exact = windowed_and_exact(monkeypatch, network, traffic)
    assert exact.exact and exact.latest is None
    if len(exact.src) > flows_module.EXACT_SENDS:
        assert not windowed.exact
        assert exact.seconds <= windowed.latest
    assert windowed.seconds == pytest.approx(exact.seconds, rel=MAKESPAN)
    assert np.abs(windowed.end - exact.end).max() <= FLOW * exact.seconds


@settings(max_examples=examples(60), deadline=None)
@given(networks(most=12), st.sampled_from(KINDS), seeds)
def test_windowed_flows_keep_ports_bound_and_interval(network, kind, seed):
    traffic = traffic_of(kind, network.gpus, seed)
    with pytest.MonkeyPatch.context() as patch:
        windowed, exact = windowed_and_exact(patch, network, traffic, most=0)
    assert check_flows(windowed, traffic, network) == windowed.seconds
    bound = network.bound(traffic)
    assert bound * (1 - 1e-9) <= windowed.seconds <= exact.seconds * (1 + MAKESPAN)
    if windowed.latest is not None:
        assert bound * (1 - 1e-9) <= exact.seconds <= windowed.latest * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_windowed_flows_scale_and_do_not_know_the_names_of_gpus(kind):
    traffic, network = traffic_of(kind, 48, 3), network_of(48, False, 3, latency=0.0)
    windowed = all_to_all("concurrent", None, traffic, network)
    assert all_to_all("concurrent", None, 8 * traffic, network).seconds == pytest.approx(
        8 * windowed.seconds, rel=1e-12
    )
    new = np.random.default_rng(3).permutation(48)
    renumbered = Network(
        network.send[new], network.receive[new], network.link[new], network.node[new], 0.0, np.zeros(48)
    )
    there = all_to_all("concurrent", None, traffic[np.ix_(new, new)], renumbered)
    assert there.seconds == pytest.approx(windowed.seconds, rel=1e-9)


@pytest.mark.parametrize("contention", [0.0, 0.2])
@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "mixed"])
def test_two_models_windowed_are_close_to_exact(mixed, contention, monkeypatch):
    network = network_of(48, mixed, 5, contention=contention)
    traffics = [traffic_of(kind, 48, 5) for kind in ("replicated", "uniform")]
    ends = {}
    for most in (flows_module.EXACT_SENDS, 10**9):
        monkeypatch.setattr(fabric_module, "EXACT_SENDS", most)
        both = Fabric(network)
        both.release("a", 0.0, "concurrent", None, traffics[0])
        both.release("b", 0.3 * network.bound(traffics[0]), "concurrent", None, traffics[1])
        both.finish("a")
        end = both.finish("b")
        ends[most] = [*(both.flows(name).seconds for name in "ab"), end]
        assert both.flows("b").exact is (most > 10**6)
    exact, windowed = ends[10**9], ends[flows_module.EXACT_SENDS]
    assert windowed == pytest.approx(exact, rel=MAKESPAN)
    assert max(windowed) >= network.bound(sum(traffics)) * (1 - 1e-9)


def test_320_gpus_are_never_ahead_of_the_bound_and_inside_the_interval():
    traffic, network = traffic_of("replicated", 320, 2), network_of(320, False, 2)
    windowed = all_to_all("concurrent", None, traffic, network)
    assert not windowed.exact
    assert network.bound(traffic) * (1 - 1e-9) <= windowed.seconds <= windowed.latest
    assert windowed.seconds <= network.bound(traffic) * 1.01


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sparse"])  # whose few sends are exact anyway
def test_whoever_wants_it_to_end_gets_a_wider_interval_that_still_holds(kind):
    traffic, network = traffic_of(kind, 64, 4), network_of(64, False, 4)
    usual = all_to_all("concurrent", None, traffic, network)
    hurried = all_to_all("concurrent", None, traffic, network, np.array([True]))
    assert check_flows(hurried, traffic, network) == hurried.seconds
    assert network.bound(traffic) * (1 - 1e-9) <= usual.seconds <= hurried.latest
    assert hurried.seconds <= hurried.latest and not hurried.exact


def test_a_sequential_order_cannot_be_hurried_only_given_up():
    traffic, network = traffic_of("replicated", 64, 4), network_of(64, False, 4)
    with pytest.raises(StoppedError, match="before the order was simulated"):
        all_to_all("sequential", shortest_first(traffic), traffic, network, np.array([True]))


def windowed_and_exact(
    patch: pytest.MonkeyPatch, network: Network, traffic: np.ndarray, most: int = flows_module.EXACT_SENDS
) -> tuple[Flows, Flows]:
    """The same all-to-all with and without windows; most: sends up to which the first is exact too."""
    runs = []
    for exact_sends in (most, 10**9):
        patch.setattr(flows_module, "EXACT_SENDS", exact_sends)
        runs.append(all_to_all("concurrent", None, traffic, network))
    return runs[0], runs[1]


def test_sequential_orders_that_are_simulated_in_no_time_are_stopped_too():
    gpus, layers = 40, 6
    network = Network.of(Cluster(name="even", nodes=(Node(name="node", gpus=(make_gpu(),) * gpus),)))
    traffic = np.random.default_rng(0).random((layers, gpus, gpus))
    orders = tuple(random_order(matrix, layer) for layer, matrix in enumerate(traffic))
    order = SendOrder(mode="sequential", dispatch=orders, combine=orders)
    work = Work(traffic, traffic.copy(), {})
    whole = list(exchanges(work, order, network, range(layers), never))  # whatever is compiled is there from now on
    assert len(whole) == layers
    with pytest.raises(StoppedError):
        list(exchanges(work, order, network, range(layers), lambda: True))
