"""The contract of every cost source, and what follows from a GEMM, a pass over memory and the network."""

from abc import ABC, abstractmethod

import numpy as np

from engine.cluster import Cluster, Gpu
from engine.costs.collectives import all_reduce_seconds, all_to_all_seconds
from engine.model import MoEModel
from engine.network import Network
from engine.workload import digest_of


class CostModel(ABC):
    """Times of the parts of an MoE layer on a given GPU and of the collectives between GPUs, in seconds."""

    @property
    @abstractmethod
    def source(self) -> str:
        """One line for people: where the times come from, with the assumptions made."""

    @property
    def digest(self) -> str:
        """SHA-256 of what the times come from: sources of one name may have been measured twice."""
        return digest_of(self.source)

    @abstractmethod
    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        """float64[...]: seconds of C[m, n] = A[m, k] B[k, n]; 0 where m is 0. m: float64[...] rows."""

    @abstractmethod
    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        """float64[...]: seconds to move `size` bytes through the GPU's memory; 0 where size is 0."""

    def lacks_computation(self, cluster: Cluster) -> str | None:
        """Why this source cannot time computation on the GPUs of the cluster, None where it can."""
        return None

    def lacks_network(self, cluster: Cluster) -> str | None:
        """Why this source cannot time what the GPUs of the cluster send each other, None where it can."""
        return None

    def beyond(self, cluster: Cluster) -> str | None:
        """Why times on the cluster lie outside of what was measured, None where they do not."""
        return None

    def network(self, cluster: Cluster) -> Network:
        """The fabric as this source sees it: the drawn bandwidths and latencies unless it measured its own."""
        return Network.of(cluster)

    def all_to_all(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        """float64[...]: seconds of a uniform all-to-all in which every GPU holds `size` bytes (float64[...]), size / GPUs of
        them for each GPU, its own part included. By `all_to_all_seconds` unless the source measured it."""
        return all_to_all_seconds(self.network(cluster), size)

    def all_reduce(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        """float64[...]: seconds to sum a buffer of `size` bytes (float64[...]) over all GPUs of the cluster. By
        `all_reduce_seconds` unless the source measured it."""
        return all_reduce_seconds(self.network(cluster), size)

    def together(self, seconds: np.ndarray) -> np.ndarray:
        """float64[..., gpu]: how long computations that start at once on all GPUs take, from what each takes on its own
        (float64[..., gpu]). The same, unless the source was measured on ranks that share processors."""
        return seconds

    def expert_ffn(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        """float64[...]: seconds for one expert to process `tokens` token copies (float64[...])."""
        inward = self.gemm(gpu, tokens, (model.ffn_matrices - 1) * model.d_ff, model.d_model, model.dtype)
        return inward + self.gemm(gpu, tokens, model.d_model, model.d_ff, model.dtype)

    def gate(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        """float64[...]: seconds for the router to score `tokens` tokens (float64[...])."""
        return self.gemm(gpu, tokens, model.experts, model.d_model, model.dtype)

    def attention(self, gpu: Gpu, tokens: np.ndarray, keys: int, model: MoEModel) -> np.ndarray:
        """float64[...]: seconds of one layer's attention for `tokens` tokens (float64[...]) that look back on so many each.

        Multi-head attention as wide as the model, an assumption: four projections, and for every key two products with a vector
        of d_model numbers, all timed as GEMMs.
        """
        shapes = (
            (3 * model.d_model, model.d_model),
            (model.d_model,) * 2,
            (keys, model.d_model),
            (model.d_model, keys),
        )
        return sum(self.gemm(gpu, tokens, n, k, model.dtype) for n, k in shapes)

    def aggregate(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        """float64[...]: seconds to sum the k expert outputs of `tokens` tokens (float64[...]): k reads, one write."""
        return self.memory_pass(gpu, tokens * (model.experts_per_token + 1) * model.bytes_per_token)
