"""`priority`: all-to-alls and all-reduces on one network."""

from typing import Any, Literal

from pydantic import Field

from engine.result import Result, Stop
from engine.schema import Frozen
from engine.simulate.priority import NetworkSchedule, schedule_network
from engine.solve.instance import Face, Options

MOST = 20_000
"""Operations of a kind, which are simulated within a second or two."""


class PriorityInstance(Frozen):
    alltoall: tuple[tuple[float, float], ...] = Field(max_length=MOST)
    allreduce: tuple[tuple[float, float], ...] = Field(max_length=MOST)
    micro_op: float | None = Field(default=None, gt=0)
    overhead: float = Field(default=0, ge=0)
    policy: Literal["priority", "fair", "fifo"] = "priority"


def _priority(instance: PriorityInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    result = schedule_network(
        instance.alltoall, instance.allreduce, instance.micro_op, instance.overhead, instance.policy
    )
    return result, {"finish": result.solution.finish, "events": events(result.solution)}


def events(schedule: NetworkSchedule) -> list[dict[str, Any]]:
    """What runs when, as [{kind, index, piece, start, end}] by start; `piece` counts within the all-reduce."""
    listed = [("alltoall", index, 0, *times) for index, times in enumerate(schedule.alltoall.tolist())]
    piece = 0
    for row, (index, times) in enumerate(zip(schedule.piece_of.tolist(), schedule.pieces.tolist(), strict=True)):
        piece = piece + 1 if row and schedule.piece_of[row - 1] == index else 0
        listed.append(("allreduce", index, piece, *times))
    listed.sort(key=lambda event: event[3:])
    return [dict(zip(("kind", "index", "piece", "start", "end"), event, strict=True)) for event in listed]


KERNELS: dict[str, Face] = {"priority": (PriorityInstance, _priority)}
