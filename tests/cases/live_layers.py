"""Layers of a live model for `tests.runtime`: the tokens of every rank, and the experts of all."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from engine.runtime.adapters.stack import CutStack
from engine.runtime.experts import activated

TOKENS = {1: (17,), 2: (19, 6), 4: (19, 6, 0, 11)}
"""Tokens of each rank, by the number of ranks."""
WIDTH, D_FF, K = 16, 24, 3


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of some ranks, one after another.

    x, target: float32[token, d_model]; a loss is the sum of the outputs times the target
    chosen: int64[token, k]
    weight: float32[token, k]
    rank: int64[token]
    """

    x: torch.Tensor
    chosen: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    rank: torch.Tensor

    def of(self, rank: int) -> "Tokens":
        return Tokens(*(field[self.rank == rank] for field in (self.x, self.chosen, self.weight, self.target, self.rank)))


def tokens_of(ranks: int, experts: int) -> Tokens:
    """Tokens of all ranks: different experts each, some of them none, and expert 2 nowhere."""
    generator = torch.Generator().manual_seed(5)
    rank = torch.repeat_interleave(torch.arange(ranks), torch.tensor(TOKENS[ranks]))
    keys = torch.rand((len(rank), experts), generator=generator) * torch.linspace(1, 2, experts)
    keys[:, 2] = 0
    chosen = keys.argsort(dim=1, descending=True)[:, :K]
    chosen[torch.rand(chosen.shape, generator=generator) < 0.15] = -1
    x, target = torch.randn((2, len(rank), WIDTH), generator=generator)
    return Tokens(x, chosen, torch.rand(chosen.shape, generator=generator), target, rank)


def matrices_of(experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[expert, d_model, 2 · d_ff] and [expert, d_ff, d_model] of all experts."""
    generator = torch.Generator().manual_seed(6)
    inward = torch.randn((experts, WIDTH, 2 * D_FF), generator=generator) / WIDTH**0.5
    return inward, torch.randn((experts, D_FF, WIDTH), generator=generator) / D_FF**0.5


def stack_of(inward: torch.Tensor, outward: torch.Tensor) -> CutStack:
    """Gated experts with matrices like these, of given slots."""
    parameters = {"inward": nn.Parameter(inward), "outward": nn.Parameter(outward)}
    return CutStack(parameters, "inward", "outward", partial(activated, gated=True), transposed=True)
