"""`popularity`: how many devices each expert of the next layer deserves, predicted from the paths of a batch."""

from typing import Any

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.placement.popularity import estimate_devices
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options


class PopularityInstance(Frozen):
    train: tuple[tuple[int, ...], ...] = Field(min_length=1)
    test_prefix: tuple[tuple[int, ...], ...] = Field(min_length=1)
    path_length: int = Field(ge=1)
    top_k: int = Field(ge=1)
    layer: int = Field(ge=0)
    experts: int = Field(ge=1, le=65536)
    devices: int = Field(ge=1, le=1_000_000)


def _popularity(instance: PopularityInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    result = estimate_devices(
        _ids(instance.train, "train", instance.experts),
        _ids(instance.test_prefix, "test_prefix", instance.experts),
        instance.layer,
        instance.path_length,
        instance.top_k,
        instance.experts,
        instance.devices,
    )
    return result, {"devices_of_expert": result.solution.tolist()}


def _ids(rows: tuple[tuple[int, ...], ...], name: str, experts: int) -> np.ndarray:
    """int64[token, layer]; raises InputError when the rows differ in length or name experts that do not exist."""
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise InputError(f"{name} must be a matrix with rows of equal length")
    for token, row in enumerate(rows):
        for expert in row:
            if not 0 <= expert < experts:
                raise InputError(f"{name}: token {token} names expert {expert}; ids go from 0 to {experts - 1}")
    return np.array(rows, dtype=np.int64)


KERNELS: dict[str, Face] = {"popularity": (PopularityInstance, _popularity)}
