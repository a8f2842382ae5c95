"""Data of the package aiconfigurator-core other than its measurements: GPUs, as a second catalogue, and the `config.json` of
some ninety models. Only its data files are read, and only on demand.

Also the models that a recording may come from, and the links that GPUs bring to a node: the NVLink on their board, by their
datasheets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from engine.catalogue import GpuType, cluster_presets, fastest_first, gpu_types, node_types
from engine.catalogue.links import FASTEST_PCIE, LINKS, NVLINK_LATENCY
from engine.cluster import Cluster, Node
from engine.errors import InputError
from engine.model import MoEModel
from engine.workload import TrafficMatrix, Workload

PACKAGE = "aiconfigurator-core"
VECTOR_SHARE = 1 / 16
"""fp32 rate of the CUDA cores against the 16-bit tensor cores, where the package does not say it: that of an A100; an H100 has
1/15, a B200 1/30. Experts and attention never compute in fp32."""
LINK_LATENCY = 5e-6
"""Seconds, assumed as in the catalogue."""

OURS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s")
"""Systems that our own catalogue has from the makers' datasheets."""

SUFFIX = "_config.json"


def package_folder() -> Path | None:
    """The folder of the installed package, or None. Its own code is not run: importing it would load its compiled extension."""
    spec = find_spec("aiconfigurator_core")
    folders = map(Path, (spec.submodule_search_locations or ()) if spec else ())
    return next((folder for folder in folders if (folder / "systems" / "data").is_dir()), None)


def installed_folder(users: str) -> Path:
    """As `package_folder`; raises InputError if the package is not installed.

    users: the data that need the package, in the plural, for the message
    """
    if (folder := package_folder()) is None:
        raise InputError(f"{users} need the package {PACKAGE} (Linux x86-64 only), which is not installed")
    return folder


@lru_cache
def packaged_gpu_types() -> dict[str, GpuType]:
    """GPU types that only the package knows, by name; none if it is not installed."""
    if (folder := package_folder()) is None:
        return {}
    kinds = (_gpu_type(path) for path in sorted((folder / "systems").glob("*.yaml")) if path.stem not in OURS)
    return {kind.name: kind for kind in kinds if kind is not None}


def every_gpu_type() -> dict[str, GpuType]:
    """The GPU types of our catalogue and of the package, the fastest first."""
    return fastest_first(packaged_gpu_types() | gpu_types())


def packaged_node(gpu_type: str, name: str) -> Node:
    """A node of GPUs that only the package knows, with the links that it states. Raises InputError for any other type."""
    if gpu_type not in (kinds := packaged_gpu_types()):
        raise InputError(f"no GPU type '{gpu_type}' in {PACKAGE}; it has {', '.join(kinds) or 'none: it is not installed'}")
    system = _system(installed_folder("its GPUs") / "systems" / f"{system_of(gpu_type)}.yaml")["node"]
    gpus = (kinds[gpu_type].gpu(),) * int(system["num_gpus_per_node"])
    return Node(name=name, gpus=gpus, link_bandwidth=float(system["intra_node_bw"]), link_latency=LINK_LATENCY)


@lru_cache
def machine_gpus(gpu_type: str) -> int | None:
    """GPUs of the largest machine of a type that its links join: a rack, or a node; None for a type that the package lacks."""
    names = (f"{system_of(gpu_type)}.yaml", f"{system_of(gpu_type)}_sxm.yaml")
    if (folder := package_folder()) is None:
        return None
    path = next((folder / "systems" / name for name in names if (folder / "systems" / name).is_file()), None)
    node = _system(path)["node"] if path else {}
    return int(node.get("num_gpus_per_rack", node["num_gpus_per_node"])) if node else None


def machine_size(gpu_type: str) -> int:
    """GPUs of a type that its links join: of a rack or a node, or one."""
    if gpu_type not in links_of_types():
        return 1
    return machine_gpus(gpu_type) or max((kind.count for kind in node_types().values() if kind.gpu == gpu_type), default=8)


