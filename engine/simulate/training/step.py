"""The predicted timeline of a training step: every group of alike GPUs computes, all share one network."""

import numpy as np
import pandas as pd

from engine.errors import InputError
from engine.overlap.operator_graph import Operator
from engine.plan import Plan
from engine.problem import Problem
from engine.simulate.streams import COMPUTE, run_streams
from engine.simulate.training.pricing import PricedStep, price_step
from engine.simulate.training.program import Program, program_of
from engine.simulate.training.routing import expert_groups
from engine.timeline import KINDS, STREAMS, Timeline
from engine.workload import RoutingTrace

FORWARD_KINDS = {
    "gate": "gate",
    "dispatch": "dispatch",
    "experts": "ffn",
    "combine": "combine",
    "aggregate": "aggregate",
}


def simulate_step(plan: Plan, problem: Problem) -> Timeline:
    """The timeline of one training step. Raises InputError when the plan does not fit the problem."""
    problem.check_plan(plan)
    _check_replicas(plan, problem)
    irregular = plan.overlap is not None and plan.overlap.irregular
    # Capacity cuts give equal parts; whole sequences give parts as they were recorded.
    recorded = irregular and problem.step.routing == "recorded" and isinstance(problem.workload, RoutingTrace)
    cuts = {stretch.parts for stretch in plan.overlap.ranges} if recorded and problem.graph is None else ()
    priced = price_step(problem, plan.placement, irregular, as_recorded=tuple(cuts))
    program = program_of(plan, problem, priced)
    start, end = run_streams(program.tasks, plan.priority.policy)
    return _timeline(program, priced, start, end, problem)


def _check_replicas(plan: Plan, problem: Problem) -> None:
    """Gradients of replicated experts have to be summed up, which is only known how to for groups of GPUs."""
    if plan.placement.single:
        return
    if problem.graph is not None:
        raise InputError(
            f"the plan {plan.name} holds experts several times, but the operator graph has each of them once"
        )
    if expert_groups(plan.placement) == 1:
        raise InputError(
            f"the plan {plan.name} holds experts several times, but not in groups of neighbouring GPUs that hold each once"
        )


def _timeline(program: Program, priced: PricedStep, start: np.ndarray, end: np.ndarray, problem: Problem) -> Timeline:
    task, group = np.nonzero(end > start)
    operators = priced.graph.operators
    kinds = np.array(
        [KINDS.index("all_reduce" if place < 0 else event_kind(operators[place])) for place in program.operators]
    )
    layers = np.array([operators[place].layer if place >= 0 else -1 for place in program.operators])
    network = program.tasks.stream != COMPUTE
    streams = np.where(network, STREAMS.index("network"), STREAMS.index("compute"))
    events = pd.DataFrame(
        {
            "resource": group,
            "stream": pd.Categorical.from_codes(streams[task], categories=list(STREAMS)),
            "start": start[task, group],
            "end": end[task, group],
            "kind": pd.Categorical.from_codes(kinds[task], categories=list(KINDS)),
            "layer": layers[task],
            "model": 0,
            "peer": -1,
            "bytes": np.where(network, program.sent, 0.0)[task],
        }
    )
    names = problem.cluster.gpu_names
    lanes = tuple(_lane(names, members) for members in priced.groups)
    labels = tuple(program.labels[index] for index in task)
    measured = "; operators with measured times count as measured" if problem.graph is not None else ""
    return Timeline(events, lanes, "simulated", problem.cost_source + measured, labels)


def event_kind(operator: Operator) -> str:
    """The kind of event that an operator is on a timeline."""
    if operator.network:
        return operator.kind
    if operator.phase in ("dx", "dw"):
        return operator.phase
    return FORWARD_KINDS.get(operator.kind, "dense")


def _lane(names: tuple[str, ...], members: tuple[int, ...]) -> str:
    """`GPU 0 · A100-80`, with how many others do the same."""
    alike = len(members) - 1
    return names[members[0]] + (f" and {alike} like it" if alike else "")
