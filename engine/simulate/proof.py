"""What is proven of a plan's simulated time: that no other placement is better, that no other order is, both or neither.

Notes of optimisers say how far they have proven their own aims, such as the fewest hops; a placement that has these may still
not be the fastest.
"""

from dataclasses import dataclass
from typing import Literal

from engine.plan import Plan
from engine.result import Status
from engine.simulate.metrics import CLAIM_ROUND_OFF, Metrics
from engine.units import share

Proven = Literal["placement and order", "placement", "order", "schedule", "nothing"]
SENTENCES: dict[Proven, str] = {
    "placement and order": "No other placement without replicas and with as many slots per GPU is faster in any order, "
    "{claimed}",
    "placement": "No other placement without replicas and with as many slots per GPU has a lower bound, {claimed}; the plan is "
    "{order_gap} above it",
    "order": "No order of sends makes this placement faster; another placement may be faster{open}",
    "schedule": "No schedule makes this placement faster; another placement may be faster",
    "nothing": "Not proven optimal: the plan is {order_gap} above the bound of its placement, and another placement may be "
    "faster{open}",
}
CLAIMED = "according to its optimiser (not rechecked here)"
NEARLY = 1e-3
"""Relative: an order so close to its bound is proven but for this."""
STOPPED = {Status.CANCELLED: "stopped early", Status.TIME_LIMIT: "time ran out"}


@dataclass(frozen=True)
class Proof:
    """proven: of which choices no better one exists; order_gap: how far the plan is above what no order of its sends, or no
    schedule, can beat; gap: above what no placement can beat, as far as its optimiser claims that, else None; stopped: why the
    optimiser ended before it was done, else empty."""

    proven: Proven
    order_gap: float
    gap: float | None
    stopped: str = ""

    @property
    def in_words(self) -> str:
        """`order`, `order within 0.1 %`, or `nothing (stopped early)`, for a table."""
        proven: str = self.proven
        if self.proven == "nothing" and self.order_gap <= NEARLY:
            proven = f"order within {share(NEARLY)}"
        return f"{proven} ({self.stopped})" if self.stopped else proven

    @property
    def sentence(self) -> str:
        """What is proven, and how much faster a plan could still be."""
        above = (
            f": the plan is {share(self.gap)} above what no placement can beat, {CLAIMED}"
            if self.gap is not None
            else ""
        )
        text = SENTENCES[self.proven].format(claimed=CLAIMED, order_gap=share(self.order_gap), open=above)
        stopped = f" (its optimiser: {self.stopped})" if self.stopped else ""
        return f"{text}{stopped}."


def gap_over_placements(plan: Plan, figures: Metrics) -> float | None:
    """How far a plan is above what its optimiser claims that no placement can beat; None where it claims nothing of that."""
    claims = plan.claim is not None and plan.claim.scope == "placement and order"
    return figures.gap if claims else None


def proof_of_plan(plan: Plan, figures: Metrics) -> Proof:
    """What is proven of a plan whose figures are these. That its order is the best is proven here; a bound over placements is
    taken from the plan's claim where it was made for the same inputs, as `Metrics.bound` says."""
    training = figures.decomposition is not None
    gap = gap_over_placements(plan, figures)
    over_placements = None if gap is None else figures.bound
    order = _meets(figures.total, figures.order_bound)
    placement = over_placements is not None and _meets(figures.order_bound, over_placements)
    if over_placements is not None and _meets(figures.total, over_placements):
        proven: Proven = "placement and order"
    elif order:
        proven = "schedule" if training else "order"
    else:
        proven = "placement" if placement else "nothing"
    stopped = "" if plan.claim is None or proven == "placement and order" else STOPPED.get(plan.claim.status, "")
    return Proof(proven, figures.order_gap, gap, stopped)


def _meets(seconds: float, bound: float) -> bool:
    return seconds <= bound * (1 + CLAIM_ROUND_OFF)
