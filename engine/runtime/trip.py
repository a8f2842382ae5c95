"""An exchange of vectors as a step of a computation: begun, waited for, and gone backwards by the gradients.

The gradients of a dispatch go as its combine does, in the plan's order for that one, and those of a combine as its dispatch, in
the format of the tokens. A format that rounds on the way passes gradients straight through, as if it had not rounded.
PyTorch goes backward through the steps of a rank in reverse order, so exchanges that ran in turn do so backward, on all ranks
alike.
"""

from collections.abc import Callable

import torch

from engine.runtime.exchange.wire import Wire
from engine.runtime.live import LiveExchange, Sizes

BACKWARD = {"dispatch": "combine", "combine": "dispatch"}


class Trip:
    """One exchange of a layer. `depart` begins it and `arrive` waits for it; backward, `arrive` begins and `depart` waits.

    kind: "dispatch" or "combine"
    wire: rows as bytes; None: vectors as they are
    source: int64[row sent], the vector that it is; None: each vector is one row
    place: int64[vector, many], the rows that a vector is, -1 = none

    `order` and `back`, to be set before arrival: int64[row received], the rows in the order in which they are wanted, and where
    each of them stands in that order; None: as they come, by their source.
    """

    def __init__(
        self,
        exchange: LiveExchange,
        kind: str,
        sizes: Sizes,
        wire: Wire | None = None,
        source: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
    ) -> None:
        self.exchange, self.kind, self.sizes, self.wire = exchange, kind, sizes, wire
        self.source, self.place = source, place
        self.order: torch.Tensor | None = None
        self.back: torch.Tensor | None = None
        self.wait: Callable[[], torch.Tensor] | None = None

    def depart(self, vectors: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Begin to send vectors ([vector, width]), with gate weights ([vector, weight]) if the wire has some."""
        self._dtype = vectors.dtype
        # Always a part of the computation: a rank without experts or tokens has its share in the gradients of the others.
        anchor = torch.zeros(0, requires_grad=torch.is_grad_enabled(), device=vectors.device)
        self._ticket = _Depart.apply(self, anchor, vectors, weights)

    def arrive(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[row received, width] in the format of the vectors, and float32[row received, weight] if the wire has some."""
        ticket, self._ticket = self._ticket, None
        return _Arrive.apply(self, ticket, self._dtype)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trip: Trip, anchor: torch.Tensor, vectors: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        ctx.trip, ctx.weights = trip, weights is not None
        rows = vectors if trip.wire is None else trip.wire.pack(vectors, weights)
        if trip.source is not None:
            rows = rows.index_select(0, trip.source)
        trip.wait = trip.exchange.begin(trip.kind, rows, trip.sizes)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, ticket: torch.Tensor) -> tuple:
        trip = ctx.trip
        rows, trip.wait = trip.wait(), None
        weights = None
        if ctx.weights:
            wire = Wire(trip._dtype, trip.wire.width, trip.wire.weights)
            rows, weights = wire.unpack(rows).to(trip._dtype), wire.gate_weights(rows)
        if trip.place is not None:
            rows = summed(rows, trip.place)
            weights = None if weights is None else summed(weights, trip.place)
        return None, ticket, rows, weights


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trip: Trip, ticket: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.trip = trip
        rows, trip.wait = trip.wait(), None
        weights = None
        if trip.wire is not None:
            rows, weights = (trip.wire.unpack(rows).to(dtype), trip.wire.gate_weights(rows) if trip.wire.weights else None)
        return rows if trip.order is None else rows.index_select(0, trip.order), weights

    @staticmethod
    def backward(ctx, rows: torch.Tensor, weights: torch.Tensor | None) -> tuple:
        trip = ctx.trip
        if trip.back is not None:
            rows = rows.index_select(0, trip.back)
        if weights is not None:
            rows = Wire(rows.dtype, rows.shape[1], weights.shape[1]).pack(rows, weights)
        trip.wait = trip.exchange.begin(BACKWARD[trip.kind], rows, trip.sizes.back)
        return None, rows.new_empty(0, dtype=torch.float32), None


class Spread(torch.autograd.Function):
    """[row, width]: vectors in the rows that they are, see `Trip`. Call `apply(vectors, source, place)`."""

    @staticmethod
    def forward(ctx, vectors: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.place = place
        return vectors.index_select(0, source)

    @staticmethod
    def backward(ctx, rows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return summed(rows, ctx.place), None, None


class WeightedSum(torch.autograd.Function):
    """`summed`, with gradients of rows and weights. PyTorch's own of an embedding bag take twice as long. Call `apply(rows,
    place, weight)`."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, place: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[2] else rows[:0], place, weight)
        ctx.rows = rows.shape, rows.dtype
        return summed(rows, place, weight)

    @staticmethod
    def backward(ctx, vectors: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        rows, place, weight = ctx.saved_tensors
        (count, _), dtype = ctx.rows
        taken = (place >= 0).view(-1).nonzero()[:, 0]
        entry = taken.new_empty(count).index_copy_(0, place.view(-1).index_select(0, taken), taken)  # of every row
        of_rows = vectors.index_select(0, entry // place.shape[1])
        dweight = None
        if ctx.needs_input_grad[2]:
            wide = torch.promote_types(dtype, torch.float32)
            dweight = torch.zeros_like(weight)
            dweight.view(-1).index_copy_(0, entry, (of_rows.to(wide) * rows.to(wide)).sum(dim=1).to(weight.dtype))
        return (of_rows * weight.reshape(-1).index_select(0, entry)[:, None]).to(dtype), None, dweight


def summed(rows: torch.Tensor, place: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """[vector, width]: the sum of each vector's rows, times their weights, in 32 bits at least, then in the rows' format.

    rows: [row, width]
    place: int64[vector, many], -1 = none; every row has one place
    weight: [vector, many]
    """
    if not len(rows):  # an index needs a row
        return rows.new_zeros((len(place), rows.shape[1]))
    if weight is None and place.shape[1] == 1 and len(rows) == len(place):
        return rows.index_select(0, place[:, 0])  # only another order
    exact = rows if rows.dtype == torch.float64 else rows.float()
    if len(rows) < place.numel():
        weight = torch.where(place >= 0, 1.0 if weight is None else weight, 0.0)
        place = place.clamp(min=0)
    weight = None if weight is None else weight.to(exact.dtype)
    return torch.nn.functional.embedding_bag(place, exact, mode="sum", per_sample_weights=weight).to(rows.dtype)
