"""Jobs that plan, and the question about a problem that most jobs begin with. It is apart from `engine.jobs.kinds`, since a
worker that waits has no need of problems."""

import contextlib
import math
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import Field

from engine import store
from engine.compare.baseline import baseline_of
from engine.compare.comparison import Candidate, Comparison, PlanRow
from engine.compare.waterfall import USUAL, Knobs, Waterfall, waterfall
from engine.costs import choice as cost_choice
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs import runtimes
from engine.jobs.kinds import Answer, Ask, Document
from engine.jobs.protocol import Context
from engine.model import MoEModel
from engine.plan import Plan, Travel
from engine.problem import Problem
from engine.provenance import metrics_digests, simulation_digest
from engine.result import Status
from engine.schema import Frozen
from engine.serving.aiconfigurator import choose_operators_of
from engine.serving.sizes import TransformerSizes
from engine.serving.step import ServingStep
from engine.simulate.compile_ahead import compile_ahead
from engine.simulate.serving import Serving
from engine.sizing.bounds import Exclusion
from engine.sizing.inputs import Catalogue, Counted, Need, counted, read_target
from engine.sizing.search import Point, Sizing
from engine.store.problems import problem_from, save_inputs
from engine.systems import named_for, system_named
from engine.systems.base import Outcome, Report
from engine.systems.pieces import TIE
from engine.validate import refuse_broken


class ProblemAsk(Ask):
    """A question about a problem, as `engine.store.problems.problem_arguments` writes it.

    workload, others: digests of recordings in the data folder
    cost: None: the datasheet's
    """

    workload: str
    cluster: Document
    model: Document
    others: tuple[str, ...] = ()
    cost: Document | None = None
    second: Document | None = None
    in_use: Document | None = None
    step: Document | None = None
    graph: Document | None = None
    travel: Document | None = None
    serving_step: Document | None = None

    def problem(self) -> Problem:
        """The problem with its recordings. Raises InputError if one is lost or a part does not fit."""
        arguments = {name: getattr(self, name) for name in ProblemAsk.model_fields}
        return problem_from({name: value for name, value in arguments.items() if value is not None})


class ChosenSystem(Frozen):
    """A system to run, by name."""

    name: str
    options: Document = Field(default_factory=dict)


class ServingAsk(Frozen):
    """The step in which plans are judged; config: path of a `config.json` with the operators of a real model, or None."""

    step: ServingStep
    sizes: TransformerSizes
    config: Path | None = None

    def serving(self, problem: Problem) -> Serving:
        """The step on the problem's cluster."""
        source, _ = choose_operators_of(self.config, problem.model, self.sizes, problem.cluster, self.step)
        return Serving(self.step, source, self.sizes)


class StepAsk(ProblemAsk):
    """A question about times. serving: the whole step that is timed; None: the MoE layers, or a training step."""

    serving: ServingAsk | None = None

    def timed_step(self, problem: Problem) -> Serving | None:
        """The serving step that is timed."""
        return None if self.serving is None else self.serving.serving(problem)


class OptimiseAsk(ProblemAsk):
    """Systems to run on a problem.

    serving: the step by which `best` chooses; None: by the pass
    knobs: True to turn the knobs of one model, as far as the options of `best` say
    deployed: the plan that they are turned from; None: the usual one
    """

    systems: tuple[ChosenSystem, ...]
    serving: ServingAsk | None = None
    knobs: bool = False
    deployed: Plan | None = None


class OptimiseAnswer(Answer):
    """Candidates in the order in which their systems were asked for.

    refused: by title, why a system cannot plan for this
    waterfall: the knobs turned so far; None: they were not asked for, or none is yet
    """

    candidates: tuple[Candidate, ...] = ()
    refused: dict[str, str] = Field(default_factory=dict)
    waterfall: Waterfall | None = None


