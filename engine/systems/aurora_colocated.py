"""Aurora, two models on one cluster (§6, §7): the experts that share a GPU, and the order in which both models' bytes move.

The paper has one expert of each model to a GPU. With more, the experts that suit a GPU together in an exclusive plan form
a bundle, bundles are matched as the paper matches experts, and a search then exchanges single experts. The joint order of
both models is table 2 of Aurora walked once, with every all-to-all fitted to the one before it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field

from engine.communication.joint_order import JointOrder
from engine.errors import InputError
from engine.network import Network
from engine.placement.assignment import AssignmentInstance, assign
from engine.placement.colocation.heterogeneous import colocate_heterogeneous, decoupled
from engine.placement.colocation.pairs import ModelTables, cycle_bound, pair_weight, sorted_colocation
from engine.placement.exchange_search import exchange_search
from engine.placement.grouped_assignment import assign_groups
from engine.plan import Placement, Plan, Schedule, SendOrder
from engine.problem import MEMORY_SHARE, Problem
from engine.result import Advance, Limits, Provenance, Stop, unwatched
from engine.simulate.colocated import ExpertSeconds, layer_weight
from engine.simulate.work import Load, Work
from engine.systems.aurora_exclusive import EXCHANGES_PER_EXPERT, AuroraOptions, PlacementTime, fixed_compute, instance_of_layer
from engine.systems.base import Draft, Note, Notes, Report
from engine.systems.options import Options, Seed
from engine.systems.pieces import (
    Ordered,
    fastest_plan,
    linear_placement,
    phased_order,
    rows_counted,
    slots_of_gpu,
    spread_evenly,
    to_placement,
)

LARGEST, MOST_PAIRS = 128, 250_000
"""GPUs for which a joint order is made, at most: its linear programs have a variable for every pair. And pairs of GPUs in all
layers together up to which `best` tries one: 64 GPUs and 61 layers, some 40 seconds."""

DISPATCH_A, DISPATCH_B, COMBINE_A, COMBINE_B = range(4)


class PrintedOptions(Options):
    order: Literal["best", "matched", "joint", "concurrent"] = Field(
        "best",
        title="Send order",
        description="when bytes move; joint: those of both models in one schedule; best: the fastest",
    )


class DecoupledOptions(PrintedOptions):
    time_limit: PlacementTime = 20.0
    seed: Seed = 0


def joint_orders(loads: Sequence[Load], stop: Stop, advance: Advance = unwatched) -> tuple[SendOrder, SendOrder]:
    """The send orders of both models as one schedule a layer (see `JointOrder`). Raises InputError above `LARGEST` GPUs.

    The start that computation allows each all-to-all is taken from the model's own recursion with the times that come out here,
    so on the traffic that it was made for the order is carried out as planned.

    loads: of both models
    advance: called with the share that is done
    """
    network = loads[0].problem.network
    if network.gpus > LARGEST:
        raise InputError(f"a joint order is made for {LARGEST} GPUs at most; use matched or concurrent")
    works = [load.work for load in loads]
    lane, count, layers = np.zeros(network.gpus), len(works[0].dispatch), []
    for layer in range(count):
        advance(layer / count)
        schedules, lane = layer_order(works, layer, network, lane, stop)
        layers.append(schedules)
    parts = [tuple(schedules[exchange] for schedules in layers) for exchange in range(4)]
    return (
        SendOrder(mode="joint", dispatch=parts[DISPATCH_A], combine=parts[COMBINE_A]),
        SendOrder(mode="joint", dispatch=parts[DISPATCH_B], combine=parts[COMBINE_B]),
    )


def worth_trying(problem: Problem) -> bool:
    """True if `best` has the time for a joint order."""
    gpus = problem.network.gpus
    return gpus <= LARGEST and problem.workload.layers * gpus**2 <= MOST_PAIRS


def layer_order(
    works: Sequence[Work], layer: int, network: Network, lane: np.ndarray, stop: Stop
) -> tuple[list[Schedule], np.ndarray]:
    """The schedules of one layer's four all-to-alls (dispatch of a and of b, combine of a and of b) on GPUs that are free from
    `lane` (float64[gpu] seconds) on, and when each is free after the layer."""
    a, b = works
    chain = JointOrder(network, exchanges=4, stop=stop)

    def run(work: Work, kind: str, ready: float) -> float:
        nonlocal lane
        lane = np.maximum(lane, ready) + work.compute[kind][layer]
        return float(lane.max())

    nothing = np.zeros_like(a.dispatch[layer])
    release_a, release_b = run(a, "gate", 0.0), run(b, "gate", 0.0)
    dispatched_a, left = chain.serve(DISPATCH_A, a.dispatch[layer], release_a, DISPATCH_B, b.dispatch[layer], release_b)
    begin = max(dispatched_a, release_b)
    release_a = run(a, "ffn", dispatched_a)
    dispatched_b, back = chain.serve(DISPATCH_B, left, begin, COMBINE_A, a.combine[layer], release_a)
    begin = max(dispatched_b, release_a)
    release_b = run(b, "ffn", dispatched_b)
    combined_a, left = chain.serve(COMBINE_A, back, begin, COMBINE_B, b.combine[layer], release_b)
    begin = max(combined_a, release_b)
    run(a, "aggregate", combined_a)
    combined_b, _ = chain.serve(COMBINE_B, left, begin, COMBINE_B, nothing, begin)
    run(b, "aggregate", combined_b)
    return chain.schedules(), lane


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two models in one layer: seconds on every GPU, and bytes that its tokens send to its experts."""

    instance: AssignmentInstance
    gate: np.ndarray
    aggregate: np.ndarray
    bytes: np.ndarray

    def bundled(self, gpu_of_expert: np.ndarray) -> ExpertSeconds:
        """The experts of every GPU as one; seconds of each bundle on each GPU."""
        bundle = np.eye(self.instance.gpus)[gpu_of_expert]
        sent = self.instance.send_total[:, None] - self.instance.send_saved @ bundle
        ffn, receive = self.instance.compute @ bundle, self.instance.receive @ bundle
        return ExpertSeconds(self.gate, self.aggregate, ffn, np.maximum(sent, 0.0), receive)


