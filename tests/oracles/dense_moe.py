"""An MoE layer on one process without plan, exchange or sorting: a product for every token and expert, in 64 bits."""

import torch


def outputs(
    x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor, inward: torch.Tensor, outward: torch.Tensor
) -> torch.Tensor:
    """[token, d_model]: the weighted sums of the outputs of the chosen experts.

    x: [token, d_model]
    chosen: int64[token, k], -1 = none
    weight: [token, k]
    inward: [expert, d_model, 2 · d_ff], gates first
    outward: [expert, d_ff, d_model]
    """
    gates, values = (x @ inward).chunk(2, dim=2)
    of_experts = (torch.nn.functional.silu(gates) * values) @ outward  # [expert, token, d_model]
    mixed = (chosen[:, :, None] == torch.arange(len(inward))) * weight[:, :, None]
    return torch.einsum("te,etd->td", mixed.sum(dim=1), of_experts)
