"""The work of one pass through a model's MoE layers under a placement: bytes between GPUs and seconds on each.

A `Load` derives it from the recorded tokens, once for all who hold it: simulation, bound and figures of a plan.

Attention at home costs every plan the same and is left out of all timelines. Under context-coherent execution it runs on the
GPU that carries the token, so the one with most tokens decides; its excess over attention at home is an event before the gate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from engine.cluster import Gpu
from engine.communication.travel import places_of, rows_by_chance, rows_of_tokens, rows_to_all, serving_gpus, touched_by_chance
from engine.errors import InputError
from engine.network import Network
from engine.placement.dispatch_rules import served_and_sent, shares_of_ranks
from engine.plan import Execution, Placement, Plan, Travel, TravelUnit
from engine.problem import Problem
from engine.workload import PREFILL, ExpertLoad, MixedTraffic, RoutingTrace, without_seldom

PLAIN = Travel()
"""One row per token copy, as plain all-to-all implementations send them."""


@dataclass(frozen=True, eq=False)
class Work:
    """The work of one model's pass.

    dispatch, combine: float64[layer, src, dst] bytes; the diagonal stays on its GPU
    compute: by kind (gate, ffn, aggregate, and attention for carried tokens), float64[layer, gpu] seconds
    gather: float64[src, dst] bytes of the all-gather after the last layer, hop by hop; None: there is none
    unit: the destination that gets one row of a token
    prompt_gather: float64[src, dst] bytes of the all-gather before the first layer; None: there is none
    passes: that share it, so that its bytes and its time count by as many to each
    """

    dispatch: np.ndarray
    combine: np.ndarray
    compute: dict[str, np.ndarray]
    gather: np.ndarray | None = None
    unit: TravelUnit = "copies"
    prompt_gather: np.ndarray | None = None
    passes: int = 1

    def carrying(self, network: Network, exchange: str, layer: int) -> Network:
        """The network as fast as it is in the dispatch or combine of a layer."""
        return network.carrying(exchange, self.unit, getattr(self, exchange)[layer])

    def carried(self, network: Network, exchange: str) -> Iterator[tuple[Network, np.ndarray]]:
        """Layer by layer, the network as fast as it is then and the float64[src, dst] bytes that it carries."""
        for layer, traffic in enumerate(getattr(self, exchange)):
            yield self.carrying(network, exchange, layer), traffic

    def stretch(self, first: int, last: int) -> "Work":
        """The work of layers first … last, both included."""
        here = slice(first, last + 1)
        compute = {kind: step[here] for kind, step in self.compute.items()}
        gather = self.gather if last + 1 >= len(self.dispatch) else None
        prompt_gather = self.prompt_gather if first == 0 else None
        return Work(self.dispatch[here], self.combine[here], compute, gather, self.unit, prompt_gather, self.passes)


class Load:
    """The load of a placement: the copies that serve each token, the traffic for that, and the work of a pass.

    Each part is computed when it is first asked for and kept as long as the load. At 320 GPUs the traffic of DeepSeek-R1 takes
    48 MB and 0.1 s, so a caller that simulates, bounds and scores one plan holds one load of each model.

    problem: of one model, with its tokens on the GPUs of their start (see `Problem.as_planned`)
    placement: of that model
    travel: how tokens travel; None: one row per token copy
    execution: "vanilla" or "context-coherent"
    """

    def __init__(
        self, problem: Problem, placement: Placement, travel: Travel | None = None, execution: Execution = "vanilla"
    ) -> None:
        self.problem, self.placement, self.travel, self.execution = problem, placement, travel or PLAIN, execution

    @property
    def has_rule(self) -> bool:
        """True if the copies of an expert do not serve equal shares of every rank's tokens."""
        return self.travel.replicas is not None and self.execution == "vanilla" and not self.placement.single

    @property
    def by_rank(self) -> bool:
        """True if the rule looks at the rank that sends, not at each token alone."""
        return self.has_rule and self.travel.replicas != "fewest"

    @property
    def chooses_copies(self) -> bool:
        """True if the copy of every token is followed, False if shares of loads are."""
        return self.has_rule and isinstance(self.problem.workload, RoutingTrace | MixedTraffic)

    @property
    def shares(self) -> Iterator[np.ndarray]:
        """Layer by layer the share of a rank's tokens that each GPU serves: float64[expert, gpu], with a rule that looks at the
        rank float64[source rank, expert, gpu]. Of `fewest`, which looks at tokens, equal shares."""
        for layer, load in enumerate(self.problem.workload.load):
            yield (shares_of_ranks(self.placement, self.travel, layer, load) if self.by_rank else self.placement.share[layer])

    @cached_property
    def hosts(self) -> np.ndarray:
        """int32[layer, token, k]: the GPU that serves each choice of a token of a routing trace, -1 = none."""
        problem, experts = self.problem, self.problem.workload.experts
        source = problem.gpu_of_token
        hosts = np.empty(experts.transpose(1, 0, 2).shape, dtype=np.int32)
        for layer, of_layer in enumerate(hosts):
            of_layer[:] = serving_gpus(self.placement, layer, experts[:, layer], self.travel, source, problem.stops)
        return hosts

    @cached_property
    def served(self) -> np.ndarray:
        """float64[layer, expert, gpu]: token copies of every expert that each GPU serves."""
        if not (self.by_rank or self.chooses_copies):
            return self.problem.demand.sum(axis=1)[:, :, None] * self.placement.share
        if not self.chooses_copies:
            return np.array([served for served, _ in self._by_ranks()])
        return self._followed(Load.served_by)

    def served_by(self, layer: int, hosts: np.ndarray, count: np.ndarray | None) -> np.ndarray:
        """float64[expert, gpu]: token copies of a layer of a routing trace.

        hosts: int[token, k], the GPU of every choice, -1 = none
        count: float64[token], by which a token counts; None: once
        """
        real, served = hosts >= 0, np.zeros(self.placement.share.shape[1:])
        counts = 1.0 if count is None else np.broadcast_to(count[:, None], hosts.shape)[real]
        np.add.at(served, (self.problem.workload.experts[:, layer][real], hosts[real]), counts)
        return served

    @cached_property
    def _parts(self) -> tuple[tuple["Load", np.ndarray | None], ...]:
        """The loads whose tokens are followed, each with what these count: float64[layer, rank], None where each is one."""
        workload = self.problem.workload
        if isinstance(workload, RoutingTrace):
            return ((self, None),)
        alike = self.placement, self.travel, self.execution
        return tuple((Load(replace(self.problem, workload=trace), *alike), count) for trace, count in workload.parts)

    def _followed(self, counted: Callable[["Load", int, np.ndarray, np.ndarray | None], np.ndarray]) -> np.ndarray:
        """float64[layer, …]: sums over tokens, without what is too seldom in a mixture.

        counted: from a load, a layer, int[token, k] hosts, and what each token counts
        """
        sums = []
        for load, count in self._parts:
            rank = load.problem.workload.rank_of_token(len(load.problem.cluster.gpus))
            of_tokens = [None] * len(load.hosts) if count is None else count[:, rank]
            sums.append(
                np.array([counted(load, layer, *both) for layer, both in enumerate(zip(load.hosts, of_tokens, strict=True))])
            )
        return sums[0] if len(sums) == 1 else without_seldom(sum(sums), sums[0])

    def _counted_rows(self, unit: TravelUnit) -> np.ndarray:
        """float64[layer, src, dst] rows of the dispatch, counted on tokens."""
        stops = self.problem.stops
        return self._followed(
            lambda load, layer, hosts, count: rows_of_tokens(hosts, load.problem.gpu_of_token, stops, unit, count)
        )

    @cached_property
    def traffic(self) -> np.ndarray:
        """float64[layer, src, dst], read-only: bytes of the dispatch if tokens return to their rank after every layer; the
        diagonal stays. With `node` travel every hop is an entry, see `engine.communication.travel`; rows of a recording without
        tokens are an estimate, see there."""
        traffic = self._rows()
        traffic *= self.travel.row_bytes(self.problem.model)[0]
        traffic.flags.writeable = False
        return traffic

    def _rows(self) -> np.ndarray:
        """float64[layer, src, dst] rows of the dispatch."""
        problem, share, unit = self.problem, self.placement.share, self.travel.unit
        stops, workload = problem.stops, problem.workload
        if self.chooses_copies or (unit != "copies" and isinstance(workload, RoutingTrace | MixedTraffic)):
            return self._counted_rows(unit)
        if unit == "copies":
            if not self.by_rank:
                return problem.demand @ share
            return np.array([sent for _, sent in self._by_ranks()])
        k, tokens = problem.model.experts_per_token, problem.tokens_of_rank
        places = (places_of(share, stops) if unit == "node" else share for share in self.shares)
        if isinstance(workload, ExpertLoad) and not self.by_rank:  # every source sends alike
            touched = touched_by_chance(workload.load, k, np.array(list(places)))[:, None]
            touched = np.broadcast_to(touched, (*tokens.shape, touched.shape[2]))
        else:
            touched = (touched_by_chance(here, k, place) for here, place in zip(problem.demand, places, strict=True))
        return np.array([rows_by_chance(*layer, stops, unit) for layer in zip(touched, tokens, strict=True)])

    def _by_ranks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Layer by layer the token copies that GPUs serve and that ranks send, where the rule looks at ranks."""
        for layer, of_layer in enumerate(zip(self.problem.demand, self.problem.workload.load, strict=True)):
            yield served_and_sent(self.placement, self.travel, layer, *of_layer)

    @property
    def traffic_back(self) -> np.ndarray:
        """float64[layer, src, dst] bytes of the combine: the dispatch backwards (Aurora §2.2) in its own number format."""
        out, back = self.travel.row_bytes(self.problem.model)
        combine = self.traffic.transpose(0, 2, 1)
        return combine if out == back else combine * (back / out)

    @cached_property
    def copies_moved(self) -> np.ndarray:
        """float64[layer, src, dst] bytes if every copy of a token travelled on its own to the GPU that serves it; the diagonal
        stays."""
        if self.chooses_copies:
            return self._counted_rows("copies") * self.problem.model.bytes_per_token
        rule = {"replicas": self.travel.replicas, "ranks_per_node": self.travel.ranks_per_node}
        kept = rule if self.by_rank else {}
        alone = PLAIN.model_copy(update=kept)
        plain = self if self.travel == alone else Load(self.problem, self.placement, alone, self.execution)
        return plain.traffic if self.execution == "vanilla" else plain.work.dispatch

    @cached_property
    def work(self) -> Work:
        """The work of a pass. Raises InputError for a context-coherent one of a workload without tokens."""
        if self.execution == "context-coherent":
            return _context_coherent(self)
        held = self.problem.tokens_of_rank
        return Work(self.traffic, self.traffic_back, compute_seconds(self, held, held), unit=self.travel.unit)


def work_of(placement: Placement, problem: Problem, execution: Execution = "vanilla", travel: Travel | None = None) -> Work:
    """The work of one model. Raises InputError as `Load.work` does. travel: how tokens travel; None: every copy on its own"""
    return Load(problem, placement, travel, execution).work


def loads_of(plan: Plan, problem: Problem) -> tuple[Load, ...]:
    """The load of every model of a plan, as it is executed: tokens start on the GPUs that the plan has for them."""
    problem = problem.as_planned(plan)
    first = Load(problem, plan.placement, plan.travel, plan.execution)
    if plan.placement_b is None:
        return (first,)
    return first, Load(problem.second, plan.placement_b, plan.travel)


def works_of(plan: Plan, problem: Problem) -> tuple[Work, ...]:
    """The work of every model of a plan, as it is executed."""
    return tuple(load.work for load in loads_of(plan, problem))


def compute_seconds(load: Load, before: np.ndarray, after: np.ndarray) -> dict[str, np.ndarray]:
    """float64[layer, gpu] seconds of `gate`, `ffn` and `aggregate`.

    before: float64[layer, gpu], the tokens that a GPU gates
    after: float64[layer, gpu], the tokens that it aggregates
    """
    cost, model, gpus = load.problem.cost, load.problem.model, load.problem.cluster.gpus
    layer, expert, host = np.nonzero(load.placement.share)
    tokens = load.served[layer, expert, host]
    seconds = {kind: np.zeros(before.shape) for kind in ("gate", "ffn", "aggregate")}
    for gpu, ranks in ranks_of_gpu(gpus).items():
        mine = np.isin(host, ranks)
        seconds["gate"][:, ranks] = cost.gate(gpu, before[:, ranks], model)
        seconds["ffn"] += cost.ffn_of_gpus(gpu, tokens[mine], (layer[mine], host[mine]), before.shape, model)
        seconds["aggregate"][:, ranks] = cost.aggregate(gpu, after[:, ranks], model)
    return {kind: cost.together(step) for kind, step in seconds.items()}


def ranks_of_gpu(gpus: Sequence[Gpu]) -> dict[Gpu, list[int]]:
    """The ranks of the GPUs of each kind, which are priced together."""
    ranks: dict[Gpu, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu, []).append(rank)
    return ranks


def carriers(trace: RoutingTrace, placement: Placement, ranks: int) -> np.ndarray:
    """int64[layer + 1, token]: the GPU that carries a token into every layer, and out of the last one.

    A token starts on its source rank and goes on from the GPU of its first-listed expert (with top-1 gating its only
    one, ExFlow §IV-A); if it chose nothing it stays.
    """
    home = placement.gpu_of_expert
    carrier = np.empty((trace.layers + 1, trace.tokens), dtype=np.int64)
    carrier[0] = trace.rank_of_token(ranks)
    for layer in range(trace.layers):
        first = trace.experts[:, layer, 0].astype(np.int64)
        carrier[layer + 1] = np.where(first >= 0, home[layer, first], carrier[layer])
    return carrier


def _context_coherent(load: Load) -> Work:
    """Tokens hop from carrier to carrier; with more than one expert per token the others' outputs are combined there.

    Top-1 has no second all-to-all at all. Before the first layer every GPU gives the tokens of its prompts to all others, and
    after the last one those that it carries (ExFlow §IV-A; Table I counts the second, G·N tokens to G GPUs). The first is once
    a prompt: of a step of decode it is that of the whole prompts, shared by the steps that answer them; a recording that has
    tokens of both phases has it of those of its prompts. In a launch every pass gathers all tokens.
    """
    problem, placement, travel = load.problem, load.placement, load.travel
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
    long, passes = (1, 1) if problem.serving_step is None else problem.serving_step.prompts
    first = real if trace.phase is None or not problem.runs_attention else real & (trace.phase == PREFILL)
    first = first if first.any() else real
    prompt_gather, gather = (
        rows_to_all(np.bincount(holder[some], minlength=gpus) * size, problem.stops) * problem.model.bytes_per_token
        for holder, some, size in ((carrier[0], first, long), (carrier[-1], real, 1))
    )
    compute = compute_seconds(load, *held)
    if problem.runs_attention:
        carried = np.array([np.bincount(holder[real], minlength=gpus) for holder in carrier[:-1]], dtype=np.float64)
        compute["attention"] = attention_excess(problem, carried)
    return Work(rows[0] * out, rows[1] * back, compute, gather, travel.unit, prompt_gather, passes)


def attention_excess(problem: Problem, tokens: np.ndarray) -> np.ndarray:
    """float64[layer, gpu]: seconds that attention takes longer on a GPU than on the slowest one with tokens at home, in that
    MoE layer and the dense ones before it; 0 if it takes less.

    tokens: float64[layer, gpu], the tokens that every GPU carries; those of the first layer are at home
    """
    cost, step = problem.cost, problem.serving_step
    keys = round(step.keys) if step else keys_of_token(problem.workload, problem.model.sequence_length)
    of_gpu = [cost.attention(gpu, mine, keys, problem.model) for gpu, mine in zip(problem.cluster.gpus, tokens.T, strict=True)]
    seconds = cost.together(np.stack(of_gpu, axis=1))
    between = np.diff(problem.model.moe_layers, prepend=-1)
    return np.maximum(seconds - seconds[0].max(), 0.0) * between[:, None]


def keys_of_token(trace: RoutingTrace, sequence_length: int) -> int:
    """Mean number of tokens that a token attends to, itself included.

    sequence_length: tokens, of a recording without sequences
    """
    length = np.array([sequence_length], dtype=np.float64)
    if trace.sequence is not None and trace.tokens:
        length = np.unique(trace.sequence, return_counts=True)[1].astype(np.float64)
    return max(1, round((length * (length + 1) / 2).sum() / length.sum()))
