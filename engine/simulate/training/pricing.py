"""Seconds of every operator of a training step, whole and cut into parts, on every kind of GPU; and the routing of its tokens
under a placement: the bytes that every GPU sends, and the rows that every expert gets."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from engine.cluster import Gpu
from engine.errors import InputError
from engine.overlap.operator_graph import UPDATE_BYTES, Gemm, Operator, OperatorGraph
from engine.overlap.transformer import transformer_step
from engine.plan import Offload, Placement, expert_groups
from engine.problem import Problem
from engine.simulate.training.offload import numbers_on_host
from engine.workload import RoutingTrace

MAX_PARTS = 16
"""No operator is cut into more parts: Lancet never saw more than 4 pay, PipeMoE's grid needs at most 9."""
BYTES_OF_A_SIZE = 8
"""A number of rows for one expert takes as much, as Lancet's authors send it (`NCCLAllToAllv` of their program)."""


@dataclass(frozen=True, eq=False)
class Routing:
    """One step's tokens, layer by layer.

    groups: number of copies of all experts; the GPUs of a copy are neighbours and exchange tokens only among themselves
        (expert packing, Lina §4.2)
    traffic: float64[layer, src, dst] bytes of the dispatch, the diagonal stays
    rows: float64[layer, gpu, slot]: token copies that every slot's expert gets; nan = no such slot
    even: True if every GPU sends every other of its group as much, and every expert gets as many
    """

    groups: int
    traffic: np.ndarray
    rows: np.ndarray
    even: bool


def route(problem: Problem, placement: Placement, irregular: bool) -> Routing:
    """The routing of `problem.step` under a placement.

    Balanced, or as recorded and scaled to the step's tokens, every rank by itself. No more than the capacity is kept of one
    GPU's tokens for one expert; unless `irregular`, buffers are filled up to the capacity and sent whole (Lancet §6).
    """
    step, model, gpus = problem.step, problem.model, len(problem.cluster.gpus)
    copies = step.tokens * model.experts_per_token
    demand = np.full((placement.layers, gpus, placement.experts), copies / placement.experts)
    if step.routing == "recorded":
        # A rank for which nothing was recorded is taken to route like a balanced one.
        held = problem.demand.sum(axis=2, keepdims=True)
        demand = np.where(held > 0, copies * problem.demand / np.where(held > 0, held, 1), demand)
    capacity = step.capacity(model)
    kept = np.minimum(demand, capacity)
    if np.isfinite(capacity) and not irregular:
        kept = np.full_like(demand, capacity)
    return _routing(kept, placement, model.bytes_per_token)


def route_parts(problem: Problem, placement: Placement, parts: int) -> list[Routing]:
    """The routing of every part when each rank's recorded tokens are cut into `parts` runs of equal length, in their order,
    sequence after sequence. Real tokens only, exactly those that the uncut step keeps: an expert that an earlier part has
    filled takes no more from a later one (capacity passing, Lancet §2.3). A batch-prioritised gate has looked at the whole
    batch before it is cut, so that a part has those of its tokens that were served, see `_served_by_importance`.

    Raises InputError unless the routing is recorded, token by token.
    """
    trace, step, model, gpus = problem.workload, problem.step, problem.model, len(problem.cluster.gpus)
    if step.routing != "recorded" or not isinstance(trace, RoutingTrace):
        raise InputError("the parts of a step are only known from a routing log; set routing to recorded and open one")
    rank = trace.rank_of_token(gpus)
    order = np.lexsort((np.arange(trace.tokens), trace.sequence if trace.sequence is not None else rank, rank))
    held = np.bincount(rank, minlength=gpus)
    place = np.empty(trace.tokens, dtype=np.int64)
    place[order] = np.arange(trace.tokens) - np.repeat(np.cumsum(held) - held, held)
    part = place * parts // np.maximum(held[rank], 1)
    copies, capacity = step.tokens * model.experts_per_token, step.capacity(model)
    kept = np.full((parts, trace.layers, gpus, trace.num_experts), copies / parts / trace.num_experts)
    for layer in range(trace.layers):
        chosen = trace.experts[:, layer, :].astype(np.int64)
        key = np.where(chosen >= 0, rank[:, None] * trace.num_experts + chosen, -1)
        routed = np.bincount(rank, (chosen >= 0).sum(axis=1), gpus)
        scale = copies / np.maximum(routed, 1)
        weight = np.ones(key.shape)
        if step.gate == "batch-prioritised":
            importance = None if trace.importance is None else trace.importance[:, layer]
            weight = _served_by_importance(key, place, importance, (capacity / scale)[rank])
        flat = np.bincount(
            (part[:, None] * gpus * trace.num_experts + key)[key >= 0], weight[key >= 0], parts * gpus * trace.num_experts
        )
        counts = flat.reshape(parts, gpus, trace.num_experts) * scale[:, None]
        kept[:, layer, routed > 0] = counts[:, routed > 0]
    if step.gate != "batch-prioritised":
        kept = np.diff(np.minimum(np.cumsum(kept, axis=0), capacity), axis=0, prepend=0.0)
    return [_routing(of_part, placement, model.bytes_per_token) for of_part in kept]


