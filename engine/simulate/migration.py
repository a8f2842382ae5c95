"""What moving from the placement in use to a plan costs, and after how many steps it has paid."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from engine.placement.migration import break_even, moved, transfers
from engine.plan import Placement
from engine.problem import Problem


@dataclass(frozen=True)
class Migration:
    """copies: (layer, expert, GPU) copies that are new; bytes: of their weights; seconds: of the busiest port with the
    senders chosen well, and `bound` below which no choice of senders gets; steps: passes after which the time is won
    back, infinite where the plan is no faster."""

    copies: int
    bytes: float
    seconds: float
    bound: float
    steps: float

    @property
    def pays_off(self) -> str:
        """`pays off after 13 passes`, by whole passes."""
        if math.isinf(self.steps):
            return "never pays off, as the plan is no faster"
        return "pays off in the first pass" if self.steps <= 1 else f"pays off after {math.ceil(self.steps):,} passes"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON but for an infinite number of steps."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The move that `to_dict` described."""
        return cls(**data)


def migration(now: Placement, new: Placement, problem: Problem, seconds_now: float, seconds_new: float) -> Migration:
    """From one placement to another on the problem's cluster; seconds_now, seconds_new: simulated seconds of a pass."""
    held_now, held_new = now.share > 0, new.share > 0
    copies = int(moved(held_now, held_new).sum())
    size = problem.model.bytes_per_expert
    sent = transfers(held_now, held_new, size, problem.network)
    steps = break_even(sent.seconds, seconds_now, seconds_new) if copies else 0.0
    return Migration(copies, copies * size, sent.seconds, sent.bound, steps)
