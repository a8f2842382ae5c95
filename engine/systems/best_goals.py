"""`best` by goal: one model, with tokens that travel as they do or in the best way, or two models on one cluster.

Two models have their layers in step, and a layer's time is that of both (Aurora's table 2), so a search is of both at once. It
begins at the plans of the systems for two models, which are candidates to the end.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import product

import numpy as np

from engine.errors import InputError, StoppedError
from engine.goal import Goal
from engine.placement.best import Task, search
from engine.placement.best.by_source import IN_TURN, Known, shared_of
from engine.plan import Placement, SendOrder, Travel
from engine.problem import Problem
from engine.result import Ints, Stop, never, relative_gap
from engine.systems import aurora, baselines
from engine.systems.aurora_colocated import best_orders, shared_slots
from engine.systems.aurora_exclusive import fixed_compute
from engine.systems.base import Draft, Note, Notes, Report, System, silent
from engine.systems.best import BestOptions, Candidate, best, compile_all, fits_room, judged, within
from engine.systems.best_layers import LayersOf
from engine.systems.pieces import to_placement
from engine.units import at_most, seconds

EXCHANGES, HEATS = 0.5, (0.1, 0.01)
"""The part of the time limit for exchanges that are simulated; and the parts of a layer's time by which one may lengthen it,
times a few, in the beginning of either half."""
SIMULATED, STEPS_PER_EXPERT = (2e-3, 2e-5), 100
"""Seconds of an ordinary core to simulate a layer of two models, and for every pair of GPUs; simulations of a half at most."""


def best_of_goal(problem: Problem, options: BestOptions, stop: Stop, report: Report) -> Draft:
    """`best` for the problem's goal, under every way of travelling that is open."""
    recipe = best_of_two if problem.goal is Goal.TWO_MODELS else best
    ways = list(ways_of(problem, options)) if options.travel == "free" else [problem.travel or Travel()]
    if len(ways) == 1:
        return recipe(problem, options, stop, report)
    drafts: list[Draft] = []
    notes: Notes = {}
    for number, way in enumerate(ways):
        if drafts and stop():
            break
        fastest = min((draft.judged_seconds for draft in drafts), default=None)
        tell = partial(within, report, number, len(ways), 1.0, way.in_words, fastest)
        travel = None if way == Travel() else way
        second = problem.second and replace(problem.second, travel=travel)
        draft = recipe(replace(problem, travel=travel, second=second), options, stop, tell)
        drafts.append(replace(draft, travel=way, bound=draft.bound if travel is None else None))
        notes[f"with {way.in_words}"] = Note(draft.judged_seconds, "s")
    chosen = min(drafts, key=lambda draft: draft.judged_seconds)
    told = {"tokens travel": Note(chosen.travel.in_words)} | chosen.notes | notes
    ends = {"cancelled": stop(), "limited": any(draft.limited for draft in drafts)}
    return replace(chosen, notes=told, **ends)


def ways_of(problem: Problem, options: BestOptions) -> Iterator[Travel]:
    """The deployed way of travelling, then the others: a row for every copy, GPU or node, in the same number formats. A rule of
    the engine by which ranks choose copies stays; without one, copies that tokens choose are tried too. A way whose rows could
    only be estimated is left out."""
    deployed, stops = problem.travel or Travel(), problem.stops
    yield deployed
    free = deployed.replicas in (None, "fewest")
    nodes = 1 < stops.count < stops.gpus
    for unit in ("copies", "gpu", "node") if nodes else ("copies", "gpu"):
        choosing = (None, "fewest") if unit != "copies" and options.redundant else (None,)
        for rule in choosing if free else (deployed.replicas,):
            way = deployed.model_copy(update={"unit": unit, "replicas": rule})
            sides = (problem,) if problem.second is None else (problem, problem.second)
            if way != deployed and not any(side.estimates_rows(way) for side in sides):
                yield way


