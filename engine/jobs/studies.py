"""Jobs that study plans rather than make one to use. Arguments and results are plain JSON."""

from collections.abc import Iterable
from typing import Any

from engine import store
from engine.cluster import Node
from engine.compare.affinity import SEEDS, OutOfDistribution, TokensEnough, out_of_distribution, tokens_enough
from engine.compare.capacity import capacity
from engine.compare.contention import CONTENTIONS, contention_curve, most_saved, ordered, pays_from
from engine.compare.imprecision import imprecision
from engine.compare.sensitivity import curve, is_simulated, parameters_of, seconds_of, sensitivity
from engine.compare.sweep import sweep, trials_of
from engine.compare.what_if import Change, changed
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs.protocol import Context
from engine.plan import Claim, Plan
from engine.result import Status
from engine.simulate import bound_of_plan, loads_of, simulate
from engine.store.problems import problem_from
from engine.systems import run, systems_for
from engine.workload import RoutingTrace


def affinity_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """How many tokens an affinity plan needs, and whether it holds on other recordings.

    arguments: workload (digest), others (digests), gpus, first_choice; optional sizes, seeds, time_limit (seconds per plan).
    Result: {"tokens": TokensEnough or None, "others": OutOfDistribution or None}, as far as they got, each by `to_dict`.
    """
    traces = [_trace(digest) for digest in (arguments["workload"], *arguments["others"])]
    common = {
        "gpus": arguments["gpus"],
        "first_choice": arguments["first_choice"],
        "stop": context.stop,
        "time_limit": arguments.get("time_limit"),
    }
    result: dict[str, Any] = {"tokens": None, "others": None}
    # A plan of the second study takes as long as one of the first, which makes about a dozen.
    part = 12 / (12 + len(traces))

    def on_sample(study: TokensEnough) -> None:
        result["tokens"] = study.to_dict()
        context.keep(result)

    def on_plan(study: OutOfDistribution) -> None:
        result["others"] = study.to_dict()
        context.keep(result)

    context.report(0.0, "planning from samples of tokens")
    study = tokens_enough(
        traces[0],
        sizes=arguments.get("sizes"),
        seeds=arguments.get("seeds", SEEDS),
        report=lambda done, message: context.report(part * done, message),
        on_point=on_sample,
        **common,
    )
    result["tokens"] = study.to_dict()
    if not context.stop():
        study = out_of_distribution(
            traces,
            report=lambda done, message: context.report(part + (1 - part) * done, message),
            on_point=on_plan,
            **common,
        )
        result["others"] = study.to_dict()
    return result


def sweep_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """One parameter of a plan for a training step, swept.

    arguments: those of `problem_arguments`, and sweep: {"kind", "values", "settings"}, see `trials_of`. Result:
    {"candidates": [...], "of": trials in all, "cost_source"}; each candidate is a plan as `optimise` keeps it, without
    metrics, and has its figures as `point`, a `SweepPoint`. Of a stopped or running job: those that were run to their end.
    """
    problem, wanted = problem_from(arguments), arguments["sweep"]
    trials = trials_of(problem, wanted["kind"], wanted["values"], wanted["settings"])
    result: dict[str, Any] = {"candidates": [], "of": len(trials), "cost_source": problem.cost_source}
    for point, outcome in sweep(problem, trials, context.stop, context.report):
        plan = outcome.result.solution
        result["candidates"].append(
            {
                "plan": plan.model_dump(mode="json", exclude_none=True),
                "status": plan.claim.status.value,
                "runtime": outcome.result.runtime,
                "notes": {about: note._asdict() for about, note in outcome.notes.items()},
                "point": point.to_dict(),
            }
        )
        context.keep(result)
    return result


def sensitivity_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """How a plan's time answers to a little less and a little more of everything.

    arguments: those of `problem_arguments`, plan, share. Result: {"points": [`SensitivityPoint`...], "of", "share", "total"
    (seconds as things are), "plan" (its name), "simulated", "cost_source"}; of a stopped or running job the points so far.
    """
    problem, plan = problem_from(arguments), Plan.from_dict(arguments["plan"], "plan")
    parameters, share = parameters_of(problem), arguments["share"]
    result = {
        "points": [],
        "of": len(parameters),
        "share": share,
        "total": seconds_of(plan, problem),
        "plan": plan.name,
        "simulated": is_simulated(problem),
        "cost_source": problem.cost_source,
    }
    return _collect(sensitivity(plan, problem, share, parameters, context.stop, context.report), result, context)


