"""Orders of an all-to-all, planned and as they ran."""

import numpy as np

from engine.errors import IllegalError
from engine.network import Network
from engine.plan import OrderMode, Schedule
from engine.simulate.flows import Flows
from engine.validate.schedules import (
    RELATIVE,
    Ports,
    Sends,
    check_bytes,
    check_durations,
    check_listing,
    check_matching,
    check_sends,
)


def check_schedule(
    schedule: Schedule, traffic: np.ndarray, send: np.ndarray, receive: np.ndarray, mode: OrderMode
) -> tuple[float, float]:
    """Check a phased order of one all-to-all and return (makespan, bound) in seconds.

    traffic: float64[src, dst] bytes, diagonal ignored; send, receive: float64[gpu] bytes/s

    matched: every phase is a matching (each GPU sends to at most one, receives from at most one) and each send fits its
        phase at the slower of its two ends' rates. Bound: the largest line sum of traffic_ij / min(send_i, receive_j),
        because those transfers share an end and can only follow one another.
    shared: in every phase, what a GPU sends (receives) fits its bandwidth. Bound: the largest of row sum / send and
        column sum / receive.
    Both: every byte is delivered, none twice (to 1e-9 of the largest entry).
    """
    wanted = np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic)
    sends = Sends.of(schedule)
    check_phases(sends, mode, wanted, Ports(sends.src, sends.dst + len(wanted), np.concatenate([send, receive])))
    if mode == "matched":
        pair_seconds = wanted / np.minimum(send[:, None], receive[None, :])
        bound = max(pair_seconds.sum(axis=1).max(initial=0), pair_seconds.sum(axis=0).max(initial=0))
    else:
        bound = max((wanted.sum(axis=1) / send).max(initial=0), (wanted.sum(axis=0) / receive).max(initial=0))
    return float(sends.duration.sum()), float(bound)


def check_phases(sends: Sends, mode: OrderMode, traffic: np.ndarray, ports: Ports) -> None:
    """Check all rules of a phased order. traffic: float64[src, dst] bytes, diagonal ignored."""
    check_sends(sends)
    check_listing(sends)
    if mode == "matched":
        check_matching(sends, ports)
    check_bytes(sends, traffic)
    check_durations(sends, mode, ports)


def check_flows(flows: Flows, traffic: np.ndarray, network: Network) -> float:
    """Check the sends of an all-to-all as they ran and return its seconds.

    Every byte is delivered once, and no port is asked for more than it can do: within any stretch of time it carries at
    most its capacity times the length. traffic: float64[src, dst] bytes, diagonal ignored.
    """
    delivered = np.zeros_like(traffic)
    np.add.at(delivered, (flows.src, flows.dst), flows.bytes)
    wanted = np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic)
    if np.abs(delivered - wanted).max(initial=0) > RELATIVE * wanted.max(initial=0):
        raise IllegalError("the flows do not carry the traffic")
    begin = flows.start + network.start_up(flows.src, flows.dst)
    for port in network.ports(flows.src, flows.dst):
        for used in np.unique(port):
            mine = port == used
            starts, ends, size = begin[mine], flows.end[mine], flows.bytes[mine]
            for since in np.unique(starts):
                for until in np.unique(ends[ends > since]):
                    inside = size[(starts >= since) & (ends <= until)].sum()
                    if inside > network.capacity[used] * (until - since) * (1 + 1e-6) + RELATIVE * size.max():
                        raise IllegalError(f"port {used} carries more than its capacity")
    return flows.seconds
