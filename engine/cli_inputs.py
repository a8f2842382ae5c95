"""What the command line's options name: recordings, models, clusters, costs, and the problem they make."""

import argparse

from engine import formats, store
from engine.cluster import Cluster
from engine.costs import AlphaBeta, CostModel, Datasheet
from engine.errors import InputError
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.workload import Workload


def read_recording(file: str, model: MoEModel | None = None) -> Workload:
    """A recording by FILE or FILE::NAME, checked against the model's experts when there is a model."""
    path, member = formats.split_member(file)
    if model is None:
        return formats.read_workload(path, member=member)
    return formats.read_workload(path, member=member, num_experts=model.experts, bytes_per_token=model.bytes_per_token)


def read_cost(given: argparse.Namespace) -> CostModel:
    """The profile given by --cost, or the datasheet."""
    if not given.cost:
        return Datasheet()
    return AlphaBeta(formats.read_cost_profile(given.cost))


def inputs_of(given: argparse.Namespace, made: Plan) -> tuple[MoEModel, Workload]:
    """Model and workload from the options, or those that the plan was made from."""
    known = made.provenance.inputs
    model = formats.read_model(given.model) if given.model else store.load_document(MoEModel, known.get("model", ""))
    workload = (
        read_recording(given.workload, model) if given.workload else store.load_workload(known.get("workload", ""))
    )
    return model, workload


def new_problem(given: argparse.Namespace) -> Problem:
    """The problem that `plan`'s options name."""
    model = formats.read_model(given.model)
    return make_problem(
        read_recording(given.workload, model), formats.read_cluster(given.cluster), model, read_cost(given),
        second=read_second(given, model),
        others=tuple(read_recording(file, model) for file in given.also),
        in_use=formats.read_plan(given.in_use).placement if given.in_use else None,
    )  # fmt: skip


def problem_of(given: argparse.Namespace, made: Plan) -> Problem:
    """The problem from the options, with what they leave open taken from the plan's own inputs."""
    model, workload = inputs_of(given, made)
    digest = made.provenance.inputs.get("cluster", "")
    cluster = formats.read_cluster(given.cluster) if given.cluster else store.load_document(Cluster, digest)
    second = read_second(given, model)
    if second is None and made.placement_b is not None:
        known = made.provenance.inputs
        second = (
            store.load_workload(known.get("workload_b", "")), store.load_document(MoEModel, known.get("model_b", ""))
        )  # fmt: skip
    return make_problem(workload, cluster, model, read_cost(given), second)


def read_second(given: argparse.Namespace, model: MoEModel) -> tuple[Workload, MoEModel] | None:
    """Recording and model of the second model, where one is given."""
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
    store.save_document(problem.cluster)


def split_setting(text: str) -> tuple[str, str]:
    """KEY=VALUE as (KEY, VALUE)."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set {text}: write KEY=VALUE")
    return key, value
