"""Which tokens an expert drops (Lancet §2.3, figure 5): it takes at most `capacity` tokens of a batch, first come, first
served.

When a batch is cut into parts, capacity passing gives a part what the parts before it have left (`route_parts` of the
simulation), and the same tokens are dropped. That is exact only where the order of service is the order of the parts: token
by token, each taking all its experts. A gate that serves the first choices of the whole batch before any second choice
(GShard), or tokens by their importance (batch-prioritised routing), serves later parts before it is done with earlier ones;
no capacity that is passed forwards tells a part how much they will take, so such a gate has to see the whole batch
(`operator_axes.GATES`).
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError

Service = Literal["token", "choice"]
"""token: a token takes all its experts before the next one does; choice: all first choices, then all second ones."""


def kept(
    experts: NDArray[np.integer], num_experts: int, capacity: int | NDArray[np.int64], service: Service = "token"
) -> NDArray[np.bool_]:
    """bool[token, choice]: whether the expert takes the token, in an uncut batch.

    experts: integers [token, choice], the experts of a token in order of choice, below 0 for none; capacity: tokens, one
    number or int64[expert]. Raises InputError for bad input.
    """
    experts = checked_experts(experts, num_experts)
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


def checked_experts(experts: NDArray[np.integer], num_experts: int) -> NDArray[np.int64]:
    """int64[token, choice] from -1 to num_experts - 1. Raises InputError for anything else."""
    experts = np.asarray(experts)
    if experts.ndim != 2 or not np.issubdtype(experts.dtype, np.integer):
        raise InputError(f"experts: {experts.dtype} of shape {experts.shape}; wanted integers [token, choice]")
    if experts.size and experts.max() >= num_experts:
        raise InputError(f"experts: expert {experts.max()} of {num_experts}")
    return np.maximum(experts.astype(np.int64), -1)
