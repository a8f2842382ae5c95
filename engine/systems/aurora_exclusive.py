"""Aurora, exclusive models: one model's experts on a homogeneous (§4) or heterogeneous (§5) cluster.

Two decisions: the experts of each GPU, and the order in which the bytes of every all-to-all move. The printed rules
(Theorem 5.1, Algorithm 1, Theorem 5.2) are not optimal in general; `exclusive` solves both problems exactly or with
a proven bound and says how far the printed rules, kept as `exclusive_printed`, are from it.
"""

import contextlib
import math
from functools import partial
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from engine.communication.algorithm1 import algorithm1
from engine.communication.two_tier import results_on
from engine.errors import StoppedError
from engine.placement.assignment import AssignmentInstance, assign
from engine.placement.baselines import linear_assignment, sorted_assignment
from engine.placement.exchange_search import exchange_search
from engine.placement.grouped_assignment import PROVEN_GAP, assign_groups
from engine.plan import SendOrder
from engine.problem import Problem
from engine.result import Guard, Limits, Stop, never
from engine.simulate.work import Load, ranks_of_gpu
from engine.systems.base import Draft, Note, Notes, Report
from engine.systems.options import Options, Seed, Slots, TimeLimit
from engine.systems.pieces import best_order, order_by, rows_counted, slots_of_gpu, spread_evenly, to_placement

EXCHANGES_PER_EXPERT, SECONDS_PER_EXCHANGE = 60, 1e-4
"""Exchanges tried in a layer, and the seconds of one on 1024 GPUs, which only divide a time limit."""
MOST_PRINTED_GPUS, MOST_PRINTED_PAIRS = 64, 20_000
"""Algorithm 1 looks at every pair in every phase, half a second a layer of 64 GPUs: it is compared on so many GPUs at most, and
in so many layers that all their pairs together are no more than this."""
PlacementTime = Annotated[TimeLimit, Field(description="seconds for the placement of all layers together")]


def expert_seconds(problem: Problem, layer: int) -> np.ndarray:
    """float64[gpu, expert]: seconds that every GPU would need for every expert's tokens."""
    tokens = problem.demand[layer].sum(axis=0)
    gpus = problem.cluster.gpus
    of_kind = {gpu: problem.cost.expert_ffn(gpu, tokens, problem.model) for gpu in dict.fromkeys(gpus)}
    return np.array([of_kind[gpu] for gpu in gpus])


def tokens_nearby(problem: Problem, layer: int) -> np.ndarray:
    """float64[gpu, expert]: token copies for every expert that need not cross the fabric if it is on the GPU: its own and
    those of the GPUs that it is linked with."""
    group = linked_group(problem)
    of_group = np.zeros((group.max() + 1, problem.workload.num_experts))
    np.add.at(of_group, group, problem.demand[layer])
    return of_group[group]


def linked_group(problem: Problem) -> np.ndarray:
    """int64[gpu]: the same number for GPUs that talk over the links of their node."""
    network = problem.network
    alone = len(network.node) + np.arange(network.gpus)
    return np.unique(np.where(network.link > 0, network.node, alone), return_inverse=True)[1]


