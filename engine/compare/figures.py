"""The figures of a plan, all from its timeline and its inputs, none from the optimiser that made it; the proof of its time; and
the cost of moving to it from the placement in use.

The proof is about simulated time: no other placement is better, no other order is, both or neither. Optimisers may have proven
aims of their own, such as the fewest hops; a placement that has these need not be the fastest.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

import numpy as np

from engine.goal import Goal
from engine.placement.migration import break_even, moved, transfers
from engine.plan import Placement, Plan
from engine.problem import Problem
from engine.provenance import SCORED_ON, has_inputs_of
from engine.result import Status, Unbounded, not_bounded, relative_gap
from engine.simulate import bound_of_plan, loads_of, simulate, unbounded
from engine.simulate.training.pricing import Routing, route
from engine.simulate.training.step import step_state_bytes
from engine.simulate.work import Load
from engine.timeline import Balance, Timeline
from engine.units import seconds, share


@dataclass(frozen=True)
class Metrics:
    """Figures of a plan: times in seconds, `memory` in bytes, the rest shares.

    order_bound: no send order, in a training step no schedule, can bring the plan's placement below it; None: nothing is
        proven of orders, and `unbounded` says why
    bound: claimed by the optimiser over the placements that it chose from, and not proven again, as a file may say anything;
        None: the plan makes no claim, or takes less itself
    balance: of the token copies that every GPU takes in a layer; of two models the layers of both
    memory: experts on the fullest GPU; in a training step weights, gradients and momentum, without activations
    seconds: by kind of event; in a training step busy times
    decomposition: `Timeline.decomposition` of a training step
    exact, latest: of the timeline
    rows: that a token sends away in the dispatch of a layer, in the mean: to other nodes if there are several with links, else
        to other GPUs; None: of a training step
    events: of the timeline; None: its sends are bundled
    """

    total: float
    order_bound: float | None
    order_gap: float | None
    bound: float | None
    gap: float | None
    utilisation: float
    exposed_communication: float
    overlap: float
    balance: Balance
    kept_local: float
    memory: float
    phases: int
    seconds: dict[str, float]
    decomposition: dict[str, float] | None = None
    exact: bool = True
    latest: float | None = None
    rows: float | None = None
    events: int | None = None
    unbounded: Unbounded | None = None

    @property
    def balancedness(self) -> float:
        """Mean over MoE layers of mean / max GPU load, as EPLB has it; see `Balance.of_engines`."""
        return self.balance.balancedness

    def to_dict(self) -> dict:
        """Plain JSON; a gap above a bound of 0, which is infinite, is None."""
        gaps = {"gap": self.gap, "order_gap": self.order_gap}
        known = {name: None if gap is None or math.isinf(gap) else gap for name, gap in gaps.items()}
        return asdict(self) | known | {"balancedness": self.balancedness, "balance": self.balance.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The figures that `to_dict` described."""
        known = {field.name: data[field.name] for field in fields(cls)}
        total, order_bound, bound = (data[name] for name in ("total", "order_bound", "bound"))
        gap = _gap(total, bound)
        said = data["balance"]
        mean, dense = said.get("mean_load_of_layer", ()), said.get("dense_layers", 0)
        balance = Balance(tuple(said["overload_factor_of_layer"]), tuple(mean), dense)
        return cls(**known | {"gap": gap, "order_gap": _gap(total, order_bound), "balance": balance})

    @property
    def how_simulated(self) -> str:
        """The exactness of the total, in words."""
        if self.exact:
            return "simulated exactly, send by send"
        words = "simulated with sends that end at nearly the same moment as one event"
        if self.latest is None:
            return words
        if self.order_bound is None:
            return f"{words}; an exact total is proven to be at most {seconds(self.latest)}"
        return f"{words}; an exact total is proven to lie between {seconds(self.order_bound)} and {seconds(self.latest)}"


def _gap(seconds: float, bound: float | None) -> float | None:
    return None if bound is None else relative_gap(seconds, bound)


def metrics(plan: Plan, problem: Problem, timeline: Timeline | None = None, loads: tuple[Load, ...] | None = None) -> Metrics:
    """The figures of a plan on a problem. Raises InputError when the plan does not fit the problem.

    timeline: the simulated one, for a caller that has it
    loads: the plan's (see `loads_of`), for a caller that holds them
    """
    loads = loads or loads_of(plan, problem)
    timeline = simulate(plan, problem, loads=loads) if timeline is None else timeline
    if problem.goal is Goal.TRAINING:
        return _of_step(plan, problem, timeline)
    dispatch = _dispatch(loads)
    # See `Metrics.rows`, of both models together where there are two
    rows = tokens = 0.0
    for load in loads:
        stops = load.problem.stops
        domain = stops.of_gpu
        away = domain[:, None] != domain if stops.count > 1 else ~np.eye(len(domain), dtype=bool)
        rows += float(load.work.dispatch.sum(axis=0)[away].sum()) / load.travel.row_bytes(load.problem.model)[0]
        tokens += float(load.problem.tokens_of_rank.sum())
    return Metrics(
        **_of_any(plan, problem, timeline, loads, dispatch),
        exposed_communication=timeline.exposed_communication(),
        overlap=timeline.overlap,
        balance=Balance.of(dispatch.sum(axis=1), len(problem.model.dense_layers)),
        memory=float(problem.held_bytes(plan.placement, plan.placement_b).max()),
        phases=sum(schedule.phases for order in (plan.send_order, plan.send_order_b) if order for schedule in order.dispatch),
        seconds=timeline.seconds_of_kind(),
        exact=timeline.exact,
        latest=timeline.latest,
        rows=rows / tokens if tokens else 0.0,
    )


