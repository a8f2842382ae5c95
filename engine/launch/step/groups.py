"""The process groups of a step: all-to-alls and all-reduces never wait in line behind each other."""

from datetime import timedelta

import torch
import torch.distributed as dist

from engine.launch.rank.context import RankContext


class Groups:
    """Making them is collective. exchanging: the ranks among which this rank exchanges tokens; count: how many such groups
    there are, each of which holds every expert once, in the same order."""

    def __init__(self, context: RankContext, count: int) -> None:
        everyone, size = list(range(context.ranks)), context.ranks // count
        self.exchanging, self._all = context.groups(2)
        self._alike = self._all
        if count > 1:
            self.exchanging = self._own(
                context, [everyone[first : first + size] for first in range(0, context.ranks, size)]
            )
            self._alike = self._own(context, [everyone[first::size] for first in range(size)])
        for group in (self.exchanging, self._all, self._alike):
            dist.all_reduce(
                torch.zeros(1, device=context.communication_device), group=group
            )  # connects, which no step should pay for

    def of_gradients(self, of_experts: bool) -> dist.ProcessGroup:
        """Those who add up a gradient: all ranks, or those that have the same experts."""
        return self._alike if of_experts else self._all

    @staticmethod
    def _own(context: RankContext, blocks: list[list[int]]) -> dist.ProcessGroup:
        """The group of the block that this rank is in. All ranks make all groups, in one order."""
        groups = [dist.new_group(block, timeout=timedelta(seconds=context.instructions.limit)) for block in blocks]
        return next(group for group, block in zip(groups, blocks, strict=True) if context.rank in block)
