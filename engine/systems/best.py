"""All knobs of a placement in one search: the experts of every GPU, how many, and copies in spare slots, for the least time of
a pass as it is simulated.

The other systems know ports, speeds or rows, none of them all at once. Their plans are where the search begins, layer by layer,
and candidates to the end: the same simulation judges all, so that this plan is never slower, on the recording that it is made
from, than those that they made here. Nor should it be on traffic to come: what the search gains must be seen on parts of the
recording that it was not shown, or the best of the other plans is the answer.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from engine.errors import InputError, StoppedError
from engine.network import Network
from engine.placement import best as placement_search
from engine.placement import group_loads
from engine.placement.affinity import kernel as affinity
from engine.placement.best import Task, search
from engine.placement.coactivation import kernel as rows
from engine.placement.replication import by_rank
from engine.plan import Placement
from engine.problem import MEMORY_SHARE, Problem
from engine.result import Advance, Guard, Ints, Provenance, Stop, never, relative_gap, unwatched
from engine.simulate import bound_of_plan, compile_ahead, loads_of, simulate
from engine.simulate.work import Load
from engine.systems import aurora, baselines, coactivation, eplb, exflow, joint
from engine.systems.base import Draft, Note, Notes, Report, System, silent
from engine.systems.best_layers import LayersOf, bound_of
from engine.systems.eplb import slots_per_gpu, slots_within
from engine.systems.options import Options, Order, Redundant, Seed, Slots, Spare, TimeLimit, Value, patient
from engine.systems.pieces import best_order, placement_of
from engine.timeline import Timeline
from engine.units import at_most, seconds, size
from engine.workload import ExpertLoad, RoutingTrace, Workload

FOLDS = 4
"""Parts of a recording, each of which is hidden from a search in turn: every so many-th sequence."""
BLOCKS = 64
"""Stretches of neighbouring tokens that stand for sequences where fewer than the folds are recorded."""
TRIED_LAYERS = 16
"""Layers that are searched without a fold, spread over all."""
OTHERS, FIRST, TRIALS = 0.35, 0.15, 0.15
"""Parts of the time limit for the other systems' searches, after which the best ones plan once more; for a first search,
with those without a fold; and for those without a fold again. The rest is for the search itself."""
NEAR, ALONE = 1.02, 2
"""Systems whose plans are so near the fastest one plan once more, each in so many times the time limit: by default as much as
they have alone."""
NOISE, DOUBT = 0.01, 0.05
"""A plan is preferred to that of the leading system, in the time it has alone, where it is faster by more than this share: less
gets lost on other traffic; the second, of a search that gained on unseen parts no more than their standard error."""
QUICK = ("linear", "round-robin")
Score = Callable[["Candidate"], float]
"""Systems that plan in a moment: the first search begins at their plans."""
MIXED = "the best layers of the other systems"
NO_PARTS = "one system's plan, as the recording has no parts to try a search on; record several sequences or steps"
NO_TIME = "one system's plan, as the time was over before a search had been tried on parts of the recording; give it more"
FIRST_ALONE = "a first search gained on parts of the recording that it had not seen; the time was over before a further one"
LOSES_MORE = "one system's plan, as a search's loses more on parts of the recording that it had not seen"
NO_GAIN = "one system's plan, as a search gained nothing on parts of the recording that it had not seen"
TOO_LITTLE = f"one system's plan: another is faster by no more than other traffic can undo ({NOISE:.0%}, {DOUBT:.0%} in doubt)"


class BestOptions(Options):
    redundant: Redundant = Field(0, description="spare slots of a layer, on every GPU or in all, for copies of experts")
    spare: Spare = "per GPU"
    slots: Slots = "even"
    order: Order = "best"
    time_limit: TimeLimit = Field(5.0, description="seconds of work for the other systems' searches and this one")
    seed: Seed = 0
    travel: Literal["as deployed", "free"] = Field(
        "as deployed",
        title="Ways of travelling",
        description="as deployed; or free: a plan for every way of travelling, of which the fastest is the answer",
    )


@dataclass(frozen=True)
class Candidate:
    """A plan with its timeline and the loads of its placement.

    step: seconds of the whole step that it is judged by, if any
    again: makes one like it for another problem; None: it is another plan with another send order, or a search made it
    longer: makes one in as much time as the system has alone; None: this is it
    """

    title: str
    draft: Draft
    timeline: Timeline
    loads: tuple[Load, ...]
    step: float | None = None
    again: Callable[[Problem, Stop], Draft] | None = None
    longer: Callable[[Problem, Stop], Draft] | None = None

    @property
    def seconds(self) -> float:
        """By which plans compare."""
        return self.timeline.total if self.step is None else self.step

    @cached_property
    def layers(self) -> np.ndarray:
        """float64[layer]: seconds of each."""
        ends = np.zeros(self.draft.placement.layers)
        np.maximum.at(ends, self.timeline.events["layer"].to_numpy(), self.timeline.events["end"].to_numpy())
        return np.diff(np.maximum.accumulate(ends), prepend=0.0)


def best(problem: Problem, options: BestOptions, stop: Stop, report: Report) -> Draft:
    """The fastest of the other systems' plans, of the best layers of each, and of what a search makes of those."""
    room, slots = room_of(problem, options)
    layers = LayersOf(*_together(problem), room, slots)
    report(0.0, "loading the searches, which are compiled once", None, None)
    compile_all(layers.by_rank)
    searches = not layers.unknown and next(_folds(layers.problem.workload), None) is not None

    def fits(each: Candidate) -> bool:
        return each.draft.execution == "vanilla" and fits_room(each.draft.placement, room, slots)

    def first(quick: list[Candidate]) -> list[Candidate]:
        """A plan from the fastest of the quick ones, if such plans gain on parts of the recording that were not seen."""
        starts = [each for each in quick if fits(each)]
        if not starts:
            return []
        rival, part = min(starts, key=lambda each: each.seconds), options.time_limit * FIRST / 2
        if not _tried(layers, rival, options.seed, part, stop).gains:
            return []
        tasks = [layers.task(layer, rival.draft.placement) for layer in range(problem.workload.layers)]
        search(tasks, part, options.seed, stop, unwatched)
        placement = placement_of([task.held for task in tasks], problem)
        return _ordered("a first search", placement, _mode(options), problem, stop)

    candidates, early, proven = _singles(problem, options, first if searches else None, stop, report)
    guard = options.guard(stop)
    usable = [each for each in candidates if fits(each)]
    if options.order == "best":
        candidates += _in_every_order(candidates, problem, stop)
    if any(each.step is not None for each in candidates):  # others cannot be served
        candidates = [each for each in candidates if each.step is not None]
    score = _score_on(problem, candidates)
    single = _preferred(min(candidates, key=score), [each for each in candidates if each.longer is None], score)
    found, slower, margin = [], 1.0, NOISE
    notes: Notes = {"best of the other systems": Note(f"{single.title}, {seconds(single.seconds)}")}
    if problem.judged_by is not None:
        alone = "the MoE layers alone, since none of the plans can be served"
        notes["compared by"] = Note(alone if single.step is None else "the whole step of serving")
    searching = "searching", min(each.seconds for each in (single, *early)), None
    if layers.unknown:
        notes["search"] = Note(f"none, since {layers.unknown}")
    elif usable and not stop():
        rival = single if any(each.draft is single.draft for each in usable) else min(usable, key=score)
        report(0.5, "trying a search on parts of the recording", single.seconds, None)
        trial = _tried(layers, rival, options.seed, options.time_limit * TRIALS, guard)
        if trial.gains and rival is not single and single.again is not None:
            slower = max(trial.slower / _slower(problem, single, guard), 1.0)
        if trial.gains:
            margin = NOISE if trial.certain else DOUBT
            placements = _placements(layers, [*usable, *early], options, guard, lambda done: report(done, *searching))
            found = [*early]
            for title, each in placements.items():
                found += _ordered(title, each, _mode(options), problem, stop)
            if layers.by_rank:  # the draws of ranks, which the search does not know, may be good for some layers alone
                every = usable + found
                title = "the best layers of the search and the other systems"
                found += _ordered(title, _best_layers(every, problem), _mode(options), problem, stop)
        elif guard() and early:
            found, notes["held out"] = [*early], Note(FIRST_ALONE)
        else:
            notes["held out"] = Note(NO_PARTS if trial.gains is None else NO_TIME if guard() else NO_GAIN)
    elif early:
        found, notes["held out"] = [*early], Note(FIRST_ALONE)
    if found and options.order == "best":
        found += _in_every_order(found, problem, stop)
    if single.step is not None:
        found = [each for each in found if each.step is not None]
    fastest = min([single, *found], key=score)
    winner = _preferred(fastest, [single], lambda each: score(each) * (1.0 if each is single else slower), margin)
    if winner is single and (other := min(map(score, found), default=np.inf)) < score(single):
        notes["held out"] = Note(LOSES_MORE if other < (1 - margin) * score(single) else TOO_LITTLE)
    total, draft = winner.timeline.total, winner.draft
    notes["found by"] = Note(winner.title)
    notes["against the best of the other systems"] = Note(single.seconds / winner.seconds if winner.seconds else 1.0, "×")
    report(0.9, "bounding", total, None)
    least, copies = None, slots != problem.workload.num_experts
    plain = draft.execution == "vanilla" and draft.send_order.mode != "two-tier" and fits_room(draft.placement, room, slots)
    if plain and (least := bound_of(problem, room, slots, stop, options.time_limit)):
        least = least if problem.travel is not None or copies else max(least, proven)
        within = "with copies in so many slots" if copies else "of one copy of every expert"
        text = f"{at_most(relative_gap(total, least))}: no placement {within} is below {seconds(least)} by plain sends"
        notes["left"] = Note(f"{text} (proven)")
    notes |= {about: note for about, note in draft.notes.items() if about.endswith(" order")}
    known = {"notes": notes, "timeline": winner.timeline, "loads": winner.loads, "name": None, "judged_seconds": winner.seconds}
    ends = {"cancelled": stop(), "limited": guard.cut or any(each.draft.limited for each in candidates)}
    return replace(draft, bound=least if problem.network.direct else None, **known, **ends)


