"""The contract of every cost source, with times derived from a GEMM, a pass over memory and the network; and the datasheet,
the source where nothing was measured.

The two collectives of MoE training have closed forms if every GPU holds as much as every other one. Both read the `Network` of
the cost source, so a fitted or measured network counts here too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.cluster import BITS_PER_DTYPE, Cluster, Gpu
from engine.model import MoEModel
from engine.network import Network
from engine.units import share
from engine.workload import digest_of


def all_to_all_seconds(network: Network, size: np.ndarray) -> np.ndarray:
    """float64[...]: seconds of a uniform all-to-all, all sends at once; 0 for size 0, and on one GPU.

    The fabric and the links of each node are networks of their own that work side by side, so the slowest of them
    counts: its start-up, which all its sends wait out together, and its busiest port. `simulate.flows.all_to_all("concurrent",
    ...)` arrives at the same: a port with f sends gives each 1/f of the rate that f sends reach there, the port with the least
    is never relieved by others, and no send anywhere runs slower than its sends do.

    size: float64[...] bytes that every GPU holds, size / GPUs of them for each GPU, itself included
    """
    size = np.asarray(size, dtype=np.float64)
    linked = _linked_peers(network)
    peers = network.gpus - 1 - linked
    lines = []
    if peers.any():
        rate = np.minimum(network.send, network.receive) * network.reached(False, peers)
        lines.append((network.latency, (peers / rate).max()))
    inside = linked > 0
    if inside.any():
        rate = (network.link * network.reached(True, linked))[inside]
        of_links = np.column_stack([network.link_latency[inside], linked[inside] / rate])
        lines.extend(np.unique(of_links, axis=0))  # nodes are mostly alike
    seconds = np.zeros(size.shape)
    for start_up, per_byte in lines:
        seconds = np.maximum(seconds, start_up + size / network.gpus * per_byte)
    return np.where(size > 0, seconds, 0.0)


def all_reduce_seconds(network: Network, size: np.ndarray) -> np.ndarray:
    """float64[...]: seconds to sum buffers of `size` bytes (float64[...]) over all GPUs, the sum ending on each of them.
    0 where size is 0, and on one GPU.

    The faster of the two algorithms between which NCCL chooses, with its count of steps (`ncclTopoTuneModel`):

    * a ring: 2 (P-1) steps, 2 (P-1)/P · size through every hop, the least that any algorithm can move (Patarasuk and
      Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009);
    * two binary trees over the nodes, chains inside: 2 log2(nodes) steps between nodes, 2 · size through every hop
      (Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
      Computing 2009); good for small sizes on many nodes.

    Several rings share the work, each entering and leaving a node by another GPU's port, so that the fabric gives a node
    the sum of its GPUs' ports; every GPU's link carries all of them. GPUs without links are nodes of their own here.
    """
    size = np.asarray(size, dtype=np.float64)
    gpus = network.gpus
    if gpus == 1:
        return np.zeros(size.shape)
    _, first, group = np.unique(
        np.where(_linked_peers(network) > 0, network.node, network.node.max() + 1 + np.arange(gpus)),
        return_index=True,
        return_inverse=True,
    )
    members, link_latency = np.bincount(group), network.link_latency[first]
    slowest = np.inf
    if len(members) > 1:
        slowest = min(np.bincount(group, network.send).min(), np.bincount(group, network.receive).min())
    shared = members[group] > 1
    slowest = min(slowest, network.link[shared].min(initial=np.inf))

    across = 2 * (len(members) - 1) * network.latency
    ring = across + 2 * ((members - 1) * link_latency).sum() + 2 * (gpus - 1) / gpus * size / slowest
    depth = 2 * np.ceil(np.log2(len(members))) * network.latency
    tree = depth + 2 * ((members - 1) * link_latency).max() + 2 * size / slowest
    return np.where(size > 0, np.minimum(ring, tree), 0.0)


def with_measured(network: Network, start_up: float, per_byte: float) -> Network:
    """The drawn network with the measured time of an all-to-all over all its GPUs.

    The measurement is of the fabric, or of the links if they join all GPUs; the rest stays as drawn. All sends of a GPU met
    there, so if fewer reach a larger share of a port's rate, one alone is faster than measured.
    `all_to_all_seconds` of the answer is the measured line again, unless drawn links are slower than that.

    start_up: seconds
    per_byte: seconds for each byte that one GPU sends to the others
    """
    rate, linked = 1 / max(per_byte, 1e-15), _linked_peers(network)
    others = network.gpus - 1
    if (linked == others).all():
        link = np.full(network.gpus, rate) / network.reached(True, linked)
        return replace(network, link=link, link_latency=np.full(network.gpus, start_up))
    rates = (others - linked) / others * rate / network.reached(False, others - linked)
    return replace(network, send=rates, receive=rates, latency=start_up)


def _linked_peers(network: Network) -> np.ndarray:
    """int64[gpu]: other GPUs of the node that a GPU reaches over links."""
    has_links = network.link > 0
    return np.where(has_links, np.bincount(network.node, has_links)[network.node] - 1, 0).astype(np.int64)


class CostModel(ABC):
    """Times of the parts of an MoE layer on a given GPU and of the collectives between GPUs, in seconds."""

    @property
    @abstractmethod
    def source(self) -> str:
        """One line for people: where the times come from, with the assumptions made."""

    @property
    def digest(self) -> str:
        """SHA-256 of the times' origin: sources of one name may have been measured twice."""
        return digest_of(self.source)

    @abstractmethod
    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        """float64[...]: seconds of C[m, n] = A[m, k] B[k, n]; 0 for m = 0. m: float64[...] rows"""

    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        """float64[...]: seconds to move `size` bytes through the GPU's memory; 0 where size is 0. By the datasheet unless the
        source measured it."""
        return Datasheet().memory_pass(gpu, size)

    def lacks_computation(self, cluster: Cluster) -> str | None:
        """Reason for which this source cannot time computation on the GPUs of the cluster; None: it can."""
        return None

    def lacks_network(self, cluster: Cluster) -> str | None:
        """Reason for which this source cannot time exchanges between the GPUs of the cluster; None: it can."""
        return None

    def beyond(self, cluster: Cluster) -> str | None:
        """Reason for which times on the cluster lie outside of the measurements; None: they do not."""
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
        """float64[..., gpu]: seconds of computations that start at once on all GPUs, from the seconds of each on its own
        (float64[..., gpu]). The same, unless the source was measured on ranks that share processors."""
        return seconds

    def expert_ffn(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        """float64[...]: seconds for one expert to process `tokens` token copies (float64[...])."""
        inward = self.gemm(gpu, tokens, (model.ffn_matrices - 1) * model.d_ff, model.row_width, model.dtype)
        return inward + self.gemm(gpu, tokens, model.row_width, model.d_ff, model.dtype)

    def ffn_of_gpus(
        self, gpu: Gpu, tokens: np.ndarray, place: tuple[np.ndarray, ...], shape: tuple[int, ...], model: MoEModel
    ) -> np.ndarray:
        """float64[shape]: seconds of GPUs for all their experts, which add up unless the source knows better.

        gpu: the type of all of them
        tokens: float64[pair], token copies of an expert on a GPU
        place: int64[pair] for each dimension of `shape`, the GPU
        """
        seconds = np.zeros(shape)
        np.add.at(seconds, place, self.expert_ffn(gpu, tokens, model))
        return seconds

    def gate(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        """float64[...]: seconds for the router to score `tokens` tokens (float64[...])."""
        return self.gemm(gpu, tokens, model.experts, model.d_model, model.dtype)

    def attention(self, gpu: Gpu, tokens: np.ndarray, keys: int, model: MoEModel) -> np.ndarray:
        """float64[...]: seconds of one layer's attention for `tokens` tokens (float64[...]) that look back on so many each.

        Multi-head attention as wide as the model, an assumption: four projections, and for every key two products with a vector
        of d_model numbers, all timed as GEMMs.
        """
        width = model.d_model
        shapes = (3 * width, width), (width, width), (keys, width), (width, keys)
        return sum(self.gemm(gpu, tokens, n, k, model.dtype) for n, k in shapes)

    def aggregate(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        """float64[...]: seconds to sum the k expert outputs of `tokens` tokens (float64[...]): k reads, one write."""
        return self.memory_pass(gpu, tokens * (model.experts_per_token + 1) * model.bytes_per_token)


def _asked(part: str, name: str) -> Callable[..., Any]:
    """The method of that name of the source of a part."""

    def answer(self: "Derived", *arguments: Any) -> Any:
        return getattr(getattr(self, part), name)(*arguments)

    return answer


class Derived(CostModel):
    """A source with the times of two others; a subclass replaces some of them.

    computation: the source of GEMMs, of passes over memory and of all that follows from them
    connection: the source of the network and its collectives
    """

    computation: CostModel
    connection: CostModel

    lacks_computation = _asked("computation", "lacks_computation")
    gemm = _asked("computation", "gemm")
    memory_pass = _asked("computation", "memory_pass")
    together = _asked("computation", "together")
    expert_ffn = _asked("computation", "expert_ffn")
    ffn_of_gpus = _asked("computation", "ffn_of_gpus")
    gate = _asked("computation", "gate")
    attention = _asked("computation", "attention")
    aggregate = _asked("computation", "aggregate")

    lacks_network = _asked("connection", "lacks_network")
    network = _asked("connection", "network")
    all_to_all = _asked("connection", "all_to_all")
    all_reduce = _asked("connection", "all_reduce")

    def beyond(self, cluster: Cluster) -> str | None:
        return self.computation.beyond(cluster) or self.connection.beyond(cluster)


@dataclass(frozen=True)
class Datasheet(CostModel):
    """Roofline times from the catalogue's peak rates (Williams et al., CACM 2009): the source where nothing was measured.

    A GEMM takes the longer of its arithmetic and its memory traffic, each at a share of the peak, plus a launch.

    The three numbers are assumptions in the range that libraries reach on large shapes, not measurements; a calibrated
    `AlphaBeta` profile replaces them.
    """

    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    launch: float = 5e-6

    @property
    def source(self) -> str:
        return (
            f"datasheet roofline: {share(self.compute_efficiency)} of peak FLOP/s, {share(self.memory_efficiency)} of memory "
            f"bandwidth, {self.launch * 1e6:g} µs per kernel (assumed)"
        )

    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        return self._gemm(gpu, m, n, k, dtype, float(BITS_PER_DTYPE[dtype]))

    def expert_ffn(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        """As in `CostModel`; weights of fewer bits are read faster, and multiplied in the model's dtype."""
        bits, inner = model.expert_bits or float(BITS_PER_DTYPE[model.dtype]), (model.ffn_matrices - 1) * model.d_ff
        inward = self._gemm(gpu, tokens, inner, model.row_width, model.dtype, bits)
        return inward + self._gemm(gpu, tokens, model.row_width, model.d_ff, model.dtype, bits)

    def _gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str, weight_bits: float) -> np.ndarray:
        m = np.asarray(m, dtype=np.float64)
        arithmetic = 2.0 * m * n * k / (gpu.flops(dtype) * self.compute_efficiency)
        moved = (m * k + m * n) * BITS_PER_DTYPE[dtype] / 8 + n * k * weight_bits / 8
        memory = moved / (gpu.memory_bandwidth * self.memory_efficiency)
        return np.where(m > 0, np.maximum(arithmetic, memory) + self.launch, 0.0)

    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        size = np.asarray(size, dtype=np.float64)
        return np.where(size > 0, size / (gpu.memory_bandwidth * self.memory_efficiency) + self.launch, 0.0)
