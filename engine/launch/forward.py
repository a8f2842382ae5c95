"""One model's MoE layers forward: gate, dispatch in the plan's order, expert FFNs, combine, aggregate; every step starts when
all ranks have finished the one before, as `engine.simulate.inference` has it."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from engine.launch.exchange import Exchange
from engine.launch.job import Job
from engine.launch.layer import aggregate, ffn, gate, reference, tokens_in
from engine.launch.recorder import Mark
from engine.launch.routes import Piece, Route, pieces, route
from engine.plan import Plan


class Forward:
    """Executor of a plan for one model with vanilla execution."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self.job, self.plan = job, plan
        self.model, self.experts, self.source = job.spec.model, job.tokens[0].experts, job.tokens[0].source
        self.layers = self.experts.shape[1]
        self.weights = job.weights(self.model, self.layers)
        self.mine = np.flatnonzero(self.source == job.rank)
        self.routes = [route(self.experts[:, layer], self.source, plan.placement.share[layer])
                       for layer in range(self.layers)]  # fmt: skip
        order, scheduled = plan.send_order, plan.send_order.mode != "concurrent"
        self.dispatch, self.combine = [], []
        for layer, path in enumerate(self.routes):
            out, back = (order.dispatch[layer], order.combine[layer]) if scheduled else (None, None)
            self.dispatch.append(pieces(order.mode, out, path.counts))
            self.combine.append(pieces(order.mode, back, path.counts.T))
        self.output: torch.Tensor | None = None

    def run(self, tell: Callable[[float, str], None]) -> None:
        job = self.job
        x = tokens_in(len(self.experts), self.model, job.spec.seed, job.device, job.dtype)[self.mine]
        for layer in range(self.layers):
            tell(layer / self.layers, f"layer {layer + 1} of {self.layers}")
            x = self.layer(layer, x)
        self.output = x

    def layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """One layer on this rank. x: [own token, d_model]."""
        path, model, job = self.routes[layer], self.model, self.job
        sending, receiving = path.outgoing(job.rank), path.incoming(job.rank)
        position = self._on_device(np.searchsorted(self.mine, path.token[sending]))
        choice = self._on_device(path.choice[sending])
        chosen = self._on_device(self.experts[self.mine, layer].astype(np.int64))
        expert_of_row = path.expert[receiving]
        rows_of = {int(e): self._on_device(np.flatnonzero(expert_of_row == e)) for e in np.unique(expert_of_row)}
        # A served model has its weights in place, here every layer brings its own.
        with job.recorder.paused():
            held = {expert: self.weights.expert(layer, expert) for expert in rows_of}
        incoming = torch.empty((len(receiving), model.d_model), dtype=x.dtype, device=x.device)
        back = torch.empty((len(sending), model.d_model), dtype=x.dtype, device=x.device)

        with self.together("gate", layer):
            normal, weight = gate(x, self.weights.router[layer], chosen)
        outgoing = normal[position]
        self.exchange("dispatch", layer, path, outgoing, incoming)
        result = torch.empty_like(incoming)
        with self.together("ffn", layer):
            for expert, rows in rows_of.items():
                result[rows] = ffn(incoming[rows], *held[expert], model.ffn_matrices == 3)
        self.exchange("combine", layer, path, result, back)
        with self.together("aggregate", layer):
            return aggregate(x, back, weight[position, choice], position)

    @contextlib.contextmanager
    def together(self, kind: str, layer: int) -> Iterator[None]:
        """Time a computation that starts on all ranks together."""
        dist.barrier()
        with self.job.recorder.computing(kind, layer):
            yield

    def exchange(self, kind: str, layer: int, path: Route, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        """The dispatch or combine of a layer, started on all ranks together."""
        recorder, mode = self.job.recorder, self.plan.send_order.mode
        order, counts = (
            (self.dispatch[layer], path.counts) if kind == "dispatch" else (self.combine[layer], path.counts.T)
        )

        def log(piece: Piece, begin: Mark) -> None:
            size = (piece.end - piece.begin) * self.model.bytes_per_token
            recorder.log(kind, layer, begin, recorder.mark(), phase=piece.phase, src=piece.src, dst=piece.dst,
                         row=piece.begin, bytes=size)  # fmt: skip

        dist.barrier()
        Exchange(self.job.rank, mode, order, counts, log, recorder).run(outgoing, incoming)

    def difference(self) -> float | None:
        job = self.job
        parts = gathered(self.output, np.bincount(self.source, minlength=job.ranks), job)
        if parts is None:
            return None
        job.use_all_cores()
        x = tokens_in(len(self.experts), self.model, job.spec.seed, job.device, job.dtype)
        wanted = reference(self._on_device(self.experts.astype(np.int64)), self.model, self.weights, x)
        planned = torch.empty_like(wanted)
        for rank, part in enumerate(parts):
            planned[self._on_device(np.flatnonzero(self.source == rank))] = part
        return float((planned.float() - wanted.float()).abs().max()) / float(wanted.float().abs().max())

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.job.device)


def gathered(output: torch.Tensor, counts: np.ndarray, job: Job) -> list[torch.Tensor] | None:
    """On rank 0 every rank's output, counts: int64[rank] rows; None on the others."""
    if job.rank:
        dist.send(output.contiguous(), 0)
        return None
    shape, parts = output.shape[1:], [output]
    for other in range(1, job.ranks):
        parts.append(torch.empty((int(counts[other]), *shape), dtype=output.dtype, device=output.device))
        dist.recv(parts[other], other)
    return parts
