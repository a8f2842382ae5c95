"""Checks of placements: answers of the placement kernels are legal, and their figures are recomputed without any optimiser.

Every `check_` function returns the figures it measured and raises `IllegalError` with the first broken rule.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import linprog

from engine.errors import IllegalError
from engine.network import Network
from tests.oracles.rules import illegal_if


def check_affinity(
    gpu_of_expert: np.ndarray,
    transitions: np.ndarray,
    gpus: int,
    gpus_per_node: int | None = None,
    cost_gpu: float = 1.0,
    cost_node: float = 1.0,
) -> tuple[float, float, float]:
    """Check that every GPU has equally many experts in every layer; (cost, node_hops, gpu_hops), hop by hop.

    node_hops: hops to a GPU of another node; gpu_hops: hops to another GPU of the same node; cost = cost_gpu * gpu_hops
    + cost_node * node_hops. GPU g is in node g // gpus_per_node; without `gpus_per_node` all GPUs are in one node.

    gpu_of_expert: int[layer, expert]; transitions: [layer - 1, expert, expert].
    """
    experts = transitions.shape[1]
    _check_filled(gpu_of_expert, (len(transitions) + 1, experts), [experts / gpus] * gpus)
    _, gpu_hops, node_hops = _hops(gpu_of_expert, transitions, gpus_per_node)
    return cost_gpu * gpu_hops + cost_node * node_hops, node_hops, gpu_hops


def _check_filled(gpu_of_expert: np.ndarray, shape: tuple[int, int], slots: Sequence[float]) -> None:
    """Check that every layer has each expert on one GPU and fills the slots exactly. shape: (layers, experts)."""
    layers, experts = shape
    if len(gpu_of_expert) != layers or any(len(row) != experts for row in gpu_of_expert):
        raise IllegalError(f"the experts placed are not {experts} in each of {layers} layers")
    for layer, row in enumerate(gpu_of_expert):
        held = [0] * len(slots)
        for expert, gpu in enumerate(row):
            illegal_if(gpu != int(gpu) or not 0 <= gpu < len(slots), f"layer {layer}, expert {expert}: there is no GPU {gpu}")
            held[int(gpu)] += 1
        for gpu, wanted in enumerate(slots):
            illegal_if(held[gpu] != wanted, f"layer {layer}: GPU {gpu} has {held[gpu]} experts, wanted {wanted:g}")


def _hops(gpu_of_expert: np.ndarray, transitions: np.ndarray, gpus_per_node: int | None) -> tuple[float, float, float]:
    """Tokens that stay on their GPU, that go to another GPU of the node, and that go to another node."""
    kept = inside = outside = 0.0
    for layer, counts in enumerate(transitions):
        for here, row in zip(gpu_of_expert[layer], counts, strict=True):
            for there, tokens in zip(gpu_of_expert[layer + 1], row, strict=True):
                if here == there:
                    kept += float(tokens)
                elif gpus_per_node and here // gpus_per_node != there // gpus_per_node:
                    outside += float(tokens)
                else:
                    inside += float(tokens)
    return kept, inside, outside


def check_assignment(
    gpu_of_expert: np.ndarray, tokens: np.ndarray, compute: np.ndarray, send: np.ndarray, receive: np.ndarray, slots: np.ndarray
) -> float:
    """Check experts on GPUs and return max F + 2 max N in seconds (Aurora, equation 3), summed up GPU by GPU.

    gpu_of_expert: int[expert]
    tokens: float64[source gpu, expert] in the unit of the bandwidths
    compute: float64[gpu, expert] seconds
    send, receive: float64[gpu] per second
    slots: int[gpu], the most experts of each
    """
    gpus, experts = tokens.shape
    if len(gpu_of_expert) != experts or min(gpu_of_expert) < 0 or max(gpu_of_expert) >= gpus:
        raise IllegalError("not every expert is on a GPU that exists")
    ffn, network = [], []
    for gpu in range(gpus):
        here = [expert for expert in range(experts) if gpu_of_expert[expert] == gpu]
        illegal_if(len(here) > slots[gpu], f"GPU {gpu} has {len(here)} experts in {slots[gpu]} slots")
        away = [expert for expert in range(experts) if gpu_of_expert[expert] != gpu]
        others = [other for other in range(gpus) if other != gpu]
        sent = sum(tokens[gpu, expert] for expert in away)
        received = sum(tokens[other, expert] for other in others for expert in here)
        ffn.append(sum(compute[gpu, expert] for expert in here))
        network.append(max(sent / send[gpu], received / receive[gpu]))
    return max(ffn) + 2 * max(network)


def check_coactivation(
    gpu_of_expert: np.ndarray,
    experts: np.ndarray,
    source_gpu: np.ndarray,
    gpus: int,
    gpus_per_node: int | None = None,
    travel: Literal["gpu", "node"] = "gpu",
    cap: float | None = None,
) -> tuple[list[int], list[float]]:
    """Check that every GPU has equally many experts and no more load than the cap allows; (rows, imbalance), token by token.

    rows: of every layer, the other GPUs (nodes, for travel "node") that a token has experts on, summed over tokens
    imbalance: tokens of the most loaded GPU of every layer / mean, 1 without tokens, at most `cap` if there is one

    gpu_of_expert: int[layer, expert]
    experts: int[layer, token, choice], -1 = none
    source_gpu: int[token], -1 = from outside

    GPU g is in node g // gpus_per_node; without `gpus_per_node` all GPUs are in one node.
    """
    width = len(gpu_of_expert[0]) if len(gpu_of_expert) else 0
    _check_filled(gpu_of_expert, (len(experts), width), [width / gpus] * gpus)
    size = 1 if travel == "gpu" else gpus_per_node or gpus
    rows, imbalance = [], []
    for layer, place in enumerate(gpu_of_expert):
        load, sent = [0] * gpus, 0
        for token, source in zip(experts[layer], source_gpu, strict=True):
            reached = set()
            for expert in token:
                if expert >= 0:
                    load[int(place[expert])] += 1
                    reached.add(int(place[expert]) // size)
            if source >= 0:
                reached.discard(int(source) // size)
            sent += len(reached)
        rows.append(sent)
        imbalance.append(max(load) * gpus / sum(load) if sum(load) else 1.0)
        if cap is not None and imbalance[-1] > cap * (1 + 1e-9):
            raise IllegalError(f"layer {layer}: the most loaded GPU has {imbalance[-1]:.6g} times the mean, above {cap:g}")
    return rows, imbalance


def check_colocation(
    partner: np.ndarray, send_a: np.ndarray, recv_a: np.ndarray, send_b: np.ndarray, recv_b: np.ndarray
) -> float:
    """Check a pairing and return its largest weight (Aurora, section 6.2), in the unit of the loads.

    partner: int[expert of a], the expert of b on the same GPU
    send_a, recv_a, send_b, recv_b: float64[expert]
    """
    experts = len(send_a)
    if sorted(int(expert) for expert in partner) != list(range(experts)):
        raise IllegalError("not every expert of b stands beside exactly one expert of a")
    pairs = [(expert, int(other)) for expert, other in enumerate(partner)]
    return max(float(max(send_a[a] + send_b[b], recv_a[a] + recv_b[b])) for a, b in pairs)


def check_colocation_heterogeneous(assignment: np.ndarray, cost: np.ndarray) -> float:
    """Check one expert of each model on every GPU and return the largest cost used (Aurora, section 7).

    assignment: int[gpu, 2], the expert of a and the expert of b
    cost: float64[gpu, expert of a, expert of b]
    """
    gpus = len(cost)
    illegal_if(len(assignment) != gpus, f"experts on {len(assignment)} of {gpus} GPUs")
    for model in (0, 1):
        if sorted(int(row[model]) for row in assignment) != list(range(gpus)):
            raise IllegalError(f"not every expert of {'ab'[model]} is on exactly one GPU")
    return max(float(cost[gpu, int(row[0]), int(row[1])]) for gpu, row in enumerate(assignment))


def check_devices(
    experts_of_device: Sequence[Sequence[int]], popularity: Sequence[float], devices: int, max_experts_per_device: int
) -> float:
    """Check experts on devices and return the largest load, an expert's popularity divided equally over its hosts.

    experts_of_device: the experts of every device, at most `max_experts_per_device` and none twice; every expert is
    somewhere. popularity: [expert].
    """
    illegal_if(len(experts_of_device) != devices, f"{len(experts_of_device)} devices instead of {devices}")
    hosts = dict.fromkeys(range(len(popularity)), 0)
    for device, held in enumerate(experts_of_device):
        if len(held) > max_experts_per_device:
            raise IllegalError(f"device {device} hosts {len(held)} experts instead of at most {max_experts_per_device}")
        illegal_if(len(set(held)) < len(held), f"device {device} hosts an expert twice")
        for expert in held:
            illegal_if(expert not in hosts, f"device {device} hosts expert {expert}, which does not exist")
            hosts[expert] += 1
    for expert, count in hosts.items():
        illegal_if(count == 0, f"expert {expert} is on no device")
    return max(sum(float(popularity[expert]) / hosts[expert] for expert in held) for held in experts_of_device)


def check_popularity(
    devices_of_expert: Sequence[float],
    train: Sequence[Sequence[int]],
    test_prefix: Sequence[Sequence[int]],
    path_length: int,
    top_k: int,
    layer: int,
    experts: int,
    devices: int,
) -> float:
    """Check n_e of Lina's equation 1, counted up token by token, and return its sum.

    train: [token][layer] expert ids
    test_prefix: [token][path], the experts of layers layer - path_length + 1 … layer
    """
    followers: dict[tuple[int, ...], dict[int, int]] = {}
    overall: dict[int, int] = {}
    for token in train:
        path, following = (tuple(int(expert) for expert in token[layer - path_length + 1 : layer + 1]), int(token[layer + 1]))
        if following < 0:
            continue
        overall[following] = overall.get(following, 0) + 1
        if min(path) >= 0:
            counts = followers.setdefault(path, {})
            counts[following] = counts.get(following, 0) + 1
    wanted = [0.0] * experts
    for token in test_prefix:
        counts = followers.get(tuple(int(expert) for expert in token), overall)
        likeliest = sorted(counts, key=lambda expert: (-counts[expert], expert))[:top_k]
        for expert in likeliest:
            wanted[expert] += devices * counts[expert] / sum(counts.values()) / len(test_prefix)
    illegal_if(len(devices_of_expert) != experts, f"{len(devices_of_expert)} experts instead of {experts}")
    for expert, (claimed, right) in enumerate(zip(devices_of_expert, wanted, strict=True)):
        illegal_if(abs(claimed - right) > 1e-9 * devices, f"expert {expert} has n_e = {claimed} instead of {right}")
    return sum(wanted)


@dataclass(frozen=True)
class JointCheck:
    """The figures of a placement on one workload.

    kept_share, hop_share: share of the transitions that stay on a GPU, and that do not
    hop_cost_share: cost of hops / cost if all were of the dearest kind
    imbalance: mean over layers of max / mean GPU load, less 1
    balancedness: mean over layers of mean / max
    moves: (layer, expert) pairs on another GPU than before, 0 if no placement before is given
    """

    kept_share: float
    hop_share: float
    hop_cost_share: float
    imbalance: float
    balancedness: float
    moves: int


def check_joint(
    gpu_of_expert: np.ndarray,
    transitions: np.ndarray,
    load: np.ndarray,
    slots: np.ndarray,
    start: np.ndarray | None = None,
    max_moves: int | None = None,
    gpus_per_node: int | None = None,
    cost_gpu: float = 1.0,
    cost_node: float = 1.0,
) -> JointCheck:
    """Check a placement int[layer, expert] and return its figures on one workload, summed up hop by hop.

    transitions: float64[layer - 1, expert, expert]
    load: float64[layer, expert]
    slots: int[gpu], experts of each GPU in every layer, exactly
    start, max_moves: int[layer, expert] and the most pairs that may be elsewhere
    """
    _check_filled(gpu_of_expert, load.shape, slots)
    moves = 0 if start is None else sum(int(np.sum(row != before)) for row, before in zip(gpu_of_expert, start, strict=True))
    illegal_if(max_moves is not None and moves > max_moves, f"{moves} experts moved, at most {max_moves} may")
    kept, inside, outside = _hops(gpu_of_expert, transitions, gpus_per_node)
    total, dearest = kept + inside + outside, cost_node if gpus_per_node else cost_gpu
    ratios = _load_ratios(gpu_of_expert, load, len(slots))
    kept_share = kept / total if total else 1.0
    return JointCheck(
        kept_share=kept_share,
        hop_share=1 - kept_share,
        hop_cost_share=(inside * cost_gpu + outside * cost_node) / (total * dearest) if total else 0.0,
        imbalance=sum(ratios) / len(ratios) - 1,
        balancedness=sum(1 / ratio for ratio in ratios) / len(ratios),
        moves=moves,
    )


def _load_ratios(gpu_of_expert: np.ndarray, load: np.ndarray, gpus: int) -> list[float]:
    """The max / mean load of the GPUs in every layer; 1 without load."""
    ratios = []
    for layer in range(len(load)):
        of_gpu = [0.0] * gpus
        for expert in range(len(load[layer])):
            of_gpu[gpu_of_expert[layer][expert]] += load[layer][expert]
        ratios.append(max(of_gpu) * gpus / sum(of_gpu) if sum(of_gpu) > 0 else 1.0)
    return ratios


def check_replication(
    physical_to_logical: np.ndarray,
    loads: np.ndarray,
    gpus: int,
    slots_of_gpu: np.ndarray | None = None,
    split: str = "equal",
    speed: np.ndarray | None = None,
) -> np.ndarray:
    """Check replicas on GPUs and return their balancedness float64[load, layer], summed up slot by slot.

    Balancedness is the time of every GPU if all work were divided perfectly / the time of the slowest GPU, 1 without work.

    physical_to_logical: int[layer, slot], slots in the order of their GPUs
    loads: float64[load, layer, expert]
    slots_of_gpu: int[gpu], equal if not given
    split: "equal", or "free" (solved here as a linear program)
    speed: float64[gpu], 1 if not given
    """
    workloads, layers, experts = loads.shape
    illegal_if(len(physical_to_logical) != layers, f"{len(physical_to_logical)} layers are placed, not {layers}")
    slots = len(physical_to_logical[0])
    if slots_of_gpu is None:
        illegal_if(slots % gpus, f"{slots} slots do not divide over {gpus} GPUs")
        slots_of_gpu = [slots // gpus] * gpus
    speed = [1.0] * gpus if speed is None else speed
    gpu_of_slot = [gpu for gpu in range(gpus) for _ in range(slots_of_gpu[gpu])]
    answer = np.ones((workloads, layers))
    for layer in range(layers):
        row = list(physical_to_logical[layer])
        illegal_if(len(row) != len(gpu_of_slot), f"layer {layer} fills {len(row)} slots of {len(gpu_of_slot)}")
        illegal_if(set(row) != set(range(experts)), f"layer {layer} places the experts {sorted(set(row))} of {experts}")
        for load in range(workloads):
            work = loads[load, layer]
            if sum(work) == 0:
                continue
            slowest = (_free if split == "free" else _equal)(row, gpu_of_slot, work, speed)
            answer[load, layer] = sum(work) / sum(speed) / slowest
    return answer


def _equal(row: list, gpu_of_slot: list, work: np.ndarray, speed: np.ndarray) -> float:
    time = [0.0] * len(speed)
    for expert, gpu in zip(row, gpu_of_slot, strict=True):
        time[gpu] += work[expert] / row.count(expert) / speed[gpu]
    illegal_if(not np.isclose(np.dot(time, speed), sum(work)), "the GPUs do not do all the work")
    return max(time)


def _free(row: list, gpu_of_slot: list, work: np.ndarray, speed: np.ndarray) -> float:
    """Least time of the slowest GPU: how much of each expert each slot does, in shares of all the work."""
    slots, gpus, experts = len(row), len(speed), len(work)
    total = sum(work)
    on_gpu, of_expert = np.zeros((gpus, slots + 1)), np.zeros((experts, slots + 1))
    for slot, (expert, gpu) in enumerate(zip(row, gpu_of_slot, strict=True)):
        on_gpu[gpu, slot] = 1 / speed[gpu]
        of_expert[expert, slot] = 1
    on_gpu[:, slots] = -1
    cost = np.r_[np.zeros(slots), 1.0]
    solution = linprog(cost, A_ub=on_gpu, b_ub=np.zeros(gpus), A_eq=of_expert, b_eq=np.array(work) / total)
    return float(solution.fun) * total


def check_transfers(
    source: np.ndarray, traffic: np.ndarray, held_now: np.ndarray, held_new: np.ndarray, bytes_per_expert: float
) -> None:
    """Check that every new copy comes once, whole, from a GPU that has it, and that the traffic is their sum.

    source: int[layer, expert, gpu], the GPU that sends the new copy, -1 for none
    traffic: float64[src, dst] bytes
    held_now, held_new: bool[layer, expert, gpu]
    """
    added = np.zeros_like(traffic)
    layers, experts, gpus = held_now.shape
    for layer in range(layers):
        for expert in range(experts):
            for gpu in range(gpus):
                needed = held_new[layer, expert, gpu] and not held_now[layer, expert, gpu]
                sender = source[layer, expert, gpu]
                if not needed:
                    illegal_if(sender != -1, f"layer {layer}, expert {expert} is sent to GPU {gpu} without need")
                    continue
                if not 0 <= sender < gpus or not held_now[layer, expert, sender]:
                    raise IllegalError(f"GPU {sender} sends layer {layer}, expert {expert} without having it")
                added[sender, gpu] += bytes_per_expert
    illegal_if(not np.allclose(added, traffic), "the traffic is not the sum of the copies sent")


def seconds_of_moves(source: np.ndarray, bytes_per_expert: float, network: Network) -> float:
    """Seconds of copies that move layer after layer, every GPU as soon as it and its partners of a layer are there.

    source: int[layer, expert, gpu], see `check_transfers`
    """
    clock, start_ups = [0.0] * source.shape[2], []
    for row in source:
        busy, partners = Counter(), defaultdict(set)
        for (_, dst), src in np.ndenumerate(row):
            if src < 0:
                continue
            linked = bool(network.linked[src, dst])
            busy[src, "out", linked] += bytes_per_expert / (network.link[src] if linked else network.send[src])
            busy[dst, "in", linked] += bytes_per_expert / (network.link[dst] if linked else network.receive[dst])
            partners[src] |= {src, dst}
            partners[dst] |= {src, dst}
            start_ups.append(network.link_latency[src] if linked else network.latency)
        needs = {gpu: max(time for (other, *_), time in busy.items() if other == gpu) for gpu in partners}
        ends = {
            gpu: max(clock[other] for other in group) + max(needs[other] for other in group) for gpu, group in partners.items()
        }
        for gpu, end in ends.items():
            clock[gpu] = end
    return max(clock) + (min(start_ups) if start_ups else 0.0)
