"""The figures of a plan, all from its timeline and its inputs, none from the optimiser that made it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np

from engine.balance import Balance
from engine.goal import Goal
from engine.plan import Plan, Travel
from engine.problem import Problem
from engine.result import relative_gap
from engine.simulate import bound_of_plan, simulate
from engine.simulate.training.memory import step_state_bytes
from engine.simulate.training.routing import Routing, route
from engine.simulate.work import work_of, works_of
from engine.timeline import Timeline
from engine.units import seconds
from engine.workload import digest_of


@dataclass(frozen=True)
class Metrics:
    """total, order_bound, exposed_communication, seconds, latest: in seconds; memory: bytes on the fullest GPU; the rest
    shares.

    order_bound: no send order can bring the plan's placement below it. bound: what its optimiser claims of the
    placements it chose from, None when the plan makes no claim or takes less itself: a file may say anything, and what it says
    is not proven again. Of a training step, `order_bound` covers every schedule of
    its placement, `memory` is weights, gradients and momentum without activations, `seconds` are busy times by kind and
    `decomposition` is `Timeline.decomposition`. exact, latest: of the timeline. balance: of the token
    copies that every GPU takes in a layer; of two models the layers of both. rows: that a token sends away in the dispatch of
    a layer, in the mean: to other nodes where there are several with links, else to other GPUs; None of a training step.
    events: of the timeline; None where its sends are bundled.
    """

    total: float
    order_bound: float
    order_gap: float
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

    @property
    def balancedness(self) -> float:
        """Mean over layers of mean / max GPU load (EPLB, vLLM, SGLang)."""
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
        gap = None if bound is None else relative_gap(total, bound)
        balance = Balance(tuple(data["balance"]["overload_factor_of_layer"]))
        return cls(**known | {"gap": gap, "order_gap": relative_gap(total, order_bound), "balance": balance})

    @property
    def how_simulated(self) -> str:
        """How exact the total is, in words."""
        if self.exact:
            return "simulated exactly, send by send"
        words = "simulated with sends that end at nearly the same moment as one event"
        if self.latest is None:
            return words
        return (
            f"{words}; an exact total is proven to lie between {seconds(self.order_bound)} and {seconds(self.latest)}"
        )


def metrics(plan: Plan, problem: Problem, timeline: Timeline | None = None) -> Metrics:
    """The figures of a plan on a problem. timeline: the simulated one, where it is known already. Raises InputError when the
    plan does not fit the problem."""
    timeline = simulate(plan, problem) if timeline is None else timeline
    if problem.goal is Goal.TRAINING:
        return _of_step(plan, problem, timeline)
    problem = problem.as_planned(plan)
    dispatch = _dispatch(plan, problem)
    everything, stays = dispatch.sum(), np.trace(dispatch, axis1=1, axis2=2).sum()
    order_bound, bound = bound_of_plan(plan, problem), _own_bound(plan, problem, timeline.total)
    return Metrics(
        total=timeline.total,
        order_bound=order_bound,
        order_gap=relative_gap(timeline.total, order_bound),
        bound=bound,
        gap=relative_gap(timeline.total, bound) if bound is not None else None,
        utilisation=timeline.utilisation,
        exposed_communication=timeline.exposed_communication(),
        overlap=timeline.overlap,
        balance=Balance.of(dispatch.sum(axis=1)),
        kept_local=float(stays / everything) if everything else 1.0,
        memory=float(problem.held_bytes(plan.placement, plan.placement_b).max()),
        phases=sum(
            schedule.phases for order in (plan.send_order, plan.send_order_b) if order for schedule in order.dispatch
        ),
        seconds=timeline.seconds_of_kind(),
        exact=timeline.exact,
        latest=timeline.latest,
        rows=_rows_away(plan, problem),
        events=None if timeline.bundled else len(timeline.events),
    )


def balance_of(plan: Plan, problem: Problem) -> Balance:
    """`Metrics.balance` alone, which takes no simulation."""
    if problem.goal is Goal.TRAINING:
        return _balance_of_step(_routing(plan, problem))
    return Balance.of(_dispatch(plan, problem.as_planned(plan)).sum(axis=1))


def cross_node_share(plan: Plan, problem: Problem) -> float | None:
    """Part of the token copies of a plan for inference that are dispatched to another node, 0 where there are none; None in
    a cluster of one node."""
    node = problem.cluster.node_of_gpu
    if node.min() == node.max():
        return None
    dispatch = _dispatch(plan, problem.as_planned(plan)).sum(axis=0)
    everything = dispatch.sum()
    return float(dispatch[node[:, None] != node].sum() / everything) if everything else 0.0


def _dispatch(plan: Plan, problem: Problem) -> np.ndarray:
    """float64[layer, src, dst] bytes of every copy of a token, the diagonal is what stays; of two models the layers of both."""
    if plan.execution == "vanilla":
        dispatch = problem.copies_moved(plan.placement, plan.travel)
    else:
        dispatch = work_of(plan.placement, problem, plan.execution).dispatch
    if plan.goal is Goal.TWO_MODELS:
        dispatch = np.concatenate([dispatch, problem.second.copies_moved(plan.placement_b, plan.travel)])
    return dispatch


def _routing(plan: Plan, problem: Problem) -> Routing:
    return route(problem, plan.placement, irregular=plan.overlap is not None and plan.overlap.irregular)


def _balance_of_step(routing: Routing) -> Balance:
    return Balance.of(np.nansum(routing.rows, axis=2))


def _rows_away(plan: Plan, problem: Problem) -> float:
    """See `Metrics.rows`, of both models together where there are two."""
    rows = tokens = 0.0
    for work, part in zip(works_of(plan, problem), (problem, problem.second), strict=False):
        domain = part.stops.of_gpu
        away = domain[:, None] != domain if part.stops.count > 1 else ~np.eye(len(domain), dtype=bool)
        rows += float(work.dispatch.sum(axis=0)[away].sum()) / (plan.travel or Travel()).row_bytes(part.model)[0]
        tokens += float(part.tokens_of_rank.sum())
    return rows / tokens if tokens else 0.0


def _of_step(plan: Plan, problem: Problem, timeline: Timeline) -> Metrics:
    """The figures of a plan for a training step."""
    routing = _routing(plan, problem)
    everything, stays = routing.traffic.sum(), np.trace(routing.traffic, axis1=1, axis2=2).sum()
    order_bound, bound = bound_of_plan(plan, problem), _own_bound(plan, problem, timeline.total)
    parts = timeline.decomposition()
    sent = parts["communication"] + parts["overlapped"]
    return Metrics(
        total=timeline.total,
        order_bound=order_bound,
        order_gap=relative_gap(timeline.total, order_bound),
        bound=bound,
        gap=relative_gap(timeline.total, bound) if bound is not None else None,
        utilisation=timeline.utilisation,
        exposed_communication=parts["communication"],
        overlap=parts["overlapped"] / sent if sent else 0.0,
        balance=_balance_of_step(routing),
        kept_local=float(stays / everything) if everything else 1.0,
        memory=float(step_state_bytes(problem, plan.placement).max()),
        phases=0,
        seconds=timeline.busy_of_kind(),
        decomposition=parts,
        events=None if timeline.bundled else len(timeline.events),
    )


def speedup(baseline: float, seconds: float) -> float:
    """How many times as fast `seconds` are as those of a baseline; 1 where nothing takes time under any plan, as with a
    recording of nothing."""
    return baseline / seconds if seconds else 1.0


def _own_bound(plan: Plan, problem: Problem, total: float) -> float | None:
    """The optimiser's bound as the plan claims it, where that is for these inputs: on any others it says nothing, and nothing
    either where the plan itself is faster."""
    if plan.claim is None or not has_inputs_of(plan, problem, SCORED_ON):
        return None
    return plan.claim.bound if plan.claim.bound <= total * (1 + CLAIM_ROUND_OFF) else None


CLAIM_ROUND_OFF = 1e-6
"""By which a bound may lie above the time of its own plan."""
SCORED_ON = ("workload", "cluster", "model", "cost", "workload_b", "model_b", "step", "graph")
"""Roles of the inputs that a plan's simulated time depends on."""


