"""How much of the time GPUs compute with one model alone on them, and with both (Aurora §8.1 and Figure 12)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from engine.plan import Plan
from engine.problem import Problem
from engine.simulate import simulate
from engine.simulate.inference import simulate_inference
from engine.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Utilisation:
    """Of what is served: gpu: float64[gpu], compute time / total; seconds: of the pass."""

    served: str
    gpu: np.ndarray
    seconds: float

    @property
    def mean(self) -> float:
        return float(self.gpu.mean())


@dataclass(frozen=True, eq=False)
class AloneAndTogether:
    """Of the first model alone on all GPUs, of the second alone, and of both colocated."""

    parts: tuple[Utilisation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"parts": [vars(part) | {"gpu": part.gpu.tolist()} for part in self.parts]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` described."""
        return cls(
            tuple(Utilisation(**part | {"gpu": np.array(part["gpu"], dtype=np.float64)}) for part in data["parts"])
        )


def exclusive_and_colocated(plan: Plan, problem: Problem, timeline: Timeline | None = None) -> AloneAndTogether:
    """The utilisation under a plan for two models. Alone a model keeps its placement and its own order of sends (see
    `SendOrder.alone`). timeline: of both, where it is known already. Raises InputError when the plan does not fit the problem,
    which is of two models."""
    both = simulate(plan, problem) if timeline is None else timeline
    moved = problem.as_planned(plan)
    parts = (
        (plan.placement, plan.send_order, replace(moved, second=None)),
        (plan.placement_b, plan.send_order_b, moved.second),
    )
    passes = []
    for which, (placement, order, side) in zip(("first", "second"), parts, strict=True):
        alone = Plan(name="alone", placement=placement, send_order=order.alone, provenance=plan.provenance)
        passes.append((f"{which} model alone ({side.model.name})", simulate_inference(alone, side)))
    return AloneAndTogether(tuple(_of(served, part) for served, part in (*passes, ("both colocated", both))))


def _of(served: str, timeline: Timeline) -> Utilisation:
    return Utilisation(served, timeline.busy("compute") / (timeline.total or 1.0), timeline.total)
