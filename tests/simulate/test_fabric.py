"""Several all-to-alls on one network: each alone as `all_to_all`, together as a naive simulation, and in any order."""

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.cluster import Efficiency, contention_points
from engine.communication.order import meeting_bound, order
from engine.errors import InputError
from engine.network import Network, off_diagonal
from engine.plan import Schedule
from engine.plan.plan import replay
from engine.simulate.fabric import Fabric
from engine.simulate.flows import Flows, all_to_all
from tests.cases.examples import tried
from tests.cases.flows import (
    MODES,
    capacity_of,
    contended,
    fabric,
    linked_network,
    loaded_networks,
    naive_rates,
    naive_reached,
    schedule_for,
)
from tests.oracles.communication import check_flows
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


def run(network: Network, listed: list) -> Fabric:
    """All collectives, called 0, 1, …, released at once and simulated to their end."""
    both = Fabric(network)
    for name, (start, *rest) in enumerate(listed):
        both.release(str(name), start, *rest)
    for name in range(len(listed)):
        both.finish(str(name))
    return both


def naive_ends(network: Network, listed: list) -> list[float]:
    """The end of each, from lanes of groups of sends: a group starts when the one before it in its lane has ended."""
    capacity, linked = capacity_of(network), network.linked
    lanes, ends = [], []
    for owner, (start, mode, schedule, traffic) in enumerate(listed):
        traffic = off_diagonal(traffic)
        ends.append(start)
        if mode == "concurrent":
            groups = [[(i, j, traffic[i, j]) for i, j in np.argwhere(traffic)]]
            lanes.append([owner, start, groups, []])
            continue
        sends = list(zip(*replay(schedule, traffic), strict=True))
        if mode == "matched":
            groups = [[send[:3] for send in sends if send[3] == phase] for phase in range(schedule.phases + network.gpus)]
            lanes.append([owner, start, groups, []])
        else:
            for gpu in range(network.gpus):
                lanes.append([owner, start, [[send[:3]] for send in sends if send[0] == gpu], []])
    now = 0.0
    while True:
        for lane in lanes:
            while not lane[3] and any(lane[2]):
                for src, dst, size in lane[2].pop(0):
                    kind, late = ("link ", network.link_latency[src]) if linked[src, dst] else ("", network.latency)
                    lane[3].append([lane[1] + late, size, ((kind + "out", src), (kind + "in", dst)), size])
        flying = [send for lane in lanes for send in lane[3]]
        if not flying:
            return ends
        moving = [send for send in flying if send[0] <= now + 1e-15]
        rates = naive_rates([send[2] for send in moving], naive_reached(network, capacity, moving))
        until = [send[1] / rate for send, rate in zip(moving, rates, strict=True)]
        until += [send[0] - now for send in flying if send[0] > now + 1e-15]
        step = min(until)
        for send, rate in zip(moving, rates, strict=True):
            send[1] -= rate * step
        now += step
        for lane in lanes:
            if lane[3]:
                lane[3] = [send for send in lane[3] if send[1] > 1e-10 * send[3]]
                if not lane[3]:
                    lane[1] = now
                    ends[lane[0]] = max(ends[lane[0]], now)


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
def test_together_they_share_as_in_a_naive_simulation_and_keep_bytes_latency_and_ports(case):
    """Nothing is lost, no send is faster than its ports, no port carries more than it can at any time."""
    network, listed = case
    both = run(network, listed)
    ends = [both.finish(str(name)) for name in range(len(listed))]
    assert ends == pytest.approx(naive_ends(network, listed), rel=CLOSE)
    for name, (start, _, _, traffic) in enumerate(listed):
        flows, end = both.flows(str(name)), both.finish(str(name))
        delivered = np.zeros_like(traffic)
        np.add.at(delivered, (flows.src, flows.dst), flows.bytes)
        np.testing.assert_allclose(delivered, off_diagonal(traffic), rtol=1e-12)
        assert flows.start.min(initial=np.inf) >= start and flows.seconds == (end if len(flows.src) else 0)
        assert end >= (start + network.bound(traffic)) * (1 - CLOSE)
        out, into = network.ports(flows.src, flows.dst)
        fastest = flows.bytes / np.minimum(network.capacity[out], network.capacity[into])
        least = (network.start_up(flows.src, flows.dst) + fastest) * (1 - CLOSE)
        assert np.all(flows.end - flows.start >= least - 1e-12 * flows.end)  # the clock tells no shorter times apart
    every = [both.flows(str(name)) for name in range(len(listed))]
    columns = (np.concatenate([getattr(flows, name) for flows in every]) for name in ("src", "dst", "bytes", "start", "end"))
    check_flows(Flows(*columns), sum(traffic for *_, traffic in listed), network)


