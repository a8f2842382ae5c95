"""The cluster as a table and back."""

import numpy as np
import pytest

from app.cluster_table import to_cluster, to_frame
from engine.catalogue import cluster_presets
from engine.cluster import Cluster, Node
from engine.errors import InputError

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


def test_a_new_type_brings_its_own_numbers() -> None:
    cluster = PRESETS["mixed-8"].cluster
    frame = to_frame(cluster)
    frame.loc[0, "type"] = "B200"
    changed = to_cluster(frame, cluster, 0.0)
    assert changed.gpus[0].memory == pytest.approx(180 * 2**30)
    assert changed.gpus[0].send_bandwidth == cluster.gpus[0].send_bandwidth


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
