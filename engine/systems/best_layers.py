"""The layers of a problem as the search of `best` and its bound have them: their ports, tokens and FFNs."""

from dataclasses import replace

import numpy as np

from engine.cluster import Gpu
from engine.communication.travel import touched_by_chance
from engine.network import Network
from engine.placement.best import Known, Rows, Task, Tokens, chooser_of, layer_of, rows_on
from engine.placement.best.bound import Bounded, least_of
from engine.placement.best.by_source import Model, rule_of, shared_of
from engine.placement.best.together import Tier
from engine.plan import Placement, Travel
from engine.problem import Problem
from engine.result import Ints, Stop
from engine.systems.aurora_exclusive import fixed_compute
from engine.workload import MixedTraffic, RoutingTrace, Workload

TABLED_STEPS = 2**14
"""Steps of tokens at most at which the seconds of an expert's FFN are known to the search; those of whole tokens where fewer
are enough."""
BOUND_SECONDS = 5.0
"""Seconds of work at least for the bound."""
BOUNDED_CELLS = 10_000_000
"""Cells of the linear programme of a layer up to which it has a bound."""


class LayersOf:
    """The layers of a problem as the search has them.

    network: the problem's, or one in its place
    count: tokens that a recorded one counts for
    room: int64[gpu] slots
    slots: of a layer in all
    """

    def __init__(self, problem: Problem, network: Network, count: float, room: Ints, slots: int) -> None:
        self.problem, self.network, self.count, self.room, self.slots = problem, network, count, room, slots
        self.travel, self.copied = problem.travel or Travel(), slots > problem.workload.num_experts
        self.alone, self.trace = self.travel.unit == "copies", isinstance(problem.workload, RoutingTrace)
        self.by_rank = self.copied and self.travel.replicas not in (None, "fewest") and (self.alone or self.trace)

    def on(self, workload: Workload, count: float) -> "LayersOf":
        """The same for another recording."""
        return LayersOf(replace(self.problem, workload=workload), self.network, count, self.room, self.slots)

    @property
    def unknown(self) -> str | None:
        """The reason why the seconds of any placement are not known in advance; None: they are."""
        return None if self.alone or self.trace else "the rows of a recording without tokens are an estimate"

    def task(self, layer: int, placement: Placement) -> Task:
        """The search of a layer from a placement."""
        return Task(self.layer(layer), *self.items(layer, placement))

    def items(self, layer: int, placement: Placement) -> np.ndarray:
        """int64[2, item]: the experts and GPUs of all copies of a layer, -1 = unused."""
        items = np.full((2, self.slots), -1)
        of, gpu = np.nonzero(placement.share[layer])
        first = np.r_[True, of[1:] != of[:-1]]
        # An expert's own item is its first copy.
        order = np.argsort(~first, kind="stable")
        items[:, : len(of)] = of[order], gpu[order]
        return items

    def layer(self, layer: int) -> Known:
        """A layer for the kernels."""
        problem, gpus, experts = self.problem, len(self.room), self.problem.workload.num_experts
        demand = problem.demand[layer] * self.count
        served, choices, source, turn = not self.alone and self.copied and not self.by_rank, None, None, None
        if not self.alone:
            choices, source = problem.workload.experts[:, layer].astype(np.int64), problem.gpu_of_token
            turn = _turns(choices) if served and self.travel.replicas is None else None
        stops, unit, rows = problem.stops, self.travel.unit, self.rows(demand)
        dividing = np.arange(1, min(gpus, self.slots - experts + 1) + 1)[:, None]
        ffn = np.ascontiguousarray(self.ffn(demand.sum(axis=0) / dividing).transpose(2, 1, 0))
        known = layer_of(rows, Tokens(demand, choices, source, turn, self.count), ffn, self.room, served)
        kinds = list(dict.fromkeys(problem.cluster.gpus))
        if self.by_rank:
            per_node = min(self.travel.ranks_per_node or gpus, gpus)
            model = self.model(known, demand, kinds)
            return shared_of(model, None, self.kind(kinds), np.zeros((3, gpus)), rule_of(self.travel), per_node)
        if not served:
            return known
        whole = np.arange(int(np.ceil(demand.sum(axis=0).max())) + 2, dtype=np.float64)
        table = np.stack([problem.cost.expert_ffn(gpu, whole, problem.model) for gpu in kinds])
        nodes = unit == "node" and stops.count > 1
        return chooser_of(*known, stops.of_gpu if nodes else np.arange(gpus), table, self.kind(kinds))

    def kind(self, kinds: list[Gpu]) -> Ints:
        """int64[gpu]: its kind, of these."""
        return np.array([kinds.index(gpu) for gpu in self.problem.cluster.gpus])

    def model(self, known: Known, demand: np.ndarray, kinds: list[Gpu]) -> Model:
        """A layer as one of the models of `shared_of`.

        demand: float64[source, expert] tokens
        kinds: of GPUs
        """
        most = float(demand.sum(axis=0).max(initial=0.0))
        step = max(most / TABLED_STEPS, 1.0)
        tokens = np.arange(int(np.ceil(most / step)) + 2) * step
        table = np.stack([self.problem.cost.expert_ffn(gpu, tokens, self.problem.model) for gpu in kinds])
        return Model(*known, demand, table, step, self.slots)

    def rows(self, demand: np.ndarray) -> Rows:
        """The ports of rows of a demand float64[source, expert]."""
        sizes, stops, gpus = self.travel.row_bytes(self.problem.model), self.problem.stops, len(self.room)
        matrix = demand @ np.full((demand.shape[1], gpus), 1 / gpus) * sizes[0]
        networks = tuple(self.network.carrying(exchange, self.travel.unit, matrix) for exchange in ("dispatch", "combine"))
        return rows_on(networks, stops.entry, stops.of_gpu, self.travel.unit, sizes)

    def bounded(self, layer: int, chosen: bool) -> Bounded:
        """A layer for its bound. chosen: True if ranks or tokens choose among copies"""
        problem, (experts, gpus) = self.problem, (self.problem.workload.num_experts, len(self.room))
        demand, stops = problem.demand[layer], problem.stops
        rows, sent, likely = self.rows(demand), demand, None
        if not (self.alone or self.trace):
            likely = touched_by_chance(problem.workload.load[layer], problem.model.experts_per_token, np.eye(experts))
            sent = np.outer(problem.tokens_of_rank[layer], likely)
        levels = zip(rows.groups, rows.sends, rows.takes, rows.kind_of_source, strict=True)
        tiers = tuple(Tier(group, ports, kind, sent) for group, *ports, kind in levels)
        for tier in tiers:
            tier.likely = likely
            if self.trace and not self.alone:
                tier.know(problem.workload.experts[:, layer], problem.gpu_of_token)
        # More experts that tokens of several domains, or of several GPUs, go to than spare slots: one of them has one copy.
        domains = np.eye(stops.count)[stops.of_gpu].T @ demand
        crosses, leaves = (int(((part > 0).sum(axis=0) > 1).sum()) > self.slots - experts for part in (domains, demand))
        sure = self.network.latency if crosses else rows.start.min(initial=np.inf) if leaves else 0.0
        tokens = demand.sum(axis=0)
        if chosen:
            whole = np.arange(1, int(np.ceil(tokens.max(initial=1.0))) + 1, dtype=np.float64)
            rate = np.minimum.accumulate(self.ffn(whole) / whole, axis=1)
            least = np.where(tokens > 0, tokens * rate[:, np.maximum(np.ceil(tokens).astype(np.int64), 1) - 1], 0.0).T
        else:
            dividing = np.arange(1, min(gpus, self.slots - experts + 1) + 1)[:, None]
            least = (dividing * self.ffn(tokens / dividing)).min(axis=1).T
        return Bounded(rows, tiers, least, self.room, self.slots, chosen, np.minimum(rows.start, sure))

    def ffn(self, tokens: np.ndarray) -> np.ndarray:
        """float64[gpu, …] seconds of so many tokens of an expert (float64[…])."""
        gpus, cost, model = self.problem.cluster.gpus, self.problem.cost, self.problem.model
        of_kind = {gpu: cost.expert_ffn(gpu, tokens, model) for gpu in dict.fromkeys(gpus)}
        return np.stack([of_kind[gpu] for gpu in gpus])


