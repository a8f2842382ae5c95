"""Experts of two models that share GPUs."""

import numpy as np

from engine.errors import IllegalError


def check_colocation(
    partner: np.ndarray, send_a: np.ndarray, recv_a: np.ndarray, send_b: np.ndarray, recv_b: np.ndarray
) -> float:
    """Check a pairing and return its largest weight (Aurora, section 6.2), in the unit of what is sent and received.

    partner: int[expert of a], the expert of b beside it; send_a, recv_a, send_b, recv_b: float64[expert].
    """
    experts = len(send_a)
    if sorted(int(expert) for expert in partner) != list(range(experts)):
        raise IllegalError("not every expert of b stands beside exactly one expert of a")
    worst = 0.0
    for expert in range(experts):
        other = int(partner[expert])
        worst = max(worst, float(send_a[expert] + send_b[other]), float(recv_a[expert] + recv_b[other]))
    return worst


def check_colocation_heterogeneous(assignment: np.ndarray, cost: np.ndarray) -> float:
    """Check one expert of each model on every GPU and return the largest cost used (Aurora, section 7).

    assignment: int[gpu, 2], the expert of a and the expert of b; cost: float64[gpu, expert of a, expert of b].
    """
    gpus = len(cost)
    if len(assignment) != gpus:
        raise IllegalError(f"experts on {len(assignment)} of {gpus} GPUs")
    for model in (0, 1):
        if sorted(int(row[model]) for row in assignment) != list(range(gpus)):
            raise IllegalError(f"not every expert of {'ab'[model]} is on exactly one GPU")
    return max(float(cost[gpu, int(row[0]), int(row[1])]) for gpu, row in enumerate(assignment))