def _of_any(
    plan: Plan, problem: Problem, timeline: Timeline, loads: tuple[Load, ...] | None, traffic: np.ndarray
) -> dict[str, Any]:
    """The figures that inference and training have alike.

    loads: of inference, see `metrics`
    traffic: float64[layer, src, dst] of every copy of a token
    """
    why = unbounded(plan, problem)
    order_bound = None if why else bound_of_plan(plan, problem, loads=loads)
    everything, stays = traffic.sum(), np.trace(traffic, axis1=1, axis2=2).sum()
    bound = _own_bound(plan, problem, timeline.total)
    return {
        "total": timeline.total,
        "order_bound": order_bound,
        "order_gap": _gap(timeline.total, order_bound),
        "unbounded": why,
        "bound": bound,
        "gap": _gap(timeline.total, bound),
        "utilisation": timeline.utilisation,
        "kept_local": float(stays / everything) if everything else 1.0,
        "events": None if timeline.bundled else len(timeline.events),
    }


def balance_of(plan: Plan, problem: Problem) -> Balance:
    """`Metrics.balance` alone, which takes no simulation."""
    if problem.goal is Goal.TRAINING:
        return _balance_of_step(_routing(plan, problem))
    return Balance.of(_dispatch(loads_of(plan, problem)).sum(axis=1), len(problem.model.dense_layers))


def cross_node_share(plan: Plan, problem: Problem) -> float | None:
    """Part of the token copies of a plan for inference that are dispatched to another node, 0 where there are none; None in
    a cluster of one node."""
    node = problem.cluster.node_of_gpu
    if node.min() == node.max():
        return None
    dispatch = _dispatch(loads_of(plan, problem)).sum(axis=0)
    everything = dispatch.sum()
    return float(dispatch[node[:, None] != node].sum() / everything) if everything else 0.0


def _dispatch(loads: tuple[Load, ...]) -> np.ndarray:
    """float64[layer, src, dst] bytes of every copy of a token, the diagonal is what stays; of two models the layers of both."""
    return loads[0].copies_moved if len(loads) == 1 else np.concatenate([load.copies_moved for load in loads])


def _routing(plan: Plan, problem: Problem) -> Routing:
    return route(problem, plan.placement, irregular=plan.overlap is not None and plan.overlap.irregular)


def _balance_of_step(routing: Routing) -> Balance:
    return Balance.of(np.nansum(routing.rows, axis=2))


def _of_step(plan: Plan, problem: Problem, timeline: Timeline) -> Metrics:
    """The figures of a plan for a training step."""
    routing, parts = _routing(plan, problem), timeline.decomposition()
    sent = parts["communication"] + parts["overlapped"]
    return Metrics(
        **_of_any(plan, problem, timeline, None, routing.traffic),
        exposed_communication=parts["communication"],
        overlap=parts["overlapped"] / sent if sent else 0.0,
        balance=_balance_of_step(routing),
        memory=float(step_state_bytes(problem, plan.placement, plan.offload).max()),
        phases=0,
        seconds=timeline.busy_of_kind(),
        decomposition=parts,
    )


def speedup(baseline: float, seconds: float) -> float:
    """Baseline over `seconds`; 1 if nothing takes time under any plan, as with an empty recording."""
    return baseline / seconds if seconds else 1.0


def _own_bound(plan: Plan, problem: Problem, total: float) -> float | None:
    """The optimiser's bound as the plan claims it, where that is for these inputs: on any others it says nothing, and nothing
    either where the plan itself is faster, or over placements where tokens travel otherwise than any kernel counts."""
    if plan.claim is None or not has_inputs_of(plan, problem, SCORED_ON):
        return None
    if plan.travel is not None and plan.claim.scope == "placement and order":
        return None
    if plan.claim.scope == "order" and unbounded(plan, problem):
        return None
    return plan.claim.bound if plan.claim.bound <= total * (1 + CLAIM_ROUND_OFF) else None


CLAIM_ROUND_OFF = 1e-6
"""By which a bound may lie above the time of its own plan."""


