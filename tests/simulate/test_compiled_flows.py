"""Compiled flows: exact ones against a plain implementation, windowed ones against exact ones."""

import numpy as np
import pytest
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
from tests.cases.examples import tried
from tests.cases.flows import contended
from tests.oracles.communication import check_flows
from tests.strategies import make_gpu, networks, seeds

KINDS = ("uniform", "skewed", "sparse", "replicated")
MAKESPAN, FLOW = 2e-3, 1e-2
"""The largest distance of a windowed run from the exact one, relative to the whole."""


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


def network_of(gpus: int, mixed: bool, seed: int, latency: float = 5e-6, node: int = 8, contention: float = 0.0) -> Network:
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


@tried(80, networks(most=16), st.sampled_from(KINDS), seeds, st.sampled_from(("concurrent", "random", "shortest")))
def test_exact_flows_are_those_of_the_plain_implementation(network, kind, seed, order):
    traffic = traffic_of(kind, network.gpus, seed)
    mode = "concurrent" if order == "concurrent" else "sequential"
    schedule = {"random": random_order(traffic, seed), "shortest": shortest_first(traffic)}.get(order)
    compiled = all_to_all(mode, schedule, traffic, network)
    src, dst, size, lane = sends_of(mode, schedule, traffic)
    plain = flows_in_plain_numpy(network, src, dst, size, lane)
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


@tried(60, networks(most=12), st.sampled_from(KINDS), seeds)
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
    assert all_to_all("concurrent", None, 8 * traffic, network).seconds == pytest.approx(8 * windowed.seconds, rel=1e-12)
    new = np.random.default_rng(3).permutation(48)
    renumbered = Network(network.send[new], network.receive[new], network.link[new], network.node[new], 0.0, np.zeros(48))
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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sparse"])  # its few sends are exact anyway
def test_whoever_wants_it_to_end_gets_a_wider_interval_that_still_holds_and_no_sequential_order(kind):
    traffic, network, hurry = traffic_of(kind, 64, 4), network_of(64, False, 4), np.array([True])
    usual = all_to_all("concurrent", None, traffic, network)
    hurried = all_to_all("concurrent", None, traffic, network, hurry)
    assert check_flows(hurried, traffic, network) == hurried.seconds
    assert network.bound(traffic) * (1 - 1e-9) <= usual.seconds <= hurried.latest
    assert hurried.seconds <= hurried.latest and not hurried.exact
    with pytest.raises(StoppedError, match="before the order was simulated"):
        all_to_all("sequential", shortest_first(traffic), traffic, network, hurry)


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


def flows_in_plain_numpy(network: Network, src: np.ndarray, dst: np.ndarray, size: np.ndarray, lane: np.ndarray) -> Flows:
    """Event-driven flows: those of one lane run one after another in the given order, lanes run side by side."""
    out, into = network.ports(src, dst)
    capacity, latency = network.capacity, network.start_up(src, dst)
    count = len(src)
    ports = np.concatenate([out, into])
    if len(np.unique(ports)) == 2 * count and len(np.unique(lane)) == count:  # nobody meets or waits for anybody
        end = latency + size / np.minimum(capacity[out], capacity[into])
        return Flows(src, dst, size, np.zeros(count), end)

    order = np.argsort(lane, kind="stable")
    follows = np.full(count, -1)
    same_lane = lane[order[1:]] == lane[order[:-1]]
    follows[order[:-1][same_lane]] = order[1:][same_lane]
    heads = order[np.r_[True, ~same_lane]]

    start, end = np.zeros(count), np.zeros(count)
    left = size.astype(np.float64).copy()
    ready_at = np.full(count, np.inf)
    ready_at[heads] = latency[heads]
    waiting, active = list(heads), np.empty(0, dtype=np.int64)
    now = 0.0
    while waiting or len(active):
        ripe = [flow for flow in waiting if ready_at[flow] <= now]
        if ripe:
            waiting = [flow for flow in waiting if ready_at[flow] > now]
            active = np.concatenate([active, ripe]).astype(np.int64)
        rate = fair_rates(out[active], into[active], reached(network, out[active], into[active]))
        step = (left[active] / rate).min(initial=np.inf)
        step = min(step, min((ready_at[flow] for flow in waiting), default=np.inf) - now)
        left[active] -= rate * step
        now += step
        # Flows within a billionth of their end are done: without this, round-off would add endless tiny steps.
        done = active[left[active] <= 1e-9 * size[active]]
        active = active[left[active] > 1e-9 * size[active]]
        end[done] = now
        for flow in follows[done][follows[done] >= 0]:
            start[flow] = now
            ready_at[flow] = now + latency[flow]
            waiting.append(flow)
    return Flows(src, dst, size, start, end)


def reached(network: Network, out: np.ndarray, into: np.ndarray) -> np.ndarray:
    """float64[port] bytes/s that every port reaches with the flows that it has."""
    capacity = network.capacity.copy()
    for port, flows in enumerate(np.bincount(np.r_[out, into], minlength=len(capacity))):
        if flows:
            row = network.share[1 if port >= 2 * network.gpus else 0]
            capacity[port] *= row[flows - 1] if flows <= len(row) else row[-1]
    return capacity


def fair_rates(out: np.ndarray, into: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """float64[flow]: max-min fair rates by progressive filling (Bertsekas & Gallager, Data Networks, §6.5.2).

    Not only the port with the lowest share of all is filled in a round, but every one with flows that have no lower share at
    their other ends: the shares of the ports that stay open only grow, so nothing that is filled later can lower it.
    """
    rate = np.zeros(len(out))
    room, flows = capacity.copy(), np.arange(len(out))
    while len(flows):
        users = np.bincount(out, minlength=len(room)) + np.bincount(into, minlength=len(room))
        share = room / np.maximum(users, 1)
        at_out, at_into = share[out], share[into]
        level = np.minimum(at_out, at_into)
        full = np.ones(len(room), dtype=bool)
        full[out[at_out > level * (1 + 1e-12)]] = False
        full[into[at_into > level * (1 + 1e-12)]] = False
        fixed = full[out] | full[into]
        level = np.where(fixed, level, 0.0)
        rate[flows] = level
        room = np.maximum(room - np.bincount(out, level, len(room)) - np.bincount(into, level, len(room)), 0.0)
        out, into, flows = out[~fixed], into[~fixed], flows[~fixed]
    return rate
