"""All knobs of a placement in one search: the experts of every GPU, how many, and copies in spare slots, for the least time of
a pass as it is simulated.

The other systems know ports, speeds or rows, none of them all at once. Their plans are where the search begins, layer by layer,
and candidates to the end: the same simulation judges all, so that this plan is never slower than the best of them on the
recording that it is made from.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from pydantic import Field

from engine.errors import InputError, StoppedError
from engine.network import Network
from engine.placement.best import (
    Known,
    Task,
    Tokens,
    chooser_of,
    compile_ahead,
    layer_of,
    least_seconds,
    prices_of,
    rows_on,
    search,
)
from engine.plan import Placement, Travel
from engine.problem import Problem
from engine.result import Ints, Provenance, Stop, relative_gap
from engine.simulate import bound_of_plan, loads_of, simulate
from engine.simulate.work import Load
from engine.systems import aurora, baselines, coactivation, eplb, exflow, joint
from engine.systems.aurora_exclusive import fixed_compute
from engine.systems.base import Draft, Note, Notes, Report, System, silent
from engine.systems.eplb import slots_per_gpu
from engine.systems.options import Options, Order, Seed, Slots, TimeLimit, Value
from engine.systems.pieces import best_order
from engine.timeline import Timeline
from engine.units import seconds, share
from engine.workload import RoutingTrace

HIDDEN = 4
"""Every so many-th sequence is hidden from the search that is told when to end."""
BLOCKS = 64
"""Stretches of neighbouring tokens that stand for sequences where none are recorded."""
BOUND_WORK, BOUNDED_CELLS = 4_000_000, 10_000_000
"""Cells of the linear programmes of a bound, which take some microseconds each, and of a layer up to which it has a bound."""


class BestOptions(Options):
    redundant: int = Field(
        0, ge=0, le=64, title="Spare slots per GPU", description="spare slots per GPU and layer for copies of experts"
    )
    slots: Slots = "even"
    hide: bool = Field(
        False,
        title="Hide a quarter",
        description="hide every fourth sequence from the search, which ends where it gains no more on those",
    )
    order: Order = "best"
    time_limit: TimeLimit = Field(20.0, description="seconds for the search; other systems have their usual ones, or as many")
    seed: Seed = 0


@dataclass(frozen=True)
class Candidate:
    """A plan with its timeline and the loads of its placement."""

    title: str
    draft: Draft
    timeline: Timeline
    loads: tuple[Load, ...]

    @cached_property
    def layers(self) -> np.ndarray:
        """float64[layer]: seconds of each."""
        ends = np.zeros(self.draft.placement.layers)
        np.maximum.at(ends, self.timeline.events["layer"].to_numpy(), self.timeline.events["end"].to_numpy())
        return np.diff(np.maximum.accumulate(ends), prepend=0.0)


def best(problem: Problem, options: BestOptions, stop: Stop, report: Report) -> Draft:
    """The fastest of the other systems' plans, of the best layers of each, and of what a search makes of those."""
    room, slots = room_of(problem, options)
    candidates, proven = _singles(problem, options, stop, report)
    usable = [each for each in candidates if each.draft.execution == "vanilla" and _within(each.draft.placement, room, slots)]
    if options.order == "best":
        candidates += _in_every_order(candidates, problem, stop)
    single = min(candidates, key=lambda each: each.timeline.total)
    notes: Notes = {"best of the other systems": Note(f"{single.title}, {seconds(single.timeline.total)}")}
    compile_ahead()  # before the clock starts
    guard = options.guard(stop)
    layers = LayersOf(problem, problem.network, room, slots, options.hide)
    if usable and not stop():
        fastest = np.array([each.layers for each in usable]).argmin(axis=0)
        mixed = _mixed([usable[number].draft.placement for number in fastest], problem)
        placements = {"the best layers of the other systems": mixed}
        if layers.unknown is None:

            def tell(done: float) -> None:
                report(0.5 + 0.4 * done, "searching", single.timeline.total, None)

            tell(0.0)
            tasks = [layers.task(layer, mixed) for layer in range(mixed.layers)]
            search(tasks, options.time_limit, options.seed, guard, tell)
            placements["the search"] = _placement([task.held for task in tasks], problem)
        else:
            notes["search"] = Note(f"none, since {layers.unknown}")
        mode = _mode(options)
        found = [_ordered(title, placement, mode, problem, stop) for title, placement in placements.items()]
        candidates += found
        if options.order == "best":
            candidates += _in_every_order(found, problem, stop)
    winner = min(candidates, key=lambda each: each.timeline.total)
    total, draft = winner.timeline.total, winner.draft
    notes["found by"] = Note(winner.title)
    notes["against the best of the other systems"] = Note(single.timeline.total / total if total else 1.0, "×")
    report(0.9, "bounding", total, None)
    least = None
    plain = draft.execution == "vanilla" and draft.send_order.mode != "two-tier" and _within(draft.placement, room, slots)
    if plain and (least := bound_of(problem, room, slots, stop)) is not None:
        if problem.travel is None and slots == problem.workload.num_experts:
            least = max(least, proven)
        within = "of one copy of every expert" if slots == problem.workload.num_experts else "with copies in so many slots"
        text = f"at most {share(relative_gap(total, least))}: no placement {within} is below {seconds(least)} by plain sends"
        notes["left"] = Note(f"{text} (proven)")
    notes |= {about: note for about, note in draft.notes.items() if about.endswith(" order")}
    known = {"notes": notes, "timeline": winner.timeline, "loads": winner.loads, "name": None}
    ends = {"cancelled": stop(), "limited": guard.cut or any(each.draft.limited for each in candidates)}
    return replace(draft, bound=least if problem.network.direct else None, **known, **ends)


