"""An all-to-all between ranks in the order of a plan."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from engine.plan import OrderMode
from engine.runtime.exchange.links import Links
from engine.runtime.exchange.recorder import Mark, Recorder
from engine.runtime.exchange.routes import Piece

SLICE, MOST_SLICES = 0.02, 16
"""Seconds between two parts of a paced send, and the most parts it has. Shorter parts would keep the processors busy
with posting; longer ones would let senders of different rates meet at a receiver as if nothing were paced."""


class Exchange:
    """One all-to-all of rows of `width` numbers. A sequential order goes in turns over NCCL, see `in_turns`.

    counts: int64[src, dst] rows
    order: all pieces of all ranks, as returned by `routes.pieces`
    log: called with the begin of every piece that this rank sends or receives
    group: the process group that carries the exchange (default: the one of all ranks)
    links: the links of the ranks, by which a shared order is paced (default: not paced)
    channel: 0 or 1, tells apart two exchanges that are expected at the same time
    """

    def __init__(
        self,
        rank: int,
        mode: OrderMode,
        order: list[Piece],
        counts: np.ndarray,
        log: Callable[[Piece, Mark], None],
        recorder: Recorder,
        group: dist.ProcessGroup | None = None,
        links: Links | None = None,
        channel: int = 0,
    ) -> None:
        # NCCL carries out one group after another: a receive that is posted long before its send would hold up the rest.
        self.ahead = dist.get_backend(group) == "gloo"
        if mode == "sequential":
            # Over Gloo every sender goes on as soon as its last piece has arrived.
            one_phase = [replace(piece, phase=0) for piece in order]
            mode, order = ("sequential", one_phase) if self.ahead else ("matched", in_turns(order))
        self.rank, self.mode, self.log, self.recorder, self.group = rank, mode, log, recorder, group
        self.links, self.channel, self.order = links, channel, order
        # PyTorch names a peer by its number among all ranks, also in a group of some.
        self.peers = range(len(counts)) if group is None else dist.get_process_group_ranks(group)
        self.send_from = np.concatenate([[0], np.cumsum(counts[rank])])
        self.receive_at = np.concatenate([[0], np.cumsum(counts[:, rank])])
        self.receives = [piece for piece in self.order if piece.dst == rank]
        self.sends = [piece for piece in self.order if piece.src == rank]
        if mode != "sequential":
            # Every rank begins with another receiver, so that no link has to wait until it is the turn of its rank.
            self.sends.sort(key=lambda piece: (piece.dst - rank) % len(counts))
        self.phases = sorted({piece.phase for piece in self.receives + self.sends})
        self._expected: list[dist.Work | Reply] | None = None
        self._words: dict[Piece, dist.Work] = {}

    def expect(self, incoming: torch.Tensor) -> None:
        """Post the receives before the ranks meet: posted in an exchange under way, they would queue up behind data
        while links idle. Only for the first of several phases, since a rank's readiness for the next phase is the wall
        between phases. incoming: as for `run`."""
        if self.ahead and self.phases:
            self._expected = self._receive(self.phases[0], incoming)

    def run(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        """Exchange, and return when this rank has sent and received everything.

        outgoing: [row, width] by destination, with this rank's own
        incoming: [row, width] by source, with this rank's own
        """
        into, out = (slice(*first[self.rank : self.rank + 2]) for first in (self.receive_at, self.send_from))
        incoming[into] = outgoing[out]
        for phase in self.phases:
            begin = self.recorder.mark()
            works, self._expected = self._expected, None
            if self.mode == "sequential":
                works = self._receive(phase, incoming) if works is None else works
                for piece in self.sends:  # each when the previous one has arrived
                    sent = self.recorder.mark()
                    dist.isend(self._leaving(piece, outgoing), self.peers[piece.dst], self.group, self._tag(piece)).wait()
                    self._words[piece].wait()
                    self.log(piece, sent)
            else:
                if works is None:
                    works = self._receive(phase, incoming) if self.ahead else []
                works += self._side_by_side(phase, outgoing, incoming)
            for work in works:
                work.wait()
            for piece in self.receives + (self.sends if self.mode != "sequential" else []):
                if piece.phase == phase:
                    self.log(piece, begin)

    def _side_by_side(self, phase: int, outgoing: torch.Tensor, incoming: torch.Tensor) -> list[dist.Work]:
        """Send all of a phase (and receive it, unless that has begun). A paced send progresses at the constant rate
        size / seconds: each part goes at its time, whatever became of earlier ones. The time is the host's, which over
        NCCL is ahead of its GPU, so the host first waits for the stream: otherwise parts due before the ranks met would
        go at once."""
        parts, seconds = self._pace(phase, outgoing)
        if parts > 1:
            self.recorder.wait_for_stream()
        begin, works = time.monotonic(), []
        for step in range(parts):
            if step:
                time.sleep(max(0.0, begin + step * seconds / parts - time.monotonic()))
            operations = [
                dist.P2POp(dist.irecv, self._arriving(part, incoming), self.peers[part.src], self.group, self._tag(part))
                for part in ([] if self.ahead else self._parts(self.receives, phase, parts, step))
            ]
            operations += [
                dist.P2POp(dist.isend, self._leaving(part, outgoing), self.peers[part.dst], self.group, self._tag(part))
                for part in self._parts(self.sends, phase, parts, step)
            ]
            works += dist.batch_isend_irecv(operations) if operations else []
        return works

    def _receive(self, phase: int, incoming: torch.Tensor) -> list["dist.Work | Reply"]:
        """Begin to receive all of a phase. Over Gloo, a sender that waits until its data has arrived needs a reply: the
        kernel accepts the data long before."""
        count, _ = self._pace(phase, incoming)
        works = [
            dist.irecv(self._arriving(part, incoming), self.peers[part.src], self.group, self._tag(part))
            for step in range(count)
            for part in self._parts(self.receives, phase, count, step)
        ]
        if self.mode != "sequential":
            return works
        # The tag of phase 1, which a sequence lacks.
        words, tag = torch.zeros(len(self.sends) + 1, dtype=torch.uint8), 2 + self.channel
        self._words = {
            piece: dist.irecv(words[at : at + 1], self.peers[piece.dst], self.group, tag) for at, piece in enumerate(self.sends)
        }
        return [
            Reply(work, lambda src=self.peers[piece.src]: dist.isend(words[-1:], src, self.group, tag))
            for work, piece in zip(works, self.receives, strict=True)
        ]

    def _parts(self, pieces: Sequence[Piece], phase: int, count: int, step: int) -> list[Piece]:
        """Part `step` of `count` of every piece of a phase, unless it is empty."""
        parts = [slices(piece, count)[step] for piece in pieces if piece.phase == phase]
        return [part for part in parts if part.end > part.begin]

    def _pace(self, phase: int, like: torch.Tensor) -> tuple[int, float]:
        """Number of parts in which the sends of a phase go, and seconds they take: the time of the busiest link.

        like: rows as they are sent
        """
        if self.mode != "shared" or self.links is None:
            return 1, 0.0
        pieces = [(piece.src, piece.dst, piece.end - piece.begin) for piece in self.order if piece.phase == phase]
        src, dst, rows = np.array(pieces).T
        row_bytes = float(like.shape[1] * like.element_size())
        seconds = self.links.network.fluid_seconds(src, dst, rows * row_bytes)
        return min(max(round(seconds / SLICE), 1), MOST_SLICES), seconds

    def _leaving(self, piece: Piece, outgoing: torch.Tensor) -> torch.Tensor:
        first = self.send_from[piece.dst]
        return outgoing[first + piece.begin : first + piece.end]

    def _arriving(self, piece: Piece, incoming: torch.Tensor) -> torch.Tensor:
        first = self.receive_at[piece.src]
        return incoming[first + piece.begin : first + piece.end]

    def _tag(self, piece: Piece) -> int:
        return 2 * piece.phase + self.channel


def in_turns(order: Sequence[Piece]) -> list[Piece]:
    """A sequential order for NCCL, which queues sends and receives in one order: the first pieces of all senders are a
    phase, then the second ones, and so on. Every sender still sends one piece after another, and no two ranks can wait
    for each other; but a rank goes on to its next piece only when it has also received those of the turn."""
    turns: Counter[int] = Counter()
    phased = []
    for piece in order:
        phased.append(replace(piece, phase=turns[piece.src]))
        turns[piece.src] += 1
    return phased


def slices(piece: Piece, count: int) -> list[Piece]:
    """A piece cut into `count` parts as equal as rows allow."""
    if count == 1:
        return [piece]
    ends = np.linspace(piece.begin, piece.end, count + 1).round().astype(int).tolist()
    return [replace(piece, begin=begin, end=end) for begin, end in pairwise(ends)]


class Reply:
    """A thread that waits for an arrival and confirms it to the sender. A daemon, so that a failed rank can end
    although it waits for another."""

    def __init__(self, arrival: dist.Work, say: Callable[[], dist.Work]) -> None:
        self._over: Future[dist.Work] = Future()

        def work() -> None:
            try:
                arrival.wait()
                self._over.set_result(say())
            except BaseException as error:  # raised where it is waited for
                self._over.set_exception(error)

        threading.Thread(target=work, daemon=True).start()

    def wait(self) -> None:
        """Wait until the data has arrived and its sender can know."""
        self._over.result().wait()
