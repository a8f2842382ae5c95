"""A short measurement of the machine before a training step is launched, in the step's own sizes, as
`engine.launch.rank.measure_machine` does for a forward pass."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.launch.rank.context import RankContext
from engine.launch.rank.measure_machine import REPEATS, SHORT_REPEATS, rows_of, seconds_of
from engine.launch.step.run import start_collective
from engine.overlap.operator_graph import Gemm, OperatorGraph
from engine.overlap.transformer import transformer_step

SHAPES = 8
"""Most GEMMs measured, evenly spread from the smallest to the largest of the step."""
PARTS = (0.25, 0.5, 1.0)
"""Parts of an all-to-all and of a pass over memory, which a plan may cut."""
REDUCED = (1 / 512, 1 / 64, 1 / 8, 1.0)
"""Parts of the largest gradient whose all-reduces are measured."""


def measure_machine_for_step(context: RankContext) -> dict[str, list]:
    """Median seconds of the slowest rank, all ranks at work: {"gemm" | "memory" | "network" | "all_reduce": [[size,
    seconds], ...]}. The last two include their copies if a GPU's tensors pass through the host.

    gemm: products of the step's shapes, size = m·n·k
    memory: layer norms of parts of a rank's tokens, size in bytes read and written
    network: every rank sends as much to every other one, size in bytes that one rank sends; the first is an exchange of sizes
        before an all-to-all of real tokens only, until the numbers are on the host
    all_reduce: size in bytes of the buffer
    """
    graph = transformer_step(context.instructions.model, context.instructions.step, context.ranks)
    shapes = {(gemm.m * gemm.n * gemm.k, gemm.m, gemm.n): gemm for operator in graph.operators for gemm in operator.gemms}
    ordered = [shapes[key] for key in sorted(shapes)]
    places = np.unique(np.linspace(0, len(ordered) - 1, min(SHAPES, len(ordered))).round().astype(int))
    measured = {
        "gemm": [_gemm(context, ordered[place]) for place in places],
        "memory": [_memory(context, part) for part in PARTS],
        "network": [],
        "all_reduce": [],
    }
    if context.ranks > 1:
        measured["network"] = [_sizes(context), *(_all_to_all(context, graph, part) for part in PARTS)]
        largest = max(operator.sent for operator in graph.of_phase("all_reduce")) / context.dtype.itemsize
        measured["all_reduce"] = [_all_reduce(context, rows_of(part, largest)) for part in REDUCED]
    return measured


def _gemm(context: RankContext, shape: Gemm) -> list[float]:
    rows = torch.ones((shape.m, shape.k), dtype=context.dtype, device=context.device)
    weights = torch.ones((shape.k, shape.n), dtype=context.dtype, device=context.device)
    return [shape.m * shape.n * shape.k, seconds_of(lambda: rows @ weights, context, REPEATS)]


def _memory(context: RankContext, part: float) -> list[float]:
    shape = (rows_of(part, context.instructions.step.tokens), context.instructions.model.d_model)
    x = torch.ones(shape, dtype=context.dtype, device=context.device)
    seconds = seconds_of(lambda: torch.nn.functional.layer_norm(x, x.shape[1:]), context, REPEATS)
    return [2.0 * x.nbytes, seconds]


def _all_to_all(context: RankContext, graph: OperatorGraph, part: float) -> list[float]:
    most = max(operator.sent for operator in graph.operators if operator.kind == "dispatch")
    each = rows_of(part, most / context.ranks / context.dtype.itemsize)
    outgoing = torch.zeros(each * context.ranks, dtype=context.dtype, device=context.device)
    tensors = [outgoing, torch.empty_like(outgoing)]

    def exchange(sent: Tensor, received: Tensor) -> dist.Work:
        return dist.all_to_all_single(received, sent, async_op=True)

    seconds = seconds_of(lambda: start_collective(context, exchange, tensors)(), context, SHORT_REPEATS)
    return [float(outgoing.nbytes) * (context.ranks - 1) / context.ranks, seconds]


def _sizes(context: RankContext) -> list[float]:
    experts = max(1, context.instructions.model.experts // context.ranks)
    outgoing = torch.zeros(experts * context.ranks, dtype=torch.int64, device=context.device)
    tensors = [outgoing, torch.empty_like(outgoing)]

    def exchange(sent: Tensor, received: Tensor) -> dist.Work:
        return dist.all_to_all_single(received, sent, async_op=True)

    def known() -> list[int]:
        start_collective(context, exchange, tensors)()
        return tensors[-1].tolist()

    return [float(outgoing.nbytes) * (context.ranks - 1) / context.ranks, seconds_of(known, context, REPEATS)]


def _all_reduce(context: RankContext, numbers: int) -> list[float]:
    buffer = torch.zeros(max(1, numbers), dtype=context.dtype, device=context.device)

    def reduce(gradients: Tensor) -> dist.Work:
        return dist.all_reduce(gradients, async_op=True)

    return [float(buffer.nbytes), seconds_of(lambda: start_collective(context, reduce, [buffer])(), context, REPEATS)]