def _singles(problem: Problem, options: BestOptions, stop: Stop, report: Report) -> tuple[list[Candidate], float]:
    """The plans of the other systems, and the bound that they prove for one copy of every expert, by one row per token copy."""
    candidates: list[Candidate] = []
    proven = 0.0
    for part, (system, settings) in enumerate(others := list(_others(problem, options))):
        if candidates and stop():
            break
        fastest = min((each.timeline.total for each in candidates), default=None)
        report(0.5 * part / len(others), f"planning with {system.title}", fastest, None)
        try:
            draft = system.recipe(problem, system.settings(settings), stop, silent)
            candidates.append(_judged(system.title, draft, problem, stop))
        except (InputError, StoppedError):  # cannot plan this, or not any more
            continue
        if draft.bound is not None and settings.get("slots") == options.slots:
            proven = max(proven, draft.bound)
    if not candidates:
        raise InputError("no system can plan this; run one of them to see why")
    return candidates, proven


def _mode(options: BestOptions) -> str:
    """The send order in which plans are first compared: of all a plain all-to-all, nearly as fast and soon simulated."""
    return "concurrent" if options.order == "best" else options.order


def _ordered(title: str, placement: Placement, mode: str, problem: Problem, stop: Stop) -> Candidate:
    """A placement with the best send order of a mode."""
    ordered = best_order(placement, problem, mode, stop, silent)
    return Candidate(title, ordered.draft({}, False), ordered.timeline, ordered.loads)


def _in_every_order(candidates: list[Candidate], problem: Problem, stop: Stop) -> list[Candidate]:
    """The candidates, the fastest first, with their best orders; without those that no order makes the fastest of them."""
    fastest, ordered = min(each.timeline.total for each in candidates), []
    for each in sorted(candidates, key=lambda each: each.timeline.total):
        if stop():
            break
        if each.draft.execution != "vanilla":
            continue
        plan = each.draft.plan("trial", Provenance(optimiser=""), problem.travel)
        if bound_of_plan(plan, problem, loads=each.loads) < fastest * (1 - 1e-9):
            ordered.append(_ordered(each.title, each.draft.placement, "best", problem, stop))
            fastest = min(fastest, ordered[-1].timeline.total)
    return ordered


def _others(problem: Problem, options: BestOptions) -> Iterator[tuple[System, dict[str, Value]]]:
    """The systems that plan for one model, the quick ones first, with their settings: no more copies than allowed."""
    files = baselines, eplb, aurora, joint, coactivation, exflow
    systems = {system.name: system for file in files for system in file.SYSTEMS}
    for name in ("linear", "round-robin", "eplb", "aurora", "joint", "coactivation", "exflow"):
        known, wanted = systems[name].options.model_fields, options.model_dump() | {"order": _mode(options)}
        if "time_limit" in known:
            wanted["time_limit"] = min(options.time_limit, known["time_limit"].default)
        kinds = ("even", "uneven") if "slots" in known and options.slots == "uneven" else (options.slots,)
        for kind in kinds:
            settings = wanted | {"slots": kind}
            yield systems[name], {field: value for field, value in settings.items() if field in known}


