"""Operators of the step with their tensors: what each reads and writes, forward and backward, whole or in parts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.launch.step import operators as ops
from engine.launch.step.layout import Layout, Parts
from engine.launch.step.values import Cut, Slices, Value
from engine.launch.step.weights import Weight


@dataclass(frozen=True, eq=False)
class At:
    """Which part of a stretch of operators that are cut alike. along: "batch" or "capacity"; tokens: how they are cut
    along the batch."""

    along: str
    tokens: Slices
    index: int

    def rows(self, layout: Layout) -> Parts:
        """The rows of an exchange, cut as the stretch is."""
        return layout.parts(self.along, self.tokens.count)


class Node:
    """One operator of the forward pass, and its dX and dW. `output` is what it makes; `gradients` are those of what it reads,
    one for each of `inputs`, written by its dX."""

    def __init__(self, name: str, inputs: Sequence["Node"]) -> None:
        self.name, self.inputs = name, tuple(inputs)
        self.output = Value()
        self.gradients = tuple(Value() for _ in inputs)
        self.readers: list[Value] = []
        """The gradients of the output, one from every operator that reads it and passes one back."""
        self._summed = Value()

    def cut(self, at: At) -> Cut:
        """How the output is cut in a stretch."""
        return at.tokens

    def read(self, at: At, place: int = 0) -> Tensor:
        """A part of an input."""
        node = self.inputs[place]
        return node.output.get(node.cut(at), at.index)

    def write(self, at: At, output: Tensor) -> None:
        self.output.put(self.cut(at), at.index, output)

    def pass_back(self, at: At, gradient: Tensor, place: int = 0) -> None:
        self.gradients[place].put(self.inputs[place].cut(at), at.index, gradient)

    def incoming(self, at: At) -> Tensor:
        """A part of the gradient of the output: where several operators read it, theirs are added up when it is first
        asked for, and kept for the other of dX and dW."""
        cut = self.cut(at)
        if len(self.readers) == 1:
            return self.readers[0].get(cut, at.index)
        if not self._summed.has(cut, at.index):
            total = self.readers[0].get(cut, at.index) + self.readers[1].get(cut, at.index)
            for other in self.readers[2:]:
                total += other.get(cut, at.index)
            self._summed.put(cut, at.index, total)
        return self._summed.get(cut, at.index)

    def forward(self, at: At) -> None:
        raise NotImplementedError

    def dx(self, at: At) -> None:
        raise NotImplementedError

    def dw(self, at: At) -> None:
        raise NotImplementedError

    def forget_output(self) -> None:
        """Nobody reads the output any more."""
        self.output.clear()

    def forget_backward(self) -> None:
        """dX and dW have run."""
        self._summed.clear()

    def forget_gradients(self) -> None:
        """Nobody reads the gradients of the inputs any more."""
        for gradient in self.gradients:
            gradient.clear()

    def forget(self) -> None:
        """Be as new."""
        self.forget_output()
        self.forget_backward()
        self.forget_gradients()


class Embedding(Node):
    def __init__(self, name: str, table: Weight, ids: Tensor) -> None:
        super().__init__(name, ())
        self.table, self.ids = table, ids

    def forward(self, at: At) -> None:
        self.write(at, self.table.value.index_select(0, at.tokens.part(self.ids, at.index)))

    def dw(self, at: At) -> None:
        gradient, fresh = self.table.gradient, self.table.is_first_write()
        if fresh:
            gradient.zero_()
        gradient.index_add_(0, at.tokens.part(self.ids, at.index), self.incoming(at))


class LayerNorm(Node):
    def __init__(self, name: str, inputs: Sequence[Node]) -> None:
        super().__init__(name, inputs)
        self.mean, self.rstd = Value(), Value()

    def forward(self, at: At) -> None:
        normed, mean, rstd = ops.layer_norm(self.read(at))
        self.write(at, normed)
        self.mean.put(at.tokens, at.index, mean)
        self.rstd.put(at.tokens, at.index, rstd)

    def dx(self, at: At) -> None:
        mean, rstd = (value.get(at.tokens, at.index) for value in (self.mean, self.rstd))
        self.pass_back(at, ops.layer_norm_dx(self.incoming(at), self.read(at), mean, rstd))

    def forget_backward(self) -> None:
        super().forget_backward()
        self.mean.clear()
        self.rstd.clear()


class Linear(Node):
    """y = x W; `transposed`: y = x Wᵀ, for the head that shares the embedding's table."""

    def __init__(self, name: str, inputs: Sequence[Node], weight: Weight, transposed: bool = False) -> None:
        super().__init__(name, inputs)
        self.weight, self.transposed = weight, transposed

    @property
    def matrix(self) -> Tensor:
        return self.weight.value.t() if self.transposed else self.weight.value

    def factor(self, at: At) -> Tensor:
        """What is multiplied by the weights."""
        return self.read(at)

    def forward(self, at: At) -> None:
        x, w = self.factor(at), self.matrix
        torch.mm(x, w, out=self.output.room(at.tokens, at.index, x, w.shape[1]))

    def dx(self, at: At) -> None:
        self.pass_back(at, torch.mm(self.incoming(at), self.matrix.t()))

    def dw(self, at: At) -> None:
        x, dy = self.factor(at), self.incoming(at)
        left, right = (dy, x) if self.transposed else (x, dy)
        ops.add_product(left.t(), right, self.weight.gradient, self.weight.is_first_write())


