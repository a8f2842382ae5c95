"""Aurora, exclusive models: one model's experts on a homogeneous (§4) or heterogeneous (§5) cluster.

Two decisions: which GPU takes which experts, and in which order the bytes of every all-to-all move. The printed rules
(Theorem 5.1, Algorithm 1, Theorem 5.2) are not optimal in general; `exclusive` solves both problems exactly or with
a proven bound and says how far the printed rules, kept as `exclusive_printed`, are from it.
"""

import contextlib
from functools import partial
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from engine.communication.algorithm1 import algorithm1
from engine.communication.two_networks import results_on
from engine.errors import StoppedError
from engine.placement.assignment import AssignmentInstance, assign
from engine.placement.baselines import linear_assignment, sorted_assignment
from engine.placement.exchange_search import exchange_search
from engine.placement.grouped_assignment import PROVEN_GAP, assign_groups
from engine.plan import SendOrder
from engine.problem import Problem
from engine.result import Stop, never
from engine.systems.base import Draft, Note, Notes, Report
from engine.systems.layer_seconds import LayerSeconds, expert_seconds, linked_group, tokens_nearby
from engine.systems.options import Options, Seed, Slots, TimeLimit
from engine.systems.pieces import best_order, order_by, slots_of_gpu, spread_evenly, to_placement

EXCHANGES_PER_EXPERT, SECONDS_PER_EXCHANGE = 60, 1e-4
"""Exchanges tried in a layer, and what one takes on 1024 GPUs, which only divides a time limit."""

MOST_PRINTED_GPUS, MOST_PRINTED_PAIRS = 64, 20_000
"""Algorithm 1 looks at every pair in every phase, half a second a layer of 64 GPUs: it is compared on so many GPUs at most, and
in so many layers that all their pairs together are no more than this."""

PlacementTime = Annotated[TimeLimit, Field(description="seconds for the placement of all layers together")]


class AuroraOptions(Options):
    """Of all four scenarios."""

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
    gpu_of_expert, bound, notes, cancelled = assign_layers(
        problem, options.slots, options.time_limit, options.seed, stop, report
    )
    placement = to_placement(gpu_of_expert, problem)
    if problem.travel is not None:
        bound = None  # where one row serves several experts, what a placement sends is not the sum over its experts
    elif not problem.network.direct:
        bound = relayed_bound(problem)  # the one so far is for bytes that go straight to their receivers
    if cancelled:
        return Draft(placement, SendOrder(mode="concurrent"), bound, notes, cancelled=True)
    ordered = best_order(placement, problem, options.order, stop, report)
    notes |= ordered.notes
    if not stop():
        with contextlib.suppress(StoppedError):
            notes |= compare_with_printed(gpu_of_expert, problem, stop)
    return Draft(placement, ordered.order, bound, notes, cancelled=stop(), timeline=ordered.timeline)


def exclusive_printed(problem: Problem, options: Options, stop: Stop, report: Report) -> Draft:
    """Theorem 5.1's sorted assignment and Algorithm 1's order, to the letter."""
    slots = slots_of_gpu(problem, "even")
    load = problem.demand.sum(axis=1)
    speed = problem.cluster.values("flops_fp16")
    placement = to_placement(np.array([sorted_assignment(row, speed, slots) for row in load]), problem)
    kernel = partial(algorithm1, stop=stop)

    def advance(done: float) -> None:
        report(done, "ordering sends by Algorithm 1", None, None)

    return Draft(placement, order_by(kernel, placement, problem, "matched", advance))


def instance_of_layer(problem: Problem, layer: int, slots: np.ndarray | None = None) -> AssignmentInstance:
    """The assignment problem of one layer (Aurora §5.1), as a relaxation where needed so that its bound always holds.

    Dispatch and combine together take max(sent, received) · (1/send + 1/receive) at a GPU, hence the harmonic mean.
    On nodes with links of their own only what arrives from other nodes is sure to load the fabric, whatever the rest of
    the placement, and what a GPU sends to more experts than its node has `slots` for (int64[gpu]; None: for all); a
    cluster that is one such node uses its links as the fabric.
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

    kind: see `slots_of_gpu`; time_limit: seconds for all layers together.
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
            # Of a layer that was not planned all that is known is what its heaviest expert takes on the best GPU.
            bound += float(instance.compute.min(axis=0).max() + 2 * instance.receive.min(axis=0).max())
            continue
        report(0.8 * layer / layers, f"placing layer {layer + 1} of {layers}", None, None)
        if experts == len(slots) and np.all(slots == 1):
            result = assign(instance, stop)
        else:
            result = assign_groups(instance, slots, exact_slots, time_limit / layers, seed, stop)
        seconds, placed = LayerSeconds(problem, layer), result.solution
        # Where ranks share processors, or links or different rates out and in leave the instance only a relaxation, its
        # optimum is a start for a search on the real objective.
        if seconds(placed) > result.objective * (1 + 1e-9):
            steps = min(EXCHANGES_PER_EXPERT * experts, int(time_limit / layers / SECONDS_PER_EXCHANGE))
            placed = exchange_search([placed, start], slots, exact_slots, seconds, steps, seed, stop)
        gpu_of_expert[layer] = placed
        needed = seconds.afresh(placed)
        objective += needed
        bound += result.bound
        proven += needed <= result.bound * (1 + PROVEN_GAP)
    said = f"proven optimal in {proven} of {layers} layers (max FFN + 2 · max all-to-all, no start-up times)"
    notes = {"placement": Note(said), "placement objective": Note(objective, "s")}
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
    gpus = problem.cluster.gpus
    for kind in dict.fromkeys(gpus):
        ranks = [rank for rank, gpu in enumerate(gpus) if gpu == kind]
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
    """How far the paper's rules are from ours on this problem: Theorem 5.1 by the placement objective, Algorithm 1 by
    the makespan of the dispatches of our placement. Raises StoppedError once `stop` answers True."""
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
        notes["Theorem 5.1's placement, relative to ours"] = Note(theirs / ours if ours else 1.0, "×")
    if problem.network.gpus > MOST_PRINTED_GPUS:
        return notes
    # Fabric and links work side by side: the slower of the two is the time of an all-to-all.
    layers = len(gpu_of_expert)
    compared = min(layers, max(1, MOST_PRINTED_PAIRS // problem.network.gpus**2))
    traffic = problem.traffic(to_placement(gpu_of_expert, problem), problem.travel)[
        np.arange(compared) * layers // compared
    ]
    printed = [results_on(problem.network, matrix, partial(algorithm1, stop=stop)) for matrix in traffic]
    best = sum(max(result.bound for result in results) for results in printed)
    makespan = sum(max(result.objective for result in results) for results in printed)
    about = "" if compared == layers else f" (in {compared} of {layers} layers)"
    notes[f"Algorithm 1's order, relative to the optimal one{about}"] = Note(makespan / best if best else 1.0, "×")
    return notes
