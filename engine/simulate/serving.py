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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd

from engine.cluster import Cluster
from engine.costs.fused_experts import FusedExperts, kernel_table
from engine.errors import InputError
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Plan, SendOrder, TravelUnit
from engine.problem import MEMORY_SHARE, Problem
from engine.result import Floats, Ints, Stop, never
from engine.serving.aiconfigurator import AiconfiguratorOperators
from engine.serving.figures import ServingFigures, bytes_beside_experts, memory_of, sequences_of_types
from engine.serving.sizes import TransformerSizes
from engine.serving.step import (
    IN_MOE_LAYERS,
    OUTSIDE_MOE_LAYERS,
    Operator,
    Operators,
    OperatorsOfTypes,
    OperatorSource,
    ServingStep,
    by_kind,
    deal,
    load_of_step,
    seconds_of,
    sources_of,
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


def log_two_batches(log: EventLog, work: Work, dense: Floats, order: SendOrder, network: Network, stop: Stop = never) -> None:
    """Log the MoE layers of both batches; `model` of an event is the batch.

    work: of one batch
    dense: float64[gpu] seconds that a GPU computes for one batch before the router of each layer (attention, normalisation,
        shared experts)
    """
    lane, sent = np.zeros(network.gpus), 0.0
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
            run("dense", layer, batch, dense)
            fed = run("gate", layer, batch, work.compute["gate"][layer])
            dispatched.append(send("dispatch", layer, batch, dispatch, fed))
        for batch in BATCHES:
            fed = run("ffn", layer, batch, work.compute["ffn"][layer], dispatched[batch])
            combined[batch] = send("combine", layer, batch, combine, fed)
    for batch in BATCHES:
        run("aggregate", layers[-1], batch, work.compute["aggregate"][-1], combined[batch])


def bound_of_two_batches(work: Work, dense: Floats, network: Network) -> float:
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
class Serving:
    """A step of serving, and times and sizes of the operators around its MoE layers."""

    step: ServingStep
    source: Operators
    sizes: TransformerSizes

    def seconds(self, plan: Plan, problem: Problem, stop: Stop = never) -> float:
        """Seconds of the step under a plan. Raises InputError as `serve` does."""
        return self.served(plan, problem, stop).figures.seconds

    def served(self, plan: Plan, problem: Problem, stop: Stop = never) -> "ServedStep":
        """The step under a plan. Raises InputError as `serve` does."""
        return serve_as_measured(plan, problem, self.step, self.source, self.sizes, stop)

    def dealt(self, problem: Problem, plan: Plan | None = None) -> Ints:
        """int64[gpu]: sequences in the step under a plan, or where it is not known yet."""
        held = None if plan is None else problem.held_bytes(plan.placement)
        return dealt_by_speed(problem, self.step, self.source, self.sizes, held)

    def bytes_beside(self, problem: Problem, plan: Plan | None = None) -> Floats:
        """float64[gpu]: bytes besides experts: all other weights, and keys and values of its sequences."""
        others, *each = bytes_beside_experts(problem.model, self.sizes, self.step)
        return others + self.dealt(problem, plan) * sum(each)


@dataclass(frozen=True)
class ServedStep:
    """The figures of a step, and the timeline of its MoE layers; with two batches, of all that takes turns with them."""

    figures: ServingFigures
    timeline: Timeline

    def whole(self, model: MoEModel) -> Timeline:
        """The timeline of the whole step: before every MoE layer the attention and the other operators of the layer on every
        GPU, of which all wait for the busiest; before the first one the embedding and the dense layers, and after the last one
        the head. With two batches only what stands outside the layers is added."""
        events, gpus = self.timeline.events, len(self.timeline.resources)
        layers = int(events["layer"].max()) + 1 if len(events) else 0
        alike = around_layers(self.figures.operators, model, layers)
        first, each, last = np.array(self.figures.around or [alike] * gpus).T
        outside, busiest = max(self.figures.seconds - self.timeline.total, 0.0), int((first + last).argmax())
        head, inside = min(outside, last[busiest]), 0.0
        if self.figures.step.overlap == "none" and layers:
            inside = min(each.max(), (outside - head) / layers)
        begin = max(outside - head - inside * layers, 0.0)
        shift = begin + inside * (events["layer"].to_numpy() + 1)
        moved = events.assign(start=events["start"] + shift, end=events["end"] + shift)
        log, ready = EventLog(), moved.groupby("layer")["start"].min()
        # Between two steps GPUs wait once, for the one with the longest end and beginning together: no part is drawn longer.
        log.compute("dense", 0, 0.0, np.minimum(first, begin))
        for layer in range(layers if inside else 0):
            log.compute("dense", layer, float(ready[layer]) - inside, np.minimum(each, inside))
        log.compute("dense", max(layers - 1, 0), begin + inside * layers + self.timeline.total, np.minimum(last, head))
        every = pd.concat([log.frame(), moved]).sort_values(["start", "end"], kind="stable", ignore_index=True)
        return replace(self.timeline, events=every[list(events.columns)].astype(events.dtypes), labels=None)


def serve(
    plan: Plan,
    problem: Problem,
    step: ServingStep,
    source: Operators,
    sizes: TransformerSizes,
    stop: Stop = never,
    dealt: Ints | None = None,
) -> ServedStep:
    """One step of a plan for inference. Raises InputError when the plan does not fit the problem, or follows tokens from layer
    to layer, which data-parallel attention does not.

    dealt: int64[gpu] sequences; None: see `dealt_by_speed`

    What lies between two exchanges takes as long as on the GPU that is busiest with it.
    """
    problem.check_plan(plan)
    if problem.second is not None or problem.step is not None:
        raise InputError("a step of serving is of one model's inference; close the second model or the training step")
    if plan.execution != "vanilla":
        raise InputError(
            f"the plan {plan.name} is executed context-coherently, but with data-parallel attention tokens go home after every "
            "layer"
        )
    model = problem.model
    held = problem.held_bytes(plan.placement)
    dealt = dealt_by_speed(problem, step, source, sizes, held) if dealt is None else dealt
    batches = 2 if step.overlap == "two-batch" else 1
    work = work_of_step(plan, problem, step, dealt // batches)
    shares = list(zip(sources_of(source, problem.cluster), (dealt // batches).tolist(), strict=True))
    timed = {share: operators_of(*share, step) for share in dict.fromkeys(shares)}
    log = EventLog(problem.network, too_many(*(work.dispatch, work.combine) * batches))
    if batches == 2:  # computation runs at the same time as exchanges, with the processors that their kernels leave
        longer = 1 / (1 - HELD_BY_EXCHANGES[work.unit])
        timed = {share: _with_fewer_processors(operators, longer) for share, operators in timed.items()}
        work = replace(work, compute={kind: seconds * longer for kind, seconds in work.compute.items()})
    inside = np.array([_inside_layer(timed[share], problem.model) for share in shares])
    whole = np.array([seconds_of(timed[share]) for share in shares])
    if batches == 2:
        log_two_batches(log, work, inside, plan.send_order, problem.network, stop)
        bound = bound_of_two_batches(work, inside, problem.network)
        timed = {share: tuple(replace(row, seconds=2 * row.seconds) for row in rows) for share, rows in timed.items()}
        outside = 2 * float((whole - inside * len(work.dispatch)).max())
    else:
        log_model(log, work, plan.send_order, problem.network, range(len(work.dispatch)), stop=stop)
        bound = float(bound_of_work(work, problem.network, relayed=True).sum())
        moe = len(model.moe_layers) * inside
        rest, last = whole - moe, int(whole.argmax())
        outside = float(whole[last] + (moe.max() - moe[last]) + (rest.max() - rest[last]))
    inner, outer = (timed[shares[int(each.argmax())]] for each in (inside, whole - inside * len(work.dispatch)))
    operators = outer if inner is outer else operators_of_both(inner, outer, model)
    timeline = log.timeline(problem, plan.travel)
    memory, of_types = memory_of(held, problem.cluster, model, sizes, step, dealt), sequences_of_types(dealt, problem.cluster)
    # Busy seconds of the MoE steps by kind, of all batches: an all-to-all from its first start to its last end, a computation
    # on the GPU that computes longest
    seconds, events = timeline.seconds_of_kind(), timeline.events
    for kind in ("gate", "ffn", "aggregate"):
        mine = events[events["kind"] == kind]
        longest = (mine["end"] - mine["start"]).groupby([mine["layer"], mine["model"]]).max()
        seconds[kind] = float(longest.sum())
    moe, sources = {kind: seconds[kind] for kind in INFERENCE_KINDS}, (source.source, timeline.cost_source)
    around = tuple(around_layers(timed[share], model, len(work.dispatch)) for share in shares) if len(timed) > 1 else ()
    why = problem.network.unbounded
    least = None if why else bound + outside
    figures = ServingFigures(step, timeline.total + outside, least, why, operators, moe, memory, sources, of_types, around)
    return ServedStep(figures, timeline)


def serve_as_measured(
    plan: Plan,
    problem: Problem,
    step: ServingStep,
    source: Operators,
    sizes: TransformerSizes,
    stop: Stop = never,
    dealt: Ints | None = None,
) -> ServedStep:
    """`serve` with experts by the measured kernels of the engine that the operators are measured of, if there are some; with
    the datasheet's operators of any GPU by the problem's own costs."""
    if are_measured(source, problem.cluster):
        problem = with_fused_experts(problem, plan, step)
    return serve(plan, problem, step, source, sizes, stop, dealt)


def are_measured(source: Operators, cluster: Cluster) -> bool:
    """True if the operators of every GPU are an engine's measured ones."""
    return all(isinstance(each, AiconfiguratorOperators) for each in sources_of(source, cluster))


def operators_of(source: OperatorSource, sequences: int, step: ServingStep) -> tuple[Operator, ...]:
    """The operators of a GPU with so many sequences in one batch; none without any."""
    batch = step.model_copy(update={"sequences": sequences, "overlap": "none"})
    return source.operators(batch) if sequences else ()


def dealt_by_speed(
    problem: Problem, step: ServingStep, source: Operators, sizes: TransformerSizes, held: Floats | None = None
) -> Ints:
    """int64[gpu]: the sequences of every GPU. GPUs that compute alike have as many each; of several types the faster ones have
    more, as far as they have room for keys and values.

    held: float64[gpu] bytes of routed experts; None: GPUs hold as many experts each
    """
    cluster, sources = problem.cluster, sources_of(source, problem.cluster)
    if not isinstance(source, OperatorsOfTypes):
        return np.full(len(sources), step.sequences)
    if held is None:
        held = problem.model.bytes_per_expert * problem.workload.layers * problem.workload.num_experts / len(sources)
    return dealt_within(
        step.sequences * len(sources), step, sources, cluster.values("memory") * MEMORY_SHARE - held, problem.model, sizes
    )


def dealt_within(
    total: int, step: ServingStep, sources: Sequence[OperatorSource], room: Floats, model: MoEModel, sizes: TransformerSizes
) -> Ints:
    """int64[gpu]: so many sequences in all, see `deal`.

    sources: of every GPU
    room: float64[gpu] bytes beside the experts
    """
    others, *each = bytes_beside_experts(model, sizes, step)
    unit = 2 if step.overlap == "two-batch" else 1
    seconds = {source: partial(_seconds_with, source, step) for source in dict.fromkeys(sources)}
    return deal(total, [seconds[source] for source in sources], (room - others) / max(sum(each), 1e-9), unit)


def _seconds_with(source: OperatorSource, step: ServingStep, sequences: int) -> float:
    return seconds_of(operators_of(source, sequences, step))


def _inside_layer(operators: tuple[Operator, ...], model: MoEModel) -> float:
    """Mean seconds of the operators inside one MoE layer; embedding, head and dense layers are outside."""
    layers, moe_layers = model.layers, len(model.moe_layers)
    return sum(
        operator.seconds / (moe_layers if operator.kind in IN_MOE_LAYERS else layers)
        for operator in operators
        if operator.kind not in OUTSIDE_MOE_LAYERS
    )


def operators_of_both(inner: tuple[Operator, ...], outer: tuple[Operator, ...], model: MoEModel) -> tuple[Operator, ...]:
    """The operators inside MoE layers of one GPU, and all others of another: each as long as a step waits for it."""
    moe, rows = len(model.moe_layers), []
    for operators, inside in ((outer, False), (inner, True)):
        for row in operators:
            share = 0.0 if row.kind in OUTSIDE_MOE_LAYERS else 1.0 if row.kind in IN_MOE_LAYERS else moe / model.layers
            part = share if inside else 1 - share
            if part:
                rows.append(replace(row, seconds=part * row.seconds, layers=max(1, round(part * row.layers))))
    return tuple(rows)


def around_layers(operators: tuple[Operator, ...], model: MoEModel, layers: int) -> tuple[float, float, float]:
    """Seconds of a GPU before the first MoE layer, before each of so many, and after the last one."""
    inside, head = _inside_layer(operators, model), by_kind(operators).get("head", 0.0)
    return max(seconds_of(operators) - inside * layers - head, 0.0), inside, head


def work_of_step(plan: Plan, problem: Problem, step: ServingStep, dealt: Ints | None = None) -> Work:
    """The work of the MoE layers of one batch. Rows that several experts share are counted on the recorded tokens if there are
    some, on any source rank: sequences of a server are on any GPU.

    dealt: int64[gpu] sequences; None: those of the step on every GPU
    """
    gpus = len(problem.cluster.gpus)
    at_step = problem.with_workload(load_of_step(problem.workload, step, problem.model, gpus, dealt))
    work = work_of(plan.placement, at_step, plan.execution, plan.travel)
    if plan.travel is None or plan.travel.unit == "copies" or not isinstance(problem.workload, RoutingTrace):
        return work
    trace = replace(problem.workload, sequence=None, source_rank=None)
    if dealt is not None and np.ptp(dealt):
        trace = trace.from_ranks(dealt / dealt.sum())
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


def _with_fewer_processors(operators: tuple[Operator, ...], longer: float) -> tuple[Operator, ...]:
    """Operators that run at the same time as exchanges, with the processors that their kernels leave."""
    return tuple(
        operator if operator.kind in OUTSIDE_MOE_LAYERS else replace(operator, seconds=operator.seconds * longer)
        for operator in operators
    )
