"""The operators of an MoE layer with their tensors. Its all-to-alls have no work of their own but to hand rows over: the
operator before an all-to-all packs what is sent, the one after it puts what came in order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.launch.step import operators as ops
from engine.launch.step.experts import Share, experts, experts_dw, experts_dx
from engine.launch.step.layout import Layout
from engine.launch.step.nodes import At, Node
from engine.launch.step.values import Cut, Slices, Value
from engine.launch.step.weights import Weight


class Gate(Node):
    """Its output are the weights of the chosen experts, its input's gradient flows through these only."""

    def __init__(self, name: str, inputs: Sequence[Node], router: Weight, chosen: Tensor) -> None:
        super().__init__(name, inputs)
        self.router, self.chosen, self.scores = router, chosen, Value()

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

    def forget_backward(self) -> None:
        super().forget_backward()
        self.scores.clear()


class AllToAll(Node):
    """An all-to-all of rows, forward and for its gradient backward. `pack` gives what is sent, `arrived` takes what came."""

    def __init__(self, name: str, inputs: Sequence[Node], layout: Layout, to_host: bool) -> None:
        super().__init__(name, inputs)
        self.layout, self.to_host = layout, to_host

    def sizes(self, at: At, backward: bool) -> tuple[list[int], list[int]]:
        """Rows to and from every rank of the group."""
        parts = at.rows(self.layout)
        sent, received = parts.sent[at.index], parts.received[at.index]
        return (sent, received) if self.to_host != backward else (received, sent)

    def pack(self, at: At, backward: bool) -> Tensor:
        raise NotImplementedError

    def arrived(self, at: At, backward: bool, rows: Tensor) -> None:
        raise NotImplementedError

    def _at_host(self, at: At, value: Value, rows: Tensor) -> None:
        """Rows that have arrived become a part of a value, in the host's order when they are first read."""
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
            self.gradients[0].put(Slices((0, self.layout.tokens)), 0, self._spread_back)

    def _spread_back(self) -> Tensor:
        whole = self.layout.parts("batch", 1)
        return ops.spread_dx(self.copies.whole(), whole.row_of_copy[0], whole.kept[0])

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


class Experts(Node):
    """The first product of all experts of this rank."""

    def __init__(self, name: str, inputs: Sequence[Node], weight: Weight, layout: Layout) -> None:
        super().__init__(name, inputs)
        self.weight, self.layout = weight, layout

    def cut(self, at: At) -> Cut:
        return at.rows(self.layout).host

    def share(self, at: At) -> Share:
        """How the experts share the rows."""
        return at.rows(self.layout).rows[at.index]

    def factor(self, at: At) -> Tensor:
        """What is multiplied by the weights."""
        return self.read(at)

    def forward(self, at: At) -> None:
        self.write(at, experts(self.factor(at), self.weight.value, self.share(at)))

    def dx(self, at: At) -> None:
        self.pass_back(at, experts_dx(self.incoming(at), self.weight.value, self.share(at)))

    def dw(self, at: At) -> None:
        fresh = self.weight.is_first_write()
        experts_dw(self.factor(at), self.incoming(at), self.share(at), self.weight.gradient, fresh)


class ActivatedExperts(Experts):
    """The second product, of the activated first."""

    def __init__(self, name: str, inputs: Sequence[Node], weight: Weight, layout: Layout, gated: bool) -> None:
        super().__init__(name, inputs, weight, layout)
        self.gated, self.activated = gated, Value()

    def factor(self, at: At) -> Tensor:
        return self.activated.get(self.cut(at), at.index)

    def forward(self, at: At) -> None:
        self.activated.put(self.cut(at), at.index, ops.activate(self.read(at), self.gated))
        super().forward(at)

    def dx(self, at: At) -> None:
        da = experts_dx(self.incoming(at), self.weight.value, self.share(at))
        self.pass_back(at, ops.activate_dx(da, self.read(at), self.gated))

    def forget_backward(self) -> None:
        super().forget_backward()
        self.activated.clear()


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
