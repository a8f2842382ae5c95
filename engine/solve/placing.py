"""Schemas and calls of the kernels that place experts. Each call imports its kernel, so that one is loaded without the rest."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.result import Stop
from engine.schema import Frozen
from engine.solve import Answer, Face, Options, Table, matrix, require_at_most

MOST_EXPERTS = 2048
"""Larger tables of experts cannot be sorted, or one layer of them assigned, within the time that an answer may be late."""
MOST_GPUS = 128
"""The same for tables of GPUs and pairs of experts."""
MOST_COUNTS = 2**22
"""Counts of transitions that are added up in time."""


class AssignInstance(Frozen):
    """One expert on every GPU: the GPU of each expert."""

    tokens: Table
    bandwidth: tuple[float, ...]
    seconds_per_token: tuple[float, ...]


def _assign(instance: AssignInstance, options: Options, stop: Stop) -> Answer:
    from engine.placement.assignment import AssignmentInstance, assign

    require_at_most(MOST_EXPERTS, experts=len(instance.tokens))
    tokens = matrix(instance.tokens, "tokens")
    gpus, experts = tokens.shape
    if gpus != experts:
        raise InputError(f"tokens has {gpus} GPUs and {experts} experts; this problem has one expert per GPU")
    for name in ("bandwidth", "seconds_per_token"):
        if len(getattr(instance, name)) != gpus:
            raise InputError(f"{name} must have one number per GPU ({gpus}), but has {len(getattr(instance, name))}")
    if min(instance.bandwidth) <= 0 or min(instance.seconds_per_token) < 0 or tokens.min() < 0:
        raise InputError("bandwidth must be positive, tokens and seconds_per_token not negative")
    compute = np.outer(instance.seconds_per_token, tokens.sum(axis=0))
    bandwidth = np.array(instance.bandwidth)
    result = assign(AssignmentInstance.from_tokens(tokens, compute, bandwidth, bandwidth), stop)
    return result, {"gpu_of_expert": result.solution.tolist()}


class ColocateInstance(Frozen):
    """Two models on equal GPUs: the expert of b that shares a GPU with each expert of a."""

    send_a: tuple[float, ...]
    recv_a: tuple[float, ...]
    send_b: tuple[float, ...]
    recv_b: tuple[float, ...]


def _colocate(instance: ColocateInstance, options: Options, stop: Stop) -> Answer:
    from engine.placement.colocation.pairs import colocate

    experts = len(instance.send_a)
    require_at_most(MOST_EXPERTS, experts=experts)
    for name in ("recv_a", "send_b", "recv_b"):
        if len(getattr(instance, name)) != experts:
            raise InputError(f"send_a has {experts} experts, but {name} has {len(getattr(instance, name))}")
    result = colocate(*(np.array(getattr(instance, name)) for name in ColocateInstance.model_fields), stop)
    return result, {"partner": result.solution.tolist()}


class ColocateHeterogeneousInstance(Frozen):
    """Two models on unlike GPUs: a pair of experts for every GPU."""

    cost: tuple[Table, ...]


def _colocate_heterogeneous(instance: ColocateHeterogeneousInstance, options: Options, stop: Stop) -> Answer:
    from engine.placement.colocation.heterogeneous import colocate_heterogeneous

    require_at_most(MOST_GPUS, GPUs=len(instance.cost))
    slices = [matrix(rows, f"cost of GPU {gpu}") for gpu, rows in enumerate(instance.cost)]
    for gpu, cost_of_gpu in enumerate(slices):
        if cost_of_gpu.shape != (len(slices), len(slices)):
            raise InputError(
                f"cost of GPU {gpu} has {cost_of_gpu.shape[0]} experts of a and {cost_of_gpu.shape[1]} of b; "
                f"with {len(slices)} GPUs there must be {len(slices)} of each"
            )
    if not slices:
        raise InputError("cost must have at least one GPU")
    result = colocate_heterogeneous(np.stack(slices), options.limits, stop)
    assignment = [[gpu, a, b] for gpu, (a, b) in enumerate(result.solution.tolist())]
    return result, {"assignment": assignment}


class AffinityInstance(Frozen):
    """Experts of every layer on GPUs, so that few tokens change GPU between layers."""

    transitions: tuple[Table, ...]
    gpus: int
    gpus_per_node: int | None = None
    cost_gpu: float = 1.0
    cost_node: float = 1.0
    staged: bool = False


def _affinity(problem: AffinityInstance, options: Options, stop: Stop) -> Answer:
    from engine.placement.affinity import kernel

    counts = problem.transitions
    experts = len(counts[0]) if counts else 0
    if not experts:
        raise InputError("transitions must have a matrix of counts for every pair of neighbouring layers, but is empty")
    require_at_most(MOST_EXPERTS, experts=experts)
    require_at_most(MOST_COUNTS, transitions=len(counts), experts=experts, experts_of_the_next_layer=experts)
    for layer, count in enumerate(counts):
        if len(count) != experts or any(len(row) != experts for row in count):
            raise InputError(f"transitions, layer {layer} must have {experts} rows of {experts} counts")
    instance = kernel.AffinityInstance(
        np.array(counts, dtype=np.float64), problem.gpus, problem.gpus_per_node, problem.cost_gpu, problem.cost_node
    )
    result = kernel.affinity(instance, options.limits, stop, staged=problem.staged)
    node_hops, gpu_hops = instance.hops(result.solution)
    return result, {"gpu_of_expert": result.solution.tolist(), "node_hops": node_hops, "gpu_hops": gpu_hops}


MOST_MODEL_EXPERTS, MOST_CLUSTER_GPUS, MOST_CELLS = 4096, 1024, 2**26
"""No model has more experts. One assignment to more GPUs takes longer than an answer may be late, and with more tokens the
costs of each token on every GPU would fill the memory."""


class CoactivationInstance(Frozen):
    """Experts that fire together on one GPU or node, so that tokens send few rows."""

    experts: tuple[tuple[tuple[int, ...], ...], ...]
    source_gpu: tuple[int, ...]
    gpus: int = Field(ge=1, le=MOST_CLUSTER_GPUS)
    gpus_per_node: int | None = None
    travel: Literal["gpu", "node"] = "gpu"
    cap: float | None = None
    expert_count: int | None = Field(default=None, ge=1, le=MOST_MODEL_EXPERTS)


def _coactivation(problem: CoactivationInstance, options: Options, stop: Stop) -> Answer:
    from engine.placement import coactivation

    tokens = len(problem.source_gpu)
    require_at_most(MOST_CELLS, layers=len(problem.experts), tokens=tokens, GPUs=problem.gpus)
    choices = {len(token) for layer in problem.experts for token in layer}
    for index, layer in enumerate(problem.experts):
        if len(layer) != tokens:
            raise InputError(f"experts, layer {index} has {len(layer)} tokens, but source_gpu has {tokens}")
    if not problem.experts or len(choices) != 1:
        raise InputError("experts must be a table [layer][token][k] with as many experts for every token (-1: none)")
    try:
        experts = np.array(problem.experts, dtype=np.int64)
        source_gpu = np.array(problem.source_gpu, dtype=np.int64)
    except OverflowError:
        raise InputError("experts and source_gpu must hold ids, but one is too large") from None
    instance = coactivation.CoactivationInstance(
        experts, source_gpu, problem.gpus, problem.gpus_per_node, problem.travel, problem.cap, problem.expert_count
    )
    result = coactivation.coactivation(instance, options.limits, stop)
    figures = {name: getattr(instance, name)(result.solution).tolist() for name in ("rows", "imbalance")}
    return result, {"gpu_of_expert": result.solution.tolist(), **figures}


class PopularityInstance(Frozen):
    """The number of devices that each expert of the next layer deserves, predicted from the paths of a batch."""

    train: tuple[tuple[int, ...], ...] = Field(min_length=1)
    test_prefix: tuple[tuple[int, ...], ...] = Field(min_length=1)
    path_length: int = Field(ge=1)
    top_k: int = Field(ge=1)
    layer: int = Field(ge=0)
    experts: int = Field(ge=1, le=65536)
    devices: int = Field(ge=1, le=1_000_000)


def _popularity(instance: PopularityInstance, options: Options, stop: Stop) -> Answer:
    from engine.placement.popularity import estimate_devices

    train, prefix = (_ids(getattr(instance, name), name, instance.experts) for name in ("train", "test_prefix"))
    sizes = instance.path_length, instance.top_k, instance.experts, instance.devices
    result = estimate_devices(train, prefix, instance.layer, *sizes)
    return result, {"devices_of_expert": result.solution.tolist()}


def _ids(rows: tuple[tuple[int, ...], ...], name: str, experts: int) -> np.ndarray:
    """int64[token, layer]; raises InputError when the rows differ in length or name experts that do not exist."""
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise InputError(f"{name} must be a matrix with rows of equal length")
    for token, row in enumerate(rows):
        for expert in row:
            if not 0 <= expert < experts:
                raise InputError(f"{name}: token {token} names expert {expert}; ids go from 0 to {experts - 1}")
    return np.array(rows, dtype=np.int64)


MOST_SLOTS = 65_536
"""Slots that are filled within a second."""


class ReplicateDevicesInstance(Frozen):
    """Experts of one layer on devices, popular ones on several."""

    popularity: tuple[float, ...] = Field(min_length=1, max_length=4096)
    devices: int = Field(ge=1, le=4096)
    max_experts_per_device: int = Field(ge=1)
    algorithm: Literal["lina", "best"] = "best"


def _replicate_devices(instance: ReplicateDevicesInstance, options: Options, stop: Stop) -> Answer:
    from engine.placement.devices.kernel import DevicesInstance, replicate_devices

    slots = instance.devices * min(instance.max_experts_per_device, len(instance.popularity))
    if slots > MOST_SLOTS:
        raise InputError(
            f"{instance.devices} devices with up to {slots // instance.devices} experts each have {slots} slots; at most "
            f"{MOST_SLOTS} are filled"
        )
    problem = DevicesInstance(np.array(instance.popularity), instance.devices, instance.max_experts_per_device)
    result = replicate_devices(problem, options.limits, stop, method=instance.algorithm)
    return result, {"experts_of_device": [list(held) for held in result.solution]}


MOST = 100_000
"""More GPUs or slots than any cluster has: a slip of the keyboard is refused before it takes all memory."""
MOST_WORK = 2**28
"""Replicas are dealt slot by slot over all layers, experts and GPUs, and nothing stops that: this much takes a second."""


class ReplicateInstance(Frozen):
    """Replicas of experts and their GPUs, for `load` or `loads`; the other fields are those of `ReplicationInstance`."""

    load: Table | None = None
    loads: tuple[Table, ...] | None = None
    slots: int = Field(ge=1, le=MOST)
    gpus: int = Field(ge=1, le=MOST)
    split: Literal["equal", "free"] = "equal"
    nodes: int = Field(default=1, ge=1, le=MOST)
    groups: int = Field(default=1, ge=1, le=MOST)
    algorithm: Literal["best", "eplb"] = "best"
    slots_of_gpu: tuple[Annotated[int, Field(ge=0, le=MOST)], ...] | None = None
    speed: tuple[float, ...] | None = None


def _replicate(request: ReplicateInstance, options: Options, stop: Stop) -> Answer:
    """The objective is a balancedness: more is better, and `bound` is at least `objective`."""
    from engine.placement.replication import ReplicationInstance, balancedness, replicate

    if (request.load is None) == (request.loads is None):
        raise InputError("give either load [layer][expert] or loads [load][layer][expert]")
    if request.loads is None:
        loads = matrix(request.load, "load")[None]
    else:
        tables = [matrix(table, f"loads → {index}") for index, table in enumerate(request.loads)]
        if len({table.shape for table in tables}) != 1:
            raise InputError("loads must hold at least one table [layer][expert], all with the same layers and experts")
        loads = np.stack(tables)
    count, layers, experts = loads.shape
    require_at_most(MOST_WORK, loads=count, layers=layers, experts=experts, slots=request.slots)
    require_at_most(MOST_WORK, loads=count, layers=layers, GPUs=request.gpus, slots=request.slots)
    require_at_most(MOST_WORK, layers=layers, experts=experts, GPUs=request.gpus)
    slots_of_gpu = None if request.slots_of_gpu is None else np.array(request.slots_of_gpu, dtype=np.int64)
    sizes = request.slots, request.gpus, request.split, request.nodes, request.groups
    instance = ReplicationInstance(loads, *sizes, slots_of_gpu, request.speed)
    result = replicate(instance, options.limits, stop, algorithm=request.algorithm)
    balanced = balancedness(result.solution, instance)
    return result, {"physical_to_logical": result.solution.tolist(), "balancedness": balanced.tolist()}


FACES: dict[str, Face] = {
    "assign": (AssignInstance, _assign),
    "colocate": (ColocateInstance, _colocate),
    "colocate-heterogeneous": (ColocateHeterogeneousInstance, _colocate_heterogeneous),
    "affinity": (AffinityInstance, _affinity),
    "coactivation": (CoactivationInstance, _coactivation),
    "popularity": (PopularityInstance, _popularity),
    "replicate-devices": (ReplicateDevicesInstance, _replicate_devices),
    "replicate": (ReplicateInstance, _replicate),
}
