"""A batch that is cut into parts, served one part after the other: the reference for the engine's parts.

Everywhere: experts: integers [token, choice], the experts of a token in order of choice, below 0 for none; masks:
bool[token, choice], whether the expert takes the token; bounds: int64[part + 1], part p is the tokens bounds[p] to
bounds[p + 1] - 1.
"""

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError
from engine.launch.step.layout import Service, checked_experts, kept


def even_bounds(tokens: int, parts: int) -> NDArray[np.int64]:
    """int64[part + 1], the bounds of `parts` parts that differ by at most one token."""
    if not 1 <= parts <= max(tokens, 1):
        raise InputError(f"{parts} parts of {tokens} tokens; wanted at least 1 and no empty part")
    return np.arange(parts + 1) * tokens // parts


def kept_by_importance(
    experts: NDArray[np.integer],
    importance: NDArray[np.float64],
    num_experts: int,
    capacity: int,
    service: Service = "token",
) -> NDArray[np.bool_]:
    """The mask of batch-prioritised routing: the most important tokens come first, equals in the order of the batch.

    importance: float64[token], usually the sum of the k largest gating scores. Raises InputError for bad input.
    """
    experts, importance = checked_experts(experts, num_experts), np.asarray(importance, dtype=np.float64)
    if importance.shape != experts.shape[:1] or np.isnan(importance).any():
        raise InputError(f"importance: wanted one number for each of the {len(experts)} tokens")
    order = np.argsort(-importance, kind="stable")
    mask = np.empty(experts.shape, dtype=bool)
    mask[order] = kept(experts[order], num_experts, capacity, service)
    return mask


def kept_by_micro_batches(
    experts: NDArray[np.integer], num_experts: int, capacity: int, bounds: NDArray[np.int64], service: Service = "token"
) -> NDArray[np.bool_]:
    """The mask when every part has its own share of the capacity, in proportion to its tokens and rounded down.

    No expert takes more tokens than of the uncut batch, mostly fewer. Raises InputError for bad input.
    """
    experts, bounds = checked_experts(experts, num_experts), _checked_bounds(bounds, len(experts))
    share = capacity * np.diff(bounds) // max(len(experts), 1)
    parts = zip(np.split(experts, bounds[1:-1]), share, strict=True)
    return np.concatenate([kept(part, num_experts, int(own), service) for part, own in parts])


def kept_with_passing(
    experts: NDArray[np.integer], num_experts: int, capacity: int, bounds: NDArray[np.int64], service: Service = "token"
) -> NDArray[np.bool_]:
    """The mask when every part gets the capacity that the parts before it have left.

    Equal to `kept` of the uncut batch for service by token, and for one choice a token. Raises InputError for bad input.
    """
    experts, bounds = checked_experts(experts, num_experts), _checked_bounds(bounds, len(experts))
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
    experts, bounds = checked_experts(experts, num_experts), _checked_bounds(bounds, len(experts))
    if mask.shape != experts.shape:
        raise InputError(f"mask: shape {mask.shape}; wanted {experts.shape}, that of experts")
    parts = len(bounds) - 1
    part = np.repeat(np.arange(parts), np.diff(bounds))[:, None]
    cell = (part * num_experts + experts)[mask]
    return np.bincount(cell, minlength=parts * num_experts).reshape(parts, num_experts)


def _checked_bounds(bounds: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """int64[part + 1] that rises from 0 to the number of tokens."""
    bounds = np.asarray(bounds, dtype=np.int64)
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or (np.diff(bounds) < 0).any():
        raise InputError(f"bounds: wanted numbers that rise from 0 to {tokens}, the number of tokens")
    return bounds
