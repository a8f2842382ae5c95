"""Checks of all-to-alls: orders as planned, and sends as they ran. Recomputed without any optimiser."""

import numpy as np
import pandas as pd

from engine.errors import IllegalError
from engine.network import Network
from engine.plan import OrderMode, Schedule
from engine.simulate.flows import Flows
from engine.validate import refusal
from tests.oracles.rules import illegal_if


def check_schedule(
    schedule: Schedule, traffic: np.ndarray, send: np.ndarray, receive: np.ndarray, mode: OrderMode
) -> tuple[float, float]:
    """Check a phased order of one all-to-all and return (makespan, bound) in seconds.

    traffic: float64[src, dst] bytes, diagonal ignored; send, receive: float64[gpu] bytes/s

    matched: every phase is a matching (each GPU sends to at most one, receives from at most one) and each send fits its
        phase at the slower of its two ends' rates. Bound: the largest line sum of traffic_ij / min(send_i, receive_j),
        because those transfers share an end and can only follow one another.
    shared: in every phase, the bytes that a GPU sends (receives) fit its bandwidth. Bound: the largest of row sum / send and
        column sum / receive.
    Both: every byte is delivered, none twice (to 1e-9 of the largest entry).
    """
    wanted = np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic)
    sends = refusal.Sends.of(schedule)
    check_phases(sends, mode, wanted, refusal.Ports(sends.src, sends.dst + len(wanted), np.concatenate([send, receive])))
    if mode == "matched":
        pair_seconds = wanted / np.minimum(send[:, None], receive[None, :])
        bound = max(pair_seconds.sum(axis=1).max(initial=0), pair_seconds.sum(axis=0).max(initial=0))
    else:
        bound = max((wanted.sum(axis=1) / send).max(initial=0), (wanted.sum(axis=0) / receive).max(initial=0))
    return float(sends.duration.sum()), float(bound)


def check_phases(sends: refusal.Sends, mode: OrderMode, traffic: np.ndarray, ports: refusal.Ports) -> None:
    """Check all rules of a phased order. traffic: float64[src, dst] bytes, diagonal ignored."""
    refusal.check_sends(sends)
    refusal.check_listing(sends)
    if mode != "shared":
        refusal.check_matching(sends, ports)
    refusal.check_bytes(sends, traffic)
    refusal.check_durations(sends, mode, ports)


def check_flows(flows: Flows, traffic: np.ndarray, network: Network, relayed: bool = False) -> float:
    """Check the sends of an all-to-all as they ran and return its seconds.

    Every byte is delivered once (of a relayed all-to-all: every GPU ends with as many bytes as are for it, and between nodes
    cross as many as one has for the other; `check_relayed` checks the rest), and no port is overloaded: within any stretch of
    time it carries at most the bytes that its sends of that time reach together. traffic: float64[src, dst]
    bytes, diagonal ignored.
    """
    delivered = np.zeros_like(traffic)
    np.add.at(delivered, (flows.src, flows.dst), flows.bytes)
    wanted = np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic)
    missing, slack = delivered - wanted, refusal.RELATIVE * wanted.max(initial=0)
    if relayed:
        slack = refusal.RELATIVE * wanted.sum()
        missing = np.append(refusal.between_nodes(missing, network), (missing.sum(axis=0) - missing.sum(axis=1))[None], axis=0)
    illegal_if(np.abs(missing).max(initial=0) > slack, "the flows do not carry the traffic")
    check_ports(flows.src, flows.dst, flows.start, flows.end, flows.bytes, network)
    return flows.seconds