def colocating(problem: Problem, options: AuroraOptions, stop: Stop, report: Report) -> Draft:
    """Both scenarios; on equal GPUs the paper's decoupled method is its Theorem 6.1, on mixed ones its §7.2."""
    if options.order in ("shared", "two-tier"):
        raise InputError(
            f"two models cannot follow a {options.order} order, whose rates are constant; use joint, matched or concurrent"
        )
    pair = (problem, problem.second)
    slots = shared_slots(pair, options.slots)
    layers = problem.workload.layers
    placed = np.zeros((2, layers, problem.workload.num_experts), dtype=np.int64)
    both = sides_of_layers(problem)
    bound, ours, papers, proven = float(both[0][0].gate.max()), 0.0, 0.0, 0
    guard = options.guard(stop)
    for layer, sides in enumerate(both):
        if stop():  # the layers bounded so far are a bound of the whole too
            placed[:, layer] = [_spread(model_problem, taken) for model_problem, taken in zip(pair, slots, strict=True)]
            continue
        following = both[layer + 1][0].gate if layer + 1 < layers else np.zeros_like(sides[0].gate)
        bound += _layer_bound(problem.network, sides, slots, options.slots == "even", following)
        report(0.8 * layer / layers, f"colocating layer {layer + 1} of {layers}", None, None)
        seconds = layer_seconds(sides, problem)
        late = guard.part(layers - layer)
        matched, paper, optimal = _match(sides, slots, options, layers, late)
        papers += seconds(*paper)
        placed[:, layer] = _exchange(matched, paper, slots, seconds, options, late)
        ours += seconds(*placed[:, layer])
        proven += optimal
    placements = [to_placement(rows, model_problem) for rows, model_problem in zip(placed, pair, strict=True)]
    if stop():
        order = SendOrder(mode="concurrent")
        return Draft(placements[0], order, bound, cancelled=True, placement_b=placements[1], send_order_b=order)
    ordered = best_orders(placements, problem, options.order, stop, report)
    notes: Notes = {
        "matching": Note(
            f"best pairs of bundles proven in {proven} of {layers} layers{rows_counted(problem)}; exchanges of experts after "
            "it are a heuristic"
        ),
        f"time by the paper's method (decoupled) / time by ours{rows_counted(problem)}": Note(
            papers / ours if ours else 1.0, "×"
        ),
    }
    return ordered.draft(notes, stop(), guard.cut, bound)


