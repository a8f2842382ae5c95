"""Jobs that judge plans on recordings that these were not made from. Arguments and results are plain JSON."""

from pathlib import Path
from typing import Any

from engine import store
from engine.compare.evidence import Thresholds
from engine.compare.judge import Judge, Serving
from engine.compare.redundancy import Replication, counts_of, knee, most_slots, planned_and_judged, redundancy
from engine.compare.verdict import Judgement, evidence_of
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.protocol import Context, replace_result
from engine.plan import Plan
from engine.problem import Problem
from engine.serving.choice import choose_operators
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import TransformerSizes
from engine.serving.step import ServingStep
from engine.store.problems import problem_from


def verdict(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Is a plan worth it?

    arguments: those of `problem_arguments`, and plan, deployed (a plan too), recordings (digests, with those that the plan was
    made from), thresholds; serving: see `_serving`. Result: a `Judgement` as JSON, nothing of a stopped job.
    """
    problem = problem_from(arguments)
    plan, deployed = (Plan.from_dict(arguments[role], role) for role in ("plan", "deployed"))
    serving = _serving(arguments, problem)
    recordings = [store.load_workload(digest) for digest in arguments["recordings"]]
    thresholds = Thresholds.from_values(arguments["thresholds"])
    context.report(0.0, "judging")
    evidence = evidence_of(plan, problem, recordings, deployed, serving, context.stop, context.report)
    return Judgement(evidence=evidence, thresholds=thresholds).model_dump(mode="json")


def decide_again(job: runner.Job, thresholds: Thresholds) -> None:
    """Decide the verdict of a job by other thresholds, for everybody who looks at it: its evidence stays. Raises InputError
    while the job runs, and where it has no evidence that this version can read."""
    if not job.state.finished:
        raise InputError(f"job {job.id} is still {job.state}: wait for its verdict")
    kept = Judgement.from_dict(job.result, f"job {job.id}")
    replace_result(job.folder, kept.model_copy(update={"thresholds": thresholds}).model_dump(mode="json"))


def redundancy_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """How many spare slots are worth their memory.

    arguments: those of `problem_arguments`, and recordings (digests, the one to plan on first); serving: see `_serving`.
    Result: {"points": [`RedundancyPoint`...], "of" (points in all), "knee" (a `Knee`; None until all points are there),
    "planned_on", "judged_on" (names), "held_out", "limit" (what ends the curve, in words), "unit", "cost_source"}; of a stopped
    or running job those so far.
    """
    problem = problem_from(arguments)
    judge = Judge(problem, _serving(arguments, problem))
    planned, judged, held_out = planned_and_judged([store.load_workload(digest) for digest in arguments["recordings"]])
    result = {
        "points": [],
        "of": len(counts_of(judge)),
        "knee": None,
        "planned_on": planned.name,
        "judged_on": [recording.name for recording in judged],
        "held_out": held_out,
        "limit": most_slots(judge)[1],
        "unit": judge.unit,
        "cost_source": problem.cost_source,
    }
    points = []
    for point in redundancy(judge, planned, judged, Replication(), context.stop, context.report):
        points.append(point)
        result["points"].append(point.to_dict())
        context.keep(result)
    if len(points) == result["of"]:
        result["knee"] = knee(points).model_dump()
    return result


def _serving(arguments: dict[str, Any], problem: Problem) -> Serving | None:
    """The step in which plans are judged, from {"step", "sizes", "config": path of a `config.json` or None}; None: without
    these a pass through the MoE layers is."""
    if (wanted := arguments.get("serving")) is None:
        return None
    step, sizes = (
        kind.from_dict(wanted[role], role) for role, kind in (("step", ServingStep), ("sizes", TransformerSizes))
    )
    gpu = problem.cluster.gpus[0]
    if wanted["config"] is None:
        return Serving(step, RooflineOperators(problem.model, sizes, gpu), sizes)
    source, _ = choose_operators(Path(wanted["config"]), problem.model, sizes, gpu, step)
    return Serving(step, source, sizes)
