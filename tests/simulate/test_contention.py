"""Ports that reach less of their rate the more sends meet there."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster import Efficiency, contention_points
from engine.communication.order import meeting_bound, order
from engine.network import off_diagonal
from engine.simulate.fabric import Fabric
from engine.simulate.flows import all_to_all
from tests.cases.examples import examples
from tests.simulate.test_flows import MODES, contended, fabric, linked_network, loaded_networks, schedule_for
from tests.strategies import seeds

pytestmark = pytest.mark.slow

CLOSE = 1e-7


@settings(max_examples=examples(100), deadline=None)
@given(loaded_networks(contended=False), st.sampled_from(MODES), seeds)
def test_whole_shares_change_no_bit(loaded, mode, seed):
    network, traffic = loaded
    schedule = schedule_for(mode, traffic, network, seed)
    plain, whole = (
        all_to_all(mode, schedule, traffic, net) for net in (network, network.with_efficiency(Efficiency()))
    )
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


@settings(max_examples=examples(100), deadline=None)
@given(loaded_networks())
def test_no_plain_all_to_all_beats_what_its_ports_reach(loaded):
    network, traffic = loaded
    least = meeting_bound(network, traffic)
    assert network.bound(traffic) <= least <= all_to_all("concurrent", None, traffic, network).seconds * (1 + CLOSE)


@settings(max_examples=examples(100), deadline=None)
@given(loaded_networks(linked=False, contended=False), st.floats(0, 2), st.floats(0, 2))
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
    both = Fabric(network)
    both.release("a", 0.0, "concurrent", None, first)
    both.release("b", 0.0, "concurrent", None, second)
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
