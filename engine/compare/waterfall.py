"""The knobs of a plan, turned one after another: the time that each saves, alone and after those before it, and what is left.

Inference of one model: every step is planned by the search of `best` with the knobs so far, and begins from the answer before
it, so that times never rise. A training step: the knobs are turned to those of the fastest plan there is. All plans are
simulated, and the last is held against a proven bound.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from pydantic import Field

from engine.errors import InputError, StoppedError
from engine.goal import Goal
from engine.placement.best import compile_ahead, search
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.problem import MEMORY_SHARE, Problem
from engine.result import GUARD, Guard, Ints, Provenance, Stop, never, relative_gap, unwatched
from engine.schema import Frozen
from engine.simulate import loads_of, simulate
from engine.simulate.training import step_seconds
from engine.systems.base import Draft, Report, silent
from engine.systems.best import BestOptions, Candidate
from engine.systems.best_goals import ways_of
from engine.systems.best_layers import LayersOf, bound_of
from engine.systems.eplb import ReplicationOptions, eplb
from engine.systems.exflow import ExFlowOptions, exflow
from engine.systems.options import patient
from engine.systems.pieces import best_order, placement_of
from engine.systems.training import best as step
from engine.units import at_most, seconds

ORDERS = "matched", "shared", "two-tier", "concurrent"
"""Send orders that a placement can be given before the order itself is a knob; others count as a plain all-to-all."""
COUNTS = 5e-4
"""Share of the deployed plan's time from which on a sentence names what a knob saves."""
SAYS_LITTLE = 10.0
"""Share of the floor from which on the time above it says nothing of what can be gained."""
HALVINGS = 40


class Turn(Frozen):
    """A knob of a waterfall.

    knob: its name for people; after a comma, what it was turned to
    alone: seconds with this knob alone turned from the deployed plan; None: alone it turns nothing
    after: seconds with all knobs up to this one
    """

    knob: str
    alone: float | None = Field(default=None, ge=0)
    after: float = Field(ge=0)


class Waterfall(Frozen):
    """The deployed plan's time, and how it falls from knob to knob.

    deployed: seconds
    rows: the knobs in the order in which they are turned
    floor: seconds below which no plan with all these knobs is by plain sends, proven; None: not known
    """

    deployed: float = Field(ge=0)
    rows: tuple[Turn, ...] = ()
    floor: float | None = Field(default=None, ge=0)

    @property
    def total(self) -> float:
        """Seconds with all knobs."""
        return self.rows[-1].after if self.rows else self.deployed

    @property
    def saved(self) -> dict[str, float]:
        """Seconds that each knob saves after those before it."""
        before = (self.deployed, *(row.after for row in self.rows))
        return {row.knob: before[place] - row.after for place, row in enumerate(self.rows)}

    @property
    def left(self) -> float | None:
        """The share of the floor by which the time with all knobs lies above it; None: not known."""
        return None if self.floor is None else relative_gap(self.total, self.floor)

    @property
    def in_words(self) -> str:
        """One sentence: the knobs that save most first, and what is left at most."""
        named = [(knob, saved) for knob, saved in self.saved.items() if saved >= COUNTS * self.deployed > 0]
        named.sort(key=lambda pair: -pair[1])
        parts = [f"{knob.partition(',')[0].lower()} {seconds(saved)}" for knob, saved in named[1:]]
        text = f"No knob saves anything that counts of {seconds(self.deployed)}"
        if named:
            knob = named[0][0].partition(",")[0]
            text = f"{knob} {'save' if knob.endswith('s') else 'saves'} {seconds(named[0][1])} of {seconds(self.deployed)}"
        return f"{', '.join([text, *parts])}; {self._left_in_words}"

    @property
    def _left_in_words(self) -> str:
        if self.left is None:
            return "how much is left is not known"
        if self.left > SAYS_LITTLE:
            return f"the proven floor, {seconds(self.floor)}, is too far below to say how much is left"
        return f"{at_most(self.left) if self.left > 0 else 'nothing'} is left (proven)"


