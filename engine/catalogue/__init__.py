"""The catalogue: GPU types, nodes, clusters and models to start from, as data files with a source and a date.

SI units (bytes, bytes/s, FLOP/s, seconds). Memory is the nominal capacity in GiB, since that is how memory chips come;
every other prefix is decimal. Tensor-core rates are dense, never with sparsity; fp32 is the rate of the CUDA cores.
Bandwidths are those of one GPU in one direction.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from importlib.resources import files
from typing import TypeVar

from pydantic import Field

from engine.cluster import Cluster, Gpu, Node
from engine.errors import InputError
from engine.model import MoEModel
from engine.schema import Frozen

Entry = TypeVar("Entry", bound="CatalogueEntry")


class CatalogueEntry(Frozen):
    """An entry of the catalogue, with the source and the date of its figures."""

    source: str = Field(min_length=1, description="datasheet, or paper and section")
    date: str = Field(pattern=r"^20\d\d(-\d\d)?$", description="year or month of the source")
    note: str = Field(default="", description="what was assumed, halved or chosen")


class GpuType(CatalogueEntry):
    """The datasheet of one accelerator. Bytes, bytes/s, FLOP/s."""

    name: str
    memory: float = Field(gt=0)
    memory_bandwidth: float = Field(gt=0)
    flops_fp32: float = Field(gt=0)
    flops_fp16: float = Field(gt=0)
    flops_tf32: float | None = Field(default=None, gt=0, description="absent: no tensor cores for 32-bit data")
    flops_fp8: float = Field(ge=0, description="0: no 8-bit units")
    bandwidth: float = Field(gt=0, description="to and from the fabric where nothing else is said")

    def gpu(self, send_bandwidth: float | None = None, receive_bandwidth: float | None = None) -> Gpu:
        """A GPU of this type. Without `receive_bandwidth` it receives as fast as it sends."""
        send = self.bandwidth if send_bandwidth is None else send_bandwidth
        receive = send if receive_bandwidth is None else receive_bandwidth
        rates = self.model_dump(include=set(Gpu.model_fields))
        return Gpu(type=self.name, send_bandwidth=send, receive_bandwidth=receive, **rates)


class NodeType(CatalogueEntry):
    """A machine: `count` GPUs of one type, the links between them and each GPU's share of the network."""

    name: str
    gpu: str = Field(description="name of a GPU type")
    count: int = Field(ge=1)
    link_bandwidth: float | None = Field(gt=0, description="None: the GPUs meet on the fabric")
    link_latency: float = Field(default=0, ge=0)
    bandwidth: float = Field(gt=0, description="the node's network ports divided by its GPUs")
    fabric_latency: float = Field(default=0, ge=0)

    def node(self, name: str) -> Node:
        """A node of this type called `name`."""
        gpus = (gpu(self.gpu, self.bandwidth),) * self.count
        return Node(name=name, gpus=gpus, link_bandwidth=self.link_bandwidth, link_latency=self.link_latency)


class ClusterPreset(CatalogueEntry):
    """A cluster written as node types and how many of each."""

    name: str
    description: str
    nodes: tuple[tuple[str, int], ...] = Field(min_length=1, description="(name of a node type, count)")

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster in full. Its latency is that of the slowest of its networks."""
        kinds = [node_types()[kind] for kind, _ in self.nodes]
        nodes = tuple(
            kind.node(f"{kind.name}-{index}")
            for kind, (_, count) in zip(kinds, self.nodes, strict=True)
            for index in range(count)
        )
        return Cluster(name=self.name, nodes=nodes, latency=max(kind.fabric_latency for kind in kinds))


class ModelPreset(CatalogueEntry):
    """A published MoE model."""

    model: MoEModel

    @property
    def name(self) -> str:
        return self.model.name


@lru_cache
def gpu_types() -> dict[str, GpuType]:
    """Every GPU type by name, oldest first."""
    return _read("gpus.json", GpuType)


def fastest_first(types: Mapping[str, GpuType]) -> dict[str, GpuType]:
    """GPU types by name, as people look for them: fastest at 16 bits first, of equals the one with more memory."""

    def rank(kind: GpuType) -> tuple[float, float, float]:
        return (-kind.flops_fp16, -kind.memory, -kind.memory_bandwidth)

    return {kind.name: kind for kind in sorted(types.values(), key=rank)}


@lru_cache
def node_types() -> dict[str, NodeType]:
    """Every node type by name."""
    return _read("nodes.json", NodeType)


@lru_cache
def cluster_presets() -> dict[str, ClusterPreset]:
    """Every ready cluster by name."""
    return _read("clusters.json", ClusterPreset)


def cluster_of_gpus(name: str) -> Cluster | None:
    """A cluster by a name such as `4xH100` or `32xH100`: GPUs in nodes of the catalogue, one node that is not full or full ones
    alone. None for other names, and for types and numbers that make no such nodes."""
    counted = re.fullmatch(r"(\d{1,4})[x×](.+)", name)
    kinds = [kind for kind in node_types().values() if counted and kind.gpu.lower() == counted[2].lower()]
    gpus = int(counted[1]) if counted else 0
    if not kinds or gpus < 1 or (gpus > kinds[0].count and gpus % kinds[0].count):
        return None
    kind = kinds[0].model_copy(update={"count": min(gpus, kinds[0].count)})
    nodes = tuple(kind.node(f"{kind.name}-{index}") for index in range(gpus // kind.count))
    return Cluster(name=name, nodes=nodes, latency=kind.fabric_latency)


@lru_cache
def model_presets() -> dict[str, ModelPreset]:
    """Every model by name."""
    return _read("models.json", ModelPreset)


def gpu(type_name: str, send_bandwidth: float | None = None, receive_bandwidth: float | None = None) -> Gpu:
    """A GPU of the type `type_name`; raises InputError that lists the known types if it is not one of them.

    send_bandwidth, receive_bandwidth: bytes/s; the type's usual network port by default, and receiving as fast as sending.
    """
    try:
        kind = gpu_types()[type_name]
    except KeyError:
        raise InputError(f"no GPU type '{type_name}' in the catalogue; it has {', '.join(gpu_types())}") from None
    return kind.gpu(send_bandwidth, receive_bandwidth)


def _read(file: str, kind: type[Entry]) -> dict[str, Entry]:
    """The entries of one data file by name."""
    rows = json.loads(files(__name__).joinpath(file).read_text(encoding="utf-8"))
    entries = [kind.from_dict(row, f"catalogue {file}, entry {index}") for index, row in enumerate(rows)]
    return {entry.name: entry for entry in entries}
