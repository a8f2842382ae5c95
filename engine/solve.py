"""`solve KERNEL`: one kernel on its bare mathematical problem, JSON in and JSON out (see the README)."""

import time
from typing import Any, Literal

import numpy as np
from pydantic import Field

from engine.communication.order import order
from engine.errors import InputError
from engine.placement.assignment import AssignmentInstance, assign
from engine.plan import Schedule
from engine.result import Result, Status, Stop
from engine.schema import Frozen


class Options(Frozen):
    """What every kernel understands. time_limit in seconds; `exact` asks for a proof where a kernel has a choice."""

    time_limit: float = Field(default=60, gt=0)
    seed: int = Field(default=0, ge=0)
    exact: bool = True


class OrderInstance(Frozen):
    traffic: tuple[tuple[float, ...], ...]
    bandwidth: float | tuple[float, ...]
    mode: Literal["matched", "shared"] = "matched"


class AssignInstance(Frozen):
    tokens: tuple[tuple[float, ...], ...]
    bandwidth: tuple[float, ...]
    seconds_per_token: tuple[float, ...]


def solve(kernel: str, instances: Any, options: Options) -> Any:
    """Answer one instance (an object) or several (an array); raises InputError for anything malformed."""
    if kernel not in KERNELS:
        raise InputError(f"there is no kernel '{kernel}' (there are: {', '.join(KERNELS)})")
    if isinstance(instances, list):
        return [_answer(kernel, one, options, f"instance {index}") for index, one in enumerate(instances)]
    return _answer(kernel, instances, options, kernel)


def _answer(kernel: str, instance: Any, options: Options, where: str) -> dict[str, Any]:
    schema, function = KERNELS[kernel]
    parsed = schema.from_dict(instance, where)
    deadline = time.monotonic() + options.time_limit
    try:
        result, solution = function(parsed, lambda: time.monotonic() > deadline)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    # The deadline is the only thing that stops a kernel here.
    status = Status.TIME_LIMIT if result.status is Status.CANCELLED else result.status
    return {
        "status": status.value,
        "objective": result.objective,
        "bound": result.bound,
        "runtime": result.runtime,
        **solution,
    }


def _order(instance: OrderInstance, stop: Stop) -> tuple[Result, dict[str, Any]]:
    traffic = matrix(instance.traffic, "traffic")
    given = instance.bandwidth
    bandwidth = np.full(len(traffic), given) if isinstance(given, float) else np.array(given)
    result = order(traffic, bandwidth, bandwidth, instance.mode, stop)
    return result, {"phases": phases(result.solution)}


def phases(schedule: Schedule) -> list[dict[str, Any]]:
    """A schedule as [{duration, sends: [{src, dst, bytes}]}]."""
    listed: list[dict[str, Any]] = [{"duration": duration, "sends": []} for duration in schedule.duration]
    for src, dst, size, phase in zip(schedule.src, schedule.dst, schedule.bytes, schedule.phase, strict=True):
        listed[phase]["sends"].append({"src": src, "dst": dst, "bytes": size})
    return listed


def _assign(instance: AssignInstance, stop: Stop) -> tuple[Result, dict[str, Any]]:
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


def matrix(rows: tuple[tuple[float, ...], ...], name: str) -> np.ndarray:
    """float64[row, column]; raises InputError when the rows differ in length or there are none."""
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise InputError(f"{name} must be a matrix with rows of equal length")
    return np.array(rows, dtype=np.float64)


KERNELS = {"order": (OrderInstance, _order), "assign": (AssignInstance, _assign)}
