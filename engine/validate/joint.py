"""Experts placed for affinity and balance at once."""

from dataclasses import dataclass

import numpy as np

from engine.errors import IllegalError


@dataclass(frozen=True)
class JointCheck:
    """What a placement is worth on one workload.

    kept_share, hop_share: share of the transitions that stay on a GPU, and that do not; hop_cost_share: cost of hops /
    cost if all were of the dearest kind; imbalance: mean over layers of max / mean GPU load, less 1; balancedness: mean
    over layers of mean / max; moves: (layer, expert) pairs on another GPU than before, 0 if no placement before is given.
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

    transitions: float64[layer - 1, expert, expert]; load: float64[layer, expert]; slots: int[gpu], experts of each GPU in
    every layer, exactly; start: int[layer, expert] and max_moves: how many pairs may be elsewhere than there at most.
    """
    moves = _count_moves(gpu_of_expert, load.shape, slots, start)
    if max_moves is not None and moves > max_moves:
        raise IllegalError(f"{moves} experts moved, at most {max_moves} may")
    total, kept, cost = _hops(gpu_of_expert, transitions, gpus_per_node, cost_gpu, cost_node)
    ratios = _load_ratios(gpu_of_expert, load, len(slots))
    kept_share = kept / total if total else 1.0
    dearest = cost_node if gpus_per_node else cost_gpu
    return JointCheck(
        kept_share=kept_share,
        hop_share=1 - kept_share,
        hop_cost_share=cost / (total * dearest) if total else 0.0,
        imbalance=sum(ratios) / len(ratios) - 1,
        balancedness=sum(1 / ratio for ratio in ratios) / len(ratios),
        moves=moves,
    )


def _count_moves(gpu_of_expert: np.ndarray, shape: tuple[int, int], slots: np.ndarray, start: np.ndarray | None) -> int:
    """Check that every layer fills the slots exactly, and count the (layer, expert) pairs that are elsewhere than at the
    start. shape: (layers, experts)."""
    layers, experts = shape
    if len(gpu_of_expert) != layers or any(len(row) != experts for row in gpu_of_expert):
        raise IllegalError(f"the placement is not one GPU for each of {layers} layers and {experts} experts")
    moves = 0
    for layer in range(layers):
        row = [int(gpu) for gpu in gpu_of_expert[layer]]
        for gpu in range(len(slots)):
            if row.count(gpu) != slots[gpu]:
                raise IllegalError(f"layer {layer}: GPU {gpu} has {row.count(gpu)} experts in {slots[gpu]} slots")
        if len(row) != sum(slots):
            raise IllegalError(f"layer {layer}: an expert is on a GPU that does not exist")
        if start is not None:
            moves += sum(int(row[expert] != start[layer][expert]) for expert in range(experts))
    return moves


def _hops(
    gpu_of_expert: np.ndarray, transitions: np.ndarray, gpus_per_node: int | None, cost_gpu: float, cost_node: float
) -> tuple[float, float, float]:
    """Tokens in all, tokens that stay on their GPU, and the cost of the hops of the others."""
    total = kept = cost = 0.0
    for layer in range(len(gpu_of_expert) - 1):
        experts = len(gpu_of_expert[layer])
        for i in range(experts):
            for k in range(experts):
                tokens = transitions[layer][i][k]
                here, there = gpu_of_expert[layer][i], gpu_of_expert[layer + 1][k]
                total += tokens
                if here == there:
                    kept += tokens
                elif gpus_per_node and here // gpus_per_node != there // gpus_per_node:
                    cost += tokens * cost_node
                else:
                    cost += tokens * cost_gpu
    return total, kept, cost


def _load_ratios(gpu_of_expert: np.ndarray, load: np.ndarray, gpus: int) -> list[float]:
    """For every layer max / mean load of the GPUs; 1 where there is no load."""
    ratios = []
    for layer in range(len(load)):
        of_gpu = [0.0] * gpus
        for expert in range(len(load[layer])):
            of_gpu[gpu_of_expert[layer][expert]] += load[layer][expert]
        ratios.append(max(of_gpu) * gpus / sum(of_gpu) if sum(of_gpu) > 0 else 1.0)
    return ratios
