"""What every kernel's face shares: options, and numbers from JSON."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.result import Result, Stop
from engine.schema import Frozen


class Options(Frozen):
    """What every kernel understands. time_limit in seconds; `exact` asks for a proof where a kernel has a choice."""

    time_limit: float = Field(default=60, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**31)
    exact: bool = True


Face = tuple[type[Frozen], Callable[[Any, Options, Stop], tuple[Result, dict[str, Any]]]]
"""The schema of a kernel's instances, and what answers one: the result, and the solution as JSON."""


def require_at_most(most: int, **sizes: int) -> None:
    """Raises InputError where the sizes of an instance, whose product its work or memory grows with, are beyond what has an
    answer within a second or two of any time limit."""
    if math.prod(sizes.values()) > most:
        names = " × ".join(f"{size:,} {name.replace('_', ' ')}" for name, size in sizes.items())
        raise InputError(f"{names} are too many to be answered within a time limit; at most {most:,} together")


def matrix(rows: tuple[tuple[float, ...], ...], name: str) -> np.ndarray:
    """float64[row, column]; raises InputError when the rows differ in length or there are none."""
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise InputError(f"{name} must be a matrix with rows of equal length")
    return np.array(rows, dtype=np.float64)