def curve_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Plans over a whole range of one change.

    arguments: those of `problem_arguments`, plans, field, values; system (name, None: nothing is planned anew) and options.
    Result: {"points": [`CurvePoint`...], "field", "series" (names of the plans), "of" (points in all), "simulated",
    "cost_source"}; of a stopped or running job those so far.
    """
    problem, field, values = problem_from(arguments), arguments["field"], arguments["values"]
    plans = [Plan.from_dict(plan, "plan") for plan in arguments["plans"]]
    names = {
        plan.name if turn == 0 or plan.name != plans[0].name else f"{plan.name} {plan.id[:8]}": plan
        for turn, plan in enumerate(plans)
    }
    system = arguments["system"]
    anew = (systems_for(problem)[system], arguments["options"]) if system else None
    result = {
        "points": [],
        "field": field,
        "series": list(names),
        "of": len(set(values)) * (len(names) + bool(anew)),
        "simulated": is_simulated(problem),
        "cost_source": problem.cost_source,
    }
    return _collect(curve(problem, field, values, names, anew, context.stop, context.report), result, context)


def contention_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """From which contention on ordering pays for a plan's placement.

    arguments: those of `problem_arguments`, plan. Result: {"points": [`ContentionPoint`...], "of", "pays_from" (a contention,
    None: at none of the points, or not known yet), "most_saved" (share, see there; None until there is a point), "plan" (its
    name), "cost_source"}; of a stopped or running job those so far.
    """
    problem, plan = problem_from(arguments), Plan.from_dict(arguments["plan"], "plan")
    result = {
        "points": [],
        "of": len(CONTENTIONS),
        "pays_from": None,
        "most_saved": None,
        "plan": plan.name,
        "cost_source": problem.cost_source,
    }
    context.report(0.0, "ordering sends")
    plans = ordered(plan, problem, context.stop)
    points = []
    for point in contention_curve(problem, plans, stop=context.stop, report=context.report):
        points.append(point)
        result["points"].append(point.to_dict())
        if result["most_saved"] is None:
            result["most_saved"] = most_saved(plan, problem, point.seconds["concurrent"])
        context.keep(result)
    if len(points) == len(CONTENTIONS):
        result["pays_from"] = pays_from(points, problem, plans)
    return result


def imprecision_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Aurora and its baselines planned on traffic that is not quite what comes.

    arguments: those of `problem_arguments`, levels, seeds, noise; optional options (of the systems, by name). Result:
    {"points": [`ImprecisionPoint`...], "noise", "levels", "seeds", "cost_source"}; of a stopped or running job those so far.
    """
    problem, wanted = problem_from(arguments), {name: arguments[name] for name in ("levels", "seeds", "noise")}
    result = {"points": [], "cost_source": problem.cost_source} | wanted
    points = imprecision(problem, **wanted, options=arguments.get("options"), stop=context.stop, report=context.report)
    return _collect(points, result, context)


def capacity_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """How many equal parts a cluster must have for a target time.

    arguments: those of `problem_arguments`, part (nodes), title (the part in words), target (seconds), sizes (numbers of
    parts), system, options. Result: {"points": [`CapacityPoint`...] in the order in which they were tried, "target", "title",
    "system", "sizes", "cost_source"}; of a stopped or running job those so far.
    """
    problem = problem_from(arguments)
    part = [Node.from_dict(node, f"node {place}") for place, node in enumerate(arguments["part"])]
    result = {"points": [], "cost_source": problem.cost_source} | {
        name: arguments[name] for name in ("target", "title", "system", "sizes")
    }
    points = capacity(
        problem,
        part,
        arguments["target"],
        arguments["sizes"],
        arguments["system"],
        arguments["options"],
        context.stop,
        context.report,
    )
    return _collect(points, result, context)


def _collect(points: Iterable[Any], result: dict[str, Any], context: Context) -> dict[str, Any]:
    """The result with every point as it comes, kept so that whoever watches sees it."""
    context.keep(result)
    for point in points:
        result["points"].append(point.to_dict())
        context.keep(result)
    return result


def replan(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """A system run for what would be open after a change.

    arguments: those of `problem_arguments`, change, system, options, parent (id of the plan that it may replace). Result:
    {"candidates": [one], "change"}: the plan as `optimise` keeps it, without metrics; its claim is what it takes on what is
    open now, and `point` has its id, its seconds after the change and the least that its optimiser proved there.
    """
    problem, change = problem_from(arguments), Change.from_dict(arguments["change"], "change")
    system = systems_for(problem)[arguments["system"]]
    context.report(0.0, f"{system.title} for {change.in_words}")
    outcome = run(system, changed(problem, change), arguments["options"], context.stop, context.report)
    solution = outcome.result.solution
    plan = solution.model_copy(
        update={"parent": arguments["parent"], "name": f"{solution.name}, {change.in_words}"[:120]}
    )
    loads = loads_of(plan, problem)
    now = simulate(plan, problem, loads=loads).total
    scope = "schedule" if problem.goal is Goal.TRAINING else "order"
    claim = Claim(
        status=Status.FEASIBLE, objective=now, bound=min(now, bound_of_plan(plan, problem, loads=loads)), scope=scope
    )
    plan = plan.model_copy(update={"claim": claim})
    candidate = {
        "plan": plan.model_dump(mode="json", exclude_none=True),
        "status": claim.status.value,
        "runtime": outcome.result.runtime,
        "notes": {about: note._asdict() for about, note in outcome.notes.items()},
        "point": {"plan_id": plan.id, "seconds": outcome.result.objective, "bound": outcome.result.bound},
    }
    return {"candidates": [candidate], "change": arguments["change"]}


def _trace(digest: str) -> RoutingTrace:
    recording = store.load_workload(digest)
    if not isinstance(recording, RoutingTrace):
        raise InputError(f"{recording.name} has no tokens that can be followed from layer to layer; use a routing log")
    return recording
