"""One model's part of a forward pass on one rank, step by step: gate, dispatch in the plan's order, expert FFNs,
combine, aggregate. Here every copy of a token travels on its own."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.communication.travel import Stops, serving_gpus
from engine.launch.rank.communicator import Communicator
from engine.launch.rank.context import RankContext
from engine.launch.rank.difference import Difference, allowed, coarsest, relative
from engine.launch.rank.layer import gate, reference, tokens_in
from engine.plan import Placement, Plan, Schedule
from engine.runtime.exchange.all_to_all import Exchange
from engine.runtime.exchange.hops import Hops
from engine.runtime.exchange.recorder import Mark
from engine.runtime.exchange.relayed import exchange_of, ordered
from engine.runtime.exchange.routes import Piece, Rows, combined, route
from engine.runtime.exchange.wire import wires_of
from engine.runtime.experts import aggregate, expert_ffns, uses_grouped_gemms

NETWORK = ("dispatch", "combine")


@dataclass(frozen=True, eq=False)
class ReadyForGate:
    """The data of a layer's gate that a rank prepares before its clock runs.

    chosen: int64[token, k] of the tokens held
    token: int64[row laid out], its index among them
    """

    chosen: torch.Tensor
    token: torch.Tensor


@dataclass(frozen=True, eq=False)
class Ready(ReadyForGate):
    """The data of a whole layer: indexes on the rank's device, the weights of the experts at work, and buffers for arriving
    rows.

    row: int64[copy computed], the row received that it is made of, in the order of the experts; the e-th expert at work
        has rows_of[e] of them
    ends: see `expert_ffns`
    token_back: int64[row that comes back], the index of its token among those held then
    result: int64[copy returned], its position in the order of the experts, where every copy is a row
    choice_back: int64[copy that comes back], where every copy is a row
    place: int64[row received, k], the positions in that order of the copies made of it, where it serves several experts
    """

    row: torch.Tensor
    rows_of: list[int]
    ends: torch.Tensor | None
    inward: torch.Tensor
    outward: torch.Tensor
    token_back: torch.Tensor
    incoming: torch.Tensor
    back: torch.Tensor
    result: torch.Tensor | None = None
    choice_back: torch.Tensor | None = None
    place: torch.Tensor | None = None


class Layers:
    """One model's MoE layers on this rank. In every layer its steps are called in the order `ready`, `gate`, `exchange`
    ("dispatch"), `ffn`, `exchange` ("combine"), `aggregate`; after the last one they `forget`.

    communicator: carries its exchanges
    number: index of the model in the plan
    wires: {exchange: `Wire`} if the plan says how tokens travel, else empty: tensors are sent as they are
    at_hand: gives the experts of a layer at work
    """

    def __init__(self, context: RankContext, plan: Plan, communicator: Communicator, number: int = 0) -> None:
        self.context, self.communicator, self.number = context, communicator, number
        self.model = (context.instructions.model, context.instructions.model_b)[number]
        self.experts, self.source = context.tokens[number].experts, context.tokens[number].source
        placement, order = ((plan.placement, plan.send_order), (plan.placement_b, plan.send_order_b))[number]
        self.layers, self.mode = self.experts.shape[1], order.mode
        self.travel = plan.travel
        self.wires = {} if plan.travel is None else dict(zip(NETWORK, wires_of(plan.travel, self.model), strict=True))
        self.number_format = coarsest(self.model, plan)
        self.weights = self.at_hand = context.weights(self.model, self.layers)
        self.home = self.homes(placement.gpu_of_expert)
        self.send_order = order
        self.routes: dict[str, list[Rows]] = {kind: [None] * self.layers for kind in NETWORK}
        self.order: dict[str, list[list[Piece] | Hops]] = {kind: [None] * self.layers for kind in NETWORK}
        for layer in range(self.layers):
            self.place(layer, placement)
        self.x: torch.Tensor | None = None
        """[token held, d_model], by the tokens' numbers: at first the input of the first layer, at last the output."""

    def place(self, layer: int, placement: Placement) -> None:
        """Send a layer's rows to where its experts are."""
        for kind, way in zip(NETWORK, self._routed(layer, placement), strict=True):
            schedule = None if self.mode == "concurrent" else getattr(self.send_order, kind)[layer]
            self.routes[kind][layer], self.order[kind][layer] = way, self._ordered(schedule, way)

    def ready_for_gate(self, layer: int) -> None:
        """Prepare the gate of a layer that is placed after it, by `settle`: until then every token has one row."""
        self.forget()
        held = self.held(layer)
        chosen = self._on_device(self.experts[held, layer].astype(np.int64))
        self._ready = ReadyForGate(chosen, torch.arange(len(held), device=self.context.device))

    def settle(self, layer: int, placement: Placement) -> None:
        """Place a layer after its gate, and prepare the rest of it while all clocks are stopped."""
        rows = self.outgoing
        self.place(layer, placement)
        self.ready(layer)
        self.outgoing = rows[self._ready.token]

    def _routed(self, layer: int, placement: Placement) -> tuple[Rows, Rows]:
        """Rows between ranks in a layer's dispatch and combine."""
        choices, hosts = self.experts[:, layer], None
        if self.travel is not None and self.travel.replicas is not None:
            hosts = serving_gpus(placement, layer, choices, self.travel, self.home[layer], Stops(np.arange(placement.gpus)))
        out = route(choices, self.home[layer], placement.share[layer], hosts)
        return out, combined(out, self.home[layer + 1])

    def _ordered(self, schedule: Schedule | None, route: Rows) -> list[Piece] | Hops:
        """All sends of an exchange."""
        tiers = self.context.instructions.tiers
        return ordered(self.mode, schedule, route.counts, None if tiers is None else tiers.network)

    @property
    def chosen(self) -> torch.Tensor:
        """int64[token, k] on this rank's device: the experts that the gate of the layer at work chose, -1 = none."""
        return self._ready.chosen

    @property
    def width(self) -> int:
        """Numbers in a row of the dispatch."""
        return self.model.d_model

    def homes(self, gpu_of_expert: np.ndarray) -> np.ndarray:
        """int64[layer + 1, token]: the rank that holds a token before every layer, and after the last one.
        gpu_of_expert: int64[layer, expert]."""
        return np.broadcast_to(self.source, (self.layers + 1, len(self.source)))

    def held(self, layer: int) -> np.ndarray:
        """int64[token]: the tokens that this rank holds before a layer."""
        return np.flatnonzero(self.home[layer] == self.context.rank)

    def begin(self) -> None:
        """Set the tokens to the beginning of a pass."""
        self.x = self.first_tokens()[self.held(0)]

    def first_tokens(self) -> torch.Tensor:
        """[token, d_model]: the input of the first layer, of all ranks."""
        return tokens_in(len(self.experts), self.model, self.context.instructions.seed, self.context.device, self.weights.dtype)

    def forget(self) -> None:
        """Let go of a layer and the rows sent in it: a GPU that holds one layer need not have room for two."""
        self._ready = self._ways = self.outgoing = self.result = None

    def ready(self, layer: int) -> None:
        """Prepare a layer while all clocks are stopped: a served model has its weights in place, here every layer
        brings its own."""
        self.forget()
        rank, out, back = self.context.rank, self.routes["dispatch"][layer], self.routes["combine"][layer]
        sent, received = out.outgoing(rank), out.incoming(rank)
        returned, arriving = back.outgoing(rank), back.incoming(rank)
        by_expert = np.argsort(out.expert[received], kind="stable")
        # A copy is known by its token and its choice, in any order of copies.
        k = self.experts.shape[2]
        computed = (out.token * k + out.choice)[received][by_expert]
        in_order = np.argsort(computed)
        result = in_order[np.searchsorted(computed, (back.token * k + back.choice)[returned], sorter=in_order)]
        self._ready = Ready(
            chosen=self._on_device(self.experts[self.held(layer), layer].astype(np.int64)),
            token=self._on_device(np.searchsorted(self.held(layer), out.token[sent])),
            row=self._on_device(by_expert),
            **self._at_work(layer, np.bincount(out.expert[received])),
            result=self._on_device(result),
            token_back=self._on_device(np.searchsorted(self.held(layer + 1), back.token[arriving])),
            choice_back=self._on_device(back.choice[arriving]),
            incoming=self._buffer("dispatch", len(received)),
            back=self._buffer("combine", len(arriving)),
        )
        self._make_ways(layer)

    def _at_work(self, layer: int, counts: np.ndarray) -> dict[str, Any]:
        """rows_of, ends, inward and outward of `Ready`. counts: int64[expert] copies computed here."""
        at_work = np.flatnonzero(counts)
        inward, outward = self.at_hand.experts(layer, at_work.tolist())
        grouped = len(at_work) and uses_grouped_gemms(
            self.context.device, self.weights.dtype, (inward.shape[2], *outward.shape[1:])
        )
        ends = self._on_device(np.cumsum(counts[at_work]).astype(np.int32)) if grouped else None
        return {"rows_of": counts[at_work].tolist(), "ends": ends, "inward": inward, "outward": outward}

    def _buffer(self, kind: str, rows: int) -> torch.Tensor:
        """Room for the rows that arrive in an exchange."""
        if kind in self.wires:
            return torch.empty((rows, self.wires[kind].bytes), dtype=torch.uint8, device=self.context.device)
        return self.x.new_empty((rows, self.width if kind == "dispatch" else self.model.d_model))

    def _packed(self, kind: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of d_model numbers as they are sent; `_unpacked` is the inverse."""
        return self.wires[kind].pack(rows) if kind in self.wires else rows

    def _unpacked(self, kind: str, rows: torch.Tensor) -> torch.Tensor:
        return self.wires[kind].unpack(rows).to(self.weights.dtype) if kind in self.wires else rows

    def _make_ways(self, layer: int) -> None:
        """The exchanges of a layer, ready to receive."""
        self._ways = {kind: self._way(kind, layer, channel) for channel, kind in enumerate(NETWORK)}
        if not self.communicator.in_host_memory:
            for kind, into in zip(NETWORK, (self._ready.incoming, self._ready.back), strict=True):
                self._ways[kind].expect(into)

    def gate(self, layer: int) -> None:
        """Score this rank's tokens and lay out the rows that it sends."""
        with self._computing("gate", layer):
            normal, self.weight = gate(self.x, self.weights.router[layer], self._ready.chosen)
            packed = self._packed("dispatch", normal)
        self.outgoing = packed[self._ready.token]

    def _way(self, kind: str, layer: int, channel: int) -> Exchange:
        row_bytes = (self.width if kind == "dispatch" else self.model.d_model) * self.model.bytes_per_number
        if kind in self.wires:
            row_bytes = float(self.wires[kind].bytes)

        def log(piece: Piece, begin: Mark) -> None:
            self.context.recorder.log_piece(kind, layer, begin, piece, row_bytes, self.number)

        return self._exchange(kind, layer, log, channel)

    def _exchange(self, kind: str, layer: int, log: Callable[[Piece, Mark], None], channel: int) -> Exchange:
        """The exchange that carries out the dispatch or combine of a layer."""
        context, group = self.context, self.communicator.group
        ends = self.order[kind][layer], context.rank, self.mode, self.routes[kind][layer].counts
        return exchange_of(*ends, log, context.recorder, group, context.links, channel)

    def exchange(self, kind: str, layer: int) -> None:
        """Carry out the dispatch or combine of a layer. The ranks have to have met."""
        recorder = self.context.recorder
        out, into = (self.outgoing, self._ready.incoming) if kind == "dispatch" else (self.result, self._ready.back)
        self.communicator.carry(
            self._ways[kind].run, out, into, lambda begin, end: recorder.log(kind, layer, begin, end, model=self.number)
        )

    def ffn(self, layer: int) -> None:
        """Run this rank's experts on all rows that came; the outputs are in the order of the combine."""
        with self._computing("ffn", layer):
            rows = self._unpacked("dispatch", self._ready.incoming)
            outputs_of_experts = self._computed(rows[self._ready.row])
            self.result = self._packed("combine", outputs_of_experts[self._ready.result])

    def _computed(self, rows: torch.Tensor) -> torch.Tensor:
        """[row, d_model]: the outputs of the experts for rows in their order."""
        gated, now = self.model.ffn_matrices == 3, self._ready
        return expert_ffns(rows, now.rows_of, now.inward, now.outward, gated, now.ends)

    def aggregate(self, layer: int) -> None:
        """Sum up the rows that came back for this rank's tokens."""
        now = self._ready
        with self._computing("aggregate", layer):
            back = self._unpacked("combine", now.back)
            self.x = aggregate(self.x, back, self.weight[now.token_back, now.choice_back], now.token_back)

    def _computing(self, kind: str, layer: int) -> contextlib.AbstractContextManager[None]:
        return self.context.recorder.computing(kind, layer, model=self.number)

    def difference(self) -> Difference | None:
        """Difference of this model alone, see `Executor.difference`."""
        context, planned = self.context, self.first_tokens()
        for rank, part in outputs(self.x, np.bincount(self.home[-1], minlength=context.ranks), context):
            planned[self._on_device(np.flatnonzero(self.home[-1] == rank))] = part.to(context.device)
        return None if context.rank else self.comparison()(planned)

    def comparison(self) -> Callable[[torch.Tensor], Difference]:
        """A function that compares outputs [token, d_model] with that of one process without a plan, see `difference`."""
        wanted, off = self.unplanned(), 0.0
        if self.model.dtype != "fp32":
            rounded, wanted = wanted, self._reference(self.first_tokens().float())
            off = relative(rounded, wanted)
        return lambda output: Difference(relative(output, wanted), allowed(self.number_format, off))

    def unplanned(self) -> torch.Tensor:
        """[token, d_model]: the output of one process without a plan, in the formats of the launch."""
        return self._reference(self.first_tokens())

    def _reference(self, first_tokens: torch.Tensor) -> torch.Tensor:
        self.context.use_all_cores()
        experts = self._on_device(self.experts.astype(np.int64))
        return reference(experts, self.model, self.weights, first_tokens, *self.wires.values())

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.context.device)


def outputs(output: torch.Tensor, counts: np.ndarray, context: RankContext) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield every rank and its output, one after another, on rank 0; nothing on the others. counts: int64[rank] rows."""
    output = output.to(context.communication_device).contiguous()
    if context.rank:
        dist.send(output, 0)
        return
    yield 0, output
    for other in range(1, context.ranks):
        part = output.new_empty((int(counts[other]), *output.shape[1:]))
        dist.recv(part, other)
        yield other, part
