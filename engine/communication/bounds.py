"""How fast one all-to-all can possibly be: lower bounds on its makespan, start-up latency left out.

In all functions traffic is float64[src, dst] in bytes (the diagonal is ignored: those tokens stay on their GPU) and
send, receive are float64[gpu] in bytes/s, one rate per direction.
"""

import numpy as np

from engine.network import Network, off_diagonal


def pair_seconds(traffic: np.ndarray, send: np.ndarray, receive: np.ndarray) -> np.ndarray:
    """float64[src, dst]: seconds of every transfer alone, at the slower of its two ends; 0 on the diagonal."""
    seconds = traffic / np.minimum(send[:, None], receive[None, :])
    np.fill_diagonal(seconds, 0.0)
    return seconds


def matched_bound(traffic: np.ndarray, send: np.ndarray, receive: np.ndarray) -> float:
    """Seconds of the busiest end when a GPU sends to one peer and receives from one peer at a time.

    The transfers of a line of `pair_seconds` share an end and can only follow one another. With preemption the bound
    is reached (Gonzalez and Sahni 1976; the pairwise form used in the proof of Aurora's Theorem 5.2).
    """
    seconds = pair_seconds(traffic, send, receive)
    return float(max(seconds.sum(axis=1).max(initial=0.0), seconds.sum(axis=0).max(initial=0.0)))


def shared_bound(traffic: np.ndarray, send: np.ndarray, receive: np.ndarray) -> float:
    """Seconds of the busiest end when a GPU serves any number of peers at once within its bandwidth.

    This is the formula that Aurora's Theorem 5.2 states. Never above `matched_bound`; equal to it when all rates are.
    """
    moved = np.array(traffic, dtype=np.float64)
    np.fill_diagonal(moved, 0.0)
    return float(max((moved.sum(axis=1) / send).max(initial=0.0), (moved.sum(axis=0) / receive).max(initial=0.0)))


def meeting_bound(network: Network, traffic: np.ndarray) -> float:
    """Seconds below which no all-to-all of this traffic ends all of whose sends begin at once, one start-up included."""
    bound = network.bound(traffic)
    if not network.contended or not bound:
        return bound
    return max(bound, meeting_seconds(network, traffic) + network.least_start_up(network.moved(traffic)))


def meeting_seconds(network: Network, traffic: np.ndarray) -> float:
    """The same without start-ups.

    While k sends of a port are left it carries at most what k sends reach there. By the time m have ended at least the bytes
    of the m shortest have gone, so nothing is faster than one after another, the shortest first.
    """
    wanted = off_diagonal(traffic)
    left = np.arange(network.gpus, 0, -1)
    seconds = [0.0]
    for over_links, here in ((False, ~network.linked), (True, network.linked)):
        ascending = (np.sort(np.where(here, matrix, 0.0), axis=1) for matrix in (wanted, wanted.T))
        slower = [matrix @ (1 / network.reached(over_links, left)) for matrix in ascending]
        rates = (network.link, network.link) if over_links else (network.send, network.receive)
        seconds += [
            (moved[moved > 0] / rate[moved > 0]).max(initial=0.0) for moved, rate in zip(slower, rates, strict=True)
        ]
    return float(max(seconds))


def one_peer_bound(network: Network, traffic: np.ndarray) -> float:
    """Seconds below which no all-to-all ends in which a GPU has one peer at a time on each of its ports, start-ups included:
    the sends of a port follow one another, each with a start-up of its own."""
    rate = np.where(network.linked, network.link[:, None], np.minimum(network.send[:, None], network.receive))
    start_up = np.where(network.linked, network.link_latency[:, None], network.latency)
    wanted = off_diagonal(traffic)
    seconds = np.where(wanted > 0, wanted / np.where(rate > 0, rate, 1.0) + start_up, 0.0)
    lines = (
        np.where(here, seconds, 0.0).sum(axis=axis) for here in (network.linked, ~network.linked) for axis in (0, 1)
    )
    return float(max(line.max(initial=0.0) for line in lines))
