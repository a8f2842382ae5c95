"""Jobs that judge plans on recordings that these were not made from."""

from pathlib import Path

from pydantic import field_validator

from engine import store
from engine.compare.evidence import Evidence, Thresholds
from engine.compare.judge import Judge, Serving
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
from engine.jobs import runner
from engine.jobs.kinds import Answer, Document
from engine.jobs.protocol import Context, replace_result
from engine.jobs.tasks import ProblemAsk
from engine.plan import Plan
from engine.problem import Problem
from engine.schema import Frozen
from engine.serving.aiconfigurator import choose_operators
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import TransformerSizes
from engine.serving.step import ServingStep


class ServingAsk(Frozen):
    """The step in which plans are judged; config: path of a `config.json` with the operators of a real model, or None."""

    step: ServingStep
    sizes: TransformerSizes
    config: Path | None = None

    def serving(self, problem: Problem) -> Serving:
        """The step on the problem's first GPU."""
        gpu = problem.cluster.gpus[0]
        if self.config is None:
            return Serving(self.step, RooflineOperators(problem.model, self.sizes, gpu), self.sizes)
        source, _ = choose_operators(self.config, problem.model, self.sizes, gpu, self.step)
        return Serving(self.step, source, self.sizes)


class JudgedAsk(ProblemAsk):
    """recordings: digests; serving: None: a pass through the MoE layers is judged."""

    recordings: tuple[str, ...]
    serving: ServingAsk | None = None

    def judged_step(self, problem: Problem) -> Serving | None:
        """The step that counts."""
        return None if self.serving is None else self.serving.serving(problem)


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
    serving = ask.judged_step(problem)
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
    judge = Judge(problem, ask.judged_step(problem))
    planned, judged, held_out = planned_and_judged([store.load_workload(digest) for digest in ask.recordings])
    answer = RedundancyAnswer(
        of=len(counts_of(judge)),
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
