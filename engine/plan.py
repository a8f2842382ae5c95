"""The plan: what to do, as independent optional parts, immutable and named by its content."""

import hashlib
import json
from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, model_validator

from engine.plan_of_step import Overlap, Pipeline, Priority
from engine.result import Provenance, Status
from engine.schema import Frozen


class Placement(Frozen):
    """Which experts sit on which GPU, per MoE layer. Replicas and different numbers of slots per GPU are allowed."""

    experts: int = Field(ge=1, le=4096)
    experts_of_gpu: tuple[tuple[tuple[int, ...], ...], ...] = Field(
        min_length=1, description="[MoE layer][gpu] -> the experts in its slots"
    )
    model_layers: tuple[int, ...] = Field(description="the model layer of every MoE layer")

    @model_validator(mode="after")
    def _every_expert_has_a_home(self) -> "Placement":
        if len(self.model_layers) != len(self.experts_of_gpu):
            raise ValueError("model_layers and experts_of_gpu must have one entry per MoE layer")
        gpus = len(self.experts_of_gpu[0])
        for layer, row in enumerate(self.experts_of_gpu):
            if len(row) != gpus:
                raise ValueError(f"layer {layer} is placed on {len(row)} GPUs, layer 0 on {gpus}")
            placed = {expert for slots in row for expert in slots}
            if missing := set(range(self.experts)) - placed:
                raise ValueError(f"layer {layer}: expert {min(missing)} is on no GPU")
            if unknown := placed - set(range(self.experts)):
                raise ValueError(
                    f"layer {layer}: there is no expert {max(unknown)} (experts are 0 … {self.experts - 1})"
                )
        return self

    @classmethod
    def from_slots(
        cls, slots: np.ndarray, slots_of_gpu: np.ndarray, experts: int, model_layers: tuple[int, ...]
    ) -> "Placement":
        """A placement with replicas. slots: int[layer, slot], the expert in every slot, GPU after GPU; slots_of_gpu:
        int[gpu]."""
        ends = np.cumsum(slots_of_gpu)[:-1]
        rows = tuple(tuple(tuple(part.tolist()) for part in np.split(row, ends)) for row in slots)
        return cls(experts=experts, experts_of_gpu=rows, model_layers=model_layers)

    @classmethod
    def from_gpu_of_expert(cls, gpu_of_expert: np.ndarray, gpus: int, model_layers: tuple[int, ...]) -> "Placement":
        """A placement without replicas. gpu_of_expert: int[layer, expert]."""
        experts_of_gpu = tuple(
            tuple(tuple(np.flatnonzero(row == gpu).tolist()) for gpu in range(gpus)) for row in gpu_of_expert
        )
        return cls(experts=gpu_of_expert.shape[1], experts_of_gpu=experts_of_gpu, model_layers=model_layers)

    @property
    def layers(self) -> int:
        return len(self.experts_of_gpu)

    @property
    def gpus(self) -> int:
        return len(self.experts_of_gpu[0])

    @cached_property
    def share(self) -> np.ndarray:
        """float64[layer, expert, gpu]: which part of an expert's tokens each GPU serves; replicas share equally."""
        slots = np.zeros((self.layers, self.experts, self.gpus))
        for layer, row in enumerate(self.experts_of_gpu):
            for gpu, experts in enumerate(row):
                np.add.at(slots[layer, :, gpu], list(experts), 1.0)
        return slots / slots.sum(axis=2, keepdims=True)

    @cached_property
    def single(self) -> bool:
        """Whether no expert has a replica."""
        return bool(np.all((self.share > 0).sum(axis=2) == 1))

    @property
    def gpu_of_expert(self) -> np.ndarray:
        """int64[layer, expert] of a placement without replicas (the first GPU where there are some)."""
        return (self.share > 0).argmax(axis=2)

    def moved_experts(self, other: "Placement") -> int | None:
        """(layer, expert, GPU) copies of `other` that this placement does not have; None for other sizes."""
        if (self.layers, self.gpus, self.experts) != (other.layers, other.gpus, other.experts):
            return None
        return int(((other.share > 0) & (self.share == 0)).sum())

    @cached_property
    def slots(self) -> np.ndarray:
        """int64[layer, gpu]: expert slots in use."""
        return np.array([[len(experts) for experts in row] for row in self.experts_of_gpu], dtype=np.int64)


class Schedule(Frozen):
    """The sends of one all-to-all, in order, as columns of equal length.

    In a phased order `phase` groups sends that run side by side, and `duration[phase]` is the planned time of a phase
    in seconds without start-up latency. In a sequential order every sender works through its own sends as listed.
    """

    src: tuple[int, ...] = ()
    dst: tuple[int, ...] = ()
    bytes: tuple[NonNegativeFloat, ...] = ()
    phase: tuple[int, ...] = ()
    duration: tuple[NonNegativeFloat, ...] = ()

    @model_validator(mode="after")
    def _columns_agree(self) -> "Schedule":
        if len({len(self.src), len(self.dst), len(self.bytes), len(self.phase)}) > 1:
            raise ValueError("src, dst, bytes and phase must have one entry per send")
        if self.phase and (min(self.phase) < 0 or max(self.phase) >= max(len(self.duration), 1)):
            raise ValueError("a send names a phase that has no duration")
        return self

    @property
    def phases(self) -> int:
        return len(self.duration)

    @property
    def makespan(self) -> float:
        """Seconds of all phases, start-up latency left out."""
        return float(sum(self.duration))


OrderMode = Literal["matched", "shared", "sequential", "concurrent"]