Proven = Literal["placement and order", "placement", "order", "schedule", "no bound on order", "nothing"]
SENTENCES: dict[Proven, str] = {
    "placement and order": "No other placement without replicas and with as many slots per GPU is faster in any order, "
    "{claimed}",
    "placement": "No other placement without replicas and with as many slots per GPU has a lower bound, {claimed}; the plan is "
    "{order_gap} above it",
    "order": "No order of sends makes this placement faster; another placement may be faster{open}",
    "schedule": "No schedule makes this placement faster; another placement may be faster",
    "no bound on order": "Order is {unbounded}; another placement may be faster{open}",
    "nothing": "Not proven optimal: the plan is {order_gap} above the bound of its placement, and another placement may be "
    "faster{open}",
}
CLAIMED = "according to its optimiser (not rechecked here)"
NEARLY = 1e-3
"""Relative: an order so close to its bound is proven but for this."""
STOPPED = {Status.CANCELLED: "stopped early", Status.TIME_LIMIT: "time ran out"}


@dataclass(frozen=True)
class Proof:
    """The proof of a plan's time.

    proven: the choices of which no better one exists
    order_gap: of the plan above the bound on any order of its sends, or any schedule; None: `unbounded` says why there is none
    gap: above the bound on any placement, if its optimiser claims one, else None
    stopped: why the optimiser ended before it was done, else empty
    """

    proven: Proven
    order_gap: float | None
    gap: float | None
    stopped: str = ""
    unbounded: Unbounded | None = None

    @property
    def is_near(self) -> bool:
        """True if nothing is proven but for a very small gap of the order."""
        return self.proven == "nothing" and self.order_gap is not None and self.order_gap <= NEARLY

    @property
    def in_words(self) -> str:
        """`order`, `order within 0.1 %`, or `nothing (stopped early)`, for a table."""
        proven: str = self.proven
        if self.is_near:
            proven = f"order within {share(NEARLY)}"
        return f"{proven} ({self.stopped})" if self.stopped else proven

    @property
    def sentence(self) -> str:
        """The proof, and the speed that a plan could still gain."""
        above = f": the plan is {share(self.gap)} above what no placement can beat, {CLAIMED}" if self.gap is not None else ""
        gap, order = "" if self.order_gap is None else share(self.order_gap), self.unbounded and not_bounded(self.unbounded)
        text = SENTENCES[self.proven].format(claimed=CLAIMED, order_gap=gap, open=above, unbounded=order)
        stopped = f" (its optimiser: {self.stopped})" if self.stopped else ""
        return f"{text}{stopped}."


def gap_over_placements(plan: Plan, figures: Metrics) -> float | None:
    """The gap of a plan above the bound on any placement that its optimiser claims; None if it claims none."""
    claims = plan.claim is not None and plan.claim.scope == "placement and order"
    return figures.gap if claims else None


def proof_of_plan(plan: Plan, figures: Metrics) -> Proof:
    """The proof of a plan with these figures. That its order is the best is proven here; a bound over placements is
    taken from the plan's claim if that was made for the same inputs, as `Metrics.bound` says."""
    training = figures.decomposition is not None
    gap = gap_over_placements(plan, figures)
    over_placements = None if gap is None else figures.bound
    least = figures.order_bound
    order = least is not None and _meets(figures.total, least)
    placement = over_placements is not None and least is not None and _meets(least, over_placements)
    if over_placements is not None and _meets(figures.total, over_placements):
        proven: Proven = "placement and order"
    elif order:
        proven = "schedule" if training else "order"
    elif figures.unbounded:
        proven = "no bound on order"
    else:
        proven = "placement" if placement else "nothing"
    stopped = "" if plan.claim is None or proven == "placement and order" else STOPPED.get(plan.claim.status, "")
    return Proof(proven, figures.order_gap, gap, stopped, figures.unbounded)


def _meets(seconds: float, bound: float) -> bool:
    return seconds <= bound * (1 + CLAIM_ROUND_OFF)


@dataclass(frozen=True)
class Migration:
    """copies: (layer, expert, GPU) copies that are new; bytes: of their weights; seconds: layer after layer with the
    senders chosen well, and `bound` below which no choice of senders gets; steps: passes after which the time is won
    back, infinite where the plan is no faster."""

    copies: int
    bytes: float
    seconds: float
    bound: float
    steps: float


def migration(now: Placement, new: Placement, problem: Problem, seconds_now: float, seconds_new: float) -> Migration:
    """From one placement to another on the problem's cluster; seconds_now, seconds_new: simulated seconds of a pass."""
    held_now, held_new = now.share > 0, new.share > 0
    copies = int(moved(held_now, held_new).sum())
    size = problem.model.bytes_per_expert
    sent = transfers(held_now, held_new, size, problem.network)
    steps = break_even(sent.seconds, seconds_now, seconds_new) if copies else 0.0
    return Migration(copies, copies * size, sent.seconds, sent.bound, steps)
