"""Jobs that study plans rather than make one to use.

The answer of a stopped or running job has the points that were found so far.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from engine import store
from engine.cluster import Node
from engine.compare import sensitivity
from engine.compare.affinity import SEEDS, OutOfDistribution, TokensEnough, out_of_distribution, tokens_enough
from engine.compare.capacity import CapacityPoint, capacity, fitted, grown
from engine.compare.comparison import PlanRow
from engine.compare.contention import CONTENTIONS, ContentionPoint, contention_curve, most_saved, ordered, pays_from
from engine.compare.imprecision import ImprecisionPoint, Noise, imprecision
from engine.compare.sweep import Kind, SweepPoint, sweep, trials_of
from engine.compare.what_if import Change, changed
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs.kinds import Answer, Ask, Document
from engine.jobs.protocol import Context
from engine.jobs.tasks import ProblemAsk, StepAsk
from engine.plan import Claim, Plan
from engine.result import Status
from engine.schema import Frozen
from engine.serving.step import Phase
from engine.simulate import claimable_bound, loads_of, simulate
from engine.sizing.deployment_search import cheapest
from engine.sizing.deployments import Found, Question
from engine.store.problems import save_inputs
from engine.systems import run, system_named
from engine.workload import RoutingTrace

Number = int | float
"""Kept as it was asked for: 2 stays an integer."""


class AffinityAsk(Ask):
    """workload, others: digests of routing logs; sizes, seeds, time_limit (seconds a plan): see `tokens_enough`."""

    workload: str
    others: tuple[str, ...]
    gpus: int
    first_choice: bool
    sizes: tuple[int, ...] | None = None
    seeds: int = SEEDS
    time_limit: float | None = None


class AffinityAnswer(Answer):
    """Both studies as far as they got; None before they begin."""

    tokens: TokensEnough | None = None
    others: OutOfDistribution | None = None


def affinity_study(ask: AffinityAsk, context: Context) -> AffinityAnswer:
    """Find the number of tokens that an affinity plan needs, and if the plan holds on other recordings."""
    traces = [_trace(digest) for digest in (ask.workload, *ask.others)]
    common = {"gpus": ask.gpus, "first_choice": ask.first_choice, "stop": context.stop, "time_limit": ask.time_limit}
    # A plan of the second study takes as long as one of the first, which makes about a dozen.
    part = 12 / (12 + len(traces))
    context.report(0.0, "planning from samples of tokens")
    tokens = tokens_enough(
        traces[0],
        sizes=ask.sizes,
        seeds=ask.seeds,
        report=lambda done, message: context.report(part * done, message),
        on_point=lambda study: context.keep(AffinityAnswer(tokens=study)),
        **common,
    )
    if context.stop():
        return AffinityAnswer(tokens=tokens)
    others = out_of_distribution(
        traces,
        report=lambda done, message: context.report(part + (1 - part) * done, message),
        on_point=lambda study: context.keep(AffinityAnswer(tokens=tokens, others=study)),
        **common,
    )
    return AffinityAnswer(tokens=tokens, others=others)


class SweepWanted(Frozen):
    """One parameter and its values, see `trials_of`."""

    kind: Kind
    values: tuple[Number, ...]
    settings: Document


class SweepAsk(ProblemAsk):
    """A sweep over one parameter of a plan for a training step."""

    sweep: SweepWanted


class SweepRow(PlanRow):
    """The plan of one trial, with its figures."""

    point: SweepPoint


class SweepAnswer(Answer):
    """Trials that were run to their end; of: trials in all."""

    candidates: tuple[SweepRow, ...] = ()
    of: int
    cost_source: str


def sweep_study(ask: SweepAsk, context: Context) -> SweepAnswer:
    """Sweep one parameter of a plan for a training step."""
    problem, wanted = ask.problem(), ask.sweep
    trials = trials_of(problem, wanted.kind, wanted.values, wanted.settings)
    answer = SweepAnswer(of=len(trials), cost_source=problem.cost_source)
    for point, outcome in sweep(problem, trials, context.stop, context.report):
        plan = outcome.result.solution
        notes = {about: note._asdict() for about, note in outcome.notes.items()}
        row = SweepRow(plan=plan, status=plan.claim.status.value, runtime=outcome.result.runtime, notes=notes, point=point)
        answer = answer.model_copy(update={"candidates": (*answer.candidates, row)})
        context.keep(answer)
    return answer


class PointsAnswer(Answer):
    """The points of a study so far."""

    points: tuple = ()
    cost_source: str


Points = TypeVar("Points", bound=PointsAnswer)


def _collected(points: Iterable, answer: Points, context: Context) -> Points:
    """The answer with every point as it comes, kept so that whoever watches sees it."""
    context.keep(answer)
    for point in points:
        answer = answer.model_copy(update={"points": (*answer.points, point)})
        context.keep(answer)
    return answer


class SensitivityAsk(StepAsk):
    """share: by which every parameter is lowered and raised."""

    plan: Plan
    share: Number


class SensitivityAnswer(PointsAnswer):
    """of: points in all; total, rate: as things are, see `Pace`; plan: its name; simulated: False: bounds, see `is_simulated`;
    phase: of the serving step that is timed."""

    points: tuple[sensitivity.SensitivityPoint, ...] = ()
    of: int
    share: Number
    total: float
    rate: float | None = None
    plan: str
    simulated: bool
    phase: Phase | None = None


def sensitivity_study(ask: SensitivityAsk, context: Context) -> SensitivityAnswer:
    """Time a plan with a little less and a little more of everything."""
    problem, plan = ask.problem(), ask.plan
    serving = ask.timed_step(problem)
    parameters = sensitivity.parameters_of(problem, serving)
    context.report(0.0, "as things are")
    now = sensitivity.pace_of(plan, problem, serving=serving, stop=context.stop)
    answer = SensitivityAnswer(
        of=len(parameters),
        share=ask.share,
        total=now.seconds,
        rate=now.rate,
        plan=plan.name,
        simulated=sensitivity.is_simulated(problem, serving),
        phase=serving and serving.step.phase,
        cost_source=problem.cost_source,
    )
    points = sensitivity.sensitivity(plan, problem, ask.share, parameters, context.stop, context.report, serving)
    return _collected(points, answer, context)


class CurveAsk(StepAsk):
    """field, values: of a change; system: None: nothing is planned anew; options: of the system."""

    plans: tuple[Plan, ...]
    field: sensitivity.Field
    values: tuple[Number, ...]
    system: str | None
    options: Document


class CurveAnswer(PointsAnswer):
    """series: names of the plans; of: points in all; simulated: False: bounds, see `is_simulated`; phase: of the serving step
    that is timed."""

    points: tuple[sensitivity.CurvePoint, ...] = ()
    field: sensitivity.Field
    series: tuple[str, ...]
    of: int
    simulated: bool
    phase: Phase | None = None


def curve_study(ask: CurveAsk, context: Context) -> CurveAnswer:
    """Time plans over a whole range of one change."""
    problem, plans = ask.problem(), ask.plans
    names = {
        plan.name if turn == 0 or plan.name != plans[0].name else f"{plan.name} {plan.id[:8]}": plan
        for turn, plan in enumerate(plans)
    }
    anew = (system_named(ask.system, problem), ask.options) if ask.system else None
    serving = ask.timed_step(problem)
    answer = CurveAnswer(
        field=ask.field,
        series=tuple(names),
        of=len(set(ask.values)) * (len(names) + bool(anew)),
        simulated=sensitivity.is_simulated(problem, serving),
        phase=serving and serving.step.phase,
        cost_source=problem.cost_source,
    )
    points = sensitivity.curve(problem, ask.field, ask.values, names, anew, context.stop, context.report, serving)
    return _collected(points, answer, context)


class ContentionAsk(StepAsk):
    """The plan of which the placement is studied."""

    plan: Plan


class ContentionAnswer(PointsAnswer):
    """of: points in all; plan: its name.

    pays_from: a contention; None: at none of the points, or not known yet
    most_saved: share, see the function; None until there is a point
    phase: of the serving step that is timed
    """

    points: tuple[ContentionPoint, ...] = ()
    of: int
    pays_from: float | None = None
    most_saved: float | None = None
    plan: str
    phase: Phase | None = None


def contention_study(ask: ContentionAsk, context: Context) -> ContentionAnswer:
    """Find the contention from which on ordering pays for a plan's placement."""
    problem, plan = ask.problem(), ask.plan
    serving = ask.timed_step(problem)
    phase = serving and serving.step.phase
    answer = ContentionAnswer(of=len(CONTENTIONS), plan=plan.name, phase=phase, cost_source=problem.cost_source)
    context.report(0.0, "ordering sends")
    plans = ordered(plan, problem, context.stop, serving)
    for point in contention_curve(problem, plans, stop=context.stop, report=context.report, serving=serving):
        update = {"points": (*answer.points, point)}
        if answer.most_saved is None:
            update["most_saved"] = most_saved(plan, problem, point.seconds["concurrent"], serving)
        answer = answer.model_copy(update=update)
        context.keep(answer)
    if len(answer.points) == len(CONTENTIONS):
        answer = answer.model_copy(update={"pays_from": pays_from(answer.points, problem, plans, serving, context.stop)})
    return answer


