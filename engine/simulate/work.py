"""What one pass through a model's MoE layers asks of every GPU and of the network, under a placement."""

from dataclasses import dataclass

import numpy as np

from engine.cluster import Gpu
from engine.errors import InputError
from engine.plan import Execution, Placement
from engine.problem import Problem
from engine.workload import RoutingTrace


@dataclass(frozen=True, eq=False)
class Work:
    """dispatch, combine: float64[layer, src, dst] bytes, the diagonal is what stays

    compute: by kind (gate, ffn, aggregate), float64[layer, gpu] seconds
    gather: float64[src, dst] bytes of the all-gather after the last layer, None where there is none
    """

    dispatch: np.ndarray
    combine: np.ndarray
    compute: dict[str, np.ndarray]
    gather: np.ndarray | None = None

    def stretch(self, first: int, last: int) -> "Work":
        """The work of layers first … last, both included."""
        here = slice(first, last + 1)
        compute = {kind: step[here] for kind, step in self.compute.items()}
        ends = last + 1 >= len(self.dispatch)
        return Work(self.dispatch[here], self.combine[here], compute, self.gather if ends else None)


def work_of(placement: Placement, problem: Problem, execution: Execution = "vanilla") -> Work:
    """The work of one model. Raises InputError for a context-coherent pass of a workload without tokens."""
    if execution == "context-coherent":
        return _context_coherent(placement, problem)
    traffic, held = problem.traffic(placement), problem.tokens_of_rank
    return Work(traffic, traffic.transpose(0, 2, 1), compute_seconds(placement, problem, held, held))


def compute_seconds(
    placement: Placement, problem: Problem, before: np.ndarray, after: np.ndarray
) -> dict[str, np.ndarray]:
    """float64[layer, gpu] seconds of `gate`, `ffn` and `aggregate` under a placement.

    before, after: float64[layer, gpu], the tokens that a GPU gates and those that it aggregates.
    """
    cost, model = problem.cost, problem.model
    tokens = (problem.demand.sum(axis=1)[:, :, None] * placement.share).transpose(0, 2, 1)
    seconds = {kind: np.empty(before.shape) for kind in ("gate", "ffn", "aggregate")}
    ranks_of_gpu: dict[Gpu, list[int]] = {}
    for rank, gpu in enumerate(problem.cluster.gpus):
        ranks_of_gpu.setdefault(gpu, []).append(rank)
    for gpu, ranks in ranks_of_gpu.items():
        seconds["gate"][:, ranks] = cost.gate(gpu, before[:, ranks], model)
        held = tokens[:, ranks, :]
        expert_seconds, served = (
            np.zeros(held.shape),
            held > 0,
        )  # most experts are elsewhere, and no tokens take no time
        expert_seconds[served] = cost.expert_ffn(gpu, held[served], model)
        seconds["ffn"][:, ranks] = expert_seconds.sum(axis=2)
        seconds["aggregate"][:, ranks] = cost.aggregate(gpu, after[:, ranks], model)
    return {kind: cost.together(step) for kind, step in seconds.items()}


def carriers(trace: RoutingTrace, placement: Placement, ranks: int) -> np.ndarray:
    """int64[layer + 1, token]: the GPU that carries a token into every layer, and out of the last one.

    A token starts on its source rank and goes on from the GPU of its first-listed expert (with top-1 gating its only
    one, ExFlow §IV-A); where it chose nothing it stays.
    """
    home = placement.gpu_of_expert
    carrier = np.empty((trace.layers + 1, trace.tokens), dtype=np.int64)
    carrier[0] = trace.rank_of_token(ranks)
    for layer in range(trace.layers):
        first = trace.experts[:, layer, 0].astype(np.int64)
        carrier[layer + 1] = np.where(first >= 0, home[layer, first], carrier[layer])
    return carrier


def _context_coherent(placement: Placement, problem: Problem) -> Work:
    """Tokens hop from carrier to carrier; with more than one expert a token the others' outputs are combined there.

    Top-1 has no second all-to-all at all. At the end every GPU gives the tokens it carries to all others (ExFlow
    §IV-A, Table I: G·N tokens).
    """
    trace, gpus = problem.workload, len(problem.cluster.gpus)
    if not isinstance(trace, RoutingTrace):
        raise InputError(
            f"context-coherent execution follows every token from layer to layer, but {trace.name} has no tokens; use "
            "a routing log"
        )
    home, carrier = placement.gpu_of_expert, carriers(trace, placement, gpus)
    copies, held = np.zeros((2, trace.layers, gpus * gpus)), np.zeros((2, trace.layers, gpus))
    routed = (trace.experts >= 0).sum(axis=2)
    for layer in range(trace.layers):
        chosen = trace.experts[:, layer, :].astype(np.int64)
        token, rank = np.nonzero(chosen >= 0)
        host = home[layer, chosen[token, rank]]
        copies[0, layer] = np.bincount(carrier[layer, token] * gpus + host, minlength=gpus * gpus)
        copies[1, layer] = np.bincount(host * gpus + carrier[layer + 1, token], minlength=gpus * gpus)
        # As in a vanilla pass, padding is no token, and one with half of its choices counts half.
        for side in range(2):
            held[side, layer] = np.bincount(carrier[layer + side], routed[:, layer] / trace.k, gpus)
    bytes_moved = copies.reshape(2, trace.layers, gpus, gpus) * problem.model.bytes_per_token
    left = np.bincount(carrier[-1][routed.any(axis=1)], minlength=gpus)
    gather = np.repeat(left[:, None] * problem.model.bytes_per_token, gpus, axis=1)
    return Work(bytes_moved[0], bytes_moved[1], compute_seconds(placement, problem, *held), gather)
