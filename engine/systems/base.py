"""A system: a named recipe from a problem to a plan, with options."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Claim, Execution, Offload, Overlap, Pipeline, Placement, Plan, Priority, Reaction, SendOrder, Travel
from engine.problem import Problem
from engine.provenance import input_digests
from engine.result import Provenance, Result, Status, Stop, library_versions, never
from engine.simulate import claimable_bound, loads_of, simulate
from engine.simulate.work import Load
from engine.systems.options import Options, Value
from engine.timeline import Timeline
from engine.units import share

Report = Callable[[float, str, float | None, float | None], None]
"""Called with the share done, a message, the best objective so far and the bound so far."""


CUT_SHORT = "time ran out and cut the search short; on a quieter machine, or with a longer time limit, the plan may be better"


def silent(done: float, message: str, incumbent: float | None = None, bound: float | None = None) -> None:
    """The `Report` of unwatched work."""


class Note(NamedTuple):
    """A finding of a recipe. unit: "s", "×" (a ratio) or "" (the value is a text)"""

    value: str | float
    unit: str = ""


Notes = dict[str, Note]
"""Notes by their subject, in words that can stand before a colon."""


def proof_of(result: Result) -> str:
    """The proof of an objective, in words."""
    if result.status is Status.OPTIMAL:
        return "proven optimal"
    return f"a heuristic, {share(result.gap)} above its proven bound" if result.bound > 0 else "a heuristic without a bound"


@dataclass(frozen=True)
class Draft:
    """The answer of a recipe: the parts of a plan and a bound (None: only the send order was a choice).

    bound: seconds below which no placement is, by one row per token copy in the model's format, as all kernels count; `run`
        claims none where tokens travel otherwise, for then bytes are not the sum over experts
    notes: findings for people, such as the paper's own rule compared with ours
    limited: True if a time limit cut the work short
    timeline: the predicted one, if the recipe has simulated just these parts
    loads: of the placements (see `loads_of`), if the recipe has them
    travel: of the tokens, where the recipe chose it; None: the problem's
    judged_seconds: by which the recipe compared its plans
    name: of the plan, if it is only a part of the system's work; None: the system's title
    """

    placement: Placement
    send_order: SendOrder
    bound: float | None = None
    notes: Notes = field(default_factory=dict)
    cancelled: bool = False
    limited: bool = False
    execution: Execution = "vanilla"
    placement_b: Placement | None = None
    send_order_b: SendOrder | None = None
    token_gpus: tuple[int, ...] | None = None
    token_gpus_b: tuple[int, ...] | None = None
    reaction: Reaction | None = None
    priority: Priority | None = None
    pipeline: Pipeline | None = None
    overlap: Overlap | None = None
    offload: Offload | None = None
    timeline: Timeline | None = None
    loads: tuple[Load, ...] | None = None
    travel: Travel | None = None
    judged_seconds: float | None = None
    name: str | None = None

    def plan(self, title: str, provenance: Provenance, travel: Travel | None = None) -> Plan:
        """The plan that these parts make.

        title: of the system
        travel: of its tokens, unless the recipe chose
        """
        parts = {part: getattr(self, part) for part in PARTS}
        return Plan(name=self.name or title, travel=self.travel or travel, provenance=provenance, **parts)


PARTS = tuple(own.name for own in fields(Draft) if own.name in Plan.model_fields and own.name not in ("name", "travel"))
"""Fields of a plan that a recipe fills in."""


@dataclass(frozen=True)
class Outcome:
    """A system's answer: the result (its solution is the plan), the recipe's notes, the plan's simulated timeline and loads."""

    result: Result[Plan]
    notes: Notes
    timeline: Timeline
    loads: tuple[Load, ...] = ()


Recipe = Callable[[Problem, Any, Stop, Report], Draft]
"""The work of a system: from a problem and its own options (an instance of `System.options`) to the parts of a plan. It asks
`stop` now and then, returns the best it has once that answers True, and tells `report` the share done; a quick one needs
neither."""


