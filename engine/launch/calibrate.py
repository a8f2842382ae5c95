"""A short measurement of the machine at the start of every launch, so that the prediction laid beside the measured run
is for this machine and not for the drawn one. It measures the run's own steps, all ranks at work, at sizes around those
that the run will have."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from engine.launch.job import Job
from engine.launch.layer import aggregate, ffn, gate

AROUND = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Sizes measured, relative to the mean size in the run."""

REPEATS = 3


def calibrate(job: Job) -> dict[str, list]:
    """Median seconds over `REPEATS` runs: {"gemm" | "gate" | "memory" | "network": [[size, seconds], ...]}.

    gemm: the mean rank's experts one after another, each on m rows; seconds of one of the two GEMMs of one expert, taken
    to be equal, size = m·n·k; gate: the router on m rows, size = m·n·k; memory: one aggregation, size in bytes; network:
    every rank sends to every other one at once, size in bytes that one rank sends.
    """
    spec, model, rank, device = job.spec, job.spec.model, job.rank, job.device
    tokens, layers = job.tokens[0].experts.shape[:2]
    weights = job.weights(model, layers)
    copies = tokens * model.experts_per_token
    held = max(1, model.experts // spec.ranks)
    experts = [weights.expert(0, expert) for expert in range(held)]
    gated, two_gemms = model.ffn_matrices == 3, model.ffn_matrices * model.d_model * model.d_ff
    measured: dict[str, list] = {"gemm": [], "gate": [], "memory": [], "network": []}
    for times in AROUND:
        rows = rows_of(times, copies / model.experts)
        x = torch.ones((rows * held, model.d_model), dtype=weights.dtype, device=device)
        parts = torch.arange(rows * held, device=device).split(rows)
        out = torch.empty_like(x)

        def one_ffn(x=x, parts=parts, out=out) -> None:
            for part, matrices in zip(parts, experts, strict=True):
                out[part] = ffn(x[part], *matrices, gated)

        measured["gemm"].append([rows * two_gemms / 2, seconds_of(one_ffn, job) / held / 2])

        rows = rows_of(times, tokens / spec.ranks)
        x = torch.ones((rows, model.d_model), dtype=weights.dtype, device=device)
        chosen = torch.arange(model.experts_per_token, device=device).expand(rows, -1)
        token = torch.arange(rows, device=device).repeat(model.experts_per_token)
        outputs, weight = x[token], torch.ones(len(token), dtype=x.dtype, device=device)

        def one_gate(x=x, chosen=chosen) -> None:
            gate(x, weights.router[0], chosen)

        def one_sum(x=x, outputs=outputs, weight=weight, token=token) -> None:
            aggregate(x, outputs, weight, token)

        measured["gate"].append([rows * model.experts * model.d_model, seconds_of(one_gate, job)])
        moved = rows * (model.experts_per_token + 1) * model.bytes_per_token
        measured["memory"].append([moved, seconds_of(one_sum, job)])

        if spec.ranks > 1:
            rows = rows_of(times, copies / spec.ranks**2)
            outgoing = torch.zeros((spec.ranks, rows, model.d_model), dtype=weights.dtype, device=device)
            incoming = torch.empty_like(outgoing)

            def one_exchange(outgoing=outgoing, incoming=incoming) -> None:
                peers = [peer for peer in range(spec.ranks) if peer != rank]
                receives = [dist.P2POp(dist.irecv, incoming[peer], peer) for peer in peers]
                sends = [dist.P2POp(dist.isend, outgoing[peer], peer) for peer in peers]
                for work in dist.batch_isend_irecv(receives + sends):
                    work.wait()

            sent = (spec.ranks - 1) * rows * model.bytes_per_token
            measured["network"].append([sent, seconds_of(one_exchange, job)])
    return measured


def rows_of(times: float, mean: float) -> int:
    """A whole number of rows; a small mean counts as 8, so that the sizes measured differ and a line can be fitted."""
    return round(times * max(mean, 8.0))


def seconds_of(work: Callable[[], None], job: Job) -> float:
    """Median seconds, the same figure on all ranks, from the first rank's start to the last one's end: ranks that share
    cores wait for each other, which a rank's own stopwatch would not see."""
    spans = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        begin = job.recorder.now()
        work()
        ends = torch.tensor([-begin, job.recorder.now()], dtype=torch.float64, device=job.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        spans.append(float(ends.sum()))
    return sorted(spans[1:])[REPEATS // 2]
