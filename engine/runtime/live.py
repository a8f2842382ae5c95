"""Exchanges between ranks that each know only their own rows: sizes first, then the rows in the plan's order.

A concurrent exchange is one all-to-all. Another order needs the rows of all pairs of ranks, so the sizes go to all ranks,
and every rank cuts the plan's schedule to them by itself, as a launch does.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from engine.errors import InputError
from engine.runtime.exchange.recorder import Mark, Recorder
from engine.runtime.exchange.relayed import exchange_of, ordered
from engine.runtime.exchange.routes import Piece
from engine.runtime.layer_plan import LayerPlan
from engine.runtime.ranks import among_ranks, check_device


@dataclass(frozen=True, eq=False)
class Sizes:
    """Rows between this rank and the others in one exchange.

    sent, received: to and from every rank, this one included
    came: int64[src, own part] of the rows received, e.g. for every slot
    all: int64[src, dst] of all ranks; None where the order needs none
    """

    sent: list[int]
    received: list[int]
    came: np.ndarray | None = None
    all: np.ndarray | None = None

    @property
    def back(self) -> "Sizes":
        """The same rows on their way back."""
        return Sizes(self.received, self.sent, all=None if self.all is None else self.all.T)


class LiveExchange:
    """The exchanges of a layer among the ranks of a group. Every rank calls them in the same order.

    way: the layer's plan
    group: a process group of the plan's ranks; None: the one of all ranks, or none at all for a single one
    """

    def __init__(self, way: LayerPlan, group: dist.ProcessGroup | None) -> None:
        self.way, self.group, self.alone = way, group, way.ranks == 1
        if not self.alone:
            if not dist.is_initialized():
                raise InputError(f"the plan is for {way.ranks} ranks: call torch.distributed.init_process_group first")
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            if (ranks, rank) != (way.ranks, way.rank):
                raise InputError(f"the plan's layer is of rank {way.rank} of {way.ranks}, and this is rank {rank} of {ranks}")
        self._gloo = not self.alone and dist.get_backend(group) == "gloo"
        self._device: torch.device | None = None  # that the backend is known to send from
        self._lane: Lane | None = None

    @among_ranks()
    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """int64[…] summed up over all ranks."""
        if not self.alone:
            on_way = self._staged(numbers)
            dist.all_reduce(on_way, group=self.group)
            numbers = on_way.to(numbers.device)
        return numbers

    @among_ranks()
    def sizes(self, counts: torch.Tensor, parts_of_rank: list[int]) -> list[Sizes]:
        """The sizes of one exchange a column.

        counts: int64[part, column] rows that leave, e.g. for every slot of all ranks, rank after rank
        parts_of_rank: parts of every rank
        """
        way, own, columns = self.way, parts_of_rank[self.way.rank], counts.shape[1]
        of_rank = np.eye(way.ranks, dtype=np.int64).repeat(parts_of_rank, axis=1)  # [rank, part]
        matrices = [None] * columns
        if self.alone:
            mine = came = counts.cpu().numpy()
        elif way.mode == "concurrent":
            leaving = self._staged(counts)
            coming = leaving.new_empty((way.ranks * own, columns))
            dist.all_to_all_single(coming, leaving, [own] * way.ranks, parts_of_rank, group=self.group)
            both = torch.cat([leaving, coming]).cpu().numpy()  # one copy to the host, not two
            mine, came = both[: len(counts)], both[len(counts) :]
        else:
            everything = self._staged(counts.new_empty((way.ranks, *counts.shape)))
            dist.all_gather(list(everything), self._staged(counts), group=self.group)
            everything = everything.cpu().numpy()
            mine, came = everything[way.rank], everything[:, of_rank[way.rank] > 0]
            matrices = np.moveaxis(of_rank @ everything, -1, 0)
        came = came.reshape(way.ranks, own, columns)
        columns_of = (of_rank @ mine).T.tolist(), came.sum(axis=1).T.tolist(), np.moveaxis(came, -1, 0), matrices
        return [Sizes(*column) for column in zip(*columns_of, strict=True)]

    @among_ranks()
    def begin(self, kind: str, rows: torch.Tensor, sizes: Sizes) -> Callable[[], torch.Tensor]:
        """Begin an exchange; the function returned waits for the rows that come, by source.

        kind: "dispatch" or "combine", for the order
        rows: [row, …] by destination
        """
        if self.alone:
            return rows.detach
        device, leaving = rows.device, self._staged(rows.contiguous())
        coming = leaving.new_empty((sum(sizes.received), *rows.shape[1:]))
        if self.way.mode == "concurrent":
            work = dist.all_to_all_single(
                _bytes(coming), _bytes(leaving), sizes.received, sizes.sent, group=self.group, async_op=True
            )
            wait = work.wait
        else:
            wait = self._in_order(kind, leaving, coming, sizes)

        @among_ranks()
        def arrived() -> torch.Tensor:
            wait()
            return coming.to(device)

        return arrived

    @among_ranks()
    def along(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Numbers apart from the rows of tokens, in one all-to-all, whatever the plan's order. sent, received: see `Sizes`"""
        if self.alone:
            return rows
        leaving = self._staged(rows.contiguous())
        coming = leaving.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(_bytes(coming), _bytes(leaving), received, sent, group=self.group)
        return coming.to(rows.device)

    def pass_on(
        self, leaving: Sequence[tuple[torch.Tensor, int]], coming: Sequence[tuple[torch.Tensor, int]]
    ) -> Callable[[], None]:
        """Begin to send tensors to ranks and to fill others with those that ranks send; between two ranks they go in one order.
        The function returned waits until all have gone and come.

        leaving, coming: tensors of one axis at least, and the ranks at the other end
        """
        if not leaving and not coming:
            return _nothing
        peers, arriving = dist.get_process_group_ranks(self.group), [self._staged(tensor) for tensor, _ in coming]
        # Receives first: Gloo would queue up the word that a rank is ready behind the data that it sends.
        operations = [
            dist.P2POp(dist.irecv, _bytes(tensor), peers[src], self.group)
            for tensor, (_, src) in zip(arriving, coming, strict=True)
        ]
        operations += [dist.P2POp(dist.isend, _bytes(self._staged(tensor)), peers[dst], self.group) for tensor, dst in leaving]
        works = dist.batch_isend_irecv(operations)

        def arrived() -> None:
            for work in works:
                work.wait()
            for (tensor, _), there in zip(coming, arriving, strict=True):
                if there is not tensor:
                    tensor.copy_(there)

        return arrived

    def _in_order(self, kind: str, leaving: torch.Tensor, coming: torch.Tensor, sizes: Sizes) -> Callable[[], object]:
        """Carry out an exchange in the plan's order: at once, or where parts overlap, over Gloo, in a thread of its own."""
        way, counts = self.way, sizes.all
        order = ordered(way.mode, getattr(way, kind), counts, way.network)
        exchange = exchange_of(order, way.rank, way.mode, counts, _no_log, Recorder(way.rank, leaving.device), self.group)
        run = partial(exchange.run, _bytes(leaving), _bytes(coming))
        if way.degree == 1 or not self._gloo:
            run()
            return _nothing
        self._lane = self._lane or Lane()
        return self._lane.run(run)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor where the backend can send it from: Gloo reads host memory only. Raises InputError if it cannot."""
        if self._gloo:
            return tensor.cpu()
        if tensor.device != self._device:
            check_device(self.group, tensor.device)
            self._device = tensor.device
        return tensor


class Lane:
    """A thread that carries out exchanges one after another. A daemon, so that a rank that has failed can end although a
    peer keeps it waiting."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], None], bool, Future]] = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()

    def run(self, exchange: Callable[[], None]) -> Callable[[], object]:
        """Carry out an exchange after those before it; the function returned waits for it and raises what it raised."""
        over: Future = Future()
        self._work.put((exchange, torch.is_inference_mode_enabled(), over))
        return over.result

    def _carry(self) -> None:
        while True:
            exchange, inference, over = self._work.get()
            try:
                with torch.inference_mode(inference):  # a thread begins without it
                    over.set_result(exchange())
            except BaseException as error:  # raised where it is waited for
                over.set_exception(error)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, row by row: a backend need not know the format of its numbers."""
    return (rows if rows.numel() else rows.new_empty(rows.shape)).view(torch.uint8)  # an empty one may have no stride


def _no_log(piece: Piece, begin: Mark) -> None:
    """A live exchange keeps no events."""


def _nothing() -> None:
    """The wait for what is over."""