@cache
def compile_all(ranks_choose: bool) -> None:
    """Compile this search, and those of the other systems, before a clock starts. ranks_choose: copies too"""
    placement_search.compile_ahead(ranks_choose)
    for each in (compile_ahead, group_loads, rows, affinity, *((by_rank,) if ranks_choose else ())):
        each.compile_ahead()


def _preferred(fastest: Candidate, usual: list[Candidate], score: Score, margin: float = NOISE) -> Candidate:
    """The best of the usual plans, unless the fastest is better by more than a margin."""
    known = min(usual, key=score, default=fastest)
    return fastest if score(fastest) < score(known) * (1 - margin) else known


def _singles(
    problem: Problem,
    options: BestOptions,
    first: Callable[[list[Candidate]], list[Candidate]] | None,
    stop: Stop,
    report: Report,
) -> tuple[list[Candidate], list[Candidate], float]:
    """The plans of the other systems, that of a first search if any, and the bound that they prove for one copy of every
    expert, by one row per token copy.

    first: makes a plan of the quick ones' plans; None: no search follows, for which they leave time
    """
    candidates: list[Candidate] = []
    early: list[Candidate] = []
    proven, others = 0.0, list(_others(problem, options))
    searchless = sum(system.name in QUICK for system, _ in others)
    for part, (system, settings) in enumerate(others):
        if candidates and stop():
            break
        fastest = min((each.seconds for each in (*candidates, *early)), default=None)
        if part == searchless and first is not None:
            report(0.5 * part / len(others), "trying a first search", fastest, None)
            early += first(candidates)
            fastest = min((each.seconds for each in (*candidates, *early)), default=None)
        report(0.5 * part / len(others), f"planning with {system.title}", fastest, None)
        with contextlib.suppress(InputError, StoppedError):  # cannot plan this, or not any more
            limit = options.time_limit * (OTHERS / len(others) if first is not None else 1.0)
            quick, usual = (_limited(system, settings, most) for most in (limit, ALONE * options.time_limit))
            again, longer = (partial(_again, system, each) for each in (quick, usual))
            tell = partial(within, report, part, len(others), 0.5, f"planning with {system.title}", fastest)
            found = judged(system.title, system.recipe(problem, quick, stop, tell), problem, stop)
            candidates.append(replace(found, again=again, longer=None if quick == usual else longer))
            if found.draft.bound is not None and settings.get("slots") == options.slots:
                proven = max(proven, found.draft.bound)
    if not candidates:
        raise InputError("no system can plan this; run one of them to see why")
    near = NEAR * min(each.seconds for each in candidates)
    for leader in sorted((each for each in candidates if each.seconds <= near), key=lambda each: each.seconds):
        if leader.longer is not None and not stop():
            report(0.5, f"planning with {leader.title} for longer", min(each.seconds for each in candidates), None)
            with contextlib.suppress(StoppedError):
                found = judged(leader.title, leader.longer(problem, stop), problem, stop)
                candidates.append(replace(found, again=leader.again))
    return candidates, early, proven