def sorted_pairs(problem: Problem, options: PrintedOptions, stop: Stop, report: Report) -> Draft:
    """Theorem 6.2's pairs: the experts of a in blocks, and with the most popular of them the least popular of b."""
    first = linear_placement(problem).gpu_of_expert
    second = np.zeros_like(first)
    tokens = [side.demand.sum(axis=1) for side in (problem, problem.second)]
    for layer, loads in enumerate(zip(*tokens, strict=True)):
        second[layer, sorted_colocation(*loads)] = first[layer]
    return _ordered((first, second), problem, options, stop, report)


def decoupled_matching(problem: Problem, options: DecoupledOptions, stop: Stop, report: Report) -> Draft:
    """§7.2's placement: first the pairs, by bytes, then a GPU for each pair, by seconds; both exact bottleneck matchings."""
    slots, layers, guard = shared_slots((problem, problem.second), "even"), problem.workload.layers, options.guard(stop)
    rows = np.zeros((2, layers, problem.workload.num_experts), dtype=np.int64)
    for layer, sides in enumerate(sides_of_layers(problem)):
        bundles, cost, weight = matching_tables(sides, slots, options, layers, guard.part(layers - layer))
        rows[:, layer] = _on_gpus(decoupled(cost, weight), bundles)
    return replace(_ordered(rows, problem, options, stop, report), limited=guard.cut)


def _ordered(rows: Sequence[np.ndarray], problem: Problem, options: PrintedOptions, stop: Stop, report: Report) -> Draft:
    """These placements of a and of b, int64[layer, expert] each, in an order as Aurora's."""
    sides = problem, problem.second
    placements = [to_placement(own, side) for own, side in zip(rows, sides, strict=True)]
    problem.check_memory(*placements)
    return best_orders(placements, problem, options.order, stop, report).draft({}, stop())


def best_orders(placements: list[Placement], problem: Problem, mode: str, stop: Stop, report: Report) -> Ordered:
    """The best send orders of both models, or those of the mode that is wanted."""
    sides = zip((problem, problem.second), placements, strict=True)
    loads = tuple(Load(side, placement, problem.travel) for side, placement in sides)

    def orders_of(mode: str, advance: Advance) -> Sequence[SendOrder]:
        if mode == "joint":
            return joint_orders(loads, stop, advance)
        return [
            phased_order(load, mode, stop, lambda share, number=number: advance((number + share) / 2))
            for number, load in enumerate(loads)
        ]

    def plan_with(mode: str, advance: Advance) -> Plan:
        orders = orders_of(mode, advance)
        draft = Draft(placements[0], orders[0], placement_b=placements[1], send_order_b=orders[1])
        return draft.plan("trial", Provenance(optimiser=""), problem.travel)

    tried = ("joint", "matched", "concurrent") if worth_trying(problem) else ("matched", "concurrent")
    modes = tried if mode == "best" else (mode,)
    return fastest_plan(modes, plan_with, loads, problem, stop, report)


