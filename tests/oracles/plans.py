"""Checks of whole plans: the seconds of one model's plan, and the rules that a timeline of two models keeps."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pandas as pd

from engine.communication.steps import Steps
from engine.errors import IllegalError
from engine.network import Network, off_diagonal
from engine.plan import Placement, Plan, Schedule, Travel
from engine.problem import Problem
from engine.simulate import simulate_layers
from engine.simulate.flows import all_to_all
from engine.simulate.work import Load
from engine.timeline import STREAMS, Timeline
from engine.validate.refusal import RELATIVE, Ports, Sends, between_nodes, node_ports
from engine.workload import RoutingTrace
from tests.oracles.communication import check_flows, check_phases, check_ports, check_relayed
from tests.oracles.dispatch import copies_of_rank
from tests.oracles.rules import illegal_if


def check_plan(plan: Plan, problem: Problem) -> float:
    """Check a plan of one model on the problem it was made for and return its seconds: every step at its slowest GPU,
    every all-to-all after its own rule. Raises IllegalError, and InputError when the plan does not fit the problem."""
    problem.check_plan(plan)
    order, network, cost, model = plan.send_order, problem.network, problem.cost, problem.model
    gpus = range(problem.network.gpus)
    total = 0.0
    coherent, travel = plan.execution == "context-coherent", plan.travel or Travel()
    home = carrier = problem.workload.rank_of_token(len(gpus)).tolist() if coherent else None
    if coherent:
        total += _seconds_of_order("concurrent", None, _gathered(problem, carrier), network)
    for layer in range(plan.placement.layers):
        ffn = _ffn_seconds(plan.placement, problem, layer, travel)
        if coherent:
            total += _late_attention(problem, layer, home, carrier)
            out, back, carrier, before, after = _hops(plan.placement, problem, layer, carrier, travel)
        else:
            out, back = _traffic(plan.placement, problem, layer, travel)
            before = after = problem.demand[layer].sum(axis=1) / model.experts_per_token
        gate = np.array([float(cost.gate(problem.cluster.gpus[gpu], before[gpu], model)) for gpu in gpus])
        last = np.array([float(cost.aggregate(problem.cluster.gpus[gpu], after[gpu], model)) for gpu in gpus])
        total += sum(float(cost.together(step).max()) for step in (gate, ffn, last))
        for kind, schedules, matrix in (("dispatch", order.dispatch, out), ("combine", order.combine, back)):
            schedule = schedules[layer] if schedules else None
            at_work = network.carrying(kind, travel.unit, matrix)
            total += _seconds_of_order(order.mode, schedule, matrix, at_work)
    if coherent:
        total += _seconds_of_order("concurrent", None, _gathered(problem, carrier), network)
    return total


def seconds_by_ports(plan: Plan, problem: Problem) -> list[float]:
    """Seconds of dispatch, FFNs and combine of every layer of a vanilla plan if each all-to-all is over with its last port,
    which moves its bytes at its whole rate after one start-up."""
    network, gpus, travel, seconds = problem.network, range(problem.network.gpus), plan.travel or Travel(), []
    for layer in range(plan.placement.layers):
        seconds.append(float(_ffn_seconds(plan.placement, problem, layer, travel).max()))
        for matrix in _traffic(plan.placement, problem, layer, travel):
            last = 0.0
            for gpu, over_links in product(gpus, (False, True)):
                peers = [peer for peer in gpus if peer != gpu and network.linked[gpu, peer] == over_links]
                start = network.link_latency[gpu] if over_links else network.latency
                rates = [network.link[gpu]] * 2 if over_links else [network.send[gpu], network.receive[gpu]]
                for moved, rate in zip((matrix[gpu, peers].sum(), matrix[peers, gpu].sum()), rates, strict=True):
                    last = max(last, start + moved / rate if moved else 0.0)
            seconds[-1] += last
    return seconds


def _ffn_seconds(placement: Placement, problem: Problem, layer: int, travel: Travel) -> np.ndarray:
    """float64[gpu], summed up expert by expert."""
    copies, seconds, counted = problem.demand[layer].sum(axis=0), np.zeros(placement.gpus), None
    if travel.replicas is not None and isinstance(problem.workload, RoutingTrace):
        served = _served(placement, problem, layer, travel, problem.gpu_of_token.tolist())
        counted = Counter(pair for choices in served for pair in choices)
    for expert, gpu, share in _shares(placement, layer):
        here = copies[expert] * share if counted is None else counted[expert, gpu]
        seconds[gpu] += float(problem.cost.expert_ffn(problem.cluster.gpus[gpu], here, problem.model))
    return seconds


def _shares(placement: Placement, layer: int) -> list[tuple[int, int, float]]:
    """(expert, GPU, share of the expert's replicas that are there)."""
    row = placement.experts_of_gpu[layer]
    replicas = Counter(expert for slots in row for expert in slots)
    return [(expert, gpu, slots.count(expert) / replicas[expert]) for gpu, slots in enumerate(row) for expert in set(slots)]


def _traffic(placement: Placement, problem: Problem, layer: int, travel: Travel) -> tuple[np.ndarray, np.ndarray]:
    """float64[src, dst] bytes of a vanilla dispatch and combine."""
    out, back = travel.row_bytes(problem.model)
    if travel.unit == "copies" and travel.replicas is None:
        rows = np.zeros((placement.gpus, placement.gpus))
        for expert, gpu, share in _shares(placement, layer):  # every copy on its own; replicas share equally
            rows[:, gpu] += problem.demand[layer][:, expert] * share
    elif isinstance(problem.workload, RoutingTrace):
        sources = problem.gpu_of_token.tolist()
        rows = rows_of_layer(placement, problem, layer, travel, sources)
    else:
        rows = Load(problem, placement, travel).traffic[layer] / out  # an estimate has no tokens to count
    return rows * out, rows.T * back


def rows_of_layer(placement: Placement, problem: Problem, layer: int, travel: Travel, sources: list[int]) -> np.ndarray:
    """float64[src, dst] rows of a dispatch of tokens on these GPUs, token by token."""
    nodes = _node_of_gpu(problem)
    rows = np.zeros((len(nodes), len(nodes)))
    for source, choices in zip(sources, _served(placement, problem, layer, travel, sources), strict=True):
        hosts = [gpu for _, gpu in choices]
        if travel.unit == "copies":
            for host in hosts:
                rows[source, host] += 1
            continue
        entries = {}
        for host in sorted(set(hosts)):
            node = nodes[host]
            if travel.unit == "gpu" or host in nodes[source]:
                rows[source, host] += 1
                continue
            entry = node[(source - nodes[source][0]) % len(node)]
            entries[node] = entry
            if host != entry:
                rows[entry, host] += 1
        for entry in entries.values():
            rows[source, entry] += 1
    return rows


def _served(
    placement: Placement, problem: Problem, layer: int, travel: Travel, sources: list[int]
) -> Iterator[list[tuple[int, int]]]:
    """The (expert, GPU that serves it) pairs of every token, in the order of its choices. If tokens choose copies, every way
    to serve them is tried: for few copies only.

    sources: the GPU of every token
    """
    homes, nodes = defaultdict(list), _node_of_gpu(problem)
    for gpu, slots in enumerate(placement.experts_of_gpu[layer]):
        for expert in slots:
            homes[expert].append(gpu)
    by_node = travel.unit == "node" and len(set(nodes)) > 1
    group_of_gpu = [nodes[gpu][0] if by_node else gpu for gpu in range(placement.gpus)]
    turn, served = Counter(), Counter()
    tables = {rank: copies_of_rank(placement, travel, rank) for rank in (set(sources) if travel.replicas else ())}
    for source, choices in zip(sources, problem.workload.experts[:, layer].tolist(), strict=True):
        hosts, real = [], [expert for expert in choices if expert >= 0]
        if travel.replicas is None:
            for expert in real:
                hosts.append(homes[expert][turn[expert] % len(homes[expert])])
                turn[expert] += 1
        elif travel.replicas != "fewest":
            for expert in real:
                near = tables[source][layer][expert]
                hosts.append(homes[expert][turn[expert] % len(homes[expert])] if near is None else near)
                turn[expert] += near is None
        else:
            touched = _touched([{group_of_gpu[gpu] for gpu in homes[expert]} for expert in real], group_of_gpu[source])
            for expert in real:
                within = [gpu for gpu in sorted(set(homes[expert])) if group_of_gpu[gpu] in touched]
                hosts.append(min(within, key=served.__getitem__))
                served[hosts[-1]] += 1
        yield list(zip(real, hosts, strict=True))


def _node_of_gpu(problem: Problem) -> list[range]:
    """The GPUs that every GPU reaches over the links of its node, itself among them."""
    nodes = []
    for node in problem.cluster.nodes:
        first, count = len(nodes), len(node.gpus)
        linked = range(first, first + count)
        nodes += [linked if node.link_bandwidth else range(gpu, gpu + 1) for gpu in linked]
    return nodes


def _gathered(problem: Problem, carrier: list[int]) -> np.ndarray:
    """float64[src, dst] bytes of an all-gather of all tokens that have an expert anywhere: to all of their node over its links,
    an even part of the node's from each of its GPUs to every other node, and on over the links there. carrier: the GPU of
    every token"""
    nodes = _node_of_gpu(problem)
    moved, held = np.zeros((len(nodes), len(nodes))), dict.fromkeys(nodes, 0)
    for source, chosen in zip(carrier, problem.workload.experts, strict=True):
        if (chosen >= 0).any():
            held[nodes[source]] += 1
            moved[source, nodes[source]] += 1
    for node, rows in held.items():
        for place, source in enumerate(node):
            part = (rows + len(node) - 1 - place) // len(node)
            for other in held.keys() - {node}:
                entry = other[place % len(other)]
                moved[source, entry] += part
                for gpu in other:
                    moved[entry, gpu] += part * (gpu != entry)
    return off_diagonal(moved) * problem.model.bytes_per_token


def _late_attention(problem: Problem, layer: int, home: list[int], carrier: list[int]) -> float:
    """Seconds that attention before an MoE layer takes longer with tokens at their carriers than at home, see
    `engine.simulate.work`. home, carrier: the GPU of every token"""
    if not problem.runs_attention:
        return 0.0
    trace, model = problem.workload, problem.model
    real = [bool((chosen >= 0).any()) for chosen in trace.experts]
    lengths = [model.sequence_length] if trace.sequence is None else list(Counter(trace.sequence.tolist()).values())
    keys = max(1, round(sum(length * (length + 1) / 2 for length in lengths) / sum(lengths)))
    longest = []
    for place in (home, carrier):
        tokens = Counter(gpu for gpu, counts in zip(place, real, strict=True) if counts)
        seconds = [float(problem.cost.attention(gpu, tokens[at], keys, model)) for at, gpu in enumerate(problem.cluster.gpus)]
        longest.append(float(problem.cost.together(np.array(seconds)).max()))
    layers = model.moe_layers[layer] - (model.moe_layers[layer - 1] if layer else -1)
    return layers * max(0.0, longest[1] - longest[0])


def _hops(placement: Placement, problem: Problem, layer: int, carrier: list[int], travel: Travel) -> tuple:
    """One context-coherent layer, token by token: both exchanges in bytes, the new carriers, and the tokens that every
    GPU gates and aggregates. A token's new carrier is the GPU of its first-listed expert."""
    gpus = len(problem.cluster.gpus)
    home = {expert: gpu for gpu, slots in enumerate(placement.experts_of_gpu[layer]) for expert in slots}
    before, after = np.zeros(gpus), np.zeros(gpus)
    carriers = []
    for token, here in enumerate(carrier):
        chosen = problem.workload.experts[token, layer].tolist()
        there = home[chosen[0]] if chosen[0] >= 0 else here
        part = sum(expert >= 0 for expert in chosen) / len(chosen)
        before[here] += part
        after[there] += part
        carriers.append(there)
    rows = (rows_of_layer(placement, problem, layer, travel, sources) for sources in (carrier, carriers))
    out, back = (matrix * size for matrix, size in zip(rows, travel.row_bytes(problem.model), strict=True))
    return out, back.T, carriers, before, after


def check_timeline(timeline: Timeline, plan: Plan, problem: Problem) -> float:
    """Check the timeline of a plan of two models and return its seconds: every all-to-all carries its bytes once, no port
    and no GPU is overloaded, and nothing starts before its inputs are there.

    Every layer of a timeline with bundles is simulated again send by send, and its bundles must be those sends.
    """
    slack = 1e-9 * timeline.total
    problem = problem.as_planned(plan)
    parts = ((plan.placement, problem), (plan.placement_b, problem.second))
    computed = timeline.events[timeline.events["stream"] == "compute"].sort_values(["resource", "start"])
    gpu, start, end = (computed[name].to_numpy() for name in ("resource", "start", "end"))
    early = (gpu[1:] == gpu[:-1]) & (start[1:] < end[:-1] - slack)
    if early.any():
        raise IllegalError(f"GPU {gpu[1:][early][0]} computes two things at once")
    used_until = 0.0
    for layer in range(plan.placement.layers):
        whole = simulate_layers(plan, problem, timeline, layer, layer)
        if timeline.bundled:
            _check_bundles(timeline.layers(layer, layer), whole, layer, slack)
        for model, (placement, model_problem) in enumerate(parts):
            events = whole.events[whole.events["model"] == model]
            where = f"model {model}, layer {layer}"
            _check_steps(events, layer, placement, model_problem, plan.travel or Travel(), where, slack)
        sends = whole.events[whole.events["stream"] == "network"]
        if (sends["start"] < used_until - slack).any():
            raise IllegalError(f"layer {layer} sends before the layer before it has received everything")
        used_until = max(used_until, sends["end"].max()) if len(sends) else used_until
        if plan.send_order.mode == "joint":  # the bytes of both models for one GPU in a phase are one transfer
            columns = ["resource", "peer", "start", "end"]
            sends = sends.groupby(columns, as_index=False, observed=True)["bytes"].sum()
        src, dst = (sends[name].to_numpy(int) for name in ("resource", "peer"))
        check_ports(src, dst, *(sends[name].to_numpy() for name in ("start", "end", "bytes")), problem.network)
    return timeline.total


def _check_bundles(bundles: Timeline, whole: Timeline, layer: int, slack: float) -> None:
    """Every step of a layer takes place when its own sends do, occupies every GPU as long, and sends as much from it."""
    steps = [dict(iter(timeline.events.groupby(["model", "kind"], observed=True))) for timeline in (bundles, whole)]
    illegal_if(set(steps[0]) != set(steps[1]), f"layer {layer} has other steps than its sends")
    for (model, kind), events in steps[0].items():
        pair = [replace(whole, events=part) for part in (events, steps[1][model, kind])]
        begin, end = ([step.events[name].agg(pick) for step in pair] for name, pick in (("start", "min"), ("end", "max")))
        busy = [sum(step.busy(stream) for stream in STREAMS) for step in pair]
        sent = [np.bincount(step.events["resource"], step.events["bytes"], len(whole.resources)) for step in pair]
        late = max(abs(begin[0] - begin[1]), abs(end[0] - end[1]), np.abs(busy[0] - busy[1]).max())
        if late > slack or np.abs(sent[0] - sent[1]).max() > RELATIVE * sent[1].max():
            raise IllegalError(f"model {model}, layer {layer}: the bundles of {kind} are not its sends")


def _check_steps(
    events: pd.DataFrame, layer: int, placement: Placement, problem: Problem, travel: Travel, where: str, slack: float
) -> None:
    """One model's part of a layer: its steps in order, its bytes, and the seconds of its experts."""
    step_of = dict(iter(events.groupby("kind", observed=True)))
    steps = [kind for kind in ("gate", "dispatch", "ffn", "combine", "aggregate") if kind in step_of]
    for earlier, later in pairwise(steps):
        if step_of[later]["start"].min() < step_of[earlier]["end"].max() - slack:
            raise IllegalError(f"{where}: {later} starts before {earlier} has ended")
    for kind, wanted in zip(("dispatch", "combine"), _traffic(placement, problem, layer, travel), strict=True):
        moved = np.zeros_like(wanted)
        if kind in step_of:
            sends = step_of[kind]
            np.add.at(moved, (sends["resource"].to_numpy(int), sends["peer"].to_numpy(int)), sends["bytes"])
        if np.abs(moved - off_diagonal(wanted)).max() > 1e-6 * max(wanted.max(), 1):
            raise IllegalError(f"{where}: {kind} does not carry its bytes")
    took = np.zeros(problem.network.gpus)
    if "ffn" in step_of:
        ffn = step_of["ffn"]
        np.add.at(took, ffn["resource"].to_numpy(int), (ffn["end"] - ffn["start"]).to_numpy())
    wanted = problem.cost.together(_ffn_seconds(placement, problem, layer, travel))
    illegal_if(np.abs(took - wanted).max() > slack + 1e-12, f"{where}: an FFN takes other than its time")


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
            slowest = 0.0
            for side in (out, into):
                for port in np.unique(side[here]):
                    mine, share = here & (side == port), network.share[port // (2 * network.gpus)]
                    rate = network.capacity[port] * share[min(mine.sum(), len(share)) - 1]
                    slowest = max(slowest, size[mine].sum() / rate)
            seconds += slowest + latency[here].max()
    return seconds


def _touched(near: list[set[int]], home: int) -> set[int]:
    """The GPUs or nodes that a token may be served in: of the smallest sets the one with members that come first, in the order
    in which the choices need them.

    near: the GPUs or nodes that have each choice
    """
    certain = {home}.union(*(groups for groups in near if len(groups) == 1))
    open_choices = [groups for groups in near if not groups & certain]
    best: list[int] | None = None
    for way in map(set, product(*open_choices)):
        needed: list[int] = []
        for groups in open_choices:
            if not groups & set(needed):
                needed.append(min(groups & way))
        if best is None or (len(needed), needed) < (len(best), best):
            best = needed
    return certain | set(best or ())
