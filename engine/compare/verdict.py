"""One verdict a plan: do it, try it, not now, or cannot say yet."""

from collections.abc import Sequence
from math import inf

from pydantic import Field

from engine.compare.baseline import baseline_of, travelling_like
from engine.compare.evidence import Balanced, Criterion, Evidence, Thresholds, Word, decide, gather
from engine.compare.figures import metrics, migration
from engine.compare.held_out import Batch, HeldOut, candidates_of, split_by_origin
from engine.compare.judge import Judge, Serving
from engine.compare.standing import Standing, standing_of
from engine.compare.what_if import is_quick
from engine.compare.wording import reasons
from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Stop, never
from engine.schema import Frozen
from engine.systems.base import Report, silent
from engine.workload import Workload


class Beside(Frozen):
    """A plan for comparison with the judged one.

    gain: held out, over the deployed plan; None: unknown
    replica_bytes: of its slots beyond one for every expert
    """

    name: str
    gain: float | None
    replica_bytes: float


class Verdict(Frozen):
    """The verdict on a plan, and every figure behind it. Shares, bytes, seconds; None: unknown.

    plan, deployed, unit: see `Evidence`
    gain_held_out: mean over `parts`; gain_low, gain_high: its interval at this `confidence`, from the tokens that were
        recorded; gain_worst, gain_best: on the worst and the best part
    persistence: see `engine.compare.held_out.persistence_of`
    memory_bytes: of replicas, on all GPUs; memory_bytes_per_gpu: most that a GPU holds more than now; memory_share: of the
        fullest GPU
    balanced: the ceiling of balanced routing, of a serving step
    break_even_steps, break_even_minutes: until the move has paid; None also if it never does
    batches, pays_from_sequences: see `Evidence`; None also if no batch is faster
    """

    verdict: Word
    plan: str
    deployed: str
    unit: str
    gain_held_out: float | None
    gain_low: float | None
    gain_high: float | None
    confidence: float
    gain_worst: float | None
    gain_best: float | None = None
    persistence: float | None
    memory_bytes: float = Field(ge=0)
    memory_bytes_per_gpu: float
    memory_share: float
    move_copies: int | None
    move_bytes: float | None
    move_seconds: float | None
    break_even_steps: float | None
    break_even_minutes: float | None
    tokens_per_expert: float
    balanced: Balanced | None = None
    batches: tuple[Batch, ...] = ()
    pays_from_sequences: int | None = None
    criteria: tuple[Criterion, ...]
    parts: tuple[HeldOut, ...]
    beside: tuple[Beside, ...]
    reasons: tuple[str, ...]


class Judgement(Frozen):
    """Kept of a plan: the evidence, and the thresholds by which it was decided last."""

    evidence: Evidence
    thresholds: Thresholds

    @property
    def verdict(self) -> Verdict:
        return verdict_from(self.evidence, self.thresholds)


def verdict_of(
    plan: Plan,
    problem: Problem,
    recordings: Sequence[Workload],
    deployed: Plan | None = None,
    thresholds: Thresholds | None = None,
    serving: Serving | None = None,
    stop: Stop = never,
    report: Report = silent,
) -> Verdict:
    """Is a plan worth moving to? See `evidence_of`; thresholds: None: the usual ones."""
    evidence = evidence_of(plan, problem, recordings, deployed, serving, stop, report)
    return verdict_from(evidence, thresholds or Thresholds())


def evidence_of(
    plan: Plan,
    problem: Problem,
    recordings: Sequence[Workload],
    deployed: Plan | None = None,
    serving: Serving | None = None,
    stop: Stop = never,
    report: Report = silent,
) -> Evidence:
    """The evidence for a verdict on a plan, whatever the thresholds.

    problem: cluster, model and costs; its recording does not count
    recordings: of the model, with those that the plan was made from (its provenance names them) as far as they are here
    deployed: the baseline; None: see `baseline_of`
    serving: the step that is timed; None: a pass through the MoE layers

    Raises InputError if something does not fit, StoppedError when asked to stop.
    """
    if problem.goal is not Goal.INFERENCE or plan.goal is not Goal.INFERENCE:
        raise InputError("a verdict is on a plan for inference of one model; close the second model or the training step")
    deployed = deployed or baseline_of(travelling_like(plan, problem))
    for checked in (plan, deployed):
        problem.check_plan(checked)
    judge = Judge(problem, serving)
    own, others = split_by_origin(plan, recordings, judge)
    return gather(candidates_of(plan, deployed, own, others, judge), judge, stop, report)


def headline_of(
    plan: Plan, problem: Problem, evidence: Evidence, deployed: Plan, serving: Serving | None = None, stop: Stop = never
) -> Standing | None:
    """The headline of a judged plan on the problem's recording; None of a pass that takes long to simulate. Arguments as of
    `evidence_of`. Raises InputError when a plan does not fit."""
    here = travelling_like(plan, problem)
    if serving is not None:
        own, base = (serving.served(each, here, stop).figures for each in (plan, deployed))
        times = base.seconds, own.seconds
    elif is_quick(here):
        own, base = (metrics(each, here) for each in (plan, deployed))
        times = base.total, own.total
    else:
        return None
    move = migration(deployed.placement, plan.placement, here, *times)
    return standing_of(plan, own, deployed, base, here, move, evidence.risks, evidence.other_phase)


def verdict_from(evidence: Evidence, thresholds: Thresholds) -> Verdict:
    """The verdict by these thresholds, at once: nothing is timed or planned again."""
    decision = decide(evidence, thresholds)
    low, high = evidence.interval(thresholds.confidence) or (None, None)
    worst, move = evidence.worst, evidence.move
    return Verdict(
        verdict=decision.word,
        plan=evidence.plan,
        deployed=evidence.deployed,
        unit=evidence.unit,
        gain_held_out=evidence.gain,
        gain_low=low,
        gain_high=high,
        confidence=thresholds.confidence,
        gain_worst=worst and worst.gain,
        gain_best=max((part.gain for part in evidence.parts), default=None),
        persistence=evidence.persistence,
        memory_bytes=evidence.replica_bytes,
        memory_bytes_per_gpu=evidence.added_bytes,
        memory_share=evidence.memory,
        move_copies=move and move.copies,
        move_bytes=move and move.bytes,
        move_seconds=move and move.seconds,
        break_even_steps=move and move.steps,
        break_even_minutes=None if evidence.minutes == inf else evidence.minutes,
        tokens_per_expert=evidence.tokens_per_expert,
        balanced=evidence.balanced,
        batches=evidence.batches,
        pays_from_sequences=evidence.pays_from and evidence.pays_from.sequences,
        criteria=decision.criteria,
        parts=evidence.parts,
        beside=_beside(evidence),
        reasons=reasons(evidence, decision, thresholds),
    )


def _beside(evidence: Evidence) -> tuple[Beside, ...]:
    """The deployed plan, no plan at all, no replicas, and the plan."""
    rows = [Beside(name=f"deployed: {evidence.deployed}", gain=0.0, replica_bytes=evidence.deployed_bytes)]
    rows.append(Beside(name="no plan: experts in contiguous blocks", gain=evidence.linear, replica_bytes=0.0))
    if evidence.bare_system is not None:
        rows.append(Beside(name=f"no replicas: {evidence.bare_system}", gain=evidence.without_replicas, replica_bytes=0.0))
    rows.append(Beside(name=evidence.plan, gain=evidence.gain, replica_bytes=evidence.replica_bytes))
    return tuple(rows)
