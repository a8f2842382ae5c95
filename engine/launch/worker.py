"""One rank of a launched plan; started by torchrun with the run folder as its only argument.

Runs the planned MoE layers forward with real tensors: gate, dispatch in the plan's order, expert FFNs, combine,
aggregate. Tokens and their experts are replayed from the recording, so all ranks know all counts and exchange no sizes.
Every rank writes its events; rank 0 also checks the output against the unplanned forward pass.
"""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from engine.launch.calibrate import calibrate
from engine.launch.layer import TORCH_DTYPE, Weights, aggregate, ffn, gate, reference, tokens_in
from engine.launch.routes import Piece, Route, pieces, route
from engine.launch.spec import CALIBRATION, PROGRESS, REPORT, LaunchSpec, read_spec
from engine.plan import OrderMode


def main(folder: Path) -> None:
    """Join the job, run, write `events-RANK.npz` (and on rank 0 the report)."""
    leave_with_parent()
    spec, experts, source = read_spec(folder)
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if spec.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(spec.backend)
    try:
        with torch.inference_mode():
            Rank(spec, experts, source, rank, device, folder).run()
    finally:
        dist.destroy_process_group()


def leave_with_parent() -> None:
    """End this process when torchrun is gone: torchrun gives ranks sessions of their own, so a killed torchrun would
    otherwise leave them behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Rank:
    """The state of one rank."""

    def __init__(
        self, spec: LaunchSpec, experts: np.ndarray, source: np.ndarray, rank: int, device: torch.device, folder: Path
    ) -> None:
        self.spec, self.experts, self.source, self.rank = spec, experts, source, rank
        self.device, self.folder = device, folder
        self.dtype = TORCH_DTYPE[spec.model.dtype]
        self.layers = experts.shape[1]
        self.weights = Weights(spec.model, self.layers, spec.seed, device, self.dtype)
        self.mine = np.flatnonzero(source == rank)
        self.routes: dict[int, Route] = {}
        self.events: list[tuple] = []
        self.pauses = 0.0

    def run(self) -> None:
        """Calibrate, warm up once, then `repeats` timed passes."""
        self.tell(0.0, "measuring this machine")
        shapes = calibrate(self.spec, self.weights, len(self.experts), self.rank, self.device)
        if self.rank == 0:
            (self.folder / CALIBRATION).write_text(json.dumps(shapes))
        passes = self.spec.repeats + 1
        for number in range(passes):
            output = self.forward(number, passes)
        arrays = {name: np.array(column) for name, column in zip(EVENT, zip(*self.events, strict=True), strict=True)}
        np.savez_compressed(self.folder / f"events-{self.rank}.npz", **arrays)
        self.check(output)

    def forward(self, number: int, passes: int) -> torch.Tensor:
        """One pass over all layers. Pass 0 is the warm-up and leaves no events."""
        model, order = self.spec.model, self.spec.plan.send_order
        x = tokens_in(len(self.experts), model, self.spec.seed, self.device, self.dtype)[self.mine]
        for layer in range(self.layers):
            self.tell(0.1 + 0.7 * (number + layer / self.layers) / passes, self.describe(number, layer))
            scheduled = order.mode != "concurrent"
            counts = self.route_of(layer).counts
            dispatch = pieces(order.mode, order.dispatch[layer] if scheduled else None, counts)
            combine = pieces(order.mode, order.combine[layer] if scheduled else None, counts.T)
            x = self.layer(number, layer, x, dispatch, combine)
        return x

    def describe(self, number: int, layer: int) -> str:
        """What is running, in words."""
        which = "warm-up" if number == 0 else f"pass {number} of {self.spec.repeats}"
        return f"{which}, layer {layer + 1} of {self.layers}"

    def route_of(self, layer: int) -> Route:
        """Where the copies of a layer go; kept, since every pass needs it."""
        if layer not in self.routes:
            share = self.spec.plan.placement.share[layer]
            self.routes[layer] = route(self.experts[:, layer], self.source, share)
        return self.routes[layer]

    def layer(
        self, number: int, layer: int, x: torch.Tensor, dispatch: list[Piece], combine: list[Piece]
    ) -> torch.Tensor:
        """One layer on this rank: every step starts when all ranks have finished the one before."""
        path, model, mode = self.route_of(layer), self.spec.model, self.spec.plan.send_order.mode
        sending, receiving = path.outgoing(self.rank), path.incoming(self.rank)
        position = torch.from_numpy(np.searchsorted(self.mine, path.token[sending])).to(self.device)
        choice = torch.from_numpy(path.choice[sending]).to(self.device)
        chosen = torch.from_numpy(self.experts[self.mine, layer].astype(np.int64)).to(self.device)
        expert_of_row = path.expert[receiving]
        rows_of = {int(e): torch.from_numpy(np.flatnonzero(expert_of_row == e)).to(self.device)
                   for e in np.unique(expert_of_row)}  # fmt: skip
        with self.paused():
            held = {expert: self.weights.expert(layer, expert) for expert in rows_of}
        incoming = torch.empty((len(receiving), model.d_model), dtype=self.dtype, device=self.device)
        back = torch.empty((len(sending), model.d_model), dtype=self.dtype, device=self.device)

        with self.step(number, layer, "gate"):
            normal, weight = gate(x, self.weights.router[layer], chosen)
        outgoing = normal[position]
        self.exchange(number, layer, "dispatch", mode, dispatch, path.counts, outgoing, incoming)
        result = torch.empty_like(incoming)
        with self.step(number, layer, "ffn"):
            for expert, rows in rows_of.items():
                result[rows] = ffn(incoming[rows], *held[expert], model.ffn_matrices == 3)
        self.exchange(number, layer, "combine", mode, combine, path.counts.T, result, back)
        with self.step(number, layer, "aggregate"):
            return aggregate(x, back, weight[position, choice], position)

    @contextlib.contextmanager
    def paused(self):
        """Stop the clock of all ranks: a served model has its weights in place, here every layer brings its own. All
        ranks take rank 0's word for how long it took, so that their clocks stay together."""
        dist.barrier()
        begin = self.now()
        yield
        dist.barrier()
        length = torch.tensor(self.now() - begin, dtype=torch.float64, device=self.device)
        dist.broadcast(length, 0)
        self.pauses += float(length)

    @contextlib.contextmanager
    def step(self, number: int, layer: int, kind: str):
        """Time a computation that starts on all ranks together."""
        dist.barrier()
        begin = self.now()
        yield
        self.log(number, layer, kind, 0, self.rank, -1, 0, 0.0, begin, self.now())

    def exchange(
        self, number: int, layer: int, kind: str, mode: OrderMode, order: list[Piece], counts: np.ndarray,
        outgoing: torch.Tensor, incoming: torch.Tensor,
    ) -> None:  # fmt: skip
        """An all-to-all in the given order. outgoing: rows ordered by destination, incoming: rows ordered by source."""
        send_from = np.concatenate([[0], np.cumsum(counts[self.rank])])
        receive_at = np.concatenate([[0], np.cumsum(counts[:, self.rank])])
        sends = [piece for piece in order if piece.src == self.rank]
        receives = [piece for piece in order if piece.dst == self.rank]

        def rows(piece: Piece) -> torch.Tensor:
            if piece.src == self.rank:
                return outgoing[send_from[piece.dst] + piece.begin : send_from[piece.dst] + piece.end]
            return incoming[receive_at[piece.src] + piece.begin : receive_at[piece.src] + piece.end]

        dist.barrier()
        own = slice(receive_at[self.rank], receive_at[self.rank + 1])
        incoming[own] = outgoing[send_from[self.rank] : send_from[self.rank + 1]]
        if mode == "sequential":
            begun = self.now()
            pending = [(piece, dist.irecv(rows(piece), piece.src, tag=0)) for piece in receives]
            for piece in sends:
                begin = self.now()
                dist.isend(rows(piece), piece.dst, tag=0).wait()
                self.log_piece(number, layer, kind, piece, begin)
            for piece, work in pending:
                work.wait()
                self.log_piece(number, layer, kind, piece, begun)
            return
        for phase in sorted({piece.phase for piece in sends + receives}):
            here = [piece for piece in receives + sends if piece.phase == phase]
            begin = self.now()
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend if p.src == self.rank else dist.irecv, rows(p),
                            p.dst if p.src == self.rank else p.src, tag=phase) for p in here]
            )  # fmt: skip
            for work in works:
                work.wait()
            for piece in here:
                self.log_piece(number, layer, kind, piece, begin)

    def log_piece(self, number: int, layer: int, kind: str, piece: Piece, begin: float) -> None:
        """A send seen from this rank's end of it; both ends are joined into one event later."""
        size = (piece.end - piece.begin) * self.spec.model.bytes_per_token
        self.log(number, layer, kind, piece.phase, piece.src, piece.dst, piece.begin, size, begin, self.now())

    def log(self, number: int, *event) -> None:
        """Keep an event of a timed pass; the warm-up (pass 0) is not kept."""
        if number:
            self.events.append((number, *event))

    def now(self) -> float:
        """Seconds on the clock that all ranks of this machine share, pauses left out, with the device's work done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic() - self.pauses

    def tell(self, done: float, message: str) -> None:
        """A progress line for the process that started the launch."""
        if self.rank == 0:
            # In one write with its line end: unbuffered, `print` makes two, and other ranks share the stream.
            sys.stdout.write(PROGRESS + json.dumps({"done": done, "message": message}) + "\n")
            sys.stdout.flush()

    def check(self, output: torch.Tensor) -> None:
        """Gather the output and compare it with the reference on rank 0."""
        ranks, model = self.spec.ranks, self.spec.model
        counts = np.bincount(self.source, minlength=ranks)
        parts = [torch.empty((int(c), model.d_model), dtype=self.dtype, device=self.device) for c in counts]
        if self.rank == 0:
            parts[0] = output
            for other in range(1, ranks):
                dist.recv(parts[other], other)
        else:
            dist.send(output.contiguous(), 0)
        if self.rank:
            return
        self.tell(0.85, "checking the output against the unplanned forward pass")
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        x = tokens_in(len(self.experts), model, self.spec.seed, self.device, self.dtype)
        wanted = reference(torch.from_numpy(self.experts.astype(np.int64)).to(self.device), model, self.weights, x)
        planned = torch.empty_like(wanted)
        for other, part in enumerate(parts):
            planned[torch.from_numpy(np.flatnonzero(self.source == other)).to(self.device)] = part
        scale = float(wanted.float().abs().max())
        difference = float((planned.float() - wanted.float()).abs().max()) / scale
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        (self.folder / REPORT).write_text(json.dumps({"difference": difference, "device": device}))


EVENT = ("number", "layer", "kind", "phase", "src", "dst", "row", "bytes", "start", "end")

if __name__ == "__main__":
    main(Path(sys.argv[1]))
