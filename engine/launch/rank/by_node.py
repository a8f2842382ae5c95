"""One model's layers where a token goes once to every node that has some of its experts and spreads from there (`node` travel).

See `engine.launch.rank.spread`. What comes back is summed up at every stop: at the experts' rank, where the token has entered
their node, and at home.
"""

from collections.abc import Callable

import numpy as np

from engine.communication.travel import Stops
from engine.launch.rank.context import RankContext
from engine.launch.rank.exchange import Exchange
from engine.launch.rank.hops import Hops
from engine.launch.rank.recorder import Mark
from engine.launch.rank.relayed import Pool, PooledExchange
from engine.launch.rank.routes import Piece
from engine.launch.rank.shared_rows import SharedRows
from engine.launch.rank.spread import hops_of_layer
from engine.plan import Placement, Schedule


class RowsOfNodes(SharedRows):
    """One model's layers on this rank. Its routes are hops."""

    routes: dict[str, list[Hops]]

    def _stops(self, context: RankContext) -> Stops:
        return Stops(context.instructions.tiers.network.domain)

    def _routed(self, layer: int, placement: Placement) -> tuple[Hops, Hops]:
        out, back = (float(wire.bytes) for wire in self.wires.values())
        return hops_of_layer(
            self.hosts[layer],
            self.source,
            self.stops,
            (out, back),
            self.context.links,
            self.context.instructions.backend,
        )

    def _ordered(self, schedule: Schedule | None, route: Hops) -> Hops:
        return route

    def _tokens(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rank, held = self.context.rank, self.held(layer)
        served = np.flatnonzero((self.hosts[layer] == rank).any(axis=1))
        pools = [
            Pool.of(rank, self.routes["dispatch"][layer], held),
            Pool.of(rank, self.routes["combine"][layer], served),
        ]
        home = held[(self.hosts[layer][held] >= 0).any(axis=1)]
        final = [pool.places(wanted)[0] for pool, wanted in zip(pools, (served, home), strict=True)]
        self._pools = dict(zip(self.wires, zip(pools, final, strict=True), strict=True))
        return held, served, pools[1].number[final[1]]

    def _exchange(self, kind: str, layer: int, log: Callable[[Piece, Mark], None], channel: int) -> Exchange:
        context, group = self.context, self.communicator.group
        hops, pool = self.routes[kind][layer], self._pools[kind]
        return PooledExchange(context.rank, hops, *pool, log, context.recorder, group, channel, self.wires[kind])
