"""The way of a rank's tensors to the other ranks, over NCCL from the GPU and over Gloo from the host, and an all-gather
between ranks in two tiers.

In the all-gather a node collects its ranks' rows over its links, each rank passes an even part of them on to the rank
at its position in every other node, and from there they are spread (see `engine.communication.travel`). It goes slice
by slice: while one slice crosses the fabric, the next one is collected in its node and the previous one is spread. All
of it follows from the numbers of rows and the nodes, so that every rank finds the same by itself.
"""

from collections.abc import Callable
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist

from engine.communication.travel import Stops
from engine.launch.rank.context import RankContext
from engine.runtime.exchange.all_to_all import MOST_SLICES, SLICE
from engine.runtime.exchange.recorder import Mark
from engine.runtime.exchange.routes import Piece


class Communicator:
    """One model's way to the other ranks. group: a process group of its own; None for the one of all ranks"""

    def __init__(self, context: RankContext, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.device, self.recorder = group, context.device, context.recorder
        self.in_host_memory = context.device.type == "cuda" and context.instructions.backend == "gloo"
        self._nothing = torch.zeros(1, device=context.device) if context.instructions.backend == "nccl" else None

    def meet(self) -> None:
        """Go on when all ranks have done their work given so far. With NCCL only the current stream waits, not the
        host, which can hand over the next kernels in the meantime."""
        if self._nothing is not None:
            dist.all_reduce(self._nothing, group=self.group)
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        dist.barrier(self.group)

    def carry(
        self,
        exchange: Callable[[torch.Tensor, torch.Tensor], None],
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
        note: Callable[[Mark, Mark], None],
    ) -> None:
        """Run an exchange of tensors on this rank's device. Gloo knows only host memory: a GPU's tensors are copied
        there and back, which is a part of the exchange's cost.

        exchange: takes the tensor to send and the one to receive into
        note: called with the begin and the end of each copy
        """
        if not self.in_host_memory:
            exchange(outgoing, incoming)
            return
        sent, received = page_locked(outgoing), page_locked(incoming)
        begin = self.recorder.mark()
        sent.copy_(outgoing, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        note(begin, self.recorder.mark())
        exchange(sent, received)
        begin = self.recorder.mark()
        incoming.copy_(received, non_blocking=True)
        note(begin, self.recorder.mark())


def page_locked(like: torch.Tensor) -> torch.Tensor:
    """Host memory of the same shape that a GPU can copy from and to by itself."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


class Gathering:
    """An all-gather of items that ranks have, each as a row. `row_of_item`, int64[item], is the index of its row when a
    rank has all; `order` has all pieces of all ranks by phase, a piece being rows [begin, end) of those.

    rank_of_item: int64[item]
    slices: number of slices, 1 if ranks have no nodes or only one
    """

    def __init__(self, rank_of_item: np.ndarray, stops: Stops, slices: int) -> None:
        rows = np.bincount(rank_of_item, minlength=stops.gpus)
        until = np.arange(slices + 1)[:, None] * rows // slices
        own, passed = np.diff(until, axis=0), np.diff([stops.dealt(count) for count in until], axis=0)
        # Rows are ordered by node, slice and rank: first by the rank that has them, then by the rank that passes them on.
        first, first_passed = (_first(count, stops) for count in (own, passed))
        self.row_of_item = np.empty(len(rank_of_item), dtype=np.int64)
        for rank in range(stops.gpus):
            parts = zip(first[:, rank].tolist(), own[:, rank].tolist(), strict=True)
            self.row_of_item[rank_of_item == rank] = np.concatenate([np.arange(at, at + size) for at, size in parts])
        shared, pieces = int(stops.sizes.max() > 1), []
        for (part, rank), size in np.ndenumerate(own):
            begin, crossing = int(first[part, rank]), int(first_passed[part, rank])
            inside = [(part, rank, mate) for mate in _mates(rank, stops)]
            entries = [stops.entry[rank, node] for node in range(stops.count) if node != stops.of_gpu[rank]]
            across = [(part + shared, rank, int(entry)) for entry in entries]
            across += [(part + shared + 1, int(entry), mate) for entry in entries for mate in _mates(entry, stops)]
            pieces += [Piece(*hop, begin, begin + int(size)) for hop in inside]
            pieces += [Piece(*hop, crossing, crossing + int(passed[part, rank])) for hop in across]
        # Two ranks have to know the order of the messages between them.
        self.order = sorted(
            (piece for piece in pieces if piece.end > piece.begin),
            key=lambda piece: (piece.phase, piece.src, piece.dst, piece.begin),
        )

    @classmethod
    def between(cls, context: RankContext, rank_of_item: np.ndarray, row_bytes: float) -> "Gathering":
        """The all-gather between the ranks of a launch: with their nodes, if known, and slices long enough to be worth
        posting."""
        tiers, links = context.instructions.tiers, context.links
        stops = Stops(np.arange(context.ranks) if tiers is None else tiers.network.domain)
        whole = cls(rank_of_item, stops, 1)
        if links is None or stops.count in (1, stops.gpus) or not whole.order:
            return whole
        src, dst, rows = np.array([(piece.src, piece.dst, piece.end - piece.begin) for piece in whole.order]).T
        seconds = links.network.fluid_seconds(src, dst, rows * row_bytes)
        return cls(rank_of_item, stops, min(max(round(seconds / SLICE), 1), MOST_SLICES))

    def run(
        self,
        rank: int,
        everything: torch.Tensor,
        group: dist.ProcessGroup | None,
        log: Callable[[Piece, Mark], None],
        mark: Callable[[], Mark],
    ) -> None:
        """Send and receive the pieces of a rank.

        everything: [row, …] with the rank's own
        log: called for every piece that the rank sends or receives, with the begin of its phase
        mark: see `Recorder`
        """
        mine = (piece for piece in self.order if rank in (piece.src, piece.dst))
        for _, phase in groupby(mine, key=lambda piece: piece.phase):
            pieces, begin = list(phase), mark()
            works = [
                dist.P2POp(dist.isend, everything[piece.begin : piece.end], piece.dst, group)
                if piece.src == rank
                else dist.P2POp(dist.irecv, everything[piece.begin : piece.end], piece.src, group)
                for piece in pieces
            ]
            for work in dist.batch_isend_irecv(works):
                work.wait()
            for piece in pieces:
                log(piece, begin)


def _first(count: np.ndarray, stops: Stops) -> np.ndarray:
    """int64[slice, rank]: index of the first row by node, slice and rank. count: [slice, rank] rows."""
    part, rank = np.indices(count.shape).reshape(2, -1)
    order = np.lexsort((rank, part, stops.of_gpu[rank]))
    first = np.empty(count.size, dtype=np.int64)
    first[order] = np.cumsum(count.ravel()[order]) - count.ravel()[order]
    return first.reshape(count.shape)


def _mates(rank: int, stops: Stops) -> list[int]:
    """The other ranks of a rank's node."""
    return [int(mate) for mate in np.flatnonzero(stops.of_gpu == stops.of_gpu[rank]) if mate != rank]
