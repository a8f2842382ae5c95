"""A whole step of serving under a plan: its MoE layers simulated at the tokens of the step, the other operators timed by a
source of their own.

Two-batch overlap runs one model twice, each on half of a step's tokens, so that one batch computes while the other's tokens
travel (DeepSeek-V3 §3.4; SGLang's two-batch overlap). Every GPU has a stream of computation and one of communication, and
either takes turns: the work before the dispatch (of the first batch, then of the second), then the experts (first, second),
and so on in the next layer; dispatches (first, second), then combines. Unlike in two models of one layer after another
(`engine.simulate.colocated`) only the second batch waits for its own combine, so it travels under the attention of the
first; and exchanges never meet on the network. One starts when every GPU has finished its input, and the next computation
waits until it has ended everywhere.
"""

from dataclasses import dataclass, replace

import numpy as np

from engine.costs.fused_experts import FusedExperts, kernel_table
from engine.errors import InputError
from engine.network import Network
from engine.plan import Plan, SendOrder, TravelUnit
from engine.problem import Problem
from engine.result import Stop, never
from engine.serving.aiconfigurator import AiconfiguratorOperators
from engine.serving.figures import ServingFigures, memory_of
from engine.serving.sizes import TransformerSizes
from engine.serving.step import (
    IN_MOE_LAYERS,
    OUTSIDE_MOE_LAYERS,
    Operator,
    OperatorSource,
    ServingStep,
    load_of_step,
    seconds_of,
)
from engine.simulate.events import EventLog, too_many
from engine.simulate.flows import Flows
from engine.simulate.inference import bound_of_work, bounds_of_exchanges, exchanges, log_model
from engine.simulate.work import Work, work_of
from engine.timeline import INFERENCE_KINDS, Timeline
from engine.workload import RoutingTrace

BATCHES = (0, 1)

HELD_BY_EXCHANGES: dict[TravelUnit, float] = {"copies": 0.0, "gpu": 20 / 132, "node": 20 / 132}
"""Share of a GPU's processors that the kernels of exchanges hold while they run. DeepEP's normal kernels are given 20 of an
H100's or H200's 132 by default, and GEMMs the others; its low-latency kernels hold none while data travels."""


def log_two_batches(log: EventLog, work: Work, dense: float, order: SendOrder, network: Network, stop: Stop = never) -> None:
    """Log the MoE layers of both batches; `model` of an event is the batch.

    work: of one batch
    dense: seconds that every GPU computes for one batch before the router of each layer (attention, normalisation, shared
        experts)
    """
    lane, sent, before = np.zeros(network.gpus), 0.0, np.full(network.gpus, dense)
    combined = [0.0, 0.0]

    def run(kind: str, layer: int, batch: int, seconds: np.ndarray, ready: float = 0.0) -> float:
        """Compute on every GPU, from when it is free, but not before `ready`; the end on the last GPU."""
        nonlocal lane
        start = np.maximum(lane, ready)
        lane = start + seconds
        return log.compute(kind, layer, start, seconds, batch)

    def send(kind: str, layer: int, batch: int, flows: Flows, ready: float) -> float:
        """Exchange once those before it have ended, but not before `ready`; the end on the last GPU."""
        nonlocal sent
        sent = log.network(kind, layer, max(sent, ready), flows, batch)
        return sent

    layers = range(len(work.dispatch))
    for layer, (dispatch, combine) in zip(layers, exchanges(work, order, network, layers, stop), strict=True):
        dispatched = []
        for batch in BATCHES:
            if layer:
                run("aggregate", layer - 1, batch, work.compute["aggregate"][layer - 1], combined[batch])
            run("dense", layer, batch, before)
            fed = run("gate", layer, batch, work.compute["gate"][layer])
            dispatched.append(send("dispatch", layer, batch, dispatch, fed))
        for batch in BATCHES:
            fed = run("ffn", layer, batch, work.compute["ffn"][layer], dispatched[batch])
            combined[batch] = send("combine", layer, batch, combine, fed)
    for batch in BATCHES:
        run("aggregate", layers[-1], batch, work.compute["aggregate"][-1], combined[batch])


def bound_of_two_batches(work: Work, dense: float, network: Network) -> float:
    """Seconds below which no send order brings both batches. Arguments as above.

    The longest of three: every GPU's own computation, which takes turns on it; one batch alone, whose steps wait for one
    another, each exchange at the time of its busiest port; and all exchanges of both, which take turns, after the first
    computation that feeds any.
    """
    steps = work.compute
    carried = sum(bounds_of_exchanges(work, network, kind, Network.relayed_bound) for kind in ("dispatch", "combine"))
    computed = 2 * (dense * len(work.dispatch) + sum(step.sum(axis=0) for step in steps.values()))
    fed = (dense + steps["gate"]).max(axis=1)
    alone = (fed + steps["ffn"].max(axis=1) + steps["aggregate"].max(axis=1) + carried).sum()
    return float(max(computed.max(), alone, fed[0] + 2 * carried.sum() + steps["aggregate"][-1].max()))


@dataclass(frozen=True)
class ServedStep:
    """The figures of a step, and the timeline of its MoE layers; with two batches, of all that takes turns with them."""

    figures: ServingFigures
    timeline: Timeline