def concurrent(network: Network, first: np.ndarray, second: np.ndarray, late: float = 0.0) -> Fabric:
    """Two all-to-alls, the second `late` seconds after the first."""
    both = Fabric(network)
    both.release("a", 0.0, "concurrent", None, first)
    both.release("b", late, "concurrent", None, second)
    return both


def test_two_equal_collectives_take_twice_as_long_and_a_late_one_only_what_is_left():
    traffic = np.array([[0.0, 6.0], [0.0, 0.0]])
    both = concurrent(fabric([2.0, 2.0]), traffic, traffic, 1.0)
    # a moves 2 alone, both share from second 1 on: a ends at 5, then b has 2 left.
    assert (both.finish("a"), both.finish("b")) == (pytest.approx(5.0), pytest.approx(6.0))
    assert both.flows("b").start.tolist() == [1.0]


def test_the_phases_of_one_hold_up_only_itself():
    network = fabric([1.0] * 4, latency=0.5)
    phases = Schedule(src=(0, 1, 1), dst=(1, 0, 0), bytes=(1.0, 3.0, 1.0), phase=(0, 0, 1), duration=(3.0, 1.0))
    traffic = np.zeros((4, 4))
    traffic[0, 1], traffic[1, 0] = 1.0, 4.0
    other = np.zeros((4, 4))
    other[2, 3] = 7.0
    both = Fabric(network)
    both.release("a", 0.0, "matched", phases, traffic)
    both.release("b", 0.0, "concurrent", None, other)
    assert both.finish("a") == pytest.approx(5.0)  # 0.5 + 3, then 0.5 + 1
    assert both.now == pytest.approx(5.0)
    assert both.flows("a").end.tolist() == pytest.approx([1.5, 3.5, 5.0])
    assert both.finish("b") == pytest.approx(7.5)


def test_disjoint_in_time_they_do_not_meet():
    rng = np.random.default_rng(5)
    network, traffic = fabric(rng.uniform(1, 3, 4), latency=0.1), rng.exponential(1.0, (4, 4))
    first = Fabric(network)
    first.release("a", 0.0, "concurrent", None, traffic)
    end = first.finish("a")
    first.release("b", end, "concurrent", None, traffic.T)
    assert first.finish("b") - end == pytest.approx(all_to_all("concurrent", None, traffic.T, network).seconds)


def test_nothing_to_send_ends_at_once():
    idle = Fabric(fabric([1.0, 1.0], latency=3.0))
    idle.release("a", 4.0, "concurrent", None, np.diag([5.0, 6.0]))
    assert idle.finish("a") == 4.0 and len(idle.flows("a").src) == 0 and idle.now == 0.0


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


ROUND_OFF = 1e-7


@tried(100, loaded_networks(contended=False), st.sampled_from(MODES), seeds)
def test_whole_shares_change_no_bit(loaded, mode, seed):
    network, traffic = loaded
    schedule = schedule_for(mode, traffic, network, seed)
    plain, whole = (all_to_all(mode, schedule, traffic, net) for net in (network, network.with_efficiency(Efficiency())))
    assert np.array_equal(plain.start, whole.start) and np.array_equal(plain.end, whole.end)
    assert meeting_bound(network, traffic) == network.bound(traffic)


