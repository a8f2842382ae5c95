"""Which tokens an expert drops when a batch is cut into parts, and how to drop the same ones (Lancet §2.3, figure 5).

An expert takes at most `capacity` tokens of a batch, first come, first served. If every part gets its share of the
capacity (micro-batching), a part drops tokens for which another has room. With capacity passing a part gets what the
parts before it have left, and the all-to-alls become irregular.

That is exact only where the order of service is the order of the parts: token by token, each taking all its experts. A
gate that serves the first choices of the whole batch before any second choice (GShard), or tokens by their importance
(batch-prioritised routing), serves later parts before it is done with earlier ones; no capacity that is passed forwards
tells a part how much they will take, so such a gate has to see the whole batch (`operator_axes.GATES`).

Everywhere: experts: integers [token, choice], the experts of a token in order of choice, below 0 for none; masks:
bool[token, choice], whether the expert takes the token; bounds: int64[part + 1], part p is the tokens bounds[p] to
bounds[p + 1] - 1.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError

Service = Literal["token", "choice"]
"""token: a token takes all its experts before the next one does; choice: all first choices, then all second ones."""


def even_bounds(tokens: int, parts: int) -> NDArray[np.int64]:
    """int64[part + 1], the bounds of `parts` parts that differ by at most one token."""
    if not 1 <= parts <= max(tokens, 1):
        raise InputError(f"{parts} parts of {tokens} tokens; wanted at least 1 and no empty part")
    return np.arange(parts + 1) * tokens // parts


def kept(
    experts: NDArray[np.integer], num_experts: int, capacity: int | NDArray[np.int64], service: Service = "token"
) -> NDArray[np.bool_]:
    """The mask of an uncut batch; capacity: tokens, one number or int64[expert]. Raises InputError for bad input."""
    experts = _checked(experts, num_experts)
    # In the order of service, stably sorted by expert: the place within an expert's run is how many came before.
    ordered = experts.T if service == "choice" else experts
    served = ordered.ravel()
    by_expert = np.argsort(served, kind="stable")
    counts = np.bincount(served + 1, minlength=num_experts + 1)
    place = np.empty(len(served), dtype=np.int64)
    place[by_expert] = np.arange(len(served)) - np.repeat(np.cumsum(counts) - counts, counts)
    limit = np.append(np.broadcast_to(capacity, num_experts), 0)
    mask = (place < limit[served]).reshape(ordered.shape)
    return mask.T if service == "choice" else mask


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
    experts, importance = _checked(experts, num_experts), np.asarray(importance, dtype=np.float64)
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
    experts, bounds = _checked(experts, num_experts), _checked_bounds(bounds, len(experts))
    share = capacity * np.diff(bounds) // max(len(experts), 1)
    parts = zip(np.split(experts, bounds[1:-1]), share, strict=True)
    return np.concatenate([kept(part, num_experts, int(own), service) for part, own in parts])


def kept_with_passing(
    experts: NDArray[np.integer], num_experts: int, capacity: int, bounds: NDArray[np.int64], service: Service = "token"
) -> NDArray[np.bool_]:
    """The mask when every part gets the capacity that the parts before it have left.

    Equal to `kept` of the uncut batch for service by token, and for one choice a token. Raises InputError for bad input.
    """
    experts, bounds = _checked(experts, num_experts), _checked_bounds(bounds, len(experts))
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
    experts, bounds = _checked(experts, num_experts), _checked_bounds(bounds, len(experts))
    if mask.shape != experts.shape:
        raise InputError(f"mask: shape {mask.shape}; wanted {experts.shape}, that of experts")
    parts = len(bounds) - 1
    part = np.repeat(np.arange(parts), np.diff(bounds))[:, None]
    cell = (part * num_experts + experts)[mask]
    return np.bincount(cell, minlength=parts * num_experts).reshape(parts, num_experts)


def _checked(experts: NDArray[np.integer], num_experts: int) -> NDArray[np.int64]:
    """int64[token, choice] from -1 to num_experts - 1."""
    experts = np.asarray(experts)
    if experts.ndim != 2 or not np.issubdtype(experts.dtype, np.integer):
        raise InputError(f"experts: {experts.dtype} of shape {experts.shape}; wanted integers [token, choice]")
    if experts.size and experts.max() >= num_experts:
        raise InputError(f"experts: expert {experts.max()} of {num_experts}")
    return np.maximum(experts.astype(np.int64), -1)


def _checked_bounds(bounds: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """int64[part + 1] that rises from 0 to the number of tokens."""
    bounds = np.asarray(bounds, dtype=np.int64)
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or (np.diff(bounds) < 0).any():
        raise InputError(f"bounds: wanted numbers that rise from 0 to {tokens}, the number of tokens")
    return bounds
