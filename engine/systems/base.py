"""What a system is: a named recipe from a problem to a plan, with options."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import InputError
from engine.plan import Claim, Execution, Overlap, Pipeline, Placement, Plan, Priority, Reaction, SendOrder
from engine.problem import Problem
from engine.result import Provenance, Result, Status, Stop, library_versions, never
from engine.simulate.inference import bound_of_plan, simulate
from engine.simulate.metrics import input_digests
from engine.timeline import Timeline
from engine.units import share

Value = str | int | float | bool
Report = Callable[[float, str, float | None, float | None], None]
"""Called with the share done, a message, the best objective so far and the bound so far."""


def silent(done: float, message: str, incumbent: float | None = None, bound: float | None = None) -> None:
    """The `Report` of work that nobody watches."""


@dataclass(frozen=True)
class Option:
    """One setting of a system. `choices` limits a text option; numbers are limited to [low, high]."""

    name: str
    default: Value
    help: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = float("inf")

    def parse(self, value: Value) -> Value:
        """`value` (typed by a person, or already typed) as this option's type; raises InputError."""
        kind = type(self.default)
        try:
            if kind is bool and isinstance(value, str):
                parsed = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[value.lower()]
            else:
                parsed = kind(value)
                if kind is int and isinstance(value, float) and parsed != value:
                    raise ValueError
        except (KeyError, ValueError, TypeError, OverflowError):
            raise InputError(f"option {self.name}: '{value}' is not {_KIND_NAMES[kind]}") from None
        if self.choices and parsed not in self.choices:
            raise InputError(f"option {self.name}: '{value}' is not one of {', '.join(self.choices)}")
        if kind in (int, float) and not self.low <= parsed <= self.high:
            raise InputError(f"option {self.name}: {value} is not between {self.low:g} and {self.high:g}")
        return parsed


_KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}

SEED = Option("seed", 0, "the same seed gives the same plan", high=2**31 - 1)


class Note(NamedTuple):
    """One thing a recipe found out. unit: "s", "×" (a ratio) or "" (the value is a text)."""

    value: str | float
    unit: str = ""


Notes = dict[str, Note]
"""By what they are about, in words that can stand before a colon."""


def proof_of(result: Result) -> str:
    """How far an objective is proven, in words."""
    if result.status is Status.OPTIMAL:
        return "proven optimal"
    return (
        f"a heuristic, {share(result.gap)} above its proven bound"
        if result.bound > 0
        else "a heuristic without a bound"
    )


@dataclass(frozen=True)
class Draft:
    """What a recipe hands back: the parts of a plan and a bound (None: only the send order was a choice).

    notes: what the recipe found out that a person should read, such as the paper's own rule beside ours.
    """

    placement: Placement
    send_order: SendOrder
    bound: float | None = None
    notes: Notes = field(default_factory=dict)
    cancelled: bool = False
    execution: Execution = "vanilla"
    placement_b: Placement | None = None
    send_order_b: SendOrder | None = None
    reaction: Reaction | None = None
    priority: Priority | None = None
    pipeline: Pipeline | None = None
    overlap: Overlap | None = None

    def plan(self, name: str, provenance: Provenance) -> Plan:
        """The plan that these parts make."""
        return Plan(
            name=name,
            placement=self.placement,
            send_order=self.send_order,
            execution=self.execution,
            placement_b=self.placement_b,
            send_order_b=self.send_order_b,
            reaction=self.reaction,
            priority=self.priority,
            pipeline=self.pipeline,
            overlap=self.overlap,
            provenance=provenance,
        )


@dataclass(frozen=True)
class Outcome:
    """A system's answer: the result (its solution is the plan), the recipe's notes and the plan's simulated timeline."""

    result: Result[Plan]
    notes: Notes
    timeline: Timeline


@dataclass(frozen=True)
class System:
    """A recipe. `summary` is one line for people, `paper` the source, `baseline` marks what others are compared to;
    `models`: how many models at once it can plan for."""

    name: str
    title: str
    summary: str
    paper: str
    recipe: Callable[[Problem, dict[str, Value], Stop, Report], Draft]
    options: tuple[Option, ...] = ()
    baseline: bool = False
    models: tuple[int, ...] = (1,)

    def settings(self, given: dict[str, Value]) -> dict[str, Value]:
        """All options with their values; raises InputError for one that this system does not have."""
        known = {option.name: option for option in self.options}
        if unknown := sorted(set(given) - set(known)):
            has = ", ".join(known) or "none"
            raise InputError(f"{self.name} has no option '{unknown[0]}' (it has: {has})")
        return {name: option.parse(given.get(name, option.default)) for name, option in known.items()}


def run(
    system: System,
    problem: Problem,
    options: dict[str, Value] | None = None,
    stop: Stop = never,
    report: Report = silent,
) -> Outcome:
    """Run a system. The objective is the simulated time in seconds, never the recipe's own estimate."""
    begin = time.perf_counter()
    settings = system.settings(options or {})
    open_models = 1 if problem.second is None else 2
    if open_models not in system.models:
        raise InputError(
            f"{system.title} plans one model at a time; close the second model, or choose one of the systems for two"
            if open_models == 2
            else f"{system.title} places two models on one cluster; open a second recording and its model"
        )
    draft = system.recipe(problem, settings, stop, report)
    provenance = Provenance(
        optimiser=system.name,
        options=settings,
        seed=int(settings.get("seed", 0)),
        versions=library_versions(),
        inputs=input_digests(problem),
    )
    plan = draft.plan(system.title, provenance)
    timeline = simulate(plan, problem)
    objective = timeline.total
    bound = bound_of_plan(plan, problem) if draft.bound is None else draft.bound
    if bound > objective * (1 + 1e-6):
        raise AssertionError(f"{system.name}: the bound {bound} lies above the simulated time {objective}")
    bound = min(bound, objective)
    proven = Status.OPTIMAL if objective <= bound * (1 + 1e-9) else Status.FEASIBLE
    status = Status.CANCELLED if draft.cancelled else proven
    scope = "order" if draft.bound is None else "placement and order"
    if problem.step is not None:
        scope = "schedule"
    plan = plan.model_copy(update={"claim": Claim(status=status, objective=objective, bound=bound, scope=scope)})
    result = Result(status, objective, bound, time.perf_counter() - begin, plan, provenance)
    return Outcome(result, draft.notes, timeline)
