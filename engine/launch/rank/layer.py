"""One MoE layer in torch, as a rank runs it and as the unplanned reference runs it: the same arithmetic both times."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.launch.rank.instructions import POOL_STRIDE
from engine.model import MoEModel

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
            begin = POOL_STRIDE * (layer * m.experts + expert)
            middle = begin + into.numel()
            into.copy_(self.pool[begin:middle].view_as(into))
            out.copy_(self.pool[middle : middle + out.numel()].view_as(out))
        return inward.mul_(m.d_model**-0.5), outward.mul_(m.d_ff**-0.5)


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


def ffn(rows: torch.Tensor, inward: torch.Tensor, outward: torch.Tensor, gated: bool) -> torch.Tensor:
    """[row, d_model] through one expert: SwiGLU when gated, SiLU otherwise."""
    return activated(rows @ inward, gated) @ outward


def activated(hidden: torch.Tensor, gated: bool) -> torch.Tensor:
    """[row, d_ff] between the two products of an expert: of [row, 2 · d_ff] by SwiGLU, of [row, d_ff] by SiLU."""
    if not gated:
        return torch.nn.functional.silu(hidden)
    left, right = hidden.chunk(2, dim=1)
    return torch.nn.functional.silu(left) * right


def has_grouped_kernel(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """True if `torch.nn.functional.grouped_mm` multiplies the rows of all experts in one kernel: bf16 on a GPU of
    compute capability 9 or 10, matrices of these widths with rows that begin at multiples of 16 bytes. Otherwise
    PyTorch 2.13 loops over the groups, on a GPU after it has fetched their sizes from there
    (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""
    return (
        hasattr(torch.nn.functional, "grouped_mm")
        and device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device)[0] in (9, 10)
        and all(width % 8 == 0 for width in widths)
    )


def uses_grouped_gemms(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """True if experts with matrices of these widths compute in grouped GEMMs: if those are one kernel, and on a CPU, as
    PyTorch's loop over the groups takes as long there as one in Python, and with small experts less."""
    on_cpu = device.type == "cpu" and hasattr(torch.nn.functional, "grouped_mm")
    aligned = all(width * dtype.itemsize % 16 == 0 for width in widths)
    return (on_cpu and aligned) or has_grouped_kernel(device, dtype, widths)


def expert_ffns(
    rows: torch.Tensor,
    counts: Sequence[int],
    inward: torch.Tensor,
    outward: torch.Tensor,
    gated: bool,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """[row, d_model] through the experts that the rows belong to, in grouped GEMMs or expert by expert.

    rows: [row, d_model], ordered by expert
    counts: rows of each expert
    inward, outward: as returned by `Weights.experts`
    ends: int32[expert] on the rows' device, the end of each expert's rows, to compute in grouped GEMMs (see
        `uses_grouped_gemms`)
    """
    if ends is not None:
        grouped_mm = torch.nn.functional.grouped_mm
        return grouped_mm(activated(grouped_mm(rows, inward, offs=ends), gated), outward, offs=ends)
    outputs = torch.empty_like(rows)
    for expert, (own, out) in enumerate(zip(rows.split(counts), outputs.split(counts), strict=True)):
        torch.mm(activated(own @ inward[expert], gated), outward[expert], out=out)
    return outputs


def aggregate(x: torch.Tensor, outputs: torch.Tensor, weight: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """x plus the weighted expert outputs, summed in fp32: rounded after each one, the sum would depend on their order,
    and in bf16 visibly so.

    x: [token, d_model]
    outputs: [copy, d_model]
    weight: [copy]
    token: int64[copy]
    """
    return x.float().index_add(0, token, outputs.float() * weight.float()[:, None]).to(x.dtype)


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