class ImprecisionAsk(StepAsk):
    """levels: shares of noise; seeds: draws of each; options: of the systems, by name."""

    levels: tuple[Number, ...]
    seeds: int
    noise: Noise
    options: dict[str, Document] | None = None


class ImprecisionAnswer(PointsAnswer):
    """See `ImprecisionAsk`. phase: of the serving step that is timed"""

    points: tuple[ImprecisionPoint, ...] = ()
    noise: Noise
    levels: tuple[Number, ...]
    seeds: int
    phase: Phase | None = None


def imprecision_study(ask: ImprecisionAsk, context: Context) -> ImprecisionAnswer:
    """Plan by Aurora and its baselines on traffic that is not quite the traffic that comes."""
    problem = ask.problem()
    wanted = {"levels": ask.levels, "seeds": ask.seeds, "noise": ask.noise}
    serving = ask.timed_step(problem)
    points = imprecision(problem, **wanted, options=ask.options, stop=context.stop, report=context.report, serving=serving)
    phase = serving and serving.step.phase
    return _collected(points, ImprecisionAnswer(cost_source=problem.cost_source, phase=phase, **wanted), context)


class CapacityAsk(ProblemAsk):
    """part: nodes by which a cluster grows; title: the part in words; target: seconds; sizes: numbers of parts; spare: as of
    `capacity`."""

    part: tuple[Document, ...]
    title: str
    target: Number
    sizes: tuple[int, ...]
    system: str
    options: Document
    spare: bool = False


