"""How often tokens go from an expert of one layer to an expert of the next, and how many of these hops a placement keeps.

ExFlow section IV-B works on the conditional probability of the next expert; counts carry the same information and the
weight of each expert besides, which the objective needs (its equation 8 summed over tokens is a sum over these counts).
"""

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError


def transitions(experts: NDArray[np.int16], num_experts: int, first_choice: bool = False) -> NDArray[np.float64]:
    """Hops between the experts of consecutive layers: float64[layer - 1, expert, expert], whole numbers.

    experts: int16[token, layer, k], -1 = no choice; such a choice makes no hop.
    first_choice: count only hops between choices 0 (one a token and layer pair), as for top-1 routing. Otherwise every
        choice of a layer with every choice of the next, k x k pairs a token: with top-k routing copies of a token leave
        from all its experts, so the pair counts say which experts are used together.

    Raises InputError for another shape or an expert out of range.
    """
    experts = np.asarray(experts)
    if experts.ndim != 3 or experts.shape[1] < 1 or experts.dtype.kind not in "iu":
        raise InputError(f"experts: wanted whole numbers [token, layer, k], not {experts.dtype} {list(experts.shape)}")
    if num_experts < 1 or (experts.size and (experts.min() < -1 or experts.max() >= num_experts)):
        raise InputError(f"experts: ids must be 0 … {num_experts - 1}, or -1 for no choice")
    layers = experts.shape[1]
    if first_choice:
        experts = experts[:, :, :1]
    counts = np.zeros((max(layers - 1, 0), num_experts, num_experts))
    chosen = np.where(experts >= 0, experts, num_experts).astype(np.int64)
    rows = num_experts + 1  # one more for "no choice", dropped at the end
    for layer in range(layers - 1):
        key = chosen[:, layer, :, None] * rows + chosen[:, layer + 1, None, :]
        table = np.bincount(key.ravel(), minlength=rows * rows).reshape(rows, rows)
        counts[layer] = table[:num_experts, :num_experts]
    return counts


def kept(
    gpu_of_expert: NDArray[np.int64], transitions: NDArray[np.float64], node_of_gpu: NDArray[np.int64] | None = None
) -> float:
    """Share of the hops that stay on their GPU, or with `node_of_gpu` on their node; 1 when there are no hops.

    gpu_of_expert: int[layer, expert]; transitions: float64[layer - 1, expert, expert]; node_of_gpu: int[gpu].
    Raises InputError if the shapes do not fit.
    """
    place, transitions = np.asarray(gpu_of_expert), np.asarray(transitions, dtype=np.float64)
    if place.ndim != 2 or transitions.shape != (place.shape[0] - 1, place.shape[1], place.shape[1]):
        raise InputError(
            f"gpu_of_expert {list(place.shape)} and transitions {list(transitions.shape)} do not belong together; wanted "
            "[layer, expert] and [layer - 1, expert, expert]"
        )
    if node_of_gpu is not None:
        place = np.asarray(node_of_gpu)[place]
    total = transitions.sum()
    if total == 0:
        return 1.0
    stays = sum(
        count[here[:, None] == there].sum() for count, here, there in zip(transitions, place, place[1:], strict=False)
    )
    return float(stays / total)
