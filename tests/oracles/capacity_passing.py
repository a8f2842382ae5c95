"""A batch that is cut into parts, served one part after the other: the reference for the engine's parts.

Everywhere: experts: integers [token, choice], the experts of a token in order of choice, below 0 for none; masks: bool[token,
choice], whether the expert takes the token; bounds: int64[part + 1], part p is the tokens bounds[p] to bounds[p + 1] - 1.
"""

import numpy as np
from numpy.typing import NDArray

from engine.launch.step.layout import Service, kept


def even_bounds(tokens: int, parts: int) -> NDArray[np.int64]:
    """int64[part + 1], the bounds of `parts` parts that differ by at most one token."""
    return np.arange(parts + 1) * tokens // parts


def kept_by_micro_batches(
    experts: NDArray[np.integer], num_experts: int, capacity: int, bounds: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The mask when every part has its own share of the capacity, in proportion to its tokens and rounded down."""
    share = capacity * np.diff(bounds) // max(len(experts), 1)
    parts = zip(np.split(experts, bounds[1:-1]), share, strict=True)
    return np.concatenate([kept(part, num_experts, int(own)) for part, own in parts])


def kept_with_passing(
    experts: NDArray[np.integer], num_experts: int, capacity: int, bounds: NDArray[np.int64], service: Service = "token"
) -> NDArray[np.bool_]:
    """The mask when every part gets the capacity that the parts before it have left.

    Equal to `kept` of the uncut batch for service by token, and for one choice a token.
    """
    left = np.full(num_experts, capacity, dtype=np.int64)
    masks = []
    for part in np.split(experts, bounds[1:-1]):
        masks.append(kept(part, num_experts, left, service))
        left = left - np.bincount(part[masks[-1]], minlength=num_experts)
    return np.concatenate(masks)


def sent(
    experts: NDArray[np.integer], mask: NDArray[np.bool_], num_experts: int, bounds: NDArray[np.int64]
) -> NDArray[np.int64]:
    """int64[part, expert], the tokens that each part sends to each expert: the sizes of its irregular all-to-all."""
    parts = zip(np.split(experts, bounds[1:-1]), np.split(mask, bounds[1:-1]), strict=True)
    return np.array([np.bincount(part[taken], minlength=num_experts) for part, taken in parts])