@pytest.mark.parametrize("senders", [1, 2, 5])
def test_senders_that_meet_at_a_receiver_take_what_it_reaches_with_them(senders):
    network = contended(fabric([1.0] * 6), 0.25)
    traffic = np.zeros((6, 6))
    traffic[1 : senders + 1, 0] = 1.0
    wanted = senders * (1 + 0.25 * (senders - 1))
    assert all_to_all("concurrent", None, traffic, network).seconds == pytest.approx(wanted)
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


def test_fabric_and_links_contend_apart():
    network = linked_network([0, 0, 0, 1], 1.0, 1.0)
    network = network.with_efficiency(Efficiency(links=contention_points(1.0, 4)))
    traffic = off_diagonal(np.ones((4, 4)))
    flows = all_to_all("concurrent", None, traffic, network)
    over_links = network.linked[flows.src, flows.dst]
    assert flows.end[over_links] == pytest.approx(4.0)
    assert flows.end[~over_links].max() == pytest.approx(3.0)


@tried(100, loaded_networks())
def test_no_plain_all_to_all_beats_what_its_ports_reach(loaded):
    network, traffic = loaded
    reached = all_to_all("concurrent", None, traffic, network).seconds * (1 + ROUND_OFF)
    assert network.bound(traffic) <= meeting_bound(network, traffic) <= reached


@tried(100, loaded_networks(linked=False, contended=False), st.floats(0, 2), st.floats(0, 2))
def test_more_contention_never_lowers_a_bound_and_never_changes_a_matching(loaded, less, more):
    network, traffic = loaded
    slight, strong = (contended(network, contention) for contention in sorted((less, more)))
    assert meeting_bound(slight, traffic) <= meeting_bound(strong, traffic) * (1 + 1e-12)
    schedule = order(traffic, network.send, network.receive).solution
    times = {all_to_all("matched", schedule, traffic, net).seconds for net in (network, slight, strong)}
    assert len(times) == 1


@pytest.mark.parametrize("gpus", [3, 8, 40])
def test_more_contention_never_makes_an_even_all_to_all_faster(gpus):
    traffic = off_diagonal(np.ones((gpus, gpus)))
    times = [
        all_to_all("concurrent", None, traffic, contended(fabric([1.0] * gpus), contention)).seconds
        for contention in (0, 0.01, 0.1, 1)
    ]
    assert times == pytest.approx([(gpus - 1) * (1 + c * (gpus - 2)) for c in (0, 0.01, 0.1, 1)], rel=2e-3)


def test_two_models_meet_at_a_port():
    network = contended(fabric([1.0] * 3), 1.0)
    first, second = np.zeros((3, 3)), np.zeros((3, 3))
    first[1, 0] = second[2, 0] = 1.0
    both = concurrent(network, first, second)
    assert both.finish("a") == both.finish("b") == pytest.approx(4.0)


def test_from_some_contention_on_a_matching_pays():
    """Thirteen GPUs, even traffic, a start-up as long as a send: a matching pays twelve of those, and contention nothing."""
    gpus, latency = 13, 1.0
    traffic = off_diagonal(np.ones((gpus, gpus)))
    alone = fabric([1.0] * gpus, latency=latency)
    matched = all_to_all("matched", order(traffic, alone.send, alone.receive).solution, traffic, alone).seconds
    assert matched == pytest.approx((gpus - 1) * (1 + latency))
    even = (matched - latency) / (gpus - 1)  # 1 + contention (gpus - 2) where both take as long
    for factor, pays in ((0.9, False), (1.1, True)):
        network = contended(alone, factor * (even - 1) / (gpus - 2))
        assert (matched < all_to_all("concurrent", None, traffic, network).seconds) is pays