def within(
    report: Report, piece: int, of: int, share: float, what: str, fastest: float | None, done: float, message: str, *_: Any
) -> None:
    """Report a share of one of the equal pieces that make up a share of the work; a piece ends where the next begins."""
    report(share * (piece + done) / of, f"{what}: {message}", fastest, None)


def _again(system: System, settings: Options, problem: Problem, stop: Stop) -> Draft:
    """The plan of a system, unwatched."""
    return system.recipe(problem, settings, stop, silent)


def _limited(system: System, settings: dict[str, Value], most: float) -> Options:
    """Settings whose usual time limit is at most so many seconds: it limits work, and the clock only in emergencies, so that a
    busy machine leaves no system out."""
    options = patient(system.options).from_values(settings)
    if "time_limit" not in type(options).model_fields:
        return options
    return options.model_copy(update={"time_limit": min(most, options.time_limit)})


def _score_on(problem: Problem, candidates: list[Candidate]) -> Score:
    """The seconds of a candidate; with other recordings to serve, its seconds over the least of these candidates, on the
    recording where that is most."""
    if not problem.others:
        return lambda each: each.seconds
    served = [problem.with_workload(other) for other in problem.others]

    def on_all(each: Candidate) -> np.ndarray:
        plan = each.draft.plan("trial", Provenance(optimiser=""), problem.travel)
        of_step = None if each.step is None else problem.judged_by.seconds
        rest = (simulate(plan, of).total if of_step is None else of_step(plan, of, never) for of in served)
        return np.array([each.seconds, *rest])

    least = np.min([on_all(each) for each in candidates], axis=0)
    return lambda each: float((on_all(each) / np.maximum(least, 1e-30)).max())


