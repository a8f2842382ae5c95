"""What the command line's options name: recordings, models, clusters, costs, and the problem they make."""

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path

from engine import formats, store
from engine.cluster import Cluster
from engine.costs import AlphaBeta, CostModel, CostProfile, Datasheet, Profiled, Silicon, combine
from engine.errors import InputError
from engine.formats.exflow import read_placement
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem, make_problem
from engine.result import Provenance
from engine.training import TrainingStep, balanced_load, usual_step
from engine.validate import refuse_broken
from engine.workload import RoutingTrace, Workload


def read_recording(file: str, model: MoEModel | None = None) -> Workload:
    """A recording by FILE or FILE::NAME, checked against the model's experts when there is a model."""
    path, member = formats.split_member(file)
    if model is None:
        return formats.read_workload(path, member=member)
    return formats.read_workload(path, member=member, num_experts=model.experts, bytes_per_token=model.bytes_per_token)


def read_cost(given: argparse.Namespace, cluster: Cluster) -> CostModel:
    """What --cost names, or the datasheet: computation and network each from the first that has it for the cluster."""
    if len(given.cost) > 2:
        raise InputError("--cost may be given twice at most: for computation and for the network")
    return combine({name: _cost_source(name) for name in given.cost}, cluster)


def _cost_source(name: str) -> CostModel:
    if name in ("datasheet", "silicon"):
        return Datasheet() if name == "datasheet" else Silicon()
    found = formats.read_costs(Path(name))
    return AlphaBeta(found) if isinstance(found, CostProfile) else Profiled(found)


def inputs_of(given: argparse.Namespace, made: Plan) -> tuple[MoEModel, Workload]:
    """Model and workload from the options, or those that the plan was made from."""
    known = made.provenance.inputs
    model = formats.read_model(given.model) if given.model else store.load_document(MoEModel, known.get("model", ""))
    workload = (
        read_recording(given.workload, model) if given.workload else store.load_workload(known.get("workload", ""))
    )
    return model, workload


def plans_and_problem(given: argparse.Namespace, paths: list[Path]) -> tuple[list[Plan], Problem]:
    """The plans of these files, none of which breaks a rule, and the problem they are to be tried on. A .csv is a placement
    as ExFlow saves it, which knows nothing of what it was made from, so that the options must say it unless a plan beside it
    does."""
    plans = {path: formats.read_plan(path) for path in paths if path.suffix.lower() != ".csv"}
    if plans:
        problem = problem_of(given, next(iter(plans.values())))
    elif given.workload and given.cluster and given.model:
        model, cluster = formats.read_model(given.model), formats.read_cluster(given.cluster)
        problem = make_problem(read_recording(given.workload, model), cluster, model, read_cost(given, cluster))
    else:
        raise InputError(f"{paths[0].name}: a bare placement needs --workload, --cluster and --model beside it")
    for path in paths:
        plans[path] = plans.get(path) or placed_by(path, problem)
        refuse_broken(plans[path], problem, path.name)
    return [plans[path] for path in paths], problem


def placed_by(path: Path, problem: Problem) -> Plan:
    """ExFlow's placement file as a plan, executed as ExFlow does where the recording has tokens to follow."""
    gpus = len(problem.cluster.gpus)
    rows = read_placement(path, problem.workload.num_experts, gpus)
    placement = Placement.from_gpu_of_expert(rows, gpus, tuple(range(len(rows))))
    if placement.layers == len(problem.model.moe_layers):
        placement = placement.model_copy(update={"model_layers": problem.model.moe_layers})
    follows = isinstance(problem.workload, RoutingTrace)
    return Plan(
        name=path.stem[:120],
        placement=placement,
        send_order=SendOrder(mode="concurrent"),
        execution="context-coherent" if follows else "vanilla",
        provenance=Provenance(optimiser="file"),
    )


def new_problem(given: argparse.Namespace) -> Problem:
    """The problem that `plan`'s options name."""
    if given.workload_b and (given.also or given.in_use):
        raise InputError("--also and --in-use are for plans of one model; leave them out, or leave out --workload-b")
    model, cluster = formats.read_model(given.model), formats.read_cluster(given.cluster)
    if not given.workload and not given.training:
        raise InputError("--workload is missing: name the recording to plan for")
    problem = make_problem(
        read_recording(given.workload, model) if given.workload else balanced_load(model),
        cluster,
        model,
        read_cost(given, cluster),
        second=read_second(given, model),
        others=tuple(read_recording(file, model) for file in given.also),
        **read_step(given, model, cluster),
    )
    if not given.in_use:
        return problem
    csv = given.in_use.suffix.lower() == ".csv"
    deployed = placed_by(given.in_use, problem) if csv else formats.read_plan(given.in_use)
    return replace(problem, in_use=deployed.placement)