class Knobs(NamedTuple):
    """Limits of the knobs.

    spare: slots for copies per GPU and layer, as far as memory holds them
    in_all: those of all GPUs together, where they were counted so
    travels: ways of travelling to choose from, besides the deployed one; none: it is the engine's
    time_limit: seconds of work of each search
    """

    spare: int = 1
    travels: tuple[Travel | None, ...] = ()
    time_limit: float = 0.5
    seed: int = 0
    in_all: int | None = None

    @classmethod
    def of(cls, options: BestOptions, problem: Problem) -> "Knobs":
        """The knobs as far as the options of `best` turn them, with one spare slot at least."""
        travels = tuple(ways_of(problem, options)) if options.travel == "free" else ()
        spare, in_all = max(options.redundant, 1), None
        if options.spare == "in all":
            spare, in_all = -(-spare // len(problem.cluster.gpus)), spare
        return cls(spare=spare, travels=travels, seed=options.seed, in_all=in_all)


USUAL = Knobs()


def waterfall(
    problem: Problem,
    deployed: Plan,
    found: Sequence[Plan] = (),
    knobs: Knobs = USUAL,
    stop: Stop = never,
    report: Report = silent,
) -> Iterator[Waterfall]:
    """Turn the knobs; yields the waterfall with every further one, the last time with its floor. Asked to stop, it ends early.

    deployed: the plan that the times begin from, see `engine.compare.baseline`
    found: plans that are there already, which the steps begin from where they keep to the knobs so far

    Raises InputError for two models, and if the deployed plan does not fit.
    """
    if problem.goal is Goal.TWO_MODELS:
        raise InputError("the knobs are turned for one model; close the second one")
    if problem.goal is Goal.TRAINING:
        yield from _of_step(problem, deployed, found, stop)
        return
    ways = [problem.travel, *knobs.travels]
    compile_ahead(by_rank=any(way is not None and way.replicas not in (None, "fewest") for way in ways))
    work = _Work(problem, deployed, found, knobs, stop)
    now = base = work.judged(_draft(deployed))
    answer = Waterfall(deployed=base.timeline.total)
    turns = [_travel] * bool(knobs.travels) + [_placement, _uneven, _copies, _execution, _order]
    for number, turn in enumerate(turns):
        report(0.9 * number / len(turns), f"turning knob {number + 1} of {len(turns)}", now.timeline.total, None)
        try:
            knob, alone, after = turn(work, base, now)
        except StoppedError:
            return
        if stop():
            return
        now = min((now, *after), key=lambda each: each.timeline.total)
        least = min((answer.deployed, *(each.timeline.total for each in alone))) if alone else None
        row = Turn(knob=knob(now), alone=least, after=now.timeline.total)
        answer = answer.model_copy(update={"rows": (*answer.rows, row)})
        if turn is not turns[-1]:
            yield answer
    report(0.9, "bounding", now.timeline.total, None)
    yield answer.model_copy(update={"floor": work.floor(now)})


def _of_step(problem: Problem, deployed: Plan, found: Sequence[Plan], stop: Stop) -> Iterator[Waterfall]:
    """See `waterfall`."""
    if found and not stop():
        fastest = min(found, key=lambda plan: step_seconds(plan, problem))
        before, savings = step.waterfall(problem, fastest, deployed, stop)
        rows = tuple(Turn(knob=each.knob.capitalize(), alone=each.alone, after=each.after) for each in savings)
        if not stop():
            answer = Waterfall(deployed=before, rows=rows)
            yield answer.model_copy(update={"floor": min(step.least_of(problem), answer.total)})


Turned = tuple[Callable[[Candidate], str], list[Candidate], list[Candidate]]
"""The name of a knob, once it is known which plan is the fastest; plans with it alone turned; and those with it turned last."""

Rows = list[list[list[int]]]
"""[layer][gpu], the experts there."""


def _draft(plan: Plan) -> Draft:
    return Draft(plan.placement, plan.send_order, execution=plan.execution)


class _Work:
    """The problem, and how far knobs have been turned.

    problem: with the travel that was chosen; usual: with the deployed one
    room: int64[gpu] slots of a layer; slots: of a layer in all
    single: the plan before there were further copies
    """

    def __init__(self, problem: Problem, deployed: Plan, found: Sequence[Plan], knobs: Knobs, stop: Stop) -> None:
        self.problem = self.usual = problem
        self.knobs, self.stop, self.found = knobs, stop, [_draft(plan) for plan in found]
        self.mode = deployed.send_order.mode if deployed.send_order.mode in ORDERS else "concurrent"
        held, experts = deployed.placement.slots, problem.workload.num_experts
        self.fits = np.minimum(problem.expert_slots_of_gpu(), experts)
        if problem.judged_by is not None:  # beside the other weights, keys and values of the step
            free = problem.cluster.values("memory") * MEMORY_SHARE - problem.judged_by.bytes_beside(problem)
            free = np.clip(free // (problem.model.bytes_per_expert * problem.workload.layers), held.max(axis=0), experts)
            self.fits = np.minimum(self.fits, free.astype(np.int64))
        even = np.minimum(-(-experts // len(self.fits)), self.fits)
        self.room, self.slots = np.maximum(held.max(axis=0), even), int(held.sum(axis=1).max())

    def go_on(self) -> None:
        """Raises StoppedError once asked to stop."""
        if self.stop():
            raise StoppedError("stopped before the knob was turned")

    def judged(self, draft: Draft, problem: Problem | None = None) -> Candidate:
        """A draft as it is simulated."""
        problem = problem or self.usual
        plan = draft.plan("trial", Provenance(optimiser=""), problem.travel)
        loads = draft.loads or loads_of(plan, problem)
        return Candidate("", draft, simulate(plan, problem, self.stop, loads=loads), loads)

    def placed(self, placement: Placement, problem: Problem, mode: str | None = None) -> Candidate:
        """A placement with sends in the order of a mode, by default the deployed plan's."""
        ordered = best_order(placement, problem, mode or self.mode, self.stop, silent)
        return Candidate("", ordered.draft({}, False), ordered.timeline, ordered.loads)

    def all_placed(self, placements: Iterable[Placement], problem: Problem) -> list[Candidate]:
        """Those of the placements that fit the memory: of layers with unequal slots each may, and all of them not."""
        placed = []
        for placement in placements:
            self.go_on()
            with suppress(InputError):
                placed.append(self.placed(placement, problem))
        return placed

    def within(self, placement: Placement, room: Ints, slots: int) -> bool:
        """True if every layer keeps to the room of every GPU and to so many slots in all."""
        return bool(np.all(placement.slots <= room) and np.all(placement.slots.sum(axis=1) <= slots))

    def searched(self, problem: Problem, starts: Sequence[Draft], room: Ints, slots: int) -> list[Candidate]:
        """Plans within these slots: the starts, the found ones, the best layers of each, and what a search makes of those."""
        placements = dict.fromkeys(
            draft.placement
            for draft in (*starts, *self.found)
            if draft.execution == "vanilla" and self.within(draft.placement, room, slots)
        )
        candidates = self.all_placed(placements, problem)
        layers = LayersOf(problem, problem.network, 1.0, room, slots)
        if not candidates or layers.unknown is not None:
            return candidates
        fastest = np.array([each.layers for each in candidates]).argmin(axis=0)
        rows = [candidates[number].draft.placement.experts_of_gpu[layer] for layer, number in enumerate(fastest)]
        begun, tasks = placement_of(rows, problem), []
        for layer in range(len(rows)):
            self.go_on()
            tasks.append(layers.task(layer, begun))
        guard = Guard(self.stop, self.knobs.time_limit * GUARD)
        search(tasks, self.knobs.time_limit, self.knobs.seed, guard, unwatched)
        more = [placement_of(held, problem) for held in (rows, [task.held for task in tasks])]
        return candidates + self.all_placed([placement for placement in more if placement not in placements], problem)

    def replicated(self, problem: Problem, spare: int) -> list[Draft]:
        """DeepSeek's replicas in so many spare slots per GPU, the same on all."""
        try:
            return [eplb(problem, ReplicationOptions(redundant=spare, algorithm="eplb", order=self.mode), self.stop, silent)]
        except InputError:  # slots that are the same on all GPUs do not fit
            return []

    @cached_property
    def pace(self) -> np.ndarray:
        """float64[gpu]: seconds that a token more keeps a GPU busy, in its FFNs and at its port."""
        model, cost, network = self.usual.model, self.usual.cost, self.usual.network
        mean = np.array([max(float(self.usual.workload.load.mean()), 1.0)])
        ffn = [float(cost.expert_ffn(gpu, mean, model)[0] / mean[0]) for gpu in self.usual.cluster.gpus]
        there, back = (self.usual.travel or Travel()).row_bytes(model)
        return np.array(ffn) + there / network.receive + back / network.send

    def floor(self, now: Candidate) -> float | None:
        """See `Waterfall`."""
        if now.draft.execution != "vanilla" or now.draft.send_order.mode == "two-tier":
            return None
        problems = [replace(self.usual, travel=travel) for travel in self.knobs.travels] or [self.usual]
        bounds = [bound_of(problem, self.room, self.slots, self.stop) for problem in problems]
        return None if None in bounds else min(*bounds, now.timeline.total)


def _travel(work: _Work, base: Candidate, now: Candidate) -> Turned:
    """The deployed placement with tokens that travel otherwise."""
    ways = [replace(work.usual, travel=travel) for travel in work.knobs.travels]
    if base.draft.execution != "vanilla":
        return lambda _: "Travel", [], []
    tried = [(work.placed(base.draft.placement, problem), problem) for problem in ways]
    fastest, problem = min(tried, key=lambda pair: pair[0].timeline.total)
    if fastest.timeline.total < now.timeline.total:
        work.problem = problem
    travel = work.problem.travel or Travel()
    return lambda _: f"Travel, {travel.in_words}", [fastest], [fastest]


def _placement(work: _Work, base: Candidate, now: Candidate) -> Turned:
    """Experts in other slots, as many on every GPU as deployed."""
    spare = max(0, int(work.room.min()) + -work.usual.workload.num_experts // len(work.room))
    plans = []
    for problem in dict.fromkeys((work.usual, work.problem)):
        starts = [base.draft, *work.replicated(problem, spare)]
        plans.append(work.searched(problem, starts, work.room, work.slots))
    return lambda _: "Placement", plans[0], plans[-1]


def _uneven(work: _Work, base: Candidate, now: Candidate) -> Turned:
    """As many slots in all, divided among GPUs as memory allows. Alone: the experts in the order in which they are deployed."""
    cut = base.draft.placement.single and work.fits.sum() >= work.usual.workload.num_experts
    alone = [placement_of(_cut_anew(work, base.draft.placement), work.usual)] if cut else []
    work.room = work.fits
    after = work.searched(work.problem, [now.draft], work.room, work.slots)
    return lambda _: "Uneven experts", work.all_placed(alone, work.usual), after


def _copies(work: _Work, base: Candidate, now: Candidate) -> Turned:
    """Spare slots. Alone: every expert stays, and copies of the busiest come to the GPUs with the least to do."""
    gpus, work.single = len(work.fits), now.draft
    # Slots that are left over where GPUs do not divide the experts count as spare, as in `best`.
    experts, in_all = work.usual.workload.num_experts, work.knobs.in_all
    wanted = max(work.slots, -(-experts // gpus) * gpus) + work.knobs.spare * gpus
    if in_all is not None:
        wanted = max(work.slots, experts + in_all)
    more = min(wanted, int(work.fits.sum())) - work.slots
    if more < 1:
        return lambda _: "Copies, no room", [], []
    spare = min(work.knobs.spare, more // gpus)
    alone = work.all_placed([placement_of(_copied(work, base.draft.placement, spare), work.usual)] * (spare > 0), work.usual)
    work.slots += more
    starts = [now.draft, *work.replicated(work.problem, spare)]
    after = work.searched(work.problem, starts, work.room, work.slots)
    said = f"{more} slot{'s' * (more > 1)} in all"
    if spare == work.knobs.spare and in_all is None:
        said = f"{spare} spare slot{'s' * (spare > 1)}"
    return lambda _: f"Copies, {said}", alone, after


def _execution(work: _Work, base: Candidate, now: Candidate) -> Turned:
    """Tokens that stay where their expert was, or no longer do. With one expert per token ExFlow's plan is tried as well."""

    def other(draft: Draft, problem: Problem) -> list[Candidate]:
        execution = "vanilla" if draft.execution == "context-coherent" else "context-coherent"
        if not draft.placement.single:
            return []
        try:
            return [work.judged(Draft(draft.placement, SendOrder(mode="concurrent"), execution=execution), problem)]
        except InputError:  # no tokens to follow, or no memory for all contexts
            return []

    after, way = other(work.single, work.problem), attrgetter("draft.execution")
    if after and work.usual.workload.k == 1:
        options = patient(ExFlowOptions)(time_limit=max(work.knobs.time_limit, 0.1), seed=work.knobs.seed)
        with suppress(InputError):
            after.append(work.judged(exflow(work.problem, options, work.stop, silent), work.problem))
    for draft in work.found:
        if draft.execution == "context-coherent" and work.within(draft.placement, work.room, work.slots):
            after.append(work.judged(draft, work.problem))
    return lambda fastest: "Execution" + f", {way(fastest)}" * (way(fastest) != way(base)), other(base.draft, work.usual), after


def _order(work: _Work, base: Candidate, now: Candidate) -> Turned:
    """The best send order."""
    alone, after = (
        [work.placed(each.draft.placement, problem, "best")] if each.draft.execution == "vanilla" else []
        for each, problem in ((base, work.usual), (now, work.problem))
    )
    for draft in work.found:
        if draft.execution == "vanilla" and work.within(draft.placement, work.room, work.slots):
            after.append(work.judged(draft, work.problem))
    mode = attrgetter("draft.send_order.mode")
    return lambda fastest: "Send order" + f", {mode(fastest)}" * (mode(fastest) != mode(base)), alone, after


def _cut_anew(work: _Work, placement: Placement) -> Rows:
    """The experts of every layer in the order of their GPUs, cut so that the busiest GPU has the least to do."""
    rows, fits, pace = [], work.fits, work.pace
    for layer, load in enumerate(work.usual.workload.load):
        order = [expert for held in placement.experts_of_gpu[layer] for expert in held]
        done = np.concatenate([[0.0], np.cumsum(load[order])])

        def ends(limit: float, done: np.ndarray = done) -> list[int]:
            """Ends of every GPU's experts if none takes longer than so many seconds."""
            end, all_ends = 0, []
            for room, of_gpu in zip(fits.tolist(), pace.tolist(), strict=True):
                last = int(np.searchsorted(done, (done[end] + limit / of_gpu) * (1 + 1e-12), side="right")) - 1
                end = min(max(last, end), end + room, len(done) - 1)
                all_ends.append(end)
            return all_ends

        low, high = 0.0, float(done[-1] * pace.max()) or 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if ends(middle)[-1] == len(order) else (middle, high)
        rows.append([order[begin:end] for begin, end in pairwise([0, *ends(high)])])
    return rows


def _copied(work: _Work, placement: Placement, spare: int) -> Rows:
    """The placement with copies in so many more slots per GPU, each of the expert with the most tokens a copy, on the GPU with
    the least to do."""
    rows, pace = [], work.pace
    for layer, load in enumerate(work.usual.workload.load):
        held = placement.share[layer] > 0  # bool[expert, gpu]
        free = np.full(len(pace), spare)
        while free.any():
            share = held / held.sum(axis=1, keepdims=True)
            busy = np.where(free > 0, (load @ share) * pace, np.inf)
            possible = ~held[:, free > 0].all(axis=1)
            if not possible.any():
                break
            expert = int(np.where(possible, load / held.sum(axis=1), -1.0).argmax())
            gpu = int(np.where(held[expert], np.inf, busy).argmin())
            held[expert, gpu] = True
            free[gpu] -= 1
        rows.append([np.flatnonzero(here).tolist() for here in held.T])
    return rows
