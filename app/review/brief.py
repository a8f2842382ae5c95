"""Everything that a decision on a plan needs, computed from the plan and its inputs and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from app.review.words import words
from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Plan, SendOrder
from engine.problem import Problem
from engine.result import Provenance
from engine.simulate import simulate
from engine.simulate.metrics import Metrics, metrics, speedup
from engine.simulate.migration import Migration, migration
from engine.simulate.proof import proof_of_plan
from engine.systems import SYSTEMS, TRAINING, usual_plan
from engine.systems.pieces import linear_placement
from engine.timeline import Timeline
from engine.units import ratio, seconds, share, size
from engine.workload import Workload

LINEAR, DEEPSPEED = "linear", "deepspeed"
Simulate = Callable[[Plan, Problem], Timeline]


@dataclass(frozen=True, eq=False)
class Scored:
    """A plan with what the simulation says of it."""

    plan: Plan
    timeline: Timeline
    figures: Metrics


@dataclass(frozen=True)
class Risk:
    """A plan on a recording that it was not made from: simulated seconds of it and of the baseline there."""

    recording: str
    seconds: float
    baseline: float

    @property
    def gain(self) -> float:
        """Baseline over plan: below 1 the plan is the slower one."""
        return speedup(self.baseline, self.seconds)


@dataclass(frozen=True, eq=False)
class Brief:
    """own: the plan; baseline: what it is held against; move: from the placement in use, None for two models and training;
    risks: worst first; refused: recordings on which it could not be scored, with the reason."""

    problem: Problem
    own: Scored
    baseline: Scored
    move: Migration | None
    risks: tuple[Risk, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """Baseline over plan, in simulated time."""
        return speedup(self.baseline.figures.total, self.own.figures.total)

    @property
    def words(self) -> list[str]:
        return words(self.own.plan, self.move)

    @property
    def worst(self) -> Risk | None:
        return self.risks[0] if self.risks else None


def brief_of(plan: Plan, problem: Problem, simulate: Simulate = simulate, in_use: str | None = None) -> Brief:
    """The brief, without risks. in_use: what to call the placement in use, as the file that it came in. Raises InputError when
    the plan does not fit the problem."""
    problem = replace(problem, travel=plan.travel)  # what it is held against travels like it
    own, baseline = _scored(plan, problem, simulate(plan, problem)), baseline_of(problem, simulate, in_use)
    move = None
    if problem.goal is Goal.INFERENCE:
        now = problem.in_use or linear_placement(problem)
        move = migration(now, plan.placement, problem, baseline.figures.total, own.figures.total)
    return Brief(problem, own, baseline, move)


def with_risks(brief: Brief, others: Sequence[Workload], simulate: Simulate = simulate) -> Brief:
    """The same with what the plan is worth on recordings that it was not made from."""
    risks, refused = [], {}
    for other in others:
        try:
            there = brief.problem.with_workload(other)
            totals = (simulate(scored.plan, there).total for scored in (brief.own, brief.baseline))
            risks.append(Risk(other.name, *totals))
        except InputError as error:
            refused[other.name] = str(error)
    return replace(brief, risks=tuple(sorted(risks, key=lambda risk: risk.gain)), refused=refused)


def _scored(plan: Plan, problem: Problem, timeline: Timeline) -> Scored:
    return Scored(plan, timeline, metrics(plan, problem, timeline))


def baseline_of(problem: Problem, simulate: Simulate = simulate, in_use: str | None = None) -> Scored:
    """What a plan is held against: the placement in use, called `in_use`, else experts in contiguous blocks, with a plain
    all-to-all; for a training step DeepSpeed's."""
    if problem.in_use is None:
        system = TRAINING[DEEPSPEED] if problem.goal is Goal.TRAINING else SYSTEMS[LINEAR]
        plan, timeline = usual_plan(system, problem)
        return _scored(plan, problem, timeline or simulate(plan, problem))
    order, origin = SendOrder(mode="concurrent"), Provenance(optimiser="in use")
    plan = Plan(
        name=in_use or "Placement in use",
        placement=problem.in_use,
        send_order=order,
        travel=problem.travel,
        provenance=origin,
    )
    return _scored(plan, problem, simulate(plan, problem))


def named_pair(brief: Brief) -> dict[str, Timeline]:
    """The timelines of a plan and of what it is held against, by unlike names."""
    name, base = brief.own.plan.name, brief.baseline.plan.name
    return {name: brief.own.timeline, base if base != name else f"{base} (baseline)": brief.baseline.timeline}


def headline(brief: Brief) -> str:
    """What is to be decided, in a sentence."""
    own, name = brief.own.figures, brief.baseline.plan.name
    time = f"{seconds(own.total)} a {'step' if brief.problem.goal is Goal.TRAINING else 'pass'}"
    if brief.gain >= 1.005:
        return f"{time}, {ratio(brief.gain)} as fast as {name}"
    if brief.gain > 0.995:
        return f"{time}, as fast as {name}"
    return f"{time}, slower than {name}: {ratio(1 / brief.gain)} its time"


def bound_in_words(brief: Brief) -> list[str]:
    """How much better any plan could be, as far as it is proven."""
    figures, claim = brief.own.figures, brief.own.plan.claim
    what = "schedule" if brief.problem.goal is Goal.TRAINING else "order of sends"
    sentences = [
        f"No {what} of this placement is faster than {seconds(figures.order_bound)}: {_above(figures.order_gap)}."
    ]
    if figures.bound is not None and claim.scope == "placement and order":
        sentences.append(
            f"Its optimiser claims, which is not computed again here, that no other placement with as many slots per GPU and "
            f"no replicas is faster than {seconds(figures.bound)}: {_above(figures.gap)}."
        )
    elif figures.bound is None and claim is not None:
        sentences.append("What its optimiser claims is for other inputs, or not true, and says nothing here.")
    return [*sentences, proof_of_plan(brief.own.plan, figures).sentence]


def _above(gap: float) -> str:
    return f"the plan is {share(gap)} above that" if gap > 1e-9 else "the plan meets that"


def cost_in_words(brief: Brief) -> str:
    """What deploying the plan costs."""
    if brief.move is None:
        return "What deploying it costs is not computed for two models or a training step."
    move = brief.move
    if not move.copies:
        return "Nothing has to move."
    sentence = f"{move.copies:,} expert copies, {size(move.bytes)}, {seconds(move.seconds)} of moving"
    if move.steps == float("inf"):
        return f"{sentence}; it is never won back, as the plan is no faster."
    won_back = "in the first pass" if move.steps <= 1 else f"after {ceil(move.steps):,} passes"
    return f"{sentence}; won back {won_back}."


def risk_in_words(brief: Brief) -> str:
    """What happens on a recording that the plan was not made from."""
    if brief.worst is None:
        return "Not known: it was scored on no other recording of this model."
    worst = brief.worst
    more = f", the worst of {len(brief.risks)} other recordings" if len(brief.risks) > 1 else ""
    verdict = f"{ratio(worst.gain)} as fast as {brief.baseline.plan.name}"
    if worst.gain < 1:
        verdict = f"slower than {brief.baseline.plan.name}: {ratio(1 / worst.gain)} its time"
    return f"On {worst.recording}{more}: {seconds(worst.seconds)}, {verdict}."
