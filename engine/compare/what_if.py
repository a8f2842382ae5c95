"""Changes of cluster, model and traffic (a faster network, a bigger model), under which the same plan is simulated again."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field

from engine.communication.order import meeting_bound
from engine.compare.imprecision import noisy
from engine.costs.scaled import Scaled
from engine.errors import InputError
from engine.goal import Goal
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Stop, never
from engine.schema import Amounts, Frozen
from engine.serving.step import Operator, Operators, OperatorsOfTypes, OperatorSource, ServingStep
from engine.simulate import bound_of_plan, loads_of, simulate, unbounded
from engine.simulate.inference import bound_of_work, bounds_of_exchanges, least_of_work
from engine.simulate.serving import ServedStep, Serving, are_measured, serve, with_fused_experts
from engine.simulate.work import works_of
from engine.timeline import Timeline
from engine.workload import TrafficMatrix, Workload

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]

MOST = 1000.0
QUICK = 2.0
"""Seconds that a slider may take to be answered by a simulation."""
SECONDS_PER_SEND = {Goal.INFERENCE: 1.7e-6, Goal.TWO_MODELS: 7.5e-6}
"""Measured with all pairs of 32 and 64 GPUs sending in 58 layers."""


class Change(Frozen):
    """By how much the cluster, the model and the traffic change; 1 (noise: 0, dtype: None) leaves a thing as it is.

    network, compute, latency: see `Scaled`; tokens: every recorded token stands for so many, of a training step its batch;
    width: d_model and d_ff; dtype: the numbers that are computed and sent; noise: share of the traffic that is not as
    recorded (see `noisy`); gpu_type: network and compute change on GPUs of this type alone; contention: see `Scaled`, 0 leaves
    ports as they are.
    """

    network: float = Field(default=1, gt=0, le=MOST)
    compute: float = Field(default=1, gt=0, le=MOST)
    latency: float = Field(default=1, ge=0, le=MOST)
    tokens: float = Field(default=1, gt=0, le=MOST)
    width: float = Field(default=1, gt=0, le=MOST)
    dtype: Dtype | None = None
    noise: float = Field(default=0, ge=0, le=1)
    gpu_type: str | None = None
    contention: float = Field(default=0, ge=0, le=MOST)

    @property
    def is_none(self) -> bool:
        """True if everything stays as it is."""
        return self == NO_CHANGE

    @property
    def in_words(self) -> str:
        """`network 2×, 30 % traffic noise`."""
        where = f" of {self.gpu_type}" if self.gpu_type else ""
        factors = {
            f"network{where}": self.network,
            f"computation{where}": self.compute,
            "latency": self.latency,
            "tokens": self.tokens,
            "width": self.width,
        }
        said = [f"{name} {factor:.3g}×" for name, factor in factors.items() if factor != 1]
        said += [self.dtype] if self.dtype else []
        said += [f"{100 * self.noise:.0f} % traffic noise"] if self.noise else []
        said += [f"{100 * self.contention:.3g} % contention"] if self.contention else []
        return ", ".join(said) or "nothing changed"


NO_CHANGE = Change()
FIXED = "of a serving step network, computation, latency, contention, batch and noise can be changed here"
"""The answer to other changes of it."""


def changed(problem: Problem, change: Change) -> Problem:
    """The problem after a change. Raises InputError for a change that a training step or the recording cannot have."""
    if problem.goal is Goal.TRAINING:
        # The training step with other costs and another batch; its other sizes are described on the Optimise page
        if change.width != 1 or change.dtype or change.noise or change.gpu_type:
            raise InputError(
                "of a training step network, computation, latency and batch can be changed here; its sizes on the Optimise page"
            )
        if problem.graph is not None and change.tokens != 1:
            raise InputError("imported operators have the sizes they were imported with; their batch cannot be changed")
        step = problem.step.model_copy(update={"batch": max(1, round(problem.step.batch * change.tokens))})
        cost = Scaled(problem.cost, change.compute, change.network, change.latency, contention=change.contention)
        return replace(problem, step=step, cost=cost)
    if change.gpu_type is not None and change.gpu_type not in {gpu.type for gpu in problem.cluster.gpus}:
        raise InputError(f"no GPU of the cluster is a {change.gpu_type}")
    cost = Scaled(
        problem.cost, change.compute, change.network, change.latency, change.tokens, change.gpu_type, change.contention
    )
    resized = _resized(problem, change, cost)
    if resized.goal is Goal.TWO_MODELS:
        resized = replace(resized, second=_resized(resized.second, change, cost))
    return noisy(resized, change.noise)


def _resized(problem: Problem, change: Change, cost: Scaled) -> Problem:
    """With other costs and a wider model; recordings keep their tokens, also where bytes were recorded."""
    widths = {name: getattr(problem.model, name) for name in ("d_model", "d_ff", "expert_width", "shared_d_ff")}
    sizes = {name: max(1, round(width * change.width)) for name, width in widths.items() if width}
    fresh = problem.model.model_dump() | sizes | ({"dtype": change.dtype} if change.dtype else {})
    model = MoEModel.from_dict(fresh, f"the model {problem.model.name}, changed")
    factor = model.bytes_per_token / problem.model.bytes_per_token
    recordings = (_rebased(other, factor) for other in (problem.workload, *problem.others))
    workload, *others = recordings
    return replace(problem, workload=workload, others=tuple(others), model=model, cost=cost)


def _rebased(workload: Workload, factor: float) -> Workload:
    if factor == 1 or not isinstance(workload, TrafficMatrix):
        return workload
    return replace(workload, bytes=workload.bytes * factor, bytes_per_token=workload.bytes_per_token * factor)


@dataclass(frozen=True, eq=False)
class Outlook:
    """The times of a plan, in seconds, all simulated.

    total, bound: of the whole pass or step, and below which no send order (of a step: no schedule) brings the placement; None:
        nothing is proven of orders
    parts: of the total, to which they add up: by kind of event for one model's inference, otherwise exposed
        communication, computation, both at once and neither (`Timeline.decomposition`)
    compute, network: float64[resource] in which a GPU (or group of alike GPUs) computes, and in which it sends or receives
    resources: their names
    layers: float64[MoE layer] that every layer adds to the total; None for a training step, whose layers run twice
    kinds: of a training step, in which every kind of event runs, mean over the resources; None for inference
    simulated: False if every all-to-all is taken at the time of its busiest port, see `least`
    """

    total: float
    bound: float | None
    parts: dict[str, float]
    compute: Amounts
    network: Amounts
    resources: tuple[str, ...]
    layers: Amounts | None
    kinds: dict[str, float] | None = None
    simulated: bool = True

    @property
    def busiest(self) -> int:
        """The GPU that computes and communicates longest."""
        return int((self.compute + self.network).argmax())


def outlook(plan: Plan, problem: Problem) -> Outlook:
    """Simulate a plan and sum it up. Raises InputError when the plan does not fit the problem."""
    loads = loads_of(plan, problem)
    timeline = simulate(plan, problem, loads=loads)
    training = problem.goal is Goal.TRAINING
    parts = timeline.seconds_of_kind() if problem.goal is Goal.INFERENCE else timeline.decomposition()
    kinds = {kind: seconds for kind, seconds in timeline.busy_of_kind().items() if seconds > 0} if training else None
    return Outlook(
        total=timeline.total,
        bound=None if unbounded(plan, problem) else bound_of_plan(plan, problem, loads=loads),
        parts={name: value for name, value in parts.items() if value > 0},
        compute=timeline.busy("compute"),
        network=timeline.busy("network"),
        resources=timeline.resources,
        layers=None if training else _layer_seconds(timeline, problem.workload.layers),
        kinds=kinds,
    )


def outlook_after(problem: Problem, plan: Plan, change: Change, serving: Serving | None = None) -> Outlook:
    """The times of a plan after a change: simulated if that `is_quick`, otherwise see `least`. Raises InputError as `changed`
    and `outlook` do.

    serving: the step that is forecast, always simulated; None: the pass or training step
    """
    if serving is not None:
        return _of_served(problem, plan, change, serving)
    then = problem if change.is_none else changed(problem, change)
    return outlook(plan, then) if is_quick(then) else least(plan, then)


@dataclass(frozen=True)
class _Faster:
    """Operators on GPUs that compute so many times as fast."""

    operators_now: OperatorSource
    factor: float

    @property
    def source(self) -> str:
        return f"{self.operators_now.source}, {self.factor:.3g}× as fast"

    def operators(self, step: ServingStep) -> tuple[Operator, ...]:
        return tuple(replace(each, seconds=each.seconds / self.factor) for each in self.operators_now.operators(step))


def served_after(problem: Problem, plan: Plan, change: Change, serving: Serving, stop: Stop = never) -> ServedStep:
    """The whole step after a change; of its tokens the sequences change. Experts keep their measured kernels. Raises InputError
    as `changed` and `serve` do, and for other sizes of the model."""
    if change.width != 1 or change.dtype:
        raise InputError(FIXED)
    step, source = serving.step, serving.source
    sequences = max(1, round(step.sequences * change.tokens))
    if step.overlap == "two-batch":
        sequences += sequences % 2
    step = step.model_copy(update={"sequences": sequences})
    here = with_fused_experts(problem, plan, step) if are_measured(source, problem.cluster) else problem
    if not change.is_none:
        here = changed(here, change.model_copy(update={"tokens": 1}))
    if change.compute != 1:
        source = _all_faster(source, change.compute, change.gpu_type)
    return serve(plan, here, step, source, serving.sizes, stop)


def _of_served(problem: Problem, plan: Plan, change: Change, serving: Serving) -> Outlook:
    served = served_after(problem, plan, change, serving)
    figures, whole = served.figures, served.whole(problem.model)
    if serving.step.overlap == "two-batch":
        parts = whole.decomposition()
    else:
        moe = {kind: seconds for kind, seconds in served.timeline.seconds_of_kind().items() if seconds}
        parts = {"dense": figures.seconds - sum(moe.values())} | moe
    return Outlook(
        total=figures.seconds,
        bound=figures.bound,
        parts={name: value for name, value in parts.items() if value > 0},
        compute=whole.busy("compute"),
        network=whole.busy("network"),
        resources=whole.resources,
        layers=_layer_seconds(whole, problem.workload.layers),
    )


def _all_faster(source: Operators, factor: float, gpu_type: str | None) -> Operators:
    """Operators so many times as fast, on GPUs of this type alone if one is named."""
    if isinstance(source, OperatorsOfTypes):
        changed = {kind: _Faster(each, factor) for kind, each in source.of_kind.items() if gpu_type in (None, kind.type)}
        return OperatorsOfTypes({**source.of_kind, **changed})
    return _Faster(source, factor)


def is_quick(problem: Problem) -> bool:
    """True if a plan is simulated in two seconds at most on two ordinary cores. Steps of training always are."""
    if problem.goal is Goal.TRAINING:
        return True
    sends = problem.workload.layers * len(problem.cluster.gpus) ** 2
    return sends * SECONDS_PER_SEND[problem.goal] <= QUICK


def least(plan: Plan, problem: Problem) -> Outlook:
    """The outlook without simulating a send: every step at its slowest GPU and every all-to-all at the time of its busiest
    port (of relayed ones the ports of a node together) and one start-up, which no such order beats; the bound holds for orders
    with relays too. For one model's inference; raises InputError for anything else and when the plan does not fit."""
    if problem.goal is not Goal.INFERENCE:
        raise InputError("two models on so many GPUs are too much to simulate while a slider moves; use the studies below")
    problem.check_plan(plan)
    (work,), network = works_of(plan, problem), problem.network
    relayed = plan.send_order.mode == "two-tier"
    bound = Network.relayed_bound if relayed else meeting_bound if plan.send_order.mode == "concurrent" else Network.bound
    sent = [*work.carried(network, "dispatch"), *work.carried(network, "combine")]
    parts = {kind: float(step.max(axis=1).sum()) for kind, step in work.compute.items()}
    parts |= {kind: float(bounds_of_exchanges(work, network, kind, bound).sum()) for kind in ("dispatch", "combine")}
    for kind, traffic, passes in (("prompt_gather", work.prompt_gather, work.passes), ("all_gather", work.gather, 1)):
        if traffic is not None:
            sent.append((network, traffic / passes))
            parts[kind] = network.bound(traffic) / passes
    layers = least_of_work(work, network, bound)
    return Outlook(
        total=float(layers.sum()),
        bound=None if network.unbounded else float(bound_of_work(work, network, relayed=True).sum()),
        parts={kind: seconds for kind, seconds in parts.items() if seconds > 0},
        compute=sum(step.sum(axis=0) for step in work.compute.values()),
        network=sum(_port_seconds(*exchange) for exchange in sent),
        resources=problem.cluster.gpu_names,
        layers=layers,
        simulated=False,
    )


def _port_seconds(network: Network, traffic: np.ndarray) -> np.ndarray:
    """float64[gpu]: seconds of the busiest port of every GPU for traffic (float64[src, dst] bytes, diagonal ignored)."""
    moved = network.moved(traffic)
    seconds = np.divide(moved, network.capacity, out=np.zeros(len(moved)), where=moved > 0)
    return seconds.reshape(4, network.gpus).max(axis=0)


def _layer_seconds(timeline: Timeline, layers: int) -> np.ndarray:
    ends = np.zeros(layers)
    np.maximum.at(ends, timeline.events["layer"].to_numpy(), timeline.events["end"].to_numpy())
    return np.diff(np.maximum.accumulate(ends), prepend=0.0)