@dataclass(frozen=True)
class System:
    """A recipe under the name that users know, with all that the command line and the pages say of it.

    name: in commands and in plans
    title: for people
    summary: one line for people
    paper: the source
    options: the model of its settings
    goals: the goals that it can plan for
    baseline: others are compared with it
    preselected: ticked on the page until a person chooses
    shown_beside: its plan is shown with the open one until then
    """

    name: str
    title: str
    summary: str
    paper: str
    recipe: Recipe
    options: type[Options] = Options
    goals: tuple[Goal, ...] = (Goal.INFERENCE,)
    baseline: bool = False
    preselected: bool = False
    shown_beside: bool = False

    def settings(self, values: Mapping[str, Value]) -> Options:
        """All options with their values; raises InputError for a value that cannot be and for an option that this system does
        not have."""
        known = self.options.model_fields
        if unknown := sorted(set(values) - set(known)):
            has = ", ".join(known) or "none"
            raise InputError(f"{self.name} has no option '{unknown[0]}' (it has: {has})")
        return self.options.from_values(values)


def _wrong_goal(system: System, goal: Goal) -> str:
    """Message for a goal that a system cannot plan for, with the remedy."""
    if goal is Goal.TWO_MODELS and Goal.INFERENCE in system.goals:
        return f"{system.title} plans one model at a time; close the second model, or choose one of the systems for two"
    if goal is Goal.INFERENCE and Goal.TWO_MODELS in system.goals:
        return f"{system.title} places two models on one cluster; open a second recording and its model"
    return f"{system.title} plans {' and '.join(system.goals)}, but what is open is {goal}; change the goal"


def run(
    system: System, problem: Problem, options: Mapping[str, Value] | None = None, stop: Stop = never, report: Report = silent
) -> Outcome:
    """Run a system. The objective is the simulated time in seconds, never the recipe's own estimate."""
    begin = time.perf_counter()
    settings = system.settings(options or {})
    if problem.goal not in system.goals:
        raise InputError(_wrong_goal(system, problem.goal))
    draft = system.recipe(problem, settings, stop, report)
    if problem.travel is not None or draft.travel not in (None, Travel()):
        draft = replace(draft, bound=None)
    plan = draft.plan(system.title, _provenance(system, settings, problem), problem.travel)
    loads = draft.loads or loads_of(plan, problem)
    timeline = draft.timeline or simulate(
        plan, problem, stop, lambda share: report(share, "simulating the plan", None, None), loads
    )
    objective = timeline.total
    bound = claimable_bound(plan, problem, loads) if draft.bound is None else draft.bound
    if bound > objective * (1 + 1e-6):
        raise AssertionError(f"{system.name}: the bound {bound} lies above the simulated time {objective}")
    bound = min(bound, objective)
    proven = Status.OPTIMAL if objective <= bound * (1 + 1e-9) else Status.FEASIBLE
    status, notes = proven, draft.notes
    if draft.cancelled or stop():
        status = Status.CANCELLED
    elif draft.limited and (proven is Status.FEASIBLE or draft.bound is None):
        # A status is of the claim: where that is of the order alone, a search for placements cut short leaves it proven.
        status = Status.TIME_LIMIT if proven is Status.FEASIBLE else proven
        notes = notes | {"time limit": Note(CUT_SHORT)}
    scope = "order" if draft.bound is None else "placement and order"
    if problem.goal is Goal.TRAINING:
        scope = "schedule"
    plan = plan.model_copy(update={"claim": Claim(status=status, objective=objective, bound=bound, scope=scope)})
    result = Result(status, objective, bound, time.perf_counter() - begin, plan, plan.provenance)
    return Outcome(result, notes, timeline, loads)


def usual_plan(system: System, problem: Problem) -> tuple[Plan, Timeline | None]:
    """The plan of a quick system with its default options, without a claim: the one that `run` would make, for those who may
    have its timeline already. The timeline, where the recipe has simulated the plan."""
    settings = system.settings({})
    draft = system.recipe(problem, settings, never, silent)
    return draft.plan(system.title, _provenance(system, settings, problem), problem.travel), draft.timeline


def _provenance(system: System, settings: Options, problem: Problem) -> Provenance:
    return Provenance(
        optimiser=system.name,
        options=settings.model_dump(),
        seed=getattr(settings, "seed", 0),
        versions=library_versions(),
        inputs=input_digests(problem),
    )