def layer_seconds(sides: list[Side], problem: Problem) -> Callable[[np.ndarray, np.ndarray], float]:
    """Seconds of one layer of both models under placements int64[expert] each: table 2 with every all-to-all at its busiest
    port. It guides the search; `simulate` has the last word."""
    network, together = problem.network, problem.cost.together
    away = ~np.eye(network.gpus, dtype=bool)
    over_link, over_fabric = network.linked & away, ~network.linked & away
    link = np.where(network.link > 0, network.link, 1.0)
    experts = np.arange(sides[0].instance.experts)

    linked, capacity = bool(over_link.any()), np.array([network.send, network.receive])

    def ports(traffic: np.ndarray) -> tuple[float, float]:
        """Seconds of the busiest port in dispatch and in combine, which is dispatch backwards."""
        fabric = traffic * over_fabric
        moved = np.array([fabric.sum(axis=1), fabric.sum(axis=0)])
        out, back = float((moved / capacity).max()), float((moved[::-1] / capacity).max())
        if linked:
            links = traffic * over_link
            within = float((np.maximum(links.sum(axis=1), links.sum(axis=0)) / link).max())
            out, back = max(out, within), max(back, within)
        return out, back

    def seconds(*gpu_of_expert: np.ndarray) -> float:
        ffn, out = [], []
        for side, row in zip(sides, gpu_of_expert, strict=True):
            ffn.append(together(np.bincount(row, side.instance.compute[row, experts], network.gpus)))
            out.append(side.bytes @ np.eye(network.gpus)[row])
        a, b = sides
        (dispatch_a, combine_a), (dispatch_b, combine_b) = ports(out[0]), ports(out[1])
        both = max(ports(out[0] + out[1])[0], b.gate.max() + dispatch_b)
        end_a = np.maximum(dispatch_a, b.gate) + ffn[0]
        end_b = np.maximum(end_a, both) + ffn[1]
        end_combine_a = max(end_a.max(), both) + combine_a
        end_combine_b = max(end_b.max(), end_combine_a) + combine_b
        end_aggregate_a = np.maximum(end_b, end_combine_a) + a.aggregate
        return float((np.maximum(end_aggregate_a, end_combine_b) + b.aggregate + a.gate).max())

    return seconds


def _spread(problem: Problem, slots: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(slots)), spread_evenly(slots, problem.workload.num_experts))


