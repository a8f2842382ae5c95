"""Experts on the GPUs of a mixed cluster."""

import numpy as np

from engine.errors import IllegalError


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