def _judged(title: str, draft: Draft, problem: Problem, stop: Stop) -> Candidate:
    """The draft as it is simulated."""
    plan = draft.plan(title, Provenance(optimiser=""), problem.travel)
    loads = draft.loads or loads_of(plan, problem)
    return Candidate(title, draft, draft.timeline or simulate(plan, problem, stop, loads=loads), loads)


def room_of(problem: Problem, options: BestOptions) -> tuple[Ints, int]:
    """(slots of a layer on every GPU at most, int64[gpu]; in all). Raises InputError if they do not fit the memory."""
    slots = slots_per_gpu(problem, options.redundant, options.slots)
    room = np.minimum(problem.expert_slots_of_gpu(), problem.workload.num_experts)
    return slots if options.slots == "even" else room, int(slots.sum())


def _within(placement: Placement, room: Ints, slots: int) -> bool:
    """True if every layer of a placement keeps to the room int64[gpu] and to so many slots in all."""
    return bool(np.all(placement.slots <= room) and np.all(placement.slots.sum(axis=1) <= slots))


def _mixed(placements: list[Placement], problem: Problem) -> Placement:
    """Layer by layer of one of these placements."""
    return _placement([placement.experts_of_gpu[layer] for layer, placement in enumerate(placements)], problem)


def _placement(rows: list, problem: Problem) -> Placement:
    """rows: [layer][gpu], the experts there"""
    held = tuple(tuple(tuple(sorted(gpu)) for gpu in row) for row in rows)
    return Placement(experts=problem.workload.num_experts, experts_of_gpu=held, model_layers=problem.model.moe_layers)