def _together(problem: Problem) -> tuple[Problem, Network, float]:
    """The problem with all recordings to serve as one, its network, and the part of a token that each token then counts for;
    the problem itself where they are not alike."""
    recordings = (problem.workload, *problem.others)
    if not problem.others or not all(isinstance(each, RoutingTrace) for each in recordings):
        return problem, problem.network, 1.0
    units = [_units(each) for each in recordings]
    first = np.cumsum([0, *(unit.max(initial=-1) + 1 for unit in units)])
    whole = replace(
        problem.workload,
        experts=np.concatenate([each.experts for each in recordings]),
        sequence=np.concatenate([unit + begin for unit, begin in zip(units, first, strict=False)]).astype(np.int32),
        source_rank=np.concatenate([each.rank_of_token(len(problem.cluster.gpus)) for each in recordings]).astype(np.int32),
        phase=None,
    )
    return replace(problem, workload=whole), problem.network, problem.workload.tokens / max(whole.tokens, 1)


def _units(trace: RoutingTrace) -> np.ndarray:
    """int64[token]: the sequence, or a stretch of neighbouring tokens where too few are recorded."""
    if trace.sequence is not None:
        unit = np.unique(trace.sequence, return_inverse=True)[1].ravel()
        if unit.max(initial=0) >= FOLDS - 1:
            return unit
    return np.arange(trace.tokens) * BLOCKS // max(trace.tokens, 1)


def _folds(workload: Workload) -> Iterator[tuple[Workload, Workload]]:
    """The recording without each of its folds, and that fold; none of loads without several steps and of traffic."""
    if isinstance(workload, RoutingTrace):
        fold = _units(workload) % FOLDS
        parts = [(workload.part(fold != hidden), workload.part(fold == hidden)) for hidden in range(FOLDS)]
    elif isinstance(workload, ExpertLoad) and workload.by_step is not None:
        steps, fold = workload.by_step, np.arange(len(workload.by_step)) % FOLDS
        of_steps = [(steps[fold != hidden], steps[fold == hidden]) for hidden in range(FOLDS)]
        loads = [[part.sum(axis=0) for part in both] for both in of_steps]
        parts = [[replace(workload, load=load, by_step=None, by_source=None) for load in both] for both in loads]
    else:
        parts = []
    return ((seen, unseen) for seen, unseen in parts if seen.load.any() and unseen.load.any())


