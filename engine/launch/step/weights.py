"""The weights of a step on one rank, their gradients and momentum, and the update.

A step is repeated, and every repetition must do the same work on the same numbers: its gradients are compared with
those of a reference that starts from the weights of the seed. So the update is really applied, and before the next step
the weights are made anew from the pool of random numbers, which no clock counts; no second copy of them is kept.
"""

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.launch.rank.context import RankContext
from engine.launch.rank.instructions import POOL_STRIDE
from engine.overlap.operator_graph import Operator, OperatorGraph
from engine.overlap.transformer import HEAD

LEARNING_RATE, MOMENTUM = 0.01, 0.9


class Source:
    """The source of the weights of a launch's model: any rank can make any of them. Use `source_of`."""

    def __init__(self, context: RankContext, graph: OperatorGraph) -> None:
        model, step = context.instructions.model, context.instructions.step
        forward = graph.of_phase("forward")
        dense = [operator.name for operator in forward if operator.parameters and operator.kind != "experts"]
        self.begin = {name: POOL_STRIDE * place for place, name in enumerate(dense)}
        self.model, self.step = model, step
        self.held = context.weights(model, len(model.moe_layers))
        self.parameters: dict[tuple, Parameter] = {}
        """Those of this rank by operator and experts. All executors share them: each step begins with the weights of the
        seed."""
        inner = max(step.dense_d_ff, model.shared_width)
        numbers = model.d_model * max(step.vocabulary, 3 * model.d_model, (model.ffn_matrices - 1) * inner)
        generator = torch.Generator().manual_seed(context.instructions.seed + 2)
        pool = torch.randn(numbers + POOL_STRIDE * len(dense), generator=generator)
        self.pool = pool.to(context.device, context.dtype)

    def shape(self, operator: Operator) -> tuple[int, int]:
        """Shape of the matrix of a forward operator; for experts, of one of them."""
        model, width, inward = self.model, self.model.d_model, self.model.ffn_matrices - 1
        if operator.kind == "embedding":
            return self.step.vocabulary, width
        if operator.kind == "gate":
            return width, model.experts
        if operator.kind in ("dense_ffn", "shared_experts", "experts"):
            inner = {"dense_ffn": self.step.dense_d_ff, "shared_experts": model.shared_width}
            rows = inner.get(operator.kind, model.d_ff)
            return (width, inward * rows) if operator.name.endswith("_up") else (rows, width)
        columns = {"qkv": 3 * width, "projection": width}[operator.kind]
        return width, self.step.vocabulary if operator.name == HEAD else columns

    def dense(self, operator: Operator) -> Tensor:
        """The weights of any operator but experts, in memory of their own. Scaled so that activations keep their size."""
        moe = self.model.moe_layers
        if operator.kind == "gate":
            return self.held.router[moe.index(operator.layer)].clone()
        rows, columns = self.shape(operator)
        begin = self.begin[operator.name]
        fan_in = columns if operator.kind == "embedding" else rows
        return self.pool[begin : begin + rows * columns].view(rows, columns) * fan_in**-0.5

    def is_tied(self, operator: Operator) -> bool:
        """True if an operator shares the embedding's matrix."""
        return operator.name == HEAD and self.step.tied_embeddings

    def experts(self, operator: Operator, chosen: Sequence[int]) -> Tensor:
        """[expert, …], the matrices of some experts."""
        moe = self.model.moe_layers
        both = self.held.experts(moe.index(operator.layer), chosen)
        return both[0 if operator.name.endswith("_up") else 1]


_sources: WeakKeyDictionary[RankContext, Source] = WeakKeyDictionary()


def source_of(context: RankContext, graph: OperatorGraph) -> Source:
    """The source of a launch's weights, the same one for all its executors."""
    if context not in _sources:
        _sources[context] = Source(context, graph)
    return _sources[context]


class Parameter:
    """One tensor of weights and its momentum. If the numbers are shorter than 32 bits, the update works on a copy in 32
    bits. experts: the experts of the tensor, None for any other operator."""

    def __init__(self, operator: Operator, experts: Sequence[int] | None, source: Source) -> None:
        self.operator, self.chosen, self.source = operator, experts, source
        like, shape = source.pool, source.shape(operator)
        shape = shape if experts is None else (len(experts), *shape)
        self.value = like.new_empty(shape)
        wide = torch.promote_types(like.dtype, torch.float32)
        self.momentum = like.new_empty(shape, dtype=wide)
        self.master = self.value if like.dtype == wide else like.new_empty(shape, dtype=wide)
        self.reset()

    def reset(self) -> None:
        """Restore the start: the weights of the seed, no momentum."""
        source, operator = self.source, self.operator
        if self.chosen is None:
            self.value.copy_(source.dense(operator))
        for place, expert in enumerate(self.chosen or ()):  # one by one, or all would be there twice
            self.value[place].copy_(source.experts(operator, (expert,))[0])
        if self.master is not self.value:
            self.master.copy_(self.value)
        self.momentum.zero_()
        self.changed = False

    def update(self, gradient: Tensor) -> None:
        """A step of SGD with momentum."""
        self.momentum.mul_(MOMENTUM).add_(gradient)
        self.master.add_(self.momentum, alpha=-LEARNING_RATE)
        if self.master is not self.value:
            self.value.copy_(self.master)
        self.changed = True


class Weight:
    """A parameter with one executor's gradient of it."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.gradient: Tensor | None = None
        self._written = False

    @property
    def value(self) -> Tensor:
        return self.parameter.value

    def begin(self) -> None:
        """Begin a step."""
        self._written = False
        if self.parameter.changed:
            self.parameter.reset()

    def is_first_write(self) -> bool:
        """True if nothing has been written to the gradient in this step; asked right before a write."""
        written, self._written = self._written, True
        return not written

    def update(self) -> None:
        self.parameter.update(self.gradient)


def weights_of(graph: OperatorGraph, source: Source, hosted: dict[int, list[int]]) -> dict[str, Weight]:
    """{operator: weight} of all forward operators with weights of their own. hosted: {model layer: experts of this rank}."""
    known = source.parameters
    weights: dict[str, Weight] = {}
    for operator in graph.of_phase("forward"):
        if operator.parameters and not source.is_tied(operator):
            experts = tuple(hosted[operator.layer]) if operator.kind == "experts" else None
            key = (operator.name, experts)
            if key not in known:
                known[key] = Parameter(operator, experts, source)
            weights[operator.name] = Weight(known[key])
    return weights


def lay_out_gradients(weights: dict[str, Weight], together: Iterable[Sequence[str]]) -> list[Tensor]:
    """Give all weights memory for their gradients, those that are reduced together side by side, and return the memory
    of each group, flat. together: groups of operator names."""
    buffers = []
    for names in together:
        buffer = weights[names[0]].value.new_zeros(sum(weights[name].value.numel() for name in names))
        sizes = [weights[name].value.numel() for name in names]
        for name, part in zip(names, buffer.split(sizes), strict=True):
            weights[name].gradient = part.view(weights[name].value.shape)
        buffers.append(buffer)
    for weight in weights.values():
        if weight.gradient is None:
            weight.gradient = torch.zeros_like(weight.value)
    return buffers
