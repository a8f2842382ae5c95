"""The time of a training step by one parameter of a plan, everything else left as it is.

Three parameters: the size of Lina's micro-ops (Lina §7.2.2, Figures 14 and 15), one pipeline degree for all MoE layers
(PipeMoE, Figures 3 and 4), and how many operators Lancet may cut together (Lancet, Figure 6). Every point is a system
with its options, run and simulated like any other, so that each is a plan that can be opened; references add
the time of the same step under a policy without the parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from engine.compare.sensitivity import operators_of
from engine.errors import InputError
from engine.goal import Goal
from engine.parallel import in_order
from engine.problem import Problem
from engine.result import Status, Stop, never
from engine.simulate.training import MAX_PARTS
from engine.systems import TRAINING
from engine.systems.base import Draft, Outcome, Report, System, run, silent
from engine.systems.options import Options, Value
from engine.systems.training.baselines import Bucket, BucketOptions, fixed_degree
from engine.systems.training.lancet import LancetOptions
from engine.systems.training.lancet import lancet as lancet_recipe
from engine.systems.training.pipemoe import NetworkOrder
from engine.timeline import Timeline

Kind = Literal["micro_op", "degree", "range"]

MB = 1e6
LIMITS: dict[str, tuple[float, float]] = {"micro_op": (0.1, 10_000), "degree": (1, MAX_PARTS), "range": (0, 10_000)}
"""Least and largest value of a sweep: MB, parts, operators (0: nothing is cut)."""
NAMES = {"micro_op": "micro-op sizes", "degree": "pipeline degrees", "range": "partition ranges"}
MOST_VALUES = 64
MICRO_OPS = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100, 150, 200)
RANGES = (0, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
USUAL_PARTS = (2, 8)
MOST_PIECES = 20_000
"""Micro-ops of all gradients of a step; more take minutes to simulate and are far beyond any optimum."""

ORDERS = {"dispatch-first": "dispatch first", "interleaved": "interleaved"}
LINES = {"fair": "fair sharing", "naive": "all-to-alls first", "fixed": "fixed, between pairs"}
"""Lina's other policies, with nothing cut, in words."""


@dataclass(frozen=True)
class Trial:
    """One system to run. series: of which line it is a point, or of a reference its name; value: of the swept parameter;
    None: a reference."""

    series: str
    value: float | None
    system: System
    options: Mapping[str, Value]


@dataclass(frozen=True)
class SweepPoint:
    """The figures of one trial. All times in seconds.

    series, value: see `Trial`; total: of the step; bound: no schedule of the plan's placement is faster
    forward: until the forward pass is over
    decomposition: see `Timeline.decomposition`; its parts add up to the total
    pieces: all-reduces that the gradients make on the network
    longest: of these; all-to-alls that go first, but interrupt nothing, wait no longer for the network
    experts_per_gpu: experts on the fullest GPU, which Lina packs anew for every size of its micro-ops
    """

    series: str
    value: float | None
    total: float
    bound: float
    forward: float
    decomposition: dict[str, float]
    pieces: int
    longest: float
    experts_per_gpu: int
    plan_id: str


def trials_of(
    problem: Problem, kind: Kind, values: Sequence[float], settings: Mapping[str, Any] | None = None
) -> tuple[Trial, ...]:
    """The trials of a sweep: the points of every series with ascending values, then the references.

    settings: options of the systems that stay the same, by name. Besides these, of a sweep over degrees `orders`
    (of the parts on the network), over ranges `parts` (most parts of a range), one series each. Raises InputError for
    values and settings that cannot be, and without a training step.
    """
    if problem.goal is not Goal.TRAINING:
        raise InputError("sweeps are over plans of a training step; what is open is inference")
    fixed, wanted = dict(settings or {}), check_values(kind, values)
    if kind == "micro_op":
        least = wanted[0]
        sent = [operator.sent for operator in operators_of(problem).of_phase("all_reduce")]
        pieces = sum(max(1, int(np.ceil(size / (least * MB)))) for size in sent)
        if pieces > MOST_PIECES:
            raise InputError(
                f"{NAMES['micro_op']}: pieces of {least:g} MB cut the gradients into {pieces:,}; give sizes that make "
                f"at most {MOST_PIECES:,}, such as {10 * least:g} MB"
            )
        return _micro_ops(wanted, fixed)
    return _degrees(wanted, fixed) if kind == "degree" else _ranges(wanted, fixed)


