"""A short measurement of the machine at the start of every launch, so that the prediction compared with the measured run is for
this machine and not for the drawn one. It measures the run's own steps, all ranks at work, at sizes around those of the run."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from engine.launch.rank.communicator import Communicator
from engine.launch.rank.context import RankContext
from engine.launch.rank.instructions import RankInstructions
from engine.launch.rank.layer import gate
from engine.plan import OrderMode
from engine.runtime.exchange.all_to_all import Exchange
from engine.runtime.exchange.routes import Piece
from engine.runtime.experts import aggregate, expert_ffns, uses_grouped_gemms

AROUND = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Sizes measured, relative to the mean size in the run."""

REPEATS, SHORT_REPEATS = 3, 9
"""Repeats of each measurement: of computations and large exchanges, and of short ones, in which a rank that had to wait
for a processor shows."""


def measure_machine(context: RankContext) -> dict[str, list]:
    """Median seconds: {"gemm" | "gate" | "memory" | "network" | "phases" | "meetings": [[size, seconds], ...]}, and if
    ranks relay for each other over links that are not known beforehand, "inside nodes" and "between nodes".

    gemm: the mean rank's experts one after another, each on m rows; seconds of one of the two GEMMs of one expert,
        taken to be equal, size = m·n·k
    gate: the router on m rows, size = m·n·k
    memory: one aggregation, size in bytes
    network: every rank sends to every other one at once, size in bytes that one rank sends
    phases: every rank sends to one after another in a rotation, seconds of one phase, size in bytes of one send
    inside nodes, between nodes: as network, but only to the ranks of its own node (of the others), size in bytes of the
        rank that sends most
    meetings: seconds from the end of a step on the last rank to the start of the next one on the first, size 0 within a
        layer and 1 between two layers (during which the clocks have been stopped)
    """
    instructions = context.instructions
    # At all sizes with the same experts: to make them can take longer than to multiply by them
    model, held = context.instructions.model, max(1, context.instructions.model.experts // context.instructions.ranks)
    experts = context.weights(model, context.tokens[0].experts.shape[1]).experts(0, range(held))
    measured = {
        "gemm": [_gemm(context, times, *experts) for times in AROUND],
        "gate": [],
        "memory": [],
        "network": [],
        "phases": [],
        "meetings": [],
    }
    for times in AROUND:
        measured["gate"].append(_gate(context, times))
        measured["memory"].append(_memory(context, times))
        if instructions.ranks > 1:
            size, seconds = _exchange(context, times, "concurrent", REPEATS)
            measured["network"].append([size * (instructions.ranks - 1), seconds])
            size, seconds = _exchange(context, times, "matched", SHORT_REPEATS)
            measured["phases"].append([size, seconds / (instructions.ranks - 1)])
        for kind, peers in tier_peers(instructions).items():
            size, seconds = _exchange(context, times, "concurrent", REPEATS, peers)
            measured.setdefault(kind, []).append([size * int(peers.sum(axis=1).max()), seconds])
    measured["meetings"] = [[0, _meeting(context, False)], [1, _meeting(context, True)]]
    return measured


def tier_peers(instructions: RankInstructions) -> dict[str, np.ndarray]:
    """The pairs (bool[src, dst]) inside nodes with links of their own and those between nodes, if there are both and a
    launch has to measure them."""
    if instructions.tiers is None or instructions.bandwidth is not None:
        return {}
    network = instructions.tiers.network
    pairs = ~np.eye(network.gpus, dtype=bool)
    peers = {"inside nodes": pairs & network.linked, "between nodes": pairs & ~network.linked}
    return peers if all(some.any() for some in peers.values()) else {}


def _gemm(context: RankContext, times: float, inward: torch.Tensor, outward: torch.Tensor) -> list[float]:
    model, held, dtype = context.instructions.model, len(inward), inward.dtype
    rows = rows_of(times, len(context.tokens[0].experts) * model.experts_per_token / model.experts)
    x = torch.ones((rows * held, model.d_model), dtype=dtype, device=context.device)
    counts, place = [rows] * held, torch.arange(rows * held, device=context.device)
    grouped = uses_grouped_gemms(context.device, dtype, (inward.shape[2], *outward.shape[1:]))
    ends = rows * torch.arange(1, held + 1, dtype=torch.int32, device=context.device) if grouped else None

    def step() -> None:
        expert_ffns(x[place], counts, inward, outward, model.ffn_matrices == 3, ends)[place]

    two_gemms = model.ffn_matrices * model.d_model * model.d_ff
    return [rows * two_gemms / 2, seconds_of(step, context, REPEATS) / held / 2]


def _gate(context: RankContext, times: float) -> list[float]:
    model, x = context.instructions.model, _rows_of_rank(context, times)
    router = context.weights(model, context.tokens[0].experts.shape[1]).router[0]
    chosen = torch.arange(model.experts_per_token, device=context.device).expand(len(x), -1)
    seconds = seconds_of(lambda: gate(x, router, chosen), context, REPEATS)
    return [len(x) * model.experts * model.d_model, seconds]


def _memory(context: RankContext, times: float) -> list[float]:
    model, x = context.instructions.model, _rows_of_rank(context, times)
    token = torch.arange(len(x), device=context.device).repeat(model.experts_per_token)
    outputs, weight = x[token], torch.ones(len(token), dtype=x.dtype, device=context.device)
    seconds = seconds_of(lambda: aggregate(x, outputs, weight, token), context, REPEATS)
    return [len(x) * (model.experts_per_token + 1) * model.bytes_per_token, seconds]


def _rows_of_rank(context: RankContext, times: float) -> torch.Tensor:
    """[token, d_model]: ones for the tokens of the mean rank."""
    rows = rows_of(times, len(context.tokens[0].experts) / context.ranks)
    return torch.ones((rows, context.instructions.model.d_model), dtype=context.dtype, device=context.device)


def _exchange(
    context: RankContext, times: float, mode: OrderMode, repeats: int, peers: np.ndarray | None = None
) -> tuple[int, float]:
    """The size of one send and the seconds of an exchange in which every rank sends as much to every other one: all at
    once, or matched in as many phases as there are others.

    peers: bool[src, dst], the pairs that send (default: all)
    """
    rows, exchange, expect = _uniform(context, times, mode, peers)
    return rows * context.instructions.model.bytes_per_token, seconds_of(exchange, context, repeats, expect)


def _uniform(
    context: RankContext, times: float, mode: OrderMode, peers: np.ndarray | None = None
) -> tuple[int, Callable[[], None], Callable[[], None]]:
    """Rows of a send, such an exchange, and a function that prepares it."""
    model, ranks = context.instructions.model, context.ranks
    rows = rows_of(times, len(context.tokens[0].experts) * model.experts_per_token / ranks**2)
    order = [
        Piece(0 if mode == "concurrent" else shift, src, (src + shift) % ranks, 0, rows)
        for shift in range(1, ranks)
        for src in range(ranks)
        if peers is None or peers[src, (src + shift) % ranks]
    ]
    way = Exchange(context.rank, mode, order, np.full((ranks, ranks), rows), lambda piece, begin: None, context.recorder)
    outgoing = torch.zeros((ranks * rows, model.d_model), dtype=context.dtype, device=context.device)
    incoming, communicator = torch.empty_like(outgoing), Communicator(context)

    def expect() -> None:
        if not communicator.in_host_memory:
            way.expect(incoming)

    return rows, lambda: communicator.carry(way.run, outgoing, incoming, lambda begin, end: None), expect


def _meeting(context: RankContext, between_layers: bool) -> float:
    """Seconds from the end of a step on the last rank to the start of the next one on the first. The step is an
    exchange, after which ranks come one by one and not, as after another meeting, all at once."""
    communicator, recorder, gaps = Communicator(context), context.recorder, []
    _, exchange, expect = _uniform(context, AROUND[0], "concurrent")
    for _ in range(SHORT_REPEATS + 1):
        expect()
        communicator.meet()
        exchange()
        ready = recorder.mark()
        if between_layers:
            with recorder.paused():
                pass
        communicator.meet()
        gone = recorder.mark()
        if context.device.type == "cuda":  # ranks go on together: the last to be ready has waited least
            gaps.append((0.0, -recorder.seconds_between(ready, gone)))
        else:
            gaps.append((recorder.seconds_at(ready), -recorder.seconds_at(gone)))
    return max(0.0, -_median_of_sums(context, gaps))


def rows_of(times: float, mean: float) -> int:
    """A whole number of rows; a small mean counts as 8, so that the sizes measured differ and a line can be fitted."""
    return round(times * max(mean, 8.0))


def seconds_of(work: Callable[[], None], context: RankContext, repeats: int, before: Callable[[], None] | None = None) -> float:
    """Median seconds, the same figure on all ranks, by the marks that time a pass.

    On processors from the first rank's start to the last one's end: ranks that share cores wait for each other, which a
    rank's own stopwatch would not see. On GPUs the longest time of any rank by its events. After a meeting over NCCL
    its kernels are in the queue already, as in a pass, so that neither handing them over nor waiting for their end
    counts; only a GPU shows how much that is.

    before: called every time, not measured
    """
    communicator, recorder, spans = Communicator(context), context.recorder, []
    for _ in range(repeats + 1):
        if before is not None:
            before()
        communicator.meet()
        begin = recorder.mark()
        work()
        end = recorder.mark()
        if context.device.type == "cuda":
            spans.append((0.0, recorder.seconds_between(begin, end)))
        else:
            spans.append((-recorder.seconds_at(begin), recorder.seconds_at(end)))
    return _median_of_sums(context, spans)


def _median_of_sums(context: RankContext, pairs: list[tuple[float, float]]) -> float:
    """The median of all pairs but the first, each the sum of the largest first and the largest second number that any rank
    has."""
    largest = torch.tensor(pairs[1:], dtype=torch.float64, device=context.communication_device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    sums = sorted(largest.sum(dim=1).tolist())
    return sums[len(sums) // 2]
