"""Experts in torch: their FFNs over rows in the order of the experts, and the weighted sum of the outputs."""

from collections.abc import Sequence

import torch

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


FEW = 256
"""Rows of an expert up to which grouped GEMMs pay on a CPU. Beyond, what stands between two products leaves the caches: with
4,096 rows of 256 numbers for each expert they took 1.2 to 1.7 times as long as one expert after another."""


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
    PyTorch's loop over the groups takes as long there as one in Python, with small experts less, and with many rows of
    each more (`FEW`)."""
    on_cpu = device.type == "cpu" and hasattr(torch.nn.functional, "grouped_mm")
    aligned = all(width * dtype.itemsize % 16 == 0 for width in widths)
    return (on_cpu and aligned) or has_grouped_kernel(device, dtype, widths)


def pay_grouped(rows: torch.Tensor, counts: Sequence[int], widths: Sequence[int]) -> bool:
    """True if rows go through their experts in grouped GEMMs: there are some, not too many of an expert on a CPU, and of a
    format that those take (not 64 bits). counts: rows of each expert; widths: see `uses_grouped_gemms`"""
    few = rows.device.type != "cpu" or len(rows) <= FEW * len(counts)
    return len(rows) > 0 and few and rows.dtype.itemsize <= 4 and uses_grouped_gemms(rows.device, rows.dtype, widths)


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