def serve(
    plan: Plan, problem: Problem, step: ServingStep, source: OperatorSource, sizes: TransformerSizes, stop: Stop = never
) -> ServedStep:
    """One step of a plan for inference. Raises InputError when the plan does not fit the problem, or follows tokens from layer
    to layer, which data-parallel attention does not."""
    problem.check_plan(plan)
    if problem.second is not None or problem.step is not None:
        raise InputError("a step of serving is of one model's inference; close the second model or the training step")
    if plan.execution != "vanilla":
        raise InputError(
            f"the plan {plan.name} is executed context-coherently, but with data-parallel attention tokens go home after every "
            "layer"
        )
    if len({gpu.type for gpu in problem.cluster.gpus}) > 1:
        raise InputError("a serving step needs GPUs of one type, because attention is timed for one GPU type")
    batches = 2 if step.overlap == "two-batch" else 1
    batch = step.half() if batches == 2 else step
    operators, work = source.operators(batch), work_of_step(plan, problem, batch)
    log = EventLog(problem.network, too_many(*(work.dispatch, work.combine) * batches))
    if batches == 2:
        operators, work = _with_fewer_processors(operators, work)
        # Mean seconds of the operators inside one MoE layer; embedding, head and dense layers have no dispatch to hide
        layers, moe_layers = problem.model.layers, len(problem.model.moe_layers)
        inside = sum(
            operator.seconds / (moe_layers if operator.kind in IN_MOE_LAYERS else layers)
            for operator in operators
            if operator.kind not in OUTSIDE_MOE_LAYERS
        )
        log_two_batches(log, work, inside, plan.send_order, problem.network, stop)
        bound = bound_of_two_batches(work, inside, problem.network)
        operators = tuple(replace(operator, seconds=2 * operator.seconds) for operator in operators)
        outside = seconds_of(operators) - 2 * inside * len(work.dispatch)
    else:
        log_model(log, work, plan.send_order, problem.network, range(len(work.dispatch)), stop=stop)
        bound = float(bound_of_work(work, problem.network, relayed=True).sum())
        outside = seconds_of(operators)
    timeline = log.timeline(problem, plan.travel)
    memory = memory_of(problem.held_bytes(plan.placement), problem.cluster, problem.model, sizes, step)
    # Busy seconds of the MoE steps by kind, of all batches: an all-to-all from its first start to its last end, a computation
    # on the GPU that computes longest
    seconds, events = timeline.seconds_of_kind(), timeline.events
    for kind in ("gate", "ffn", "aggregate"):
        mine = events[events["kind"] == kind]
        longest = (mine["end"] - mine["start"]).groupby([mine["layer"], mine["model"]]).max()
        seconds[kind] = float(longest.sum())
    moe, sources = {kind: seconds[kind] for kind in INFERENCE_KINDS}, (source.source, timeline.cost_source)
    figures = ServingFigures(step, timeline.total + outside, bound + outside, operators, moe, memory, sources)
    return ServedStep(figures, timeline)


def serve_as_measured(
    plan: Plan, problem: Problem, step: ServingStep, source: OperatorSource, sizes: TransformerSizes, stop: Stop = never
) -> ServedStep:
    """`serve` with experts by the measured kernels of the engine that the operators are measured of, if there are some; with
    the datasheet's operators by the problem's own costs."""
    if isinstance(source, AiconfiguratorOperators):
        problem = with_fused_experts(problem, plan, step)
    return serve(plan, problem, step, source, sizes, stop)


def work_of_step(plan: Plan, problem: Problem, step: ServingStep) -> Work:
    """The work of the MoE layers of one batch. Rows that several experts share are counted on the recorded tokens if there are
    some, on any source rank: sequences of a server are on any GPU."""
    at_step = problem.with_workload(load_of_step(problem.workload, step, problem.model, len(problem.cluster.gpus)))
    work = work_of(plan.placement, at_step, plan.execution, plan.travel)
    if plan.travel is None or plan.travel.unit == "copies" or not isinstance(problem.workload, RoutingTrace):
        return work
    trace = replace(problem.workload, sequence=None, source_rank=None)
    recorded = work_of(plan.placement, problem.with_workload(trace), plan.execution, plan.travel)
    copies = trace.load.sum(axis=1)[:, None, None]
    scale = at_step.workload.load.sum(axis=1)[:, None, None] / copies.clip(min=1.0)
    return replace(work, dispatch=recorded.dispatch * scale, combine=recorded.combine * scale)


def with_fused_experts(problem: Problem, plan: Plan, step: ServingStep) -> Problem:
    """The problem with measured fused kernels for its experts if its model and GPUs have them, else as it is."""
    kinds = {gpu.type for gpu in problem.cluster.gpus}
    if any(kernel_table(kind, problem.model, step.phase) is None for kind in kinds):
        return problem
    return replace(problem, cost=FusedExperts(problem.cost, step.phase, float(plan.placement.slots.mean())))


def _with_fewer_processors(operators: tuple[Operator, ...], work: Work) -> tuple[tuple[Operator, ...], Work]:
    """Operators and work that run at the same time as exchanges, with the processors that their kernels leave."""
    longer = 1 / (1 - HELD_BY_EXCHANGES[work.unit])
    operators = tuple(
        operator if operator.kind in OUTSIDE_MOE_LAYERS else replace(operator, seconds=operator.seconds * longer)
        for operator in operators
    )
    return operators, replace(work, compute={kind: seconds * longer for kind, seconds in work.compute.items()})
