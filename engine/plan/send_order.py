"""When bytes move: the sends of every all-to-all and their order."""

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from engine.columns import Amounts, Integers
from engine.schema import Frozen


class Schedule(Frozen):
    """The sends of one all-to-all, in order, as columns of equal length.

    src, dst, phase: int32[send]; bytes: float64[send]; duration: float64[phase]; all read-only

    In a phased order `phase` groups sends that run side by side, and `duration[phase]` is the planned time of a phase
    in seconds without start-up latency. In a sequential order every sender works through its own sends as listed.
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
        """Seconds of all phases, start-up latency left out."""
        return float(sum(self.duration.tolist()))


OrderMode = Literal["matched", "joint", "shared", "two-tier", "sequential", "concurrent"]


class SendOrder(Frozen):
    """When bytes move in every all-to-all.

    matched: phases in which a GPU sends to at most one peer and receives from at most one (over the fabric; the links
        inside a node are a second network with a matching of their own)
    joint: a matched order of the all-to-alls of two models together: phases are counted through a layer, over both dispatches
        and both combines, a phase begins when the one before it has ended and all whose bytes it carries are ready, and both
        models' sends together are a matching. Every schedule has the durations of all phases
    shared: phases in which a GPU serves several peers at once, each at a constant rate
    two-tier: phases in which a node with links of its own sends to at most one other and receives from at most one, over all
        its ports side by side; its GPUs relay for each other over the links. src and dst of the schedules are such nodes, each
        named by its first GPU, or single GPUs without links; what GPUs do follows (see `engine.communication.steps`), and what
        stays in a node is not listed
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
        """The order for one model that knows nothing of another: of a joint one a matched order with its own phases, which wait
        for nobody else's. Any other as it is."""
        if self.mode != "joint":
            return self
        dispatch, combine = (tuple(map(_own_phases, schedules)) for schedules in (self.dispatch, self.combine))
        return SendOrder(mode="matched", dispatch=dispatch, combine=combine)


def _own_phases(schedule: Schedule) -> Schedule:
    phases, phase = np.unique(schedule.phase, return_inverse=True)
    return schedule.model_copy(update={"phase": phase.astype(np.int32), "duration": schedule.duration[phases]})
