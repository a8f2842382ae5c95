"""The Cluster page: what it warns of, and what it begins with."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from streamlit.testing.v1 import AppTest

from app.charts.cluster import HEIGHT, WIDTH, svg
from app.charts.theme import gpu_colour
from app.cluster.board import in_words
from engine.catalogue import cluster_presets, gpu_types
from engine.cluster import Cluster, Node
from tests.app.test_pages import ROOT, open_sample, press, visit


@pytest.fixture
def app(own_data_folder: Path) -> AppTest:
    return AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run()


def warnings(app: AppTest) -> list[str]:
    """Of links."""
    texts = [warning.value.replace("\\", "") for warning in app.warning]
    return [text for text in texts if "NVLink" in text]


def test_eight_h100_without_links_are_warned_of_and_mended_with_one_click(app: AppTest) -> None:
    gpu = gpu_types()["H100"].gpu()
    app.session_state["cluster"] = Cluster(name="drawn", nodes=(Node(name="node 1", gpus=(gpu,) * 8),))
    visit(app, "cluster")
    (warning,) = warnings(app)
    assert warning.startswith("node 1: 8 H100 without links inside") and "450 GB/s out of each H100" in warning
    press(app, "Add NVLink")
    assert app.session_state["cluster"].nodes[0].link_bandwidth == 450e9 and not warnings(app)


def test_the_sample_is_not_warned_of(app: AppTest) -> None:
    assert not warnings(visit(open_sample(app), "cluster"))


def test_the_gallery_comes_first_where_no_cluster_is_open_and_opens_one(app: AppTest) -> None:
    visit(app, "cluster")
    cards = {button.key.removeprefix("preset-") for button in app.button if (button.key or "").startswith("preset-")}
    assert cards == set(cluster_presets())
    assert any("Choose a preset" in info.value for info in app.info) and not app.tabs
    app.button(key="preset-hgx-h100-4-nodes").click().run()
    assert not app.exception
    assert app.session_state["cluster"] == cluster_presets()["hgx-h100-4-nodes"].cluster
    assert [tab.label.rpartition(": ")[2] for tab in app.tabs] == ["Inventory", "Links between nodes", "Costs", "Trust"]
    assert not any("Choose a preset" in info.value for info in app.info)


@pytest.mark.parametrize("name", cluster_presets())
def test_a_picture_has_every_gpu_in_the_colour_of_its_type_and_stays_in_its_frame(name: str) -> None:
    cluster = cluster_presets()[name].cluster
    picture = ElementTree.fromstring(svg(cluster))
    boxes = [dict(part.items()) for part in picture if part.tag.endswith("rect")]
    gpus = [box for box in boxes if box["fill"] != "none"]
    assert [box["fill"] for box in gpus] == [gpu_colour(gpu.type) for gpu in cluster.gpus]
    assert len(boxes) - len(gpus) == len(cluster.nodes)
    for box in boxes:
        x, y, width, height = (float(box[side]) for side in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + width <= WIDTH and y + height <= HEIGHT and min(width, height) >= 1.5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hgx-h100-4-nodes", "32 H100 in 4 nodes"),
        ("hgx-h100-8", "8 H100 in 1 node"),
        ("hgx-h100-and-l40s", "8 H100 + 8 L40S in 2 nodes"),
        ("mixed-8", "8 GPUs of 4 types in 4 nodes"),
    ],
)
def test_a_preset_in_words(name: str, words: str) -> None:
    assert in_words(cluster_presets()[name].cluster) == words
