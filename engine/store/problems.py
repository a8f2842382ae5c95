"""A problem as plain JSON, for jobs and for saved plans: its recordings stay in the data folder, and go by their digests."""

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
from engine.serving.step import ServingStep
from engine.store.files import load_workload, save_document, save_workload
from engine.training import TrainingStep
from engine.workload import Workload


def save_inputs(problem: Problem) -> None:
    """Keep a problem's inputs in the data folder, so that later commands need only the plan."""
    for part in (problem, problem.second):
        if part is not None:
            save_workload(part.workload)
            save_document(part.model)
    for document in (problem.cluster, problem.step, problem.graph, problem.serving_step):
        if document is not None:
            save_document(document)


def save_recordings(problem: Problem) -> None:
    """Put a problem's recordings into the data folder for a job to find them: balanced routing was recorded nowhere."""
    second = () if problem.second is None else (problem.second.workload,)
    for recording in (problem.workload, *problem.others, *second):
        save_workload(recording)


def problem_arguments(problem: Problem) -> dict[str, Any]:
    """A problem as the arguments of a job, which needs its recordings in the data folder, see `save_recordings`."""
    second = (problem.second.workload, problem.second.model) if problem.goal is Goal.TWO_MODELS else None
    roles = ("cluster", "in_use", "step", "graph", "travel", "serving_step")
    documents = {role: getattr(problem, role) for role in roles}
    return input_arguments(problem.workload, problem.model, second, **documents) | {
        "others": [other.digest for other in problem.others],
        "cost": cost_choice.to_dict(problem.cost),
    }


def input_arguments(
    workload: Workload, model: MoEModel, second: tuple[Workload, MoEModel] | None, **documents: Frozen | None
) -> dict[str, Any]:
    """The inputs of a problem or a launch as plain JSON: recordings by digest, documents in full unless they are None."""
    arguments = {"workload": workload.digest, "model": as_json(model)}
    if second is not None:
        arguments["second"] = {"workload": second[0].digest, "model": as_json(second[1])}
    return arguments | {role: as_json(document) for role, document in documents.items() if document is not None}


def inputs_from(arguments: dict[str, Any], recording: Callable[[str], Workload] = load_workload) -> dict[str, Any]:
    """Workload, model, second, cluster and step (None if absent) that `input_arguments` described, as keyword arguments."""
    cluster, second, step = (arguments.get(role) for role in ("cluster", "second", "step"))
    return {
        "workload": recording(arguments["workload"]),
        "model": MoEModel.from_dict(arguments["model"], "model"),
        "second": second and (recording(second["workload"]), MoEModel.from_dict(second["model"], "second model")),
        "cluster": cluster and Cluster.from_dict(cluster, "cluster"),
        "step": step and TrainingStep.from_dict(step, "training step"),
    }


def as_json(document: Frozen) -> dict[str, Any]:
    """A document as plain JSON."""
    return document.model_dump(mode="json", exclude_none=True)


def problem_from(arguments: dict[str, Any], recording: Callable[[str], Workload] = load_workload) -> Problem:
    """The problem that `problem_arguments` described. Without a cost, the datasheet's. recording: finds one by its digest."""
    in_use, graph, travel, served = (arguments.get(role) for role in ("in_use", "graph", "travel", "serving_step"))
    return make_problem(
        **inputs_from(arguments, recording),
        cost=cost_choice.from_dict(arguments.get("cost", {"source": "datasheet"})),
        others=tuple(recording(digest) for digest in arguments.get("others", [])),
        in_use=in_use and Placement.from_dict(in_use, "placement in use"),
        graph=graph and OperatorGraph.from_dict(graph, "operator graph"),
        travel=travel and Travel.from_dict(travel, "travel"),
        serving_step=served and ServingStep.from_dict(served, "serving step"),
    )
