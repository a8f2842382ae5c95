"""The links that GPUs bring to a node, and nodes that lack them."""

import pytest

from engine import formats
from engine.catalogue import cluster_presets, gpu_types, node_types
from engine.catalogue.packaged import links_of_types, nodes_without_links, usual_links, with_usual_links
from engine.cluster import Cluster, Node
from tests.app.test_drop_zone import SAMPLES
from tests.costs.silicon import needs_tables


def cluster(*types: str, link: float | None = None) -> Cluster:
    gpus = tuple(gpu_types()[kind].gpu() for kind in types)
    return Cluster(name="c", nodes=(Node(name="n", gpus=gpus, link_bandwidth=link), Node(name="o", gpus=gpus[:1])))


@pytest.mark.parametrize("name", node_types())
def test_the_catalogues_nodes_of_linked_gpus_have_exactly_these_links(name: str) -> None:
    node = node_types()[name]
    links = usual_links([node.gpu] * node.count)
    if links is None:
        assert node.gpu in ("L40S", "RTX 2080 Ti"), "cards: PCIe, or a bridge that is sold apart"
    elif node.link_bandwidth is not None:
        assert (links.bandwidth, links.latency) == (node.link_bandwidth, node.link_latency)


def test_one_gpu_and_several_types_have_none() -> None:
    assert usual_links(["H100"]) is None and usual_links(["H100", "A100-80"]) is None
    assert usual_links(["made up"] * 2) is None


@needs_tables
def test_packaged_types_only_where_their_nodes_are_linked_faster_than_by_pcie() -> None:
    links = links_of_types()
    assert {"GB200", "GB300", "B300-SXM"} <= set(links) and links["GB200"].bandwidth == 900e9
    assert not {"H100-PCIe", "A100-PCIe", "L4", "A30"} & set(links)


def test_a_node_of_eight_h100_without_links_is_found_and_mended() -> None:
    bare = cluster(*["H100"] * 8)
    assert [node.name for node in nodes_without_links(bare)] == ["n"]
    mended = with_usual_links(bare)
    assert not nodes_without_links(mended) and mended.nodes[0].link_bandwidth == 450e9
    assert mended.nodes[1] == bare.nodes[1], "a GPU alone needs none"


@pytest.mark.parametrize("types", [("L40S",) * 8, ("RTX 2080 Ti",) * 2, ("H100", "V100-16"), ("H100",)])
def test_nothing_is_said_of_nodes_that_come_with_no_links(types: tuple[str, ...]) -> None:
    assert not nodes_without_links(cluster(*types))


def test_nodes_with_links_and_those_of_presets_stay_as_they_are() -> None:
    slow = cluster("H100", "H100", link=1e9)
    assert not nodes_without_links(slow) and with_usual_links(slow) == slow
    for preset in cluster_presets().values():
        assert not nodes_without_links(preset.cluster), "the papers' own testbeds are meant so"
    assert not nodes_without_links(formats.read_cluster(SAMPLES / "mixed-8.json"))
