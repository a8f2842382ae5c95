"""Operators of the step with their tensors, forward and backward, whole or in parts. An all-to-all only hands rows
over: the operator before it packs them, and the one after it puts them in order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.launch.step import operators as ops
from engine.launch.step.layout import Cut, Layout, Parts, Slices, Value
from engine.launch.step.operators import Share, experts, experts_dw, experts_dx
from engine.launch.step.weights import Weight
from engine.runtime.experts import activated


@dataclass(frozen=True, eq=False)
class At:
    """One part of a stretch of operators that are cut alike.

    along: "batch" or "capacity"
    tokens: the cut along the batch
    index: the part
    """

    along: str
    tokens: Slices
    index: int

    def rows(self, layout: Layout) -> Parts:
        """The rows of an exchange, cut like the stretch."""
        return layout.parts(self.along, self.tokens.count)


class Node:
    """One operator of the forward pass, and its dX and dW. `output` is its result; `gradients` are those of its
    `inputs`, one each, written by its dX."""

    def __init__(self, name: str, inputs: Sequence["Node"]) -> None:
        self.name, self.inputs = name, tuple(inputs)
        self.output = Value()
        self.gradients = tuple(Value() for _ in inputs)
        self.readers: list[Value] = []
        """The gradients of the output, one from every operator that reads it and passes one back."""
        self._kept: list[Value] = []
        self._summed = self.keep()

    def keep(self) -> Value:
        """A value that is forgotten after dX and dW."""
        self._kept.append(Value())
        return self._kept[-1]

    def cut(self, at: At) -> Cut:
        """The cut of the output in a stretch."""
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
        """A part of the gradient of the output: if several operators read it, theirs are added up at the first request,
        and kept for the other of dX and dW."""
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
        """Forget the output, when all have read it."""
        self.output.clear()

    def forget_backward(self) -> None:
        """Forget the values of `keep`, when dX and dW have both run."""
        for value in self._kept:
            value.clear()

    def forget_gradients(self) -> None:
        """Forget the gradients of the inputs, when all have read them."""
        for gradient in self.gradients:
            gradient.clear()

    def forget(self) -> None:
        """Forget everything."""
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
        gradient = self.table.gradient
        if self.table.is_first_write():
            gradient.zero_()
        gradient.index_add_(0, at.tokens.part(self.ids, at.index), self.incoming(at))


class LayerNorm(Node):
    def __init__(self, name: str, inputs: Sequence[Node]) -> None:
        super().__init__(name, inputs)
        self.mean, self.rstd = self.keep(), self.keep()

    def forward(self, at: At) -> None:
        normed, mean, rstd = ops.layer_norm(self.read(at))
        self.write(at, normed)
        self.mean.put(at.tokens, at.index, mean)
        self.rstd.put(at.tokens, at.index, rstd)

    def dx(self, at: At) -> None:
        mean, rstd = (value.get(at.tokens, at.index) for value in (self.mean, self.rstd))
        self.pass_back(at, ops.layer_norm_dx(self.incoming(at), self.read(at), mean, rstd))


class Linear(Node):
    """y = x W; `transposed`: y = x Wᵀ, for the head that shares the embedding's table."""

    def __init__(self, name: str, inputs: Sequence[Node], weight: Weight, transposed: bool = False) -> None:
        super().__init__(name, inputs)
        self.weight, self.transposed = weight, transposed

    @property
    def matrix(self) -> Tensor:
        return self.weight.value.t() if self.transposed else self.weight.value

    def factor(self, at: At) -> Tensor:
        """The input of the product with the weights."""
        return self.read(at)

    def forward(self, at: At) -> None:
        x, w = self.factor(at), self.matrix
        torch.mm(x, w, out=self.output.room(at.tokens, at.index, x, w.shape[1]))

    def factor_dx(self, at: At) -> Tensor:
        """The gradient of `factor`."""
        return torch.mm(self.incoming(at), self.matrix.t())

    def dx(self, at: At) -> None:
        self.pass_back(at, self.factor_dx(at))

    def dw(self, at: At) -> None:
        x, dy = self.factor(at), self.incoming(at)
        left, right = (dy, x) if self.transposed else (x, dy)
        ops.add_product(left.t(), right, self.weight.gradient, self.weight.is_first_write())