def check_ports(
    src: np.ndarray, dst: np.ndarray, start: np.ndarray, end: np.ndarray, size: np.ndarray, network: Network
) -> None:
    """Within any stretch of time between a start and an end a port carries at most the bytes that its sends of then reach."""
    begin = start + network.start_up(src, dst)
    for port in network.ports(src, dst):
        for used in np.unique(port):
            mine = port == used
            share = network.share[used // (2 * network.gpus)]
            moments, most = _carried_at_most(begin[mine], end[mine], network.capacity[used], share)
            for since in np.unique(begin[mine]):
                inside = mine & (begin >= since)
                until = np.sort(end[inside])
                carried = np.cumsum(size[inside][np.argsort(end[inside], kind="stable")])
                allowed = most[np.searchsorted(moments, until)] - most[np.searchsorted(moments, since)]
                over = carried > allowed * (1 + 1e-6) + refusal.RELATIVE * size[mine].max()
                illegal_if(over.any(), f"port {used} carries more than its capacity")


def check_relayed(hops: pd.DataFrame, seconds: np.ndarray, traffic: np.ndarray, network: Network) -> tuple[float, float]:
    """Check an all-to-all in which GPUs relay inside their nodes, and return (makespan, bound) in seconds, latency left out.

    hops: columns step, src, dst, bytes, and origin and target: the sender and the receiver of the bytes
    seconds: float64[step]
    traffic: float64[src, dst] bytes, diagonal ignored

    Every byte gets to its receiver: a GPU passes on in a step only bytes that it held before that step. Bytes for the own node
    take its links at once; others cross the fabric once, straight from the sender's node to the receiver's, after at most one
    relay inside the one and before at most one inside the other. Over the fabric a node sends to at most one node in a step
    and receives from at most one, and no port or link carries more in the step's seconds than it can with as many peers. (A
    node here is GPUs that reach each other over links; a GPU without them counts as one.)
    """
    wanted = np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic)
    step, src, dst, origin, target = (hops[name].to_numpy(np.int64) for name in ("step", "src", "dst", "origin", "target"))
    size = hops["bytes"].to_numpy(np.float64)
    if (fault := np.flatnonzero((src == dst) | (size <= 0))).size:
        raise IllegalError(f"step {step[fault[0]]}: GPU {src[fault[0]]} sends nothing, or to itself")
    linked = network.linked | np.eye(network.gpus, dtype=bool)
    fabric, inside = ~linked[src, dst], linked[origin, target]
    # Rows for another node: from their sender to a relay, between the nodes, or from a relay to their receiver
    before = linked[origin, dst] & (src == origin)
    after = linked[src, target] & (dst == target)
    crosses = linked[origin, src] & linked[dst, target]
    legal = np.where(inside, (src == origin) & (dst == target), np.where(fabric, crosses, before | after))
    if (stray := np.flatnonzero(~legal)).size:
        lost = stray[0]
        raise IllegalError(
            f"step {step[lost]}: bytes of GPU {origin[lost]} for GPU {target[lost]} go from GPU {src[lost]} to {dst[lost]}"
        )
    _check_custody(step, src, dst, size, origin * len(wanted) + target, wanted)
    node = linked.argmax(axis=1)
    for ends in (node[src], node[dst]):
        pairs = np.unique(np.stack([step, ends, node[src], node[dst]])[:, fabric], axis=1)
        if (twice := np.flatnonzero((np.diff(pairs[:2]) == 0).all(axis=0))).size:
            raise IllegalError(f"step {pairs[0][twice[0]]}: the node of GPU {pairs[1][twice[0]]} serves two nodes at once")
    count = len(network.capacity)
    for port, peer in zip(network.ports(src, dst), (dst, src), strict=True):
        moved = np.bincount(step * count + port, size, len(seconds) * count).reshape(-1, count)
        pairs = np.unique(np.stack([step * count + port, peer]), axis=1)[0]
        peers = np.bincount(pairs, minlength=len(seconds) * count).reshape(-1, count)
        columns = np.clip(peers, 1, network.share.shape[1]) - 1
        reached = network.capacity * network.share[np.arange(count) // (2 * network.gpus), columns]
        allowed = reached * seconds[:, None] * (1 + refusal.RELATIVE)
        if (over := np.argwhere(moved > allowed + refusal.RELATIVE * size.max(initial=0.0))).size:
            raise IllegalError(f"step {over[0][0]}: port {over[0][1]} carries more than its capacity")
    return float(seconds.sum()), _relayed_bound(wanted, network, node)


def _check_custody(
    step: np.ndarray, src: np.ndarray, dst: np.ndarray, size: np.ndarray, pair: np.ndarray, wanted: np.ndarray
) -> None:
    """No GPU passes on bytes that it does not have, and at the end every receiver has all of its own.

    pair: int64[hop], the pair of origin and target
    """
    gpus, slack = len(wanted), refusal.RELATIVE * wanted.max(initial=0.0)
    pairs = np.arange(gpus * gpus)
    places = np.unique(np.concatenate([pair * gpus + src, pair * gpus + dst, pairs * gpus + pairs // gpus]))
    held = np.zeros(len(places))
    held[np.searchsorted(places, pairs * gpus + pairs // gpus)] = wanted.ravel()
    leaves, arrives = (np.searchsorted(places, pair * gpus + gpu) for gpu in (src, dst))
    for now in np.unique(step):
        here = step == now
        held -= np.bincount(leaves[here], size[here], len(places))
        if (lacking := np.flatnonzero(held < -slack)).size:
            raise IllegalError(f"step {now}: GPU {places[lacking[0]] % gpus} passes on bytes that it does not hold")
        held += np.bincount(arrives[here], size[here], len(places))
    arrived = np.zeros(gpus * gpus)
    home = places % gpus == places // gpus % gpus
    arrived[places[home] // gpus] = held[home]
    if (short := np.flatnonzero(np.abs(arrived - wanted.ravel()) > slack)).size:
        raise IllegalError(f"GPU {short[0] % gpus} does not get the bytes that GPU {short[0] // gpus} has for it")


def _relayed_bound(wanted: np.ndarray, network: Network, node: np.ndarray) -> float:
    """Seconds that no order with such relays undercuts: a node's transfers one after another over all its ports, and all bytes
    that a GPU sends or receives over its port and its links."""
    nodes = np.unique(node)
    lines = {name: dict.fromkeys(nodes.tolist(), 0.0) for name in ("out", "into")}
    for a in nodes:
        for b in nodes[nodes != a]:
            rate = min(network.send[node == a].sum(), network.receive[node == b].sum())
            seconds = wanted[np.ix_(node == a, node == b)].sum() / rate
            lines["out"][a] += seconds
            lines["into"][b] += seconds
    bound = max(max(line.values()) for line in lines.values())
    for gpu in range(len(wanted)):
        mates = node == node[gpu]
        for matrix, port in ((wanted, network.send), (wanted.T, network.receive)):
            bound = max(bound, matrix[gpu].sum() / (port[gpu] + network.link[gpu]))
            if (own := matrix[gpu][mates].sum()) > 0:
                bound = max(bound, own / network.link[gpu])
    return float(bound)


def _carried_at_most(begin: np.ndarray, end: np.ndarray, capacity: float, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The times at which a send of a port begins or ends (float64[time], ascending), and the bytes that the port can have
    carried by then (float64[time]).

    begin, end: float64[send] seconds
    capacity: bytes/s of one send alone
    share: float64[sends], the part of the capacity that so many sends reach together, the last for more
    """
    moments = np.unique(np.concatenate([begin, end]))
    there = [int(((begin <= moment) & (end > moment)).sum()) for moment in moments[:-1]]
    rates = [capacity * share[min(max(sends, 1), len(share)) - 1] for sends in there]
    return moments, np.concatenate([[0.0], np.cumsum(rates * np.diff(moments))])
