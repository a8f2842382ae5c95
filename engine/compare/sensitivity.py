"""The sensitivity of a plan's time: every parameter a little less and a little more, everything else and the plan as they are.

The time is of the whole step where a serving step is given, else of a pass through the MoE layers or of a training step.

A curve changes one thing over a whole range, for plans as they are and for a plan made for each value.
The operators of a training step are summed up here too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.compare.contention import CONTENTIONS
from engine.compare.imprecision import LEVELS
from engine.compare.what_if import FIXED, NO_CHANGE, Change, changed, is_quick, least, outlook, served_after
from engine.errors import InputError, StoppedError
from engine.goal import Goal
from engine.overlap.operator_graph import OperatorGraph
from engine.overlap.transformer import transformer_step
from engine.parallel import reported
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Status, Stop, never
from engine.simulate.serving import Serving
from engine.simulate.training.pricing import price_step
from engine.systems import proposed_for, run, systems_for
from engine.systems.base import Report, System, silent
from engine.systems.options import Value
from engine.systems.pieces import linear_placement

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
    """Seconds of the plan with a parameter at (1 - share) and at (1 + share) times its value.

    less_rate, more_rate: of a serving step its tokens a second and GPU there; None of anything else
    """

    title: str
    less: float
    more: float
    less_rate: float | None = None
    more_rate: float | None = None

    @property
    def reach(self) -> float:
        """Seconds between the two."""
        return abs(self.more - self.less)


def parameters_of(problem: Problem, serving: Serving | None = None) -> tuple[Parameter, ...]:
    """The parameters that can change: in a cluster of several GPU types also each type's own computation and network. Start-up
    times only if there are any; of a training or serving step no sizes of the model."""
    network = problem.network
    parameters = [Parameter("network bandwidth", "network"), Parameter("computation speed", "compute")]
    if network.latency > 0 or network.link_latency.any():
        parameters.append(Parameter("latency", "latency"))
    if problem.goal is Goal.TRAINING:
        return (*parameters, *([Parameter("batch", "tokens")] if problem.graph is None else []))
    if serving is None:
        parameters += [Parameter("tokens", "tokens"), Parameter("model width", "width")]
    else:
        parameters.append(Parameter("batch", "tokens"))
    types = dict.fromkeys(gpu.type for gpu in problem.cluster.gpus)
    if len(types) > 1:
        for kind in types:
            parameters += [Parameter(f"{kind}: network", "network", kind), Parameter(f"{kind}: computation", "compute", kind)]
    return tuple(parameters)


def is_simulated(problem: Problem, serving: Serving | None = None) -> bool:
    """True if the study simulates, as it does every serving step; a pass of one model on very many GPUs takes the time of its
    busiest ports (`what_if.least`)."""
    return serving is not None or is_quick(problem) or problem.goal is Goal.TWO_MODELS


@dataclass(frozen=True)
class Pace:
    """Seconds of a plan, and of a serving step its tokens a second and GPU."""

    seconds: float
    rate: float | None = None


def pace_of(
    plan: Plan, problem: Problem, change: Change = NO_CHANGE, serving: Serving | None = None, stop: Stop = never
) -> Pace:
    """The time of a plan after a change, as the studies count it. Raises InputError when the change cannot be or the plan does
    not fit, and StoppedError once `stop` answers True: a step simulated in a hurry is no point."""
    if serving is not None:
        figures = served_after(problem, plan, change, serving, stop).figures
        if stop():
            raise StoppedError("stopped before the step was simulated")
        return Pace(figures.seconds, figures.tokens_per_second)
    then = problem if change.is_none else changed(problem, change)
    return Pace((outlook if is_simulated(then) else least)(plan, then).total)


def sensitivity(
    plan: Plan,
    problem: Problem,
    share: float,
    parameters: Sequence[Parameter],
    stop: Stop = never,
    report: Report = silent,
    serving: Serving | None = None,
) -> Iterator[SensitivityPoint]:
    """Simulate the plan with one parameter after another at (1 - share) and (1 + share) times its value. Raises InputError
    for a share that cannot be, and for a plan that does not fit."""
    if not SHARES[0] <= share <= SHARES[1]:
        raise InputError(f"the share {share:g} is not between {SHARES[0]:g} and {SHARES[1]:g}")
    common, titles = (plan, problem, share, tuple(parameters), serving), [parameter.title for parameter in parameters]
    for _, point in reported(_point_of_parameter, common, titles, stop, report):
        yield point


def _point_of_parameter(
    common: tuple[Plan, Problem, float, tuple[Parameter, ...], Serving | None], index: int, stop: Stop, report: Report
) -> SensitivityPoint | None:
    """None when stopped."""
    plan, problem, share, parameters, serving = common
    changes = [parameters[index].times(factor) for factor in (1 - share, 1 + share)]
    try:
        less, more = (pace_of(plan, problem, change, serving, stop) for change in changes)
    except StoppedError:
        return None
    return SensitivityPoint(parameters[index].title, less.seconds, more.seconds, less.rate, more.rate)


def operators_of(problem: Problem) -> OperatorGraph:
    """The graph of a problem's training step. Raises InputError when it has none."""
    if problem.goal is not Goal.TRAINING:
        raise InputError("there is no training step; describe one with --training")
    return problem.graph or transformer_step(problem.model, problem.step, len(problem.cluster.gpus))