def _served_by_importance(
    key: np.ndarray, place: np.ndarray, importance: np.ndarray | None, capacity: np.ndarray
) -> np.ndarray:
    """float64[token, choice]: 1 for a choice that a batch-prioritised gate serves, 0 for one that it drops, and a part of 1 for
    the last one that fits into a capacity that is no whole number.

    All first choices are served before any second one, and of these the tokens with the largest importance first (Riquelme
    et al. 2021, §3.2 and Lancet §2.3); where no scores were recorded, in the order of the batch.

    key: int64[token, choice], the same for choices of one expert on one rank, below 0 for none
    place: int64[token], order in the batch
    importance: float64[token]
    capacity: float64[token], choices of one expert that the token's rank serves
    """
    tokens, k = key.shape
    first = np.zeros(tokens) if importance is None else -importance
    order = np.lexsort((np.repeat(place, k), np.repeat(first, k), np.tile(np.arange(k), tokens), key.ravel()))
    served = key.ravel()[order]
    begins = np.flatnonzero(np.append(True, served[1:] != served[:-1]))
    before = np.empty(len(order))
    before[order] = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    return np.clip(np.repeat(capacity, k) - before, 0.0, 1.0).reshape(key.shape)


def _routing(kept: np.ndarray, placement: Placement, bytes_per_token: float) -> Routing:
    """kept: float64[layer, src, expert] token copies that are sent."""
    gpus, groups, share = placement.gpus, expert_groups(placement), placement.share
    size = gpus // groups
    traffic, rows = np.zeros((placement.layers, gpus, gpus)), []
    for first in range(0, gpus, size):
        here = slice(first, first + size)
        own = share[:, :, here] * groups  # of several groups each holds one of an expert's replicas, which takes all here
        traffic[:, here, here] = kept[:, here, :] @ own * bytes_per_token
        rows.append(np.einsum("lre,leg->lge", kept[:, here, :], own))
    per_expert = np.concatenate(rows, axis=1)
    slots = np.full((placement.layers, gpus, placement.slots.max()), np.nan)
    for layer, row in enumerate(placement.experts_of_gpu):
        for gpu, experts in enumerate(row):
            own = sorted(set(experts))  # an expert twice on one GPU is one expert with all its rows
            slots[layer, gpu, : len(own)] = per_expert[layer, gpu, own]
    blocks = [traffic[:, first : first + size, first : first + size] for first in range(0, gpus, size)]
    same = (np.ptp(block) <= 1e-9 * np.abs(block).max(initial=0) for block in (slots, *blocks))
    return Routing(groups, traffic, slots, not np.isnan(slots).any() and all(same))


class Sizes(NamedTuple):
    """An exchange of sizes: every GPU tells every other one how many rows follow for each expert (Lancet §6, Figure 10).

    sent: bytes in the fullest GPU's buffer
    """

    seconds: float
    sent: float