class SendOrder(Frozen):
    """When bytes move in every all-to-all.

    matched: phases in which a GPU sends to at most one peer and receives from at most one (over the fabric; the links
        inside a node are a second network with a matching of their own)
    shared: phases in which a GPU serves several peers at once, each at a constant rate
    sequential: every sender sends to one peer after another and receivers share their bandwidth (RCS, SJF)
    concurrent: everything at once (a plain all-to-all); needs no schedules
    """

    mode: OrderMode
    dispatch: tuple[Schedule, ...] = Field(default=(), description="one per MoE layer")
    combine: tuple[Schedule, ...] = Field(default=(), description="one per MoE layer")

    @model_validator(mode="after")
    def _scheduled(self) -> "SendOrder":
        if len(self.dispatch) != len(self.combine):
            raise ValueError("dispatch and combine must have one schedule per MoE layer each")
        if self.mode == "concurrent" and self.dispatch:
            raise ValueError("a concurrent order has no schedules")
        if self.mode != "concurrent" and not self.dispatch:
            raise ValueError(f"a {self.mode} order needs a schedule for every MoE layer")
        if self.mode in ("matched", "shared") and any(
            one.src and not one.duration for one in self.dispatch + self.combine
        ):
            raise ValueError(f"a {self.mode} order needs the duration of every phase")
        return self


Execution = Literal["vanilla", "context-coherent"]
"""vanilla: tokens return to their rank after every MoE layer (dispatch and combine). context-coherent: every GPU holds the
contexts of all tokens, so a token goes on from the GPU of its first expert, and one all-gather ends the pass (ExFlow §IV-A)."""


class Reaction(Frozen):
    """What a scheduler does at run time: Lina's two phases (§5.2). A plan's own placement is what it starts from.

    path_length: layers of a token's path that foretell its next expert; top_k: likeliest experts kept of each estimate;
    check_experts: most popular experts compared in phase two; max_experts_per_device: slots of a device in a layer.
    """

    path_length: int = Field(ge=1, le=64)
    top_k: int = Field(ge=1, le=4096)
    check_experts: int = Field(ge=1, le=4096)
    max_experts_per_device: int = Field(ge=1, le=4096)


class Claim(Frozen):
    """What the optimiser says of its plan: predicted seconds and a proven lower bound over the plans it chose from.
    Never trusted: `validate` and `simulate` recompute the objective.

    scope: what the bound covers: every send order of the plan's own placement, or also every other placement without
    replicas and with as many slots per GPU; of a training step, every schedule of the plan's own placement."""

    status: Status
    objective: float = Field(ge=0)
    bound: float = Field(ge=0)
    scope: Literal["order", "placement and order", "schedule"]

    @property
    def proof(self) -> str:
        """How far the plan is proven, in words."""
        if self.status is Status.OPTIMAL:
            return {"placement and order": "proven optimal", "schedule": "optimal schedule"}.get(
                self.scope, "optimal order"
            )
        stopped = {Status.CANCELLED: "stopped early", Status.TIME_LIMIT: "time ran out"}
        return stopped.get(self.status, "heuristic")


def _order_fits(order: SendOrder, placement: Placement) -> None:
    scheduled = len(order.dispatch)
    if scheduled and scheduled != placement.layers:
        raise ValueError(f"the order covers {scheduled} MoE layers, the placement {placement.layers}")
    for schedule in order.dispatch + order.combine:
        ends = schedule.src + schedule.dst
        if ends and not (min(ends) >= 0 and max(ends) < placement.gpus):
            raise ValueError(f"a send names a GPU outside 0 … {placement.gpus - 1}")


class Plan(Frozen):
    """What to do on a cluster for a model. Its id is the SHA-256 of its canonical JSON, claim and name left out."""

    name: str = Field(min_length=1, max_length=120)
    placement: Placement
    send_order: SendOrder
    execution: Execution = "vanilla"
    placement_b: Placement | None = Field(default=None, description="of a second model on the same GPUs")
    send_order_b: SendOrder | None = None
    reaction: Reaction | None = None
    priority: Priority | None = Field(default=None, description="of a training step; absent: a plan for inference")
    pipeline: Pipeline | None = None
    overlap: Overlap | None = None
    provenance: Provenance
    claim: Claim | None = None
    parent: str | None = Field(default=None, description="id of the plan that this one was derived from")

    @model_validator(mode="after")
    def _parts_agree(self) -> "Plan":
        if (self.placement_b is None) != (self.send_order_b is None):
            raise ValueError("a second model needs both a placement and a send order")
        _order_fits(self.send_order, self.placement)
        if self.placement_b is not None:
            if self.placement_b.gpus != self.placement.gpus:
                raise ValueError("both models must be placed on the same GPUs")
            if self.execution != "vanilla":
                raise ValueError("two models on one cluster run with vanilla execution")
            _order_fits(self.send_order_b, self.placement_b)
        if self.priority is None and (self.pipeline is not None or self.overlap is not None):
            raise ValueError("pipeline and overlap are parts of a training step, which also needs a priority")
        if self.priority is not None and (self.placement_b is not None or self.execution != "vanilla"):
            raise ValueError("a training step is planned for one model with vanilla execution")
        if self.pipeline is not None and len(self.pipeline.forward) != self.placement.layers:
            raise ValueError(f"{len(self.pipeline.forward)} pipeline degrees for {self.placement.layers} MoE layers")
        if self.execution == "context-coherent" and not self.placement.single:
            raise ValueError("context-coherent execution needs every expert on exactly one GPU")
        return self

    @cached_property
    def id(self) -> str:
        content = self.model_dump(mode="json", exclude_none=True, exclude={"claim", "name"})
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
