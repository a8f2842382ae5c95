"""`order`: when the bytes of one all-to-all move."""

from typing import Any, Literal

import numpy as np

from engine.communication.order import order
from engine.plan import Schedule
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options, matrix, require_at_most

MOST_GPUS = 1024
"""With more, to list what every pair sends would take longer than the two seconds that an answer may be late."""


class OrderInstance(Frozen):
    traffic: tuple[tuple[float, ...], ...]
    bandwidth: float | tuple[float, ...]
    mode: Literal["matched", "shared"] = "matched"


def _order(instance: OrderInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    require_at_most(MOST_GPUS, GPUs=len(instance.traffic))
    traffic = matrix(instance.traffic, "traffic")
    rates = instance.bandwidth
    bandwidth = np.full(len(traffic), rates) if isinstance(rates, float) else np.array(rates)
    result = order(traffic, bandwidth, bandwidth, instance.mode, stop)
    return result, {"phases": phases(result.solution)}


def phases(schedule: Schedule) -> list[dict[str, Any]]:
    """A schedule as [{duration, sends: [{src, dst, bytes}]}]."""
    listed: list[dict[str, Any]] = [{"duration": duration, "sends": []} for duration in schedule.duration.tolist()]
    columns = (column.tolist() for column in (schedule.src, schedule.dst, schedule.bytes, schedule.phase))
    for src, dst, size, phase in zip(*columns, strict=True):
        listed[phase]["sends"].append({"src": src, "dst": dst, "bytes": size})
    return listed


KERNELS: dict[str, Face] = {"order": (OrderInstance, _order)}
