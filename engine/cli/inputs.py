"""The inputs that options name: recordings, models, clusters, costs, and the problem that they form."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine import formats, store
from engine.cli.arguments import BALANCED
from engine.cluster import Cluster
from engine.costs import AlphaBeta, CostModel, CostProfile, Datasheet, DeepEP, MeasuredTimes, Profiled, Silicon, combine
from engine.errors import InputError
from engine.formats.checks import check_recording
from engine.formats.placements import Deployed, PlanFile, exflow, open_plan_file
from engine.goal import Goal
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Plan, Travel
from engine.problem import Problem, make_problem
from engine.serving.step import ServingStep, recording_of_step
from engine.training import TrainingStep, balanced_load, usual_step
from engine.validate import refuse_broken
from engine.workload import RoutingTrace, Workload


def read_recording(file: str, model: MoEModel | None = None) -> Workload:
    """A recording by FILE or FILE::NAME, checked against the model if there is one; `balanced` is assumed routing in which all
    experts are equally popular."""
    if file == BALANCED and model is not None:
        return balanced_load(model)
    path, member = formats.split_member(file)
    with store.scratch() as folder:
        if model is None:
            return formats.read_workload(path, member=member, scratch=folder)
        sizes = {"num_experts": model.experts, "bytes_per_token": model.bytes_per_token}
        return formats.read_workload(path, member=member, model=model, scratch=folder, **sizes)


def read_cost(options: argparse.Namespace, cluster: Cluster) -> CostModel:
    """The sources of --cost, or the datasheet: computation and network each from the first source that has it for the
    cluster."""
    if len(options.cost) > 2:
        raise InputError("--cost may be given twice at most: for computation and for the network")
    return combine({name: _cost_source(name) for name in options.cost}, cluster)


def _cost_source(name: str) -> CostModel:
    if name in (tables := {"datasheet": Datasheet, "silicon": Silicon, "deepep": DeepEP}):
        return tables[name]()
    costs = formats.read_costs(Path(name))
    for note in (costs.notes or ()) if isinstance(costs, MeasuredTimes) else ():
        print(f"note: {Path(name).name}: {note}", file=sys.stderr)
    return AlphaBeta(costs) if isinstance(costs, CostProfile) else Profiled(costs)


def inputs_of(options: argparse.Namespace, plan: Plan) -> tuple[MoEModel, Workload]:
    """Model and workload from the options, or those that the plan was made from."""
    inputs = plan.provenance.inputs
    model = formats.read_model(options.model) if options.model else store.load_document(MoEModel, inputs.get("model", ""))
    workload = read_recording(options.workload, model) if options.workload else store.load_workload(inputs.get("workload", ""))
    return model, workload


def plans_and_problem(options: argparse.Namespace, paths: list[Path]) -> tuple[list[Plan], Problem]:
    """The legal plans of these files, and the problem to try them on.

    A serving engine's file, and the words `linear` and `round-robin`, do not know their inputs: the options must name them,
    unless another of the plans does. Raises InputError for a plan that breaks a rule.
    """
    files = {path: open_plan_file(path) for path in paths}
    plans = {path: file.plan for path, file in files.items() if file.plan is not None}
    if plans:
        problem = problem_of(options, next(iter(plans.values())))
    elif options.workload and options.cluster and options.model:
        model, cluster = formats.read_model(options.model), formats.read_cluster(options.cluster)
        problem = make_problem(read_recording(options.workload, model), cluster, model, read_cost(options, cluster))
    else:
        raise InputError(f"{paths[0].name}: a bare placement needs --workload, --cluster and --model beside it")
    for path in paths:
        plans[path] = _travelling(plans.get(path) or placed_by(files[path], problem), options, problem.cluster)
        refuse_broken(plans[path], problem, path.name)
    return [plans[path] for path in paths], problem


def _travelling(plan: Plan, options: argparse.Namespace, cluster: Cluster) -> Plan:
    """The plan with the travel of --travel, if that is given."""
    if not options.travel or (travel := read_travel(options).on_nodes(cluster.node_sizes)) == (plan.travel or Travel()):
        return plan
    if plan.send_order.mode != "concurrent" or plan.goal is Goal.TRAINING:
        raise InputError(
            f"--travel {options.travel}: the plan {plan.name} orders its sends for tokens that travel otherwise; plan again "
            "with this --travel"
        )
    return plan.with_parts(travel=travel, claim=None)


def placed_by(file: PlanFile, problem: Problem) -> Plan:
    """The deployed placement as a plan: all sends at once; with ExFlow's execution if it is ExFlow's table and the recording
    has tokens."""
    from engine.compare.baseline import plan_of_placement  # which imports every system

    deployed = deployed_for(file, problem.model, len(problem.cluster.gpus))
    follows = deployed.format == exflow.FORMAT and isinstance(problem.workload, RoutingTrace)
    return plan_of_placement(deployed.placement, file.path.stem, "context-coherent" if follows else "vanilla")


def bare_plan(file: PlanFile, model: MoEModel, gpus: int) -> Plan:
    """As `placed_by`, for a model that runs its own tokens: all sends at once."""
    from engine.compare.baseline import plan_of_placement  # which imports every system

    return plan_of_placement(deployed_for(file, model, gpus).placement, file.path.stem)


def deployed_for(file: PlanFile, model: MoEModel, gpus: int) -> Deployed:
    """The placement of a plan file; its notes go to standard error."""
    deployed = file.deployed(model, gpus)
    for note in deployed.notes:
        print(f"note: {file.path.name}: {note}", file=sys.stderr)
    return deployed


def new_problem(options: argparse.Namespace) -> Problem:
    """The problem that the options of `plan` name."""
    if options.workload_b and (options.also or options.in_use):
        raise InputError("--also and --in-use are for plans of one model; leave them out, or leave out --workload-b")
    model, cluster = formats.read_model(options.model), formats.read_cluster(options.cluster)
    if not options.workload and not options.training:
        raise InputError("--workload is missing: name the recording to plan for")
    at_step = _at_step(options, model, cluster)
    problem = make_problem(
        at_step(read_recording(options.workload, model) if options.workload else balanced_load(model)),
        cluster,
        model,
        read_cost(options, cluster),
        second=read_second(options, model),
        others=tuple(at_step(read_recording(file, model)) for file in options.also),
        travel=read_travel(options),
        serving_step=formats.read_document(ServingStep, options.serving) if options.serving else None,
        **read_step(options, model, cluster),
    )
    for recording in (problem.workload, *problem.others):
        for finding in check_recording(recording, model):
            if finding.severity == "error":
                print(f"warning: {recording.name}: {finding.message}", file=sys.stderr)
    if not options.in_use:
        return problem
    return replace(problem, in_use=deployed_for(open_plan_file(options.in_use), model, len(cluster.gpus)).placement)


def _at_step(options: argparse.Namespace, model: MoEModel, cluster: Cluster) -> Callable[[Workload], Workload]:
    """A function that brings recordings to the tokens of the step of --serving; without one it returns them as they are."""
    if not options.serving:
        return lambda recording: recording
    if options.training or options.workload_b:
        raise InputError("--serving is for inference of one model; leave it out, or leave out --training and --workload-b")
    step = formats.read_document(ServingStep, options.serving)
    return lambda recording: recording_of_step(recording, step, model, len(cluster.gpus))


def read_travel(options: argparse.Namespace) -> Travel | None:
    """The travel of --travel; None if it is left out."""
    if not options.travel:
        return None
    parts = options.travel.split(":")
    if len(parts) > 4:
        raise InputError(
            f"--travel {options.travel}: write UNIT, UNIT:OUT, UNIT:OUT:BACK or UNIT:OUT:BACK:COPIES, as in node:fp8:bf16"
        )
    names = zip(("unit", "dispatch", "combine", "replicas"), parts, strict=False)
    return Travel.from_dict({name: part for name, part in names if part}, f"--travel {options.travel}")


def read_step(options: argparse.Namespace, model: MoEModel, cluster: Cluster) -> dict[str, TrainingStep | OperatorGraph]:
    """The `step` and `graph` of a problem that the options name."""
    documents: dict[str, TrainingStep | OperatorGraph] = {}
    if options.training == "usual":
        step = usual_step(model, len(cluster.gpus))
        documents["step"] = step.model_copy(update={"routing": "recorded"}) if options.workload else step
    elif options.training:
        documents["step"] = formats.read_document(TrainingStep, Path(options.training))
    if options.graph:
        documents["graph"] = formats.read_document(OperatorGraph, options.graph)
    return documents


def problem_of(options: argparse.Namespace, plan: Plan) -> Problem:
    """The problem from the options; they default to the plan's own inputs."""
    model, workload = inputs_of(options, plan)
    cluster = cluster_of(options, plan)
    inputs, second = plan.provenance.inputs, second_of(options, plan, model)
    step = read_step(options, model, cluster)
    own = () if options.workload else (("serving_step", ServingStep),)  # another recording is as it was recorded
    for role, kind in (("step", TrainingStep), ("graph", OperatorGraph), *own):
        if role not in step and role in inputs:
            step[role] = store.load_document(kind, inputs[role])
    return make_problem(workload, cluster, model, read_cost(options, cluster), second, **step)