def usual_values(kind: Kind, problem: Problem) -> tuple[int, ...]:
    """The values that are swept unless a person gives others; of ranges up to all operators of the forward pass."""
    if kind != "range":
        return MICRO_OPS if kind == "micro_op" else tuple(range(1, MAX_PARTS + 1))
    forward = len(operators_of(problem).of_phase("forward"))
    return (*(length for length in RANGES if length < forward), forward)


def usual_settings(kind: Kind) -> dict[str, Any]:
    """The settings that differ from those of the systems: the size of micro-ops alone is swept, unless packing is to follow."""
    return {"micro_op": {"packing": "off"}, "range": {"parts": list(USUAL_PARTS)}}.get(kind, {})


def check_values(kind: Kind, values: Sequence[float]) -> list[float]:
    """The values of a sweep, ascending and each once. Raises InputError for none, too many, and such as cannot be."""
    low, high = LIMITS[kind]
    ascending = sorted(set(values))
    if not ascending:
        raise InputError(f"{NAMES[kind]}: give at least one value")
    if len(ascending) > MOST_VALUES:
        raise InputError(f"{NAMES[kind]}: {len(ascending)} values are too many; give at most {MOST_VALUES}")
    for value in ascending:
        if not low <= value <= high:  # nan too
            raise InputError(f"{NAMES[kind]}: {value:g} is not between {low:g} and {high:,.0f}")
        if kind != "micro_op" and value != int(value):
            raise InputError(f"{NAMES[kind]}: {value:g} is not a whole number")
    return ascending


def sweep(
    problem: Problem, trials: Sequence[Trial], stop: Stop = never, report: Report = silent
) -> Iterator[tuple[SweepPoint, Outcome]]:
    """Run the trials side by side; every one that was run to its end comes with its figures, in order. Once `stop` answers
    True, no more begin. Raises InputError when a system cannot plan for the problem."""
    best = None

    def begun(finished: int, index: int) -> None:
        series, value = trials[index].series, trials[index].value
        report(finished / len(trials), series if value is None else f"{series}: {value:g}", best)

    for _, (point, outcome) in in_order(_run_trial, (problem, tuple(trials)), len(trials), stop, begun):
        if outcome.result.status is not Status.CANCELLED:
            best = point.total if best is None else min(best, point.total)
            yield point, outcome


def _run_trial(common: tuple[Problem, tuple[Trial, ...]], index: int, stop: Stop, report: Report) -> tuple[SweepPoint, Outcome]:
    problem, trials = common
    trial = trials[index]
    outcome = run(trial.system, problem, dict(trial.options), stop)
    result, timeline = outcome.result, outcome.timeline
    forward = frozenset(operator.name for operator in operators_of(problem).of_phase("forward"))
    mine = [label.split(" · ")[0] in forward for label in timeline.labels]
    point = SweepPoint(
        trial.series,
        trial.value,
        result.objective,
        result.bound,
        float(timeline.events["end"][mine].max()),
        timeline.decomposition(),
        *_all_reduces(timeline),
        int(result.solution.placement.slots.max()),
        result.solution.id,
    )
    return point, replace(outcome, loads=())  # they are large, and stay in this process


def best_of(points: Sequence[SweepPoint], what: Literal["total", "forward"] = "total") -> SweepPoint | None:
    """The point that takes least; among equals the first, which references are not. None where there is none."""
    return min((point for point in points if point.value is not None), key=lambda point: getattr(point, what), default=None)


def _all_reduces(timeline: Timeline) -> tuple[int, float]:
    """The number of all-reduces, and the seconds of the longest; they end on all GPUs at once."""
    events = timeline.events
    mine = events[(events["resource"] == 0) & (events["kind"] == "all_reduce")]
    return len(mine), float((mine["end"] - mine["start"]).max()) if len(mine) else 0.0


