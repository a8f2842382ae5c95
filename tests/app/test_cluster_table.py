"""The cluster as a table and back."""

import numpy as np
import pytest

from app.cluster.table import shows, to_cluster, to_frame, usual_ports
from engine.catalogue import cluster_presets, gpu_types
from engine.catalogue.packaged import packaged_gpu_types
from engine.cluster import Cluster, Efficiency, Node
from engine.errors import InputError
from tests.costs.silicon import needs_tables

PRESETS = cluster_presets()


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_table_that_nobody_edited_is_the_same_cluster(name: str) -> None:
    cluster = PRESETS[name].cluster
    again = to_cluster(to_frame(cluster), cluster, cluster.latency * 1e6)
    assert again.latency == pytest.approx(cluster.latency)
    for old, new in zip(cluster.nodes, again.nodes, strict=True):
        assert (old.name, old.link_latency) == (new.name, new.link_latency)
        assert new.link_bandwidth == pytest.approx(old.link_bandwidth)
        for gpu, other in zip(old.gpus, new.gpus, strict=True):
            assert gpu.type == other.type
            assert list(gpu.model_dump(exclude={"type"}).values()) == pytest.approx(
                list(other.model_dump(exclude={"type"}).values())
            )


def test_an_edited_table_keeps_what_ports_reach() -> None:
    cluster = PRESETS["mixed-8"].cluster.model_copy(update={"efficiency": Efficiency(fabric=((1, 1.0), (4, 0.5)))})
    frame = to_frame(cluster)
    frame.loc[0, "type"] = "B200"
    assert to_cluster(frame, cluster, 0.0).efficiency == cluster.efficiency


def test_a_new_type_brings_its_own_numbers() -> None:
    cluster = PRESETS["mixed-8"].cluster
    frame = to_frame(cluster)
    frame.loc[0, "type"] = "B200"
    changed = to_cluster(frame, cluster, 0.0)
    assert changed.gpus[0].memory == pytest.approx(180 * 2**30)
    assert changed.gpus[0].send_bandwidth == cluster.gpus[0].send_bandwidth


@needs_tables
def test_a_type_that_only_the_package_has_brings_its_own_numbers_too() -> None:
    cluster = PRESETS["mixed-8"].cluster
    frame = to_frame(cluster)
    frame.loc[0, "type"] = "GB200"
    assert to_cluster(frame, cluster, 0.0).gpus[0].memory == packaged_gpu_types()["GB200"].memory


@pytest.mark.parametrize(
    "column, value, reason",
    [("node", None, "Row 2"), ("type", None, "Row 2"), ("send", 0.0, "Row 2: Send"), ("memory", -1.0, "Row 2: Memory")],
)
def test_a_row_that_cannot_be_is_named(column: str, value: object, reason: str) -> None:
    cluster = PRESETS["mixed-8"].cluster
    frame = to_frame(cluster).astype({"node": object, "type": object})
    frame.loc[1, column] = value
    with pytest.raises(InputError, match=reason):
        to_cluster(frame, cluster, 0.0)


def test_a_table_without_rows_is_no_cluster() -> None:
    cluster = PRESETS["mixed-8"].cluster
    with pytest.raises(InputError, match="at least one GPU"):
        to_cluster(to_frame(cluster).iloc[:0], cluster, 0.0)


def test_a_row_added_in_the_browser_needs_only_a_node_and_a_type() -> None:
    cluster = PRESETS["mixed-8"].cluster
    frame = to_frame(cluster)
    frame.loc[len(frame)] = {**dict.fromkeys(frame, np.nan), "node": "new", "type": "H100"}
    changed = to_cluster(frame, cluster, 0.0)
    assert changed.nodes[-1].name == "new"
    assert changed.gpus[-1].type == "H100"


def test_a_table_that_nobody_edited_is_the_cluster_itself_whatever_its_numbers() -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        gpus = [
            gpu.model_copy(
                update={field: getattr(gpu, field) * random.uniform(0.5, 2) for field in ("memory", "send_bandwidth")}
            )
            for gpu in PRESETS["mixed-8"].cluster.gpus
        ]
        nodes = tuple(
            Node(name=f"{rank}", gpus=(gpu,), link_bandwidth=random.uniform(1e9, 1e12)) for rank, gpu in enumerate(gpus)
        )
        cluster = Cluster(name="odd", nodes=nodes, latency=random.uniform(0, 1e-4))
        assert to_cluster(to_frame(cluster), cluster, cluster.latency * 1e6) is cluster
        frame = to_frame(cluster)
        frame.loc[3, "send"] *= 1 + 1e-9
        assert to_cluster(frame, cluster, cluster.latency * 1e6) is not cluster


LINKED = Cluster(
    name="linked",
    nodes=tuple(
        Node(name=name, gpus=(PRESETS["mixed-8"].cluster.gpus[0],) * count, link_bandwidth=link, link_latency=1e-6)
        for name, count, link in (("a", 3, 450e9), ("b", 2, None), ("c", 1, 300e9))
    ),
)


