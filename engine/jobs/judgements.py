"""Jobs that judge plans on recordings that these were not made from."""

from pydantic import field_validator

from engine import store
from engine.compare.drift import PASSES, Drift, drift, in_parts
from engine.compare.evidence import Evidence, Thresholds
from engine.compare.held_out import Maker
from engine.compare.judge import Judge
from engine.compare.redundancy import (
    Knee,
    RedundancyPoint,
    Replication,
    counts_of,
    knee,
    most_slots,
    planned_and_judged,
    redundancy,
)
from engine.compare.verdict import Judgement, evidence_of
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs import runner
from engine.jobs.kinds import Answer, Document
from engine.jobs.protocol import Context, replace_result
from engine.jobs.tasks import StepAsk
from engine.plan import Plan
from engine.systems import systems_for


class JudgedAsk(StepAsk):
    """recordings: digests"""

    recordings: tuple[str, ...]


class VerdictAsk(JudgedAsk):
    """Is a plan worth it? recordings: with those that the plan was made from; deployed: the baseline."""

    plan: Plan
    deployed: Plan
    thresholds: Document


class VerdictAnswer(Answer):
    """A `Judgement`; None in both fields of the first versions, which kept no evidence. A stopped job has no answer."""

    evidence: Evidence | None = None
    thresholds: Thresholds | None = None

    @property
    def judgement(self) -> Judgement | None:
        """The judgement, if its evidence was kept."""
        return None if self.evidence is None else Judgement(evidence=self.evidence, thresholds=self.thresholds)


def verdict(ask: VerdictAsk, context: Context) -> VerdictAnswer:
    """Judge a plan. Raises StoppedError if the job is stopped."""
    problem = ask.problem()
    serving = ask.timed_step(problem)
    recordings = [store.load_workload(digest) for digest in ask.recordings]
    thresholds = Thresholds.from_values(ask.thresholds)
    context.report(0.0, "judging")
    evidence = evidence_of(ask.plan, problem, recordings, ask.deployed, serving, context.stop, context.report)
    return VerdictAnswer(evidence=evidence, thresholds=thresholds)


def decide_again(job: runner.Job, thresholds: Thresholds) -> None:
    """Decide the verdict of a job by other thresholds, for everybody who looks at it: its evidence stays.

    Raises InputError while the job runs, and if it has no evidence that this version can read.
    """
    if not job.state.finished:
        raise InputError(f"job {job.id} is still {job.state}: wait for its verdict")
    kept = Judgement.from_dict(job.result, f"job {job.id}")
    replace_result(job.folder, kept.model_copy(update={"thresholds": thresholds}))


class RedundancyAsk(JudgedAsk):
    """recordings: the one to plan on first."""


class RedundancyAnswer(Answer):
    """The curve so far.

    of: points in all; knee: None until all points are there
    planned_on, judged_on: names; held_out: False: judged in sample
    limit: why the curve ends, in words; unit: of the times, in words
    """

    points: tuple[RedundancyPoint, ...] = ()
    of: int
    knee: Knee | None = None
    planned_on: str
    judged_on: tuple[str, ...]
    held_out: bool
    limit: str
    unit: str
    cost_source: str

    @field_validator("knee", mode="before")
    @classmethod
    def _without_bare_number(cls, advised: object) -> object:
        """The first versions kept the number of slots alone."""
        return None if isinstance(advised, int) else advised


def redundancy_study(ask: RedundancyAsk, context: Context) -> RedundancyAnswer:
    """Find how many spare slots are worth their memory."""
    problem = ask.problem()
    judge = Judge(problem, ask.timed_step(problem))
    planned, judged, held_out = planned_and_judged([store.load_workload(digest) for digest in ask.recordings])
    answer = RedundancyAnswer(
        of=len(counts_of(judge, Replication())),
        planned_on=planned.name,
        judged_on=tuple(recording.name for recording in judged),
        held_out=held_out,
        limit=most_slots(judge)[1],
        unit=judge.unit,
        cost_source=problem.cost_source,
    )
    for point in redundancy(judge, planned, judged, Replication(), context.stop, context.report):
        answer = answer.model_copy(update={"points": (*answer.points, point)})
        context.keep(answer)
    if len(answer.points) == answer.of:
        answer = answer.model_copy(update={"knee": knee(answer.points)})
    return answer


class DriftAsk(JudgedAsk):
    """recordings: windows in order of time; parts: into which the one recording is cut, None: it is not

    deployed: the plan at first; None: the one that the system makes of the first window
    passes: of every window
    """

    parts: int | None = None
    system: str
    options: Document
    deployed: Plan | None = None
    passes: int = PASSES


class DriftAnswer(Answer):
    """The windows judged so far; None before there is one."""

    drift: Drift | None = None


def drift_study(ask: DriftAsk, context: Context) -> DriftAnswer:
    """Find when moving to new plans pays over a history."""
    problem, windows = ask.problem(), [store.load_workload(digest) for digest in ask.recordings]
    if ask.parts is not None:
        if len(windows) != 1:
            raise InputError(f"one recording is cut into windows; {len(windows)} were given")
        windows = in_parts(windows[0], ask.parts)
    systems = systems_for(problem)
    if problem.goal is not Goal.INFERENCE or ask.system not in systems:
        raise InputError(f"drift is studied for inference of one model, by one of {', '.join(systems)}")
    maker = Maker(systems[ask.system], systems[ask.system].settings(ask.options), problem)
    answer, judge = DriftAnswer(), Judge(problem, ask.timed_step(problem))
    for found in drift(judge, windows, maker, ask.deployed, ask.passes, context.stop, context.report):
        answer = DriftAnswer(drift=found)
        context.keep(answer)
    return answer
