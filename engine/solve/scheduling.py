"""Schemas and calls of the kernels that schedule transfers and operators. Each call imports its kernel, so that one is loaded
without the others."""

import time
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, StrictInt, StrictStr

from engine.errors import InputError
from engine.network import Network, off_diagonal
from engine.plan import Schedule
from engine.result import Provenance, Result, Status, Stop, library_versions
from engine.schema import Frozen
from engine.solve import Answer, Face, Options, Table, matrix, require_at_most

MOST_GPUS = 1024
"""The sends of all pairs of more GPUs cannot be listed within the two seconds that an answer may be late, and their matrices
are hundreds of megabytes of text."""


class OrderInstance(Frozen):
    """The order in which the bytes of one all-to-all move."""

    traffic: Table
    bandwidth: float | tuple[float, ...]
    mode: Literal["matched", "shared"] = "matched"


def _order(instance: OrderInstance, options: Options, stop: Stop) -> Answer:
    from engine.communication.order import order

    require_at_most(MOST_GPUS, GPUs=len(instance.traffic))
    traffic = matrix(instance.traffic, "traffic")
    rates = instance.bandwidth
    bandwidth = np.full(len(traffic), rates) if isinstance(rates, float) else np.array(rates)
    result = order(traffic, bandwidth, bandwidth, instance.mode, stop)
    return result, {"phases": _phases(result.solution)}


def _phases(schedule: Schedule) -> list[dict[str, Any]]:
    """A schedule as [{duration, sends: [{src, dst, bytes}]}]."""
    listed: list[dict[str, Any]] = [{"duration": duration, "sends": []} for duration in schedule.duration.tolist()]
    columns = (column.tolist() for column in (schedule.src, schedule.dst, schedule.bytes, schedule.phase))
    for src, dst, size, phase in zip(*columns, strict=True):
        listed[phase]["sends"].append({"src": src, "dst": dst, "bytes": size})
    return listed


MOST_PAIRS = 2**14
"""The relays of more pairs of nodes cannot be listed within the time that an answer may be late."""


class TwoTierInstance(Frozen):
    """The order of one all-to-all over the links inside nodes and the ports between them.

    bandwidth, link_bandwidth: bytes/s each way, one number or one per GPU
    gpus_per_node: one number, or one per node
    """

    traffic: Table
    bandwidth: float | tuple[float, ...]
    link_bandwidth: float | tuple[float, ...]
    gpus_per_node: int | tuple[int, ...] = Field(description="GPUs are numbered node by node")


def _two_tier(instance: TwoTierInstance, options: Options, stop: Stop) -> Answer:
    from engine.communication.steps import Steps
    from engine.communication.two_tier import two_tier

    require_at_most(MOST_GPUS, GPUs=len(instance.traffic))
    traffic = matrix(instance.traffic, "traffic")
    network = _network(instance, len(traffic))
    nodes = int(network.node.max()) + 1
    require_at_most(MOST_PAIRS, nodes=nodes, other_nodes=nodes)
    result = two_tier(traffic, network, stop)
    steps, node = Steps.of(result.solution, traffic, network), network.node
    renamed = {name: node[getattr(result.solution, name)] for name in ("src", "dst")}
    listed = zip(steps.seconds.tolist(), steps.local.tolist(), strict=True)
    return result, {
        "phases": _phases(result.solution.model_copy(update=renamed)),
        "relays": _relays(steps),
        "steps": [{"seconds": seconds, "local": parts} for seconds, parts in listed],
    }


