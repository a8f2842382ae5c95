"""From which contention on ordering pays: a placement with all sends at once and with its sends in order, as every further send
that meets at a port costs more.

The share of time in which GPUs compute with one model alone on them, and with both (Aurora §8.1 and Figure 12).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap

import numpy as np

from engine.communication.order import order
from engine.communication.two_tier import order_on, two_tier
from engine.compare.what_if import Change, changed, served_after
from engine.errors import InputError, StoppedError
from engine.goal import Goal
from engine.network import Network
from engine.parallel import reported
from engine.plan import OrderMode, Plan, Schedule, SendOrder
from engine.problem import Problem
from engine.result import Stop, never
from engine.schema import Amounts
from engine.simulate import bound_of_plan, simulate
from engine.simulate.inference import simulate_inference
from engine.simulate.serving import Serving, work_of_step
from engine.simulate.work import Load, Work, works_of
from engine.systems.base import Report, silent
from engine.systems.pieces import reverse
from engine.timeline import Timeline

CONTENTIONS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""See `Scaled`."""
HALVINGS = 8
"""Times that the stretch between two of these is halved to find the point at which an order becomes as fast."""
MODES: dict[OrderMode, str] = {"concurrent": "all at once", "matched": "one peer at a time", "two-tier": "by relays"}
"""Orders that are compared, the plain all-to-all first."""


@dataclass(frozen=True)
class ContentionPoint:
    """Seconds of a placement at a contention, by mode of its orders."""

    contention: float
    seconds: dict[str, float]

    @property
    def saved(self) -> float:
        """Seconds that the best order saves of those of all sends at once; negative where it is slower."""
        return self.seconds["concurrent"] - min(total for mode, total in self.seconds.items() if mode != "concurrent")