def read_step(given: argparse.Namespace, model: MoEModel, cluster: Cluster) -> dict[str, TrainingStep | OperatorGraph]:
    """`step` and `graph` of a problem, as far as the options name them."""
    found: dict[str, TrainingStep | OperatorGraph] = {}
    if given.training == "usual":
        step = usual_step(model, len(cluster.gpus))
        found["step"] = step.model_copy(update={"routing": "recorded"}) if given.workload else step
    elif given.training:
        found["step"] = formats.read_document(TrainingStep, Path(given.training))
    if given.graph:
        found["graph"] = formats.read_document(OperatorGraph, given.graph)
    return found


def problem_of(given: argparse.Namespace, made: Plan) -> Problem:
    """The problem from the options, with what they leave open taken from the plan's own inputs."""
    model, workload = inputs_of(given, made)
    digest = made.provenance.inputs.get("cluster", "")
    cluster = formats.read_cluster(given.cluster) if given.cluster else store.load_document(Cluster, digest)
    known, second = made.provenance.inputs, second_of(given, made, model)
    step = read_step(given, model, cluster)
    for role, kind in (("step", TrainingStep), ("graph", OperatorGraph)):
        if role not in step and role in known:
            step[role] = store.load_document(kind, known[role])
    return make_problem(workload, cluster, model, read_cost(given, cluster), second, **step)


def drawn_cluster(given: argparse.Namespace, made: Plan) -> Cluster | None:
    """The cluster from the options, or the one that the plan was made for; None where it is not known here."""
    if given.cluster:
        return formats.read_cluster(given.cluster)
    with contextlib.suppress(InputError):
        return store.load_document(Cluster, made.provenance.inputs.get("cluster", ""))
    return None


def step_of(given: argparse.Namespace, made: Plan, model: MoEModel) -> TrainingStep | None:
    """The training step that a plan is for, from the options or as it was planned; None of a plan for inference."""
    if made.priority is None:
        if given.training:
            raise InputError(f"the plan {made.name} is for inference; leave out --training")
        return None
    if given.training == "usual":
        return usual_step(model, made.placement.gpus)
    if given.training:
        return formats.read_document(TrainingStep, Path(given.training))
    return store.load_document(TrainingStep, made.provenance.inputs.get("step", ""))


def second_of(given: argparse.Namespace, made: Plan, model: MoEModel) -> tuple[Workload, MoEModel] | None:
    """Recording and model of a plan's second model, from the options or those that the plan was made from."""
    known = made.provenance.inputs
    if given.workload_b or given.model_b:
        remembered = made.placement_b is not None and not given.model_b
        return read_second(given, store.load_document(MoEModel, known.get("model_b", "")) if remembered else model)
    if made.placement_b is None:
        return None
    return store.load_workload(known.get("workload_b", "")), store.load_document(MoEModel, known.get("model_b", ""))


def read_second(given: argparse.Namespace, model: MoEModel) -> tuple[Workload, MoEModel] | None:
    """Recording and model of the second model, where one is given; `model` is its model unless the options name one."""
    if not given.workload_b:
        if given.model_b:
            raise InputError("--model-b needs the second model's recording too (--workload-b)")
        return None
    if len(given.workload_b) > 1:
        raise InputError(
            f"{len(given.workload_b) + 1} models on one cluster: a GPU is shared by two models at most; plan them in pairs, "
            "each pair on GPUs of its own"
        )
    second = formats.read_model(given.model_b) if given.model_b else model
    return read_recording(given.workload_b[0], second), second


def remember(problem: Problem) -> None:
    """Keep the inputs in the data folder, so that later commands need only the plan."""
    for one in (problem, problem.second):
        if one is not None:
            store.save_workload(one.workload)
            store.save_document(one.model)
    for document in (problem.cluster, problem.step, problem.graph):
        if document is not None:
            store.save_document(document)


def split_setting(text: str) -> tuple[str, str]:
    """KEY=VALUE as (KEY, VALUE)."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set {text}: write KEY=VALUE")
    return key, value
