"""Whole plans: what one model's plan takes, and whether a timeline of two models keeps the rules."""

from itertools import pairwise

import numpy as np

from engine.communication.steps import Steps
from engine.errors import IllegalError
from engine.network import Network
from engine.plan import Placement, Plan, Schedule
from engine.problem import Problem
from engine.simulate.flows import all_to_all
from engine.timeline import Timeline
from engine.validate.communication import check_flows, check_phases, check_relayed
from engine.validate.schedules import Ports, Sends, between_nodes, node_ports


def check_plan(plan: Plan, problem: Problem) -> float:
    """Check a plan of one model on the problem it was made for and return its seconds: every step at its slowest GPU,
    every all-to-all after its own rule. Raises IllegalError, and InputError when the plan does not fit the problem."""
    problem.check_plan(plan)
    order, network, cost, model = plan.send_order, problem.network, problem.cost, problem.model
    gpus = range(problem.network.gpus)
    total = 0.0
    coherent = plan.execution == "context-coherent"
    carrier = problem.workload.rank_of_token(len(gpus)).tolist() if coherent else None
    for layer in range(plan.placement.layers):
        ffn = _ffn_seconds(plan.placement, problem, layer)
        if coherent:
            out, back, carrier, before, after = _hops(plan.placement, problem, layer, carrier)
        else:
            out = _traffic(plan.placement, problem, layer)
            back = out.T
            before = after = problem.demand[layer].sum(axis=1) / model.experts_per_token
        gate = np.array([float(cost.gate(problem.cluster.gpus[gpu], before[gpu], model)) for gpu in gpus])
        last = np.array([float(cost.aggregate(problem.cluster.gpus[gpu], after[gpu], model)) for gpu in gpus])
        total += sum(float(cost.together(step).max()) for step in (gate, ffn, last))
        for schedules, matrix in ((order.dispatch, out), (order.combine, back)):
            schedule = schedules[layer] if schedules else None
            total += _seconds_of_order(order.mode, schedule, matrix, network)
    if coherent:
        real = [
            gpu
            for gpu, token in zip(carrier, problem.workload.experts.tolist(), strict=True)
            if any(expert >= 0 for layer in token for expert in layer)
        ]
        gather = np.array([[real.count(gpu) * model.bytes_per_token] * len(gpus) for gpu in gpus])
        total += _seconds_of_order("concurrent", None, gather, network)
    return total


def _ffn_seconds(placement: Placement, problem: Problem, layer: int) -> np.ndarray:
    """float64[gpu], summed up expert by expert."""
    row, copies = placement.experts_of_gpu[layer], problem.demand[layer].sum(axis=0)
    seconds = np.zeros(len(row))
    for gpu, slots in enumerate(row):
        for expert in set(slots):
            replicas = sum(other.count(expert) for other in row)
            here = copies[expert] * slots.count(expert) / replicas
            seconds[gpu] += float(problem.cost.expert_ffn(problem.cluster.gpus[gpu], here, problem.model))
    return seconds


def _traffic(placement: Placement, problem: Problem, layer: int) -> np.ndarray:
    """float64[src, dst] bytes of a vanilla dispatch."""
    row, copies = placement.experts_of_gpu[layer], problem.demand[layer]
    traffic = np.zeros((len(row), len(row)))
    for gpu, slots in enumerate(row):
        for expert in set(slots):
            replicas = sum(other.count(expert) for other in row)
            traffic[:, gpu] += copies[:, expert] * slots.count(expert) / replicas * problem.model.bytes_per_token
    return traffic


def _hops(placement: Placement, problem: Problem, layer: int, carrier: list[int]) -> tuple:
    """One context-coherent layer, token by token: both exchanges in bytes, the new carriers, and the tokens that every
    GPU gates and aggregates. A token's new carrier is the GPU of its first-listed expert."""
    gpus, size = len(problem.cluster.gpus), problem.model.bytes_per_token
    home = {expert: gpu for gpu, slots in enumerate(placement.experts_of_gpu[layer]) for expert in slots}
    out, back = np.zeros((gpus, gpus)), np.zeros((gpus, gpus))
    before, after = np.zeros(gpus), np.zeros(gpus)
    carriers = []
    for token, here in enumerate(carrier):
        chosen = problem.workload.experts[token, layer].tolist()
        there = home[chosen[0]] if chosen[0] >= 0 else here
        for expert in chosen:
            if expert >= 0:
                out[here, home[expert]] += size
                back[home[expert], there] += size
        part = sum(expert >= 0 for expert in chosen) / len(chosen)
        before[here] += part
        after[there] += part
        carriers.append(there)
    return out, back, carriers, before, after


