"""Counts of the hops of tokens from an expert of one layer to one of the next, and the share that a placement keeps.

ExFlow section IV-B works on the conditional probability of the next expert; counts carry the same information and the
weight of each expert besides, which the objective needs (its equation 8 summed over tokens is a sum over these counts).
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine.errors import InputError
from engine.result import Floats, Ints

MOST_COUNTS = 2**25
"""Counts of all tables together, a quarter of a gigabyte; searches have a few copies: 94 layers of 512 experts fit."""


def require_room(tables: int, num_experts: int) -> None:
    """Raises InputError where so many tables of hops between experts would not fit the memory."""
    if (counts := tables * num_experts**2) > MOST_COUNTS:
        raise InputError(
            f"hops between {num_experts:,} experts of {tables:,} pairs of layers are {counts:,} counts, which take more "
            f"memory than there may be (at most {MOST_COUNTS:,}); take fewer layers"
        )


def transitions(experts: NDArray[np.int16], num_experts: int, first_choice: bool = False) -> Floats:
    """Hops between the experts of consecutive layers: float64[layer - 1, expert, expert], whole numbers.

    experts: int16[token, layer, k], -1 = no choice; such a choice makes no hop.
    first_choice: count only hops between choices 0 (one a token and layer pair), as for top-1 routing. Otherwise every
        choice of a layer with every choice of the next, k x k pairs a token: with top-k routing copies of a token leave
        from all its experts, so the pair counts say which experts are used together.

    Raises InputError for another shape, an expert out of range, and tables that would not fit the memory.
    """
    experts = _checked(experts, num_experts)
    layers = experts.shape[1]
    require_room(layers - 1, num_experts)
    if first_choice:
        experts = experts[:, :, :1]
    counts = np.zeros((max(layers - 1, 0), num_experts, num_experts))
    for layer, table in enumerate(counts):
        _add_hops(table, *(np.ascontiguousarray(experts[:, at], dtype=np.int64) for at in (layer, layer + 1)))
    return counts


def _checked(experts: NDArray[np.int16], num_experts: int) -> NDArray[np.int16]:
    """As given, if they are choices of so many experts."""
    experts = np.asarray(experts)
    if experts.ndim != 3 or experts.shape[1] < 1 or experts.dtype.kind not in "iu":
        raise InputError(f"experts: wanted whole numbers [token, layer, k], not {experts.dtype} {list(experts.shape)}")
    if num_experts < 1 or (experts.size and (experts.min() < -1 or experts.max() >= num_experts)):
        raise InputError(f"experts: ids must be 0 … {num_experts - 1}, or -1 for no choice")
    return experts


@njit(cache=True, nogil=True)
def _add_hops(table: Floats, here: Ints, there: Ints) -> None:
    """Count every choice int64[token, k] of a layer with every one of the next in float64[expert, expert]."""
    for token in range(len(here)):
        for expert in here[token]:
            if expert >= 0:
                for following in there[token]:
                    if following >= 0:
                        table[expert, following] += 1.0


def executed_hops(experts: NDArray[np.int16], num_experts: int) -> tuple[Floats, Floats]:
    """The copies that context-coherent execution sends, by the experts between which they go (ExFlow §IV-A with k choices).

    A token is carried by the GPU of its first-listed expert. From there a copy goes to each of its choices in the next layer,
    and the output of each goes to the GPU of the first one of that layer, which carries the token on. So

        between: float64[layer - 1, expert, expert], first choice of a layer to every choice of the next
        within: float64[layer, expert, expert], every choice of a layer to its first one

    and a copy changes GPU where the two experts sit apart. Left out: the first layer's dispatch, which comes from the tokens'
    ranks, and the all-gather at the end, which costs every placement the same. Raises InputError as `transitions` does.

    experts: int16[token, layer, k], -1 = no choice; a token without a first choice stays where it is, and its copies of that
        layer are left out
    """
    experts = _checked(experts, num_experts)
    layers = experts.shape[1]
    require_room(2 * layers - 1, num_experts)
    between, within = (np.zeros((count, num_experts, num_experts)) for count in (layers - 1, layers))
    last = None
    for layer in range(layers):
        chosen = np.ascontiguousarray(experts[:, layer], dtype=np.int64)
        first = chosen[:, :1].copy()
        _add_hops(within[layer], chosen, first)
        if last is not None:
            _add_hops(between[layer - 1], last, chosen)
        last = first
    return between, within


def kept(gpu_of_expert: Ints, transitions: Floats, node_of_gpu: Ints | None = None) -> float:
    """Share of the hops that stay on their GPU, or with `node_of_gpu` on their node; 1 when there are no hops.

    gpu_of_expert: int[layer, expert]
    transitions: float64[layer - 1, expert, expert]
    node_of_gpu: int[gpu]

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
    stays = sum(count[here[:, None] == there].sum() for count, here, there in zip(transitions, place, place[1:], strict=False))
    return float(stays / total)
