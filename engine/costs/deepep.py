"""Exchanges of DeepEP's kernels, as fast as they were measured on H100 nodes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from engine.cluster import Cluster, Gpu
from engine.costs.base import CostModel
from engine.costs.datasheet import Datasheet
from engine.costs.deepep_tables import GPUS_PER_NODE, Exchange, measured_exchanges
from engine.costs.silicon_tables import installed_package
from engine.errors import InputError
from engine.network import Network

FOLDER = "h100_sxm"
GPU_TYPES = ("H100", "H200")
PORT, LINK = 50e9, 450e9
"""Bytes/s of the machines that were measured, per GPU and direction."""
TOLERANCE = 0.1
"""How far drawn ports and links may be from those."""


@dataclass(frozen=True, eq=False)
class ExchangeCurves:
    """The share of its rate that a port reaches, by the bytes that the busiest one moves in a whole exchange; a
    `engine.network.MeasuredExchanges`.

    An exchange takes as long as the measured one whose ports carry as much as the busiest port here: linear in the logarithms
    of bytes and seconds, and of nodes where so many were not measured. What is smaller takes as long as the smallest; what is
    larger, and more nodes, keep the last throughput. Beside the fabric, links reach what they did at best inside one node.
    """

    series: tuple[Exchange, ...]

    def __call__(self, exchange: str, unit: str, domains: int, fabric: float, links: float) -> tuple[float, float]:
        own = {series.nodes: series for series in self.series if (series.unit, series.kind) == (unit, exchange)}
        if not own:
            raise InputError(
                f"DeepEP's {exchange} was measured with one row per node and with one row per token copy, not with one row "
                "per GPU; choose how tokens travel accordingly, or another source of the network"
            )
        if domains > 1:  # what starts up is in the times of the fabric
            return _share(own, domains, fabric, PORT), float((own[1].size / own[1].seconds).max() / LINK)
        return 1.0, _share(own, 1, links, LINK)


def _share(series: dict[int, Exchange], nodes: int, size: float, rate: float) -> float:
    """Of a port of this rate that moves so many bytes, with so many nodes."""
    counts = sorted(count for count in series if (count > 1) == (nodes > 1))
    if not counts or size <= 0:
        return 1.0
    seconds = [_seconds(series[count], size) for count in counts]
    return size / rate / float(np.exp(np.interp(np.log(nodes), np.log(counts), np.log(seconds))))


def _seconds(series: Exchange, size: float) -> float:
    beyond = max(size / series.size[-1], 1.0)
    return float(np.exp(np.interp(np.log(size), np.log(series.size), np.log(series.seconds)))) * beyond


@dataclass(frozen=True)
class DeepEP(CostModel):
    """Costs of the network from DeepEP's tables: with one row per node its normal kernels, with one row per token copy those
    for low latency. Collectives of training are not in the tables: they take the drawn rates and start-ups."""

    @property
    def source(self) -> str:
        return (
            f"DeepEP's exchanges, measured on H100 nodes of eight (tables of {installed_package()}; rows of other widths count "
            "by their bytes; waiting for slower GPUs left out)"
        )

    def lacks_computation(self, cluster: Cluster) -> str | None:
        return "DeepEP's tables have no times of computation"

    def lacks_network(self, cluster: Cluster) -> str | None:
        installed_package()  # raises when there are no tables at all
        if other := sorted({gpu.type for gpu in cluster.gpus} - set(GPU_TYPES)):
            return f"DeepEP's tables are of {' and '.join(GPU_TYPES)}, not of {', '.join(other)}"
        if any(len(node.gpus) != GPUS_PER_NODE for node in cluster.nodes):
            return f"DeepEP's tables are of nodes of {GPUS_PER_NODE} GPUs"
        drawn = {(gpu.send_bandwidth, PORT, "ports to the fabric") for gpu in cluster.gpus}
        drawn |= {(node.link_bandwidth or 0.0, LINK, "links inside nodes") for node in cluster.nodes}
        for rate, measured, which in drawn:
            if (which.startswith("links") or len(cluster.nodes) > 1) and abs(rate / measured - 1) > TOLERANCE:
                return f"DeepEP's tables are of {which} of {measured / 1e9:g} GB/s, drawn are {rate / 1e9:g} GB/s"
        return None

    def beyond(self, cluster: Cluster) -> str | None:
        counts, nodes = sorted({series.nodes for series in measured_exchanges(FOLDER)}), len(cluster.nodes)
        if nodes > counts[-1]:
            return f"an estimate: DeepEP was measured on up to {counts[-1]} nodes, {nodes} are taken to reach what those did"
        if nodes not in counts:
            known = ", ".join(map(str, counts))
            return f"an estimate: DeepEP was measured on {known} nodes, {nodes} are taken to lie between"
        return None

    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        raise InputError(f"{self.lacks_computation(None)}; add a source of computation")

    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        return Datasheet().memory_pass(gpu, size)

    def network(self, cluster: Cluster) -> Network:
        if reason := self.lacks_network(cluster):
            raise InputError(f"{reason}; choose another source of the network")
        return reaching(Network.of(cluster), measured_exchanges(FOLDER))

    def all_to_all(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        return Datasheet().all_to_all(cluster, size)

    def all_reduce(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        return Datasheet().all_reduce(cluster, size)


def reaching(network: Network, series: Iterable[Exchange]) -> Network:
    """A network whose exchanges take what these did, start-ups included."""
    curves = ExchangeCurves(tuple(series))
    return replace(network, latency=0.0, link_latency=np.zeros(network.gpus), measured=curves)