def cluster_of(options: argparse.Namespace, plan: Plan) -> Cluster:
    """The cluster from the options, or the one that the plan was made for."""
    if options.cluster:
        return formats.read_cluster(options.cluster)
    return store.load_document(Cluster, plan.provenance.inputs.get("cluster", ""))


def drawn_cluster(options: argparse.Namespace, plan: Plan) -> Cluster | None:
    """As `cluster_of`; None if the options name no cluster and the plan's is not known here."""
    with contextlib.nullcontext() if options.cluster else contextlib.suppress(InputError):
        return cluster_of(options, plan)
    return None


def step_of(options: argparse.Namespace, plan: Plan, model: MoEModel) -> TrainingStep | None:
    """The training step of a plan, from the options or its own inputs; None for a plan for inference."""
    if plan.goal is not Goal.TRAINING:
        if options.training:
            raise InputError(f"the plan {plan.name} is for inference; leave out --training")
        return None
    if options.training == "usual":
        return usual_step(model, plan.placement.gpus)
    if options.training:
        return formats.read_document(TrainingStep, Path(options.training))
    return store.load_document(TrainingStep, plan.provenance.inputs.get("step", ""))


def second_of(options: argparse.Namespace, plan: Plan, model: MoEModel) -> tuple[Workload, MoEModel] | None:
    """Recording and model of a plan's second model, from the options or those that the plan was made from."""
    inputs = plan.provenance.inputs
    if options.workload_b or options.model_b:
        remembered = plan.goal is Goal.TWO_MODELS and not options.model_b
        return read_second(options, store.load_document(MoEModel, inputs.get("model_b", "")) if remembered else model)
    if plan.goal is not Goal.TWO_MODELS:
        return None
    return store.load_workload(inputs.get("workload_b", "")), store.load_document(MoEModel, inputs.get("model_b", ""))


def read_second(options: argparse.Namespace, model: MoEModel) -> tuple[Workload, MoEModel] | None:
    """Recording and model of the second model, if one is given; it is `model` unless the options name another."""
    if not options.workload_b:
        if options.model_b:
            raise InputError("--model-b needs the second model's recording too (--workload-b)")
        return None
    if len(options.workload_b) > 1:
        raise InputError(
            f"{len(options.workload_b) + 1} models on one cluster: a GPU is shared by two models at most; plan them in pairs, "
            "each pair on GPUs of its own"
        )
    second = formats.read_model(options.model_b) if options.model_b else model
    return read_recording(options.workload_b[0], second), second


def split_setting(text: str, flag: str = "--set") -> tuple[str, str]:
    """The KEY and the VALUE of KEY=VALUE. flag: the option, for messages"""
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{flag} {text}: write KEY=VALUE")
    return key, value
