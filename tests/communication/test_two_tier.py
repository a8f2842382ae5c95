"""Two-tier orders, judged by `tests.oracles.communication` and by a linear program over all relays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy.optimize import linprog

from engine.communication.order import order
from engine.communication.steps import Steps
from engine.communication.two_tier import FEWEST_PARTS, two_tier
from engine.errors import IllegalError, InputError
from engine.network import Network
from engine.result import Status
from tests.cases.examples import tried
from tests.oracles.communication import check_relayed
from tests.strategies import networks, traffics

EXACT = 1e-9


def network_of(sizes, link=450e9, port=50e9) -> Network:
    """Nodes of so many GPUs, all of the same rates."""
    ones = np.ones(sum(sizes))
    return Network(port * ones, port * ones, link * ones, np.repeat(np.arange(len(sizes)), sizes), 0.0, 0 * ones)


def traffic_of(kind: str, gpus: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    traffic = rng.random((gpus, gpus)) * 1e6
    if kind == "hot receivers":
        traffic /= np.arange(1, gpus + 1)[rng.permutation(gpus)]
    elif kind == "one sender of eight":
        traffic *= (rng.permutation(gpus) % 8 == 0)[:, None]
    elif kind == "sparse":
        traffic *= rng.random((gpus, gpus)) < 4 / gpus
    return traffic


@st.composite
def instances(draw, most: int = 9):
    """Traffic on nodes of different sizes, with or without links, of mixed rates."""
    network = draw(networks(most))
    return draw(traffics(network.gpus)), network


def checked(traffic: np.ndarray, network: Network, result) -> tuple[float, float]:
    """(makespan, bound) of an order whose hops keep every rule, and whose sends are the hops without their origins."""
    steps = Steps.of(result.solution, traffic, network)
    hops = steps.hops()
    # A step, a sender and a receiver as one number
    shape = (len(steps.seconds), network.gpus, network.gpus)
    step, src, dst, size = steps.sends()
    sent = np.bincount(np.ravel_multi_index((step, src, dst), shape), size, np.prod(shape))
    index = np.ravel_multi_index(tuple(hops[name] for name in ("step", "src", "dst")), shape)
    np.testing.assert_allclose(sent, np.bincount(index, hops["bytes"], np.prod(shape)), rtol=EXACT, atol=1e-6)
    return check_relayed(hops, steps.seconds, traffic, network)


@tried(150, instances())
def test_every_byte_arrives_within_all_capacities(instance):
    traffic, network = instance
    result = two_tier(traffic, network)
    makespan, bound = checked(traffic, network, result)
    assert result.objective == pytest.approx(makespan, rel=1e-12)
    assert result.bound == pytest.approx(bound, rel=1e-12)
    assert bound <= makespan * (1 + EXACT)
    assert (result.status == Status.OPTIMAL) == (makespan <= bound * (1 + EXACT))
    assert two_tier(traffic + 1e9 * np.eye(network.gpus), network).solution == result.solution  # local tokens do not travel


@tried(100, instances(), st.booleans())
def test_gpus_that_are_alone_get_the_order_without_tiers(instance, links):
    traffic, network = instance
    link = np.ones(network.gpus) if links else np.zeros(network.gpus)
    alone = replace(network, link=link, node=np.arange(network.gpus))
    result, direct = two_tier(traffic, alone), order(traffic, alone.send, alone.receive)
    assert result.solution == direct.solution
    assert result.objective == pytest.approx(direct.objective, rel=EXACT)
    assert (result.bound, result.status) == (pytest.approx(direct.bound, rel=EXACT), Status.OPTIMAL)


def relay_program(traffic: np.ndarray, network: Network) -> float:
    """Seconds of the best relaying when pipelining is free: a linear program over all paths of every pair."""
    gpus, node = network.gpus, network.domain
    paths = [
        (i, a, b, j)
        for i, j in zip(*np.nonzero(traffic), strict=True)
        if i != j
        for a in np.flatnonzero(node == node[i])
        for b in np.flatnonzero(node == node[j])
        if node[i] != node[j] or (a, b) == (i, j)
    ]
    # In units of the largest transfer and the fastest port, so that all numbers are about 1
    unit, scale = network.capacity.max(), (traffic * (1 - np.eye(gpus))).max() or 1.0
    rows = np.zeros((4 * gpus, len(paths) + 1))
    rows[:, -1] = -network.capacity / unit
    pairs = np.zeros((gpus, gpus, len(paths)))
    for column, (i, a, b, j) in enumerate(paths):
        pairs[i, j, column] = 1
        hops = np.array([(x, y) for x, y in ((i, a), (a, b), (b, j)) if x != y])
        for port in network.ports(*hops.T):
            rows[port, column] += 1
    lines = []
    for ends in (0, 1):  # a node's transfers follow one another at the rate of the slower of the two nodes
        for name in np.unique(node):
            seconds = np.zeros(len(paths) + 1)
            seconds[-1] = -1
            for column, path in enumerate(paths):
                a, b = node[path[0]], node[path[3]]
                if a != b and (a, b)[ends] == name:
                    seconds[column] = unit / min(network.send[node == a].sum(), network.receive[node == b].sum())
            lines.append(seconds)
    wanted = traffic * (1 - np.eye(gpus))
    equal = np.hstack([pairs.reshape(gpus * gpus, -1), np.zeros((gpus * gpus, 1))])
    upper = np.vstack([rows, lines])
    goal = np.eye(len(paths) + 1)[-1]
    best = linprog(goal, upper, np.zeros(len(upper)), equal, wanted.ravel() / scale)
    assert best.status == 0
    return float(best.fun) * scale / unit


@tried(40, instances(most=5))
def test_no_relaying_undercuts_the_bound(instance):
    traffic, network = instance
    result = two_tier(traffic, network)
    best = relay_program(traffic, network)
    assert result.bound <= best * (1 + 1e-6)
    assert best <= result.objective * (1 + 1e-6)


def test_a_node_shares_the_bytes_of_its_busy_gpu():
    network = network_of((2, 2), link=1e6, port=1.0)
    traffic = np.zeros((4, 4))
    traffic[0, 2] = 8.0
    result = two_tier(traffic, network)
    assert order(traffic, network.send, network.receive).objective == pytest.approx(8)
    assert result.bound == pytest.approx(4)  # two ports on either side
    assert result.objective == pytest.approx(4, rel=1e-5)  # links a million times faster
    traffic[0] = 0, 4, 6, 6
    slow = two_tier(traffic, network_of((2, 2), link=1.0, port=1.0))
    assert slow.bound == pytest.approx(16 / 2)  # all of GPU 0 by its port and its link


def test_one_node_uses_its_links_alone():
    network = network_of((4,), link=2.0)
    traffic = np.arange(16.0).reshape(4, 4)
    result = two_tier(traffic, network)
    assert result.solution.phases == 0
    assert (result.objective, result.status) == (pytest.approx((12 + 13 + 14) / 2), Status.OPTIMAL)
    assert checked(traffic, network, result)[0] == pytest.approx(result.objective)


@pytest.mark.parametrize("sizes", [(4, 4), (8, 3, 1, 8)])
@pytest.mark.parametrize("kind", ["uniform", "hot receivers", "one sender of eight", "sparse"])
def test_long_stages_are_cut(sizes, kind):
    network = network_of(sizes)
    traffic = traffic_of(kind, network.gpus)
    result = two_tier(traffic, network)
    checked(traffic, network, result)
    assert max(result.solution.duration) <= result.solution.makespan / FEWEST_PARTS * (1 + EXACT)


@pytest.mark.parametrize("kind", ["uniform", "hot receivers", "one sender of eight", "sparse"])
def test_forty_nodes_of_eight_are_close_to_the_bound(kind):
    network = network_of((8,) * 40)
    result = two_tier(traffic_of(kind, 320), network)
    assert result.objective <= 1.08 * result.bound


def test_input_errors_say_where():
    with pytest.raises(InputError, match=r"traffic\[0\]\[1\] is not a finite number \(nan\)"):
        two_tier(np.full((4, 4), np.nan), network_of((2, 2)))


def test_the_validator_finds_every_fault():
    network, traffic = network_of((2, 2, 1)), traffic_of("uniform", 5)
    steps = Steps.of(two_tier(traffic, network).solution, traffic, network)
    hops = steps.hops()
    early = np.where(hops["src"] == hops["origin"], hops["step"], 0)
    stray = (hops["origin"] == 0) & (hops["target"] == 2) & (hops["dst"] == 2)
    # Everything before the fabric in the first step, the fabric in one, and everything behind it in the last one
    across, own = (network.node[hops[a]] != network.node[hops[b]] for a, b in (("src", "dst"), ("origin", "target")))
    step = np.select([across, ~own | (hops["src"] == hops["origin"])], [1, 0], 2)
    for wrong, seconds, says in (
        (hops, steps.seconds * 0.99, "carries more than its capacity"),
        (hops[hops["dst"] != hops["target"]], steps.seconds, "does not get the bytes"),
        (hops.assign(step=early), steps.seconds, "passes on bytes that it does not hold"),
        (hops.assign(dst=np.where(stray, 4, hops["dst"])), steps.seconds, "go from GPU"),
        (hops.assign(step=step), np.full(3, steps.seconds.sum()), "serves two nodes at once"),
    ):
        with pytest.raises(IllegalError, match=says):
            check_relayed(wrong, seconds, traffic, network)
