"""The order of sends in every all-to-all, and the travel of tokens: the rows that are sent, and their number formats."""

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from engine.cluster import BITS_PER_DTYPE
from engine.model import MoEModel
from engine.schema import Amounts, Frozen, Integers


class Schedule(Frozen):
    """The sends of one all-to-all, in order, as columns of equal length.

    src: int32[send]; the GPU that sends
    dst: int32[send]; the GPU that receives
    bytes: float64[send]
    phase: int32[send]; in a phased order, sends of one phase run at the same time
    duration: float64[phase] seconds; the planned time of a phase without start-up latency

    All columns are read-only. In a sequential order every sender works through its own sends as listed.
    """

    # Validated, so that the defaults are arrays too.
    src: Integers = Field(default=(), validate_default=True)
    dst: Integers = Field(default=(), validate_default=True)
    bytes: Amounts = Field(default=(), validate_default=True)
    phase: Integers = Field(default=(), validate_default=True)
    duration: Amounts = Field(default=(), validate_default=True)

    @model_validator(mode="after")
    def _columns_agree(self) -> "Schedule":
        if len({len(self.src), len(self.dst), len(self.bytes), len(self.phase)}) > 1:
            raise ValueError("src, dst, bytes and phase must have one entry per send")
        if len(self.phase) and (self.phase.min() < 0 or self.phase.max() >= max(self.phases, 1)):
            raise ValueError("a send names a phase that has no duration")
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in Schedule.model_fields)

    @property
    def sends(self) -> int:
        return len(self.src)

    @property
    def phases(self) -> int:
        return len(self.duration)

    @property
    def makespan(self) -> float:
        """Seconds of all phases together, start-up latency left out."""
        return float(sum(self.duration.tolist()))


OrderMode = Literal["matched", "joint", "shared", "two-tier", "sequential", "concurrent"]


