"""`solve KERNEL`: one kernel on its bare mathematical problem, JSON in and JSON out (see docs/kernels.md)."""

import time
from typing import Any

import numpy as np
from pydantic import ValidationError

from engine.errors import InputError
from engine.result import Status
from engine.schema import TOO_FAR_APART, long_json_text
from engine.solve import (
    affinity,
    assign,
    coactivation,
    colocate,
    order,
    partition,
    pipeline_degree,
    popularity,
    priority,
    replicate,
    replicate_devices,
    travel,
    two_tier,
    weight_gradients,
)
from engine.solve.instance import Face, Options

KERNELS: dict[str, Face] = order.KERNELS | assign.KERNELS | colocate.KERNELS | affinity.KERNELS
KERNELS |= coactivation.KERNELS
KERNELS |= popularity.KERNELS | replicate_devices.KERNELS | replicate.KERNELS
KERNELS |= pipeline_degree.KERNELS
KERNELS |= partition.KERNELS
KERNELS |= priority.KERNELS
KERNELS |= weight_gradients.KERNELS
KERNELS |= travel.KERNELS
KERNELS |= two_tier.KERNELS

__all__ = ["KERNELS", "Options", "solve"]


def solve(kernel: str, instances: Any, options: Options) -> Any:
    """Answer one instance (an object) or several (an array); raises InputError for anything malformed."""
    if kernel not in KERNELS:
        raise InputError(f"there is no kernel '{kernel}' (there are: {', '.join(KERNELS)})")
    if isinstance(instances, list):
        return [_answer(kernel, instance, options, f"instance {index}") for index, instance in enumerate(instances)]
    return _answer(kernel, instances, options, kernel)


def _answer(kernel: str, instance: Any, options: Options, where: str) -> dict[str, Any]:
    schema, function = KERNELS[kernel]
    parsed = schema.from_dict(instance, where)
    deadline = time.monotonic() + options.time_limit
    try:
        # Numbers that overflow on the way are found below, where what came of them is not finite.
        with np.errstate(all="ignore"):
            result, solution = function(parsed, options, lambda: time.monotonic() > deadline)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except (ValidationError, OverflowError):
        raise InputError(f"{where}: {TOO_FAR_APART}") from None
    # The deadline is the only thing that stops a kernel here.
    status = Status.TIME_LIMIT if result.status is Status.CANCELLED else result.status
    answer = {
        "status": status.value,
        "objective": result.objective,
        "bound": result.bound,
        "runtime": result.runtime,
        **solution,
    }
    try:
        long_json_text(answer)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return answer
