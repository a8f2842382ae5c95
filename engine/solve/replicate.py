"""`replicate`: which experts get replicas, and where they live."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.placement.replication import Algorithm, ReplicationInstance, Split, balancedness, replicate
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options, matrix, require_at_most

MOST = 100_000
"""GPUs or slots beyond any cluster: a slip of the keyboard is answered before it takes all memory."""
MOST_WORK = 2**28
"""Replicas are dealt slot by slot over all layers, experts and GPUs, which nothing stops: up to here within a second."""

Table = tuple[tuple[float, ...], ...]


class ReplicateInstance(Frozen):
    """`load` or `loads`, one of them; nodes, groups, slots_of_gpu and speed as in `ReplicationInstance`."""

    load: Table | None = None
    loads: tuple[Table, ...] | None = None
    slots: int = Field(ge=1, le=MOST)
    gpus: int = Field(ge=1, le=MOST)
    split: Split = "equal"
    nodes: int = Field(default=1, ge=1, le=MOST)
    groups: int = Field(default=1, ge=1, le=MOST)
    algorithm: Algorithm = "best"
    slots_of_gpu: tuple[Annotated[int, Field(ge=0, le=MOST)], ...] | None = None
    speed: tuple[float, ...] | None = None


def _replicate(request: ReplicateInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
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
    instance = ReplicationInstance(
        loads,
        request.slots,
        request.gpus,
        request.split,
        request.nodes,
        request.groups,
        None if request.slots_of_gpu is None else np.array(request.slots_of_gpu, dtype=np.int64),
        None if request.speed is None else np.array(request.speed),
    )
    result = replicate(
        instance, request.algorithm, exact=options.exact, time_limit=options.time_limit, seed=options.seed, stop=stop
    )
    balanced = balancedness(result.solution, instance)
    return result, {"physical_to_logical": result.solution.tolist(), "balancedness": balanced.tolist()}


KERNELS: dict[str, Face] = {"replicate": (ReplicateInstance, _replicate)}
"""The objective is a balancedness: more is better, and `bound` is at least `objective`."""
