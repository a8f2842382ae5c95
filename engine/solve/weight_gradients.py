"""`weight-gradients`: which weight-gradient computations run under which all-to-alls."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.overlap.weight_gradients import Algorithm, WeightGradientInstance, schedule_weight_gradients
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options

MOST = 1024
"""All-to-alls or dW beyond any model: a slip of the keyboard is answered before it takes all memory."""


class WeightGradientsInstance(Frozen):
    """alltoall, dw in seconds; allowed [dW][all-to-all], which may be left empty where there is no all-to-all."""

    alltoall: tuple[float, ...] = Field(max_length=MOST)
    dw: tuple[float, ...] = Field(max_length=MOST)
    allowed: tuple[tuple[Annotated[int, Field(ge=0, le=1)], ...], ...] = Field(max_length=MOST)
    algorithm: Algorithm = "best"


def _weight_gradients(request: WeightGradientsInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    w, m = len(request.dw), len(request.alltoall)
    rows = request.allowed if request.allowed or m else ((),) * w
    if len(rows) != w:
        raise InputError(f"allowed has {len(rows)} rows, but there are {w} dw: it needs a row for each")
    for index, row in enumerate(rows):
        if len(row) != m:
            raise InputError(f"allowed → {index} has {len(row)} values, but there are {m} alltoall: one for each")
    allowed = np.array(rows, dtype=bool).reshape(w, m)
    instance = WeightGradientInstance(np.array(request.alltoall), np.array(request.dw), allowed)
    result = schedule_weight_gradients(
        instance,
        algorithm=request.algorithm,
        exact=options.exact,
        time_limit=options.time_limit,
        seed=options.seed,
        stop=stop,
    )
    return result, {"alltoall_of_dw": result.solution.tolist()}


KERNELS: dict[str, Face] = {"weight-gradients": (WeightGradientsInstance, _weight_gradients)}
"""The objective is overlapped seconds: more is better, and `bound` is at least `objective`."""
