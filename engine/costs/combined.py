"""Computation from one source, the network from another."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.cluster import Cluster, Gpu
from engine.costs.base import CostModel
from engine.costs.datasheet import Datasheet
from engine.errors import InputError
from engine.model import MoEModel
from engine.network import Network
from engine.workload import digest_of


@dataclass(frozen=True)
class Combined(CostModel):
    """Two sources as one."""

    computation: CostModel
    connection: CostModel

    @property
    def digest(self) -> str:
        return digest_of(self.computation.digest, self.connection.digest)

    @property
    def source(self) -> str:
        return f"computation: {self.computation.source}; network: {self.connection.source}"

    def lacks_computation(self, cluster: Cluster) -> str | None:
        return self.computation.lacks_computation(cluster)

    def lacks_network(self, cluster: Cluster) -> str | None:
        return self.connection.lacks_network(cluster)

    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        return self.computation.gemm(gpu, m, n, k, dtype)

    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        return self.computation.memory_pass(gpu, size)

    def together(self, seconds: np.ndarray) -> np.ndarray:
        return self.computation.together(seconds)

    def expert_ffn(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        return self.computation.expert_ffn(gpu, tokens, model)

    def gate(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        return self.computation.gate(gpu, tokens, model)

    def attention(self, gpu: Gpu, tokens: np.ndarray, keys: int, model: MoEModel) -> np.ndarray:
        return self.computation.attention(gpu, tokens, keys, model)

    def aggregate(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        return self.computation.aggregate(gpu, tokens, model)

    def beyond(self, cluster: Cluster) -> str | None:
        return self.computation.beyond(cluster) or self.connection.beyond(cluster)

    def network(self, cluster: Cluster) -> Network:
        return self.connection.network(cluster)

    def all_to_all(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        return self.connection.all_to_all(cluster, size)

    def all_reduce(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        return self.connection.all_reduce(cluster, size)


def combine(sources: Mapping[str, CostModel], cluster: Cluster) -> CostModel:
    """One source for the cluster out of several, by name: computation and network each from the first that has them.

    Without any, the datasheet. Raises InputError when no source has a part, and when a source would not be used at all.
    """
    if not sources:
        return Datasheet()
    computation = _first(sources, cluster, "computation", "lacks_computation")
    connection = _first(sources, cluster, "the network", "lacks_network")
    if idle := set(sources) - {computation, connection}:
        raise InputError(
            f"{idle.pop()} is not used: {' and '.join(dict.fromkeys((computation, connection)))} before it has all that it "
            "could add; name it first, or leave it out"
        )
    if computation == connection:
        return sources[computation]
    return Combined(sources[computation], sources[connection])


def _first(sources: Mapping[str, CostModel], cluster: Cluster, part: str, reason: str) -> str:
    lacks = {name: getattr(source, reason)(cluster) for name, source in sources.items()}
    for name, why in lacks.items():
        if why is None:
            return name
    reasons = "; ".join(lacks.values())
    raise InputError(f"no source given has times of {part} for this cluster: {reasons}; add the datasheet as a source")