class LayerSeconds:
    """Seconds of a placement int64[expert] of one layer, start-up times left out: the slowest GPU's FFNs, and dispatch and
    combine each at its busiest port.

    Called with placements that differ little from one another, as those of a search do, it only moves the experts that
    moved since the last call: microseconds instead of tens of milliseconds for all pairs of GPUs.
    """

    def __init__(self, problem: Problem, layer: int) -> None:
        network = problem.network
        self.cost, self.network, self.gpus = problem.cost, network, network.gpus
        size = problem.demand[layer] * problem.model.bytes_per_token
        near = tokens_nearby(problem, layer) * problem.model.bytes_per_token
        self.compute = expert_seconds(problem, layer)
        self.from_far = np.maximum(size.sum(axis=0) - near, 0.0)
        self.from_peers = np.maximum(near - size, 0.0)
        self.size = np.ascontiguousarray(size.T)  # float64[expert, source gpu]
        group = linked_group(problem)
        self.together = [np.flatnonzero(group == own) for own in group]
        self.peers = [members[members != gpu] for gpu, members in enumerate(self.together)]
        self.link = np.where(network.link > 0, network.link, 1.0)
        self.linked = any(len(members) for members in self.peers)
        self.place: np.ndarray | None = None

    def __call__(self, gpu_of_expert: np.ndarray) -> float:
        moved = np.arange(0) if self.place is None else np.flatnonzero(gpu_of_expert != self.place)
        if self.place is None or 4 * len(moved) > len(gpu_of_expert):
            self._begin(gpu_of_expert)
        else:
            for expert in moved.tolist():
                self._move(expert, int(self.place[expert]), -1.0)
                self._move(expert, int(gpu_of_expert[expert]), 1.0)
            self.place = gpu_of_expert.copy()
        return self._seconds()

    def afresh(self, gpu_of_expert: np.ndarray) -> float:
        """The seconds of a placement without the round-off of calls before."""
        self._begin(gpu_of_expert)
        return self._seconds()

    def _seconds(self) -> float:
        network, sent, received = self.network, self.sent, self.received
        within = 0.0
        if self.linked:
            within = (np.maximum(self.sent_inside, self.received_inside) / self.link).max()
        dispatch = max((sent / network.send).max(), (received / network.receive).max(), within)
        combine = max((received / network.send).max(), (sent / network.receive).max(), within)
        return float(self.cost.together(self.ffn).max() + dispatch + combine)

    def _begin(self, gpu_of_expert: np.ndarray) -> None:
        """Bytes and seconds of every GPU, float64[gpu], afresh."""
        self.place = gpu_of_expert.copy()
        self.ffn, self.received, self.received_inside = np.zeros((3, self.gpus))
        self.sent, self.sent_inside = self.size.sum(axis=0), np.zeros(self.gpus)
        for expert, gpu in enumerate(gpu_of_expert.tolist()):
            self._move(expert, gpu, 1.0)

    def _move(self, expert: int, gpu: int, sign: float) -> None:
        """Put an expert on a GPU, or with sign -1 take it away."""
        self.ffn[gpu] += sign * self.compute[gpu, expert]
        self.received[gpu] += sign * self.from_far[gpu, expert]
        self.received_inside[gpu] += sign * self.from_peers[gpu, expert]
        size = self.size[expert]
        self.sent[self.together[gpu]] -= sign * size[self.together[gpu]]
        self.sent_inside[self.peers[gpu]] += sign * size[self.peers[gpu]]


class AuroraOptions(Options):
    """The options of all four scenarios."""

    slots: Slots = "even"
    order: Literal["best", "matched", "joint", "shared", "two-tier", "concurrent"] = Field(
        "best",
        title="Send order",
        description="when bytes move; joint: those of two models in one schedule; two-tier: the GPUs of a node relay for each "
        "other over their links; best: the fastest",
    )
    time_limit: PlacementTime = 20.0
    seed: Seed = 0


def exclusive(problem: Problem, options: AuroraOptions, stop: Stop, report: Report) -> Draft:
    """Aurora with exact kernels, for both exclusive scenarios."""
    guard = options.guard(stop)
    gpu_of_expert, bound, notes, _ = assign_layers(problem, options.slots, options.time_limit, options.seed, guard, report)
    placement = to_placement(gpu_of_expert, problem)
    if not problem.network.direct:
        bound = relayed_bound(problem)  # the one so far is for bytes that go straight to their receivers
    if stop():
        return Draft(placement, SendOrder(mode="concurrent"), bound, notes, cancelled=True)
    ordered = best_order(placement, problem, options.order, stop, report)
    notes |= ordered.notes
    if not stop():
        with contextlib.suppress(StoppedError):
            notes |= compare_with_printed(gpu_of_expert, problem, stop)
    return ordered.draft(notes, stop(), guard.cut, bound)


def exclusive_printed(problem: Problem, options: Options, stop: Stop, report: Report) -> Draft:
    """Theorem 5.1's sorted assignment and Algorithm 1's order, to the letter."""
    slots = slots_of_gpu(problem, "even")
    load = problem.demand.sum(axis=1)
    speed = problem.cluster.values("flops_fp16")
    placement = to_placement(np.array([sorted_assignment(row, speed, slots) for row in load]), problem)
    kernel = partial(algorithm1, stop=stop)

    def advance(done: float) -> None:
        report(done, "ordering sends by Algorithm 1", None, None)

    load = Load(problem, placement, problem.travel)
    return Draft(placement, order_by(kernel, load, "matched", advance), loads=(load,))


