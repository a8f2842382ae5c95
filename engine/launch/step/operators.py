"""The operators of a transformer on tensors: the result of each, and by hand the gradients of its input (dX) and of its
weights (dW), separately, so that a dW can run at another time than its dX, and in other parts than the forward pass:
PyTorch's own gradients are those of the parts that went forward.

Tokens are rows, whole sequences next to each other. No operator has a bias and no layer norm a weight, as in
`engine.overlap.transformer`. Softmax of gate and loss is taken in 32 bits at least; kernels of layer norm and attention
do so by themselves. The activation of an FFN (SwiGLU or SiLU, as in `engine.runtime.experts`) belongs to its second
product, which reads the first one's output; its dX is the input of the first product's dX and dW.

Products of many experts, each with rows of its own, run in one kernel where PyTorch has it, else one GEMM after
another. There x is [row, k] with rows ordered by expert, and w is [expert, k, n].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.runtime.experts import has_grouped_kernel

EPSILON = 1e-5
aten = torch.ops.aten


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to add up in: 32 bits for shorter ones."""
    return torch.promote_types(dtype, torch.float32)


def add_product(a: Tensor, b: Tensor, to: Tensor, fresh: bool) -> None:
    """Write a @ b to `to`, or add it if there is something already. Works on the gradients of weights in place."""
    if fresh:
        torch.mm(a, b, out=to)
    else:
        to.addmm_(a, b)


def layer_norm(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised [token, d], mean [token, 1], 1 / deviation [token, 1]); the last two are for the gradient."""
    return torch.native_layer_norm(x, x.shape[1:], None, None, EPSILON)


def layer_norm_dx(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    wanted = [True, False, False]
    return aten.native_layer_norm_backward(dy, x, list(x.shape[1:]), mean, rstd, None, None, wanted)[0]


def activated_dx(da: Tensor, h: Tensor, gated: bool) -> Tensor:
    """The gradient of `layer.activated`, like its input h."""
    if not gated:
        return aten.silu_backward(da, h)
    left, right = h.chunk(2, dim=1)
    return torch.cat([aten.silu_backward(da * right, left), da * torch.nn.functional.silu(left)], dim=1)


def _heads(x: Tensor, count: int, sequence: int, heads: int) -> list[Tensor]:
    """`count` tensors [sequence × head, position, width of a head] that lie side by side in x: [token, count · d]."""
    parts = x.view(-1, sequence, count, heads, x.shape[1] // count // heads).permute(2, 0, 3, 1, 4)
    return [part.reshape(-1, sequence, part.shape[-1]) for part in parts]


def _tokens(parts: list[Tensor], sequence: int, heads: int) -> Tensor:
    """The inverse of `_heads`."""
    stacked = torch.stack(parts).view(len(parts), -1, heads, sequence, parts[0].shape[-1])
    return stacked.permute(1, 3, 0, 2, 4).reshape(-1, len(parts) * heads * parts[0].shape[-1])


def causal_mask(sequence: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[position, position]: minus infinity at positions that would look ahead."""
    return torch.full((sequence, sequence), float("-inf"), dtype=dtype, device=device).triu_(1)


