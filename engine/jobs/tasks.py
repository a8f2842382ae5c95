"""Jobs that plan. Arguments and results are plain JSON."""

import contextlib
from collections.abc import Callable
from typing import Any

from engine import store
from engine.cluster import Cluster
from engine.costs import choice as cost_choice
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs.protocol import Context
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Placement, Plan
from engine.problem import Problem, make_problem
from engine.schema import Frozen
from engine.simulate.metrics import metrics, simulation_digest
from engine.systems import SYSTEMS, TRAINING, Outcome, run
from engine.systems.base import Notes
from engine.timeline import Timeline
from engine.training import TrainingStep
from engine.workload import Workload

LONG = 20_000
"""Events of a timeline that is kept, so that no page has to simulate it again; one with fewer takes about a second."""


def problem_arguments(problem: Problem) -> dict[str, Any]:
    """A problem as the arguments of a job, which needs its recordings in the data folder, see `save_recordings`."""
    found = {
        "workload": problem.workload.digest,
        "cluster": _json(problem.cluster),
        "model": _json(problem.model),
        "others": [other.digest for other in problem.others],
        "cost": cost_choice.to_dict(problem.cost),
    }
    if problem.goal is Goal.TWO_MODELS:
        found["second"] = {"workload": problem.second.workload.digest, "model": _json(problem.second.model)}
    for role in ("in_use", "step", "graph"):
        if (document := getattr(problem, role)) is not None:
            found[role] = _json(document)
    return found


def save_recordings(problem: Problem) -> None:
    """Put a problem's recordings into the data folder, where a job finds them: balanced routing was recorded nowhere."""
    second = () if problem.second is None else (problem.second.workload,)
    for recording in (problem.workload, *problem.others, *second):
        store.save_workload(recording)


def _json(document: Frozen) -> dict[str, Any]:
    return document.model_dump(mode="json", exclude_none=True)


def problem_from(arguments: dict[str, Any], recording: Callable[[str], Workload] = store.load_workload) -> Problem:
    """The problem that `problem_arguments` described. Without a cost, the datasheet's. recording: finds one by its digest."""
    second, in_use, step, graph = (arguments.get(role) for role in ("second", "in_use", "step", "graph"))
    return make_problem(
        recording(arguments["workload"]),
        Cluster.from_dict(arguments["cluster"], "cluster"),
        MoEModel.from_dict(arguments["model"], "model"),
        cost_choice.from_dict(arguments.get("cost", {"source": "datasheet"})),
        second and (recording(second["workload"]), MoEModel.from_dict(second["model"], "second model")),
        tuple(recording(digest) for digest in arguments.get("others", [])),
        in_use and Placement.from_dict(in_use, "placement in use"),
        step and TrainingStep.from_dict(step, "training step"),
        graph and OperatorGraph.from_dict(graph, "operator graph"),
    )


def optimise(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Run systems one after another.

    arguments: those of `problem_arguments`, and systems: [{name, options}]. Result: {"candidates": [candidate...]}, see
    `candidate`, and {"refused": {title: reason}} of the systems that cannot plan for this. Raises InputError when none can.
    """
    problem = problem_from(arguments)
    wanted, registry = arguments["systems"], TRAINING if problem.goal is Goal.TRAINING else SYSTEMS
    found: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for index, choice in enumerate(wanted):
        system = registry[choice["name"]]
        fastest = min((one["metrics"]["total"] for one in found), default=None)

        def report(done, message, incumbent=None, bound=None, index=index, system=system, fastest=fastest) -> None:
            best = min((value for value in (incumbent, fastest) if value is not None), default=None)
            context.report((index + done) / len(wanted), f"{system.title}: {message}", best, bound)

        report(0.0, "started")
        try:
            outcome = run(system, problem, choice.get("options", {}), context.stop, report)
        except InputError as error:
            if len(wanted) == 1:
                raise
            refused[system.title] = str(error)
            continue
        found.append(candidate(outcome, problem))
        context.keep({"candidates": found, "refused": refused})
        if len(outcome.timeline.events) > LONG:
            with contextlib.suppress(InputError):  # a full disk: pages simulate it again
                store.save_timeline(simulation_digest(outcome.result.solution, problem), outcome.timeline)
        if context.stop():
            break
    if refused and not found:
        raise InputError(next(iter(refused.values())))
    return {"candidates": found, "refused": refused}


def candidate(outcome: Outcome, problem: Problem) -> dict[str, Any]:
    """One row of the candidate table: the plan, what its optimiser says and what the simulation says."""
    result = outcome.result
    return candidate_of_plan(result.solution, problem, result.runtime, outcome.notes, outcome.timeline)


def candidate_of_plan(plan: Plan, problem: Problem, runtime: float, notes: Notes, timeline: Timeline) -> dict[str, Any]:
    """The same of a plan that has a claim; runtime: seconds that its optimiser took; timeline: the simulated one."""
    return {
        "plan": plan.model_dump(mode="json", exclude_none=True),
        "status": plan.claim.status.value,
        "proof": plan.claim.proof,
        "runtime": runtime,
        "notes": {about: note._asdict() for about, note in notes.items()},
        "metrics": metrics(plan, problem, timeline).to_dict(),
    }
