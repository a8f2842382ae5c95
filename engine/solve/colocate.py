"""`colocate` and `colocate-heterogeneous`: which experts of two models share a GPU."""

from typing import Any

import numpy as np

from engine.errors import InputError
from engine.placement.colocation.heterogeneous import colocate_heterogeneous
from engine.placement.colocation.pairs import colocate
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options, matrix, require_at_most

MOST_EXPERTS = 2048
"""With more, tables of their pairs take longer to be sorted than an answer may be late."""
MOST_GPUS = 128
"""The same of tables of GPUs and pairs."""


class ColocateInstance(Frozen):
    send_a: tuple[float, ...]
    recv_a: tuple[float, ...]
    send_b: tuple[float, ...]
    recv_b: tuple[float, ...]


class ColocateHeterogeneousInstance(Frozen):
    cost: tuple[tuple[tuple[float, ...], ...], ...]


def _colocate(instance: ColocateInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    experts = len(instance.send_a)
    require_at_most(MOST_EXPERTS, experts=experts)
    for name in ("recv_a", "send_b", "recv_b"):
        if len(getattr(instance, name)) != experts:
            raise InputError(f"send_a has {experts} experts, but {name} has {len(getattr(instance, name))}")
    result = colocate(
        np.array(instance.send_a), np.array(instance.recv_a), np.array(instance.send_b), np.array(instance.recv_b), stop
    )
    return result, {"partner": result.solution.tolist()}


def _colocate_heterogeneous(
    instance: ColocateHeterogeneousInstance, options: Options, stop: Stop
) -> tuple[Result, dict[str, Any]]:
    require_at_most(MOST_GPUS, GPUs=len(instance.cost))
    slices = [matrix(rows, f"cost of GPU {gpu}") for gpu, rows in enumerate(instance.cost)]
    for gpu, cost_of_gpu in enumerate(slices):
        if cost_of_gpu.shape != (len(slices), len(slices)):
            raise InputError(
                f"cost of GPU {gpu} has {cost_of_gpu.shape[0]} experts of a and {cost_of_gpu.shape[1]} of b; "
                f"with {len(slices)} GPUs there must be {len(slices)} of each"
            )
    if not slices:
        raise InputError("cost must have at least one GPU")
    result = colocate_heterogeneous(np.stack(slices), options.time_limit, options.seed, options.exact, stop)
    assignment = [[gpu, a, b] for gpu, (a, b) in enumerate(result.solution.tolist())]
    return result, {"assignment": assignment}


KERNELS: dict[str, Face] = {
    "colocate": (ColocateInstance, _colocate),
    "colocate-heterogeneous": (ColocateHeterogeneousInstance, _colocate_heterogeneous),
}
