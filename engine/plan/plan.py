"""The plan: independent optional parts, immutable and named by its content, and its schedules carried out on other traffic."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from engine.goal import Goal, goal_of
from engine.plan.placement import Placement
from engine.plan.send_order import Schedule, SendOrder, Travel
from engine.plan.training import Offload, Overlap, Pipeline, Priority
from engine.result import Provenance, Status
from engine.schema import Frozen, Kept

Execution = Literal["vanilla", "context-coherent"]
"""vanilla: tokens return to their rank after every MoE layer (dispatch and combine). context-coherent: every GPU holds the
contexts of all tokens, so a token goes on from the GPU of its first expert, between an all-gather of the prompts and one of the
outputs (ExFlow §IV-A)."""


class Reaction(Frozen):
    """A scheduler's work at run time: Lina's two phases (§5.2). It starts from the plan's own placement.

    path_length: layers of a token's path that predict its next expert
    top_k: likeliest experts kept of each estimate
    check_experts: most popular experts compared in phase two
    max_experts_per_device: slots of a device in a layer
    batch, packing: recorded tokens that it schedules at once, and its rule (see `TwoPhaseOptions`); absent: the plan counts as
        its own placement left as it is
    """

    path_length: int = Field(ge=1, le=64)
    top_k: int = Field(ge=1, le=4096)
    check_experts: int = Field(ge=1, le=4096)
    max_experts_per_device: int = Field(ge=1, le=4096)
    batch: int | None = Field(default=None, ge=1, le=10**7)
    packing: Literal["lina", "best"] | None = None


class Claim(Frozen):
    """The optimiser's claim about its plan. Never trusted: `validate` and `simulate` recompute the objective.

    objective: seconds; predicted
    bound: seconds; proven lower bound over the plans in `scope`
    scope: "order": every send order of the plan's own placement; "placement and order": also every other placement without
        replicas and with as many slots per GPU; "schedule": every schedule of the plan's own placement, for a training step
    """

    status: Status
    objective: float = Field(ge=0)
    bound: float = Field(ge=0)
    scope: Literal["order", "placement and order", "schedule"]


def _order_fits(order: SendOrder, placement: Placement) -> None:
    scheduled = len(order.dispatch)
    if scheduled and scheduled != placement.layers:
        raise ValueError(f"the order covers {scheduled} MoE layers, the placement {placement.layers}")
    for schedule in order.dispatch + order.combine:
        ends = schedule.src, schedule.dst
        if schedule.sends and not all(end.min() >= 0 and end.max() < placement.gpus for end in ends):
            raise ValueError(f"a send names a GPU outside 0 … {placement.gpus - 1}")


class Plan(Kept):
    """A plan for a model on a cluster. Its id is the SHA-256 of its canonical JSON, claim, name and version left out."""

    name: str = Field(min_length=1, max_length=120)
    placement: Placement
    send_order: SendOrder
    execution: Execution = "vanilla"
    travel: Travel | None = Field(
        default=None, description="how tokens travel, of both models; absent: one row per token copy, in the model's format"
    )
    placement_b: Placement | None = Field(default=None, description="of a second model on the same GPUs")
    send_order_b: SendOrder | None = None
    token_gpus: tuple[int, ...] | None = Field(
        default=None, description="the GPU on which the tokens of each rank start, an entry a rank; absent: rank r's on GPU r"
    )
    token_gpus_b: tuple[int, ...] | None = Field(default=None, description="of a second model")
    reaction: Reaction | None = None
    priority: Priority | None = Field(default=None, description="of a training step; absent: a plan for inference")
    pipeline: Pipeline | None = None
    overlap: Overlap | None = None
    offload: Offload | None = None
    provenance: Provenance
    claim: Claim | None = None
    parent: str | None = Field(default=None, description="id of the plan that this one was derived from")

    @field_validator("travel")
    @classmethod
    def _usual_travel_is_absent(cls, travel: Travel | None) -> Travel | None:
        # One plan, one id: those from before there was a choice have no travel.
        return None if travel == Travel() else travel

    @model_validator(mode="after")
    def _parts_agree(self) -> "Plan":
        if (self.placement_b is None) != (self.send_order_b is None):
            raise ValueError("a second model needs both a placement and a send order")
        if "joint" in (self.send_order.mode, self.send_order_b and self.send_order_b.mode) and (
            self.send_order_b is None or self.send_order.mode != self.send_order_b.mode
        ):
            raise ValueError("a joint order is one of two models, and both must have it")
        _order_fits(self.send_order, self.placement)
        if self.placement_b is not None:
            if self.placement_b.gpus != self.placement.gpus:
                raise ValueError("both models must be placed on the same GPUs")
            if self.execution != "vanilla":
                raise ValueError("two models on one cluster run with vanilla execution")
            _order_fits(self.send_order_b, self.placement_b)
        gpus = self.placement.gpus
        for starts in (self.token_gpus, self.token_gpus_b):
            if starts is not None and (len(starts) != gpus or not all(0 <= gpu < gpus for gpu in starts)):
                raise ValueError(f"where tokens start needs a GPU of 0 … {gpus - 1} for each of {gpus} ranks")
        if (self.token_gpus is None) != (self.token_gpus_b is None) or (self.token_gpus and self.placement_b is None):
            raise ValueError("where tokens start is said of both of two models, or not at all")
        if self.priority is None and any(part is not None for part in (self.pipeline, self.overlap, self.offload)):
            raise ValueError("pipeline, overlap and offload are parts of a training step, which also needs a priority")
        if self.priority is not None and (self.placement_b is not None or self.execution != "vanilla"):
            raise ValueError("a training step is planned for one model with vanilla execution")
        if self.priority is not None and self.travel is not None:
            raise ValueError("in a training step every copy of a token travels on its own")
        if self.pipeline is not None and len(self.pipeline.forward) != self.placement.layers:
            raise ValueError(f"{len(self.pipeline.forward)} pipeline degrees for {self.placement.layers} MoE layers")
        if self.execution == "context-coherent" and not self.placement.single:
            raise ValueError("context-coherent execution needs every expert on exactly one GPU")
        return self

    @property
    def goal(self) -> Goal:
        """The goal that the plan's parts imply."""
        return goal_of(training=self.priority is not None, two_models=self.placement_b is not None)

    @cached_property
    def id(self) -> str:
        return self.digest_without("claim", "name")

    def with_parts(self, **parts: Any) -> Self:
        """The plan with these fields in place of its own, all checked together again. Raises ValueError if they disagree."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}  # dict() would have the cached id too
        return type(self).model_validate(fields | parts)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As in pydantic; with another name or claim it keeps its id."""
        copied = super().model_copy(update=update, deep=deep)
        if "id" in vars(self) and set(update or ()) <= {"claim", "name"}:
            vars(copied)["id"] = self.id
        return copied