def best_of_two(problem: Problem, options: BestOptions, stop: Stop, report: Report) -> Draft:
    """The fastest of the other systems' plans for two models, of the best layers of each, and of a search from those."""
    if options.redundant:
        raise InputError("two models are planned with one copy of every expert; leave redundant at 0")
    layers = LayersOfTwo(problem, shared_slots((problem, problem.second), options.slots))
    report(0.0, "loading the searches, which are compiled once", None, None)
    compile_all(ranks_choose=True)
    candidates = list(_singles_of_two(problem, options, stop, report))
    if not candidates:
        raise InputError("no system can plan these two models; run aurora to see why")
    single = min(candidates, key=lambda each: each.seconds)
    guard = options.guard(stop)
    starts = [each.draft for each in candidates if layers.fit(each.draft)]
    if starts and not stop() and layers.unknown is None:

        def tell(done: float) -> None:
            report(0.5 + 0.4 * done, "searching", single.seconds, None)

        tasks = [layers.task(layer, starts) for layer in range(problem.workload.layers)]
        placed = {"the best layers of the other systems": layers.placements(tasks)}
        search(tasks, options.time_limit * (1 - EXCHANGES), options.seed, guard, tell)
        placed["the search"] = layers.placements(tasks)
        placed["exchanges after the search"] = layers.exchanged(placed["the search"], options, guard)
        known = {(each.draft.placement, each.draft.placement_b) for each in candidates}
        for title, placements in placed.items():
            if tuple(placements) not in known:
                ordered = best_orders(placements, problem, options.order, stop, silent)
                candidates.append(judged(title, ordered.draft({}, False), problem, stop))
            known.add(tuple(placements))
    winner = min(candidates, key=lambda each: each.seconds)
    notes: Notes = {
        "best of the other systems": Note(f"{single.title}, {seconds(single.seconds)}"),
        "found by": Note(winner.title),
        "against the best of the other systems": Note(single.seconds / winner.seconds if winner.seconds else 1.0, "×"),
    }
    if layers.unknown is not None:
        notes["search"] = Note(f"none, since {layers.unknown}")
    notes |= {about: note for about, note in winner.draft.notes.items() if about.endswith(" order")}
    bounds = (each.draft.bound for each in candidates if each.draft.bound is not None and layers.fit(each.draft))
    bound = max(bounds, default=None) if options.slots == "even" and layers.fit(winner.draft) else None
    if bound is not None and problem.travel is None:
        above = at_most(relative_gap(winner.timeline.total, bound))
        notes["left"] = Note(f"{above}: no placements of one copy of every expert are below {seconds(bound)} (proven)")
    known = {"notes": notes, "timeline": winner.timeline, "loads": winner.loads, "bound": bound, "name": None}
    limited = guard.cut or any(each.draft.limited for each in candidates)
    return replace(winner.draft, cancelled=stop(), limited=limited, judged_seconds=winner.seconds, **known)


def _singles_of_two(problem: Problem, options: BestOptions, stop: Stop, report: Report) -> Iterator[Candidate]:
    """The plans of the other systems for two models, the quick ones first."""
    systems = [system for file in (baselines, aurora) for system in file.SYSTEMS if Goal.TWO_MODELS in system.goals]
    systems.sort(key=lambda system: "time_limit" in system.options.model_fields)
    kinds = ("even", "uneven") if options.slots == "uneven" else ("even",)
    runs = [(system, kind) for system in systems for kind in kinds if kind == "even" or "slots" in system.options.model_fields]
    for part, (system, kind) in enumerate(runs):
        known, wanted = system.options.model_fields, options.model_dump() | {"slots": kind}
        if "time_limit" in known:
            wanted["time_limit"] = min(options.time_limit, known["time_limit"].default)
        if part and stop():
            break
        tell = partial(within, report, part, len(runs), 0.5, f"planning with {system.title}", None)
        try:
            settings = system.settings({field: value for field, value in wanted.items() if field in known})
            yield judged(system.title, system.recipe(problem, settings, stop, tell), problem, stop)
        except (InputError, StoppedError):  # cannot plan this, or not any more
            continue


