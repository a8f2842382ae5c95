"""A problem as plain JSON, for jobs and for saved plans: its recordings stay in the data folder, and go by their
digests."""

from collections.abc import Callable
from typing import Any

from engine.cluster import Cluster
from engine.costs import choice as cost_choice
from engine.goal import Goal
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Placement, Travel
from engine.problem import Problem, make_problem
from engine.schema import Frozen
from engine.store.files import load_workload, save_document, save_workload
from engine.training import TrainingStep
from engine.workload import Workload


def save_inputs(problem: Problem) -> None:
    """Keep a problem's inputs in the data folder, so that later commands need only the plan."""
    for part in (problem, problem.second):
        if part is not None:
            save_workload(part.workload)
            save_document(part.model)
    for document in (problem.cluster, problem.step, problem.graph):
        if document is not None:
            save_document(document)


def save_recordings(problem: Problem) -> None:
    """Put a problem's recordings into the data folder for a job to find them: balanced routing was recorded nowhere."""
    second = () if problem.second is None else (problem.second.workload,)
    for recording in (problem.workload, *problem.others, *second):
        save_workload(recording)


def problem_arguments(problem: Problem) -> dict[str, Any]:
    """A problem as the arguments of a job, which needs its recordings in the data folder, see `save_recordings`."""
    arguments = {
        "workload": problem.workload.digest,
        "cluster": _json(problem.cluster),
        "model": _json(problem.model),
        "others": [other.digest for other in problem.others],
        "cost": cost_choice.to_dict(problem.cost),
    }
    if problem.goal is Goal.TWO_MODELS:
        arguments["second"] = {"workload": problem.second.workload.digest, "model": _json(problem.second.model)}
    for role in ("in_use", "step", "graph", "travel"):
        if (document := getattr(problem, role)) is not None:
            arguments[role] = _json(document)
    return arguments


def _json(document: Frozen) -> dict[str, Any]:
    return document.model_dump(mode="json", exclude_none=True)


def problem_from(arguments: dict[str, Any], recording: Callable[[str], Workload] = load_workload) -> Problem:
    """The problem that `problem_arguments` described. Without a cost, the datasheet's. recording: finds one by its
    digest."""
    second, in_use, step, graph, travel = (
        arguments.get(role) for role in ("second", "in_use", "step", "graph", "travel")
    )
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
        travel and Travel.from_dict(travel, "travel"),
    )
