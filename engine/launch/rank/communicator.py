"""How a rank's tensors reach the other ranks: over NCCL from the GPU, over Gloo from the host."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from engine.launch.rank.context import RankContext
from engine.launch.rank.recorder import Mark


class Communicator:
    """One model's way to the other ranks.

    group: the process group that it uses alone; None for the one of all ranks
    """

    def __init__(self, context: RankContext, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.device, self.recorder = group, context.device, context.recorder
        self.in_host_memory = context.device.type == "cuda" and context.instructions.backend == "gloo"
        self._nothing = torch.zeros(1, device=context.device) if context.instructions.backend == "nccl" else None

    def meet(self) -> None:
        """Go on when all ranks have done what they were given. With NCCL only the current stream waits, not the host, which
        can hand over the next kernels in the meantime."""
        if self._nothing is not None:
            dist.all_reduce(self._nothing, group=self.group)
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        dist.barrier(self.group)

    def carry(
        self,
        exchange: Callable[[torch.Tensor, torch.Tensor], None],
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
        note: Callable[[Mark, Mark], None],
    ) -> None:
        """Run an exchange of tensors that lie on this rank's device. Gloo knows only host memory: a GPU's tensors are copied
        there and back, which is a part of what the exchange costs.

        exchange: takes what to send and where to put what comes; note: called with the begin and the end of each copy.
        """
        if not self.in_host_memory:
            exchange(outgoing, incoming)
            return
        sent, received = page_locked(outgoing), page_locked(incoming)
        begin = self.recorder.mark()
        sent.copy_(outgoing, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        note(begin, self.recorder.mark())
        exchange(sent, received)
        begin = self.recorder.mark()
        incoming.copy_(received, non_blocking=True)
        note(begin, self.recorder.mark())


def page_locked(like: torch.Tensor) -> torch.Tensor:
    """Host memory of the same shape that a GPU can copy from and to by itself."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
