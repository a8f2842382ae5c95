"""Products of many experts, each with rows of its own: in one kernel where PyTorch has it, else one GEMM after another.

x: [row, k], rows ordered by expert; w: [expert, k, n].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.launch.rank.layer import has_grouped_kernel
from engine.launch.step.operators import add_product


@dataclass(frozen=True, eq=False)
class Share:
    """How the rows are shared among the experts. counts: rows of each; ends: int32[expert] on the rows' device, where each
    expert's rows end."""

    counts: list[int]
    ends: Tensor


def experts(x: Tensor, w: Tensor, share: Share) -> Tensor:
    """[row, n]: every expert's rows times its matrix."""
    if _in_one_kernel(x, w):
        return torch.nn.functional.grouped_mm(x, w, offs=share.ends)
    y = x.new_empty((len(x), w.shape[2]))
    for expert, (own, to) in enumerate(zip(x.split(share.counts), y.split(share.counts), strict=True)):
        torch.mm(own, w[expert], out=to)
    return y


def experts_dx(dy: Tensor, w: Tensor, share: Share) -> Tensor:
    """[row, k]"""
    return experts(dy, w.transpose(1, 2), share)


def experts_dw(x: Tensor, dy: Tensor, share: Share, to: Tensor, fresh: bool) -> None:
    """Write the gradients [expert, k, n] to `to`, or add them to what is there."""
    if _in_one_kernel(x, to):
        gradients = torch.nn.functional.grouped_mm(x.t(), dy, offs=share.ends)
        if fresh:
            to.copy_(gradients)
        else:
            to.add_(gradients)
        return
    parts = zip(x.split(share.counts), dy.split(share.counts), strict=True)
    for expert, (own, gradient) in enumerate(parts):
        add_product(own.t(), gradient, to[expert], fresh)


def _in_one_kernel(x: Tensor, w: Tensor) -> bool:
    return len(x) > 0 and has_grouped_kernel(x.device, x.dtype, w.shape[1:])