class SendOrder(Frozen):
    """The order of sends in every all-to-all, by mode.

    matched: phases in which a GPU sends to at most one peer and receives from at most one (over the fabric; the links
        inside a node are a second network with a matching of their own)
    joint: a matched order of the all-to-alls of two models together: phases are counted through a layer, over both dispatches
        and both combines, a phase begins when the one before it has ended and all its senders are ready, and both models'
        sends together are a matching. Every schedule has the durations of all phases
    shared: phases in which a GPU serves several peers at once, each at a constant rate
    two-tier: phases in which a node with links of its own sends to at most one other and receives from at most one, over all
        its ports at the same time; its GPUs relay for each other over the links. src and dst of the schedules are such nodes,
        each named by its first GPU, or single GPUs without links; the steps of GPUs follow (see `engine.communication.steps`),
        and traffic inside a node is not listed
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
        if self.mode in ("matched", "joint", "shared", "two-tier") and any(
            schedule.sends and not schedule.phases for schedule in self.dispatch + self.combine
        ):
            raise ValueError(f"a {self.mode} order needs the duration of every phase")
        return self

    @property
    def alone(self) -> "SendOrder":
        """The order for one model alone: a joint one becomes a matched order with its own phases, which wait for no other
        model; any other order stays as it is."""
        if self.mode != "joint":
            return self
        dispatch, combine = (tuple(map(_own_phases, schedules)) for schedules in (self.dispatch, self.combine))
        return SendOrder(mode="matched", dispatch=dispatch, combine=combine)


def _own_phases(schedule: Schedule) -> Schedule:
    phases, phase = np.unique(schedule.phase, return_inverse=True)
    return schedule.model_copy(update={"phase": phase.astype(np.int32), "duration": schedule.duration[phases]})


TravelUnit = Literal["copies", "gpu", "node"]
Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
Replicas = Literal["fewest", "nearest-static", "nearest-dynamic", "fixed", "lp"]

NUMBERS_PER_SCALE, BYTES_PER_SCALE = 128, 4
"""A row of 8-bit numbers carries a 32-bit scale for each 128 of them (DeepSeek-V3 §3.3.2, DeepEP)."""
BYTES_PER_WEIGHT = 4
"""Bytes of a gate weight in a row."""


class Travel(Frozen):
    """The rows that an engine sends for a token. A row is a token's hidden vector.

    unit: the receivers of one row of a token
        "copies": every (token, expert) pair, as the papers have it and DeepEP's low-latency kernels do
        "gpu": every GPU that has one of its experts, as NCCL paths do
        "node": every node that has one. The row enters at the GPU with the sender's place in its node, and goes from there over
            the node's links, once to each further GPU with one of the experts (DeepEP's normal kernels). Where GPUs have no
            links each is a node of its own. Combine goes the same way back, reduced at every stop.
    dispatch: number format of the rows to the experts; absent: the model's
    combine: number format of the rows back; absent: the model's
    replicas: the copy of an expert that serves a token. Absent: its copies in turn. "fewest": for each token the copies that
        touch fewest GPUs (with unit "node": nodes) in addition to its own, and of equal ones the GPU with the fewest choices so
        far. "nearest-static", "nearest-dynamic", "lp", "fixed": by the rank that sends, see `engine.placement.dispatch_rules`
    ranks_per_node: ranks of a node, so many in a row, for the rules that look for near copies; absent: all are in one
    """

    unit: TravelUnit = "copies"
    dispatch: Dtype | None = None
    combine: Dtype | None = None
    replicas: Replicas | None = None
    ranks_per_node: int | None = Field(default=None, ge=1, le=100_000)

    @model_validator(mode="after")
    def _copies_are_chosen_where_rows_are_shared(self) -> "Travel":
        if self.replicas == "fewest" and self.unit == "copies":
            raise ValueError("replicas: where every copy of a token travels on its own no choice saves rows; use gpu or node")
        return self

    def on_nodes(self, sizes: list[int]) -> "Travel":
        """With the ranks of a node where a rule looks at nodes and none are stated: those of the nodes if all have as many, as
        SGLang needs it."""
        looks = self.replicas in ("nearest-static", "nearest-dynamic", "lp") and self.ranks_per_node is None
        return self.model_copy(update={"ranks_per_node": sizes[0]}) if looks and len(sizes) > 1 == len(set(sizes)) else self

    def row_bytes(self, model: MoEModel) -> tuple[float, float]:
        """Bytes of a row in dispatch and in combine. One that serves several experts brings the token's gate weights along,
        because their outputs are summed up before they return."""
        out, back = (_row_bytes(dtype, model) for dtype in (self.dispatch, self.combine))
        return out + (0 if self.unit == "copies" else BYTES_PER_WEIGHT * model.experts_per_token), back

    @property
    def in_words(self) -> str:
        """`one row per node, fp8 out, bf16 back`."""
        unit = {"copies": "one row per token copy", "gpu": "one row per GPU", "node": "one row per node"}[self.unit]
        formats = [f"{dtype} {way}" for dtype, way in ((self.dispatch, "out"), (self.combine, "back")) if dtype]
        return ", ".join([unit, *formats, *([self.replicas_in_words] if self.replicas else [])])

    @property
    def replicas_in_words(self) -> str:
        """The copy that serves a token."""
        near = "each rank's tokens to its own copy, else " + ("to its node's first, else " if self.ranks_per_node else "")
        return {
            None: "copies in turn",
            "fewest": f"each token to the copies that touch fewest {self.unit.replace('gpu', 'GPU')}s",
            "nearest-static": f"{near}to one that it drew (SGLang with DeepEP)",
            "nearest-dynamic": f"{near}to all in turn (SGLang, dynamic)",
            "fixed": "each rank's tokens to one fixed copy (vLLM-Ascend)",
            "lp": f"{near}to all by a linear programme (SGLang, lp)",
        }[self.replicas]


def _row_bytes(dtype: Dtype | None, model: MoEModel) -> float:
    """Bytes of a row. Only a format that is named has scales: 8-bit models as the papers have them have none."""
    scales = -(-model.row_width // NUMBERS_PER_SCALE) * BYTES_PER_SCALE if dtype == "fp8" else 0
    return model.row_width * BITS_PER_DTYPE[dtype or model.dtype] / 8 + scales