class Trial(NamedTuple):
    """A search on parts of a recording.

    gains: True if its plans are faster on the hidden folds than its rival's, on average; None: the recording has none
    certain: True if by more than the standard error of the folds
    slower: seconds of its plans there over those on the folds that they were made from
    """

    gains: bool | None
    slower: float = 1.0
    certain: bool = False


def _tried(layers: LayersOf, rival: Candidate, seed: int, work: float, over: Stop) -> Trial:
    """A trial of the plans that a search makes of a rival's, both without a fold. work: seconds of the searches"""
    problem = layers.problem
    folds, gains, slower = list(_folds(problem.workload)), [], []
    if len(folds) < 2:
        return Trial(None)
    total = problem.workload.load.sum() * layers.count
    tried = np.unique(np.linspace(0, problem.workload.layers - 1, TRIED_LAYERS).astype(int)).tolist()
    for turn, parts in enumerate(folds):
        if over():
            return Trial(False)
        seen, unseen = (layers.on(part, total / part.load.sum()) for part in parts)
        try:
            begun = rival.again(replace(seen.problem, others=()), over).placement
        except (InputError, StoppedError):  # such as GPUs without any token
            begun = rival.draft.placement
        tasks, known = [seen.task(layer, begun) for layer in tried], [unseen.layer(layer) for layer in tried]
        old = sum(Task(of, at.expert, at.place).seconds(of) for of, at in zip(known, tasks, strict=True))
        search(tasks, work / len(folds), seed + turn, over, unwatched)
        new = sum(Task(of, at.expert, at.place).seconds(of) for of, at in zip(known, tasks, strict=True))
        gains.append(old / new - 1 if new else 0.0)
        slower.append(new / (sum(task.seconds(task.layer) for task in tasks) or 1.0) if new else 1.0)
    certain = np.mean(gains) > np.std(gains, ddof=1) / len(gains) ** 0.5
    return Trial(bool(np.mean(gains) > 0) and not over(), float(np.mean(slower)), bool(certain))


def _slower(problem: Problem, single: Candidate, over: Stop) -> float:
    """`Trial.slower` of a system whose plans no search begins at, by simulation of all layers with as many tokens each."""
    ratios = [1.0]
    for parts in _folds(problem.workload):
        with contextlib.suppress(InputError, StoppedError):
            seen, unseen = (problem.with_workload(_as_long(part, problem.workload)) for part in parts)
            plan = single.again(replace(seen, others=()), over).plan("trial", Provenance(optimiser=""), problem.travel)
            ratios.append(simulate(plan, unseen, over).total / simulate(plan, seen, over).total)
    return float(np.mean(ratios[1:] or ratios))


def _as_long(part: Workload, whole: Workload) -> Workload:
    """A part of a recording with as many tokens as all of it: its own over and over, or its loads at that size."""
    if isinstance(part, RoutingTrace):
        longer = part.part(np.resize(np.arange(part.tokens), whole.tokens))
        if longer.sequence is None:
            return longer
        # Each time over they are other sequences, which start on other GPUs.
        turn = np.arange(whole.tokens) // part.tokens * (int(part.sequence.max()) + 1)
        return replace(longer, sequence=(longer.sequence + turn).astype(np.int32))
    return replace(part, load=part.load * (whole.load.sum() / part.load.sum()))


def _placements(
    layers: LayersOf, usable: list[Candidate], options: BestOptions, guard: Guard, tell: Advance
) -> dict[str, Placement]:
    """The best layers of the other systems, and what a search makes of them, by their titles."""
    mixed = _best_layers(usable, layers.problem)
    tell(0.5)
    tasks = [layers.task(layer, mixed) for layer in range(mixed.layers)]
    seconds_left = options.time_limit * (1 - OTHERS - FIRST - TRIALS)
    search(tasks, seconds_left, options.seed, guard, lambda done: tell(0.5 + 0.4 * done))
    return {MIXED: mixed, "the search": placement_of([task.held for task in tasks], layers.problem)}


def _mode(options: BestOptions) -> str:
    """The send order in which plans are first compared: of all a plain all-to-all, nearly as fast and soon simulated."""
    return "concurrent" if options.order == "best" else options.order


def _ordered(title: str, placement: Placement, mode: str, problem: Problem, stop: Stop) -> list[Candidate]:
    """A placement with the best send order of a mode; none once it was stopped."""
    with contextlib.suppress(StoppedError):
        ordered = best_order(placement, problem, mode, stop, silent)
        return [judged(title, ordered.draft({}, False), problem, stop)]
    return []


