"""Everything that a decision on a plan needs, computed from the plan and its inputs and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from app.review.words import words
from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Plan, SendOrder
from engine.problem import Problem
from engine.result import Provenance
from engine.simulate import simulate
from engine.simulate.metrics import Metrics, metrics, speedup
from engine.simulate.migration import Migration, migration
from engine.simulate.proof import gap_over_placements, proof_of_plan
from engine.simulate.standing import Risk, Standing, bound_sentence, gain_in_words, tokens_per_second
from engine.systems import baseline_for, usual_plan
from engine.systems.pieces import linear_placement
from engine.timeline import Timeline
from engine.units import seconds, share, size
from engine.workload import Workload

Simulate = Callable[[Plan, Problem], Timeline]


@dataclass(frozen=True, eq=False)
class Scored:
    """A plan with what the simulation says of it."""

    plan: Plan
    timeline: Timeline
    figures: Metrics


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

    def standing(self, scored: bool = True) -> Standing:
        """How the plan stands; scored: whether it was scored on all other recordings."""
        return Standing(
            plan=self.own.plan.name,
            deployed=self.baseline.plan.name,
            is_deployed=self.own.plan.id == self.baseline.plan.id,
            span="step" if self.problem.goal is Goal.TRAINING else "pass",
            seconds=self.own.figures.total,
            deployed_seconds=self.baseline.figures.total,
            tokens_per_second=tokens_per_second(self.problem, self.own.figures.total),
            bound=self.own.figures.order_bound,
            bound_covers=bound_sentence(self.own.plan, self.own.figures),
            move=self.move,
            risks=self.risks if scored else None,
            placement_gap=gap_over_placements(self.own.plan, self.own.figures),
        )


def brief_of(plan: Plan, problem: Problem, simulate: Simulate = simulate, in_use: Plan | None = None) -> Brief:
    """The brief, without risks. in_use: the plan whose placement is in use, where it is known. Raises InputError when the plan
    does not fit the problem."""
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


def baseline_of(problem: Problem, simulate: Simulate = simulate, in_use: Plan | None = None) -> Scored:
    """What a plan is held against: what is deployed, which travels like it; of a placement in use whose plan is not known, with
    a plain all-to-all; where nothing was said of it, what `baseline_for` says."""
    if problem.in_use is None:
        plan, timeline = usual_plan(baseline_for(problem), problem)
        return _scored(plan, problem, timeline or simulate(plan, problem))
    plan = in_use or Plan(
        name="Placement in use",
        placement=problem.in_use,
        send_order=SendOrder(mode="concurrent"),
        provenance=Provenance(optimiser="in use"),
    )
    plan = plan.model_copy(update={"travel": problem.travel})
    return _scored(plan, problem, simulate(plan, problem))


def named_pair(brief: Brief) -> dict[str, Timeline]:
    """The timelines of a plan and of what it is held against, by unlike names."""
    name, base = brief.own.plan.name, brief.baseline.plan.name
    return {name: brief.own.timeline, base if base != name else f"{base} (baseline)": brief.baseline.timeline}


def headline(brief: Brief) -> str:
    """What is to be decided, in a sentence."""
    own, name = brief.own.figures, brief.baseline.plan.name
    time = f"{seconds(own.total)} per {'step' if brief.problem.goal is Goal.TRAINING else 'pass'}"
    return f"{time}, {gain_in_words(brief.gain, name)}"


def bound_in_words(brief: Brief) -> list[str]:
    """How much better any plan could be, as far as it is proven."""
    figures, claim = brief.own.figures, brief.own.plan.claim
    what = "schedule" if brief.problem.goal is Goal.TRAINING else "order of sends"
    sentences = [
        f"No {what} of this placement is faster than {seconds(figures.order_bound)}: {_above(figures.order_gap)}."
    ]
    if (gap := gap_over_placements(brief.own.plan, figures)) is not None:
        sentences.append(
            "According to its optimiser (not rechecked here), no other placement with as many slots per GPU and no replicas is "
            f"faster than {seconds(figures.bound)}: {_above(gap)}."
        )
    elif figures.bound is None and claim is not None:
        sentences.append(
            "Its optimiser's own bound was computed for other inputs, or cannot be true, and is not used here."
        )
    proof = proof_of_plan(brief.own.plan, figures)
    proven, _, why = proof.in_words.partition("nothing")
    optimal = f"Proven optimal: {proven}." if proven else f"Nothing about this plan is proven optimal{why}."
    return [*sentences, optimal]


def _above(gap: float) -> str:
    return f"the plan is {share(gap)} above that" if gap > 1e-9 else "the plan meets that"


def cost_in_words(brief: Brief) -> str:
    """What deploying the plan costs."""
    if brief.move is None:
        return "What deploying it costs is not computed for two models or a training step."
    move = brief.move
    if not move.copies:
        return "Nothing has to move."
    return (
        f"{move.copies:,} expert copies, {size(move.bytes)}, {seconds(move.seconds)} of moving, which {move.pays_off}."
    )


def risk_in_words(brief: Brief) -> str:
    """What happens on a recording that the plan was not made from."""
    if brief.worst is None:
        return "Not scored on another recording of this model: what it gains under other traffic is unknown."
    worst = brief.worst
    more = f", the worst of {len(brief.risks)} other recordings" if len(brief.risks) > 1 else ""
    return (
        f"On {worst.recording}{more}: {seconds(worst.seconds)}, {gain_in_words(worst.gain, brief.baseline.plan.name)}."
    )
