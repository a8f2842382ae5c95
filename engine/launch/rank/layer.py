"""One MoE layer in torch, as a rank runs it and as the unplanned reference runs it: the same arithmetic both times."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.launch.rank.instructions import POOL_STRIDE
from engine.model import MoEModel
from engine.runtime.experts import ffn


class Weights:
    """Random weights of every expert and router of a model, cut from one pool of random numbers.

    A model's experts can be tens of gigabytes; as every expert is a different window into the pool, any rank can make
    any expert from a seed, and only the experts of a rank's own layer need memory.
    """

    def __init__(self, model: MoEModel, layers: int, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        numbers = model.ffn_matrices * model.d_model * model.d_ff
        windows = POOL_STRIDE * (layers * model.experts + 1)
        generator = torch.Generator().manual_seed(seed)
        self.pool = torch.randn(numbers + windows, generator=generator, dtype=torch.float32).to(device, dtype)
        router = (layers, model.d_model, model.experts)
        self.router = torch.randn(router, generator=generator).to(device, dtype) / model.d_model**0.5

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inward [d_model, (ffn_matrices - 1) · d_ff], outward [d_ff, d_model]) of one expert, in memory of its own."""
        inward, outward = self.experts(layer, (expert,))
        return inward[0], outward[0]

    def experts(self, layer: int, experts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of several experts: [expert, d_model, (ffn_matrices - 1) · d_ff] and [expert, d_ff, d_model]."""
        m = self.model
        inward = self.pool.new_empty((len(experts), m.d_model, (m.ffn_matrices - 1) * m.d_ff))
        outward = self.pool.new_empty((len(experts), m.d_ff, m.d_model))
        for into, out, expert in zip(inward, outward, experts, strict=True):
            for span, matrix in zip(self.windows(layer, expert), (into, out), strict=True):
                matrix.copy_(self.pool[span].view_as(matrix))
        return tuple(matrices.mul_(scale) for matrices, scale in zip((inward, outward), self._scales, strict=True))

    def windows(self, layer: int, expert: int) -> tuple[slice, slice]:
        """The numbers of the pool that the inward and the outward matrix of an expert are made of."""
        m, begin = self.model, POOL_STRIDE * (layer * self.model.experts + expert)
        middle = begin + m.d_model * (m.ffn_matrices - 1) * m.d_ff
        return slice(begin, middle), slice(middle, middle + m.d_ff * m.d_model)

    def scaled_pools(self, device: str) -> list[torch.Tensor]:
        """The pool as the numbers of inward and of outward matrices, on a device."""
        return [(self.pool * scale).to(device) for scale in self._scales]

    @property
    def _scales(self) -> tuple[float, float]:
        return self.model.d_model**-0.5, self.model.d_ff**-0.5


def tokens_in(count: int, model: MoEModel, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[count, d_model]: the hidden vectors that enter the first layer, the same on every rank."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn((count, model.d_model), generator=generator).to(device, dtype)


def normalised(x: torch.Tensor) -> torch.Tensor:
    """Every row of x [token, d_model] divided by its root mean square."""
    return x * torch.rsqrt(x.float().square().mean(dim=1, keepdim=True) + 1e-6).to(x.dtype)


def gate(x: torch.Tensor, router: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised tokens [token, d_model], weights [token, k]). The router really scores all experts; the experts that
    a token takes are replayed from the recording.

    chosen: int64[token, k], -1 = none
    """
    normal = normalised(x)
    score = torch.softmax((normal @ router).float(), dim=1)
    picked = torch.where(chosen >= 0, score.gather(1, chosen.clamp(min=0)), 0.0)
    return normal, (picked / picked.sum(dim=1, keepdim=True).clamp(min=1e-9)).to(x.dtype)


class Rounding(Protocol):
    """Rounding of numbers to the format of a row."""

    def rounded(self, vectors: torch.Tensor) -> torch.Tensor:
        """[row, d_model]: these vectors as they arrive, in their own format."""


def reference(
    experts: torch.Tensor,
    model: MoEModel,
    weights: Weights,
    x: torch.Tensor,
    there: Rounding | None = None,
    back: Rounding | None = None,
) -> torch.Tensor:
    """All layers on one process without any plan: expert by expert, no exchange.

    experts: int64[token, layer, k]
    x: [token, d_model], in the format to compute in
    there, back: rounding of numbers on their way to an expert and back (default: none)
    """
    for layer in range(experts.shape[1]):
        chosen = experts[:, layer]
        normal, weight = gate(x, weights.router[layer].to(x.dtype), chosen)
        normal = normal if there is None else there.rounded(normal)
        total = x.to(torch.float32, copy=True)
        for expert in range(model.experts):
            token, choice = torch.nonzero(chosen == expert, as_tuple=True)
            if len(token):
                inward, outward = (matrix.to(x.dtype) for matrix in weights.expert(layer, expert))
                out = ffn(normal[token], inward, outward, model.ffn_matrices == 3)
                out = out if back is None else back.rounded(out)
                total.index_add_(0, token, out.float() * weight[token, choice].float()[:, None])
        x = total.to(x.dtype)
    return x


def reference_with_stops(
    model: MoEModel,
    weights: Weights,
    x: torch.Tensor,
    wires: tuple[Rounding, Rounding],
    experts: torch.Tensor,
    hosts: torch.Tensor,
    source: torch.Tensor,
    stop_of_rank: torch.Tensor,
) -> torch.Tensor:
    """As `reference`, but the outputs of a rank's experts for a token are summed up and rounded, and so are the
    sums of all ranks of a stop other than the token's own. Nothing is sent, and every choice of a token counts once.

    wires: of dispatch and combine
    experts: int64[token, layer, k]
    hosts: int64[layer, token, k], the rank of each choice
    source: int64[token]
    stop_of_rank: int64[rank]
    """
    out, back = wires
    for layer in range(experts.shape[1]):
        chosen = experts[:, layer]
        normal, weight = gate(x, weights.router[layer], chosen)
        normal, total = out.rounded(normal), x.to(torch.float32, copy=True)
        for stop in stop_of_rank.unique().tolist():
            together = torch.zeros_like(total)
            for rank in torch.nonzero(stop_of_rank == stop).flatten().tolist():
                together += back.rounded(_of_rank(layer, normal, weight, chosen, hosts[layer] == rank, model, weights))
            foreign = (stop_of_rank[source] != stop)[:, None]
            total += torch.where(foreign, back.rounded(together), together)
        x = total.to(x.dtype)
    return x


def _of_rank(
    layer: int,
    normal: torch.Tensor,
    weight: torch.Tensor,
    chosen: torch.Tensor,
    here: torch.Tensor,
    model: MoEModel,
    weights: Weights,
) -> torch.Tensor:
    """float32[token, d_model]: the weighted outputs of the choices (bool[token, k]) of one rank."""
    total = torch.zeros(normal.shape, dtype=torch.float32, device=normal.device)
    for expert in chosen[here].unique().tolist():
        token, choice = torch.nonzero((chosen == expert) & here, as_tuple=True)
        out = ffn(normal[token], *weights.expert(layer, expert), model.ffn_matrices == 3)
        total.index_add_(0, token, out.float() * weight[token, choice].float()[:, None])
    return total
