"""Is this plan legal, and what is it worth? Recomputed from scratch; knows no optimiser and calls none.

Every function returns what it measured and raises `IllegalError` with the first broken rule. The tests of every kernel go
through here.
"""

import numpy as np

from engine.plan import Plan, Schedule
from engine.problem import Problem
from engine.simulate.network import Flows, Network, all_to_all

RELATIVE = 1e-9


class IllegalError(ValueError):
    """An answer breaks a rule of its problem."""


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


def check_assignment(
    gpu_of_expert: np.ndarray,
    tokens: np.ndarray,
    compute: np.ndarray,
    send: np.ndarray,
    receive: np.ndarray,
    slots: np.ndarray,
) -> float:
    """Check experts on GPUs and return max F + 2 max N in seconds (Aurora, equation 3), summed up GPU by GPU.

    gpu_of_expert: int[expert]; tokens: float64[source gpu, expert] in the unit of the bandwidths; compute:
    float64[gpu, expert] seconds; send, receive: float64[gpu] per second; slots: int[gpu], the most experts of each.
    """
    gpus, experts = tokens.shape
    if len(gpu_of_expert) != experts or min(gpu_of_expert) < 0 or max(gpu_of_expert) >= gpus:
        raise IllegalError("not every expert is on a GPU that exists")
    ffn, network = [], []
    for gpu in range(gpus):
        here = [expert for expert in range(experts) if gpu_of_expert[expert] == gpu]
        if len(here) > slots[gpu]:
            raise IllegalError(f"GPU {gpu} has {len(here)} experts in {slots[gpu]} slots")
        away = [expert for expert in range(experts) if gpu_of_expert[expert] != gpu]
        others = [other for other in range(gpus) if other != gpu]
        sent = sum(tokens[gpu, expert] for expert in away)
        received = sum(tokens[other, expert] for other in others for expert in here)
        ffn.append(sum(compute[gpu, expert] for expert in here))
        network.append(max(sent / send[gpu], received / receive[gpu]))
    return max(ffn) + 2 * max(network)


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


def check_plan(plan: Plan, problem: Problem) -> float:
    """Check a plan on the problem it was made for and return its seconds: every step at its slowest GPU, every
    all-to-all after its own rule. Raises IllegalError, and InputError when the plan does not fit the problem."""
    problem.check_plan(plan)
    order, network, cost, model = plan.send_order, problem.network, problem.cost, problem.model
    gpus = range(problem.network.gpus)
    total = 0.0
    for layer, row in enumerate(plan.placement.experts_of_gpu):
        replicas = [sum(slots.count(expert) for slots in row) for expert in range(plan.placement.experts)]
        copies = problem.demand[layer]
        traffic = np.zeros((network.gpus, network.gpus))
        ffn = np.zeros(network.gpus)
        for gpu in gpus:
            for expert in set(row[gpu]):
                here = copies[:, expert] * row[gpu].count(expert) / replicas[expert]
                traffic[:, gpu] += here * model.bytes_per_token
                ffn[gpu] += float(cost.expert_ffn(problem.cluster.gpus[gpu], here.sum(), model))
        held = copies.sum(axis=1) / model.experts_per_token
        gate = np.array([float(cost.gate(problem.cluster.gpus[gpu], held[gpu], model)) for gpu in gpus])
        last = np.array([float(cost.aggregate(problem.cluster.gpus[gpu], held[gpu], model)) for gpu in gpus])
        total += sum(float(cost.together(step).max()) for step in (gate, ffn, last))
        for schedules, matrix in ((order.dispatch, traffic), (order.combine, traffic.T)):
            schedule = schedules[layer] if schedules else None
            total += _seconds_of_order(order.mode, schedule, matrix, network)
    return total


def _seconds_of_order(mode: str, schedule: Schedule | None, traffic: np.ndarray, network: Network) -> float:
    if mode in ("sequential", "concurrent"):
        return check_flows(all_to_all(mode, schedule, traffic, network), traffic, network)
    # Fabric and links are two networks: each part of a phased order must be legal on its own.
    linked = network.linked
    seconds = 0.0
    src, dst, size = np.array(schedule.src, int), np.array(schedule.dst, int), np.array(schedule.bytes)
    phase = np.array(schedule.phase, int)
    link = np.where(network.link > 0, network.link, 1.0)
    for part, send, receive in ((~linked, network.send, network.receive), (linked, link, link)):
        here = part[src, dst]
        columns = {name: tuple(column[here].tolist()) for name, column in
                   (("src", src), ("dst", dst), ("bytes", size), ("phase", phase))}  # fmt: skip
        one_network = Schedule(duration=schedule.duration, **columns)
        check_schedule(one_network, np.where(part, traffic, 0.0), send, receive, mode)
    out, into = network.ports(src, dst)
    alone = size / np.minimum(network.capacity[out], network.capacity[into])
    latency = network.start_up(src, dst)
    for index in range(len(schedule.duration)):
        here = phase == index
        # A phase ends with its last send, which may be sooner than planned.
        if here.any() and mode == "matched":
            seconds += (latency[here] + alone[here]).max()
        elif here.any():
            moved = np.bincount(np.r_[out[here], into[here]], np.r_[size[here], size[here]])
            busy = np.flatnonzero(moved)
            seconds += (moved[busy] / network.capacity[busy]).max() + latency[here].max()
    return seconds
