"""An all-to-all in two tiers: ranks pass on rows that are for others, step by step."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from engine.launch.rank.exchange import Exchange
from engine.launch.rank.hops import Hops
from engine.launch.rank.recorder import Mark, Recorder
from engine.launch.rank.routes import Piece


class RelayedExchange(Exchange):
    """An exchange whose pieces are hops. What arrives at this rank in a step stays in its pool, and goes on from there in a
    later one.

    hops: of all ranks; counts: int64[src, dst] rows by who has them and whom they are for; the rest as of `Exchange`
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
        super().__init__(rank, "two-tier", hops.order, hops.counts, log, recorder, group, channel=channel)
        ranks, first = range(len(counts)), (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
        own = np.arange(first[rank, 0], first[rank, 0] + counts[rank].sum())
        held = np.concatenate([own, *(hops.between(src, rank) for src in ranks)])
        place = np.empty(counts.sum(), dtype=np.int64)
        place[held] = np.arange(len(held))
        final = [np.arange(first[src, rank], first[src, rank] + counts[src, rank]) for src in ranks]
        self._own, self._held = len(own), len(held)
        self._final = place[np.concatenate(final)]
        self._leaves = {piece: place[hops.between(rank, piece.dst)[piece.begin : piece.end]] for piece in self.sends}
        self._pool: torch.Tensor | None = None

    def expect(self, incoming: torch.Tensor) -> None:
        super().expect(self._ready(incoming)[self._own :])

    def run(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        pool = self._ready(incoming)
        pool[: self._own] = outgoing
        super().run(pool, pool[self._own :])
        torch.index_select(pool, 0, self._at_end, out=incoming)

    def _ready(self, incoming: torch.Tensor) -> torch.Tensor:
        """The pool, and indexes into it on the device of the rows: [row, width], this rank's own rows and behind them what
        arrives, by who passes it on."""
        if self._pool is None:
            self._pool = incoming.new_empty((self._held, incoming.shape[1]))
            self._at_end, self._picked = (
                torch.from_numpy(self._final).to(incoming.device),
                {piece: torch.from_numpy(rows).to(incoming.device) for piece, rows in self._leaves.items()},
            )
        return self._pool

    def _leaving(self, piece: Piece, outgoing: torch.Tensor) -> torch.Tensor:
        return outgoing[self._picked[piece]]