class LayersOf:
    """The layers of a problem as the search has them.

    network: the problem's, or one in its place
    room: int64[gpu] slots
    slots: of a layer in all
    hide: True to hide every fourth sequence from the search
    """

    def __init__(self, problem: Problem, network: Network, room: Ints, slots: int, hide: bool = False) -> None:
        self.problem, self.network, self.room, self.slots = problem, network, room, slots
        self.travel, self.copied = problem.travel or Travel(), slots > problem.workload.num_experts
        self.alone, self.trace = self.travel.unit == "copies", isinstance(problem.workload, RoutingTrace)
        hidden = _hidden(problem.workload) if hide and self.trace else None
        self.seen = None if hidden is None or hidden.all() or not hidden.any() else ~hidden

    @property
    def unknown(self) -> str | None:
        """The reason why the seconds of any placement are not known in advance; None: they are."""
        if not (self.alone or self.trace):
            return "the rows of a recording without tokens are an estimate"
        if self.copied and self.travel.replicas not in (None, "fewest"):
            return "ranks choose copies; `eplb` plans for their rule"
        return None

    def task(self, layer: int, placement: Placement) -> Task:
        """The search of a layer from a placement."""
        expert, place = np.full((2, self.slots), -1)
        of, gpu = np.nonzero(placement.share[layer])
        first = np.r_[True, of[1:] != of[:-1]]
        # An expert's own item is its first copy.
        order = np.argsort(~first, kind="stable")
        expert[: len(of)], place[: len(of)] = of[order], gpu[order]
        if self.seen is None:
            return Task(self.layer(layer), expert, place)
        return Task(self.layer(layer, self.seen), expert, place, self.layer(layer, ~self.seen))

    def layer(self, layer: int, tokens: np.ndarray | None = None) -> Known:
        """A layer for the kernels, with these tokens (bool[token]) alone, counted as all."""
        problem, gpus, experts = self.problem, len(self.room), self.problem.workload.num_experts
        count = 1.0 if tokens is None else len(tokens) / tokens.sum()
        demand = problem.demand[layer] if tokens is None else self._demand(layer, tokens) * count
        served, choices, source, turn = not self.alone and self.copied, None, None, None
        if not self.alone:
            choices, source = problem.workload.experts[:, layer].astype(np.int64), problem.gpu_of_token
            turn = _turns(choices) if served and self.travel.replicas is None else None
            parts = choices, source, turn
            choices, source, turn = (part if part is None or tokens is None else part[tokens] for part in parts)
        network = self.network
        matrix = demand @ np.full((experts, gpus), 1 / gpus) * self.travel.row_bytes(problem.model)[0]
        networks = tuple(network.carrying(exchange, self.travel.unit, matrix) for exchange in ("dispatch", "combine"))
        stops, unit = problem.stops, self.travel.unit
        rows = rows_on(networks, stops.entry, stops.of_gpu, unit, self.travel.row_bytes(problem.model))
        dividing = np.arange(1, min(gpus, self.slots - experts + 1) + 1)[:, None]
        ffn = np.ascontiguousarray(self.ffn(demand.sum(axis=0) / dividing).transpose(2, 1, 0))
        known = layer_of(rows, Tokens(demand, choices, source, turn, count), ffn, self.room, served)
        if not served:
            return known
        kinds = list(dict.fromkeys(problem.cluster.gpus))
        whole = np.arange(int(np.ceil(demand.sum(axis=0).max())) + 2, dtype=np.float64)
        table = np.stack([problem.cost.expert_ffn(gpu, whole, problem.model) for gpu in kinds])
        nodes = unit == "node" and stops.count > 1
        kind = np.array([kinds.index(gpu) for gpu in problem.cluster.gpus])
        return chooser_of(*known, stops.of_gpu if nodes else np.arange(gpus), table, kind)

    def ffn(self, tokens: np.ndarray) -> np.ndarray:
        """float64[gpu, …] seconds of so many tokens of an expert (float64[…])."""
        gpus, cost, model = self.problem.cluster.gpus, self.problem.cost, self.problem.model
        of_kind = {gpu: cost.expert_ffn(gpu, tokens, model) for gpu in dict.fromkeys(gpus)}
        return np.stack([of_kind[gpu] for gpu in gpus])

    def _demand(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        """float64[source, expert] of these tokens, bool[token]."""
        chosen, source = self.problem.workload.experts[tokens, layer], self.problem.gpu_of_token[tokens]
        demand = np.zeros(self.problem.demand.shape[1:])
        real = chosen >= 0
        np.add.at(demand, (np.broadcast_to(source[:, None], chosen.shape)[real], chosen[real]), 1.0)
        return demand


def _turns(chosen: Ints) -> Ints:
    """int64[token, choice]: how often the same expert was chosen before."""
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    turn = np.empty(len(flat), dtype=np.int64)
    turn[order] = np.arange(len(flat)) - np.searchsorted(flat[order], flat[order])
    return turn.reshape(chosen.shape)


def _hidden(trace: RoutingTrace) -> np.ndarray:
    """bool[token]: every fourth sequence, or stretch of neighbouring tokens where none are recorded."""
    if trace.sequence is not None:
        unit = np.unique(trace.sequence, return_inverse=True)[1]
    else:
        unit = np.arange(trace.tokens) * BLOCKS // max(trace.tokens, 1)
    return unit % HIDDEN == HIDDEN - 1


def bound_of(problem: Problem, room: Ints, slots: int, stop: Stop) -> float | None:
    """Seconds below which no placement is by plain sends; None where that is not known: of rows without tokens, of rows with
    copies, of copies that tokens or ranks choose, and where the network's rates depend on the traffic.

    room: int64[gpu] slots
    slots: of a layer in all
    """
    experts, gpus, layers = problem.workload.num_experts, len(room), problem.workload.layers
    network = replace(problem.network, share=np.ones((2, 1)))  # fewer sends than all may reach the whole rates
    of = LayersOf(problem, network, room, slots)
    cells = experts * gpus * 2 * (gpus + 2) + (0 if of.alone else experts * experts * gpus)
    if of.unknown or (of.copied and not of.alone) or network.measured is not None or cells > BOUNDED_CELLS:
        return None
    total, priced = float(sum(step.max(axis=1).sum() for step in fixed_compute(problem).values())), BOUND_WORK // cells + 1
    for layer, demand in enumerate(problem.demand):
        known = of.layer(layer)
        dividing = np.arange(1, min(gpus, slots - experts + 1) + 1)[:, None]
        cheapest = (dividing * of.ffn(demand.sum(axis=0) / dividing)).min(axis=1).T
        if stop():
            return None
        # Any prices prove a bound, so those of a layer do for the next ones too.
        if layer * priced // layers > (layer - 1) * priced // layers:
            prices = prices_of(known, cheapest)
        total += least_seconds(known, cheapest, prices, not of.copied)
        if slots == experts and np.any((demand > 0).sum(axis=0) > 1):
            total += 2 * float(known[0].start.min(initial=0.0))
    return total


SYSTEMS = (
    System(
        name="best",
        title="Best of all",
        summary="the fastest of the other systems' plans, and a search from there over placement and copies by simulated time",
        paper="Switchyard",
        recipe=best,
        options=BestOptions,
    ),
)
