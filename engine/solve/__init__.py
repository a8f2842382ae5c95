"""`solve KERNEL`: one kernel on its bare mathematical problem, JSON in and JSON out (see docs/kernels.md)."""

import math
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from engine.errors import InputError
from engine.result import Limits, Result, Status, Stop
from engine.schema import TOO_FAR_APART, Frozen, long_json_text

PLACING, SCHEDULING = "engine.solve.placing", "engine.solve.scheduling"

PLACED = ("assign", "colocate", "colocate-heterogeneous", "affinity", "coactivation", "popularity", "replicate-devices")
KERNELS = {"order": SCHEDULING} | dict.fromkeys((*PLACED, "replicate"), PLACING)
KERNELS |= dict.fromkeys(("pipeline-degree", "partition", "partition-axes", "priority"), SCHEDULING)
KERNELS |= dict.fromkeys(("weight-gradients", "travel", "two-tier"), SCHEDULING)
"""Every kernel with the module that has its schema and its call; that module imports a kernel when it is asked for."""


class Options(Frozen):
    """Options of every kernel.

    time_limit: seconds
    exact: True asks for a proof, from the kernels that have a choice
    """

    time_limit: float = Field(default=60, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**31)
    exact: bool = True

    @property
    def limits(self) -> Limits:
        return Limits(self.time_limit, seed=self.seed, exact=self.exact)


Table = tuple[tuple[float, ...], ...]
Answer = tuple[Result, dict[str, Any]]
Face = tuple[type[Frozen], Callable[[Any, Options, Stop], Answer]]
"""The schema of a kernel's instances, and a function that answers one with the result and the solution as JSON."""


def face(kernel: str) -> Face:
    """The schema and the call of a kernel. Raises InputError for an unknown name."""
    if kernel not in KERNELS:
        raise InputError(f"there is no kernel '{kernel}' (there are: {', '.join(KERNELS)})")
    return import_module(KERNELS[kernel]).FACES[kernel]


def solve(kernel: str, instances: Any, options: Options) -> Any:
    """Answer one instance (an object) or several (an array); raises InputError for anything malformed."""
    schema_and_call = face(kernel)
    if isinstance(instances, list):
        return [_answer(schema_and_call, each, options, f"instance {index}") for index, each in enumerate(instances)]
    return _answer(schema_and_call, instances, options, kernel)


def _answer(schema_and_call: Face, instance: Any, options: Options, where: str) -> dict[str, Any]:
    schema, call = schema_and_call
    parsed = schema.from_dict(instance, where)
    deadline = time.monotonic() + options.time_limit
    try:
        # Numbers that overflow on the way are found below, as the answer is not finite then.
        with np.errstate(all="ignore"):
            result, solution = call(parsed, options, lambda: time.monotonic() > deadline)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except (ValidationError, OverflowError):
        raise InputError(f"{where}: {TOO_FAR_APART}") from None
    # Nothing but the deadline stops a kernel here.
    status = Status.TIME_LIMIT if result.status is Status.CANCELLED else result.status
    figures = {name: getattr(result, name) for name in ("objective", "bound", "runtime")}
    answer = {"status": status.value, **figures, **solution}
    try:
        long_json_text(answer)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return answer


def require_at_most(most: int, **sizes: int) -> None:
    """Refuse an instance that could not be answered within a second or two of any time limit.

    most: the largest allowed product of the sizes
    sizes: the sizes that the work or the memory is proportional to, by name
    """
    if math.prod(sizes.values()) > most:
        names = " × ".join(f"{size:,} {name.replace('_', ' ')}" for name, size in sizes.items())
        raise InputError(f"{names} are too many to be answered within a time limit; at most {most:,} together")


def matrix(rows: Table, name: str) -> np.ndarray:
    """float64[row, column]; raises InputError when the rows differ in length or there are none."""
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise InputError(f"{name} must be a matrix with rows of equal length")
    return np.array(rows, dtype=np.float64)