def _named(system: System, name: str) -> System:
    """A system with plans that tell the points of a sweep apart."""
    return replace(system, title=f"{system.title.split(' (')[0]}, {name}")


def _micro_ops(values: list[float], settings: dict[str, Any]) -> tuple[Trial, ...]:
    """Lina at every size, and its other policies with nothing cut."""
    lina = TRAINING["lina"]
    points = [
        Trial("priority by micro-ops", value, _named(lina, f"{value:g} MB micro-ops"), settings | {"micro_op_mb": value})
        for value in values
    ]
    uncut = settings | {"pipelining": False}
    references = [Trial(title, None, _named(lina, title), uncut | {"policy": policy}) for policy, title in LINES.items()]
    return (*points, *references)


class OneDegreeOptions(Options):
    degree: int = Field(1, ge=1, le=MAX_PARTS, description="parts of every MoE layer")
    network_order: NetworkOrder = "dispatch-first"
    bucket_mb: Bucket = 25.0


def _one_degree(problem: Problem, options: OneDegreeOptions, stop: Stop, report: Report) -> Draft:
    """The same degree for all layers, forward and backward, in a given order on the network."""
    draft = fixed_degree(problem, options.degree, "fair", options.bucket_mb * MB)
    if draft.pipeline is None:
        return draft
    return replace(draft, pipeline=draft.pipeline.model_copy(update={"order": options.network_order}))


ONE_DEGREE = System(
    name="one-degree",
    title="One degree",
    summary="every MoE layer in the same number of pipelined parts",
    paper="PipeMoE §II",
    recipe=_one_degree,
    options=OneDegreeOptions,
    goals=(Goal.TRAINING,),
)


def _degrees(values: list[float], settings: dict[str, Any]) -> tuple[Trial, ...]:
    """Every degree in every order, and PipeMoE's own choice for each layer among as many."""
    orders = settings.pop("orders", tuple(ORDERS))
    for order in orders:
        ONE_DEGREE.settings({"network_order": order})
    points = [
        Trial(
            ORDERS[order],
            value,
            _named(ONE_DEGREE, f"{value:g} parts, {ORDERS[order]}"),
            settings | {"degree": int(value), "network_order": order},
        )
        for order in orders
        for value in values
    ]
    own = settings | {"max_degree": int(values[-1])}
    return (*points, Trial("PipeMoE, every layer its own", None, TRAINING["pipemoe"], own))


def _ranges(values: list[float], settings: dict[str, Any]) -> tuple[Trial, ...]:
    """Lancet with ranges of at most so many operators, a compiler that cuts nothing, and Tutel."""
    lancet = replace(TRAINING["lancet"], recipe=_GradientsMovedOnce())
    wanted = settings.pop("parts", (LancetOptions().max_parts,))
    most = [lancet.settings({"max_parts": parts}).max_parts for parts in wanted]
    points = [
        Trial(
            f"up to {parts} parts",
            value,
            _named(lancet, f"{value:g} operators, {parts} parts" if value else "nothing cut"),
            settings | {"max_parts": parts, **({"max_range": int(value)} if value else {"partition": False})},
        )
        for parts in most
        for value in values
    ]
    shared = {name: value for name, value in settings.items() if name in BucketOptions.model_fields}
    references = [Trial(TRAINING[name].title, None, TRAINING[name], shared) for name in ("raf", "tutel")]
    return (*points, *references)


class _GradientsMovedOnce:
    """Lancet's recipe with the weight gradients, which no partition of the forward pass changes, moved in the first run of a
    process only."""

    def __init__(self) -> None:
        self._moved: Draft | None = None

    def __call__(self, problem: Problem, options: LancetOptions, stop: Stop, report: Report) -> Draft:
        if self._moved is None:
            self._moved = lancet_recipe(problem, options.model_copy(update={"partition": False}), stop, report)
        cut = lancet_recipe(problem, options.model_copy(update={"weight_gradients": "none"}), stop, report)
        overlap = cut.overlap.model_copy(update={"under": self._moved.overlap.under})
        return replace(cut, overlap=overlap, notes=cut.notes | self._moved.notes)