def _network(instance: TwoTierInstance, gpus: int) -> Network:
    sizes = instance.gpus_per_node
    if isinstance(sizes, int):
        if sizes < 1 or gpus % sizes:
            raise InputError(f"gpus_per_node must divide the {gpus} GPUs of traffic, or list every node's ({sizes})")
        sizes = (sizes,) * (gpus // sizes)
    if min(sizes, default=0) < 1 or sum(sizes) != gpus:
        raise InputError(f"gpus_per_node must list nodes of at least 1 GPU, {gpus} in all, not {sum(sizes)}")
    rates = {}
    for name in ("bandwidth", "link_bandwidth"):
        rate = getattr(instance, name)
        rates[name] = np.full(gpus, rate) if isinstance(rate, float) else np.array(rate)
        if len(rates[name]) != gpus or not np.all(rates[name] > 0):
            raise InputError(f"{name} must be a positive number, or one for each of {gpus} GPUs")
    rate, link = rates["bandwidth"], rates["link_bandwidth"]
    return Network(rate, rate, link, np.repeat(np.arange(len(sizes)), sizes), 0.0, np.zeros(gpus))


def _relays(steps: Any) -> list[dict[str, Any]]:
    """The relays of every pair of nodes with all of its bytes; a phase moves the same part of them everywhere.

    steps: `engine.communication.steps.Steps`
    """
    relays, members = steps.relays, steps.domains.members
    of_pair = {name: getattr(relays, name) for name in ("balance", "rails", "spread")}
    listed = []
    for pair, (source, target) in enumerate(zip(relays.source.tolist(), relays.target.tolist(), strict=True)):
        entry: dict[str, Any] = {"src": source, "dst": target}
        for name, ends in (("balance", (source, source)), ("rails", (source, target)), ("spread", (target, target))):
            size = of_pair[name][pair]
            i, j = np.nonzero(size)
            columns = (members[ends[0]][i].tolist(), members[ends[1]][j].tolist(), size[i, j].tolist())
            entry[name] = [{"src": src, "dst": dst, "bytes": moved} for src, dst, moved in zip(*columns, strict=True)]
        listed.append(entry)
    return listed


class TravelInstance(Frozen):
    """The rows that every GPU sends in one dispatch, if tokens travel copy by copy, GPU by GPU or node by node."""

    experts: tuple[tuple[int, ...], ...] = Field(min_length=1)
    source_gpu: tuple[int, ...]
    gpu_of_expert: tuple[int, ...] = Field(min_length=1, max_length=4096)
    gpus: int = Field(ge=1, le=MOST_GPUS)
    gpus_per_node: int = Field(ge=1, le=MOST_GPUS)
    travel: Literal["copies", "gpu", "node"]


def _travel(instance: TravelInstance, options: Options, stop: Stop) -> Answer:
    from engine.communication.travel import Stops, rows_of_tokens

    started = time.perf_counter()
    if len({len(token) for token in instance.experts}) != 1 or not instance.experts[0]:
        raise InputError("experts must have the same number of choices for every token; -1 stands for none")
    chosen, source, home = (np.array(part) for part in (instance.experts, instance.source_gpu, instance.gpu_of_expert))
    if len(source) != len(chosen):
        raise InputError(f"source_gpu has {len(source)} entries for {len(chosen)} tokens")
    if instance.gpus % instance.gpus_per_node:
        raise InputError(f"{instance.gpus} GPUs do not divide into nodes of {instance.gpus_per_node}")
    for name, numbers, least, count in (
        ("experts", chosen, -1, len(home)),
        ("source_gpu", source, 0, instance.gpus),
        ("gpu_of_expert", home, 0, instance.gpus),
    ):
        if numbers.min() < least or numbers.max() >= count:
            raise InputError(f"{name} must lie in {least} … {count - 1}")
    node = np.arange(instance.gpus) // instance.gpus_per_node
    hosts = np.where(chosen >= 0, home[chosen], -1)
    rows = off_diagonal(rows_of_tokens(hosts, source, Stops(node), instance.travel))
    inside = node[:, None] == node[None, :]
    fabric, links = np.where(inside, 0.0, rows), np.where(inside, rows, 0.0)
    most = float(max(fabric.sum(axis=1).max(), fabric.sum(axis=0).max()))
    # Nothing is chosen here: the rows follow from the placement.
    provenance = Provenance(optimiser="travel", versions=library_versions())
    result = Result(Status.OPTIMAL, most, most, time.perf_counter() - started, rows, provenance)
    return result, {"fabric": fabric.tolist(), "links": links.tolist()}


class PipelineDegreeInstance(Frozen):
    """The number of parts that one layer's tokens are cut into, so that all-to-alls hide behind experts.

    order: the order on a single network
    algorithm: "printed" is PipeMoE's Algorithm 1 to the letter
    """

    alpha_comm: float = Field(ge=0)
    beta_comm: float = Field(ge=0)
    size_comm: float = Field(ge=0)
    alpha_comp: float = Field(ge=0)
    beta_comp: float = Field(ge=0)
    size_comp: float = Field(ge=0)
    max_degree: int = Field(ge=1, le=100_000)
    streams: Literal[1, 2] = 1
    order: Literal["dispatch-first", "interleaved"] = "dispatch-first"
    algorithm: Literal["exact", "printed"] = "exact"


def _pipeline_degree(request: PipelineDegreeInstance, options: Options, stop: Stop) -> Answer:
    from engine.overlap.pipeline_degree import DegreeInstance, pipeline_degree
    from engine.overlap.pipemoe_printed import pipemoe_printed

    instance = DegreeInstance(**request.model_dump(exclude={"algorithm"}))
    result = (pipemoe_printed if request.algorithm == "printed" else pipeline_degree)(instance, stop)
    return result, {"degree": int(result.solution[0]), "time_of_degree": instance.time_of_degree()[0].tolist()}


MOST_OVERLAPPED = 1024
"""More all-to-alls or weight gradients than any model has: a slip of the keyboard is refused before it takes all memory."""


class WeightGradientsInstance(Frozen):
    """The all-to-all that each weight gradient (dW) runs under.

    alltoall, dw: seconds
    allowed: [dW][all-to-all]; may be empty if there is no all-to-all
    """

    alltoall: tuple[float, ...] = Field(max_length=MOST_OVERLAPPED)
    dw: tuple[float, ...] = Field(max_length=MOST_OVERLAPPED)
    allowed: tuple[tuple[Annotated[int, Field(ge=0, le=1)], ...], ...] = Field(max_length=MOST_OVERLAPPED)
    algorithm: Literal["greedy", "best"] = "best"


def _weight_gradients(request: WeightGradientsInstance, options: Options, stop: Stop) -> Answer:
    """The objective is overlapped seconds: more is better, and `bound` is at least `objective`."""
    from engine.overlap.weight_gradients import WeightGradientInstance, schedule_weight_gradients

    w, m = len(request.dw), len(request.alltoall)
    rows = request.allowed if request.allowed or m else ((),) * w
    if len(rows) != w:
        raise InputError(f"allowed has {len(rows)} rows, but there are {w} dw: it needs a row for each")
    for index, row in enumerate(rows):
        if len(row) != m:
            raise InputError(f"allowed → {index} has {len(row)} values, but there are {m} alltoall: one for each")
    allowed = np.array(rows, dtype=bool).reshape(w, m)
    instance = WeightGradientInstance(np.array(request.alltoall), np.array(request.dw), allowed)
    result = schedule_weight_gradients(instance, options.limits, stop, algorithm=request.algorithm)
    return result, {"alltoall_of_dw": result.solution.tolist()}


MOST_TIMES, MOST_NUMBERS = 2**20, 2**19
"""Times of a chain, and axes of all allowed combinations, that are read and laid out within a second."""


class Op(Frozen):
    """An operator. times: seconds of one part when cut into 1 ... K parts; null if the operator cannot be cut so."""

    kind: Literal["comp", "comm"]
    times: tuple[float | None, ...] = Field(min_length=1)


class PartitionInstance(Frozen):
    """The ranges of a chain of operators to cut, and into how many parts."""

    ops: tuple[Op, ...] = Field(min_length=1)
    max_range: int | None = Field(default=None, ge=1)


def _partition(instance: PartitionInstance, options: Options, stop: Stop) -> Answer:
    from engine.overlap.partition import partition
    from engine.overlap.stage_pipeline import ChainInstance

    parts = len(instance.ops[0].times)
    require_at_most(MOST_TIMES, operators=len(instance.ops), numbers_of_parts=parts)
    for number, op in enumerate(instance.ops):
        if len(op.times) != parts:
            raise InputError(f"operator {number} has {len(op.times)} times, the first one {parts}; wanted equally many")
    times = np.array([[np.inf if seconds is None else seconds for seconds in op.times] for op in instance.ops])
    chain = ChainInstance(network=np.array([op.kind == "comm" for op in instance.ops]), times=times)
    result = partition(chain, max_range=instance.max_range, stop=stop)
    return result, {"ranges": [asdict(each) for each in result.solution]}


AxisName = StrictInt | StrictStr


class Constraint(Frozen):
    """The combinations of axes that some tensors may be cut along together."""

    tensors: tuple[str, ...]
    allowed: tuple[tuple[AxisName, ...], ...]


class PartitionAxesInstance(Frozen):
    """The axis that every tensor is cut along."""

    domains: dict[str, tuple[AxisName, ...]]
    constraints: tuple[Constraint, ...] = ()
    count: bool = False


def _partition_axes(instance: PartitionAxesInstance, options: Options, stop: Stop) -> Answer:
    from engine.overlap.partition_axes import AxisConstraint, AxisProblem, count_axes, partition_axes

    start = time.perf_counter()
    listed = sum(len(constraint.tensors) * len(constraint.allowed) for constraint in instance.constraints)
    require_at_most(MOST_NUMBERS, axes_in_combinations=listed)
    require_at_most(MOST_NUMBERS, axes_of_tensors=sum(map(len, instance.domains.values())))
    constraints = [AxisConstraint(constraint.tensors, constraint.allowed) for constraint in instance.constraints]
    problem = AxisProblem(instance.domains, constraints)
    result = partition_axes(problem, options.limits, stop)
    decided = result.status in (Status.OPTIMAL, Status.INFEASIBLE)
    answer = {"satisfiable": result.solution is not None if decided else None, "axis_of_tensor": result.solution}
    if not instance.count:
        return result, answer
    answer["solutions"] = count_axes(problem, stop)
    status = Status.CANCELLED if answer["solutions"] is None else result.status
    counted = Result(status, 0.0, 0.0, time.perf_counter() - start, result.solution, result.provenance)
    return counted, answer


MOST_OPERATIONS = 20_000
"""Operations of a kind that are simulated within a second or two."""


class PriorityInstance(Frozen):
    """All-to-alls and all-reduces on one network."""

    alltoall: tuple[tuple[float, float], ...] = Field(max_length=MOST_OPERATIONS)
    allreduce: tuple[tuple[float, float], ...] = Field(max_length=MOST_OPERATIONS)
    micro_op: float | None = Field(default=None, gt=0)
    overhead: float = Field(default=0, ge=0)
    policy: Literal["priority", "fair", "fifo"] = "priority"


def _priority(instance: PriorityInstance, options: Options, stop: Stop) -> Answer:
    from engine.simulate.priority import schedule_network

    result = schedule_network(instance.alltoall, instance.allreduce, instance.micro_op, instance.overhead, instance.policy)
    schedule = result.solution
    listed = [("alltoall", index, 0, *times) for index, times in enumerate(schedule.alltoall.tolist())]
    piece = 0  # counted within the all-reduce
    for row, (index, times) in enumerate(zip(schedule.piece_of.tolist(), schedule.pieces.tolist(), strict=True)):
        piece = piece + 1 if row and schedule.piece_of[row - 1] == index else 0
        listed.append(("allreduce", index, piece, *times))
    listed.sort(key=lambda event: event[3:])
    names = ("kind", "index", "piece", "start", "end")
    return result, {"finish": schedule.finish, "events": [dict(zip(names, event, strict=True)) for event in listed]}


FACES: dict[str, Face] = {
    "order": (OrderInstance, _order),
    "two-tier": (TwoTierInstance, _two_tier),
    "travel": (TravelInstance, _travel),
    "pipeline-degree": (PipelineDegreeInstance, _pipeline_degree),
    "weight-gradients": (WeightGradientsInstance, _weight_gradients),
    "partition": (PartitionInstance, _partition),
    "partition-axes": (PartitionAxesInstance, _partition_axes),
    "priority": (PriorityInstance, _priority),
}
