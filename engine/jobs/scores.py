"""Jobs that make many plans and score each on several recordings: the front, the cross-workload score, and Lina's
scheduler for several path lengths."""

from dataclasses import asdict
from typing import Any

import numpy as np

from engine import store
from engine.compare.comparison import candidate_of_plan
from engine.compare.figures import metrics
from engine.errors import InputError, StoppedError
from engine.jobs.protocol import Context
from engine.parallel import in_order
from engine.placement.joint.front import USUAL_SECONDS, FrontPoint, front
from engine.placement.joint.instance import JointInstance
from engine.placement.joint.rows import RowsInstance, with_starts
from engine.plan import Claim, Plan, SendOrder
from engine.problem import Problem
from engine.provenance import input_digests
from engine.result import GUARD, Limits, Provenance, Status, Stop, library_versions
from engine.simulate import bound_of_plan, loads_of, simulate
from engine.simulate.two_phase import SCHEMES, TwoPhaseOptions, two_phase
from engine.store.problems import problem_from
from engine.systems import SYSTEMS, System, run
from engine.systems.base import Draft, Report
from engine.systems.joint import START_SHARE, instance_of, moves_left, moves_to, start_of
from engine.systems.options import Value
from engine.systems.pieces import to_placement
from engine.workload import RoutingTrace