def attention(qkv: Tensor, mask: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(mixed [token, d], probabilities [sequence × head, position, position]) of [token, 3 · d]; mask: `causal_mask`."""
    sequence = len(mask)
    q, k, v = _heads(qkv, 3, sequence, heads)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    probability = torch.softmax(scores, dim=-1)
    return _tokens([torch.bmm(probability, v)], sequence, heads), probability


def attention_dx(dy: Tensor, qkv: Tensor, probability: Tensor, heads: int) -> Tensor:
    """Four products, two for each of the forward pass, as both factors have a gradient."""
    sequence = probability.shape[-1]
    q, k, v = _heads(qkv, 3, sequence, heads)
    (do,) = _heads(dy, 1, sequence, heads)
    dv = torch.bmm(probability.transpose(1, 2), do)
    dp = torch.bmm(do, v.transpose(1, 2))
    ds = aten._softmax_backward_data(dp, probability, -1, dp.dtype).mul_(q.shape[-1] ** -0.5)
    return _tokens([torch.bmm(ds, k), torch.bmm(ds.transpose(1, 2), q), dv], sequence, heads)


def gate(x: Tensor, router: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(weights [token, k], scores [token, expert]), both wide. Softmax scores over all experts. One choice weighs its
    score (Switch, Fedus et al. 2022, §2.1), several their scores over the sum of these (GShard, Lepikhin et al. 2021,
    §2.2), dropped or not.

    chosen: int64[token, k], the experts that a token takes, below 0 for none
    """
    scores = torch.softmax((x @ router).to(wide(x.dtype)), dim=1)
    picked = torch.where(chosen >= 0, scores.gather(1, chosen.clamp(min=0)), 0)
    return (picked if chosen.shape[1] == 1 else picked / _sum(picked)), scores


def _sum(picked: Tensor) -> Tensor:
    return picked.sum(dim=1, keepdim=True).clamp(min=torch.finfo(picked.dtype).tiny)


def gate_logits_dx(dweights: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """[token, expert], the gradient of the gate's product, from which its dX and its dW both start. Nothing flows
    through the choice itself."""
    taken = chosen >= 0
    index = chosen.clamp(min=0)
    picked = torch.where(taken, scores.gather(1, index), 0)
    dpicked = dweights
    if chosen.shape[1] > 1:
        total = _sum(picked)
        dpicked = (dweights - (dweights * picked / total).sum(dim=1, keepdim=True)) / total
    dpicked = torch.where(taken, dpicked, 0)
    through_sum = scores * (dpicked * picked).sum(dim=1, keepdim=True)
    return (-through_sum).scatter_add_(1, index, dpicked * picked)


def aggregate(rows: Tensor, weights: Tensor, row_of_copy: Tensor, kept: Tensor) -> Tensor:
    """[token, d]: the weighted sum of a token's copies.

    rows: [row, d]
    row_of_copy: int64[token, k], any row if the copy is not kept
    kept: bool[token, k]
    """
    tokens, k = row_of_copy.shape
    if not len(rows):
        return rows.new_zeros((tokens, rows.shape[1]))
    weights = (weights * kept).to(rows.dtype)
    picked = rows.index_select(0, row_of_copy.reshape(-1))
    if k == 1:
        return picked.mul_(weights)
    return torch.bmm(weights[:, None, :], picked.view(tokens, k, -1))[:, 0]


def aggregate_dx(dy: Tensor, weights: Tensor, token_of_row: Tensor, copy_of_row: Tensor, padding: Tensor) -> Tensor:
    """[row, d], the gradient of the copies.

    token_of_row, copy_of_row (token · k + choice): int64[row], any value for rows in `padding`
    padding: int64, the rows without a token
    """
    scale = weights.reshape(-1).index_select(0, copy_of_row).to(dy.dtype).index_fill_(0, padding, 0)
    return dy.index_select(0, token_of_row).mul_(scale[:, None])


def aggregate_dweights(dy: Tensor, rows: Tensor, row_of_copy: Tensor, kept: Tensor) -> Tensor:
    """[token, k] wide, the gradient of the gate's weights."""
    tokens, k = row_of_copy.shape
    if not len(rows):
        return torch.zeros((tokens, k), dtype=wide(dy.dtype), device=dy.device)
    picked = rows.index_select(0, row_of_copy.reshape(-1)).view(tokens, k, -1)
    return torch.bmm(picked, dy[:, :, None])[:, :, 0].to(wide(dy.dtype)) * kept


def spread(x: Tensor, token_of_row: Tensor, padding: Tensor) -> Tensor:
    """[row, d]: the rows that a GPU sends, zero for those without a token."""
    return x.index_select(0, token_of_row).index_fill_(0, padding, 0)


def spread_dx(drows: Tensor, row_of_copy: Tensor, kept: Tensor) -> Tensor:
    """[token, d]: the gradients of a token's copies added up."""
    return aggregate(drows, torch.ones(kept.shape, dtype=drows.dtype, device=drows.device), row_of_copy, kept)


def cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the tokens' losses, logarithms of the probabilities [token, vocabulary], wide)."""
    log = torch.log_softmax(logits, dim=1, dtype=wide(logits.dtype))
    return -log.gather(1, target[:, None]).sum(), log


def cross_entropy_dx(log: Tensor, target: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """[token, vocabulary] of the mean over `tokens` tokens; `log` is used up."""
    probability = log.exp_()
    probability.scatter_add_(1, target[:, None], probability.new_full((len(target), 1), -1.0))
    return probability.div_(tokens).to(dtype)


@dataclass(frozen=True, eq=False)
class Share:
    """The division of rows among the experts.

    counts: rows of each
    ends: int32[expert] on the rows' device, the end of each expert's rows
    """

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
    """[row, k], the gradient of the input."""
    return experts(dy, w.transpose(1, 2), share)


def experts_dw(x: Tensor, dy: Tensor, share: Share, to: Tensor, fresh: bool) -> None:
    """Write the gradients [expert, k, n] to `to`, or add them to those already there."""
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