def instance_of_layer(problem: Problem, layer: int, slots: np.ndarray | None = None) -> AssignmentInstance:
    """The assignment problem of one layer (Aurora §5.1), relaxed if needed so that its bound always holds.

    Dispatch and combine together take max(sent, received) · (1/send + 1/receive) at a GPU, hence the harmonic mean.
    On nodes with links of their own only two parts are sure to load the fabric in any placement of the rest: the bytes that
    arrive from other nodes, and those that a GPU sends to more experts than its node has slots for. A cluster that is one such
    node uses its links as the fabric.

    slots: int64[gpu]; None: for all experts
    """
    network, bytes_per_token = problem.network, problem.model.bytes_per_token
    size = problem.demand[layer] * bytes_per_token
    compute = expert_seconds(problem, layer)
    rate = 2 / (1 / network.send + 1 / network.receive)
    linked = network.linked[~np.eye(network.gpus, dtype=bool)]
    if not linked.any():
        return AssignmentInstance.from_tokens(size, compute, rate, rate)
    if linked.all():
        return AssignmentInstance.from_tokens(size, compute, network.link, network.link)
    from_elsewhere = np.maximum(size.sum(axis=0) - tokens_nearby(problem, layer) * bytes_per_token, 0.0)
    sent = np.zeros(network.gpus)
    if slots is not None:
        group = linked_group(problem)
        room = np.minimum(np.bincount(group, slots)[group].astype(np.int64), size.shape[1])
        most_near = np.pad(np.cumsum(-np.sort(-size, axis=1), axis=1), ((0, 0), (1, 0)))
        sent = np.maximum(size.sum(axis=1) - most_near[np.arange(network.gpus), room], 0.0)
    return AssignmentInstance(compute, from_elsewhere / rate[:, None], sent / rate, np.zeros_like(size))


def assign_layers(
    problem: Problem, kind: str, time_limit: float, seed: int, stop: Stop, report: Report
) -> tuple[np.ndarray, float, Notes, bool]:
    """Experts to GPUs for every layer: (int64[layer, expert], proven bound on the total seconds of any such plan with
    any order in which bytes go straight, notes, cancelled). Layers not reached before a stop keep contiguous blocks.

    kind: see `slots_of_gpu`
    time_limit: seconds of work for all layers together
    stop: a `Guard` gives every layer an equal part of the time
    """
    slots = slots_of_gpu(problem, kind)
    layers, experts = problem.workload.layers, problem.workload.num_experts
    exact_slots = kind == "even" and slots.sum() == experts
    start = linear_assignment(experts, spread_evenly(slots, experts))
    gpu_of_expert = np.tile(start, (layers, 1))
    fixed = _fixed_seconds(problem)
    objective, bound, proven = 0.0, float(fixed.sum()), 0
    for layer in range(layers):
        instance = instance_of_layer(problem, layer, slots)
        if stop():
            # A layer that was not planned takes at least the time of its heaviest expert on the best GPU.
            bound += float(instance.compute.min(axis=0).max() + 2 * instance.receive.min(axis=0).max())
            continue
        report(0.8 * layer / layers, f"placing layer {layer + 1} of {layers}", None, None)
        late = stop.part(layers - layer) if isinstance(stop, Guard) else stop
        if experts == len(slots) and np.all(slots == 1):
            result = assign(instance, late)
        else:
            limits = Limits(time_limit / layers, wall=math.inf, seed=seed)
            result = assign_groups(instance, limits, late, slots=slots, exact_slots=exact_slots)
        seconds, placed = LayerSeconds(problem, layer), result.solution
        # Where ranks share processors, or links or different rates out and in leave the instance only a relaxation, its
        # optimum is a start for a search on the real objective.
        if (needed := seconds(placed)) > result.objective * (1 + 1e-9):
            steps = min(EXCHANGES_PER_EXPERT * experts, int(time_limit / layers / SECONDS_PER_EXCHANGE))
            placed = exchange_search([placed, start], slots, exact_slots, seconds, steps, seed, late)
            needed = seconds.afresh(placed)
        gpu_of_expert[layer] = placed
        objective += needed
        bound += result.bound
        proven += needed <= result.bound * (1 + PROVEN_GAP)
    counted = rows_counted(problem)
    said = f"proven optimal in {proven} of {layers} layers (max FFN + 2 · max all-to-all, no start-up times{counted})"
    notes = {"placement": Note(said), "time by which placements were compared": Note(objective, "s")}
    return gpu_of_expert, bound, notes, stop()