def check_timeline(timeline: Timeline, plan: Plan, problem: Problem) -> float:
    """Check the timeline of a plan of two models and return its seconds: every all-to-all carries its bytes once, no port
    and no GPU does two things' worth at a time, and nothing starts before what feeds it has ended."""
    events, network = timeline.events, problem.network
    slack = 1e-9 * timeline.total
    spans = events.groupby(["model", "layer", "kind"], observed=True).agg(start=("start", "min"), end=("end", "max"))
    steps = ("gate", "dispatch", "ffn", "combine", "aggregate")
    for model, (placement, model_problem) in enumerate(((plan.placement, problem), (plan.placement_b, problem.second))):
        for layer in range(placement.layers):
            for earlier, later in pairwise(steps):
                pair = [(model, layer, step) for step in (earlier, later)]
                if all(key in spans.index for key in pair) and (
                    spans.loc[pair[1], "start"] < spans.loc[pair[0], "end"] - slack
                ):
                    raise IllegalError(f"model {model}, layer {layer}: {later} starts before {earlier} has ended")
            traffic = _traffic(placement, model_problem, layer)
            for kind, wanted in (("dispatch", traffic), ("combine", traffic.T)):
                sends = events[(events["model"] == model) & (events["layer"] == layer) & (events["kind"] == kind)]
                moved = np.zeros_like(wanted)
                np.add.at(moved, (sends["resource"].to_numpy(int), sends["peer"].to_numpy(int)), sends["bytes"])
                if np.abs(moved - wanted * (1 - np.eye(len(wanted)))).max() > 1e-6 * max(wanted.max(), 1):
                    raise IllegalError(f"model {model}, layer {layer}: {kind} does not carry its bytes")
            ffn = events[(events["model"] == model) & (events["layer"] == layer) & (events["kind"] == "ffn")]
            took = np.zeros(network.gpus)
            np.add.at(took, ffn["resource"].to_numpy(int), (ffn["end"] - ffn["start"]).to_numpy())
            if (
                np.abs(took - problem.cost.together(_ffn_seconds(placement, model_problem, layer))).max()
                > slack + 1e-12
            ):
                raise IllegalError(f"model {model}, layer {layer}: an FFN takes other than its time")
    for gpu in range(network.gpus):
        lane = events[(events["stream"] == "compute") & (events["resource"] == gpu)].sort_values("start")
        if np.any(lane["start"].to_numpy()[1:] < lane["end"].to_numpy()[:-1] - slack):
            raise IllegalError(f"GPU {gpu} computes two things at once")
    _check_ports(events[events["stream"] == "network"], network)
    return timeline.total


def _check_ports(sends, network: Network) -> None:
    """Within any stretch of time between a start and an end a port carries at most its capacity times the length."""
    src, dst = sends["resource"].to_numpy(int), sends["peer"].to_numpy(int)
    begin, end = sends["start"].to_numpy() + network.start_up(src, dst), sends["end"].to_numpy()
    size = sends["bytes"].to_numpy()
    for port in network.ports(src, dst):
        for used in np.unique(port):
            mine = port == used
            for since in np.unique(begin[mine]):
                inside = mine & (begin >= since)
                until = np.sort(end[inside])
                carried = np.cumsum(size[inside][np.argsort(end[inside], kind="stable")])
                if np.any(carried > network.capacity[used] * (until - since) * (1 + 1e-6) + 1e-9 * size.max()):
                    raise IllegalError(f"port {used} carries more than its capacity")


def _seconds_of_order(mode: str, schedule: Schedule | None, traffic: np.ndarray, network: Network) -> float:
    if mode in ("sequential", "concurrent"):
        return check_flows(all_to_all(mode, schedule, traffic, network), traffic, network)
    sends = Sends.of(schedule)
    if mode == "two-tier":
        check_phases(sends, mode, between_nodes(traffic, network), node_ports(sends, network))
        steps = Steps.of(schedule, traffic, network)
        check_relayed(steps.hops(), steps.seconds, traffic, network)
        return check_flows(all_to_all(mode, schedule, traffic, network), traffic, network, relayed=True)
    src, dst, size, phase = sends.src, sends.dst, sends.bytes, sends.phase
    out, into = network.ports(src, dst)
    ports, seconds = Ports(out, into, network.capacity), 0.0
    # Fabric and links are two networks: each part of a phased order must be legal on its own.
    for part in (~network.linked, network.linked):
        here = part[src, dst]
        check_phases(sends.only(here), mode, np.where(part, traffic, 0.0), ports.only(here))
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
