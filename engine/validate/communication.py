"""Orders of an all-to-all, planned and as they ran."""

import numpy as np

from engine.errors import IllegalError
from engine.network import Network
from engine.plan import Schedule
from engine.simulate.flows import Flows

RELATIVE = 1e-9


def check_schedule(
    schedule: Schedule, traffic: np.ndarray, send: np.ndarray, receive: np.ndarray, mode: str
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
    wanted = np.asarray(traffic, dtype=np.float64).copy()
    np.fill_diagonal(wanted, 0.0)
    n = len(wanted)
    src, dst, phase = (np.array(column, dtype=np.int64) for column in (schedule.src, schedule.dst, schedule.phase))
    size, duration = np.array(schedule.bytes), np.array(schedule.duration)
    if np.any(src == dst):
        raise IllegalError("a GPU sends to itself")
    if np.any(size <= 0) or np.any(duration < 0):
        raise IllegalError("a send without bytes, or a phase of negative length")
    if np.any(np.diff(phase) < 0):
        raise IllegalError("sends are not listed in the order of their phases")
    delivered = np.zeros((n, n))
    np.add.at(delivered, (src, dst), size)
    if np.abs(delivered - wanted).max(initial=0) > RELATIVE * wanted.max(initial=0):
        i, j = np.unravel_index(np.abs(delivered - wanted).argmax(), wanted.shape)
        raise IllegalError(f"GPU {i} sends {delivered[i, j]} bytes to GPU {j} instead of {wanted[i, j]}")

    slack = duration[phase] * (1 + RELATIVE) + RELATIVE * duration.sum() * 1e-3
    if mode == "matched":
        for what, end in (("sends to", src), ("receives from", dst)):
            _, count = np.unique(phase * n + end, return_counts=True)
            if np.any(count > 1):
                raise IllegalError(f"in one phase a GPU {what} two peers")
        pair_seconds = wanted / np.minimum(send[:, None], receive[None, :])
        if np.any(size / np.minimum(send[src], receive[dst]) > slack):
            raise IllegalError("a send takes longer than its phase")
        bound = max(pair_seconds.sum(axis=1).max(initial=0), pair_seconds.sum(axis=0).max(initial=0))
    else:
        for end, rate in ((src, send), (dst, receive)):
            seconds = np.zeros((len(duration), n))
            np.add.at(seconds, (phase, end), size / rate[end])
            if np.any(seconds > duration[:, None] * (1 + RELATIVE) + RELATIVE * duration.sum() * 1e-3):
                raise IllegalError("a GPU moves more bytes in a phase than its bandwidth allows")
        bound = max((wanted.sum(axis=1) / send).max(initial=0), (wanted.sum(axis=0) / receive).max(initial=0))
    return float(duration.sum()), float(bound)


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