def relayed_bound(problem: Problem) -> float:
    """Seconds below which no plan with one copy of every expert is, also when the GPUs of a node relay for each other: the mean
    GPU's experts, or the heaviest one on the best GPU, and of the bytes that must change nodes wherever their experts are
    the mean port's."""
    network, bytes_per_token = problem.network, problem.model.bytes_per_token
    bound = float(_fixed_seconds(problem).sum())
    for layer, demand in enumerate(problem.demand):
        quickest = expert_seconds(problem, layer).min(axis=0)
        bound += max(float(quickest.max()), float(quickest.sum()) / network.gpus)
        must_cross = np.maximum(demand.sum(axis=0) - tokens_nearby(problem, layer), 0.0).min(axis=0).sum()
        bound += must_cross * bytes_per_token * (1 / network.send.sum() + 1 / network.receive.sum())
    return float(bound)


def fixed_compute(problem: Problem) -> dict[str, np.ndarray]:
    """float64[layer, gpu] seconds of `gate` and `aggregate`, which no placement changes."""
    cost, model, held = problem.cost, problem.model, problem.tokens_of_rank
    seconds = {"gate": np.empty(held.shape), "aggregate": np.empty(held.shape)}
    for kind, ranks in ranks_of_gpu(problem.cluster.gpus).items():
        seconds["gate"][:, ranks] = cost.gate(kind, held[:, ranks], model)
        seconds["aggregate"][:, ranks] = cost.aggregate(kind, held[:, ranks], model)
    return {name: cost.together(step) for name, step in seconds.items()}


def _fixed_seconds(problem: Problem) -> np.ndarray:
    """float64[layer]: gate and aggregation, and one start-up of dispatch and of combine where some token must leave its
    GPU wherever the experts are."""
    seconds = fixed_compute(problem)
    network = problem.network
    must_leave = (problem.demand.sum(axis=1) - problem.demand.max(axis=1)).sum(axis=1) > 0
    pairs = network.start_up(*np.nonzero(~np.eye(network.gpus, dtype=bool)))
    quickest = pairs.min() if len(pairs) else 0.0
    return seconds["gate"].max(axis=1) + seconds["aggregate"].max(axis=1) + 2 * must_leave * quickest


def compare_with_printed(gpu_of_expert: np.ndarray, problem: Problem, stop: Stop = never) -> Notes:
    """Distance of the paper's rules from ours on this problem: Theorem 5.1 by the placement objective, Algorithm 1 by the
    makespan of the dispatches of our placement. Raises StoppedError once `stop` answers True."""
    load, speed = problem.demand.sum(axis=1), problem.cluster.values("flops_fp16")
    held = np.full(len(speed), -(-problem.workload.num_experts // len(speed)))
    notes: Notes = {}
    # With a spare slot, or where equal numbers do not fit the memory, the rule would not be compared on equal terms.
    if held.sum() == problem.workload.num_experts and np.all(held <= problem.expert_slots_of_gpu()):
        ours = theirs = 0.0
        for layer, row in enumerate(gpu_of_expert):
            seconds = LayerSeconds(problem, layer)
            ours += seconds.afresh(row)
            theirs += seconds.afresh(sorted_assignment(load[layer], speed, held))
        notes[f"time by Theorem 5.1's placement / time by ours{rows_counted(problem)}"] = Note(
            theirs / ours if ours else 1.0, "×"
        )
    if problem.network.gpus > MOST_PRINTED_GPUS:
        return notes
    # Fabric and links work side by side: the slower of the two is the time of an all-to-all.
    layers = len(gpu_of_expert)
    compared = min(layers, max(1, MOST_PRINTED_PAIRS // problem.network.gpus**2))
    load = Load(problem, to_placement(gpu_of_expert, problem), problem.travel)
    traffic = load.traffic[np.arange(compared) * layers // compared]
    printed = [results_on(problem.network, matrix, partial(algorithm1, stop=stop)) for matrix in traffic]
    best = sum(max(result.bound for result in results) for results in printed)
    makespan = sum(max(result.objective for result in results) for results in printed)
    about = "" if compared == layers else f" (in {compared} of {layers} layers)"
    notes[f"time by Algorithm 1's order / time by the best one{about}"] = Note(makespan / best if best else 1.0, "×")
    return notes