class Activated(Linear):
    """A product with the activated input, the second one of an FFN; other parameters as of the product."""

    def __init__(self, *parameters, gated: bool) -> None:
        super().__init__(*parameters)
        self.gated, self.activated = gated, self.keep()

    def factor(self, at: At) -> Tensor:
        return self.activated.get(self.cut(at), at.index)

    def forward(self, at: At) -> None:
        self.activated.put(self.cut(at), at.index, activated(self.read(at), self.gated))
        super().forward(at)

    def dx(self, at: At) -> None:
        self.pass_back(at, ops.activated_dx(self.factor_dx(at), self.read(at), self.gated))


class Attention(Node):
    def __init__(self, name: str, inputs: Sequence[Node], mask: Tensor, heads: int) -> None:
        super().__init__(name, inputs)
        self.mask, self.heads, self.probability = mask, heads, self.keep()

    def forward(self, at: At) -> None:
        mixed, probability = ops.attention(self.read(at), self.mask, self.heads)
        self.write(at, mixed)
        self.probability.put(at.tokens, at.index, probability)

    def dx(self, at: At) -> None:
        # Never cut: in the backward pass only operators between two all-to-alls are.
        self.pass_back(at, ops.attention_dx(self.incoming(at), self.read(at), self.probability.whole(), self.heads))


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
        self.target, self.tokens, self.log = target, tokens, self.keep()

    def forward(self, at: At) -> None:
        total, log = ops.cross_entropy(self.read(at), self.target)
        self.write(at, total / self.tokens)
        self.log.put(at.tokens, at.index, log)

    def dx(self, at: At) -> None:
        log, dtype = self.log.get(at.tokens, at.index), self.read(at).dtype
        self.pass_back(at, ops.cross_entropy_dx(log, self.target, self.tokens, dtype))


class Gate(Node):
    """The gate: its output are the weights of the chosen experts, and its input's gradient flows through these only."""

    def __init__(self, name: str, inputs: Sequence[Node], router: Weight, chosen: Tensor) -> None:
        super().__init__(name, inputs)
        self.router, self.chosen, self.scores = router, chosen, self.keep()

    def forward(self, at: At) -> None:
        weights, scores = ops.gate(self.read(at), self.router.value, at.tokens.part(self.chosen, at.index))
        self.write(at, weights)
        self.scores.put(at.tokens, at.index, scores)

    def _dlogits(self, at: At) -> Tensor:
        chosen, scores = at.tokens.part(self.chosen, at.index), self.scores.get(at.tokens, at.index)
        return ops.gate_logits_dx(self.incoming(at), scores, chosen).to(self.router.value.dtype)

    def dx(self, at: At) -> None:
        self.pass_back(at, torch.mm(self._dlogits(at), self.router.value.t()))

    def dw(self, at: At) -> None:
        ops.add_product(self.read(at).t(), self._dlogits(at), self.router.gradient, self.router.is_first_write())


class AllToAll(Node):
    """An all-to-all of rows, forward and for its gradient backward. `pack` returns the rows to send, `arrived` takes
    those received."""

    def __init__(self, name: str, inputs: Sequence[Node], layout: Layout, to_host: bool) -> None:
        super().__init__(name, inputs)
        self.layout, self.to_host = layout, to_host

    def sizes(self, at: At, backward: bool) -> tuple[list[int], list[int]]:
        """Rows to and from every rank of the group."""
        parts = at.rows(self.layout)
        sent, received = parts.sent[at.index], parts.received[at.index]
        return (sent, received) if self.to_host != backward else (received, sent)

    def known_sizes(self, at: At) -> tuple[Tensor, list[int], list[int]]:
        """The rows of the forward pass that this rank has for each expert, and how many such numbers it sends to and gets
        from every rank of the group."""
        parts, hosted = at.rows(self.layout), list(map(len, self.layout.hosted))
        own = [hosted[self.layout.me]] * len(hosted)
        return (parts.sent_sizes[at.index], hosted, own) if self.to_host else (parts.received_sizes[at.index], own, hosted)

    def pack(self, at: At, backward: bool) -> Tensor:
        raise NotImplementedError

    def arrived(self, at: At, backward: bool, rows: Tensor) -> None:
        raise NotImplementedError

    def _at_host(self, at: At, value: Value, rows: Tensor) -> None:
        """Make arrived rows a part of a value, put into the host's order when they are first read."""
        parts = at.rows(self.layout)
        value.put(parts.host, at.index, lambda: rows.index_select(0, parts.to_host[at.index]))

    def _on_wire(self, at: At, rows: Tensor) -> Tensor:
        return rows.index_select(0, at.rows(self.layout).to_transit[at.index])


