"""The same training step without any plan: one process, the tokens of all ranks, PyTorch's own gradients.

Shares with the ranks the weights, the text and which expert takes which token, and none of their arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.launch.step.routing import Choice
from engine.launch.step.weights import Source
from engine.overlap.operator_graph import OperatorGraph
from engine.overlap.transformer import EMBEDDING, HEAD


@dataclass(frozen=True, eq=False)
class Reference:
    """loss: mean over all tokens; hidden: [token of all ranks, d], what the head reads; gradients: of every dense weight by
    operator, and of experts [expert, …]."""

    loss: Tensor
    hidden: Tensor
    gradients: dict[str, Tensor]


def reference_step(
    graph: OperatorGraph, source: Source, ids: Tensor, targets: Tensor, choices: Sequence[Choice], dtype: torch.dtype
) -> Reference:
    """ids, targets: int64[token], rank after rank; dtype: to compute in; the weights are those of the source, rounded to its
    own type."""
    model, step = source.model, source.step
    weights: dict[str, Tensor] = {}
    for operator in graph.of_phase("forward"):
        if operator.kind == "experts":
            weights[operator.name] = source.experts(operator, range(model.experts))
        elif operator.parameters and not source.is_tied(operator):
            weights[operator.name] = source.dense(operator)
    weights = {name: weight.to(dtype, copy=True).requires_grad_() for name, weight in weights.items()}

    def normed(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (model.d_model,))

    def ffn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = x @ up
        if model.ffn_matrices == 3:
            gate, value = h.chunk(2, dim=-1)
            return (functional.silu(gate) * value) @ down
        return functional.silu(h) @ down

    def attention(x: Tensor, layer: int) -> Tensor:
        qkv = (x @ weights[f"{layer}.qkv"]).view(-1, step.sequence_length, 3, step.heads, model.d_model // step.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(-1, model.d_model) @ weights[f"{layer}.projection"]

    def experts(x: Tensor, layer: int) -> Tensor:
        choice = choices[model.moe_layers.index(layer)]
        chosen, kept = (torch.from_numpy(array).to(x.device).flatten(0, 1) for array in (choice.experts, choice.kept))
        scores = functional.softmax(x @ weights[f"{layer}.gate"], dim=-1)
        weight = scores.gather(1, chosen.clamp(min=0)) * (chosen >= 0)
        if chosen.shape[1] > 1:
            weight = weight / weight.sum(dim=1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
        total = torch.zeros_like(x)
        for expert in range(model.experts):
            token, place = torch.nonzero((chosen == expert) & kept, as_tuple=True)
            out = ffn(x[token], weights[f"{layer}.experts_up"][expert], weights[f"{layer}.experts_down"][expert])
            total = total.index_add(0, token, out * weight[token, place, None])
        if model.shared_experts:
            total = total + ffn(x, weights[f"{layer}.shared_up"], weights[f"{layer}.shared_down"])
        return total

    x = functional.embedding(ids, weights[EMBEDDING])
    for layer in range(model.layers):
        x = x + attention(normed(x), layer)
        y = normed(x)
        if layer in model.moe_layers:
            x = x + experts(y, layer)
        else:
            x = x + ffn(y, weights[f"{layer}.ffn_up"], weights[f"{layer}.ffn_down"])
    hidden = normed(x)
    head = weights[EMBEDDING].t() if step.tied_embeddings else weights[HEAD]
    loss = functional.cross_entropy(hidden @ head, targets)
    loss.backward()
    return Reference(loss.detach(), hidden.detach(), {name: weight.grad for name, weight in weights.items()})
