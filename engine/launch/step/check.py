"""Does the planned step give what the unplanned one gives? A plan changes when and where, never what."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from engine.launch.step.build import text
from engine.launch.step.operators import wide
from engine.launch.step.reference import Reference, reference_step

if TYPE_CHECKING:
    from engine.launch.step.run import StepExecutor


def difference(executor: "StepExecutor") -> float | None:
    """On rank 0 the largest difference of the last step's loss, final hidden states and gradients from the reference's, of
    each tensor relative to the largest number in it (an expert is a tensor); infinite where one is not a number.

    Rank 0 computes the reference and sends every tensor to those who have it, one at a time: all copies are compared, of
    gradients that were added up too. Numbers shorter than 32 bits are compared with a reference in 32 bits.
    """
    job = executor.job
    with torch.inference_mode(False), torch.enable_grad():
        reference = _reference(executor) if job.rank == 0 else None
    with torch.inference_mode():
        worst = max(_compared(executor, reference))
        total = executor.loss.to(job.wire, torch.float64, copy=True)
        dist.all_reduce(total)
        if reference is not None:
            worst = max(worst, _relative(total, reference.loss.to(total)))
        found = torch.tensor([worst], dtype=torch.float64, device=job.wire)
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found) if job.rank == 0 else None


def _reference(executor: "StepExecutor") -> Reference:
    job, threads = executor.job, torch.get_num_threads()
    ids, targets = (torch.cat(parts) for parts in zip(*(text(job, rank) for rank in range(job.ranks)), strict=True))
    job.use_all_cores()
    try:
        return reference_step(executor.graph, executor.source, ids, targets, executor.choices, wide(job.dtype))
    finally:
        torch.set_num_threads(threads)


def _compared(executor: "StepExecutor", reference: Reference | None):
    """The difference of every tensor that this rank has."""
    job, step, model = executor.job, executor.job.spec.step, executor.job.spec.model
    like = executor.hidden.new_empty(0, dtype=wide(job.dtype))

    def from_zero(wanted: Tensor | None, shape: torch.Size, ranks: list[int]) -> Tensor | None:
        """A tensor of the reference on these ranks."""
        if job.rank == 0:
            for rank in ranks:
                if rank:
                    dist.send(wanted.to(job.wire).contiguous(), rank)
            return wanted if 0 in ranks else None
        if job.rank not in ranks:
            return None
        received = like.new_empty(shape, device=job.wire)
        dist.recv(received, 0)
        return received.to(job.device)

    for rank in range(job.ranks):
        wanted = None if reference is None else reference.hidden[rank * step.tokens : (rank + 1) * step.tokens]
        received = from_zero(wanted, (step.tokens, model.d_model), [rank])
        if received is not None:
            yield _relative(executor.hidden, received)
    everyone = list(range(job.ranks))
    for operator in executor.graph.of_phase("forward"):
        name = operator.name
        if operator.kind == "experts":
            hosts = executor.hosts[operator.layer]
            own = hosts[job.rank]
            for expert in range(model.experts):
                ranks = [rank for rank in everyone if expert in hosts[rank]]
                wanted = None if reference is None else reference.gradients[name][expert]
                received = from_zero(wanted, executor.weights[name].gradient.shape[1:], ranks)
                if received is not None:
                    yield _relative(executor.weights[name].gradient[own.index(expert)], received)
        elif name in executor.weights:
            wanted = None if reference is None else reference.gradients[name]
            received = from_zero(wanted, executor.weights[name].gradient.shape, everyone)
            yield _relative(executor.weights[name].gradient, received)


def _relative(own: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest number wanted; infinite for NaN."""
    difference, largest = float((own.to(wanted.dtype) - wanted).abs().max()), float(wanted.abs().max())
    if difference == 0:
        return 0.0
    relative = difference / largest if largest else float("inf")
    return relative if relative == relative else float("inf")
