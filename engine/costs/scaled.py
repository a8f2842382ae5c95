"""Another source's times with computation, network and start-up times faster or slower by given factors."""

from dataclasses import dataclass, replace

import numpy as np

from engine.cluster import Cluster, Efficiency, Gpu, contention_points
from engine.costs.base import CostModel, Derived, all_reduce_seconds, all_to_all_seconds
from engine.costs.choice import Combined
from engine.model import MoEModel
from engine.network import MeasuredExchanges, Network
from engine.workload import digest_of

NEXT_TO_NOTHING = 1.0
"""Bytes of a collective that takes its start-up time and hardly more."""


@dataclass(frozen=True)
class Scaled(Derived):
    """The same hardware, so many times faster. Works on any source, measured ones too.

    compute: every computation takes its time / compute
    network: all ports and links carry as many times the bytes per second
    latency: a send's start-up time takes as many times as long
    tokens: every recorded token stands for so many, which gives experts, gate and aggregation as many times the rows, and
        every send as many times the bytes (a GEMM of a training step is not asked for by tokens and stays)
    gpu_type: compute and network change on these GPUs alone
    contention: every further send that meets at a port, of any GPU, makes a byte take longer by this part of its time alone
    """

    inner: CostModel
    compute: float = 1.0
    network_speed: float = 1.0
    latency: float = 1.0
    tokens: float = 1.0
    gpu_type: str | None = None
    contention: float = 0.0

    @property
    def computation(self) -> CostModel:
        return self.inner

    connection = computation

    @property
    def source(self) -> str:
        parts = {"computation": self.compute, "network": self.network_speed}
        parts |= {"start-up time": self.latency, "tokens": self.tokens}
        said = [f"{name} {factor:.3g}×" for name, factor in parts.items() if factor != 1]
        said += [f"contention {self.contention:.3g}"] if self.contention else []
        where = f" on {self.gpu_type}" if self.gpu_type else ""
        return f"{self.inner.source}; what if{where}: {', '.join(said) or 'nothing changed'}"

    @property
    def digest(self) -> str:
        factors = (self.compute, self.network_speed, self.latency, self.tokens, self.gpu_type, self.contention)
        return digest_of(self.inner.digest, repr(factors))

    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        return self.inner.gemm(gpu, m, n, k, dtype) / self._speed(gpu)

    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        return self.inner.memory_pass(gpu, size) / self._speed(gpu)

    def expert_ffn(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        return self.inner.expert_ffn(gpu, self.tokens * np.asarray(tokens), model) / self._speed(gpu)

    def ffn_of_gpus(
        self, gpu: Gpu, tokens: np.ndarray, place: tuple[np.ndarray, ...], shape: tuple[int, ...], model: MoEModel
    ) -> np.ndarray:
        return self.inner.ffn_of_gpus(gpu, self.tokens * np.asarray(tokens), place, shape, model) / self._speed(gpu)

    def gate(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        return self.inner.gate(gpu, self.tokens * np.asarray(tokens), model) / self._speed(gpu)

    def attention(self, gpu: Gpu, tokens: np.ndarray, keys: int, model: MoEModel) -> np.ndarray:
        return self.inner.attention(gpu, self.tokens * np.asarray(tokens), keys, model) / self._speed(gpu)

    def aggregate(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        return self.inner.aggregate(gpu, self.tokens * np.asarray(tokens), model) / self._speed(gpu)

    def network(self, cluster: Cluster) -> Network:
        """The source's network. So many times the bytes at a bandwidth take as long as the bytes at a part of it."""
        drawn = self.inner.network(cluster)
        here = np.array([self.gpu_type in (None, gpu.type) for gpu in cluster.gpus])
        factor = np.where(here, self.network_speed, 1.0) / self.tokens
        rates = {name: getattr(drawn, name) * factor for name in ("send", "receive", "link")}
        start_ups = {name: getattr(drawn, name) * self.latency for name in ("latency", "link_latency")}
        measured = drawn.measured and _OfMoreTokens(drawn.measured, self.tokens)
        changed = replace(drawn, **rates, **start_ups, measured=measured)
        if not self.contention:
            return changed
        points = contention_points(self.contention, changed.most_sends)
        return changed.with_efficiency(Efficiency(fabric=points, links=points))

    def all_to_all(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        if _is_own(self.inner, "all_to_all"):
            return self._apart(self.inner.all_to_all, cluster, size, 1 + self.contention * (_meeting(cluster) - 1))
        return all_to_all_seconds(self.network(cluster), size)

    def all_reduce(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        if _is_own(self.inner, "all_reduce"):
            return self._apart(self.inner.all_reduce, cluster, size)
        return all_reduce_seconds(self.network(cluster), size)

    def _apart(self, collective, cluster: Cluster, size: np.ndarray, slower: float = 1.0) -> np.ndarray:
        """A measured collective: its time for next to nothing is its start-up time, the rest is bandwidth.

        slower: times as long that a byte takes
        """
        size = np.asarray(size, dtype=np.float64)
        start_up = collective(cluster, np.where(size > 0, NEXT_TO_NOTHING, 0.0))
        start_up = np.minimum(start_up, whole := collective(cluster, size))
        return start_up * self.latency + (whole - start_up) * slower / self.network_speed

    def _speed(self, gpu: Gpu) -> float:
        return self.compute if self.gpu_type in (None, gpu.type) else 1.0


@dataclass(frozen=True, eq=False)
class _OfMoreTokens:
    """Measured exchanges in which every token stands for so many: ports reach their share at as many times the bytes."""

    inner: MeasuredExchanges
    tokens: float

    def __call__(self, exchange: str, unit: str, domains: int, fabric: float, links: float) -> tuple[float, float]:
        return self.inner(exchange, unit, domains, fabric * self.tokens, links * self.tokens)


def _meeting(cluster: Cluster) -> int:
    """Sends that meet at a port in an all-to-all over all GPUs: at the fabric's, or at the links' where they join all."""
    others = len(cluster.gpus) - 1
    over_links = Network.of(cluster).linked.sum(axis=1) - 1
    return max(others if np.all(over_links == others) else int((others - np.maximum(over_links, 0)).max()), 1)


def _is_own(source: CostModel, collective: str) -> bool:
    """True if a source measured a collective rather than computing it from its network."""
    while isinstance(source, Combined):
        source = source.connection
    return getattr(type(source), collective) is not getattr(CostModel, collective)