def describe_graph(problem: Problem, graph: OperatorGraph) -> dict[str, Any]:
    """Operators by phase and kind: how many, their FLOP, the bytes they send, and their seconds on the slowest GPU with
    experts in contiguous blocks. Plain JSON."""
    priced = price_step(problem, linear_placement(problem), parts=1)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for operator, seconds in zip(priced.graph.operators, priced.seconds[:, 0].max(axis=1), strict=True):
        row = rows.setdefault(
            (operator.phase, operator.kind),
            {"phase": operator.phase, "kind": operator.kind, "operators": 0, "flop": 0.0, "sent": 0.0, "seconds": 0.0},
        )
        row["operators"] += 1
        row["flop"] += sum(2.0 * gemm.count * gemm.m * gemm.n * gemm.k for gemm in operator.gemms)
        row["sent"] += operator.sent
        row["seconds"] += float(seconds)
    return {
        "name": graph.name,
        "operators": len(graph.operators),
        "dependencies": len(graph.dependencies),
        "rows": list(rows.values()),
        "cost_source": problem.cost_source,
    }


Field = Literal["network", "compute", "latency", "contention", "tokens", "width", "noise"]

FASTER = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0)
USUAL_VALUES: dict[Field, tuple[float, ...]] = {
    "network": FASTER,
    "compute": FASTER,
    "latency": (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
    "contention": CONTENTIONS,
    "tokens": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    "width": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
    "noise": LEVELS,
}
"""Values of a curve, and of the What-if page's sliders."""
MOST_VALUES = 32
ANEW = "planned anew"
"""The series of plans made for each value."""


@dataclass(frozen=True)
class CurvePoint:
    """Seconds of a plan at a value of the change; None: it does not fit there. series: name of the plan; rate: of a serving
    step its tokens a second and GPU."""

    series: str
    value: float
    total: float | None
    rate: float | None = None


def system_for(problem: Problem, plan: Plan) -> tuple[str, dict[str, Any]]:
    """System and options for a new plan in place of this one: its own, or the proposed system's if it is a baseline or none for
    the problem."""
    systems, name = systems_for(problem), plan.provenance.optimiser
    if name not in systems or systems[name].baseline:
        name = proposed_for(problem).name
    known = systems[name].options.model_fields
    return name, {key: value for key, value in plan.provenance.options.items() if key in known}


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
    serving: Serving | None = None,
) -> Iterator[CurvePoint]:
    """Value by value every plan as it is, then with `anew` (a system and its options) the plan that it makes for that value;
    heuristics may find a slower one, and of a serving step the system plans for the MoE layers. Raises InputError for values
    that cannot be."""
    changes = changes_of(field, values)
    if serving is not None and field == "width":
        raise InputError(FIXED)
    common = (problem, field, changes, dict(plans), anew and (anew[0], dict(anew[1])), serving)
    titles = [f"{field} {getattr(change, field):g}" for change in changes]
    for _, points in reported(_points_at, common, titles, stop, report):
        yield from points


def _points_at(common: tuple, index: int, stop: Stop, report: Report) -> list[CurvePoint]:
    """The points of all series at a value; without those that were not there when stopped."""
    problem, field, changes, plans, anew, serving = common
    change = changes[index]
    value = getattr(change, field)

    def point(series: str, plan: Plan) -> list[CurvePoint]:
        """The point of a plan; none when stopped."""
        try:
            pace = pace_of(plan, problem, change, serving, stop)
        except StoppedError:
            return []
        except InputError:
            return [CurvePoint(series, value, None)]
        return [CurvePoint(series, value, pace.seconds, pace.rate)]

    points = [at for name, plan in plans.items() for at in point(name, plan)]
    if anew is None:
        return points
    try:
        system, options = anew
        result = run(system, changed(problem, change), options, stop, report).result
    except InputError:
        return [*points, CurvePoint(ANEW, value, None)]
    if result.status is Status.CANCELLED:
        return points
    return points + point(ANEW, result.solution)
