"""Experts placed for few hops between layers."""

import numpy as np

from engine.errors import IllegalError


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
    layers, experts = len(gpu_of_expert), transitions.shape[1]
    if transitions.shape != (layers - 1, experts, experts):
        raise IllegalError(f"{layers} layers are placed, the transitions are {transitions.shape}")
    for layer in range(layers):
        held = [0] * gpus
        if len(gpu_of_expert[layer]) != experts:
            raise IllegalError(f"layer {layer} places {len(gpu_of_expert[layer])} experts of {experts}")
        for expert in range(experts):
            gpu = int(gpu_of_expert[layer][expert])
            if gpu != gpu_of_expert[layer][expert] or not 0 <= gpu < gpus:
                raise IllegalError(f"layer {layer}, expert {expert}: there is no GPU {gpu_of_expert[layer][expert]}")
            held[gpu] += 1
        for gpu in range(gpus):
            if held[gpu] * gpus != experts:
                raise IllegalError(f"layer {layer}: GPU {gpu} has {held[gpu]} experts, wanted {experts / gpus:g}")
    size = gpus_per_node or gpus
    node_hops = gpu_hops = 0.0
    for layer in range(layers - 1):
        for here in range(experts):
            for there in range(experts):
                source, target = gpu_of_expert[layer][here], gpu_of_expert[layer + 1][there]
                if source // size != target // size:
                    node_hops += transitions[layer, here, there]
                elif source != target:
                    gpu_hops += transitions[layer, here, there]
    return float(cost_gpu * gpu_hops + cost_node * node_hops), float(node_hops), float(gpu_hops)
