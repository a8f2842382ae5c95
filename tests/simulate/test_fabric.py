"""Several all-to-alls on one network: each alone as `all_to_all`, together as in a plain simulation, and in any order."""

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.cluster import Efficiency
from engine.communication.order import meeting_bound, order
from engine.errors import InputError
from engine.network import Network, off_diagonal
from engine.simulate.fabric import Fabric
from engine.simulate.flows import Flows, all_to_all
from tests.cases.examples import tried
from tests.cases.flows import contended, fabric, linked_network, loaded_networks, schedule_for
from tests.oracles.communication import check_flows
from tests.oracles.flows import plain_flows, sends_of
from tests.strategies import cluster_of, make_gpu, networks, seeds, traffics

ORDERS = ("matched", "sequential", "concurrent")
EXACT, CLOSE = 1e-9, 1e-6
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
    assert ends == pytest.approx(plain_ends(network, listed), rel=CLOSE)
    for name, (start, _, _, traffic) in enumerate(listed):
        flows, end = both.flows(str(name)), both.finish(str(name))
        delivered = np.zeros_like(traffic)
        np.add.at(delivered, (flows.src, flows.dst), flows.bytes)
        np.testing.assert_allclose(delivered, off_diagonal(traffic), rtol=1e-12)
        assert flows.start.min(initial=np.inf) >= start and flows.seconds == (end if len(flows.src) else 0)
        assert end >= (start + network.bound(traffic)) * (1 - CLOSE)
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
