"""`affinity`: experts of every layer on GPUs so that tokens seldom change GPU between layers."""

from typing import Any

import numpy as np

from engine.errors import InputError
from engine.placement.affinity.kernel import AffinityInstance, affinity
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options, require_at_most

MOST_EXPERTS, MOST_COUNTS = 2048, 2**22
"""With more, one assignment of a layer, or to count hops, takes longer than an answer may be late."""


class AffinityProblem(Frozen):
    transitions: tuple[tuple[tuple[float, ...], ...], ...]
    gpus: int
    gpus_per_node: int | None = None
    cost_gpu: float = 1.0
    cost_node: float = 1.0
    staged: bool = False


def _affinity(problem: AffinityProblem, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    counts = problem.transitions
    experts = len(counts[0]) if counts else 0
    if not experts:
        raise InputError("transitions must have a matrix of counts for every pair of neighbouring layers, but is empty")
    require_at_most(MOST_EXPERTS, experts=experts)
    require_at_most(MOST_COUNTS, transitions=len(counts), experts=experts, experts_of_the_next_layer=experts)
    for layer, count in enumerate(counts):
        if len(count) != experts or any(len(row) != experts for row in count):
            raise InputError(f"transitions, layer {layer} must have {experts} rows of {experts} counts")
    instance = AffinityInstance(
        np.array(counts, dtype=np.float64), problem.gpus, problem.gpus_per_node, problem.cost_gpu, problem.cost_node
    )
    result = affinity(instance, problem.staged, options.time_limit, options.seed, options.exact, stop)
    node_hops, gpu_hops = instance.hops(result.solution)
    return result, {"gpu_of_expert": result.solution.tolist(), "node_hops": node_hops, "gpu_hops": gpu_hops}


KERNELS: dict[str, Face] = {"affinity": (AffinityProblem, _affinity)}
