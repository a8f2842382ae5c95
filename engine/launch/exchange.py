"""An all-to-all between ranks in the order of a plan."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from engine.launch.recorder import Mark, Recorder
from engine.launch.routes import Piece
from engine.plan import OrderMode


class Exchange:
    """One all-to-all of rows of `width` numbers. counts: int64[src, dst] rows; order: all pieces of all ranks, as
    `routes.pieces` gives them; log: called for every piece that this rank has a part in, with when it began."""

    def __init__(
        self, rank: int, mode: OrderMode, order: list[Piece], counts: np.ndarray, log: Callable[[Piece, Mark], None],
        recorder: Recorder,
    ) -> None:  # fmt: skip
        self.rank, self.mode, self.log, self.recorder = rank, mode, log, recorder
        self.send_from = np.concatenate([[0], np.cumsum(counts[rank])])
        self.receive_at = np.concatenate([[0], np.cumsum(counts[:, rank])])
        self.sends = [piece for piece in order if piece.src == rank]
        self.receives = [piece for piece in order if piece.dst == rank]

    def run(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        """Exchange, and return when this rank has sent and received everything. outgoing: rows ordered by destination,
        incoming: rows ordered by source, both with this rank's own."""
        own = self.rank
        incoming[self.receive_at[own] : self.receive_at[own + 1]] = outgoing[
            self.send_from[own] : self.send_from[own + 1]
        ]

        def rows(piece: Piece) -> torch.Tensor:
            if piece.src == own:
                return outgoing[self.send_from[piece.dst] + piece.begin : self.send_from[piece.dst] + piece.end]
            return incoming[self.receive_at[piece.src] + piece.begin : self.receive_at[piece.src] + piece.end]

        if self.mode == "sequential":
            self._one_after_another(rows)
        else:
            self._in_phases(rows)

    def _one_after_another(self, rows: Callable[[Piece], torch.Tensor]) -> None:
        begun = self.recorder.mark()
        pending = [(piece, dist.irecv(rows(piece), piece.src, tag=0)) for piece in self.receives]
        for piece in self.sends:
            begin = self.recorder.mark()
            dist.isend(rows(piece), piece.dst, tag=0).wait()
            self.log(piece, begin)
        for piece, work in pending:
            work.wait()
            self.log(piece, begun)

    def _in_phases(self, rows: Callable[[Piece], torch.Tensor]) -> None:
        for phase in sorted({piece.phase for piece in self.sends + self.receives}):
            here = [piece for piece in self.receives + self.sends if piece.phase == phase]
            begin = self.recorder.mark()
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend if p.src == self.rank else dist.irecv, rows(p),
                            p.dst if p.src == self.rank else p.src, tag=phase) for p in here]
            )  # fmt: skip
            for work in works:
                work.wait()
            for piece in here:
                self.log(piece, begin)