class Dispatch(AllToAll):
    """Tokens to their experts; the gradient of the copies back."""

    def __init__(self, name: str, inputs: Sequence[Node], layout: Layout) -> None:
        super().__init__(name, inputs, layout, to_host=True)
        self.copies = Value()
        """The gradient of the rows at home."""

    def cut(self, at: At) -> Cut:
        return at.rows(self.layout).host

    def pack(self, at: At, backward: bool) -> Tensor:
        if backward:
            return self._on_wire(at, self.incoming(at))
        parts, source = at.rows(self.layout), self.inputs[0]
        x = self.read(at) if at.along == "batch" else source.output.whole()
        return ops.spread(x, parts.token_of_row[at.index], parts.padding[at.index])

    def arrived(self, at: At, backward: bool, rows: Tensor) -> None:
        if not backward:
            self._at_host(at, self.output, rows)
            return
        self.copies.put(at.rows(self.layout).home, at.index, rows)
        if at.index == at.tokens.count - 1:
            whole = self.layout.parts("batch", 1)
            self.gradients[0].put(
                Slices((0, self.layout.tokens)),
                0,
                lambda: ops.spread_dx(self.copies.whole(), whole.row_of_copy[0], whole.kept[0]),
            )

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self.copies.clear()


class Combine(AllToAll):
    """Experts' results back to their tokens; the gradient of the results to the experts."""

    def __init__(self, name: str, inputs: Sequence[Node], layout: Layout) -> None:
        super().__init__(name, inputs, layout, to_host=False)

    def cut(self, at: At) -> Cut:
        return at.rows(self.layout).home

    def pack(self, at: At, backward: bool) -> Tensor:
        return self.incoming(at) if backward else self._on_wire(at, self.read(at))

    def arrived(self, at: At, backward: bool, rows: Tensor) -> None:
        if backward:
            self._at_host(at, self.gradients[0], rows)
        else:
            self.write(at, rows)


class Experts(Linear):
    """The first product of all experts of this rank."""

    def __init__(self, name: str, inputs: Sequence[Node], weight: Weight, layout: Layout) -> None:
        super().__init__(name, inputs, weight)
        self.layout = layout

    def cut(self, at: At) -> Cut:
        return at.rows(self.layout).host

    def share(self, at: At) -> Share:
        """The division of the rows among the experts."""
        return at.rows(self.layout).rows[at.index]

    def forward(self, at: At) -> None:
        self.write(at, experts(self.factor(at), self.weight.value, self.share(at)))

    def factor_dx(self, at: At) -> Tensor:
        return experts_dx(self.incoming(at), self.weight.value, self.share(at))

    def dw(self, at: At) -> None:
        fresh = self.weight.is_first_write()
        experts_dw(self.factor(at), self.incoming(at), self.share(at), self.weight.gradient, fresh)


class ActivatedExperts(Activated, Experts):
    """The second product, of the activated first."""


class Aggregate(Node):
    """Copies back to tokens, weighed by the gate; reads the combine and the gate."""

    def __init__(self, name: str, inputs: Sequence[Node], layout: Layout) -> None:
        super().__init__(name, inputs)
        self.layout = layout

    def forward(self, at: At) -> None:
        parts, rows, weights = at.rows(self.layout), self.read(at), self.read(at, 1)
        self.write(at, ops.aggregate(rows, weights, parts.row_of_copy[at.index], parts.kept[at.index]))

    def dx(self, at: At) -> None:
        parts, rows, weights = at.rows(self.layout), self.read(at), self.read(at, 1)
        dy, layout = self.incoming(at), self.layout
        token, padding = parts.token_of_row[at.index], parts.padding[at.index]
        self.pass_back(at, ops.aggregate_dx(dy, weights, token, layout.copy_of_row, padding))
        self.pass_back(at, ops.aggregate_dweights(dy, rows, parts.row_of_copy[at.index], parts.kept[at.index]), 1)