class CapacityRow(PlanRow):
    """The plan of a size. gpus: of its cluster"""

    gpus: int


class CapacityAnswer(PointsAnswer):
    """Points in the order in which they were tried; the rest as asked.

    candidates: plans of the points, for one model
    """

    points: tuple[CapacityPoint, ...] = ()
    candidates: tuple[CapacityRow, ...] = ()
    target: Number
    title: str
    system: str
    sizes: tuple[int, ...]
    spare: bool = False


def capacity_study(ask: CapacityAsk, context: Context) -> CapacityAnswer:
    """Find how many equal parts a cluster must have for a target time."""
    problem = ask.problem()
    part = [Node.from_dict(node, f"node {place}") for place, node in enumerate(ask.part)]
    same = {name: getattr(ask, name) for name in ("target", "title", "system", "sizes", "spare")}
    answer = CapacityAnswer(cost_source=problem.cost_source, **same)
    context.keep(answer)
    begin, asked = time.monotonic(), (problem, part, ask.target, ask.sizes, ask.system, ask.options)
    for point in capacity(*asked, context.stop, context.report, ask.spare):
        update = {"points": (*answer.points, replace(point, plan=None))}
        if point.plan is not None and problem.goal is Goal.INFERENCE:
            save_inputs(fitted(problem, grown(problem.cluster, part, point.parts)))
            plan = point.plan.model_copy(update={"name": f"{point.plan.name}, {point.gpus} GPUs"[:120]})
            row = CapacityRow(
                plan=plan, status=plan.claim.status.value, runtime=time.monotonic() - begin, notes={}, gpus=point.gpus
            )
            update["candidates"] = (*answer.candidates, row)
        answer = answer.model_copy(update=update)
        context.keep(answer)
    return answer


class ReplanAsk(ProblemAsk):
    """parent: id of the plan that the new one may replace."""

    change: Change
    system: str
    options: Document
    parent: str


class ReplanPoint(Frozen):
    """A plan's id, its seconds after the change, and the least that its optimiser proved there."""

    plan_id: str
    seconds: float
    bound: float


class ReplanRow(PlanRow):
    """A plan made for a change; its claim is the time that it takes on the open problem."""

    point: ReplanPoint


class ReplanAnswer(Answer):
    """One plan, and the change that it was made for."""

    candidates: tuple[ReplanRow, ...]
    change: Change


def replan(ask: ReplanAsk, context: Context) -> ReplanAnswer:
    """Run a system for the problem after a change."""
    problem, change = ask.problem(), ask.change
    system = system_named(ask.system, problem)
    context.report(0.0, f"{system.title} for {change.in_words}")
    outcome = run(system, changed(problem, change), ask.options, context.stop, context.report)
    solution = outcome.result.solution
    plan = solution.model_copy(update={"parent": ask.parent, "name": f"{solution.name}, {change.in_words}"[:120]})
    loads = loads_of(plan, problem)
    now = simulate(plan, problem, loads=loads).total
    scope = "schedule" if problem.goal is Goal.TRAINING else "order"
    claim = Claim(status=Status.FEASIBLE, objective=now, bound=min(now, claimable_bound(plan, problem, loads)), scope=scope)
    plan = plan.model_copy(update={"claim": claim})
    row = ReplanRow(
        plan=plan,
        status=claim.status.value,
        runtime=outcome.result.runtime,
        notes={about: note._asdict() for about, note in outcome.notes.items()},
        point=ReplanPoint(plan_id=plan.id, seconds=outcome.result.objective, bound=outcome.result.bound),
    )
    return ReplanAnswer(candidates=(row,), change=change)


class DeploymentsAsk(Question, Ask):
    """See `Question`."""


class DeploymentsAnswer(Found, Answer):
    """See `Found`."""


def deployments_study(ask: DeploymentsAsk, context: Context) -> DeploymentsAnswer:
    """Find the cheapest deployments of a model for a target of serving. Raises InputError as `cheapest`."""
    answer = DeploymentsAnswer()
    for found in cheapest(ask, context.stop, context.report):
        answer = DeploymentsAnswer(**dict(found))
        context.keep(answer)
    return answer


def _trace(digest: str) -> RoutingTrace:
    recording = store.load_workload(digest)
    if not isinstance(recording, RoutingTrace):
        raise InputError(f"{recording.name} has no tokens that can be followed from layer to layer; use a routing log")
    return recording
