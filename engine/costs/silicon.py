"""Times measured on real GPUs, from the tables of the package aiconfigurator-core, as arrays in SI units.

Only its data files are read, never its query classes, which are internal and change. The files:

* GEMM: `latency` in ms of every (m, n, k) of a grid, dense but for the largest n with the largest k; one file an
  inference engine. SGLang's is read: alone among them it has the same complete grid for every GPU.
* NCCL: `latency` in ms over `message_size` in elements, 2 bytes each for `half`, of the buffer that every GPU holds, its
  own part of an all-to-all included; 2, 4 and 8 GPUs of one node only. Eight-bit rows of as many bytes take as long,
  which tells the unit.
* Folders are named by version; the newest that has the table asked for counts.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.catalogue.packaged import PACKAGE, package_folder, packaged_gpu_types, system_of
from engine.cluster import Cluster, Gpu
from engine.costs.alpha_beta import Line
from engine.costs.base import CostModel, with_measured
from engine.costs.gemm_table import Curve, GemmTable, never_falling
from engine.costs.measured import CollectiveTimes, sent_line
from engine.errors import InputError
from engine.network import Network

if TYPE_CHECKING:
    import pandas as pd

NCCL_OPERATIONS = {"all_to_all": "alltoall", "all_reduce": "all_reduce"}
GEMM_DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8"}
MILLISECONDS = 1e-3
HALF_BYTES = 2

LEFT_OUT_ERROR = 0.11
"""Largest over the GPUs of the mean relative error with which a left-out size is interpolated (`tests.costs.source_errors`)."""
LINK_TOLERANCE = 0.1
"""Relative difference that drawn links may have from those measured on."""


class Machine(NamedTuple):
    """Folder of a GPU type's tables, and the bytes/s of the links (per GPU, one direction) that they were measured on."""

    folder: str
    link_bandwidth: float


MACHINES = {
    "A100-40": Machine("a100_sxm", 300e9),  # measured on the 80 GB version, with memory a third faster
    "A100-80": Machine("a100_sxm", 300e9),
    "H100": Machine("h100_sxm", 450e9),
    "H200": Machine("h200_sxm", 450e9),
    "B200": Machine("b200_sxm", 900e9),
    "L40S": Machine("l40s", 32e9),
}
"""GPU types of the catalogue that were measured."""


def folder_of(gpu_type: str) -> str | None:
    """Folder of the tables of a GPU type, one of our catalogue or one that only the package has; None for any other."""
    if gpu_type in MACHINES:
        return MACHINES[gpu_type].folder
    return system_of(gpu_type) if gpu_type in packaged_gpu_types() else None


def installed_package() -> str:
    """Package and version, as it is installed; raises InputError when it is absent."""
    _data_folder()
    return f"{PACKAGE} {version(PACKAGE)}"


@lru_cache
def gemm_table(folder: str, dtype: str) -> GemmTable | None:
    """The GEMMs of a machine, None where the dtype was not measured. Raises InputError when the package is absent."""
    import pandas as pd

    for file in newest(folder, "gemm/sglang", "gemm_perf.parquet"):
        rows = pd.read_parquet(file, columns=["gemm_dtype", "m", "n", "k", "latency"])
        rows = rows.loc[lambda table: table.gemm_dtype == dtype]
        if rows.empty:
            continue
        cube = rows.groupby(["m", "n", "k"]).latency.median().unstack("k")
        # Some machines have a few odd widths besides the grid: without k to go with them they are left out.
        wide = cube.notna().mean(axis=1).groupby("n").mean() > 0.5
        cube = cube[cube.index.get_level_values("n").isin(wide.index[wide])]
        m, n = (cube.index.unique(name).to_numpy(np.float64) for name in ("m", "n"))
        k = cube.columns.to_numpy(np.float64)
        seconds = cube.to_numpy(np.float64).reshape(len(m), len(n), len(k)) * MILLISECONDS
        # The one corner too large to measure: as fast per multiplication as with the next smaller n.
        gap = np.isnan(seconds[:, -1, -1])
        seconds[gap, -1, -1] = seconds[gap, -2, -1] * n[-1] / n[-2]
        if np.isnan(seconds).any():
            continue
        for array in (m, n, k, seconds):
            array.flags.writeable = False
        return GemmTable(m, n, k, seconds)
    return None


