"""The Cluster page: what it warns of, and what it begins with."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from engine.catalogue import gpu_types
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
    assert warning.startswith("node 1 has 8 H100 and no links inside") and "H100: 450 GB/s" in warning
    press(app, "Add NVLink")
    assert app.session_state["cluster"].nodes[0].link_bandwidth == 450e9 and not warnings(app)


def test_the_sample_is_not_warned_of(app: AppTest) -> None:
    assert not warnings(visit(open_sample(app), "cluster"))
