"""The clock and the events of one rank: host time on a CPU, CUDA events on a GPU, one clock for all ranks."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from engine.files import open_atomically
from engine.runtime.exchange.routes import Piece

COLUMNS = ("plan", "number", "layer", "kind", "model", "phase", "src", "dst", "row", "bytes", "start", "end", "label")
"""Columns of an events file.

plan, number: the plan and its timed pass
dst: -1 for events without a peer
row: begin of a piece among the rows that src sends to dst
start, end: seconds on the common clock
label: the operator of a training step, or empty
"""

HANDSHAKES = 16
"""Round trips of a clock comparison; the shortest one counts."""

BOOT = Path("/proc/sys/kernel/random/boot_id")


def communication_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """The device that tensors have to be on to be sent by a rank that computes on `device`: Gloo reads host memory only."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device


class Mark(NamedTuple):
    """A moment.

    when: seconds on the host's clock, or a CUDA event on the stream that was current
    paused: seconds for which the clock had been stopped by then
    """

    when: float | torch.cuda.Event
    paused: float


class Recorder:
    """The events of one rank. Every rank has to take part in `align` and `paused`."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.offset, self.clock_error = 0.0, 0.0
        self._kept: list[tuple] = []
        self._pass: list[tuple] = []
        self._plan, self._number, self._paused = 0, 0, 0.0
        self._base: tuple[float, torch.cuda.Event] | None = None

    def align(self, ranks: int) -> None:
        """Put this rank's clock on rank 0's: unchanged if both are of one running machine, else by an exchange of times
        with rank 0, with an error of at most half the shortest round trip (Cristian, 1989)."""
        here = BOOT.read_text().strip() if BOOT.exists() else f"rank {self.rank}"
        machines: list[str | None] = [None] * ranks
        dist.all_gather_object(machines, here)
        elsewhere = [other for other in range(1, ranks) if machines[other] != machines[0]]
        if not elsewhere:
            return
        # A receive over NCCL returns before anything is there: the stream waits for it, the host does not.
        group = dist.new_group(backend="gloo")
        for other in elsewhere:
            if self.rank in (0, other):
                self._compare(other, group)

    def _compare(self, other: int, group: dist.ProcessGroup) -> None:
        message = torch.zeros(1, dtype=torch.float64)
        trips = []
        for _ in range(HANDSHAKES):
            if self.rank == 0:
                dist.recv(message, other, group)
                message[0] = time.monotonic()
                dist.send(message, other, group)
            else:
                begin = time.monotonic()
                dist.send(message, 0, group)
                dist.recv(message, 0, group)
                zero = float(message[0])
                end = time.monotonic()
                trips.append((end - begin, zero - (begin + end) / 2))
        if trips:
            shortest, self.offset = min(trips)
            self.clock_error = shortest / 2

    def begin(self, plan: int, number: int) -> None:
        """Start a pass. Nothing is kept of number 0, the warm-up."""
        self._plan, self._number = plan, number
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            base = torch.cuda.Event(enable_timing=True)
            base.record()
            torch.cuda.synchronize(self.device)
            self._base = (time.monotonic(), base)

    def end(self) -> None:
        """End a pass: bring its events on the common clock and keep them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._number:
            for *head, start, end, label in self._pass:
                self._kept.append((self._plan, self._number, *head, self.seconds_at(start), self.seconds_at(end), label))
        self._pass.clear()

    def now(self) -> float:
        """Seconds on the common clock, with the device's work done; pauses are not left out."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic() + self.offset

    def mark(self) -> Mark:
        """This moment, on a GPU the moment at which the current stream has done its work given so far."""
        if self.device.type != "cuda":
            return Mark(time.monotonic(), self._paused)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(event, self._paused)

    def wait_for_stream(self) -> None:
        """Keep the host until a GPU has done the work given so far to its current stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def log(
        self,
        kind: str,
        layer: int,
        start: Mark,
        end: Mark,
        *,
        model: int = 0,
        phase: int = 0,
        src: int | None = None,
        dst: int = -1,
        row: int = 0,
        bytes: float = 0.0,
        label: str = "",
    ) -> None:
        """Note an event. A send with a peer is noted by both of its ends, and they are joined later; a collective has none.

        src: the rank that computes or sends (default: this one)
        """
        src = self.rank if src is None else src
        self._pass.append((layer, kind, model, phase, src, dst, row, bytes, start, end, label))

    def log_piece(self, kind: str, layer: int, begin: Mark, piece: Piece, row_bytes: float, model: int) -> None:
        """Note a piece of an exchange that ends now."""
        sent = {"phase": piece.phase, "src": piece.src, "dst": piece.dst, "row": piece.begin}
        self.log(kind, layer, begin, self.mark(), model=model, bytes=(piece.end - piece.begin) * row_bytes, **sent)

    @contextlib.contextmanager
    def computing(self, kind: str, layer: int, **more) -> Iterator[None]:
        """Note the body as one event."""
        start = self.mark()
        yield
        self.log(kind, layer, start, self.mark(), **more)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock of all ranks during the body. All take rank 0's length of the pause, so that their clocks stay
        together."""
        dist.barrier()
        begin = self.now()
        yield
        dist.barrier()
        length = torch.tensor(self.now() - begin, dtype=torch.float64, device=communication_device(self.device))
        dist.broadcast(length, 0)
        self._paused += float(length)

    def save(self, path: Path) -> None:
        """Write all kept events, one array a column of COLUMNS: the whole file or none. Raises OSError."""
        columns = zip(*self._kept, strict=True) if self._kept else [()] * len(COLUMNS)
        with open_atomically(path) as file:
            np.savez_compressed(file, **{name: np.array(values) for name, values in zip(COLUMNS, columns, strict=True)})

    def seconds_at(self, mark: Mark) -> float:
        """Seconds of a moment on the common clock, on a GPU one of the pass that was begun last; without paused time."""
        if isinstance(mark.when, float):
            return mark.when + self.offset - mark.paused
        host, base = self._base
        return host + base.elapsed_time(mark.when) / 1e3 + self.offset - mark.paused

    def seconds_between(self, start: Mark, end: Mark) -> float:
        """Seconds that passed on this rank between two moments, without paused time. The host waits until the device
        has come to the later one, which costs the time between them nothing."""
        if isinstance(start.when, float):
            length = end.when - start.when
        else:
            end.when.synchronize()
            length = start.when.elapsed_time(end.when) / 1e3
        return length - (end.paused - start.paused)