class ActivatedLinear(Linear):
    """y = act(x) W, the second product of an FFN."""

    def __init__(self, name: str, inputs: Sequence[Node], weight: Weight, gated: bool) -> None:
        super().__init__(name, inputs, weight)
        self.gated, self.activated = gated, Value()

    def factor(self, at: At) -> Tensor:
        return self.activated.get(at.tokens, at.index)

    def forward(self, at: At) -> None:
        self.activated.put(at.tokens, at.index, ops.activate(self.read(at), self.gated))
        super().forward(at)

    def dx(self, at: At) -> None:
        da = torch.mm(self.incoming(at), self.matrix.t())
        self.pass_back(at, ops.activate_dx(da, self.read(at), self.gated))

    def forget_backward(self) -> None:
        super().forget_backward()
        self.activated.clear()


class Attention(Node):
    def __init__(self, name: str, inputs: Sequence[Node], mask: Tensor, heads: int) -> None:
        super().__init__(name, inputs)
        self.mask, self.heads, self.probability = mask, heads, Value()

    def forward(self, at: At) -> None:
        mixed, probability = ops.attention(self.read(at), self.mask, self.heads)
        self.write(at, mixed)
        self.probability.put(at.tokens, at.index, probability)

    def dx(self, at: At) -> None:
        # Never cut: of the backward pass only what is between two all-to-alls is.
        self.pass_back(at, ops.attention_dx(self.incoming(at), self.read(at), self.probability.whole(), self.heads))

    def forget_backward(self) -> None:
        super().forget_backward()
        self.probability.clear()


class Residual(Node):
    def forward(self, at: At) -> None:
        total = self.read(at) + self.read(at, 1)
        for place in range(2, len(self.inputs)):
            total += self.read(at, place)
        self.write(at, total)

    def dx(self, at: At) -> None:
        gradient = self.incoming(at)
        for place in range(len(self.inputs)):
            self.pass_back(at, gradient, place)


class Loss(Node):
    """Cross entropy, its mean over all tokens of all ranks. The output is this rank's part of it."""

    def __init__(self, name: str, inputs: Sequence[Node], target: Tensor, tokens: int) -> None:
        super().__init__(name, inputs)
        self.target, self.tokens, self.log = target, tokens, Value()

    def forward(self, at: At) -> None:
        total, log = ops.cross_entropy(self.read(at), self.target)
        self.write(at, total / self.tokens)
        self.log.put(at.tokens, at.index, log)

    def dx(self, at: At) -> None:
        log, dtype = self.log.get(at.tokens, at.index), self.read(at).dtype
        self.pass_back(at, ops.cross_entropy_dx(log, self.target, self.tokens, dtype))

    def forget_backward(self) -> None:
        super().forget_backward()
        self.log.clear()
