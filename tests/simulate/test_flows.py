"""All-to-alls on the fabric: exact flows against a plain implementation and closed forms, windowed flows against exact ones;
several on one network: each alone as `all_to_all`, together as in a plain simulation, and in any order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.cluster import Efficiency
from engine.communication.order import meeting_bound, order, random_order, shortest_first
from engine.errors import IllegalError, InputError, StoppedError
from engine.network import Network, off_diagonal
from engine.plan import Schedule, SendOrder
from engine.result import never
from engine.simulate import fabric as fabric_module
from engine.simulate import flows as flows_module
from engine.simulate.fabric import Fabric
from engine.simulate.flows import Flows, all_to_all
from engine.simulate.inference import exchanges
from engine.simulate.work import Work
from tests.cases.examples import tried
from tests.cases.flows import CLOSE, MODES, contended, fabric, linked_network, loaded_networks, schedule_for
from tests.oracles.communication import check_flows
from tests.oracles.flows import plain_flows, sends_of
from tests.strategies import cluster_of, make_gpu, networks, seeds, traffics

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


@tried(
    80, networks(most=16), st.sampled_from(KINDS), seeds, st.sampled_from(("concurrent", "matched", "sequential", "shortest"))
)
def test_exact_flows_are_those_of_the_plain_implementation(network, kind, seed, mode):
    traffic = traffic_of(kind, network.gpus, seed)
    mode, schedule = (
        ("sequential", shortest_first(traffic)) if mode == "shortest" else (mode, schedule_for(mode, traffic, network, seed))
    )
    compiled = all_to_all(mode, schedule, traffic, network)
    plain = plain_flows(network, *sends_of(mode, schedule, traffic))
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
    network = Network.of(cluster_of(*[make_gpu()] * gpus))
    traffic = np.random.default_rng(0).random((layers, gpus, gpus))
    orders = tuple(random_order(matrix, layer) for layer, matrix in enumerate(traffic))
    order = SendOrder(mode="sequential", dispatch=orders, combine=orders)
    work = Work(traffic, traffic.copy(), {})
    whole = list(exchanges(work, order, network, range(layers), never))  # whatever is compiled is there from now on
    assert len(whole) == layers
    with pytest.raises(StoppedError):
        list(exchanges(work, order, network, range(layers), lambda: True))


@tried(150, loaded_networks(), st.sampled_from(MODES), seeds, seeds)
def test_flows_are_legal_and_not_below_the_bound(loaded, mode, seed, other_seed):
    network, traffic = loaded
    flows = all_to_all(mode, schedule_for(mode, traffic, network, seed), traffic, network)
    relayed = mode == "two-tier"
    assert check_flows(flows, traffic, network, relayed) == flows.seconds
    straight, least = network.bound(traffic), network.relayed_bound(traffic)
    assert flows.seconds >= (least if relayed else straight) * (1 - CLOSE) and least <= straight * (1 + CLOSE)
    # A schedule for other traffic delivers everything too.
    rng = np.random.default_rng(other_seed)
    other = traffic * rng.integers(0, 3, traffic.shape) + (rng.random(traffic.shape) < 0.2) * 77.0
    check_flows(all_to_all(mode, schedule_for(mode, other, network, seed), traffic, network), traffic, network, relayed)


@tried(100, loaded_networks(linked=False))
def test_matched_order_takes_its_makespan_and_a_latency_per_phase(loaded):
    network, traffic = loaded
    schedule = order(traffic, network.send, network.receive, "matched").solution
    flows = all_to_all("matched", schedule, traffic, network)
    assert flows.seconds == pytest.approx(schedule.makespan + schedule.phases * network.latency, rel=1e-9)


@tried(100, loaded_networks(linked=False, contended=False))
def test_shared_order_takes_the_bound(loaded):
    network, traffic = loaded
    schedule = order(traffic, network.send, network.receive, "shared").solution
    flows = all_to_all("shared", schedule, traffic, network)
    assert flows.seconds == pytest.approx(network.bound(traffic), rel=1e-9)


@tried(100, loaded_networks(linked=True), st.sampled_from(("concurrent", "shared")))
def test_links_do_not_load_the_fabric(loaded, mode):
    network, traffic = loaded
    network = replace(network, latency=0.0, link_latency=np.zeros(network.gpus))

    def seconds(part):
        return all_to_all(mode, schedule_for("shared", part, network), part, network).seconds

    inside = np.where(network.linked, traffic, 0.0)
    assert seconds(traffic) == pytest.approx(max(seconds(inside), seconds(traffic - inside)), rel=CLOSE)


@pytest.mark.parametrize("mode", ("matched", "shared", "sequential"))
def test_sends_that_the_schedule_does_not_know_go_last(mode):
    """One that is planned without bytes says nothing about its pair."""
    empty = Schedule(src=(0,), dst=(1,), bytes=(0.0,), phase=(0,), duration=(0.0,))
    assert all_to_all(mode, empty, np.array([[0.0, 2.0], [0, 0]]), fabric([1, 1])).seconds == pytest.approx(2)
    traffic = np.zeros((3, 3))
    traffic[0, 1], traffic[0, 2] = 1, 1
    known = Schedule(src=(0,), dst=(2,), bytes=(5.0,), phase=(0,), duration=(5.0,))
    flows = all_to_all(mode, known, traffic, fabric([1, 1, 1]))
    assert flows.dst.tolist() == [2, 1]
    assert flows.start.tolist() == pytest.approx([0, 1])


def test_shortest_first_is_shortest_first():
    traffic = np.array([[9.0, 3, 1, 2], [0, 0, 0, 0], [1, 1, 0, 1], [0, 4, 0, 0]])
    schedule = shortest_first(traffic)
    pairs = [(int(src), int(dst)) for src, dst in zip(schedule.src, schedule.dst, strict=True)]
    assert pairs == [(0, 2), (0, 3), (0, 1), (2, 0), (2, 1), (2, 3), (3, 1)]


def test_the_check_sees_lost_bytes_flows_that_are_too_fast_and_latency_left_out():
    network, traffic = fabric([1, 1, 1]), np.array([[0.0, 1, 1], [0, 0, 1], [0, 0, 0]])
    flows = all_to_all("concurrent", None, traffic, network)
    for broken, on, message in (
        (replace(flows, bytes=flows.bytes * 0.9), network, "do not carry"),
        (replace(flows, end=flows.end * 0.9), network, "capacity"),
        (flows, replace(network, latency=0.5), "capacity"),
    ):
        with pytest.raises(IllegalError, match=message):
            check_flows(broken, traffic, on)


ORDERS = ("matched", "sequential", "concurrent")
EXACT, LOOSE = 1e-9, 1e-6
"""Against `all_to_all`, which counts the same events; against a simulation with a tolerance of its own."""


@st.composite
def collectives(draw, least: int = 1, most: int = 3, gpus: int = 5, releases: float = 2e-3):
    """A network and some (start, mode, schedule, traffic) on it, in the order of their starts."""
    network = draw(networks(most=gpus))
    listed = []
    start = 0.0
    for _ in range(draw(st.integers(least, most))):
        traffic, mode = draw(traffics(network.gpus)), draw(st.sampled_from(ORDERS))
        planned = traffic if draw(st.booleans()) else draw(traffics(network.gpus))
        listed.append((start, mode, schedule_for(mode, planned, network, draw(seeds)), traffic))
        start += draw(st.sampled_from((0.0, releases / 7, releases)))
    return network, listed


def plain_ends(network: Network, listed: list) -> list[float]:
    """The end of each on a network where all share the ports."""
    sends = [sends_of(*planned) for _, *planned in listed]
    owner = np.repeat(range(len(listed)), [len(columns[0]) for columns in sends])
    src, dst, size, lane, group = (np.concatenate(column) for column in zip(*sends, strict=True))
    starts = np.array([start for start, *_ in listed])
    end = plain_flows(network, src, dst, size, lane + owner * (len(src) + network.gpus), group, starts[owner]).end
    return [end[owner == place].max(initial=start) for place, start in enumerate(starts)]


def run(network: Network, listed: list) -> Fabric:
    """All collectives, called 0, 1, …, released at once and simulated to their end."""
    both = Fabric(network)
    for name, (start, *rest) in enumerate(listed):
        both.release(str(name), start, *rest)
    for name in range(len(listed)):
        both.finish(str(name))
    return both


@pytest.mark.parametrize("gpus", [2, 3, 5])
@pytest.mark.parametrize("linked", [False, True])
def test_the_sends_of_two_models_meet_at_a_port(gpus, linked):
    """All pairs of both send alike from the same moment on, so that every port has two sends for every other GPU."""
    rate, size, points = 1e6, 1e4, ((1, 1.0), (2 * gpus - 2, 0.25))
    drawn = linked_network([0] * gpus, rate, rate) if linked else fabric([rate] * gpus)
    network = drawn.with_efficiency(Efficiency(fabric=points, links=points))
    traffic = np.full((gpus, gpus), size) * ~np.eye(gpus, dtype=bool)
    both = run(network, [(0.0, "concurrent", None, traffic)] * 2)
    ends = [both.finish(str(name)) for name in range(2)]
    assert ends == pytest.approx([2 * (gpus - 1) * size / rate / 0.25] * 2)


@tried(100, collectives(most=1), st.sampled_from((0.0, 0.7)))
def test_alone_it_is_all_to_all_send_by_send(case, start):
    network, [(_, mode, schedule, traffic)] = case
    alone, wanted = Fabric(network), all_to_all(mode, schedule, traffic, network)
    alone.release("x", start, mode, schedule, traffic)
    assert alone.finish("x") == pytest.approx(start + wanted.seconds, rel=EXACT)
    flows = alone.flows("x")
    assert flows.src.tolist() == wanted.src.tolist() and flows.dst.tolist() == wanted.dst.tolist()
    assert flows.bytes.tolist() == wanted.bytes.tolist()
    close = {"rtol": EXACT, "atol": EXACT * max(wanted.seconds, start)}
    np.testing.assert_allclose(flows.start, start + wanted.start, **close)
    np.testing.assert_allclose(flows.end, start + wanted.end, **close)


@tried(60, collectives(least=2), st.randoms(use_true_random=False))
def test_neither_the_order_of_questions_nor_a_late_release_changes_anything(case, random):
    network, listed = case
    at_once = run(network, listed)
    late, asked = Fabric(network), []
    for name, (start, *rest) in enumerate(listed):
        # Ask for whatever has ended by then in the run that knew everything from the beginning.
        asked = [str(earlier) for earlier in range(name) if at_once.finish(str(earlier)) <= start]
        random.shuffle(asked)
        for collective in asked:
            late.finish(collective)
        late.release(str(name), start, *rest)
    names = [str(name) for name in range(len(listed))]
    random.shuffle(names)
    for name in names:
        assert late.finish(name) == pytest.approx(at_once.finish(name), rel=EXACT)
        np.testing.assert_allclose(late.flows(name).end, at_once.flows(name).end, rtol=EXACT)


@tried(100, collectives(least=2))
def test_together_they_share_as_in_a_plain_simulation_and_keep_bytes_latency_and_ports(case):
    """Nothing is lost, no send is faster than its ports, no port carries more than it can at any time."""
    network, listed = case
    both = run(network, listed)
    ends = [both.finish(str(name)) for name in range(len(listed))]
    assert ends == pytest.approx(plain_ends(network, listed), rel=LOOSE)
    for name, (start, _, _, traffic) in enumerate(listed):
        flows, end = both.flows(str(name)), both.finish(str(name))
        delivered = np.zeros_like(traffic)
        np.add.at(delivered, (flows.src, flows.dst), flows.bytes)
        np.testing.assert_allclose(delivered, off_diagonal(traffic), rtol=1e-12)
        assert flows.start.min(initial=np.inf) >= start and flows.seconds == (end if len(flows.src) else 0)
        assert end >= (start + network.bound(traffic)) * (1 - LOOSE)
    every = [both.flows(str(name)) for name in range(len(listed))]
    columns = (np.concatenate([getattr(flows, name) for flows in every]) for name in ("src", "dst", "bytes", "start", "end"))
    check_flows(Flows(*columns), sum(traffic for *_, traffic in listed), network)


def test_misuse_is_named():
    traffic = np.ones((2, 2))
    both = Fabric(fabric([1.0, 1.0]))
    both.release("a", 0.0, "concurrent", None, traffic)
    with pytest.raises(InputError, match="already is a collective named a"):
        both.release("a", 0.0, "concurrent", None, traffic)
    for mode in ("shared", "two-tier"):
        with pytest.raises(InputError, match=f"{mode} order"):
            both.release("b", 0.0, mode, None, traffic)
    with pytest.raises(ValueError, match="not ended"):
        both.flows("a")
    both.finish("a")
    with pytest.raises(InputError, match=r"starts at 0\.5 s"):
        both.release("b", 0.5, "concurrent", None, traffic)


def test_a_send_shorter_than_the_clock_can_tell_ends():
    """Late in a simulation a few bytes take less than the distance between two floats."""
    fabric = Fabric(Network.of(cluster_of(*[make_gpu(send=1e10)] * 2)))
    tiny = np.array([[0.0, 1e-8], [1e-8, 0.0]])
    fabric.release("early", 0.0, "concurrent", None, np.array([[0.0, 1e10], [0.0, 0.0]]))
    fabric.finish("early")
    fabric.release("late", 1e3, "concurrent", None, tiny)
    assert fabric.finish("late") == pytest.approx(1e3)
    assert (fabric.flows("late").end >= 1e3).all()


@pytest.mark.parametrize("senders", [1, 2, 5])
def test_senders_that_meet_at_a_receiver_take_what_it_reaches_with_them(senders):
    network = contended(fabric([1.0] * 6), 0.25)
    traffic = np.zeros((6, 6))
    traffic[1 : senders + 1, 0] = 1.0
    wanted = senders * (1 + 0.25 * (senders - 1))
    assert all_to_all("concurrent", None, traffic.T, network).seconds == pytest.approx(wanted)
    shared = order(traffic, network.send, network.receive, "shared").solution
    assert all_to_all("shared", shared, traffic, network).seconds == pytest.approx(wanted)
    matched = order(traffic, network.send, network.receive).solution
    assert all_to_all("matched", matched, traffic, network).seconds == pytest.approx(senders)


def test_a_port_gets_faster_as_its_sends_end():
    # Three meet at 1 / 2 of the rate until the short one has gone, then two at 2 / 3, then one.
    network = contended(fabric([1.0] * 4), 0.5)
    traffic = np.zeros((4, 4))
    traffic[1:, 0] = 1.0, 2.0, 3.0
    flows = all_to_all("concurrent", None, traffic, network)
    assert flows.end.tolist() == pytest.approx([6.0, 9.0, 10.0])
    assert meeting_bound(network, traffic) == pytest.approx(1 * 2 + 2 * 1.5 + 3)


@tried(100, loaded_networks())
def test_no_plain_all_to_all_beats_what_its_ports_reach(loaded):
    network, traffic = loaded
    reached = all_to_all("concurrent", None, traffic, network).seconds * (1 + 1e-7)
    assert network.bound(traffic) <= meeting_bound(network, traffic) <= reached
