"""Whether a plan that comes in or goes out keeps the rules. What it breaks is one line that says what and where.

Fast enough for every door: whole layers at a time, and nothing is simulated (`check_plan` recomputes a plan's time too).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.cluster import Cluster, any_gpus
from engine.costs import Datasheet
from engine.errors import IllegalError, InputError
from engine.goal import Goal
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem, make_problem
from engine.provenance import has_inputs_of
from engine.simulate.training import check_step_parts, graph_of
from engine.simulate.training.pricing import expert_groups
from engine.simulate.work import traffic_both_ways, work_of
from engine.training import TrainingStep
from engine.validate.joint_order import check_joint_order
from engine.validate.schedules import (
    Ports,
    Sends,
    between_nodes,
    check_bytes,
    check_durations,
    check_listing,
    check_matching,
    check_names,
    check_sends,
    node_ports,
)
from engine.workload import Workload


def refuse_broken(plan: Plan, problem: Problem, source: str = "", drawn: bool = True) -> None:
    """Raise InputError, one line that says what and where, unless the plan is legal on the problem.

    Always checked: sizes, memory, that sends leave their GPU in the order of their phases, that a phase of a matched or
    two-tier order is a matching, and what a training step cuts and moves. A plan may be tried on another recording than it was
    made for, which its orders then carry scaled; so that their bytes are the traffic's is checked where recording and model
    are the plan's own, and that its phases are long enough where cluster and costs are too.

    source: where the plan comes from, such as a file's name; its own name unless given
    drawn: whether the problem's cluster is one that was drawn, or only stands for so many GPUs of any kind
    """
    problem.check_plan(plan)
    problem = problem.as_planned(plan)
    try:
        for part in _parts(plan, problem):
            _check_layers(part, plan, problem)
            _check_order(part, plan, problem, drawn)
        if plan.send_order.mode == "joint":
            known = _knows_cluster(plan, problem, drawn)
            timed = known and has_inputs_of(plan, problem, ("cluster", "cost"))
            check_joint_order(plan, problem.network if known else None, timed)
        if problem.goal is Goal.TRAINING:
            check_step_parts(plan, problem, graph_of(problem, expert_groups(plan.placement)))
    except (IllegalError, InputError) as error:
        raise InputError(f"{source or f'the plan {plan.name}'}: {error}") from None


def refuse_broken_launch(
    plans: Sequence[Plan],
    workload: Workload,
    model: MoEModel,
    cluster: Cluster | None = None,
    second: tuple[Workload, MoEModel] | None = None,
    step: TrainingStep | None = None,
    sources: Sequence[str] = (),
) -> None:
    """Raise InputError, see `refuse_broken`, unless all plans of a launch, which are for as many GPUs, are legal. Whether they
    fit the drawn GPUs is not asked of plans for another cluster: they run on ranks.

    cluster: as drawn, where the launch knows it; sources: where each plan comes from
    """
    gpus = plans[0].placement.gpus
    problems = {False: make_problem(workload, any_gpus(gpus), model, Datasheet(), second, step=step)}
    if cluster is not None and len(cluster.gpus) == gpus:
        problems[True] = make_problem(workload, cluster, model, Datasheet(), second, step=step)
    for plan, source in zip(plans, sources or [""] * len(plans), strict=True):
        drawn = True in problems and plan.provenance.inputs.get("cluster", cluster.digest) == cluster.digest
        refuse_broken(plan, problems[drawn], source, drawn)


@dataclass(frozen=True, eq=False)
class _Part:
    """What a plan says of one of its models. problem: that model's own; inputs: roles of its recording and model among the
    plan's inputs; whose: how a message about it begins."""

    problem: Problem
    placement: Placement
    order: SendOrder
    inputs: tuple[str, str]
    whose: str = ""


def _parts(plan: Plan, problem: Problem) -> Iterator[_Part]:
    yield _Part(problem, plan.placement, plan.send_order, ("workload", "model"))
    if plan.goal is Goal.TWO_MODELS:
        inputs = ("workload_b", "model_b")
        yield _Part(problem.second, plan.placement_b, plan.send_order_b, inputs, "second model, ")


def _check_layers(part: _Part, plan: Plan, problem: Problem) -> None:
    """A placement for this very model is of the model's own MoE layers."""
    if not has_inputs_of(plan, problem, part.inputs[1:]):
        return
    for layer, (said, own) in enumerate(zip(part.placement.model_layers, part.problem.model.moe_layers, strict=True)):
        if said != own:
            raise IllegalError(f"{part.whose}layer {layer} is said to be model layer {said}, but the model's is {own}")


def _check_order(part: _Part, plan: Plan, problem: Problem, drawn: bool) -> None:
    mode, placement = part.order.mode, part.placement
    if mode == "concurrent":
        return
    known = _knows_cluster(plan, problem, drawn)
    phased, tiers = mode in ("matched", "joint", "shared", "two-tier"), mode == "two-tier"
    timed = phased and drawn and has_inputs_of(plan, problem, ("cluster", "cost"))
    # Costs decide how fast ports are, but not which there are; where the plan was made with others, they need not know any.
    network = problem.network if timed else Network.of(problem.cluster)
    own = problem.goal is not Goal.TRAINING and has_inputs_of(plan, problem, part.inputs)
    traffic = _traffic(part, plan) if own else None
    for kind, schedules in (("dispatch", part.order.dispatch), ("combine", part.order.combine)):
        for layer, schedule in enumerate(schedules):
            sends = Sends.of(schedule)
            ports = Ports(*network.ports(sends.src, sends.dst), network.capacity) if known else None
            if tiers:  # what a node is, is known only of the plan's own cluster, but never has one of them two peers
                ports = node_ports(sends, network)
            try:
                check_sends(sends)
                if tiers and known:
                    check_names(sends, network)
                if phased:
                    check_listing(sends)
                if mode in ("matched", "joint", "two-tier"):
                    check_matching(sends, ports)
                if traffic is not None and (known or not tiers):
                    carried = between_nodes(traffic[kind][layer], network) if tiers else traffic[kind][layer]
                    _check_carried(sends, carried, bool(placement.slots[layer].sum() > placement.experts))
                if timed:
                    check_durations(sends, mode, ports)
            except IllegalError as error:
                raise IllegalError(f"{part.whose}layer {layer}, {kind}: {error}") from None


def _knows_cluster(plan: Plan, problem: Problem, drawn: bool) -> bool:
    return drawn and plan.provenance.inputs.get("cluster", problem.cluster.digest) == problem.cluster.digest


def _check_carried(sends: Sends, traffic: np.ndarray, replicated: bool) -> None:
    try:
        check_bytes(sends, traffic)
    except IllegalError as error:
        shares = "; replicas take equal shares of their expert's tokens" if replicated else ""
        raise IllegalError(f"{error}{shares}") from None


def _traffic(part: _Part, plan: Plan) -> dict[str, np.ndarray]:
    """float64[layer, src, dst] bytes of `dispatch` and `combine`."""
    if plan.execution == "vanilla":
        return dict(
            zip(("dispatch", "combine"), traffic_both_ways(part.placement, part.problem, plan.travel), strict=True)
        )
    work = work_of(part.placement, part.problem, plan.execution, plan.travel)
    return {"dispatch": work.dispatch, "combine": work.combine}