def cluster_of_machines(gpu_type: str, gpus: int) -> Cluster:
    """So many GPUs of a type in as few machines as hold them, the last one as full as is needed, with the ports of the
    catalogue. Raises InputError for a type that is not known."""
    kind = max((kind for kind in node_types().values() if kind.gpu == gpu_type), key=lambda kind: kind.count, default=None)
    one = kind.node(gpu_type) if kind else packaged_node(gpu_type, gpu_type)
    size, links = machine_size(gpu_type), links_of_types().get(gpu_type)
    size = size if size > 1 else len(one.gpus)
    joined = {"link_bandwidth": links.bandwidth, "link_latency": links.latency} if links else {}
    nodes = tuple(
        one.model_copy(update=joined | {"name": f"{gpu_type}-{turn}", "gpus": one.gpus[:1] * min(size, gpus - turn * size)})
        for turn in range(-(-gpus // size))
    )
    return Cluster(name=f"{gpus} × {gpu_type}", nodes=nodes, latency=kind.fabric_latency if kind else LINK_LATENCY)


def system_of(gpu_type: str) -> str:
    """The package's own name for one of its GPU types: `gb200` for `GB200`."""
    return gpu_type.lower().replace("-", "_").replace(" ", "_")


@lru_cache
def packaged_configs() -> dict[str, Path]:
    """Checkpoints on the Hugging Face Hub, such as `deepseek-ai/DeepSeek-V3`, and the file with their `config.json`. Raises
    InputError if the package is not installed."""
    folder = installed_folder("the packaged models") / "model_configs"
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.endswith("_hf_quant_config.json"))
    return {path.name.removesuffix(SUFFIX).replace("--", "/", 1): path for path in files}


def _system(path: Path) -> dict:
    import yaml  # here, as ranks import this module and read none

    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _gpu_type(path: Path) -> GpuType | None:
    """One system file as a GPU type; None if it describes no machine."""
    data = _system(path)
    if not isinstance(data, dict) or not {"gpu", "node"} <= set(data):
        return None
    rates, node = data["gpu"], data["node"]
    fp16 = float(rates["bfloat16_tc_flops"])
    note = "The rate of fp32 is assumed where the package does not state it."
    if "num_gpus_per_rack" in node:
        note += f" Nodes of one rack, {node['num_gpus_per_rack']} GPUs, are joined by NVLink, whose rate is the fabric's here."
    return GpuType(
        name="-".join("PCIe" if part == "pcie" else part.upper() for part in path.stem.split("_")),
        memory=float(rates["mem_capacity"]),
        memory_bandwidth=float(rates["mem_bw"]),
        flops_fp32=float(rates.get("float32_tc_flops", fp16 * VECTOR_SHARE)),
        flops_fp16=fp16,
        flops_fp8=float(rates.get("fp8_tc_flops", 0)),
        bandwidth=float(node["inter_node_bw"]),
        source=f"{PACKAGE} {version(PACKAGE)}, systems/{path.name}",
        date="2026",
        note=note,
    )


USE = {"name", "batch", "sequence_length"}
"""Fields of a model for its name and its use: models that differ in these alone count as one."""


def models_that_fit(workload: Workload, models: Mapping[str, MoEModel]) -> list[tuple[str, ...]]:
    """Names of the models that a recording may come from, those of identical sizes together, in the order of `models`; none
    for a traffic matrix, which fits them all. A recording that does not tell experts per token fits any number of them."""
    if isinstance(workload, TrafficMatrix):
        return []
    same: dict[str, list[str]] = {}
    for name, model in models.items():
        shown = (workload.layers, workload.num_experts, workload.k)
        if shown == (len(model.moe_layers), model.experts, workload.k and model.experts_per_token):
            same.setdefault(model.model_dump_json(exclude=USE), []).append(name)
    return [tuple(names) for names in same.values()]


@dataclass(frozen=True)
class NodeLinks:
    """The fields of `Node` for its links.

    bandwidth: bytes/s out of each GPU in one direction
    latency: seconds; assumed
    """

    bandwidth: float
    latency: float = NVLINK_LATENCY


@lru_cache
def links_of_types() -> dict[str, NodeLinks]:
    """The links of GPU types that come with NVLink, by type; not of cards with a bridge that is sold apart. Types that only the
    package has are in it if their nodes have links faster than PCIe."""
    on_board = {kind: links for kind, links in LINKS.items() if links.nvlinks and links.name == "NVLink" and not links.bridge}
    known = {kind: NodeLinks(links.nvlink * links.nvlinks) for kind, links in on_board.items()}
    for kind in packaged_gpu_types():
        if kind not in LINKS and (node := packaged_node(kind, kind)).link_bandwidth > FASTEST_PCIE:
            known[kind] = NodeLinks(node.link_bandwidth, node.link_latency)
    return known


def usual_links(types: Sequence[str]) -> NodeLinks | None:
    """The links of a node of these GPUs; None for a single GPU, for several types, and for types without links."""
    return links_of_types().get(types[0]) if len(types) > 1 and len(set(types)) == 1 else None


def nodes_without_links(cluster: Cluster) -> list[Node]:
    """Nodes without links, though their GPUs come with some. A node that is the same in a preset is left alone: its source says
    so."""
    of_presets = {node.digest for preset in cluster_presets().values() for node in preset.cluster.nodes}
    bare = [node for node in cluster.nodes if node.link_bandwidth is None and node.digest not in of_presets]
    return [node for node in bare if usual_links([gpu.type for gpu in node.gpus])]


def with_usual_links(cluster: Cluster) -> Cluster:
    """The cluster with the usual links in `nodes_without_links`."""
    lacking = {node.name for node in nodes_without_links(cluster)}
    nodes = []
    for node in cluster.nodes:
        links = usual_links([gpu.type for gpu in node.gpus]) if node.name in lacking else None
        linked = links and {"link_bandwidth": links.bandwidth, "link_latency": links.latency}
        nodes.append(node.model_copy(update=linked))
    return cluster.model_copy(update={"nodes": tuple(nodes)})
