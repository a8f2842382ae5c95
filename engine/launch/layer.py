"""One MoE layer in torch, as a rank runs it and as the unplanned reference runs it: the same arithmetic both times."""

import torch

from engine.launch.spec import POOL_STRIDE
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
        m = self.model
        begin = POOL_STRIDE * (layer * m.experts + expert)
        inward = m.d_model * m.d_ff * (m.ffn_matrices - 1)
        window = self.pool[begin : begin + inward + m.d_model * m.d_ff].clone()
        into, out = window[:inward], window[inward:]
        return (
            into.view(m.d_model, -1).mul_(m.d_model**-0.5),
            out.view(m.d_ff, m.d_model).mul_(m.d_ff**-0.5),
        )  # fmt: skip


def tokens_in(count: int, model: MoEModel, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[count, d_model]: the hidden vectors that enter the first layer, the same on every rank."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn((count, model.d_model), generator=generator).to(device, dtype)


def gate(x: torch.Tensor, router: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised tokens [token, d_model], weights [token, k]). The router really scores all experts; which ones a token
    takes is replayed from the recording (chosen: int64[token, k], -1 = none)."""
    normal = x * torch.rsqrt(x.float().square().mean(dim=1, keepdim=True) + 1e-6).to(x.dtype)
    score = torch.softmax((normal @ router).float(), dim=1)
    picked = torch.where(chosen >= 0, score.gather(1, chosen.clamp(min=0)), 0.0)
    return normal, (picked / picked.sum(dim=1, keepdim=True).clamp(min=1e-9)).to(x.dtype)


def ffn(rows: torch.Tensor, inward: torch.Tensor, outward: torch.Tensor, gated: bool) -> torch.Tensor:
    """[row, d_model] through one expert: SwiGLU when gated, SiLU otherwise."""
    hidden = rows @ inward
    if gated:
        left, right = hidden.chunk(2, dim=1)
        hidden = torch.nn.functional.silu(left) * right
    else:
        hidden = torch.nn.functional.silu(hidden)
    return hidden @ outward


def aggregate(x: torch.Tensor, outputs: torch.Tensor, weight: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """x plus the weighted expert outputs. outputs: [copy, d_model], weight: [copy], token: int64[copy]."""
    return x.index_add(0, token, outputs * weight[:, None])


def reference(experts: torch.Tensor, model: MoEModel, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """All layers on one process without any plan: expert by expert, no exchange. experts: int64[token, layer, k]."""
    for layer in range(experts.shape[1]):
        chosen = experts[:, layer]
        normal, weight = gate(x, weights.router[layer], chosen)
        total = x.clone()
        for expert in range(model.experts):
            token, choice = torch.nonzero(chosen == expert, as_tuple=True)
            if len(token):
                out = ffn(normal[token], *weights.expert(layer, expert), model.ffn_matrices == 3)
                total.index_add_(0, token, out * weight[token, choice][:, None])
        x = total
    return x
