"""`assign`: which GPU takes which expert, one to each."""

from typing import Any

import numpy as np

from engine.errors import InputError
from engine.placement.assignment import AssignmentInstance, assign
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options, matrix, require_at_most

MOST_EXPERTS = 2048
"""With more, tables of them take longer to be sorted than an answer may be late."""


class AssignInstance(Frozen):
    tokens: tuple[tuple[float, ...], ...]
    bandwidth: tuple[float, ...]
    seconds_per_token: tuple[float, ...]


def _assign(instance: AssignInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    require_at_most(MOST_EXPERTS, experts=len(instance.tokens))
    tokens = matrix(instance.tokens, "tokens")
    gpus, experts = tokens.shape
    if gpus != experts:
        raise InputError(f"tokens has {gpus} GPUs and {experts} experts; this problem has one expert per GPU")
    for name in ("bandwidth", "seconds_per_token"):
        if len(getattr(instance, name)) != gpus:
            raise InputError(f"{name} must have one number per GPU ({gpus}), but has {len(getattr(instance, name))}")
    if min(instance.bandwidth) <= 0 or min(instance.seconds_per_token) < 0 or tokens.min() < 0:
        raise InputError("bandwidth must be positive, tokens and seconds_per_token not negative")
    compute = np.outer(instance.seconds_per_token, tokens.sum(axis=0))
    bandwidth = np.array(instance.bandwidth)
    result = assign(AssignmentInstance.from_tokens(tokens, compute, bandwidth, bandwidth), stop)
    return result, {"gpu_of_expert": result.solution.tolist()}


KERNELS: dict[str, Face] = {"assign": (AssignInstance, _assign)}
