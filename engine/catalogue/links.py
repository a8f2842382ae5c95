"""Links that GPUs bring to a node: the NVLink that is on the board they come on, as their datasheets have it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from engine.catalogue import cluster_presets
from engine.catalogue.nvidia import FASTEST_PCIE, LINKS, NVLINK_LATENCY
from engine.catalogue.packaged import packaged_gpu_types, packaged_node
from engine.cluster import Cluster, Node


@dataclass(frozen=True)
class NodeLinks:
    """What `Node` says of its links. bandwidth: bytes/s out of each GPU in one direction; latency: seconds, assumed."""

    bandwidth: float
    latency: float = NVLINK_LATENCY


@lru_cache
def links_of_types() -> dict[str, NodeLinks]:
    """By GPU type, those that come with NVLink; not cards whose bridge is sold apart. Of types that only the package has, those
    whose nodes it links faster than PCIe could."""
    ours = {
        kind: NodeLinks(links.nvlink * links.nvlinks)
        for kind, links in LINKS.items()
        if links.nvlinks and not links.bridge
    }
    packaged = {kind: packaged_node(kind, kind) for kind in packaged_gpu_types() if kind not in LINKS}
    return ours | {
        kind: NodeLinks(node.link_bandwidth, node.link_latency)
        for kind, node in packaged.items()
        if node.link_bandwidth > FASTEST_PCIE
    }


def usual_links(types: Sequence[str]) -> NodeLinks | None:
    """The links of a node of these GPUs; None for a single GPU, for several types, and where they come with none."""
    return links_of_types().get(types[0]) if len(types) > 1 and len(set(types)) == 1 else None


def nodes_without_links(cluster: Cluster) -> list[Node]:
    """Nodes without links whose GPUs come with some. A node that a preset has just so is meant so: its source says it."""
    of_presets = {node.digest for preset in cluster_presets().values() for node in preset.cluster.nodes}
    return [
        node
        for node in cluster.nodes
        if node.link_bandwidth is None
        and usual_links([gpu.type for gpu in node.gpus])
        and node.digest not in of_presets
    ]


def with_usual_links(cluster: Cluster) -> Cluster:
    """The same, with the usual links in those nodes."""
    lacking = {node.name for node in nodes_without_links(cluster)}
    return cluster.model_copy(
        update={"nodes": tuple(_linked(node) if node.name in lacking else node for node in cluster.nodes)}
    )


def _linked(node: Node) -> Node:
    links = usual_links([gpu.type for gpu in node.gpus])
    return node.model_copy(update={"link_bandwidth": links.bandwidth, "link_latency": links.latency})