def nvlink_table(folder: str) -> "pd.DataFrame":
    """TensorRT-LLM's exchanges of 16-bit rows, top-8 of 256 experts evenly loaded, 7168 wide: columns kind (dispatch, combine),
    ranks, tokens (a GPU) and seconds, ascending. Raises InputError as `gemm_table`."""
    import pandas as pd

    keys = ["kind", "ranks", "tokens"]
    for file in newest(folder, "comm/trtllm", "trtllm_alltoall_perf.parquet"):
        rows = pd.read_parquet(file).rename(columns={"moe_ep_size": "ranks", "num_tokens": "tokens"})
        rows = rows.assign(kind=rows.op_name.map({f"alltoall_{kind}": kind for kind in ("dispatch", "combine")}))
        rows = rows[(rows.moe_dtype == "bfloat16") & rows.kind.notna()]
        if not rows.empty:
            return (rows.groupby(keys).latency.median() * MILLISECONDS).rename("seconds").reset_index()
    return pd.DataFrame(columns=[*keys, "seconds"])


@lru_cache
def collective_table(folder: str, operation: str, gpus: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(float64[size] bytes of each GPU's buffer, ascending; float64[size] seconds as measured) of a collective, None where it
    was not measured on so many GPUs."""
    import pandas as pd

    for file in newest(folder, "comm/nccl", "nccl_perf.parquet"):
        rows = pd.read_parquet(file, columns=["op_name", "nccl_dtype", "num_gpus", "message_size", "latency"])
        asked = (rows.op_name == NCCL_OPERATIONS[operation]) & (rows.nccl_dtype == "half") & (rows.num_gpus == gpus)
        if asked.any():
            times = rows[asked].groupby("message_size").latency.median()
            sizes, seconds = times.index.to_numpy(np.float64) * HALF_BYTES, times.to_numpy(np.float64) * MILLISECONDS
            sizes.flags.writeable = seconds.flags.writeable = False
            return sizes, seconds
    return None


def collective_curve(folder: str, operation: str, gpus: int) -> Curve | None:
    """The curve through `collective_table`."""
    table = collective_table(folder, operation, gpus)
    return None if table is None else Curve(table[0], never_falling(table[1]))


@lru_cache
def measured_counts(folder: str) -> tuple[int, ...]:
    """Numbers of GPUs with an all-to-all, ascending."""
    import pandas as pd

    counts: set[int] = set()
    for file in newest(folder, "comm/nccl", "nccl_perf.parquet"):
        rows = pd.read_parquet(file, columns=["op_name", "num_gpus"])
        counts |= set(rows.num_gpus[rows.op_name == NCCL_OPERATIONS["all_to_all"]].tolist())
    return tuple(sorted(counts))


def newest(folder: str, part: str, name: str) -> list[Path]:
    """The files of all versions, newest first."""

    def version_of(file: Path) -> list[int]:
        return [int(digits) for digits in re.findall(r"[0-9]+", file.parent.name)]

    return sorted((_data_folder() / folder / part).glob(f"*/{name}"), key=version_of, reverse=True)


@lru_cache
def _data_folder() -> Path:
    if (folder := package_folder()) is not None:
        return folder / "systems" / "data"
    raise InputError(
        f"the silicon costs need the package {PACKAGE} (Linux x86-64 only), which is not installed; use the datasheet, an "
        "α–β profile or measured times"
    )


@dataclass(frozen=True)
class Silicon(CostModel):
    """Costs from measured tables.

    A GEMM is interpolated linearly in the logarithms of time, m, n and k, so that anything proportional to a power of
    its sizes is met exactly; where more rows were measured to take less time, so they do with fewer. Sizes below the grid take
    as long as its smallest. Larger ones go on at its last throughput: they can be cut into several GEMMs of the largest
    size, rows and columns side by side, k by adding up. 16-bit floats stand for each other: only bf16 was measured. An
    expert is its two GEMMs, as everywhere; the fused kernels of serving engines are faster on few tokens.

    Collectives are NCCL's inside one node, up to `engine.costs.gemm_table.REACH` times the largest buffer measured. Nothing was
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
            return f"the NCCL tables of {kind} are for links of {machine.link_bandwidth / 1e9:g} GB/s, drawn are {drawn}"
        if len(cluster.gpus) not in (counts := measured_counts(machine.folder)):
            return f"the NCCL tables of {kind} are for {', '.join(map(str, counts))} GPUs, not {len(cluster.gpus)}"
        return None

    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        if reason := _not_measured(gpu.type):
            raise InputError(f"{reason}; use the datasheet or a profile for computation")
        folder = MACHINES[gpu.type].folder
        of_shape = _of_shape(folder, dtype, n, k, gpu.type)
        return gemm_table(folder, GEMM_DTYPES[dtype]).over_rows(of_shape, m)

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