class LayersOfTwo:
    """The layers of two models as the search has them. slots: int64[gpu] of each model, at most"""

    def __init__(self, problem: Problem, slots: list[Ints]) -> None:
        self.problem, self.slots, self.experts = problem, slots, problem.workload.num_experts
        self.sides = [
            LayersOf(side, problem.network, 1.0, room, self.experts)
            for side, room in zip((problem, problem.second), slots, strict=True)
        ]

    @property
    def unknown(self) -> str | None:
        """See `LayersOf.unknown`."""
        return next((side.unknown for side in self.sides if side.unknown is not None), None)

    @cached_property
    def fixed(self) -> np.ndarray:
        """float64[layer, 3, gpu], see `Shared`."""
        a, b = (fixed_compute(side.problem) for side in self.sides)
        return np.stack([b["gate"], a["aggregate"], b["aggregate"] + a["gate"]], axis=1)

    def fit(self, draft: Draft) -> bool:
        """True if the placements of a draft keep to the slots, and tokens start on their ranks."""
        both = draft.placement, draft.placement_b
        return draft.token_gpus is None and all(
            placement.single and fits_room(placement, room, self.experts)
            for placement, room in zip(both, self.slots, strict=True)
        )

    def layer(self, layer: int) -> Known:
        """A layer of both models for the kernel."""
        kinds = list(dict.fromkeys(self.problem.cluster.gpus))
        first, second = (side.model(side.layer(layer), side.problem.demand[layer], kinds) for side in self.sides)
        return shared_of(first, second, self.sides[0].kind(kinds), self.fixed[layer], IN_TURN, 1)

    def task(self, layer: int, starts: list[Draft]) -> Task:
        """The search of a layer from the fastest of these plans' placements of it."""
        known, expert = self.layer(layer), np.arange(2 * self.experts)
        tasks = [
            Task(
                known,
                expert.copy(),
                np.concatenate([both.gpu_of_expert[layer] for both in (start.placement, start.placement_b)]),
            )
            for start in starts
        ]
        return min(tasks, key=lambda task: task.seconds(known))

    def placements(self, tasks: list[Task]) -> list[Placement]:
        """The placements of both models in the tasks of all layers."""
        rows = np.array([task.place[np.argsort(task.expert)] for task in tasks]).reshape(len(tasks), 2, self.experts)
        return [to_placement(rows[:, model], side.problem) for model, side in enumerate(self.sides)]

    def exchanged(self, placements: list[Placement], options: BestOptions, over: Stop) -> list[Placement]:
        """The placements after exchanges of two experts, or of one with a free slot, that shorten their layer as simulated with
        plain all-to-alls, at a falling temperature; every simulation tries one exchange in each layer."""
        layers, gpus = placements[0].layers, placements[0].gpus
        rng, each = np.random.default_rng(options.seed), np.arange(layers)
        a_step = layers * (SIMULATED[0] + SIMULATED[1] * gpus**2)
        steps = min(int(options.time_limit * EXCHANGES / len(HEATS) / a_step), STEPS_PER_EXPERT * self.experts)
        best = np.stack([placement.gpu_of_expert for placement in placements])  # [model, layer, expert]
        least = self.seconds(best)
        for heat, step in product(HEATS, range(steps)):
            if over():
                break
            if step == 0:
                rows, now = best.copy(), least.copy()
            trial, model = rows.copy(), rng.integers(2, size=layers)
            one, other = rng.integers(self.experts, size=(2, layers))
            target, alone = rng.integers(gpus, size=layers), rng.random(layers) < 0.5
            alone &= (rows[model, each] == target[:, None]).sum(axis=1) < np.stack(self.slots)[model, target]
            trial[model, each, one] = np.where(alone, target, rows[model, each, other])
            trial[model[~alone], each[~alone], other[~alone]] = rows[model, each, one][~alone]
            after = self.seconds(trial)
            gain = (now - after) / np.maximum(now, 1e-30)
            taken = gain >= heat * (1 - step / steps) * np.log(np.maximum(rng.random(layers), 1e-30))
            rows[:, taken], now[taken] = trial[:, taken], after[taken]
            shorter = now < least
            best[:, shorter], least[shorter] = rows[:, shorter], now[shorter]
        return [to_placement(of_model, side.problem) for of_model, side in zip(best, self.sides, strict=True)]

    def seconds(self, rows: Ints) -> np.ndarray:
        """float64[layer]: simulated seconds of each with plain all-to-alls. rows: int64[model, layer, expert] GPUs"""
        a, b = (to_placement(of_model, side.problem) for of_model, side in zip(rows, self.sides, strict=True))
        order = SendOrder(mode="concurrent")
        return judged("exchanged", Draft(a, order, placement_b=b, send_order_b=order), self.problem, never).layers


SYSTEMS = (
    System(
        name="best",
        title="Best of all",
        summary="the fastest of the other systems' plans, and a search from there over placement and copies by simulated time",
        paper="Switchyard",
        recipe=best_of_goal,
        options=BestOptions,
        goals=(Goal.INFERENCE, Goal.TWO_MODELS),
        preselected=True,
    ),
)
