"""A planned MoE layer of a live model on a rank, one token's trip from top to bottom.

The model's own router has chosen. A token copy goes to the rank that the plan has it served on, through the expert there,
and back, in the plan's order and by its way of travelling; at home a token's outputs are summed up by their weights. With
a pipeline degree the tokens go in parts: experts compute on one while another is on its way.
"""

from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from engine.runtime.exchange.wire import Wire
from engine.runtime.layer_plan import LayerPlan
from engine.runtime.live import LiveExchange, Sizes
from engine.runtime.trip import Spread, Trip, WeightedSum


class PlannedExperts(nn.Module):
    """The experts of a layer under a plan. Every rank of the group calls its layers in the same order, with tokens or
    without, and goes backward through them likewise.

    experts: those of `way.held`, in this order, see `engine.runtime.adapters.stack`
    way: the layer on this rank
    group: a process group of the plan's ranks; None: the one of all ranks, or none at all for a single one
    """

    def __init__(self, experts: nn.Module, way: LayerPlan, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.experts, self.way, self.exchange = experts, way, LiveExchange(way, group)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[token, d_model]: the weighted sum of the outputs of each token's experts, in the format of x.

        x: [token, d_model] of this rank
        chosen: int64[token, k] experts, -1 = none
        weight: [token, k]
        """
        way = self.way
        slot = way.slots(chosen, self.exchange.sum)
        kind = {"copies": Copies, "gpu": RowsOfRanks, "node": RowsOfNodes}[way.travel.unit]
        trips = [kind(self, x, slot, weight)]
        if way.degree > 1:
            parts = zip(*(tensor.tensor_split(way.degree) for tensor in (x, slot, weight)), strict=True)
            trips = [kind(self, *part) for part in parts]
        sizes = self.exchange.sizes(torch.stack([trip.counts for trip in trips], dim=1), trips[0].parts_of_rank)
        for trip, of_trip in zip(trips, sizes, strict=True):
            trip.sizes = of_trip
        for trip in trips[: way.ahead]:
            trip.leave()
        for part, trip in enumerate(trips):
            trip.serve()
            if part + way.ahead < way.degree:
                trips[part + way.ahead].leave()
        outputs = [trip.come_home() for trip in trips]
        return outputs[0] if way.degree == 1 else torch.cat(outputs)

    def wire(self, kind: str, x: torch.Tensor, weights: int = 0) -> Wire | None:
        """The rows of a dispatch or combine as bytes; None where they are the vectors as they are."""
        dtype = getattr(self.way.travel, kind) or x.dtype
        wire = Wire(dtype, x.shape[1], weights)
        return None if wire.dtype == x.dtype and not weights else wire


class Copies:
    """Some tokens of a rank whose copies travel one by one.

    x: [token, d_model]
    slot: int64[token, k], see `LayerPlan.slots`
    weight: [token, k]
    """

    sizes: Sizes
    """Rows between this rank and the others, known once the ranks have exchanged them."""

    def __init__(self, layer: PlannedExperts, x: torch.Tensor, slot: torch.Tensor, weight: torch.Tensor) -> None:
        self.layer, self.x, self.slot, self.weight = layer, x, slot, weight
        self.parts_of_rank = layer.way.slots_of_rank
        self.order, self.counts = by_part(slot, sum(self.parts_of_rank))

    def leave(self) -> None:
        """A copy leaves for the rank of its expert: rows by rank and slot."""
        source, self.place = rows_of(self.order, self.slot.shape, sum(self.sizes.sent))
        layer, wire = self.layer, self.layer.wire("dispatch", self.x)
        self._out = Trip(layer.exchange, "dispatch", self.sizes, wire, source, self.place)
        self._out.depart(self.x)
        self._out.order, self._out.back = in_slots(self.sizes.came, self.x.device)

    def serve(self) -> None:
        """It arrives, takes its place among the rows of its slot, goes through the expert, and leaves for home."""
        rows, _ = self._out.arrive()
        outputs = self.layer.experts(rows, self.sizes.came.sum(axis=0).tolist())
        by_slot, back, layer = self._out.order, self._out.back, self.layer
        place = None if by_slot is None else by_slot[:, None]
        self._home = Trip(layer.exchange, "combine", self.sizes.back, layer.wire("combine", self.x), back, place)
        self._home.depart(outputs.to(self.x.dtype))

    def come_home(self) -> torch.Tensor:
        """Its output is there, and is summed up with those of the token's other copies."""
        outputs, _ = self._home.arrive()
        return WeightedSum.apply(outputs, self.place, self.weight)


class RowsOfRanks:
    """Some tokens of a rank that travel once to every rank with some of their experts. A row brings the token's gate weights
    along, and apart from the row its slots; the outputs are summed up before they return. Parameters as of `Copies`."""

    def __init__(self, layer: PlannedExperts, x: torch.Tensor, slot: torch.Tensor, weight: torch.Tensor) -> None:
        self.layer, self.x, self.slot, self.weight = layer, x, slot, weight
        ranks, self.slots = layer.way.ranks, layer.way.slots_of_rank
        self.parts_of_rank = [1] * ranks
        self.order, self.counts = by_part(once(rank_of(slot, self.slots)), ranks)

    def leave(self) -> None:
        """A token leaves for every rank with some of its experts."""
        exchange, wire = self.layer.exchange, self.layer.wire("dispatch", self.x, self.slot.shape[1])
        source, self.place = rows_of(self.order, self.slot.shape, sum(self.sizes.sent))
        short = torch.int16 if sum(self.slots) < 2**15 else torch.int32
        slots = self.slot.to(short).index_select(0, source)
        self.slots_there = exchange.along(slots, self.sizes.sent, self.sizes.received)
        self._out = Trip(exchange, "dispatch", self.sizes, wire, source, self.place)
        self._out.depart(self.x, self.weight)

    def serve(self) -> None:
        """It arrives, goes through its experts here, and the sum of their outputs leaves for home."""
        layer, (rows, weight) = self.layer, self._out.arrive()
        rank, ends = layer.way.rank, [0, *accumulate(self.slots)]
        slot = self.slots_there.long() - ends[rank]
        slot = torch.where((slot >= 0) & (slot < self.slots[rank]), slot, -1)
        order, counts = by_part(slot, self.slots[rank])
        counts = counts.tolist()
        source, place = rows_of(order, slot.shape, sum(counts))
        outputs = layer.experts(Spread.apply(rows, source, place), counts)
        self._home = Trip(layer.exchange, "combine", self.sizes.back, layer.wire("combine", self.x))
        self._home.depart(WeightedSum.apply(outputs.float(), place, weight).to(self.x.dtype))

    def come_home(self) -> torch.Tensor:
        """The sums come home from all its ranks, and are summed up."""
        outputs, _ = self._home.arrive()
        return WeightedSum.apply(outputs, self.place, torch.ones_like(self.weight))


class RowsOfNodes(RowsOfRanks):
    """Some tokens of a rank that travel once to every other node with some of their experts, enter it at the rank with
    this one's place there, and go on from there to the ranks that have them, as in their own node. The outputs come the
    same way back, summed up at every stop. Parameters as of `Copies`."""

    def __init__(self, layer: PlannedExperts, x: torch.Tensor, slot: torch.Tensor, weight: torch.Tensor) -> None:
        self.layer, self.x, self.slot, self.weight = layer, x, slot, weight
        way, self.slots = layer.way, layer.way.slots_of_rank
        self.parts_of_rank = [1] * way.ranks
        node_of_slot = way.stops.of_gpu.repeat(self.slots)
        self._own = int(way.stops.of_gpu[way.rank])
        self._node = torch.from_numpy(np.append(node_of_slot, -1)).to(x.device)  # of slot -1 too
        entry = np.where(np.arange(way.stops.count) == self._own, -1, way.stops.entry[way.rank])
        entry = torch.from_numpy(np.append(entry, -1)).to(x.device)
        self.order, self.counts = by_part(entry[once(self._node[slot])], way.ranks)

    def serve(self) -> None:
        """It enters a node, and goes on from there together with those of this rank; its sums return."""
        layer, home = self.layer, len(self.x)
        rows, weight = self._out.arrive()
        slot = torch.cat([self.slot, self.slots_there.to(self.slot.dtype)])
        slot = torch.where(self._node[slot] == self._own, slot, -1)
        inside = RowsOfRanks(layer, torch.cat([self.x, rows]), slot, torch.cat([self.weight.float(), weight]))
        (inside.sizes,) = layer.exchange.sizes(inside.counts[:, None], inside.parts_of_rank)
        inside.leave()
        inside.serve()
        sums = inside.come_home()
        self._here = sums[:home]
        self._home = Trip(layer.exchange, "combine", self.sizes.back, layer.wire("combine", self.x))
        self._home.depart(sums[home:])

    def come_home(self) -> torch.Tensor:
        """The sums of other nodes come home, and join that of its own."""
        return self._here + super().come_home()


def by_part(part: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[entry], the entries of int64[…] by their part, those that have none (-1) first, and int64[part] counts."""
    flat = part.reshape(-1)
    return flat.argsort(stable=True), torch.bincount(flat + 1, minlength=parts + 1)[1:]


def rows_of(order: torch.Tensor, shape: torch.Size, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and place of `Trip` of the entries that have a part, from what `by_part` has returned for int64[token, k]."""
    order = order[len(order) - rows :]
    place = order.new_full(shape, -1)
    place.view(-1).index_copy_(0, order, torch.arange(rows, device=order.device))
    return order // shape[1], place


def in_slots(arriving: np.ndarray, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Order and back of `Trip` for rows that come by source and slot, and are wanted by slot and source; None where that is
    the same.

    arriving: int64[src, slot] rows
    """
    if min(arriving.shape) <= 1:
        return None, None
    comes = (arriving.ravel().cumsum() - arriving.ravel()).reshape(arriving.shape)
    wanted = arriving.T.ravel()
    wanted = (wanted.cumsum() - wanted).reshape(arriving.T.shape)
    rows = int(arriving.sum())

    def moved(by: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        by, counts = (torch.from_numpy(np.ascontiguousarray(table).ravel()).to(device) for table in (by, counts))
        return by.repeat_interleave(counts, output_size=rows).add_(torch.arange(rows, device=device))

    return moved(comes.T - wanted, arriving.T), moved(wanted.T - comes, arriving)


def rank_of(slot: torch.Tensor, slots_of_rank: list[int]) -> torch.Tensor:
    """int64[token, k]: the ranks of slots, -1 where there is none."""
    ends = torch.tensor(slots_of_rank, device=slot.device).cumsum(0)
    return torch.where(slot >= 0, torch.bucketize(slot, ends, right=True), -1)


def once(numbers: torch.Tensor) -> torch.Tensor:
    """int64[token, k]: the different numbers of each token, once each, ascending, and -1 in the place of others."""
    ascending = numbers.sort(dim=1).values
    again = torch.zeros_like(ascending, dtype=torch.bool)
    again[:, 1:] = ascending[:, 1:] == ascending[:, :-1]
    return torch.where(again, -1, ascending)
