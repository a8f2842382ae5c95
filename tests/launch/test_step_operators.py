"""Operators of a step on rows, some empty and some copies dropped, against PyTorch's gradients in 64 bits, and sums in short
numbers. `test_step` has all operators together."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.launch.step import operators as ops
from engine.launch.step.operators import Share, experts, experts_dw, experts_dx

SEEDS = range(3)
FLOAT = torch.float64


def random_tensors(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=FLOAT) for shape in shapes]


def by_autograd(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def same(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_gate(seed, k):
    x, router, dweights = random_tensors(seed, (9, 6), (6, 5), (9, k))
    rng = np.random.default_rng(seed)
    chosen = torch.from_numpy(np.argsort(rng.random((9, 5)), axis=1)[:, :k].copy())
    chosen[rng.random(9) < 0.3, k - 1] = -1
    chosen[0] = -1

    def weights(x: Tensor, router: Tensor) -> Tensor:
        picked = torch.softmax(x @ router, dim=1).gather(1, chosen.clamp(min=0)) * (chosen >= 0)
        return picked if k == 1 else picked / picked.sum(dim=1, keepdim=True).clamp(min=1e-300)

    wanted, dx, drouter = by_autograd(weights, dweights, x, router)
    gates, scores = ops.gate(x, router, chosen)
    same(gates, wanted)
    dlogits = ops.gate_logits_dx(dweights, scores, chosen)
    same(dlogits @ router.t(), dx)
    same(x.t() @ dlogits, drouter)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [1, 2])
def test_rows_of_tokens_and_back(seed, k):
    """Sending copies, with empty rows between them and some dropped, and adding them up again."""
    rng = np.random.default_rng(seed)
    tokens, width, rows = 6, 4, 6 * k + 3
    kept = torch.from_numpy(rng.random((tokens, k)) < 0.8)
    row_of_copy = torch.from_numpy(rng.permutation(rows)[: tokens * k].reshape(tokens, k))
    row_of_copy[~kept] = 0
    used = row_of_copy[kept]
    token_of_row, copy_of_row = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    token_of_row[used] = torch.nonzero(kept)[:, 0]
    copy_of_row[used] = torch.nonzero(kept.reshape(-1))[:, 0]
    padding = torch.tensor([row for row in range(rows) if row not in used.tolist()])
    x, dy, weights = random_tensors(seed, (tokens, width), (tokens, width), (tokens, k))
    outputs, drows = random_tensors(seed + 10, (rows, width), (rows, width))

    def spread(x: Tensor) -> Tensor:
        empty = torch.zeros((rows, width), dtype=FLOAT)
        return empty.index_copy(0, used, x.index_select(0, torch.nonzero(kept)[:, 0]))

    def aggregate(outputs: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("tk,tkw->tw", weights * kept, outputs[row_of_copy])

    wanted, dx = by_autograd(spread, drows, x)
    same(ops.spread(x, token_of_row, padding), wanted)
    same(ops.spread_dx(drows, row_of_copy, kept), dx)
    wanted, doutputs, dweights = by_autograd(aggregate, dy, outputs, weights)
    same(ops.aggregate(outputs, weights, row_of_copy, kept), wanted)
    same(ops.aggregate_dx(dy, weights, token_of_row, copy_of_row, padding), doutputs)
    same(ops.aggregate_dweights(dy, outputs, row_of_copy, kept), dweights)


def test_no_rows_at_all():
    none, kept = torch.zeros((0, 4), dtype=FLOAT), torch.zeros((3, 2), dtype=torch.bool)
    rows, weights = torch.zeros((3, 2), dtype=torch.int64), torch.ones((3, 2), dtype=FLOAT)
    assert not ops.aggregate(none, weights, rows, kept).any()
    assert not ops.aggregate_dweights(torch.ones((3, 4), dtype=FLOAT), none, rows, kept).any()


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0], [7, 1, 2]])
def test_experts(counts):
    x, w, dy = random_tensors(0, (sum(counts), 5), (3, 5, 6), (sum(counts), 6))
    share = Share(counts, torch.tensor(counts).cumsum(0, dtype=torch.int32))

    def each(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([part @ own for part, own in zip(x.split(counts), w, strict=True)])

    wanted, dx, dw = by_autograd(each, dy, x, w)
    same(experts(x, w, share), wanted)
    same(experts_dx(dy, w, share), dx)
    gradient = torch.full_like(w, float("nan"))
    experts_dw(x, dy, share, gradient, fresh=True)
    same(gradient, dw)
    experts_dw(x, dy, share, gradient, fresh=False)
    same(gradient, 2 * dw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_numbers_are_added_up_in_long_ones(dtype):
    """Sums over thousands of terms, which 8 bits of a mantissa would lose."""
    logits = torch.zeros((1, 50_000), dtype=dtype)
    total, log = ops.cross_entropy(logits, torch.tensor([3]))
    assert total.dtype == torch.float32 and float(total) == pytest.approx(np.log(50_000), rel=1e-5)
    assert ops.cross_entropy_dx(log, torch.tensor([3]), 1, dtype).dtype == dtype
    weights, scores = ops.gate(torch.zeros((1, 4), dtype=dtype), torch.zeros((4, 5000), dtype=dtype), torch.tensor([[7]]))
    assert scores.dtype == weights.dtype == torch.float32 and float(weights) == pytest.approx(1 / 5000, rel=1e-5)
