"""Closed forms of the two collectives of MoE training when every GPU holds as much as every other one.

Both read the `Network` that a cost source gives, so that a fitted or measured network counts here too.
"""

from dataclasses import replace

import numpy as np

from engine.network import Network


def all_to_all_seconds(network: Network, size: np.ndarray) -> np.ndarray:
    """float64[...]: seconds of a uniform all-to-all, all sends at once; size: float64[...] bytes that every GPU holds,
    size / GPUs of them for each GPU, itself included. 0 where size is 0, and on one GPU.

    The fabric and the links of each node are networks of their own that work side by side, so the slowest of them
    counts: its start-up, which all its sends wait out together, and its busiest port. That is what
    `simulate.flows.all_to_all("concurrent", ...)` arrives at: a port with f sends gives each 1/f of what f sends reach
    there, the port where that is least is never relieved by others, and no send anywhere runs slower than its sends do.
    """
    size = np.asarray(size, dtype=np.float64)
    linked = _linked_peers(network)
    peers = network.gpus - 1 - linked
    start_ups, per_byte = [], []
    if peers.any():
        start_ups.append(network.latency)
        rate = np.minimum(network.send, network.receive) * network.reached(False, peers)
        per_byte.append((peers / rate).max())
    inside = linked > 0
    if inside.any():
        rate = (network.link * network.reached(True, linked))[inside]
        lines = np.column_stack([network.link_latency[inside], linked[inside] / rate])
        lines = np.unique(lines, axis=0)  # nodes are mostly alike
        start_ups.extend(lines[:, 0])
        per_byte.extend(lines[:, 1])
    seconds = np.zeros(size.shape)
    for start_up, slope in zip(start_ups, per_byte, strict=True):
        seconds = np.maximum(seconds, start_up + size / network.gpus * slope)
    return np.where(size > 0, seconds, 0.0)


def all_reduce_seconds(network: Network, size: np.ndarray) -> np.ndarray:
    """float64[...]: seconds to sum buffers of `size` bytes (float64[...]) over all GPUs, the sum ending on each of them.
    0 where size is 0, and on one GPU.

    The faster of the two algorithms between which NCCL chooses, with its count of steps (`ncclTopoTuneModel`):

    * a ring: 2 (P-1) steps, 2 (P-1)/P · size through every hop, the least that any algorithm can move (Patarasuk and
      Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009);
    * two binary trees over the nodes, chains inside: 2 log2(nodes) steps between nodes, 2 · size through every hop
      (Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
      Computing 2009); good for small sizes on many nodes.

    Several rings share the work, each entering and leaving a node by another GPU's port, so that the fabric gives a node
    the sum of its GPUs' ports; every GPU's link carries all of them. GPUs without links are nodes of their own here.
    """
    size = np.asarray(size, dtype=np.float64)
    gpus = network.gpus
    if gpus == 1:
        return np.zeros(size.shape)
    _, first, group = np.unique(
        np.where(_linked_peers(network) > 0, network.node, network.node.max() + 1 + np.arange(gpus)),
        return_index=True,
        return_inverse=True,
    )
    members, link_latency = np.bincount(group), network.link_latency[first]
    slowest = np.inf
    if len(members) > 1:
        slowest = min(np.bincount(group, network.send).min(), np.bincount(group, network.receive).min())
    shared = members[group] > 1
    slowest = min(slowest, network.link[shared].min(initial=np.inf))

    across = 2 * (len(members) - 1) * network.latency
    ring = across + 2 * ((members - 1) * link_latency).sum() + 2 * (gpus - 1) / gpus * size / slowest
    depth = 2 * np.ceil(np.log2(len(members))) * network.latency
    tree = depth + 2 * ((members - 1) * link_latency).max() + 2 * size / slowest
    return np.where(size > 0, np.minimum(ring, tree), 0.0)


def with_measured(network: Network, start_up: float, per_byte: float) -> Network:
    """The drawn network with what an all-to-all over all its GPUs was measured to take: start_up seconds, and per_byte
    seconds for each byte that one GPU sends to the others.

    It was the fabric that was measured, or the links where they join all GPUs; what else is drawn stays. All sends of a GPU met
    there, so where fewer reach a larger share of a port's rate, one alone is faster than what was measured.
    `all_to_all_seconds` of the answer is the measured line again, unless drawn links are slower than that.
    """
    rate, linked = 1 / max(per_byte, 1e-15), _linked_peers(network)
    others = network.gpus - 1
    if (linked == others).all():
        link = np.full(network.gpus, rate) / network.reached(True, linked)
        return replace(network, link=link, link_latency=np.full(network.gpus, start_up))
    rates = (others - linked) / others * rate / network.reached(False, others - linked)
    return replace(network, send=rates, receive=rates, latency=start_up)


def _linked_peers(network: Network) -> np.ndarray:
    """int64[gpu]: other GPUs of the node that a GPU reaches over links."""
    has_links = network.link > 0
    return np.where(has_links, np.bincount(network.node, has_links)[network.node] - 1, 0).astype(np.int64)