def optimise(ask: OptimiseAsk, context: Context) -> OptimiseAnswer:
    """Run systems: baselines first, since gains are counted from them, then the others, soonest done first, and `best` last.
    Before it the knobs are turned, if they are asked for, and once more if it finds a faster plan than they do.

    Raises InputError if none of them can plan for this.
    """
    problem = ask.problem()
    if ask.serving is not None:
        problem = replace(problem, judged_by=ask.serving.serving(problem))
    choices = [(system_named(choice.name, problem), choice.options) for choice in ask.systems]
    timed = [(runtimes.estimate(problem, system, options), (system, options)) for system, options in choices]
    timed.sort(key=lambda pair: (not pair[1][0].baseline, pair[1][0].name == BEST, math.inf if pair[0] is None else pair[0]))
    choices, seconds = [choice for _, choice in timed], [seconds for seconds, _ in timed]
    comparison, turned = Comparison(problem), None
    # Loading the compiled simulation takes half a second, which whoever stops a job should not wait for.
    threading.Thread(target=compile_ahead, daemon=True).start()
    report = _Rising(partial(context.report, expected=runtimes.expected(seconds)))
    best = next((options for system, options in choices if system.name == BEST), {})
    turning = ask.knobs and problem.goal is not Goal.TWO_MODELS

    def turn() -> Waterfall | None:
        """Turn the knobs with the plans so far; keeps every one."""
        found, latest = [row.plan for row in comparison.candidates], None
        with contextlib.suppress(InputError):  # what is deployed does not fit, or an option cannot be, as the table says
            deployed = baseline_of(problem, ask.deployed)
            knobs = USUAL if problem.goal is Goal.TRAINING else Knobs.of(system_named(BEST, problem).settings(best), problem)
            for latest in waterfall(problem, deployed, found, knobs, context.stop, report.standing):
                context.keep(_as_asked(comparison, ask, latest))
        return latest

    for system, _ in choices[:1]:
        report(0.0, f"{system.title}: started")
    known = seconds if None not in seconds else None
    for outcome in comparison.run(choices, context.stop, report, known):
        context.keep(_as_asked(comparison, ask, turned))
        if not context.stop():  # a timeline of a hurried end is simulated again
            with contextlib.suppress(InputError):  # a full disk: pages simulate it again
                _keep(outcome, comparison)
        others_are_there = len(comparison.candidates) + len(comparison.refused) >= sum(each.name != BEST for each, _ in choices)
        gains = not turned or outcome.result.objective < turned.total * (1 - TIE)
        if turning and others_are_there and gains and not context.stop():
            turned = turn() or turned
    if comparison.refused and not comparison.candidates:
        raise InputError(next(iter(comparison.refused.values())))
    return _as_asked(comparison, ask, turned)


BEST = "best"
"""Name of the system that is run last, and with which the knobs are turned."""


class _Rising:
    """Reports of a job whose share done never falls."""

    def __init__(self, report: Report) -> None:
        self.report, self.done = report, 0.0

    def __call__(self, done: float, *told: object) -> None:
        self.done = max(self.done, done)
        self.report(self.done, *told)

    def standing(self, done: float, message: str, *told: object) -> None:
        """A report of work that is no part of the whole, and of no plan of the job."""
        self.report(self.done, message)


def _as_asked(comparison: Comparison, ask: OptimiseAsk, turned: Waterfall | None) -> OptimiseAnswer:
    """The candidates so far, in the order in which systems were asked for, and the knobs."""
    places = {choice.name: place for place, choice in enumerate(ask.systems)}
    rows = sorted(comparison.candidates, key=lambda row: places[row.plan.provenance.optimiser])
    return OptimiseAnswer(candidates=tuple(rows), refused=dict(comparison.refused), waterfall=turned)


def _keep(outcome: Outcome, comparison: Comparison) -> None:
    """Keep the simulation of the newest plan, so that no page does it again, and the time that its system took."""
    plan, problem = outcome.result.solution, comparison.problem
    system = named_for(problem)[plan.provenance.optimiser]
    runtimes.note(runtimes.run_of(problem, system, plan.provenance.options, outcome.result.runtime))
    store.save_figures(comparison.candidates[-1].metrics, *metrics_digests(plan, problem))
    if store.is_worth_keeping(outcome.timeline):
        store.save_timeline(simulation_digest(plan, problem), outcome.timeline)


