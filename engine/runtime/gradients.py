"""Gradients after a backward pass under a plan: what several ranks hold is summed up, so that all of them step alike."""

import torch
import torch.distributed as dist
from torch import nn

from engine.runtime.layer import PlannedExperts
from engine.runtime.ranks import among_ranks


@among_ranks()
def reduce_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Sum up gradients, to be called between `backward` and the optimiser's step, by all ranks.

    An expert's gradient on a rank is from all tokens that were served there, of any rank; replicas sum theirs up among the
    ranks that hold them. All else is on every rank, and is summed up over all (data parallel). So gradients are those of the
    sum of the ranks' losses. A gradient that a rank does not have counts as 0. Sums go in the order of the ranks, so that
    replicas stay equal to the last bit.

    model: with layers under a plan
    group: as in `apply_plan`
    """
    if not dist.is_initialized():
        return
    planned = [module for module in model.modules() if isinstance(module, PlannedExperts)]
    for layer in planned:
        _sum_replicas(layer)
    experts = {id(parameter) for layer in planned for parameter in layer.experts.parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in experts:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=group)
            parameter.grad = gradient


def _sum_replicas(layer: PlannedExperts) -> None:
    """Exchange the gradients of the experts that two ranks both hold, and sum them up."""
    way, exchange = layer.way, layer.exchange
    if exchange.alone or way.placement.single:
        return
    held = {expert: slot for slot, expert in enumerate(way.held)}
    # Slots here of the experts that another rank holds too, in one order on both.
    common = [sorted(set(held) & set(others)) if rank != way.rank else [] for rank, others in enumerate(way.experts_of_rank)]
    slots = [[held[expert] for expert in experts] for experts in common]
    rows = [len(part) for part in slots]
    for parameter in layer.experts.parameters():
        if not parameter.requires_grad:
            continue
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts = exchange.along(own[[slot for part in slots for slot in part]], rows, rows).split(rows)
        total = torch.zeros_like(own)
        for rank, part in enumerate(parts):
            if rank == way.rank:
                total += own
            else:
                total[slots[rank]] += part
        parameter.grad = total
