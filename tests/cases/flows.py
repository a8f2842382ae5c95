"""Networks with traffic, send orders for it, and a naive simulation of ports that are shared."""

import numpy as np
from hypothesis import strategies as st

from engine.cluster import Efficiency, contention_points
from engine.communication.order import order, random_order
from engine.communication.two_tier import two_tier
from engine.network import Network
from engine.plan import Schedule
from tests.strategies import networks, traffics

MODES = ("matched", "shared", "two-tier", "sequential", "concurrent")
CLOSE = 1e-7


def fabric(send, receive=None, latency: float = 0.0) -> Network:
    """A network without links. send, receive: float64[gpu] bytes/s; `receive` is `send` unless given"""
    send = np.array(send, dtype=float)
    nothing = np.zeros(len(send))
    receive = send if receive is None else np.array(receive, dtype=float)
    return Network(send, receive, nothing, np.arange(len(send)), latency, nothing)


def linked_network(nodes, send, link, latency=0.0, link_latency=0.0) -> Network:
    """A network of GPUs with the same rates.

    nodes: int64[gpu].
    send, link: bytes/s.
    latency, link_latency: seconds.
    """
    ones = np.ones(len(nodes))
    return Network(send * ones, send * ones, link * ones, np.array(nodes), latency, link_latency * ones)


def contended(network: Network, contention: float) -> Network:
    """The network with ports that lose a share of their rate for each send that they have."""
    points = contention_points(contention, network.gpus)
    return network.with_efficiency(Efficiency(fabric=points, links=points))


def schedule_for(mode: str, traffic: np.ndarray, network: Network, seed: int = 0) -> Schedule | None:
    """A schedule for traffic float64[src, dst] in an order; None if it needs none. seed: for a sequential order"""
    if mode == "concurrent":
        return None
    if mode == "sequential":
        return random_order(traffic, seed)
    if mode == "two-tier":
        return two_tier(traffic, network).solution
    # The rates of the fabric, also for pairs with links: the simulator must take any order.
    return order(traffic, network.send, network.receive, mode).solution


@st.composite
def loaded_networks(draw, **options) -> tuple[Network, np.ndarray]:
    """A network and traffic float64[src, dst] on it. options: of `networks`"""
    network = draw(networks(**options))
    return network, draw(traffics(network.gpus))
