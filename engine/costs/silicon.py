"""Times measured on real GPUs, from the tables of the package aiconfigurator-core."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from engine.cluster import Cluster, Gpu
from engine.costs.alpha_beta import Line
from engine.costs.base import CostModel
from engine.costs.collectives import with_measured
from engine.costs.datasheet import Datasheet
from engine.costs.measured import CollectiveTimes, sent_line
from engine.costs.silicon_tables import (
    GEMM_DTYPES,
    MACHINES,
    Machine,
    collective_curve,
    gemm_table,
    installed_package,
    measured_counts,
)
from engine.errors import InputError
from engine.network import Network

LEFT_OUT_ERROR = 0.11
"""Largest over the GPUs of the mean relative error with which a left-out size is interpolated (`tests.costs.source_errors`)."""

LINK_TOLERANCE = 0.1
"""How far the drawn links may be from those measured on."""


@dataclass(frozen=True)
class Silicon(CostModel):
    """Costs from measured tables.

    A GEMM is interpolated linearly in the logarithms of time, m, n and k, so that anything proportional to a power of
    its sizes is met exactly; where more rows were measured to take less time, so they do with fewer. Sizes below the grid take
    as long as its smallest. Larger ones go on at its last throughput: they can be cut into several GEMMs of the largest
    size, rows and columns side by side, k by adding up. 16-bit floats stand for each other: only bf16 was measured. An
    expert is its two GEMMs, as everywhere; the fused kernels of serving engines are faster on few tokens.

    Collectives are NCCL's inside one node, up to `engine.costs.curve.REACH` times the largest buffer measured. Nothing was
    measured between nodes.
    """

    @property
    def source(self) -> str:
        return (
            f"silicon: tables of {installed_package()}, measured on real GPUs: GEMMs of SGLang (a size left out is met to "
            f"about {LEFT_OUT_ERROR:.0%} on average; A100-40 as A100-80, up to a quarter too fast where memory "
            "counts), NCCL inside one node (uneven all-to-alls by a line fitted to the even ones); memory by the datasheet"
        )

    def lacks_computation(self, cluster: Cluster) -> str | None:
        return next((reason for gpu in cluster.gpus if (reason := _not_measured(gpu.type))), None)

    def lacks_network(self, cluster: Cluster) -> str | None:
        if len(cluster.gpus) == 1:
            return None
        if len(cluster.nodes) > 1:
            return f"the NCCL tables stop at one node and the cluster has {len(cluster.nodes)}"
        if len({gpu.type for gpu in cluster.gpus}) > 1:
            return "the NCCL tables are of equal GPUs and the cluster mixes types"
        kind, links = cluster.gpus[0].type, cluster.nodes[0].link_bandwidth
        if reason := _not_measured(kind):
            return reason
        machine = MACHINES[kind]
        if links is None or abs(links / machine.link_bandwidth - 1) > LINK_TOLERANCE:
            drawn = "none" if links is None else f"{links / 1e9:g} GB/s"
            return (
                f"the NCCL tables of {kind} are for links of {machine.link_bandwidth / 1e9:g} GB/s, drawn are {drawn}"
            )
        if len(cluster.gpus) not in (counts := measured_counts(machine.folder)):
            return f"the NCCL tables of {kind} are for {', '.join(map(str, counts))} GPUs, not {len(cluster.gpus)}"
        return None

    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        if reason := _not_measured(gpu.type):
            raise InputError(f"{reason}; use the datasheet or a profile for computation")
        folder = MACHINES[gpu.type].folder
        of_shape = _of_shape(folder, dtype, n, k, gpu.type)
        return gemm_table(folder, GEMM_DTYPES[dtype]).over_rows(of_shape, m)

    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        return Datasheet().memory_pass(gpu, size)

    def network(self, cluster: Cluster) -> Network:
        drawn = Network.of(cluster)
        if len(cluster.gpus) == 1:
            return drawn
        line = _all_to_all_line(self._machine(cluster).folder, len(cluster.gpus))
        return with_measured(drawn, line.alpha, line.beta)

    def all_to_all(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        return self._collective("all_to_all", cluster, size)

    def all_reduce(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        return self._collective("all_reduce", cluster, size)

    def _collective(self, operation: str, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        gpus = len(cluster.gpus)
        if gpus == 1:
            return np.zeros(np.shape(size))
        curve = collective_curve(self._machine(cluster).folder, operation, gpus)
        return curve.at(size, f"{operation.replace('_', '-')} over {gpus} {cluster.gpus[0].type}")

    def _machine(self, cluster: Cluster) -> Machine:
        if reason := self.lacks_network(cluster):
            raise InputError(
                f"silicon: {reason}; add a source of the network: the datasheet, nccl-tests output or an α–β profile"
            )
        return MACHINES[cluster.gpus[0].type]


def _not_measured(kind: str) -> str | None:
    if kind in MACHINES:
        installed_package()  # raises when there are no tables at all
        return None
    return f"silicon has no tables of {kind} (it has {', '.join(MACHINES)})"


@lru_cache(maxsize=1024)
def _of_shape(folder: str, dtype: str, n: int, k: int, kind: str) -> np.ndarray:
    """float64[m]: seconds of one shape at the table's m. Raises InputError when the dtype was not measured."""
    table = gemm_table(folder, GEMM_DTYPES[dtype]) if dtype in GEMM_DTYPES else None
    if table is None:
        has = [name for name in GEMM_DTYPES if gemm_table(folder, GEMM_DTYPES[name]) is not None]
        raise InputError(
            f"silicon has no GEMMs of {dtype} on {kind} (it has {', '.join(has)}); use the datasheet or a profile for "
            "computation"
        )
    seconds = table.of_shape(n, k)
    seconds.flags.writeable = False
    return seconds


@lru_cache
def _all_to_all_line(folder: str, gpus: int) -> Line:
    curve = collective_curve(folder, "all_to_all", gpus)
    points = tuple(zip(curve.sizes.tolist(), curve.seconds.tolist(), strict=True))
    return sent_line(CollectiveTimes(operation="all_to_all", ranks=gpus, points=points))