def _in_every_order(candidates: list[Candidate], problem: Problem, stop: Stop) -> list[Candidate]:
    """The candidates, the fastest first, with their best orders; without those that no order makes the fastest of them."""
    fastest, ordered = min(each.timeline.total for each in candidates), []
    for each in sorted(candidates, key=lambda each: (each.timeline.total, each.longer is not None)):  # usual ones first
        if stop():
            break
        if each.draft.execution != "vanilla":
            continue
        plan = each.draft.plan("trial", Provenance(optimiser=""), problem.travel)
        if bound_of_plan(plan, problem, loads=each.loads) < fastest * (1 - 1e-9):
            found = _ordered(each.title, each.draft.placement, "best", problem, stop)
            ordered += [replace(of_each, longer=each.longer) for of_each in found]
            fastest = min(fastest, *(each.timeline.total for each in ordered))
    return ordered


def _others(problem: Problem, options: BestOptions) -> Iterator[tuple[System, dict[str, Value]]]:
    """The systems that plan for one model, the quick ones first, with their settings: no more copies than allowed."""
    files = baselines, eplb, aurora, joint, coactivation, exflow
    systems = {system.name: system for file in files for system in file.SYSTEMS}
    for name in ("linear", "round-robin", "eplb", "aurora", "joint", "coactivation", "exflow"):
        known = systems[name].options.model_fields
        wanted = options.model_dump(exclude={"time_limit"}) | {"order": _mode(options)}
        kinds = ("even", "uneven") if "slots" in known and options.slots == "uneven" else (options.slots,)
        for kind in kinds:
            settings = wanted | {"slots": kind}
            yield systems[name], {field: value for field, value in settings.items() if field in known}


def judged(title: str, draft: Draft, problem: Problem, stop: Stop) -> Candidate:
    """The draft as it is simulated, in the whole step too if there is one and it can be served so."""
    plan, step = draft.plan(title, Provenance(optimiser=""), problem.travel), None
    loads = draft.loads or loads_of(plan, problem)
    timeline = draft.timeline or simulate(plan, problem, stop, loads=loads)
    if problem.judged_by is not None:
        with contextlib.suppress(InputError):
            step = problem.judged_by.seconds(plan, problem, stop)
    return Candidate(title, draft, timeline, loads, step)


def room_of(problem: Problem, options: BestOptions) -> tuple[Ints, int]:
    """(slots of a layer on every GPU at most, int64[gpu]; in all). Raises InputError if they do not fit the memory, spare ones
    beside the keys and values of the step that plans are judged by."""
    slots = slots_per_gpu(problem, options.redundant, options.slots, options.spare)
    room = np.minimum(problem.expert_slots_of_gpu(), problem.workload.num_experts)
    if problem.judged_by is not None:
        beside = problem.judged_by.bytes_beside(problem)
        free = problem.cluster.values("memory") * MEMORY_SHARE - beside
        left = np.maximum(free // (problem.model.bytes_per_expert * problem.workload.layers), 0).astype(np.int64)
        found, most, _ = slots_within(np.minimum(room, left), problem, options.redundant, options.slots, options.spare)
        if found is None and options.redundant:
            slots_do = "slots do" if options.redundant > 1 else "slot does"
            where = "the GPUs" if options.spare == "in all" else "every GPU"
            raise InputError(
                f"{options.redundant} spare {slots_do} not fit on {where} beside {size(float(np.max(beside)))} of other "
                f"weights, keys and values of the step; choose redundant={max(most, 0)}, or fewer sequences"
            )
        slots, room = (slots, room) if found is None else (found, np.minimum(room, left))
    return slots if options.slots == "even" else room, int(slots.sum())


def fits_room(placement: Placement, room: Ints, slots: int) -> bool:
    """True if every layer of a placement keeps to the room int64[gpu] and to so many slots in all."""
    return bool(np.all(placement.slots <= room) and np.all(placement.slots.sum(axis=1) <= slots))


def _best_layers(candidates: list[Candidate], problem: Problem) -> Placement:
    """Every layer as the candidate has it that is fastest there."""
    fastest = np.array([each.layers for each in candidates]).argmin(axis=0)
    return placement_of([candidates[at].draft.placement.experts_of_gpu[layer] for layer, at in enumerate(fastest)], problem)