class SizeAsk(Ask):
    """A target and node types with prices.

    recordings: digests; the slowest counts
    target: in words, see `read_target`; front: as of `Sizing.answer`
    cost, travel: None: the datasheet, copies
    step: with the sequences of all GPUs together; None: the usual one if the target needs a step
    config: path of the model's `config.json`; None: its sizes beside the experts are not known
    """

    recordings: tuple[str, ...]
    model: MoEModel
    catalogue: Catalogue
    target: str
    front: int | None = None
    cost: Document | None = None
    travel: Travel | None = None
    step: ServingStep | None = None
    config: Path | None = None

    def counted(self) -> Counted:
        """The step or pass that the target is about. Raises InputError as `counted`, and for words that are no target."""

        def config() -> Path:
            if self.config is None:
                raise InputError(
                    f"the sizes of {self.model.name} beside its experts are not known; open it by its Hugging Face config.json"
                )
            return self.config

        return counted(read_target(self.target), self.model, self.step, config)


class SizedPoint(Frozen):
    """A cluster of the answer, by its nodes. plan_id: None of one that does not meet the target; the rest as in `Point`."""

    nodes: dict[str, int]
    price: float
    objective: float | None
    bound: float
    plan_id: str | None = None


class SizedRow(PlanRow):
    """The plan of a cluster that meets the target."""

    point: SizedPoint


class Excluded(Frozen):
    """A cluster that, with all smaller ones, takes at least `seconds`; None: its memory is too small.

    rung: as in `Exclusion`; recording: name of the one that takes so long
    """

    nodes: dict[str, int]
    seconds: float | None
    rung: str
    recording: str


class SizeAnswer(Answer):
    """The clusters so far: those that met a target, and the undecided ones, each by price.

    unit, cost_source: of their times, in words
    notes: on the source of times
    excluded: the largest ones, which stand for all smaller ones
    """

    candidates: tuple[SizedRow, ...] = ()
    undecided: tuple[SizedPoint, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    unit: str
    cost_source: str
    notes: tuple[str, ...] = ()


def size(ask: SizeAsk, context: Context) -> SizeAnswer:
    """Find the cheapest clusters, with their plans, that meet a target. Raises InputError as `counted` and `Need`."""
    context.report(0.0, "bounding clusters")
    begin, target, of, catalogue = time.monotonic(), read_target(ask.target), ask.counted(), ask.catalogue
    cost = cost_choice.from_dict(ask.cost or {"source": "datasheet"})
    recordings = of.recordings([store.load_workload(digest) for digest in ask.recordings], ask.model)
    sizing = Sizing(Need(recordings, ask.model, catalogue, cost, ask.travel, of.served), context.stop, _Rising(context.report))
    answer = SizeAnswer(unit=of.unit, cost_source=cost.source)

    def point_of(point: Point, plan_id: str | None = None) -> SizedPoint:
        return SizedPoint(
            nodes=catalogue.counts(point.vector),
            price=point.price,
            objective=point.objective,
            bound=point.bound,
            plan_id=plan_id,
        )

    def row_of(point: Point) -> SizedRow:
        refuse_broken(point.plan, point.problem)
        save_inputs(point.problem)
        plan = point.plan.model_copy(update={"name": f"Sized: {catalogue.in_words(point.vector)}"[:120]})
        status = Status.FEASIBLE.value
        return SizedRow(plan=plan, status=status, runtime=time.monotonic() - begin, notes={}, point=point_of(point, plan.id))

    def excluded(each: Exclusion) -> Excluded:
        seconds = each.seconds if math.isfinite(each.seconds) else None
        name = recordings[each.recording].name
        return Excluded(nodes=catalogue.counts(each.vector), seconds=seconds, rung=each.rung, recording=name)

    def keep_at_once(point: Point) -> None:
        others = (row for row in answer.candidates if row.point.nodes != catalogue.counts(point.vector))
        context.keep(answer.model_copy(update={"candidates": (*others, row_of(point))}))

    sizing.found = keep_at_once
    for points in sizing.answer(target, ask.front):
        answer = answer.model_copy(
            update={
                "candidates": tuple(row_of(point) for point in points if point.met),
                "undecided": tuple(point_of(point) for point in points if not point.met),
                "excluded": tuple(excluded(each) for each in sizing.bounds.excluded),
                "notes": tuple(of.notes),
            }
        )
        context.keep(answer)
    return answer
