"""DeepEP's exchanges as they were measured on H100 nodes, from the package aiconfigurator-core, by the bytes of their busiest
port.

The tables (`wideep_deepep_normal_perf`, `wideep_deepep_ll_perf` of SGLang 0.5.6) are of nodes of eight GPUs, by tokens per GPU,
in µs; those of the normal kernels for several numbers of SMs (the best counts) and apart from "notify", in which GPUs wait
for each other. Those of H100 and H200 are the same numbers: one measurement. Rows are not recorded, but the routing of
DeepEP's own benchmark is public (tests/test_internode.py and test_low_latency.py): random scores, 8 of 256 experts; with
the normal kernels of at most four nodes, those with the highest scores.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from engine.cluster import Cluster, Gpu
from engine.costs.base import CostModel, Datasheet
from engine.costs.silicon import installed_package, newest
from engine.errors import InputError
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Travel, TravelUnit

GPUS_PER_NODE = 8
WIDTH, EXPERTS, EXPERTS_PER_TOKEN, MOST_NODES_PER_TOKEN = 7168, 256, 8, 4
MICROSECONDS = 1e-6
FILES: dict[TravelUnit, tuple[str, str]] = {
    "node": ("wideep_deepep_normal_perf.parquet", "transmit_us"),
    "copies": ("wideep_deepep_ll_perf.parquet", "avg_t_us"),
}
"""Tables, and the end of the name of the column with times, by the destination that gets a row of a token: the normal kernels
and those for low latency."""
SAMPLED_TOKENS = 20_000

FOLDER = "h100_sxm"
GPU_TYPES = ("H100", "H200")
PORT, LINK = 50e9, 450e9
"""Bytes/s of the machines that were measured, per GPU and direction."""
TOLERANCE = 0.1
"""Relative difference that drawn ports and links may have from those."""


class Exchange(NamedTuple):
    """One series of measurements.

    unit, kind: see `Network.carrying`
    tokens: float64[point] a GPU, ascending
    size: float64[point] bytes of the busiest port, to the fabric or with one node to its links
    seconds: float64[point]
    """

    unit: TravelUnit
    kind: str
    nodes: int
    tokens: np.ndarray
    size: np.ndarray
    seconds: np.ndarray


def travel_of(unit: TravelUnit) -> Travel:
    """The travel of tokens in the measurements."""
    return Travel(unit=unit, dispatch="fp8", combine="bf16")


@lru_cache
def measured_exchanges(folder: str) -> tuple[Exchange, ...]:
    """All series of a machine; empty where it has none over several nodes. Raises InputError when the package is absent."""
    import pandas as pd

    series = []
    for unit, (name, column) in FILES.items():
        row_bytes = dict(zip(("dispatch", "combine"), travel_of(unit).row_bytes(benchmark_model()), strict=True))
        for file in newest(folder, "comm/sglang", name):
            table = pd.read_parquet(file)
            wide = (table.hidden_size == WIDTH) & (table.num_topk == EXPERTS_PER_TOKEN) & (table.num_experts == EXPERTS)
            if (table := table[wide]).node_num.nunique() < 2:
                continue
            for kind, width in row_bytes.items():
                for nodes, points in table.groupby("node_num"):
                    best = points.groupby("num_token")[f"{kind}_{column}"].min()
                    tokens = best.index.to_numpy(np.float64)
                    size = tokens * rows_of_token(int(nodes), unit) * width
                    series.append(Exchange(unit, kind, int(nodes), tokens, size, best.to_numpy() * MICROSECONDS))
            break
    return tuple(series)


@lru_cache
def rows_of_token(nodes: int, unit: TravelUnit) -> float:
    """Rows that a token of DeepEP's benchmark sends over its GPU's port to the fabric, or with one node over its links, in
    the mean of many tokens."""
    chosen = benchmark_experts(nodes, unit)
    gpu = chosen // (EXPERTS // (nodes * GPUS_PER_NODE))
    # All GPUs are alike: the sender is the first.
    places = gpu if nodes == 1 else gpu // GPUS_PER_NODE
    away = np.sort(np.where(places > 0, places, 0), axis=1)
    if unit == "copies":
        return float((away > 0).sum(axis=1).mean())
    first = np.diff(away, axis=1, prepend=0) > 0
    return float(first.sum(axis=1).mean())


def benchmark_experts(nodes: int, unit: TravelUnit) -> np.ndarray:
    """int64[token, k], not to be changed: the experts of tokens that are routed as DeepEP's benchmarks do."""
    return _drawn_experts(nodes if unit == "node" and nodes > MOST_NODES_PER_TOKEN else None)


