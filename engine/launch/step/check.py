"""Does the planned step give what the unplanned one gives? A plan changes when and where, never what."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.launch.rank.context import RankContext
from engine.launch.rank.difference import Difference, allowed, relative, worst
from engine.launch.step.build import text
from engine.launch.step.operators import wide
from engine.launch.step.reference import Reference, reference_step
from engine.launch.step.routing import Choice
from engine.launch.step.weights import Source, Weight
from engine.overlap.operator_graph import OperatorGraph


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """What a rank has after a step, and what it was made from.

    hosts: of every MoE layer, by model layer, the experts of every rank; weights: by operator, with their gradients; loss:
    this rank's part; hidden: [token, d], what the head read
    """

    context: RankContext
    graph: OperatorGraph
    source: Source
    choices: Sequence[Choice]
    hosts: Mapping[int, Sequence[Sequence[int]]]
    weights: Mapping[str, Weight]
    loss: Tensor
    hidden: Tensor


@dataclass(frozen=True, eq=False)
class Shared:
    """A tensor of the step and who has it. name: of what it is a part; ranks: all that hold a copy; own: this rank's, None
    where it has none; wanted: finds it in a reference"""

    name: str
    shape: torch.Size
    ranks: Sequence[int]
    own: Tensor | None
    wanted: Callable[[Reference], Tensor]


def difference(outcome: StepOutcome) -> Difference | None:
    """On rank 0 how far the step's loss, final hidden states and gradients are from the reference's: of the tensor that is
    nearest to what is allowed (an expert is a tensor). None elsewhere.

    Rank 0 computes the reference and sends every tensor to those who have it, one at a time: all copies are compared, of
    gradients that were added up too. Numbers shorter than 32 bits are compared with a reference in 32 bits, see
    `engine.launch.rank.difference`.
    """
    context = outcome.context
    with torch.inference_mode(False), torch.enable_grad():
        reference = _reference(outcome, wide(context.dtype)) if context.rank == 0 else None
        bounds = [] if reference is None else list(_bounds(outcome, reference))
    with torch.inference_mode():
        total = outcome.loss.to(context.communication_device, torch.float64, copy=True)
        dist.all_reduce(total)
        tensors = list(_tensors(outcome))
        limits = torch.zeros(len(tensors), dtype=torch.float64, device=context.communication_device)
        if reference is not None:
            limits.copy_(torch.tensor(bounds[1:], dtype=torch.float64))
        dist.all_reduce(limits)
        differences = list(_compared(context, tensors, limits.tolist(), reference))
        if reference is not None:
            differences.append(Difference(relative(total, reference.loss.to(total)), bounds[0]))
        everyones: list[tuple[float, float]] = [(0.0, 1.0)] * context.ranks
        dist.all_gather_object(everyones, tuple(worst(differences)))
    return worst(Difference(*figures) for figures in everyones) if context.rank == 0 else None


def _reference(outcome: StepOutcome, dtype: torch.dtype) -> Reference:
    context, threads = outcome.context, torch.get_num_threads()
    texts = (text(context, rank) for rank in range(context.ranks))
    ids, targets = (torch.cat(parts) for parts in zip(*texts, strict=True))
    context.use_all_cores()
    try:
        return reference_step(outcome.graph, outcome.source, ids, targets, outcome.choices, dtype)
    finally:
        torch.set_num_threads(threads)


def _bounds(outcome: StepOutcome, reference: Reference) -> Iterator[float]:
    """How far the loss may be off, then each of `_tensors`, on rank 0. All experts of an operator may be off alike: of one that
    had few tokens the few roundings cancel by luck in one computation and not in another."""
    context = outcome.context
    rounded = None if context.dtype == wide(context.dtype) else _reference(outcome, context.dtype)
    tensors = [Shared("loss", torch.Size(), [0], None, lambda whole: whole.loss), *_tensors(outcome)]
    off = dict.fromkeys((tensor.name for tensor in tensors), 0.0)
    for tensor in tensors if rounded is not None else ():
        off[tensor.name] = max(off[tensor.name], relative(tensor.wanted(rounded), tensor.wanted(reference)))
    for tensor in tensors:
        yield allowed(context.instructions.model.dtype, off[tensor.name])


def _tensors(outcome: StepOutcome) -> Iterator[Shared]:
    """What is compared besides the loss, in the same order on all ranks."""
    context, graph = outcome.context, outcome.graph
    step, model = context.instructions.step, context.instructions.model
    for rank in range(context.ranks):
        begin, end = rank * step.tokens, (rank + 1) * step.tokens
        own = outcome.hidden if rank == context.rank else None
        shape = torch.Size((step.tokens, model.d_model))
        yield Shared("hidden", shape, [rank], own, lambda whole, begin=begin, end=end: whole.hidden[begin:end])
    everyone = list(range(context.ranks))
    for operator in graph.of_phase("forward"):
        name = operator.name
        if name not in outcome.weights:
            continue
        gradient = outcome.weights[name].gradient
        if operator.kind != "experts":
            yield Shared(name, gradient.shape, everyone, gradient, lambda whole, name=name: whole.gradients[name])
            continue
        hosts = outcome.hosts[operator.layer]
        for expert in range(model.experts):
            ranks = [rank for rank in everyone if expert in hosts[rank]]
            own = gradient[hosts[context.rank].index(expert)] if context.rank in ranks else None
            yield Shared(
                name,
                gradient.shape[1:],
                ranks,
                own,
                lambda whole, name=name, expert=expert: whole.gradients[name][expert],
            )


def _compared(
    context: RankContext, tensors: Sequence[Shared], limits: Sequence[float], reference: Reference | None
) -> Iterator[Difference]:
    """The difference of every tensor that this rank has. limits: of each, how far it may be off"""
    for tensor, limit in zip(tensors, limits, strict=True):
        received = _from_zero(context, None if reference is None else tensor.wanted(reference), tensor)
        if received is not None:
            yield Difference(relative(tensor.own, received), limit)


def _from_zero(context: RankContext, wanted: Tensor | None, tensor: Shared) -> Tensor | None:
    """A tensor of the reference, which rank 0 has, on the ranks that compare it; None on others."""
    if context.rank == 0:
        for rank in tensor.ranks:
            if rank:
                dist.send(wanted.to(context.communication_device).contiguous(), rank)
        return wanted if 0 in tensor.ranks else None
    if context.rank not in tensor.ranks:
        return None
    received = torch.empty(tensor.shape, dtype=wide(context.dtype), device=context.communication_device)
    dist.recv(received, 0)
    return received.to(context.device)
