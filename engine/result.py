"""The answer of every optimisation kernel, and the calls with which its work is watched and ended."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from engine.schema import Frozen, require_finite

Floats, Ints, Bools = NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]
"""The arrays of kernels; docstrings have their axes."""

Solution = TypeVar("Solution")

Stop = Callable[[], bool]
"""Asked between steps of long work; True means: return the best found so far, with status CANCELLED."""


def never() -> bool:
    """The `Stop` of work that nobody can cancel."""
    return False


GUARD = 20.0
"""Multiple of the usual seconds after which a `Guard` ends work that is limited by its amount: only in emergencies."""


class Guard:
    """A `Stop` that also answers True once some wall seconds have passed, and remembers that it did.

    Kernels limit their work by its amount, so that a busy machine finds the same answer later. A guard keeps a person from
    waiting for ever, and tells afterwards whether it cut something short.

    stop: asked first
    seconds: from now
    parent: the guard of the whole, for a part of the work
    """

    def __init__(self, stop: Stop, seconds: float, parent: "Guard | None" = None) -> None:
        self.stop, self.parent, self.cut = stop, parent, False
        self.until = time.perf_counter() + seconds

    def __call__(self) -> bool:
        if self.stop():
            return True
        late = time.perf_counter() > self.until
        if late and not self.cut:
            self.cut = True
            if self.parent:
                self.parent.cut = True
        return late

    def part(self, parts: int) -> "Guard":
        """The guard of the next of `parts` equal parts of the work left; if it cuts, so does this one."""
        return Guard(self.stop, (self.until - time.perf_counter()) / parts, self)


@dataclass(frozen=True)
class Limits:
    """Limits of a kernel's work. Same input and limits, same answer, unless the clock decided.

    seconds: work, in seconds of an ordinary core as estimated from its amount
    wall: seconds after which the clock ends the work, by default as many; later, a busy machine changes no answer
    seed: of random choices
    exact: True asks for a proof, from the kernels that have a choice
    """

    seconds: float = 10.0
    wall: float | None = None
    seed: int = 0
    exact: bool = True

    @property
    def wall_seconds(self) -> float:
        return self.seconds if self.wall is None else self.wall


Report = Callable[[float, float], None]
"""Called with (objective, bound) after improvements of either."""

Advance = Callable[[float], None]
"""Called now and then with the share of some work that is done, 0 … 1."""


def unwatched(done: float) -> None:
    """The `Advance` of work that nobody watches."""


class Status(StrEnum):
    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"
    TIME_LIMIT = "TIME_LIMIT"
    CANCELLED = "CANCELLED"


class Provenance(Frozen):
    """The origin of an answer: enough to make it again."""

    optimiser: str
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    seed: int = 0
    versions: dict[str, str] = Field(default_factory=dict)
    inputs: dict[str, str] = Field(default_factory=dict, description="digest of every input, by role")


@cache
def library_versions() -> dict[str, str]:
    """Versions of the libraries that can change an answer. One that a machine lacks has changed none."""
    versions = {}
    for name in ("numpy", "scipy", "ortools"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


@dataclass(frozen=True)
class Result(Generic[Solution]):
    """An answer with the proof of how good it is.

    For a minimisation `bound <= optimum <= objective`. Raises InputError where objective or bound came out of numbers that
    have no finite answer; both may be infinite for INFEASIBLE.

    runtime: seconds
    solution: None when there is none
    """

    status: Status
    objective: float
    bound: float
    runtime: float
    solution: Solution
    provenance: Provenance = field(default_factory=lambda: Provenance(optimiser=""))

    def __post_init__(self) -> None:
        if self.status is not Status.INFEASIBLE:
            require_finite(self.objective, self.bound)

    @property
    def gap(self) -> float:
        """(objective - bound) / bound; 0 when both are 0, infinite when only the bound is."""
        return relative_gap(self.objective, self.bound)


def result_of(
    optimiser: str,
    started: float,
    status: Status,
    objective: float,
    bound: float,
    solution: Solution,
    options: dict[str, str | int | float | bool] | None = None,
    seed: int = 0,
) -> Result[Solution]:
    """The result of a kernel that began at `started` of `time.perf_counter`, with its provenance."""
    provenance = Provenance(optimiser=optimiser, options=options or {}, seed=seed, versions=library_versions())
    return Result(status, objective, bound, time.perf_counter() - started, solution, provenance)


def status_of(proven: bool, stop: Stop, limited: bool) -> Status:
    """The status of an answer. limited: True if a limit ended the search or the proof."""
    if proven:
        return Status.OPTIMAL
    if stop():
        return Status.CANCELLED
    return Status.TIME_LIMIT if limited else Status.FEASIBLE


Unbounded = Literal["measured exchanges have no order to choose", "every batch has a placement of its own"]
"""The reason for which no bound on the order of a plan's sends says how much another order would gain."""


NOT_BOUNDED = "not bounded"
"""Stands where a gap above a bound would, in a table or a small figure."""


def not_bounded(reason: Unbounded) -> str:
    """The sentence that stands where a bound on order would, without its full stop."""
    return f"{NOT_BOUNDED}: {reason}"


def relative_gap(objective: float, bound: float) -> float:
    """Distance of `objective` above `bound`, relative to `bound`; never negative (round-off is cut at 0)."""
    if objective <= bound:
        return 0.0
    return (objective - bound) / bound if bound > 0 else float("inf")