def simulation_digest(plan: Plan, problem: Problem) -> str:
    """Of all that the simulated timeline of a plan depends on."""
    mine = input_digests(problem)
    return digest_of("simulation 3", plan.id, *(mine.get(role, "") for role in SCORED_ON))


def metrics_digests(plan: Plan, problem: Problem) -> tuple[str, str]:
    """Of all that the figures of a plan depend on: its timeline, and what it claims."""
    return simulation_digest(plan, problem), "" if plan.claim is None else plan.claim.digest


def has_inputs_of(plan: Plan, problem: Problem, roles: tuple[str, ...]) -> bool:
    """Whether the plan was made from the problem's own inputs in all these roles."""
    own = input_digests(problem)
    return all(plan.provenance.inputs.get(role) == own.get(role) for role in roles)


def input_digests(problem: Problem) -> dict[str, str]:
    """Digest of every input by role, as plans carry them in their provenance."""
    digests = {
        "workload": problem.workload.digest,
        "cluster": problem.cluster.digest,
        "model": problem.model.digest,
        "cost": problem.cost.digest,
    }
    if problem.goal is Goal.TWO_MODELS:
        digests |= {"workload_b": problem.second.workload.digest, "model_b": problem.second.model.digest}
    digests |= {f"workload_also_{index}": workload.digest for index, workload in enumerate(problem.others)}
    if problem.goal is Goal.TRAINING:
        digests["step"] = problem.step.digest
    if problem.travel is not None:
        digests["travel"] = problem.travel.digest
    if problem.graph is not None:
        digests["graph"] = problem.graph.digest
    if problem.in_use is not None:
        digests["in_use"] = problem.in_use.digest
    return digests
