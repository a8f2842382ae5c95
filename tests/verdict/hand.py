"""Problems that can be reckoned by hand: a token of an expert takes a second, everything else takes none."""

from dataclasses import dataclass

import numpy as np

from engine.cluster import Gpu
from engine.costs import CostModel
from engine.model import MoEModel
from engine.plan import Placement, Plan
from engine.problem import Problem, make_problem
from engine.result import Provenance
from engine.workload import ExpertLoad, RoutingTrace, Workload
from tests.cases.plans import plan_of
from tests.strategies import cluster_of, make_gpu, make_model


@dataclass(frozen=True)
class SecondAToken(CostModel):
    source = "a second for a token of an expert"

    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        return np.zeros_like(m, dtype=np.float64)

    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        return np.zeros_like(size, dtype=np.float64)

    def expert_ffn(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        return np.asarray(tokens, dtype=np.float64)


def loads(name: str, *layers: list[float]) -> ExpertLoad:
    return ExpertLoad(name, np.array(layers, dtype=np.float64), tuple(range(1, len(layers) + 1)))


def log(name: str, *tokens: list[int], experts: int = 4) -> RoutingTrace:
    """Top-1 paths, a list of experts per token."""
    return RoutingTrace(name, np.array(tokens, dtype=np.int16)[:, :, None], experts)


def problem_of(workload: Workload, gpus: int = 2, memory: float = 1e9) -> Problem:
    """A problem on GPUs with sends that take no time to speak of."""
    cluster = cluster_of(*[make_gpu(send=1e30, memory=memory)] * gpus)
    return make_problem(workload, cluster, make_model(workload.layers, workload.num_experts), SecondAToken())


def laid_out(name: str, *layers: list[list[int]], made_from: Workload | None = None, **provenance) -> Plan:
    """A plan by the experts on every GPU of every layer. made_from: the recording in its provenance."""
    experts = max(expert for gpus in layers for slots in gpus for expert in slots) + 1
    inputs = {"workload": made_from.digest} if made_from else {}
    placement = Placement(experts=experts, experts_of_gpu=layers, model_layers=tuple(range(1, len(layers) + 1)))
    origin = Provenance(**({"optimiser": "by hand"} | provenance), inputs=inputs)
    return plan_of(placement, name=name, provenance=origin)