def ordered(plan: Plan, problem: Problem, stop: Stop = never, serving: Serving | None = None) -> dict[str, Plan]:
    """The plan with an order of each mode, by mode, for the traffic of the recording or of a batch of a serving step; relays
    only where GPUs of a node can relay, and one model has the GPUs.

    Raises InputError for a training step and for exchanges of a measured table, and StoppedError once `stop` answers True."""
    if problem.goal is Goal.TRAINING:
        raise InputError("orders of sends are of inference; a training step's collectives go one after another")
    if reason := problem.network.unbounded:
        raise InputError(f"{reason}; choose network costs that simulate sends")
    problem.check_plan(plan)
    relays = not problem.network.direct and problem.goal is Goal.INFERENCE
    if serving is None:
        works = dict(zip(("send_order", "send_order_b"), works_of(plan, problem), strict=False))
    else:
        batches = 2 if serving.step.overlap == "two-batch" else 1
        works = {"send_order": work_of_step(plan, problem, serving.step, serving.dealt(problem, plan) // batches)}
    return {
        mode: plan.model_copy(update={name: _order_of(work, problem.network, mode, stop) for name, work in works.items()})
        for mode in MODES
        if mode != "two-tier" or relays
    }


def contention_curve(
    problem: Problem,
    plans: Mapping[str, Plan],
    values: Sequence[float] = CONTENTIONS,
    stop: Stop = never,
    report: Report = silent,
    serving: Serving | None = None,
) -> Iterator[ContentionPoint]:
    """The plans of `ordered` at every contention, ascending. Raises InputError for values that cannot be.

    serving: the step that is timed as a whole; None: a pass
    """
    changes = [Change.from_dict({"contention": value}, f"contention {value:g}") for value in sorted(set(values))]
    titles = [change.in_words for change in changes]
    for _, point in reported(_point_at, (problem, dict(plans), changes, serving), titles, stop, report):
        yield point


def pays_from(
    points: Sequence[ContentionPoint],
    problem: Problem,
    plans: Mapping[str, Plan],
    serving: Serving | None = None,
    stop: Stop = never,
) -> float | None:
    """The contention from which on the best order is no slower than all sends at once; None where it is slower at all of the
    points, between which it is found by halving, and once `stop` answers True."""
    ahead = next((place for place, point in enumerate(points) if point.saved >= 0), None)
    if ahead is None:
        return None
    high = points[ahead].contention
    if ahead:
        low = points[ahead - 1].contention
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            point = seconds_at(middle, problem, plans, serving, stop)
            if stop():
                return None
            low, high = (low, middle) if point.saved >= 0 else (middle, high)
    return high


def all_alike(points: Iterable[Mapping[str, float]]) -> bool:
    """True if no order is ever faster than all sends at once. points: seconds by mode"""
    return all(min(seconds.values()) >= seconds["concurrent"] * (1 - 1e-9) for seconds in points)


def seconds_at(
    contention: float, problem: Problem, plans: Mapping[str, Plan], serving: Serving | None = None, stop: Stop = never
) -> ContentionPoint:
    """The point at one contention; of a serving step it is simulated in a hurry once `stop` answers True."""
    change = Change(contention=contention)
    if serving is None:
        then = changed(problem, change)
        return ContentionPoint(contention, {mode: simulate(plan, then).total for mode, plan in plans.items()})
    steps = {mode: served_after(problem, plan, change, serving, stop).figures for mode, plan in plans.items()}
    return ContentionPoint(contention, {mode: figures.seconds for mode, figures in steps.items()})


def most_saved(plan: Plan, problem: Problem, seconds: float, serving: Serving | None = None) -> float:
    """The share of so many seconds (of the plan's placement with all sends at once) that orders could save at the most, whoever
    relays, by a bound that no order undercuts."""
    bound = bound_of_plan(plan, problem) if serving is None else serving.served(plan, problem).figures.bound
    return max(0.0, 1 - bound / seconds) if seconds else 0.0


def _point_at(common: tuple, index: int, stop: Stop, report: Report) -> ContentionPoint | None:
    """None of a serving step when stopped."""
    problem, plans, changes, serving = common
    try:
        point = seconds_at(changes[index].contention, problem, plans, serving, stop)
    except StoppedError:
        return None
    return None if serving is not None and stop() else point


def _order_of(work: Work, network: Network, mode: OrderMode, stop: Stop) -> SendOrder:
    if mode == "concurrent":
        return SendOrder(mode="concurrent")

    def of(at_work: Network, traffic: np.ndarray) -> Schedule:
        if stop():
            raise StoppedError("stopped before all layers had an order")
        if mode == "two-tier":
            return two_tier(traffic, at_work, stop).solution
        return order_on(at_work, traffic, partial(order, mode="matched", stop=stop))[0]

    dispatch = tuple(starmap(of, work.carried(network, "dispatch")))
    alike = np.array_equal(network.send, network.receive) and network.measured is None
    mirrored = alike and np.array_equal(work.combine, work.dispatch.transpose(0, 2, 1))
    combine = map(reverse, dispatch) if mirrored else starmap(of, work.carried(network, "combine"))
    return SendOrder(mode=mode, dispatch=dispatch, combine=tuple(combine))


@dataclass(frozen=True, eq=False)
class Utilisation:
    """Utilisation of the models that are served.

    gpu: float64[gpu], compute time / total
    seconds: of the pass
    """

    served: str
    gpu: Amounts
    seconds: float

    @property
    def mean(self) -> float:
        return float(self.gpu.mean())


@dataclass(frozen=True, eq=False)
class AloneAndTogether:
    """Utilisation with the first model alone on all GPUs, with the second alone, and with both colocated."""

    parts: tuple[Utilisation, ...]


def exclusive_and_colocated(plan: Plan, problem: Problem, timeline: Timeline | None = None) -> AloneAndTogether:
    """The utilisation under a plan for two models. Alone a model keeps its placement, the travel of its tokens and its order of
    sends (see `SendOrder.alone`). timeline: of both, where it is known already. Raises InputError when the plan does not fit
    the problem, which is of two models."""
    both = simulate(plan, problem) if timeline is None else timeline
    moved = problem.as_planned(plan)
    parts = (
        (plan.placement, plan.send_order, replace(moved, second=None)),
        (plan.placement_b, plan.send_order_b, moved.second),
    )
    passes = []
    for which, (placement, sends, side) in zip(("first", "second"), parts, strict=True):
        alike = {"travel": plan.travel, "provenance": plan.provenance}
        alone = Plan(name="alone", placement=placement, send_order=sends.alone, **alike)
        loads = (Load(side, placement, plan.travel),)
        passes.append((f"{which} model alone ({side.model.name})", simulate_inference(alone, loads)))
    return AloneAndTogether(
        tuple(
            Utilisation(served, part.busy("compute") / (part.total or 1.0), part.total)
            for served, part in (*passes, ("both colocated", both))
        )
    )
