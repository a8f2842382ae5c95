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
    "placement and order": "no other placement without replicas and with as many slots per GPU is faster in any order, by its "
    "optimiser's account",
    "placement": "no other placement without replicas and with as many slots per GPU is faster than this one's own bound, by "
    "its optimiser's account; a faster order may exist",
    "order": "no order of sends makes this placement faster; a faster placement may exist",
    "schedule": "no schedule of this placement is faster; a faster placement may exist",
    "nothing": "a faster order of sends may exist, and a faster placement",
}
STOPPED = {Status.CANCELLED: "stopped early", Status.TIME_LIMIT: "time ran out"}


@dataclass(frozen=True)
class Proof:
    """proven: of which choices no better one exists; gap: what is open, above the bound that holds; stopped: why the
    optimiser ended before it was done, else empty."""

    proven: Proven
    gap: float
    stopped: str = ""

    @property
    def in_words(self) -> str:
        """`order`, or `nothing (stopped early)`, for a table."""
        return f"{self.proven} ({self.stopped})" if self.stopped else self.proven

    @property
    def sentence(self) -> str:
        """What is proven, and how much faster a plan could still be."""
        open_share = f"; the plan is {share(self.gap)} above its bound" if self.gap > CLAIM_ROUND_OFF else ""
        stopped = f" (its optimiser: {self.stopped})" if self.stopped else ""
        return f"Proven: {self.proven}. {_capital(SENTENCES[self.proven])}{open_share}{stopped}."


def proof_of_plan(plan: Plan, figures: Metrics) -> Proof:
    """What is proven of a plan whose figures are these. That its order is the best is proven here; a bound over placements is
    taken from the plan's claim where it was made for the same inputs, as `Metrics.bound` says."""
    training = figures.decomposition is not None
    over_placements = figures.bound if plan.claim is not None and plan.claim.scope == "placement and order" else None
    order = _meets(figures.total, figures.order_bound)
    placement = over_placements is not None and _meets(figures.order_bound, over_placements)
    if over_placements is not None and _meets(figures.total, over_placements):
        proven: Proven = "placement and order"
    elif order:
        proven = "schedule" if training else "order"
    else:
        proven = "placement" if placement else "nothing"
    gap = figures.order_gap if over_placements is None else figures.gap
    stopped = "" if plan.claim is None or proven == "placement and order" else STOPPED.get(plan.claim.status, "")
    return Proof(proven, gap, stopped)


def _meets(seconds: float, bound: float) -> bool:
    return seconds <= bound * (1 + CLAIM_ROUND_OFF)


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
