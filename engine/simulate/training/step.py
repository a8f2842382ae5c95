"""The predicted timeline of a training step, on which every group of alike GPUs computes and all share one network; and the
bytes that it keeps in every GPU's memory."""

import numpy as np
import pandas as pd

from engine.errors import InputError
from engine.model import MoEModel
from engine.overlap.operator_graph import Operator
from engine.overlap.transformer import transformer_step
from engine.plan import Offload, Placement, Plan, expert_groups
from engine.problem import Problem
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, COMPUTE, run_streams
from engine.simulate.training.offload import state_bytes
from engine.simulate.training.pricing import PricedStep, price_step
from engine.simulate.training.program import Program, program_of
from engine.timeline import KINDS, SIZES, STREAMS, Timeline
from engine.training import served_in_words
from engine.workload import RoutingTrace

FORWARD_KINDS = {"experts": "ffn"} | {kind: kind for kind in ("gate", "dispatch", "combine", "aggregate")}


def step_seconds(plan: Plan, problem: Problem) -> float:
    """Seconds of one training step, for plans that differ in a few parts of which all are known to fit the problem."""
    return float(_run(plan, problem, known=True)[3].max(initial=0.0))


def simulate_step(plan: Plan, problem: Problem) -> Timeline:
    """The timeline of one training step. Raises InputError when the plan does not fit the problem."""
    problem.check_plan(plan)
    _check_replicas(plan, problem)
    priced, program, start, end = _run(plan, problem)
    task, group = np.nonzero(end > start)
    operators = priced.graph.operators
    streams = program.tasks.stream
    kind_of = [
        event_kind(operators[place]) if place >= 0 else "all_reduce" if stream == ALL_REDUCE else "host_copy"
        for place, stream in zip(program.operators.tolist(), streams.tolist(), strict=True)
    ]
    for exchange in program.sizes.values():
        kind_of[exchange] = SIZES
    layers = np.array([operators[place].layer if place >= 0 else -1 for place in program.operators])
    layers[list(program.copied)] = list(program.copied.values())
    lane = np.select([streams == COMPUTE, np.isin(streams, (ALL_TO_ALL, ALL_REDUCE))], ["compute", "network"], "host")
    stream = pd.Categorical(lane[task], categories=list(STREAMS))
    times = {"start": start[task, group], "end": end[task, group]}
    about = {"kind": pd.Categorical(np.array(kind_of)[task], categories=list(KINDS)), "layer": layers[task]}
    sent = {"model": 0, "peer": -1, "bytes": np.where(streams != COMPUTE, program.sent, 0.0)[task]}
    events = pd.DataFrame({"resource": group, "stream": stream} | times | about | sent)
    names = problem.cluster.gpu_names
    alike = (len(members) - 1 for members in priced.groups)
    firsts = [names[members[0]] for members in priced.groups]
    lanes = tuple(f"{first} and {more} like it" if more else first for first, more in zip(firsts, alike, strict=True))
    labels = tuple(program.labels[index] for index in task)
    measured = "; operators with measured times count as measured" if problem.graph is not None else ""
    served = served_in_words(problem.step, problem.workload) if priced.uneven else None
    source = problem.cost_source + measured + (f"; {served}" if served else "")
    return Timeline(events, lanes, "simulated", source, labels)


def _run(plan: Plan, problem: Problem, known: bool = False) -> tuple[PricedStep, Program, np.ndarray, np.ndarray]:
    """The prices, the tasks, and the start and end of each, float64[task, group]. known: see `program_of`"""
    irregular = plan.overlap is not None and plan.overlap.irregular
    # Capacity cuts give equal parts; whole sequences give parts as they were recorded.
    recorded = irregular and problem.step.routing == "recorded" and isinstance(problem.workload, RoutingTrace)
    cuts = {stretch.parts for stretch in plan.overlap.ranges} if recorded and problem.graph is None else ()
    priced = price_step(problem, plan.placement, irregular, as_recorded=tuple(sorted(cuts)), offload=plan.offload)
    program = program_of(plan, problem, priced, known)
    return priced, program, *run_streams(program.tasks, plan.priority.policy)


def _check_replicas(plan: Plan, problem: Problem) -> None:
    """Gradients of replicated experts have to be summed up, which is only known how to for groups of GPUs."""
    if plan.placement.single:
        return
    if problem.graph is not None:
        raise InputError(f"the plan {plan.name} holds experts several times, but the operator graph has each of them once")
    if expert_groups(plan.placement) == 1:
        raise InputError(
            f"the plan {plan.name} holds experts several times, but not in groups of neighbouring GPUs that hold each once"
        )


def event_kind(operator: Operator) -> str:
    """The kind of event that an operator is on a timeline."""
    if operator.network:
        return operator.kind
    if operator.phase in ("dx", "dw"):
        return operator.phase
    return FORWARD_KINDS.get(operator.kind, "dense")


def bytes_per_parameter(model: MoEModel) -> float:
    """Bytes of weight and gradient in the model's numbers, and for SGD with momentum a momentum in 32 bits, plus a copy of the
    weight in 32 bits if the model's numbers are shorter."""
    number = model.bytes_per_number
    return 2 * number + 4 + (4 if number < 4 else 0)


def step_state_bytes(problem: Problem, placement: Placement, offload: Offload | None = None) -> np.ndarray:
    """float64[gpu]: bytes of weights, gradients and momentum; activations depend on recomputation and do not count."""
    model = problem.model
    graph = problem.graph or transformer_step(model, problem.step, len(problem.cluster.gpus))
    dense = sum(operator.parameters for operator in graph.of_phase("forward") if operator.kind != "experts")
    if problem.graph is None and problem.step.tied_embeddings:
        dense -= problem.step.vocabulary * model.d_model
    per_expert, number = model.bytes_per_expert / model.bytes_per_number, model.bytes_per_number
    return state_bytes(placement.slots, dense, per_expert, offload, number, bytes_per_parameter(model))
