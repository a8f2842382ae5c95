"""One model's layers if a token goes once to every rank (`gpu` travel) or every node (`node` travel) with some of its experts.

A row brings the token's gate weights along. The rank that gets it gives it to all its experts that the token chose,
sums up their weighted outputs in fp32, and sends one row back; the token's rank sums up the rows that come back. In
`node` travel a row spreads from its entry into the node (see `engine.runtime.exchange.hops`), and the way back has a sum at
every stop: at the experts' rank, at the token's entry into their node, and at home.
"""

from collections.abc import Callable

import numpy as np
import torch

from engine.communication.travel import Stops, serving_gpus
from engine.launch.rank.communicator import Communicator
from engine.launch.rank.context import RankContext
from engine.launch.rank.layer import gate, reference_with_stops
from engine.launch.rank.layers import Layers, Ready
from engine.plan import Placement, Plan, Schedule
from engine.runtime.exchange.all_to_all import Exchange
from engine.runtime.exchange.hops import Hops, hops_of_layer
from engine.runtime.exchange.recorder import Mark
from engine.runtime.exchange.relayed import Pool, PooledExchange
from engine.runtime.exchange.routes import Piece, Rows, rows_of_ranks
from engine.runtime.layer import by_part, rows_of
from engine.runtime.trip import summed


class SharedRows(Layers):
    """One model's layers on this rank, with one row per token and rank.

    hosts: int64[token, k] of every layer, the rank of each choice, -1 = none
    stops: the entries of rows into the nodes of the ranks; here each rank is its own node
    """

    stops: Stops
    hosts: list[np.ndarray]

    def __init__(self, context: RankContext, plan: Plan, communicator: Communicator, number: int = 0) -> None:
        self.stops, self.hosts = self._stops(context), [None] * plan.placement.layers
        super().__init__(context, plan, communicator, number)

    def _stops(self, context: RankContext) -> Stops:
        return Stops(np.arange(context.ranks))

    def _routed(self, layer: int, placement: Placement) -> tuple[Rows, Rows]:
        return rows_of_ranks(self._served(layer, placement), self.source, self.context.ranks)

    def _served(self, layer: int, placement: Placement) -> np.ndarray:
        """`hosts` of a layer under a placement."""
        hosts = serving_gpus(placement, layer, self.experts[:, layer], self.travel, self.source, self.stops)
        self.hosts[layer] = hosts
        return hosts

    def _tokens(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64[row] tokens: of the rows that this rank sends in a layer, receives (and returns), and gets back."""
        rank, out, back = self.context.rank, self.routes["dispatch"][layer], self.routes["combine"][layer]
        return out.token[out.outgoing(rank)], out.token[out.incoming(rank)], back.token[back.incoming(rank)]

    def ready(self, layer: int) -> None:
        self.forget()
        sent, received, back = self._tokens(layer)
        held = self.held(layer)
        here = np.where(self.hosts[layer][received] == self.context.rank, self.experts[received, layer], -1).astype(np.int64)
        order, counts = by_part(self._on_device(here), self.model.experts)
        row, place = rows_of(order, here.shape, int(counts.sum()))
        self._ready = Ready(
            chosen=self._on_device(self.experts[held, layer].astype(np.int64)),
            token=self._on_device(np.searchsorted(held, sent)),
            row=row,
            place=place,
            **self._at_work(layer, counts.cpu().numpy()),
            token_back=self._on_device(np.searchsorted(held, back)),
            incoming=self._buffer("dispatch", len(received)),
            back=self._buffer("combine", len(back)),
        )
        self._make_ways(layer)

    def gate(self, layer: int) -> None:
        with self._computing("gate", layer):
            normal, weight = gate(self.x, self.weights.router[layer], self._ready.chosen)
            packed = self.wires["dispatch"].pack(normal, weight)
        self.outgoing = packed[self._ready.token]

    def ffn(self, layer: int) -> None:
        """Run this rank's experts on the rows that came, and sum up their outputs for each row."""
        now, wire = self._ready, self.wires["dispatch"]
        with self._computing("ffn", layer):
            outputs = self._computed(self._unpacked("dispatch", now.incoming)[now.row])
            sums = summed(outputs.float(), now.place, wire.gate_weights(now.incoming))
            self.result = self.wires["combine"].pack(sums)

    def aggregate(self, layer: int) -> None:
        now = self._ready
        with self._computing("aggregate", layer):
            back = self.wires["combine"].unpack(now.back)
            self.x = self.x.float().index_add(0, now.token_back, back).to(self.x.dtype)

    def stop_of_rank(self) -> np.ndarray:
        """int64[rank]: ranks with the same number sum up their outputs for a token before these go on as one."""
        return self.stops.of_gpu

    def unplanned(self) -> torch.Tensor:
        if self.wires["combine"].dtype == torch.float32:  # nothing is rounded at a stop
            return super().unplanned()
        self.context.use_all_cores()
        experts, hosts = (np.ascontiguousarray(array, dtype=np.int64) for array in (self.experts, np.stack(self.hosts)))
        stops = hosts, self.source.astype(np.int64), self.stop_of_rank()
        tensors = (self._on_device(array) for array in (experts, *stops))
        return reference_with_stops(self.model, self.weights, self.first_tokens(), tuple(self.wires.values()), *tensors)


class RowsOfNodes(SharedRows):
    """One model's layers on this rank, with one row per token and node; its routes are hops."""

    routes: dict[str, list[Hops]]

    def _stops(self, context: RankContext) -> Stops:
        return Stops(context.instructions.tiers.network.domain)

    def _routed(self, layer: int, placement: Placement) -> tuple[Hops, Hops]:
        out, back = (float(wire.bytes) for wire in self.wires.values())
        context = self.context
        hosts, backend = self._served(layer, placement), context.instructions.backend
        return hops_of_layer(hosts, self.source, self.stops, (out, back), context.links, backend)

    def _ordered(self, schedule: Schedule | None, route: Hops) -> Hops:
        return route

    def _tokens(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rank, held = self.context.rank, self.held(layer)
        served = np.flatnonzero((self.hosts[layer] == rank).any(axis=1))
        owned = zip(self.wires, (held, served), strict=True)
        pools = [Pool.of(rank, self.routes[kind][layer], own) for kind, own in owned]
        home = held[(self.hosts[layer][held] >= 0).any(axis=1)]
        final = [pool.places(wanted)[0] for pool, wanted in zip(pools, (served, home), strict=True)]
        self._pools = dict(zip(self.wires, zip(pools, final, strict=True), strict=True))
        return held, served, pools[1].number[final[1]]

    def _exchange(self, kind: str, layer: int, log: Callable[[Piece, Mark], None], channel: int) -> Exchange:
        context, group = self.context, self.communicator.group
        hops, pool = self.routes[kind][layer], self._pools[kind]
        return PooledExchange(context.rank, hops, *pool, log, context.recorder, group, channel, self.wires[kind])
