"""One thing changed over a whole range: what plans take as they are, and what a plan made for each value would take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from engine.errors import InputError
from engine.parallel import in_order
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Status, Stop, never
from engine.studies.sensitivity import seconds_of
from engine.studies.what_if import Change, changed
from engine.systems import run
from engine.systems.base import Report, System, silent
from engine.systems.options import Value

Field = Literal["network", "compute", "latency", "contention", "tokens", "width", "noise"]

MOST_VALUES = 32
ANEW = "planned anew"
"""The series of plans made for each value."""


@dataclass(frozen=True)
class CurvePoint:
    """Seconds of a plan at a value of what is changed; None where it does not fit there. series: name of the plan."""

    series: str
    value: float
    total: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The point that `to_dict` described."""
        return cls(**data)


def changes_of(field: Field, values: Sequence[float]) -> list[Change]:
    """The changes, ascending, each once. Raises InputError for none, too many and such as cannot be."""
    ascending = sorted(set(values))
    if not 1 <= len(ascending) <= MOST_VALUES:
        raise InputError(f"{field}: give 1 to {MOST_VALUES} values, not {len(ascending)}")
    return [Change.from_dict({field: value}, f"{field} {value:g}") for value in ascending]


def curve(
    problem: Problem,
    field: Field,
    values: Sequence[float],
    plans: Mapping[str, Plan],
    anew: tuple[System, Mapping[str, Value]] | None = None,
    stop: Stop = never,
    report: Report = silent,
) -> Iterator[CurvePoint]:
    """Value by value every plan as it is, then with `anew` (a system and its options) the plan that it makes for that value;
    heuristics may find a slower one. Raises InputError for values that cannot be."""
    changes = changes_of(field, values)

    def begun(finished: int, index: int) -> None:
        report(finished / len(changes), f"{field} {getattr(changes[index], field):g}")

    common = (problem, field, changes, dict(plans), anew and (anew[0], dict(anew[1])))
    for _, points in in_order(_points_at, common, len(changes), stop, begun):
        yield from points


def _points_at(common: tuple, index: int, stop: Stop, report: Report) -> list[CurvePoint]:
    """The points of all series at a value; without the plan made for it when stopped before that was there."""
    problem, field, changes, plans, anew = common
    change = changes[index]
    value = getattr(change, field)
    points = [CurvePoint(name, value, _seconds(plan, problem, change)) for name, plan in plans.items()]
    if anew is None:
        return points
    try:
        then = changed(problem, change)
        system, options = anew
        result = run(system, then, options, stop).result
    except InputError:
        return [*points, CurvePoint(ANEW, value, None)]
    if result.status is Status.CANCELLED:
        return points
    return [*points, CurvePoint(ANEW, value, seconds_of(result.solution, then))]


def _seconds(plan: Plan, problem: Problem, change: Change) -> float | None:
    try:
        return seconds_of(plan, changed(problem, change))
    except InputError:
        return None
