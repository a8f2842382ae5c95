"""`replicate-devices`: which devices host which experts of one layer, popular ones several."""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.placement.devices.kernel import replicate_devices
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options

MOST_SLOTS = 65_536
"""Which can be dealt within a second."""


class ReplicateDevicesInstance(Frozen):
    popularity: tuple[float, ...] = Field(min_length=1, max_length=4096)
    devices: int = Field(ge=1, le=4096)
    max_experts_per_device: int = Field(ge=1)
    algorithm: Literal["lina", "best"] = "best"


def _replicate_devices(
    instance: ReplicateDevicesInstance, options: Options, stop: Stop
) -> tuple[Result, dict[str, Any]]:
    slots = instance.devices * min(instance.max_experts_per_device, len(instance.popularity))
    if slots > MOST_SLOTS:
        raise InputError(
            f"{instance.devices} devices with up to {slots // instance.devices} experts each have {slots} slots; at most "
            f"{MOST_SLOTS} are filled"
        )
    result = replicate_devices(
        np.array(instance.popularity),
        instance.devices,
        instance.max_experts_per_device,
        instance.algorithm,
        exact=options.exact,
        time_limit=options.time_limit,
        seed=options.seed,
        stop=stop,
    )
    return result, {"experts_of_device": [list(held) for held in result.solution]}


KERNELS: dict[str, Face] = {"replicate-devices": (ReplicateDevicesInstance, _replicate_devices)}
