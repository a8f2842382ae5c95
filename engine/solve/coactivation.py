"""`coactivation`: experts that fire together on one GPU or node, so that tokens send few rows."""

from typing import Any

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.placement.coactivation import CoactivationInstance, Travel, coactivation
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options, require_at_most

MOST_EXPERTS, MOST_GPUS, MOST_CELLS = 4096, 1024, 2**26
"""More experts belong to no model; with more GPUs one assignment takes longer than an answer may be late, and with more tokens
what each of them pays on every GPU would fill the memory."""


class CoactivationProblem(Frozen):
    experts: tuple[tuple[tuple[int, ...], ...], ...]
    source_gpu: tuple[int, ...]
    gpus: int = Field(ge=1, le=MOST_GPUS)
    gpus_per_node: int | None = None
    travel: Travel = "gpu"
    cap: float | None = None
    expert_count: int | None = Field(default=None, ge=1, le=MOST_EXPERTS)


def _coactivation(problem: CoactivationProblem, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    tokens = len(problem.source_gpu)
    require_at_most(MOST_CELLS, layers=len(problem.experts), tokens=tokens, GPUs=problem.gpus)
    choices = {len(token) for layer in problem.experts for token in layer}
    for index, layer in enumerate(problem.experts):
        if len(layer) != tokens:
            raise InputError(f"experts, layer {index} has {len(layer)} tokens, but source_gpu has {tokens}")
    if not problem.experts or len(choices) != 1:
        raise InputError("experts must be a table [layer][token][k] with as many experts for every token (-1: none)")
    try:
        experts = np.array(problem.experts, dtype=np.int64)
        source_gpu = np.array(problem.source_gpu, dtype=np.int64)
    except OverflowError:
        raise InputError("experts and source_gpu must hold ids, but one is too large") from None
    instance = CoactivationInstance(
        experts, source_gpu, problem.gpus, problem.gpus_per_node, problem.travel, problem.cap, problem.expert_count
    )
    result = coactivation(instance, options.time_limit, options.seed, options.exact, stop)
    return result, {
        "gpu_of_expert": result.solution.tolist(),
        "rows": instance.rows(result.solution).tolist(),
        "imbalance": instance.imbalance(result.solution).tolist(),
    }


KERNELS: dict[str, Face] = {"coactivation": (CoactivationProblem, _coactivation)}