@dataclass(frozen=True, eq=False)
class PricedStep:
    """A training step with its times.

    seconds: float64[operator, parts - 1, group]: time of ONE part when the operator is cut into `parts` equal ones. A network
        operator has the same for all groups: it is over when the slowest GPU is
    sent: float64[operator]: bytes in the fullest GPU's buffer of a network operator, as routed
    groups: the GPUs of every group; all GPUs of a group take the same time for everything
    expert_groups: copies of all experts, see `Routing`
    sizes: all-to-alls of which every part begins with an exchange of sizes, by name; their seconds contain it
    uneven: operators of recorded routing with unlike parts, by name and number of parts: float64[part, group]
    """

    graph: OperatorGraph
    seconds: np.ndarray
    sent: np.ndarray
    groups: tuple[tuple[int, ...], ...]
    expert_groups: int
    sizes: dict[str, Sizes] = field(default_factory=dict)
    uneven: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    def of_part(self, name: str, part: int, parts: int) -> np.ndarray:
        """float64[group]: seconds of one part, counted from 0."""
        known = self.uneven.get((name, parts))
        return self.seconds[self.index[name], parts - 1] if known is None else known[part]

    def whole(self, name: str) -> float:
        """Seconds of an uncut operator on the slowest group."""
        return float(self.seconds[self.index[name], 0].max())

    @cached_property
    def index(self) -> dict[str, int]:
        """Place of every operator by its name."""
        return {operator.name: place for place, operator in enumerate(self.graph.operators)}


def price_step(
    problem: Problem,
    placement: Placement,
    irregular: bool = False,
    parts: int = MAX_PARTS,
    as_recorded: tuple[int, ...] = (),
    offload: Offload | None = None,
) -> PricedStep:
    """Price the problem's training step under a placement; `irregular`: all-to-alls carry real tokens only. The GPUs do not
    update experts in the host's memory.

    Then no GPU knows how much it will receive, and in the forward pass dispatch and combine exchange sizes first, every part
    its own, as Lancet's irregular all-to-all does (§6). The backward pass returns the same rows. Without a capacity there are
    no buffers to fill up, so that all plans send real tokens, and every dispatch exchanges sizes.

    Parts of an all-to-all and of its experts are priced at their share of the whole, Lancet's static-shape approximation
    (§3), and for the numbers of parts in `as_recorded` also as the routing log has them, part by part. Planning, simulation
    and bound ask for the same prices, so the last ones are kept.
    """
    fills = problem.step.capacity_factor > 0
    sized = ("dispatch", "combine") if irregular else () if fills else ("dispatch",)
    priced = _price(problem, placement, irregular and fills, sized, parts, as_recorded)
    return priced if offload is None else _without_updates(problem, placement, priced, offload)


