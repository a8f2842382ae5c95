"""What a plan's time hangs on: every parameter a little less and a little more, everything else and the plan as they are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from engine.errors import InputError
from engine.goal import Goal
from engine.parallel import in_order
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Stop, never
from engine.studies.what_if import Change, changed, is_quick, least, outlook
from engine.systems.base import Report, silent

SHARES = (0.01, 0.9)
"""Least and most by which parameters are changed."""


@dataclass(frozen=True)
class Parameter:
    """Something that a time depends on. field: of `Change`; gpu_type: on GPUs of this type alone."""

    title: str
    field: str
    gpu_type: str | None = None

    def times(self, factor: float) -> Change:
        """The parameter `factor` times as large."""
        return Change.from_dict({self.field: factor, "gpu_type": self.gpu_type}, self.title)


@dataclass(frozen=True)
class SensitivityPoint:
    """Seconds of the plan with a parameter at (1 - share) and at (1 + share) times its value."""

    title: str
    less: float
    more: float

    @property
    def reach(self) -> float:
        """Seconds between the two."""
        return abs(self.more - self.less)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The point that `to_dict` described."""
        return cls(**data)


def parameters_of(problem: Problem) -> tuple[Parameter, ...]:
    """What can be changed: of a cluster of several GPU types also each type's own computation and network. Start-up times
    only where there are any; of a training step no sizes of the model."""
    network = problem.network
    parameters = [Parameter("network bandwidth", "network"), Parameter("computation speed", "compute")]
    if network.latency > 0 or network.link_latency.any():
        parameters.append(Parameter("latency", "latency"))
    if problem.goal is Goal.TRAINING:
        return (*parameters, *([Parameter("batch", "tokens")] if problem.graph is None else []))
    parameters += [Parameter("tokens", "tokens"), Parameter("model width", "width")]
    types = dict.fromkeys(gpu.type for gpu in problem.cluster.gpus)
    if len(types) > 1:
        for kind in types:
            parameters += [
                Parameter(f"{kind}: network", "network", kind),
                Parameter(f"{kind}: computation", "compute", kind),
            ]
    return tuple(parameters)


def is_simulated(problem: Problem) -> bool:
    """Whether the study simulates; one model on very many GPUs takes what its busiest ports need (`what_if.least`)."""
    return is_quick(problem) or problem.goal is Goal.TWO_MODELS


def seconds_of(plan: Plan, problem: Problem) -> float:
    """Seconds of a plan, as the study counts them."""
    return (outlook if is_simulated(problem) else least)(plan, problem).total


def sensitivity(
    plan: Plan,
    problem: Problem,
    share: float,
    parameters: Sequence[Parameter],
    stop: Stop = never,
    report: Report = silent,
) -> Iterator[SensitivityPoint]:
    """Simulate the plan with one parameter after another at (1 - share) and (1 + share) times its value. Raises InputError
    for a share that cannot be, and for a plan that does not fit."""
    if not SHARES[0] <= share <= SHARES[1]:
        raise InputError(f"the share {share:g} is not between {SHARES[0]:g} and {SHARES[1]:g}")

    def begun(finished: int, index: int) -> None:
        report(finished / len(parameters), parameters[index].title)

    common = (plan, problem, share, tuple(parameters))
    for _, point in in_order(_point_of_parameter, common, len(parameters), stop, begun):
        yield point


def _point_of_parameter(
    common: tuple[Plan, Problem, float, tuple[Parameter, ...]], index: int, stop: Stop, report: Report
) -> SensitivityPoint:
    plan, problem, share, parameters = common
    parameter = parameters[index]
    seconds = (seconds_of(plan, changed(problem, parameter.times(factor))) for factor in (1 - share, 1 + share))
    return SensitivityPoint(parameter.title, *seconds)