@pytest.mark.parametrize(
    "edits, links, still_shown",
    [
        ({(1, "link"): 200.0}, {"a": 200e9, "b": None, "c": 300e9}, False),  # one row counts for its node
        ({(1, "link"): np.nan}, {"a": None, "b": None, "c": 300e9}, False),
        ({(0, "link"): 0.0}, {"a": None, "b": None, "c": 300e9}, False),
        ({(0, "link"): 50.0, (1, "link"): 50.0, (2, "link"): 50.0}, {"a": 50e9, "b": None, "c": 300e9}, True),
        ({(2, "node"): "b"}, {"a": 450e9, "b": None, "c": 300e9}, False),  # a GPU takes the links that it finds
        ({(3, "node"): "a"}, {"a": 450e9, "b": None, "c": 300e9}, False),
        ({(2, "node"): "d"}, {"a": 450e9, "d": 450e9, "b": None, "c": 300e9}, True),  # and keeps them alone
        ({(5, "node"): "e"}, {"a": 450e9, "b": None, "e": 300e9}, True),
        ({(1, "send"): 7.0}, {"a": 450e9, "b": None, "c": 300e9}, True),
    ],
)
def test_links_belong_to_the_node_whichever_row_they_are_typed_into(
    edits: dict, links: dict, still_shown: bool
) -> None:
    base = to_frame(LINKED)
    frame = base.copy()
    for (row, column), value in edits.items():
        frame.loc[row, column] = value
    changed = to_cluster(frame, LINKED, 0.0, base)
    assert {node.name: node.link_bandwidth for node in changed.nodes} == links
    assert shows(frame, changed) is still_shown
    again = to_frame(changed)  # what the table is written anew from
    assert to_cluster(again, changed, 0.0, again) is changed
    assert shows(again, changed)


def test_a_row_added_to_a_linked_node_has_its_links() -> None:
    base = to_frame(LINKED)
    frame = base.copy()
    frame.loc[len(frame)] = {**dict.fromkeys(frame, np.nan), "node": "a", "type": "H100"}
    changed = to_cluster(frame, LINKED, 0.0, base)
    grown = changed.nodes[0]
    assert (grown.name, len(grown.gpus), grown.link_bandwidth) == ("a", 4, 450e9)
    assert not shows(frame, changed)


def test_a_renamed_node_keeps_what_the_table_does_not_show() -> None:
    base = to_frame(LINKED)
    frame = base.replace({"node": {"b": "renamed"}})
    changed = to_cluster(frame, LINKED, 0.0, base)
    assert [(node.name, node.link_latency) for node in changed.nodes] == [("a", 1e-6), ("renamed", 1e-6), ("c", 1e-6)]
    assert shows(frame, changed)


def rows(*cells: tuple[str, str]) -> list[dict]:
    return [
        {**dict.fromkeys(to_frame(PRESETS["mixed-8"].cluster), np.nan), "node": node, "type": kind}
        for node, kind in cells
    ]


@pytest.mark.parametrize(
    ("kinds", "link"),
    [(("H100", "H100"), 450e9), (("L40S", "L40S"), None), (("H100", "A100-80"), None), (("H100",), None)],
)
def test_a_new_node_has_the_links_that_its_gpus_come_with(kinds: tuple[str, ...], link: float | None) -> None:
    cluster = PRESETS["mixed-8"].cluster
    frame = to_frame(cluster)
    for row in rows(*(("new", kind) for kind in kinds)):
        frame.loc[len(frame)] = row
    changed = to_cluster(frame, cluster, 0.0, to_frame(cluster))
    assert changed.nodes[-1].link_bandwidth == link
    assert changed.nodes[:-1] == cluster.nodes, "nodes of several GPUs keep what they have"
    assert shows(frame, changed) is (link is None), "the table is written anew, with the links"


def test_links_that_were_taken_away_stay_away() -> None:
    cluster = PRESETS["hgx-h100-8"].cluster
    base = to_frame(cluster)
    frame = base.copy()
    frame["link"] = np.nan
    bare = to_cluster(frame, cluster, 0.0, base)
    assert bare.nodes[0].link_bandwidth is None
    frame.loc[len(frame)] = rows((cluster.nodes[0].name, "H100"))[0]
    assert to_cluster(frame, bare, 0.0, base).nodes[0].link_bandwidth is None


def test_a_preset_that_was_changed_is_not_called_so() -> None:
    cluster = cluster_presets()["hgx-h100-4-nodes"].cluster
    frame = to_frame(cluster)
    frame.loc[0, "send"] = 100.0
    changed = to_cluster(frame, cluster, cluster.latency * 1e6)
    assert changed.name == "hgx-h100-4-nodes, changed"
    frame.loc[1, "send"] = 100.0
    assert to_cluster(frame, changed, cluster.latency * 1e6).name == changed.name


def test_ports_that_nobody_gave_are_told_with_what_they_are_taken_from() -> None:
    types = gpu_types()
    cluster = Cluster(name="c", nodes=(Node(name="n", gpus=(types["L40S"].gpu(), types["H100"].gpu(1e9))),))
    assert usual_ports(cluster) == ["L40S 50 Gb/s (Amazon EC2 g6e.48xlarge, 400 Gb/s for eight GPUs)"]
    other = packaged_gpu_types()["GB200"]
    (sentence,) = usual_ports(Cluster(name="c", nodes=(Node(name="n", gpus=(other.gpu(),)),)))
    assert other.source in sentence