def graph_of(problem: Problem, groups: int) -> OperatorGraph:
    """The operators of the problem's step when its GPUs form so many groups that hold all experts each: the imported ones,
    otherwise a transformer's."""
    if problem.graph is not None:
        return problem.graph
    return transformer_step(problem.model, problem.step, len(problem.cluster.gpus) // groups)


@lru_cache(maxsize=32)
def _price(
    problem: Problem, placement: Placement, irregular: bool, sized: tuple[str, ...], parts: int, as_recorded: tuple[int, ...]
) -> PricedStep:
    if as_recorded:
        priced = replace(_price(problem, placement, irregular, sized, parts, ()), uneven={})
        for cut in as_recorded:
            pricers = [_Pricer(problem, placement, route_part, 1) for route_part in route_parts(problem, placement, cut)]
            for operator in priced.graph.of_phase("forward"):
                if operator.kind in ("dispatch", "experts", "combine"):
                    rows = [part_pricer.operator(operator, priced.groups)[0] for part_pricer in pricers]
                    exchanged = priced.sizes.get(operator.name, Sizes(0.0, 0.0)).seconds
                    priced.uneven[operator.name, cut] = np.stack(rows) + exchanged
        return priced
    routing = route(problem, placement, irregular)
    graph = graph_of(problem, routing.groups)
    gpus = problem.cluster.gpus
    loads = routing.rows.transpose(1, 0, 2).reshape(len(gpus), -1)
    keys = [(gpu, loads[rank].tobytes() if not routing.even else b"") for rank, gpu in enumerate(gpus)]
    distinct = list(dict.fromkeys(keys))
    members = tuple(tuple(rank for rank, key in enumerate(keys) if key == group_key) for group_key in distinct)
    pricer = _Pricer(problem, placement, routing, parts)
    seconds = np.stack([pricer.operator(operator, members) for operator in graph.operators])
    sent = np.array([pricer.sent(operator) for operator in graph.operators])
    sizes = {}
    for place, operator in enumerate(graph.operators):
        # A measured time holds all that the operator did.
        if operator.phase == "forward" and operator.kind in sized and operator.seconds is None:
            sizes[operator.name] = pricer.sizes(operator)
            seconds[place] += sizes[operator.name].seconds
    return PricedStep(graph, seconds, sent, members, routing.groups, sizes)


def _without_updates(problem: Problem, placement: Placement, priced: PricedStep, offload: Offload) -> PricedStep:
    """The prices with those experts left out of the update that the host updates."""
    on_host = numbers_on_host(problem, placement, offload)
    seconds = priced.seconds.copy()
    for place, operator in enumerate(priced.graph.operators):
        if operator.phase == "update" and operator.seconds is None:
            for group, members in enumerate(priced.groups):
                left = max(0.0, operator.moved - UPDATE_BYTES * float(on_host[list(members)].min()))
                cut = left / np.arange(1, seconds.shape[1] + 1)
                seconds[place, :, group] = problem.cost.memory_pass(problem.cluster.gpus[members[0]], cut)
    return replace(priced, seconds=seconds)


def all_reduce_seconds(problem: Problem, sizes: Iterable[float], groups: int = 1) -> np.ndarray:
    """float64[size]: seconds to sum gradients of `sizes` bytes over all GPUs, or with several expert groups over those
    that hold the same experts, all of these at once."""
    sizes, cluster = np.asarray(list(sizes), dtype=np.float64), problem.cluster
    if groups == 1:
        return problem.cost.all_reduce(cluster, sizes)
    apart = len(cluster.gpus) // groups
    parts = {cluster.part(list(range(first, len(cluster.gpus), apart))) for first in range(apart)}
    return np.max([problem.cost.all_reduce(part, sizes) for part in parts], axis=0)


class _Pricer:
    """Prices operators; equal shapes are asked for once."""

    def __init__(self, problem: Problem, placement: Placement, routing: Routing, parts: int) -> None:
        self.problem, self.placement, self.routing = problem, placement, routing
        self.cut = np.arange(1, parts + 1)
        first = {gpu: rank for rank, gpu in reversed(list(enumerate(problem.cluster.gpus)))}
        self.alike = [first[gpu] for gpu in problem.cluster.gpus]
        """The first GPU that is like each."""
        self.moe_layer = {layer: index for index, layer in enumerate(placement.model_layers)}
        size = len(problem.cluster.gpus) // routing.groups
        firsts = range(0, len(problem.cluster.gpus), size)
        self.blocks = list({problem.cluster.part(list(range(first, first + size))): None for first in firsts})
        self.known: dict[tuple, np.ndarray] = {}

    def operator(self, operator: Operator, members: tuple[tuple[int, ...], ...]) -> np.ndarray:
        """float64[parts, group] seconds of one part."""
        if operator.seconds is not None:
            return np.repeat(operator.seconds / self.cut[:, None], len(members), axis=1)
        if operator.network:
            return np.repeat(self._network(operator)[:, None], len(members), axis=1)
        ranks = [group[0] if self._routed(operator) else self.alike[group[0]] for group in members]
        gpus = self.problem.cluster.gpus
        known = {rank: self._compute(operator, gpus[rank], rank) for rank in set(ranks)}
        seconds = np.stack([known[rank] for rank in ranks], axis=1)
        # Ranks that share processors hold each other up, so that all of them must be looked at together.
        everywhere = np.repeat(seconds, [len(group) for group in members], axis=1)
        firsts = np.cumsum([0, *(len(group) for group in members)])[:-1]
        return self.problem.cost.together(everywhere)[:, firsts]

    def sent(self, operator: Operator) -> float:
        """Bytes in the fullest GPU's buffer."""
        layer = self.moe_layer.get(operator.layer)
        if operator.kind not in ("dispatch", "combine") or layer is None or self.problem.graph is not None:
            return operator.sent
        return float(self.routing.traffic[layer].sum(axis=0 if _goes_back(operator) else 1).max())

    def sizes(self, operator: Operator) -> Sizes:
        """The exchange of sizes before an all-to-all."""
        layer = self.moe_layer.get(operator.layer)
        if layer is None or self.problem.graph is not None:
            sent = float(BYTES_OF_A_SIZE * self.placement.experts)
            return Sizes(max(float(self.problem.cost.all_to_all(block, np.float64(sent))) for block in self.blocks), sent)
        hosted = np.array([len(set(experts)) for experts in self.placement.experts_of_gpu[layer]], dtype=np.float64)
        group = np.arange(self.placement.gpus) * self.routing.groups // self.placement.gpus
        bytes_of_pair = np.where(group[:, None] == group, BYTES_OF_A_SIZE * hosted, 0.0)  # [home, host]
        traffic = bytes_of_pair.T if _goes_back(operator) else bytes_of_pair
        return Sizes(float(self._all_to_all(traffic)[0]), float(traffic.sum(axis=1).max()))

    def _network(self, operator: Operator) -> np.ndarray:
        layer, cost = self.moe_layer.get(operator.layer), self.problem.cost
        if operator.kind == "gradient":
            key = ("gradient", operator.sent)
            if key not in self.known:
                self.known[key] = all_reduce_seconds(self.problem, operator.sent / self.cut)
            return self.known[key]
        if layer is None or self.problem.graph is not None:
            return np.max([cost.all_to_all(block, operator.sent / self.cut) for block in self.blocks], axis=0)
        back = _goes_back(operator)
        key = ("all-to-all", back, layer if not self.routing.even else 0)
        if key not in self.known:
            traffic = self.routing.traffic[layer]
            self.known[key] = self._all_to_all(traffic.T if back else traffic)
        return self.known[key]

    def _all_to_all(self, traffic: np.ndarray) -> np.ndarray:
        if self.routing.even:
            size = traffic.sum(axis=1).max()
            return np.max([self.problem.cost.all_to_all(block, size / self.cut) for block in self.blocks], axis=0)
        # Uneven traffic is no collective of one size: the busiest port of the network counts, with all its sends at once.
        network = self.problem.network
        src, dst = np.nonzero(np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic))
        if not len(src):
            return np.zeros(len(self.cut))
        start_up = float(network.start_up(src, dst).max())
        return start_up + network.paced_seconds(src, dst, traffic[src, dst]) / self.cut

    def _routed(self, operator: Operator) -> bool:
        """True if the number of its tokens is that of the routing."""
        return operator.kind == "experts" and operator.layer in self.moe_layer and self.problem.graph is None

    def _compute(self, operator: Operator, gpu: Gpu, rank: int) -> np.ndarray:
        cost = self.problem.cost
        seconds = cost.memory_pass(gpu, operator.moved / self.cut)
        if not self._routed(operator):
            return seconds + sum(self._gemm(gemm, gpu, self.cut) * gemm.count for gemm in operator.gemms)
        rows = self.routing.rows[self.moe_layer[operator.layer], rank]
        sizes, counts = np.unique(rows[~np.isnan(rows)], return_counts=True)
        for gemm in operator.gemms:
            for size, count in zip(sizes, counts, strict=True):
                seconds = seconds + count * self._gemm(gemm, gpu, self.cut, size)
        return seconds

    def _gemm(self, gemm: Gemm, gpu: Gpu, cut: np.ndarray, tokens: float | None = None) -> np.ndarray:
        """float64[parts]: one of the products, with its own number of tokens or another one."""
        key = (gemm, gpu, tokens)
        if key not in self.known:
            cost, dtype = self.problem.cost, self.problem.model.dtype
            length = float(gemm.m if gemm.tokens == "m" else gemm.k) if tokens is None else tokens
            if gemm.tokens == "m":
                self.known[key] = cost.gemm(gpu, length / cut, gemm.n, gemm.k, dtype)
            elif length:
                shares = [max(1, round(length / parts)) for parts in cut.tolist()]
                self.known[key] = np.array([self._summed_over(gemm, gpu, share) for share in shares])
            else:
                self.known[key] = np.zeros(len(cut))
        return self.known[key]

    def _summed_over(self, gemm: Gemm, gpu: Gpu, tokens: int) -> float:
        """Seconds of a product that sums over so many tokens. Routed experts get thousands of different numbers of them, but
        their parts mostly meet again."""
        key = (gemm.m, gemm.n, tokens, gpu)
        if key not in self.known:
            cost, dtype = self.problem.cost, self.problem.model.dtype
            self.known[key] = float(cost.gemm(gpu, np.float64(gemm.m), gemm.n, tokens, dtype))
        return self.known[key]


def _goes_back(operator: Operator) -> bool:
    """True if an all-to-all brings tokens home: the combine, and the gradient of a dispatch."""
    return (operator.kind == "combine") != (operator.phase == "dx")