def replay(schedule: Schedule, traffic: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The sends that carry `traffic` in the schedule's order: src int64, dst int64, bytes float64, phase int64, each [send].

    traffic: float64[src, dst] bytes with a zero diagonal

    A pair keeps its place and its split over phases, scaled to its bytes in `traffic`. Pairs that the schedule does
    not know go last, in rotation: GPU i to GPU i + k in the k-th phase, so that a matched order stays one. Sends without bytes
    disappear.
    """
    n = len(traffic)
    src, dst, planned = schedule.src.astype(np.int64), schedule.dst.astype(np.int64), schedule.bytes
    pair = src * n + dst
    total = np.bincount(pair, planned, n * n)
    size = planned / np.where(total > 0, total, 1.0)[pair] * traffic[src, dst]
    unknown_src, unknown_dst = np.nonzero((traffic > 0) & (total.reshape(n, n) == 0))
    turn = (unknown_dst - unknown_src) % n
    by_turn = np.argsort(turn, kind="stable")
    unknown_src, unknown_dst, turn = unknown_src[by_turn], unknown_dst[by_turn], turn[by_turn]
    src, dst = np.concatenate([src, unknown_src]), np.concatenate([dst, unknown_dst])
    size = np.concatenate([size, traffic[unknown_src, unknown_dst]])
    phase = np.concatenate([schedule.phase, schedule.phases + turn])
    real = size > 0
    return src[real], dst[real], size[real], phase[real]
