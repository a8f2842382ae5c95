"""Jobs that study plans rather than make one to use. Arguments and results are plain JSON."""

from typing import Any

from engine import store
from engine.errors import InputError
from engine.jobs.protocol import Context
from engine.jobs.tasks import problem_from
from engine.studies.affinity import SEEDS, OutOfDistribution, TokensEnough, out_of_distribution, tokens_enough
from engine.studies.sweep import sweep, trials_of
from engine.workload import RoutingTrace


def affinity_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """How many tokens an affinity plan needs, and whether it holds on other recordings.

    arguments: workload (digest), others (digests), gpus, first_choice; optional sizes, seeds, time_limit (seconds a plan).
    Result: {"tokens": TokensEnough or None, "others": OutOfDistribution or None}, as far as they got, each by `to_dict`.
    """
    traces = [_trace(digest) for digest in (arguments["workload"], *arguments["others"])]
    common = {
        "gpus": arguments["gpus"], "first_choice": arguments["first_choice"], "stop": context.stop,
        "time_limit": arguments.get("time_limit"),
    }  # fmt: skip
    result: dict[str, Any] = {"tokens": None, "others": None}
    # A plan of the second study takes as long as one of the first, which makes about a dozen.
    part = 12 / (12 + len(traces))

    def on_sample(found: TokensEnough, done: float) -> None:
        result["tokens"] = found.to_dict()
        context.keep(result)
        context.report(
            part * done, f"planned from {found.points[-1].tokens if found.points else found.held_out:,} tokens"
        )

    def on_plan(found: OutOfDistribution, done: float) -> None:
        result["others"] = found.to_dict()
        context.keep(result)
        context.report(part + (1 - part) * done, f"planned on {found.names[len(found.kept) - 1]}")

    context.report(0.0, "planning from samples of tokens")
    found = tokens_enough(
        traces[0], sizes=arguments.get("sizes"), seeds=arguments.get("seeds", SEEDS), on_point=on_sample, **common
    )
    result["tokens"] = found.to_dict()
    if not context.stop():
        result["others"] = out_of_distribution(traces, on_point=on_plan, **common).to_dict()
    return result


def sweep_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """One parameter of a plan for a training step, swept.

    arguments: those of `problem_arguments`, and sweep: {"kind", "values", "settings"}, see `trials_of`. Result:
    {"candidates": [...], "of": trials in all, "cost_source"}; each candidate is a plan as `optimise` keeps it, without
    metrics, and has its figures as `point`, a `SweepPoint`. Of a stopped or running job: those that were run to their end.
    """
    problem, wanted = problem_from(arguments), arguments["sweep"]
    trials = trials_of(problem, wanted["kind"], wanted["values"], wanted["settings"])
    result: dict[str, Any] = {"candidates": [], "of": len(trials), "cost_source": problem.cost.source}
    for point, outcome in sweep(problem, trials, context.stop, context.report):
        plan = outcome.result.solution
        result["candidates"].append({
            "plan": plan.model_dump(mode="json", exclude_none=True), "status": plan.claim.status.value,
            "runtime": outcome.result.runtime, "notes": {about: note._asdict() for about, note in outcome.notes.items()},
            "point": point.to_dict(),
        })  # fmt: skip
        context.keep(result)
    return result


def _trace(digest: str) -> RoutingTrace:
    recording = store.load_workload(digest)
    if not isinstance(recording, RoutingTrace):
        raise InputError(f"{recording.name} has no tokens that can be followed from layer to layer; use a routing log")
    return recording