def shared_slots(pair: tuple[Problem, Problem], kind: str) -> list[np.ndarray]:
    """int64[gpu] for each model: slots per layer. With `kind` "uneven" each also gets half of the memory that experts spread
    evenly leave free. Raises InputError where the experts of both models do not fit together."""
    slots = [slots_of_gpu(problem, kind) for problem in pair]
    evenly = [spread_evenly(taken, problem.workload.num_experts) for problem, taken in zip(pair, slots, strict=True)]
    placements = [
        to_placement(np.tile(_spread(problem, taken), (problem.workload.layers, 1)), problem)
        for problem, taken in zip(pair, slots, strict=True)
    ]
    pair[0].check_memory(*placements)
    if kind == "even":
        return slots
    free = pair[0].cluster.values("memory") * MEMORY_SHARE - pair[0].held_bytes(*placements)
    more = [free / 2 // (problem.model.bytes_per_expert * problem.workload.layers) for problem in pair]
    return [
        np.minimum(taken + extra.astype(np.int64), problem.workload.num_experts)
        for problem, taken, extra in zip(pair, evenly, more, strict=True)
    ]


def sides_of_layers(problem: Problem) -> list[list[Side]]:
    """Both models in every layer."""
    models = []
    for model_problem in (problem, problem.second):
        held, size = fixed_compute(model_problem), model_problem.demand * model_problem.model.bytes_per_token
        instances = [instance_of_layer(model_problem, layer) for layer in range(model_problem.workload.layers)]
        columns = zip(instances, held["gate"], held["aggregate"], size, strict=True)
        models.append([Side(*of_layer) for of_layer in columns])
    return [list(sides) for sides in zip(*models, strict=True)]


def matching_tables(
    sides: list[Side], slots: list[np.ndarray], options: AuroraOptions | DecoupledOptions, layers: int, stop: Stop
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Bundles of experts (int64[expert] of a, of b), seconds of two of them on a GPU, float64[gpu, bundle of a, bundle of b],
    and the bytes by which the paper pairs them, float64[bundle of a, bundle of b]."""
    quarter = _quarter(options, layers)
    bundles = []
    for side, taken in zip(sides, slots, strict=True):
        if side.instance.experts == len(taken) and np.all(taken == 1):
            bundles.append(assign(side.instance, stop).solution)
        else:
            even = bool(np.all(taken == taken[0])) and taken.sum() == side.instance.experts
            bundles.append(assign_groups(side.instance, quarter, stop, slots=taken, exact_slots=even).solution)
    a, b = (side.bundled(bundle) for side, bundle in zip(sides, bundles, strict=True))
    # The paper's pairs know no GPU: the bytes of a bundle are taken at the mean over all GPUs.
    weight = pair_weight(a.send.mean(axis=0), a.receive.mean(axis=0), b.send.mean(axis=0), b.receive.mean(axis=0))
    return bundles, layer_weight(a, b), weight


def _quarter(options: AuroraOptions | DecoupledOptions, layers: int) -> Limits:
    return Limits(options.time_limit / layers / 4, wall=math.inf, seed=options.seed)


def _on_gpus(chosen: np.ndarray, bundles: list[np.ndarray]) -> list[np.ndarray]:
    """int64[expert] of a and of b: the GPU of each. chosen: int64[gpu, 2], the bundles on every GPU"""
    return [np.argsort(chosen[:, model])[bundle] for model, bundle in enumerate(bundles)]


def _match(
    sides: list[Side], slots: list[np.ndarray], options: AuroraOptions, layers: int, stop: Stop
) -> tuple[list[np.ndarray], list[np.ndarray], bool]:
    """Bundles of experts matched to GPUs: (ours, the paper's) as [int64[expert] of a, of b], and True if ours is proven."""
    bundles, cost, weight = matching_tables(sides, slots, options, layers, stop)
    result = colocate_heterogeneous(cost, _quarter(options, layers), stop)
    ours, paper = (_on_gpus(chosen, bundles) for chosen in (result.solution, decoupled(cost, weight)))
    return ours, paper, result.status.value == "OPTIMAL"


def _exchange(
    matched: list[np.ndarray],
    paper: list[np.ndarray],
    slots: list[np.ndarray],
    seconds: Callable[[np.ndarray, np.ndarray], float],
    options: AuroraOptions,
    stop: Stop,
) -> list[np.ndarray]:
    """Exchange experts of one model, then of the other, from the best start."""
    best = min((matched, paper), key=lambda rows: seconds(*rows))
    rows = list(best)
    for turn in (0, 1, 0, 1):
        taken, experts = slots[turn], len(rows[turn])
        even = options.slots == "even" and taken.sum() == experts

        def objective(row: np.ndarray, turn: int = turn) -> float:
            return seconds(row, rows[1]) if turn == 0 else seconds(rows[0], row)

        steps = EXCHANGES_PER_EXPERT * experts // 2
        rows[turn] = exchange_search([rows[turn]], taken, even, objective, steps, options.seed, stop)
    return rows


def _layer_bound(network: Network, sides: list[Side], slots: list[np.ndarray], even: bool, next_gate: np.ndarray) -> float:
    pairs = network.start_up(*np.nonzero(~np.eye(network.gpus, dtype=bool)))
    quickest = float(pairs.min()) if len(pairs) else 0.0
    slow, fast = np.minimum(network.send, network.receive), np.maximum(network.send, network.receive)
    # The instances have the mean of both directions; a single all-to-all may use the faster one.
    scale = 2 * slow / (slow + fast)
    tables = []
    for side, taken in zip(sides, slots, strict=True):
        must_leave = (side.bytes.sum(axis=0) - side.bytes.max(axis=0)).sum() > 0
        instance = side.instance
        moved = instance.receive * scale[:, None], instance.send_total * scale, instance.send_saved * scale[:, None]
        computed, exact = (side.gate, side.aggregate, instance.compute), int(taken.sum()) == instance.experts
        tables.append(ModelTables(*computed, *moved, quickest * must_leave, taken, even and exact))
    return cycle_bound(*tables, next_gate)
