"""All-to-alls in which ranks pass on rows that are for others, step by step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

from engine.network import Network
from engine.plan import OrderMode, Schedule
from engine.runtime.exchange.all_to_all import Exchange
from engine.runtime.exchange.hops import Hops, hops
from engine.runtime.exchange.links import Links
from engine.runtime.exchange.recorder import Mark, Recorder
from engine.runtime.exchange.routes import Piece, pieces
from engine.runtime.exchange.wire import Wire


@dataclass(frozen=True, eq=False)
class Pool:
    """The rows that a rank comes to have in an exchange. A number may arrive more than once.

    own: int64[row], the numbers of the rows that it has at first
    number: int64[place], these and behind them the arriving ones, by sender
    """

    own: np.ndarray
    number: np.ndarray

    @classmethod
    def of(cls, rank: int, hops: Hops, own: np.ndarray) -> "Pool":
        arrivals = (hops.between(src, rank) for src in range(len(hops.counts)))
        return cls(own, np.concatenate([own, *arrivals]).astype(np.int64))

    def places(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[…] each: all places that hold one of the wanted numbers, and the index of that number in `wanted`.

        wanted: int64[row], all in the pool
        """
        begin, end = (np.searchsorted(self.number, wanted, side, self._order) for side in ("left", "right"))
        row = np.repeat(np.arange(len(wanted)), end - begin)
        within = np.arange(len(row)) - np.repeat(np.cumsum(end - begin) - (end - begin), end - begin)
        return self._order[begin[row] + within], row

    @cached_property
    def _order(self) -> np.ndarray:
        """int64[place]: the places by number."""
        return np.argsort(self.number, kind="stable")


class PooledExchange(Exchange):
    """An exchange in which pieces are hops. Rows that arrive at this rank in a step stay in its pool, and go on from
    there in a later one, to one rank or to several.

    pool: this rank's
    final: int64[row], the places of the pool that are the result of the exchange, in this order
    wire: sums up a rank's rows of a number before they go on (default: it has each once); other parameters as of
        `Exchange`
    """

    def __init__(
        self,
        rank: int,
        hops: Hops,
        pool: Pool,
        final: np.ndarray,
        log: Callable[[Piece, Mark], None],
        recorder: Recorder,
        group: dist.ProcessGroup | None = None,
        channel: int = 0,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(rank, "two-tier", hops.order, hops.counts, log, recorder, group, channel=channel)
        self._own, self._held, self._final, self._wire = len(pool.own), len(pool.number), final, wire
        self._leaves = {piece: pool.places(hops.between(rank, piece.dst)[piece.begin : piece.end]) for piece in self.sends}
        self._pool: torch.Tensor | None = None

    def expect(self, incoming: torch.Tensor) -> None:
        super().expect(self._ready(incoming)[self._own :])

    def run(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        pool = self._ready(incoming)
        pool[: self._own] = outgoing
        super().run(pool, pool[self._own :])
        torch.index_select(pool, 0, self._at_end, out=incoming)

    def _ready(self, incoming: torch.Tensor) -> torch.Tensor:
        """The pool and, as attributes, indexes into it on the device of the rows: [row, width], this rank's own rows
        and behind them the arriving ones, by sender."""
        if self._pool is None:
            self._pool = incoming.new_empty((self._held, incoming.shape[1]))
            self._at_end = torch.from_numpy(self._final).to(incoming.device)
            self._picked = {
                piece: [torch.from_numpy(index).to(incoming.device) for index in places]
                for piece, places in self._leaves.items()
            }
        return self._pool

    def _leaving(self, piece: Piece, outgoing: torch.Tensor) -> torch.Tensor:
        place, row = self._picked[piece]
        rows, count = outgoing[place], piece.end - piece.begin
        return rows if len(place) == count else self._wire.summed(rows, row, count)


class RelayedExchange(PooledExchange):
    """An all-to-all in two tiers in which every rank has each row once.

    hops: of all ranks
    counts: int64[src, dst] rows by holder and final destination; other parameters as of `Exchange`
    """

    def __init__(
        self,
        rank: int,
        hops: Hops,
        counts: np.ndarray,
        log: Callable[[Piece, Mark], None],
        recorder: Recorder,
        group: dist.ProcessGroup | None = None,
        channel: int = 0,
    ) -> None:
        first = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
        pool = Pool.of(rank, hops, np.arange(first[rank, 0], first[rank, 0] + counts[rank].sum()))
        final = [np.arange(first[src, rank], first[src, rank] + counts[src, rank]) for src in range(len(counts))]
        super().__init__(rank, hops, pool, pool.places(np.concatenate(final))[0], log, recorder, group, channel)


def ordered(mode: OrderMode, schedule: Schedule | None, counts: np.ndarray, network: Network | None) -> list[Piece] | Hops:
    """All sends of an exchange of `counts` (int64[src, dst] rows) in a plan's order. network: of the ranks, for two tiers"""
    return hops(schedule, counts, network) if mode == "two-tier" else pieces(mode, schedule, counts)


def exchange_of(
    order: list[Piece] | Hops,
    rank: int,
    mode: OrderMode,
    counts: np.ndarray,
    log: Callable[[Piece, Mark], None],
    recorder: Recorder,
    group: dist.ProcessGroup | None = None,
    links: Links | None = None,
    channel: int = 0,
) -> Exchange:
    """The exchange that carries out an order, as `ordered` has made it; other parameters as of `Exchange`."""
    if isinstance(order, Hops):
        return RelayedExchange(rank, order, counts, log, recorder, group, channel)
    return Exchange(rank, mode, order, counts, log, recorder, group, links, channel)
