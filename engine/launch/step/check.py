"""Does the planned step give what the unplanned one gives? A plan changes when and where, never what."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.launch.rank.context import RankContext
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


def difference(outcome: StepOutcome) -> float | None:
    """On rank 0 the largest difference of the step's loss, final hidden states and gradients from the reference's, of each
    tensor relative to the largest number in it (an expert is a tensor); infinite where one is not a number. None elsewhere.

    Rank 0 computes the reference and sends every tensor to those who have it, one at a time: all copies are compared, of
    gradients that were added up too. Numbers shorter than 32 bits are compared with a reference in 32 bits.
    """
    context = outcome.context
    with torch.inference_mode(False), torch.enable_grad():
        reference = _reference(outcome) if context.rank == 0 else None
    with torch.inference_mode():
        worst = max(_compared(outcome, reference))
        total = outcome.loss.to(context.communication_device, torch.float64, copy=True)
        dist.all_reduce(total)
        if reference is not None:
            worst = max(worst, _relative(total, reference.loss.to(total)))
        largest = torch.tensor([worst], dtype=torch.float64, device=context.communication_device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest) if context.rank == 0 else None


def _reference(outcome: StepOutcome) -> Reference:
    context, threads = outcome.context, torch.get_num_threads()
    texts = (text(context, rank) for rank in range(context.ranks))
    ids, targets = (torch.cat(parts) for parts in zip(*texts, strict=True))
    context.use_all_cores()
    try:
        return reference_step(outcome.graph, outcome.source, ids, targets, outcome.choices, wide(context.dtype))
    finally:
        torch.set_num_threads(threads)


def _compared(outcome: StepOutcome, reference: Reference | None) -> Iterator[float]:
    """The difference of every tensor that this rank has."""
    context, graph = outcome.context, outcome.graph
    step, model = context.instructions.step, context.instructions.model
    for rank in range(context.ranks):
        wanted = None if reference is None else reference.hidden[rank * step.tokens : (rank + 1) * step.tokens]
        received = _from_zero(context, wanted, torch.Size((step.tokens, model.d_model)), [rank])
        if received is not None:
            yield _relative(outcome.hidden, received)
    everyone = list(range(context.ranks))
    for operator in graph.of_phase("forward"):
        name = operator.name
        if name not in outcome.weights:
            continue
        gradient = outcome.weights[name].gradient
        wanted = None if reference is None else reference.gradients[name]
        if operator.kind != "experts":
            yield _relative(gradient, _from_zero(context, wanted, gradient.shape, everyone))
            continue
        hosts = outcome.hosts[operator.layer]
        for expert in range(model.experts):
            ranks = [rank for rank in everyone if expert in hosts[rank]]
            wanted_expert = None if wanted is None else wanted[expert]
            received = _from_zero(context, wanted_expert, gradient.shape[1:], ranks)
            if received is not None:
                yield _relative(gradient[hosts[context.rank].index(expert)], received)


def _from_zero(context: RankContext, wanted: Tensor | None, shape: torch.Size, ranks: Sequence[int]) -> Tensor | None:
    """A tensor of the reference, which rank 0 has, on these ranks; None on others."""
    if context.rank == 0:
        for rank in ranks:
            if rank:
                dist.send(wanted.to(context.communication_device).contiguous(), rank)
        return wanted if 0 in ranks else None
    if context.rank not in ranks:
        return None
    received = torch.empty(shape, dtype=wide(context.dtype), device=context.communication_device)
    dist.recv(received, 0)
    return received.to(context.device)


def _relative(own: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest number wanted; infinite for NaN."""
    difference, largest = float((own.to(wanted.dtype) - wanted).abs().max()), float(wanted.abs().max())
    if difference == 0:
        return 0.0
    relative = difference / largest if largest else float("inf")
    return relative if relative == relative else float("inf")
