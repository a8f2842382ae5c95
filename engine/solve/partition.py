"""`partition`: which ranges of a chain of operators to cut; `partition-axes`: along which axes to cut their tensors."""

import time
from typing import Any, Literal

import numpy as np
from pydantic import Field, StrictInt, StrictStr

from engine.errors import InputError
from engine.overlap.partition import partition
from engine.overlap.partition_axes import AxisConstraint, AxisProblem, count_axes, partition_axes
from engine.overlap.stage_pipeline import ChainInstance
from engine.result import Result, Status, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options, require_at_most

MOST_TIMES, MOST_NUMBERS = 2**20, 2**19
"""Times of a chain, and axes in all combinations that are allowed, which are read and laid out within a second."""


class Op(Frozen):
    """times: seconds of one part when cut into 1 ... K parts; null where the operator cannot be cut so."""

    kind: Literal["comp", "comm"]
    times: tuple[float | None, ...] = Field(min_length=1)


class PartitionInstance(Frozen):
    ops: tuple[Op, ...] = Field(min_length=1)
    max_range: int | None = Field(default=None, ge=1)


def _partition(instance: PartitionInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    parts = len(instance.ops[0].times)
    require_at_most(MOST_TIMES, operators=len(instance.ops), numbers_of_parts=parts)
    for number, op in enumerate(instance.ops):
        if len(op.times) != parts:
            raise InputError(f"operator {number} has {len(op.times)} times, the first one {parts}; wanted equally many")
    chain = ChainInstance(
        network=np.array([op.kind == "comm" for op in instance.ops]),
        times=np.array([[np.inf if seconds is None else seconds for seconds in op.times] for op in instance.ops]),
    )
    result = partition(chain, max_range=instance.max_range, stop=stop)
    return result, {
        "ranges": [
            {"first": part_range.first, "last": part_range.last, "parts": part_range.parts}
            for part_range in result.solution
        ]
    }


AxisName = StrictInt | StrictStr


class Constraint(Frozen):
    tensors: tuple[str, ...]
    allowed: tuple[tuple[AxisName, ...], ...]


class PartitionAxesInstance(Frozen):
    domains: dict[str, tuple[AxisName, ...]]
    constraints: tuple[Constraint, ...] = ()
    count: bool = False


def _partition_axes(instance: PartitionAxesInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    start = time.perf_counter()
    listed = sum(len(constraint.tensors) * len(constraint.allowed) for constraint in instance.constraints)
    require_at_most(MOST_NUMBERS, axes_in_combinations=listed)
    require_at_most(MOST_NUMBERS, axes_of_tensors=sum(map(len, instance.domains.values())))
    problem = AxisProblem(
        instance.domains,
        [AxisConstraint(constraint.tensors, constraint.allowed) for constraint in instance.constraints],
    )
    result = partition_axes(problem, options.time_limit, options.seed, stop)
    decided = result.status in (Status.OPTIMAL, Status.INFEASIBLE)
    answer = {"satisfiable": result.solution is not None if decided else None, "axis_of_tensor": result.solution}
    if not instance.count:
        return result, answer
    answer["solutions"] = count_axes(problem, stop)
    status = Status.CANCELLED if answer["solutions"] is None else result.status
    counted = Result(status, 0.0, 0.0, time.perf_counter() - start, result.solution, result.provenance)
    return counted, answer


KERNELS: dict[str, Face] = {
    "partition": (PartitionInstance, _partition),
    "partition-axes": (PartitionAxesInstance, _partition_axes),
}