@lru_cache(maxsize=4)
def _drawn_experts(nodes: int | None) -> np.ndarray:
    """nodes: those of which a token may reach `MOST_NODES_PER_TOKEN`; None: it may reach all"""
    scores = np.abs(np.random.default_rng(0).standard_normal((SAMPLED_TOKENS, EXPERTS))) + 1
    if nodes is not None:
        groups = scores.reshape(SAMPLED_TOKENS, nodes, -1)
        best = np.argsort(-groups.max(axis=2), axis=1)[:, :MOST_NODES_PER_TOKEN]
        allowed = np.zeros((SAMPLED_TOKENS, nodes), dtype=bool)
        np.put_along_axis(allowed, best, True, axis=1)
        scores = np.where(allowed[:, :, None], groups, 0.0).reshape(SAMPLED_TOKENS, EXPERTS)
    chosen = np.argpartition(-scores, EXPERTS_PER_TOKEN, axis=1)[:, :EXPERTS_PER_TOKEN].copy()
    chosen.flags.writeable = False
    return chosen


def benchmark_model() -> MoEModel:
    """The sizes of a model that the benchmarks have."""
    sizes = {"experts": EXPERTS, "experts_per_token": EXPERTS_PER_TOKEN, "d_model": WIDTH, "d_ff": 2048}
    return MoEModel(name="DeepEP's benchmark", layers=1, **sizes)


@dataclass(frozen=True, eq=False)
class ExchangeCurves:
    """The share of its rate that a port reaches, by the bytes that the busiest one moves in a whole exchange; a
    `engine.network.MeasuredExchanges`.

    An exchange takes as long as the measured one with ports that carry as much as the busiest port here: linear in the
    logarithms of bytes and seconds, and of nodes for numbers that were not measured. A smaller one takes as long as the
    smallest; a larger one, and more nodes, keep the last throughput. While the fabric is at work, links reach their best rate
    inside one node.
    """

    series: tuple[Exchange, ...]

    def __call__(self, exchange: str, unit: str, domains: int, fabric: float, links: float) -> tuple[float, float]:
        own = {series.nodes: series for series in self.series if (series.unit, series.kind) == (unit, exchange)}
        if not own:
            raise InputError(
                f"DeepEP's {exchange} was measured with one row per node and with one row per token copy, not with one row "
                "per GPU; choose how tokens travel accordingly, or another source of the network"
            )
        if domains > 1:  # start-ups are in the times of the fabric
            return _share(own, domains, fabric, PORT), float((own[1].size / own[1].seconds).max() / LINK)
        return 1.0, _share(own, 1, links, LINK)


def exchange_seconds(kind: str, unit: TravelUnit, nodes: int, size: float) -> float:
    """Seconds of an exchange between several nodes in which the busiest port moves so many bytes, see `ExchangeCurves`. Raises
    InputError when the package is absent."""
    own = {series.nodes: series for series in measured_exchanges(FOLDER) if (series.unit, series.kind) == (unit, kind)}
    return size / PORT / _share(own, nodes, size, PORT)


def _share(series: dict[int, Exchange], nodes: int, size: float, rate: float) -> float:
    """Share of its rate that a port reaches when it moves so many bytes, with so many nodes."""
    counts = sorted(count for count in series if (count > 1) == (nodes > 1))
    if not counts or size <= 0:
        return 1.0
    seconds = []
    for measured in (series[count] for count in counts):
        beyond = max(size / measured.size[-1], 1.0)
        seconds.append(np.exp(np.interp(np.log(size), np.log(measured.size), np.log(measured.seconds))) * beyond)
    return size / rate / float(np.exp(np.interp(np.log(nodes), np.log(counts), np.log(seconds))))


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

    def network(self, cluster: Cluster) -> Network:
        if reason := self.lacks_network(cluster):
            raise InputError(f"{reason}; choose another source of the network")
        return reaching(Network.of(cluster), measured_exchanges(FOLDER))

    def all_to_all(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        return Datasheet().all_to_all(cluster, size)

    def all_reduce(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        return Datasheet().all_reduce(cluster, size)


def reaching(network: Network, series: Iterable[Exchange]) -> Network:
    """A network with the seconds of these exchanges, start-ups included."""
    curves = ExchangeCurves(tuple(series))
    return replace(network, latency=0.0, link_latency=np.zeros(network.gpus), measured=curves)
