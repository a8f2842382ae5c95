"""What one pass through a model's MoE layers asks of every GPU and of the network, under a placement.

Attention under context-coherent execution: it runs where a token is, so the GPU that carries most tokens decides.

Attention at home costs every plan the same and is left out of all timelines. Where tokens are carried, what it takes longer
than that is not: it is an event of its own before the gate.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.cluster import Gpu
from engine.communication.travel import rows_of_tokens, rows_to_all
from engine.errors import InputError
from engine.network import Network
from engine.plan import Execution, Placement, Plan, Travel, TravelUnit
from engine.problem import Problem
from engine.workload import RoutingTrace


def attention_excess(problem: Problem, tokens: np.ndarray) -> np.ndarray:
    """float64[layer, gpu]: seconds before the gate of every MoE layer for which a GPU still runs attention when all would be
    done with the tokens at home, in that layer and the dense ones before it. 0 where a GPU is done sooner.

    tokens: float64[layer, gpu], the tokens that every GPU carries; those of the first layer are at home
    """
    cost, keys = problem.cost, keys_of_token(problem.workload, problem.model.sequence_length)
    of_gpu = [
        cost.attention(gpu, mine, keys, problem.model) for gpu, mine in zip(problem.cluster.gpus, tokens.T, strict=True)
    ]
    seconds = cost.together(np.stack(of_gpu, axis=1))
    between = np.diff(problem.model.moe_layers, prepend=-1)
    return np.maximum(seconds - seconds[0].max(), 0.0) * between[:, None]


def keys_of_token(trace: RoutingTrace, sequence_length: int) -> int:
    """Tokens that a token looks back on in the mean, itself included. sequence_length: of a recording without sequences"""
    length = np.array([sequence_length], dtype=np.float64)
    if trace.sequence is not None and trace.tokens:
        length = np.unique(trace.sequence, return_counts=True)[1].astype(np.float64)
    return max(1, round((length * (length + 1) / 2).sum() / length.sum()))


@dataclass(frozen=True, eq=False)
class Work:
    """dispatch, combine: float64[layer, src, dst] bytes, the diagonal is what stays

    compute: by kind (gate, ffn, aggregate, where tokens are carried also attention), float64[layer, gpu] seconds
    gather: float64[src, dst] bytes of the all-gather after the last layer, hop by hop, None where there is none
    unit: what gets one row of a token
    prompt_gather: the same of the one before the first layer
    """

    dispatch: np.ndarray
    combine: np.ndarray
    compute: dict[str, np.ndarray]
    gather: np.ndarray | None = None
    unit: TravelUnit = "copies"
    prompt_gather: np.ndarray | None = None

    def carrying(self, network: Network, exchange: str, layer: int) -> Network:
        """The network as fast as it is in the dispatch or combine of a layer."""
        return network.carrying(exchange, self.unit, getattr(self, exchange)[layer])

    def carried(self, network: Network, exchange: str) -> Iterator[tuple[Network, np.ndarray]]:
        """Of every layer the network as fast as it is then, and what it carries (float64[src, dst] bytes)."""
        for layer, traffic in enumerate(getattr(self, exchange)):
            yield self.carrying(network, exchange, layer), traffic

    def stretch(self, first: int, last: int) -> "Work":
        """The work of layers first … last, both included."""
        here = slice(first, last + 1)
        compute = {kind: step[here] for kind, step in self.compute.items()}
        gather = self.gather if last + 1 >= len(self.dispatch) else None
        prompt_gather = self.prompt_gather if first == 0 else None
        return Work(self.dispatch[here], self.combine[here], compute, gather, self.unit, prompt_gather)


def work_of(
    placement: Placement, problem: Problem, execution: Execution = "vanilla", travel: Travel | None = None
) -> Work:
    """The work of one model. travel: None: every copy of a token on its own. Raises InputError for a context-coherent pass of a
    workload without tokens."""
    if execution == "context-coherent":
        return _context_coherent(placement, problem, travel or Travel())
    held, unit = problem.tokens_of_rank, (travel or Travel()).unit
    compute = compute_seconds(placement, problem, held, held, travel)
    return Work(*traffic_both_ways(placement, problem, travel), compute, unit=unit)


def traffic_both_ways(placement: Placement, problem: Problem, travel: Travel | None) -> tuple[np.ndarray, np.ndarray]:
    """float64[layer, src, dst] bytes of dispatch and of combine where tokens return to their rank after every layer."""
    out, back = (travel or Travel()).row_bytes(problem.model)
    dispatch = problem.traffic(placement, travel)
    combine = dispatch.transpose(0, 2, 1)
    return dispatch, combine if out == back else combine * (back / out)


def works_of(plan: Plan, problem: Problem) -> tuple[Work, ...]:
    """The work of every model of a plan, as it is executed."""
    first = work_of(plan.placement, problem, plan.execution, plan.travel)
    if plan.placement_b is None:
        return (first,)
    return first, work_of(plan.placement_b, problem.second, travel=plan.travel)


def compute_seconds(
    placement: Placement, problem: Problem, before: np.ndarray, after: np.ndarray, travel: Travel | None = None
) -> dict[str, np.ndarray]:
    """float64[layer, gpu] seconds of `gate`, `ffn` and `aggregate` under a placement.

    before, after: float64[layer, gpu], the tokens that a GPU gates and those that it aggregates; travel: says which copies of
    an expert serve them, None: all alike.
    """
    cost, model = problem.cost, problem.model
    layer, expert, host = np.nonzero(placement.share)
    tokens = problem.served(placement, travel)[layer, expert, host]
    seconds = {kind: np.zeros(before.shape) for kind in ("gate", "ffn", "aggregate")}
    for gpu, ranks in _ranks_of_kinds(problem.cluster.gpus):
        mine = np.isin(host, ranks)
        seconds["gate"][:, ranks] = cost.gate(gpu, before[:, ranks], model)
        np.add.at(seconds["ffn"], (layer[mine], host[mine]), cost.expert_ffn(gpu, tokens[mine], model))
        seconds["aggregate"][:, ranks] = cost.aggregate(gpu, after[:, ranks], model)
    return {kind: cost.together(step) for kind, step in seconds.items()}


def _ranks_of_kinds(gpus: Sequence[Gpu]) -> Iterable[tuple[Gpu, list[int]]]:
    """Every kind of GPU and its ranks."""
    ranks: dict[Gpu, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu, []).append(rank)
    return ranks.items()


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


def _context_coherent(placement: Placement, problem: Problem, travel: Travel) -> Work:
    """Tokens hop from carrier to carrier; with more than one expert per token the others' outputs are combined there.

    Top-1 has no second all-to-all at all. Before the first layer every GPU gives the tokens of its prompts to all others, and
    after the last one those that it carries (ExFlow §IV-A; Table I counts the second, G·N tokens to G GPUs).
    """
    trace, gpus = problem.workload, len(problem.cluster.gpus)
    if not isinstance(trace, RoutingTrace):
        raise InputError(
            f"context-coherent execution follows every token from layer to layer, but {trace.name} has no tokens; use "
            "a routing log"
        )
    carrier = carriers(trace, placement, gpus)
    rows, held = np.zeros((2, trace.layers, gpus, gpus)), np.zeros((2, trace.layers, gpus))
    routed = (trace.experts >= 0).sum(axis=2)
    real = routed.any(axis=1)
    for layer in range(trace.layers):
        hosts = placement.hosts(layer, trace.experts[:, layer])
        rows[0, layer] = rows_of_tokens(hosts, carrier[layer], problem.stops, travel.unit)
        rows[1, layer] = rows_of_tokens(hosts, carrier[layer + 1], problem.stops, travel.unit).T
        # As in a vanilla pass, padding is no token, and one with half of its choices counts half.
        for side in range(2):
            held[side, layer] = np.bincount(carrier[layer + side], routed[:, layer] / trace.k, gpus)
    out, back = travel.row_bytes(problem.model)
    prompt_gather, gather = (
        rows_to_all(np.bincount(holder[real], minlength=gpus), problem.stops) * problem.model.bytes_per_token
        for holder in (carrier[0], carrier[-1])
    )
    compute = compute_seconds(placement, problem, *held)
    if problem.runs_attention:
        carried = np.array([np.bincount(holder[real], minlength=gpus) for holder in carrier[:-1]], dtype=np.float64)
        compute["attention"] = attention_excess(problem, carried)
    return Work(rows[0] * out, rows[1] * back, compute, gather, travel.unit, prompt_gather)