def _turns(chosen: Ints) -> Ints:
    """int64[token, choice]: how often the same expert was chosen before."""
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    turn = np.empty(len(flat), dtype=np.int64)
    turn[order] = np.arange(len(flat)) - np.searchsorted(flat[order], flat[order])
    return turn.reshape(chosen.shape)


def bound_of(problem: Problem, room: Ints, slots: int, stop: Stop, work: float = BOUND_SECONDS) -> float | None:
    """Seconds below which no placement is by plain sends; None where that is not known: of mixed recordings whose rows serve
    several experts or whose copies are chosen, of loads without tokens whose copies ranks choose, and where the network's rates
    depend on the traffic.

    room: int64[gpu] slots
    slots: of a layer in all
    work: seconds of searches
    """
    network = replace(problem.network, share=np.ones((2, 1)))  # fewer sends than all may reach the whole rates
    of, workload = LayersOf(problem, network, 1.0, room, slots), problem.workload
    mixed = isinstance(workload, MixedTraffic)
    # Of loads without tokens `fewest` is equal shares.
    chosen = of.copied and of.travel.replicas is not None and (of.trace or mixed or of.travel.replicas != "fewest")
    if not of.trace and (chosen or (mixed and not of.alone)):
        return None
    experts, gpus, layers = workload.num_experts, len(room), workload.layers
    if network.measured is not None or experts * gpus * 2 * (gpus + 2) > BOUNDED_CELLS:
        return None
    total = float(sum(step.max(axis=1).sum() for step in fixed_compute(problem).values()))
    known = least_of(lambda layer: of.bounded(layer, chosen), layers, work, stop)
    return None if known is None else total + known
