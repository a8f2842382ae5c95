"""The operator graph of an MoE transformer (GPT-2's layout, layer norm first), from a model, a step and a number of GPUs.

Left out, as small against the rest: the weights of layer norms and all biases (2·d_model numbers each), dropout, the balance
loss, the activation functions of FFNs and experts (fused into their products), and sorting the tokens by expert.
"""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.errors import InputError
from engine.model import MoEModel
from engine.overlap.operator_graph import Gemm, Operator, OperatorGraph, with_backward
from engine.training import TrainingStep

if TYPE_CHECKING:
    import networkx as nx

EMBEDDING, HEAD = "embedding", "head"


@functools.lru_cache(maxsize=4)  # whoever prices, simulates or draws a step asks for it again and again
def transformer_step(model: MoEModel, step: TrainingStep, gpus: int) -> OperatorGraph:
    """The operators of one training step on each of `gpus` GPUs, experts spread evenly. Sizes are those of a balanced
    routing; the effects of a recording or a placement are priced in `engine.simulate.training.pricing`."""
    if model.expert_width:
        raise InputError(f"{model.name} has latent experts, of width {model.expert_width}; no training step of such is known")
    forward = _Forward(model, step, gpus).whole()
    forward.graph["name"] = f"{model.name}, {step.batch} × {step.sequence_length} tokens on each of {gpus} GPUs"
    return with_backward(forward, model.bytes_per_number, (EMBEDDING, HEAD) if step.tied_embeddings else None)


class _Forward:
    """Builds the forward graph operator by operator."""

    def __init__(self, model: MoEModel, step: TrainingStep, gpus: int) -> None:
        import networkx as nx

        self.model, self.step, self.gpus = model, step, gpus
        self.graph = nx.DiGraph()
        self.width = model.d_model
        self.hidden = step.tokens * model.bytes_per_token
        """Bytes of the hidden state of a GPU's tokens."""

    def add(self, name: str, kind: str, layer: int, after: Iterable[str], **size) -> str:
        """Add an operator that reads the outputs of `after`; returns its name."""
        self.graph.add_node(name, operator=Operator(name=name, kind=kind, phase="forward", layer=layer, **size))
        self.graph.add_edges_from(((before, name) for before in after), gradient=True)
        return name

    def linear(self, name: str, kind: str, layer: int, after: str, k: int, n: int) -> str:
        """A linear layer over a GPU's tokens."""
        return self.add(name, kind, layer, [after], gemms=(Gemm(m=self.step.tokens, n=n, k=k),), parameters=k * n)

    def whole(self) -> "nx.DiGraph":
        vocabulary, last, moe = self.step.vocabulary, self.model.layers - 1, set(self.model.moe_layers)
        stream = self.add(EMBEDDING, "embedding", 0, (), moved=2 * self.hidden, parameters=vocabulary * self.width)
        for layer in range(self.model.layers):
            stream = self.attention(layer, stream)
            normed = self.add(f"{layer}.layer_norm_2", "layer_norm", layer, [stream], moved=2 * self.hidden)
            outputs = self.experts(layer, normed) if layer in moe else [self.dense(layer, normed)]
            stream = self.add(f"{layer}.residual_2", "residual", layer, [*outputs, stream], moved=3 * self.hidden)
        normed = self.add("layer_norm", "layer_norm", last, [stream], moved=2 * self.hidden)
        logits = self.linear(HEAD, "projection", last, normed, self.width, vocabulary)
        # Softmax and cross entropy in 32 bits: the logits are read, their probabilities written.
        moved = self.step.tokens * vocabulary * (self.model.bytes_per_number + 4)
        self.add("loss", "loss", last, [logits], moved=moved)
        return self.graph

    def attention(self, layer: int, stream: str) -> str:
        step, width = self.step, self.width
        normed = self.add(f"{layer}.layer_norm_1", "layer_norm", layer, [stream], moved=2 * self.hidden)
        qkv = self.linear(f"{layer}.qkv", "qkv", layer, normed, width, 3 * width)
        # Scores and their product with the values, all heads of all sequences in one batched kernel each; the scores go
        # through memory for the softmax.
        rows, per_head = step.tokens * step.heads, max(1, width // step.heads)
        gemms = (Gemm(m=rows, n=step.sequence_length, k=per_head), Gemm(m=rows, n=per_head, k=step.sequence_length))
        scores = rows * step.sequence_length * self.model.bytes_per_number
        attended = self.add(f"{layer}.attention", "attention", layer, [qkv], gemms=gemms, moved=2 * scores)
        projected = self.linear(f"{layer}.projection", "projection", layer, attended, width, width)
        return self.add(f"{layer}.residual_1", "residual", layer, [projected, stream], moved=3 * self.hidden)

    def dense(self, layer: int, normed: str) -> str:
        inner, inward = self.step.dense_d_ff, self.model.ffn_matrices - 1
        up = self.linear(f"{layer}.ffn_up", "dense_ffn", layer, normed, self.width, inward * inner)
        return self.linear(f"{layer}.ffn_down", "dense_ffn", layer, up, inner, self.width)

    def experts(self, layer: int, normed: str) -> list[str]:
        """Add the MoE part of a layer; returns the operators that the residual adds up."""
        model, width, inward = self.model, self.width, self.model.ffn_matrices - 1
        gate = self.linear(f"{layer}.gate", "gate", layer, normed, width, model.experts)
        copies = self.step.tokens * model.experts_per_token
        sent = copies * model.bytes_per_token
        dispatch = self.add(f"{layer}.dispatch", "dispatch", layer, [normed], sent=sent)
        self.graph.add_edge(gate, dispatch, gradient=False)  # which expert, a choice without a gradient
        own, rows = max(1, model.experts // self.gpus), max(1, round(copies * self.gpus / model.experts))
        stream = dispatch
        for name, k, n in (("experts_up", width, inward * model.d_ff), ("experts_down", model.d_ff, width)):
            gemms = (Gemm(count=own, m=rows, n=n, k=k),)
            stream = self.add(f"{layer}.{name}", "experts", layer, [stream], gemms=gemms, parameters=own * k * n)
        combine = self.add(f"{layer}.combine", "combine", layer, [stream], sent=sent)
        weighed = (model.experts_per_token + 1) * self.hidden
        outputs = [self.add(f"{layer}.aggregate", "aggregate", layer, [combine, gate], moved=weighed)]
        if model.shared_experts:
            inner = model.shared_width
            up = self.linear(f"{layer}.shared_up", "shared_experts", layer, normed, width, inward * inner)
            outputs.append(self.linear(f"{layer}.shared_down", "shared_experts", layer, up, inner, width))
        return outputs
