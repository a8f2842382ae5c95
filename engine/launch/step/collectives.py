"""How a step's collectives start, whose tensors may have to pass through the host's memory."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from engine.launch.rank.communicator import page_locked
from engine.launch.rank.context import RankContext


def start_collective(
    context: RankContext, collective: Callable[..., dist.Work], tensors: Sequence[Tensor]
) -> Callable[[], object]:
    """Start a collective on tensors of the rank's device; what is returned waits until it is over, on a GPU until the current
    stream has been told to wait for it.

    Where a GPU's tensors are sent over Gloo, all of it happens in that wait, not in the way of whoever starts it: what is sent
    is copied to the host and what came from there, as a part of what the collective costs.

    collective: takes the tensors and starts; tensors: what is sent first, what is received last, of an all-reduce one for both
    """
    if context.communication_device == context.device:
        return collective(*tensors).wait

    def over() -> None:
        sent, *received = tensors
        # The first copy keeps this thread until it is complete, as Gloo waits for no stream. The second one need not: what
        # comes after it comes on the same stream.
        there = [page_locked(sent).copy_(sent), *map(page_locked, received)]
        collective(*there).wait()
        tensors[-1].copy_(there[-1], non_blocking=True)

    return over
