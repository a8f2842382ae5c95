"""The Cluster page where it looks for GPUs: none there, some there, a saved topology, and files that are none."""

import sys
from pathlib import Path

import pytest
import streamlit as st
import torch
from streamlit.testing.v1 import AppTest

from tests.app.test_pages import ROOT, press, visit
from tests.cases.files import everywhere, printed
from tests.launch.nvml import GIB, Gpu, plug_in, switched

LISTED = "".join(f"GPU {at}: NVIDIA H100 80GB HBM3 (UUID: GPU-{at})\n" for at in range(8))
DETECT, OPEN = "Detect attached GPUs", "Open these GPUs"
TYPE = "GPU type, where the driver or a file does not name it"


@pytest.fixture
def page(monkeypatch) -> AppTest:
    """The Cluster page with nothing open, on a machine whose PyTorch has no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    st.cache_resource.clear()  # what an earlier test saw attached
    app = AppTest.from_file(str(Path(ROOT) / "app" / "main.py"), default_timeout=60).run()
    yield visit(app, "cluster")
    st.cache_resource.clear()


def upload(page: AppTest, name: str, text: str) -> AppTest:
    page.file_uploader(key="cluster-file").set_value([(name, text.encode(), "text/plain")])
    page.run()
    assert not page.exception, page.exception
    return page


def choose(page: AppTest, label: str, kind: str) -> AppTest:
    next(selectbox for selectbox in page.selectbox if selectbox.label == label).set_value(kind)
    page.run()
    assert not page.exception, page.exception
    return page


def gpus(page: AppTest) -> str | None:
    return next((metric.value for metric in page.metric if metric.label == "GPUs"), None)


def test_no_gpu(page, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    press(page, DETECT)
    (warning,) = page.warning
    assert "no GPU attached" in warning.value and "preset" in warning.value
    assert not page.error and gpus(page) is None
    assert any("Choose a preset" in info.value for info in page.info), "the empty page still says what to do"


def test_gpus_are_drawn(page, monkeypatch):
    plug_in(monkeypatch, switched("NVIDIA H200", 8, links=18, memory=140 * GIB))
    press(page, DETECT)
    assert not page.warning and not page.error and "450 GB/s" in page.success[0].value
    assert gpus(page) is None, "nothing is opened before it is asked for"
    press(page, OPEN)
    assert gpus(page) == "8" and not page.error


def test_a_name_that_is_not_known_needs_a_type(page, monkeypatch):
    plug_in(monkeypatch, [Gpu("NVIDIA H100 NVL", 94 * GIB, bus=at) for at in range(2)])
    press(page, DETECT)
    assert "H100 NVL" in page.warning[0].value and gpus(page) is None
    press(choose(page, TYPE, "H100"), DETECT)
    press(page, OPEN)
    assert gpus(page) == "2" and all("H100 NVL" not in warning.value for warning in page.warning)


def test_a_topology_that_names_its_gpus(page):
    upload(page, "dgx.txt", LISTED + printed(everywhere("NV18", 8), nics=8))
    assert gpus(page) == "8" and not page.error
    assert any("8 network cards" in caption.value for caption in page.caption)


def test_a_topology_whose_type_is_chosen(page):
    upload(page, "dgx.txt", printed(everywhere("NV12", 4)))
    assert "choose their type" in page.error[0].value and gpus(page) is None
    choose(page, TYPE, "L40S")
    assert "no NVLinks" in page.error[0].value and gpus(page) is None
    choose(page, TYPE, "A100-80")
    assert gpus(page) == "4" and not page.error


@pytest.mark.parametrize(
    ("name", "text"), [("dgx.txt", "what a fine day"), ("dgx.txt", ""), ("cluster.json", '{"nodes": 3}')]
)
def test_garbage_leaves_the_open_cluster(page, monkeypatch, name, text):
    plug_in(monkeypatch, switched("NVIDIA H200", 2, links=18))
    press(page, DETECT)
    press(page, OPEN)
    upload(page, name, text)
    assert name.split(".")[0] in page.error[0].value and gpus(page) == "2"


def test_another_type_draws_the_file_again_and_nothing_else_does(page):
    upload(page, "dgx.txt", printed(everywhere("NV12", 4)))
    for kind, memory in (("A100-80", "320 GiB"), ("A100-40", "160 GiB")):
        choose(page, TYPE, kind)
        assert next(metric.value for metric in page.metric if metric.label == "Memory") == memory
    page.button(key="preset-mixed-8").click().run()
    assert gpus(page) == "8", "the file is still in its widget, but what was opened last counts"
