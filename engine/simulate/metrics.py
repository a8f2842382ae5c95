"""The figures of a plan, all from its timeline and its inputs, none from the optimiser that made it."""

from dataclasses import asdict, dataclass

import numpy as np

from engine.plan import Plan
from engine.problem import Problem
from engine.result import relative_gap
from engine.simulate.inference import bound_of_placement
from engine.timeline import Timeline, balancedness


@dataclass(frozen=True)
class Metrics:
    """total, order_bound, exposed_communication, seconds: in seconds; memory: bytes on the fullest GPU; the rest shares.

    order_bound: no send order can bring the plan's placement below it. bound: the optimiser's own proven bound over the
    placements it chose from, None when the plan makes no claim.
    """

    total: float
    order_bound: float
    order_gap: float
    bound: float | None
    gap: float | None
    utilisation: float
    exposed_communication: float
    overlap: float
    balancedness: float
    kept_local: float
    memory: float
    phases: int
    seconds: dict[str, float]

    def to_dict(self) -> dict:
        return asdict(self)


def metrics(plan: Plan, problem: Problem, timeline: Timeline) -> Metrics:
    """The figures of `plan` on `problem`, whose simulated timeline is `timeline`."""
    traffic = problem.traffic(plan.placement)
    everything = traffic.sum()
    order_bound = bound_of_placement(plan.placement, problem)
    # A bound was proven for the inputs the plan was made from; on any others it proves nothing.
    own = plan.claim is not None and plan.provenance.inputs == input_digests(problem)
    bound = plan.claim.bound if own else None
    return Metrics(
        total=timeline.total,
        order_bound=order_bound,
        order_gap=relative_gap(timeline.total, order_bound),
        bound=bound,
        gap=relative_gap(timeline.total, bound) if bound is not None else None,
        utilisation=timeline.utilisation,
        exposed_communication=timeline.exposed_communication(),
        overlap=timeline.overlap,
        balancedness=float(balancedness(traffic.sum(axis=1)).mean()),
        kept_local=float(np.trace(traffic, axis1=1, axis2=2).sum() / everything) if everything else 1.0,
        memory=float((plan.placement.slots.sum(axis=0) * problem.model.bytes_per_expert).max()),
        phases=sum(schedule.phases for schedule in plan.send_order.dispatch),
        seconds=timeline.seconds_of_kind(),
    )


def input_digests(problem: Problem) -> dict[str, str]:
    """Digest of every input by role, as plans carry them in their provenance."""
    return {
        "workload": problem.workload.digest,
        "cluster": problem.cluster.digest,
        "model": problem.model.digest,
        "cost": problem.cost.source,
    }
