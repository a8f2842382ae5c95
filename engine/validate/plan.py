"""Whole plans."""

import numpy as np

from engine.plan import Plan, Schedule
from engine.problem import Problem
from engine.simulate.network import Network, all_to_all
from engine.validate.communication import check_flows, check_schedule


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
