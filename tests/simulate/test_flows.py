"""All-to-alls on the fabric: against a naive simulation and closed forms, and the changes that leave the time as it is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.communication.order import order, random_order, shortest_first
from engine.errors import IllegalError
from engine.network import Network, off_diagonal
from engine.plan import Schedule
from engine.simulate.flows import all_to_all
from tests.cases.examples import tried
from tests.cases.flows import (
    CLOSE,
    MODES,
    capacity_of,
    fabric,
    linked_network,
    loaded_networks,
    naive_rates,
    naive_reached,
    schedule_for,
)
from tests.oracles.communication import check_flows
from tests.strategies import networks, seeds


def sequence(*sends: tuple[int, int], size: float = 1.0) -> Schedule:
    src, dst = zip(*sends, strict=True)
    return Schedule(src=src, dst=dst, bytes=(size,) * len(src), phase=(0,) * len(src))


def naive_end(network: Network, lanes: list[list[tuple[int, int, float]]]) -> float:
    """End of the last send when every lane works through its (src, dst, bytes) one by one."""
    capacity, linked = capacity_of(network), network.linked
    now = 0.0
    lanes = [list(lane) for lane in lanes if lane]

    def start(src: int, dst: int, size: float) -> list:
        kind, late = ("link ", network.link_latency[src]) if linked[src, dst] else ("", network.latency)
        return [now + late, size, ((kind + "out", src), (kind + "in", dst)), size]

    current = [start(*lane.pop(0)) for lane in lanes]
    while any(current):
        moving = [send for send in current if send and send[0] <= now + 1e-15]
        rates = naive_rates([send[2] for send in moving], naive_reached(network, capacity, moving))
        until = [send[1] / rate for send, rate in zip(moving, rates, strict=True)]
        until += [send[0] - now for send in current if send and send not in moving]
        step = min(until)
        for send, rate in zip(moving, rates, strict=True):
            send[1] -= rate * step
        now += step
        for lane, send in enumerate(current):
            if send and send[1] <= 1e-10 * send[3]:
                current[lane] = start(*lanes[lane].pop(0)) if lanes[lane] else None
    return now


@tried(100, loaded_networks(most=5), seeds)
def test_concurrent_and_sequential_equal_a_naive_simulation(loaded, seed):
    network, traffic = loaded
    lanes = [[(i, j, traffic[i, j])] for i, j in np.argwhere(off_diagonal(traffic))]
    flows = all_to_all("concurrent", None, traffic, network)
    assert flows.seconds == pytest.approx(naive_end(network, lanes), rel=CLOSE)
    schedule = random_order(traffic, seed)
    lanes = [[] for _ in range(network.gpus)]
    for src, dst, size in zip(schedule.src, schedule.dst, schedule.bytes, strict=True):
        lanes[src].append((src, dst, size))
    flows = all_to_all("sequential", schedule, traffic, network)
    assert flows.seconds == pytest.approx(naive_end(network, lanes), rel=CLOSE)


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


@tried(100, networks(), seeds)
def test_one_sender_sends_one_after_another(network, seed):
    rng = np.random.default_rng(seed)
    traffic = np.zeros((network.gpus, network.gpus))
    traffic[0, 1:] = rng.exponential(500.0, network.gpus - 1)
    wanted = 0.0
    for peer in range(1, network.gpus):
        over_link = network.linked[0, peer]
        rate = network.link[0] if over_link else min(network.send[0], network.receive[peer])
        wanted += traffic[0, peer] / rate + (network.link_latency[0] if over_link else network.latency)
    flows = all_to_all("sequential", random_order(traffic, seed), traffic, network)
    assert flows.seconds == pytest.approx(wanted, rel=CLOSE)
    assert np.all(np.sort(flows.start)[1:] >= np.sort(flows.end)[:-1] * (1 - CLOSE))


@tried(100, loaded_networks(), st.sampled_from(MODES), seeds, st.sampled_from((1e-3, 0.5, 7.0, 1e6)))
def test_without_latency_time_is_proportional_to_bytes(loaded, mode, seed, factor):
    network, traffic = loaded
    network = replace(network, latency=0.0, link_latency=np.zeros(network.gpus))
    schedule = schedule_for(mode, traffic, network, seed)
    once = all_to_all(mode, schedule, traffic, network).seconds
    assert all_to_all(mode, schedule, factor * traffic, network).seconds == pytest.approx(factor * once, rel=CLOSE)


@tried(100, loaded_networks(), st.sampled_from(("concurrent", "sequential")), seeds)
def test_numbers_of_gpus_do_not_matter(loaded, mode, seed):
    network, traffic = loaded
    rng = np.random.default_rng(seed)
    new = rng.permutation(network.gpus)  # GPU new[i] takes the number i
    renumbered = replace(
        network, **{name: getattr(network, name)[new] for name in ("send", "receive", "link", "node", "link_latency")}
    )
    schedule = schedule_for(mode, traffic, network, seed)
    other = None
    if schedule:
        number = np.argsort(new)
        ends = {name: number[getattr(schedule, name)] for name in ("src", "dst")}
        other = schedule.model_copy(update=ends)
    there = all_to_all(mode, other, traffic[np.ix_(new, new)], renumbered)
    assert there.seconds == pytest.approx(all_to_all(mode, schedule, traffic, network).seconds, rel=CLOSE)


@tried(100, loaded_networks(linked=True), st.sampled_from(("concurrent", "shared")))
def test_links_do_not_load_the_fabric(loaded, mode):
    network, traffic = loaded
    network = replace(network, latency=0.0, link_latency=np.zeros(network.gpus))

    def seconds(part):
        return all_to_all(mode, schedule_for("shared", part, network), part, network).seconds

    inside = np.where(network.linked, traffic, 0.0)
    assert seconds(traffic) == pytest.approx(max(seconds(inside), seconds(traffic - inside)), rel=CLOSE)


def test_order_decides_between_three_units_and_two():
    """The example of Aurora, Figure 4: two senders, three GPUs, one unit to every peer."""
    traffic = np.array([[0.0, 1, 1], [1, 0, 1], [0, 0, 0]])
    network = fabric([1, 1, 1])
    colliding = sequence((0, 1), (0, 2), (1, 0), (1, 2))
    staggered = sequence((0, 1), (0, 2), (1, 2), (1, 0))
    assert all_to_all("sequential", colliding, traffic, network).seconds == pytest.approx(3)
    assert all_to_all("sequential", staggered, traffic, network).seconds == pytest.approx(2)
    assert network.bound(traffic) == 2


@pytest.mark.parametrize(
    ("rates", "sizes", "ends", "matched"),
    [
        ([1, 1, 1], [1, 3], [2, 4], 4),  # two senders share one receiver
        ([0.5, 0.5, 1], [5, 5], [10, 10], 20),  # a fast receiver serves two slow senders at once
        ([1, 0.1, 1], [9, 1], [10, 10], 19),  # 0.9 and 0.1 of the receiver, not a half each
    ],
)
def test_two_senders_to_one_receiver(rates, sizes, ends, matched):
    traffic, network = np.zeros((3, 3)), fabric(rates)
    traffic[:2, 2] = sizes
    assert all_to_all("concurrent", None, traffic, network).end.tolist() == pytest.approx(ends)
    schedule = order(traffic, network.send, network.receive, "matched").solution
    assert all_to_all("matched", schedule, traffic, network).seconds == pytest.approx(matched)


def test_latency_counts_once_per_send():
    traffic = np.array([[0.0, 1, 1], [0, 0, 0], [0, 0, 0]])
    network = fabric([1, 1, 1], latency=0.25)
    assert all_to_all("sequential", sequence((0, 1), (0, 2)), traffic, network).seconds == pytest.approx(2.5)
    assert all_to_all("concurrent", None, traffic, network).seconds == pytest.approx(2.25)
    shared = order(traffic, network.send, network.receive, "shared").solution
    assert all_to_all("shared", shared, traffic, network).seconds == pytest.approx(2.25)


def test_a_phase_over_links_and_fabric_ends_with_the_last_of_both():
    network = linked_network([0, 0, 1], send=1.0, link=10.0, latency=1.0, link_latency=0.1)
    traffic = np.zeros((3, 3))
    traffic[0, 1], traffic[2, 0] = 15, 2
    schedule = Schedule(src=(0, 2), dst=(1, 0), bytes=(15, 2), phase=(0, 0), duration=(2.0,))
    flows = all_to_all("matched", schedule, traffic, network)
    assert flows.end.tolist() == pytest.approx([1.6, 3.0])


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_send_takes_no_time(mode):
    network, traffic = fabric([1, 1], latency=1.0), np.diag([3.0, 4.0])
    assert all_to_all(mode, schedule_for(mode, traffic, network), traffic, network).seconds == 0
    assert network.bound(traffic) == 0


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
