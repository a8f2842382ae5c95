"""When bytes move: the sends of every all-to-all and their order."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, model_validator

from engine.schema import Frozen


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


OrderMode = Literal["matched", "shared", "two-tier", "sequential", "concurrent"]


class SendOrder(Frozen):
    """When bytes move in every all-to-all.

    matched: phases in which a GPU sends to at most one peer and receives from at most one (over the fabric; the links
        inside a node are a second network with a matching of their own)
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
        if self.mode in ("matched", "shared", "two-tier") and any(
            schedule.src and not schedule.duration for schedule in self.dispatch + self.combine
        ):
            raise ValueError(f"a {self.mode} order needs the duration of every phase")
        return self
