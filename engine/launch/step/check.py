"""Comparison of a planned step with the same step without any plan: one process, the tokens of all ranks, PyTorch's own
gradients. A plan changes the time and place of work, never its result.

The reference shares with the ranks the weights, the text and the experts of every token, and none of their arithmetic.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from engine.launch.rank.context import RankContext
from engine.launch.rank.difference import Difference, allowed, relative, worst
from engine.launch.step.build import text
from engine.launch.step.layout import Choice
from engine.launch.step.operators import wide
from engine.launch.step.weights import Source, Weight
from engine.overlap.operator_graph import OperatorGraph
from engine.overlap.transformer import EMBEDDING, HEAD


@dataclass(frozen=True, eq=False)
class Reference:
    """The outcome of an unplanned step.

    loss: mean over all tokens
    hidden: [token of all ranks, d], input of the head
    gradients: {operator: gradient} of every dense weight, and of experts [expert, …]
    """

    loss: Tensor
    hidden: Tensor
    gradients: dict[str, Tensor]


def reference_step(
    graph: OperatorGraph, source: Source, ids: Tensor, targets: Tensor, choices: Sequence[Choice], dtype: torch.dtype
) -> Reference:
    """Run a step without a plan; the weights are those of the source, rounded to its own type.

    ids, targets: int64[token], rank after rank
    dtype: format to compute in
    """
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
        # Taken apart at once: taken one by one, each would have a gradient as large as all of them.
        pairs = zip(weights[f"{layer}.experts_up"].unbind(), weights[f"{layer}.experts_down"].unbind(), strict=True)
        for expert, (up, down) in enumerate(pairs):
            token, place = torch.nonzero((chosen == expert) & kept, as_tuple=True)
            out = ffn(x[token], up, down)
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


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """A rank's result of a step, and its inputs.

    hosts: {model layer: experts of every rank} of the MoE layers
    weights: {operator: weight}, with their gradients
    loss: this rank's part
    hidden: [token, d], input of the head
    """

    context: RankContext
    graph: OperatorGraph
    source: Source
    choices: Sequence[Choice]
    hosts: Mapping[int, Sequence[Sequence[int]]]
    weights: Mapping[str, Weight]
    loss: Tensor
    hidden: Tensor


@dataclass(frozen=True, eq=False)
class Shared:
    """A tensor of the step and its holders.

    name: the operator or quantity that it is a part of
    ranks: all ranks that hold a copy
    own: this rank's copy, None if it has none
    wanted: finds the tensor in a reference
    """

    name: str
    shape: torch.Size
    ranks: Sequence[int]
    own: Tensor | None
    wanted: Callable[[Reference], Tensor]


def difference(outcome: StepOutcome) -> Difference | None:
    """On rank 0 the difference of the step's loss, final hidden states and gradients from the reference's: that of the
    tensor nearest to its allowed error (an expert is a tensor). None elsewhere.

    Rank 0 computes the reference and sends every tensor to its holders, one at a time: all copies are compared, of
    gradients that were added up too. Numbers shorter than 32 bits are compared with a reference in 32 bits, see
    `engine.launch.rank.difference`.
    """
    context = outcome.context
    with torch.inference_mode(False), torch.enable_grad():
        reference = _reference(outcome, wide(context.dtype)) if context.rank == 0 else None
        bounds = [] if reference is None else list(_bounds(outcome, reference))
    with torch.inference_mode():
        total = outcome.loss.to(context.communication_device, torch.float64, copy=True)
        dist.all_reduce(total)
        tensors = list(_tensors(outcome))
        limits = torch.zeros(len(tensors), dtype=torch.float64, device=context.communication_device)
        if reference is not None:
            limits.copy_(torch.tensor(bounds[1:], dtype=torch.float64))
        dist.all_reduce(limits)
        differences = list(_compared(context, tensors, limits.tolist(), reference))
        if reference is not None:
            differences.append(Difference(relative(total, reference.loss.to(total)), bounds[0]))
        everyones: list[tuple[float, float]] = [(0.0, 1.0)] * context.ranks
        dist.all_gather_object(everyones, tuple(worst(differences)))
    return worst(Difference(*figures) for figures in everyones) if context.rank == 0 else None


def _reference(outcome: StepOutcome, dtype: torch.dtype) -> Reference:
    context, threads = outcome.context, torch.get_num_threads()
    texts = (text(context, rank) for rank in range(context.ranks))
    ids, targets = (torch.cat(parts) for parts in zip(*texts, strict=True))
    context.use_all_cores()
    try:
        return reference_step(outcome.graph, outcome.source, ids, targets, outcome.choices, dtype)
    finally:
        torch.set_num_threads(threads)


def _bounds(outcome: StepOutcome, reference: Reference) -> Iterator[float]:
    """Allowed errors of the loss and then of each of `_tensors`, on rank 0. All experts of an operator share one: for
    an expert with few tokens the few roundings cancel by luck in one computation and not in another."""
    context = outcome.context
    rounded = None if context.dtype == wide(context.dtype) else _reference(outcome, context.dtype)
    tensors = [Shared("loss", torch.Size(), [0], None, lambda whole: whole.loss), *_tensors(outcome)]
    off = dict.fromkeys((tensor.name for tensor in tensors), 0.0)
    for tensor in tensors if rounded is not None else ():
        off[tensor.name] = max(off[tensor.name], relative(tensor.wanted(rounded), tensor.wanted(reference)))
    for tensor in tensors:
        yield allowed(context.instructions.model.dtype, off[tensor.name])


def _tensors(outcome: StepOutcome) -> Iterator[Shared]:
    """The tensors compared in addition to the loss, in the same order on all ranks."""
    context, graph = outcome.context, outcome.graph
    step, model = context.instructions.step, context.instructions.model
    for rank in range(context.ranks):
        begin, end = rank * step.tokens, (rank + 1) * step.tokens
        own = outcome.hidden if rank == context.rank else None
        shape = torch.Size((step.tokens, model.d_model))
        yield Shared("hidden", shape, [rank], own, lambda whole, begin=begin, end=end: whole.hidden[begin:end])
    everyone = list(range(context.ranks))
    for operator in graph.of_phase("forward"):
        name = operator.name
        if name not in outcome.weights:
            continue
        gradient = outcome.weights[name].gradient
        if operator.kind != "experts":
            yield Shared(name, gradient.shape, everyone, gradient, lambda whole, name=name: whole.gradients[name])
            continue
        hosts = outcome.hosts[operator.layer]
        for expert in range(model.experts):
            ranks = [rank for rank in everyone if expert in hosts[rank]]
            own = gradient[hosts[context.rank].index(expert)] if context.rank in ranks else None
            yield Shared(
                name, gradient.shape[1:], ranks, own, lambda whole, name=name, expert=expert: whole.gradients[name][expert]
            )


def _compared(
    context: RankContext, tensors: Sequence[Shared], limits: Sequence[float], reference: Reference | None
) -> Iterator[Difference]:
    """The difference of every tensor that this rank has. limits: allowed error of each tensor."""
    for tensor, limit in zip(tensors, limits, strict=True):
        received = _from_zero(context, None if reference is None else tensor.wanted(reference), tensor)
        if received is not None:
            yield Difference(relative(tensor.own, received), limit)


def _from_zero(context: RankContext, wanted: Tensor | None, tensor: Shared) -> Tensor | None:
    """A tensor of the reference, which rank 0 has, on the ranks that compare it; None on others."""
    if context.rank == 0:
        for rank in tensor.ranks:
            if rank:
                dist.send(wanted.to(context.communication_device).contiguous(), rank)
        return wanted if 0 in tensor.ranks else None
    if context.rank not in tensor.ranks:
        return None
    received = torch.empty(tensor.shape, dtype=wide(context.dtype), device=context.communication_device)
    dist.recv(received, 0)
    return received.to(context.device)