def find_front(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Placements of which none is better in both affinity (hops, or rows where they are shared) and balance, as plans.

    arguments: those of `problem_arguments`, points, over ("worst" or "mean"), max_moves (0: any), time_limit (seconds).
    Result: {"candidates": [...]} from the fewest hops to the best balance (of a stopped or running job those found so far);
    each also has `plan_id`, `moves`, and `weight`, `kept_share` and `balancedness` as the search counts them, and `rows`, those
    that a token sends in a layer, where they are what counts (else None).
    """
    problem = problem_from(arguments)
    instance, points, start = instance_of(problem), int(arguments["points"]), start_of(problem)
    left = moves_left(problem, start, int(arguments["max_moves"]))
    time_limit, initial = float(arguments["time_limit"]), ()
    wall_limit = time_limit * (GUARD if time_limit == USUAL_SECONDS else 1.0)
    # By the identity of the point, which the search hands out once more at the end.
    candidates: dict[int, dict[str, Any]] = {}

    def add(point: FrontPoint) -> None:
        candidates[id(point)] = _point(point, instance, problem, arguments)
        context.keep({"candidates": list(candidates.values())})
        context.report(
            min(len(candidates) / points, 1.0), f"{len(candidates)} of at most {points} placements", None, None
        )

    context.report(0.0, "searching from both ends")
    if isinstance(instance, RowsInstance):
        instance, initial = with_starts(
            instance, Limits(START_SHARE * time_limit, wall=START_SHARE * wall_limit, seed=0), context.stop
        )
        time_limit, wall_limit = (1 - START_SHARE) * time_limit, (1 - START_SHARE) * wall_limit
    final = front(
        instance,
        Limits(time_limit, wall=wall_limit),
        context.stop,
        report=add,
        points=points,
        workloads=arguments["over"],
        start=start,
        max_moves=left,
        initial=initial,
    )
    for point in final:
        # Simulating what is not known yet would keep whoever cancelled waiting.
        if id(point) not in candidates and not context.stop():
            candidates[id(point)] = _point(point, instance, problem, arguments)
    return {"candidates": [candidates[id(point)] for point in final if id(point) in candidates]}


def _point(point: FrontPoint, instance: JointInstance, problem: Problem, arguments: dict[str, Any]) -> dict[str, Any]:
    placement = to_placement(point.gpu_of_expert, problem)
    options = {"weight": float(point.weight), "over": arguments["over"], "max_moves": int(arguments["max_moves"])}
    provenance = Provenance(
        optimiser="front", options=options, versions=library_versions(), inputs=input_digests(problem)
    )
    plan = Draft(placement, SendOrder(mode="concurrent")).plan(
        f"Front at {point.weight:.2f}", provenance, problem.travel
    )
    loads = loads_of(plan, problem)
    timeline = simulate(plan, problem, loads=loads)
    seconds = timeline.total
    bound = min(bound_of_plan(plan, problem, loads=loads), seconds)
    claim = Claim(status=Status.FEASIBLE, objective=seconds, bound=bound, scope="order")
    plan = plan.model_copy(update={"claim": claim})
    return candidate_of_plan(plan, problem, 0.0, {}, timeline, loads) | {
        "plan_id": plan.id,
        "weight": float(point.weight),
        "kept_share": float(point.kept_share),
        "rows": _rows_a_token(point, instance, arguments["over"]),
        "balancedness": float(point.balancedness),
        "moves": moves_to(point.gpu_of_expert, problem),
    }


def _rows_a_token(point: FrontPoint, instance: JointInstance, over: str) -> float | None:
    """Of the recording that sends most, or on average over those with tokens; None where hops count."""
    if not isinstance(instance, RowsInstance):
        return None
    rows = instance.rows_a_token(point.gpu_of_expert)[instance.tokens > 0]
    return float(rows.max() if over == "worst" else rows.mean())


def score_matrix(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """One system run on every recording, and every plan simulated on every recording.

    arguments: those of `problem_arguments` without others; system, options; recordings: digests. Result: names of the
    recordings, and seconds, balancedness, kept_local and overload (`Balance.factors`): [plan made on][scored on], None where
    not reached yet; kept after every score.
    """
    problem = problem_from(arguments)
    recordings = [store.load_workload(digest) for digest in arguments["recordings"]]
    problems = [problem.with_workload(recording) for recording in recordings]
    count, system = len(problems), SYSTEMS[arguments["system"]]
    tables = {
        name: [[None] * count for _ in problems] for name in ("seconds", "balancedness", "kept_local", "overload")
    }
    answer = {"names": [recording.name for recording in recordings], "system": system.title} | tables
    context.keep(answer)

    def begun(finished: int, index: int) -> None:
        context.report(finished / count, f"{system.title} on {recordings[index].name}")

    for made_on, plan in in_order(_plan_on, (problems, system, arguments["options"]), count, context.stop, begun):
        # Its own recording first: the others are compared with that.
        for scored_on in sorted(range(count), key=lambda index: index != made_on):
            if context.stop():
                break
            figures = metrics(plan, problems[scored_on])
            for name, score in (
                ("seconds", figures.total),
                ("balancedness", figures.balancedness),
                ("kept_local", figures.kept_local),
                ("overload", figures.balance.factors),
            ):
                tables[name][made_on][scored_on] = score
            context.keep(answer)
    return answer


def _plan_on(common: tuple[list[Problem], System, dict[str, Value]], index: int, stop: Stop, report: Report) -> Plan:
    """The plan made on a recording."""
    problems, system, options = common
    return run(system, problems[index], options, stop).result.solution


def lina_study(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Lina's two phases for several path lengths (Table 5, Figures 16 and 19).

    arguments: those of `problem_arguments`; profile: digest of the recording to learn from, None: the first half of the
    open one, and then the second half is served; lengths; options: fields of `TwoPhaseOptions`. Result: runs, one per
    path length, each with its options, figures by scheme, accuracy as set and in order (also by layer) and tuning rate.
    """
    problem = problem_from(arguments)
    trace = problem.workload
    if not isinstance(trace, RoutingTrace):
        raise InputError(f"{trace.name} has no tokens whose paths could predict anything; use a routing log")
    profile, served = trace.halves()
    if arguments.get("profile"):
        profile, served = store.load_workload(arguments["profile"]), trace
        if not isinstance(profile, RoutingTrace):
            raise InputError(
                f"{profile.name} has no tokens whose paths could predict anything; learn from a routing log"
            )
    runs: list[dict[str, Any]] = []
    lengths = [length for length in arguments["lengths"] if length < trace.layers]
    if not lengths:
        raise InputError(f"{trace.layers} layers are too few: choose a path length below {trace.layers}")

    def begun(finished: int, index: int) -> None:
        context.report(finished / len(lengths), f"path length {lengths[index]}")

    common = (
        problem.with_workload(served),
        profile,
        [TwoPhaseOptions(path_length=length, **arguments["options"]) for length in lengths],
    )
    for _, run_of_length in in_order(_lina_run, common, len(lengths), context.stop, begun):
        if run_of_length is None:
            continue
        runs.append(run_of_length)
        context.keep({"runs": runs, "profile": profile.name, "served": served.name})
    return {"runs": runs, "profile": profile.name, "served": served.name}


def _lina_run(
    common: tuple[Problem, RoutingTrace, list[TwoPhaseOptions]], index: int, stop: Stop, report: Report
) -> dict[str, Any] | None:
    """The figures of a path length; None when stopped before a batch was simulated."""
    problem, profile, choices = common
    try:
        result = two_phase(problem, profile, choices[index], stop)
    except StoppedError:
        return None
    layers = result.accuracy_of_layer("set")
    return {
        "options": asdict(choices[index]),
        "batches": result.batches,
        "cost_source": result.cost_source,
        "figures": {scheme: asdict(result.figures(scheme)) for scheme in SCHEMES},
        "accuracy": result.accuracy("set"),
        "accuracy_in_order": result.accuracy("order"),
        "accuracy_of_layer": [None if value != value else float(value) for value in layers],
        "fine_tuning_rate": result.fine_tuning_rate,
        "ideal_seconds": float(np.median(result.inference_seconds("ideal"))),
    }
