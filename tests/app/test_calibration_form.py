"""The Cluster page where it measures the attached devices: who may, what it starts, and what it makes of the answer."""

import json
import time

import pytest
import torch
from streamlit.testing.v1 import AppTest

from app.visitor import people
from engine import store
from engine.catalogue import gpu
from engine.cluster import Cluster, Node
from engine.errors import InputError
from engine.jobs import protocol, runner
from engine.jobs.launches import describe_calibration
from tests.app.test_pages import ROOT, open_sample, press, visit
from tests.costs import device_profiles as planted

MADE = planted.device_profile("H200", ranks=2)
PAIR = Cluster(name="pair", nodes=(Node(name="n", gpus=(gpu("H200"),) * 2),))


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """The arguments of the jobs started: each is done at once, with a planted calibration."""
    seen = []

    def start(kind, arguments, root):
        assert kind == "calibrate"
        seen.append(arguments)
        id = f"20260102T030405{len(seen):06}-00000000"
        job = runner.Job(id, root / "jobs" / id)
        job.folder.mkdir(parents=True)
        request = protocol.Request(kind=kind, arguments=arguments, created=time.time() - 60)
        (job.folder / protocol.REQUEST).write_text(json.dumps(request.model_dump()))
        (job.folder / protocol.PID).write_text('{"pid": 0, "start": 0}')
        protocol.Context(job.folder).finish(describe_calibration(MADE))
        return job

    monkeypatch.setattr(runner, "start", start)
    return seen


@pytest.fixture
def page(monkeypatch) -> AppTest:
    """The Cluster page with the sample open, as a visitor on this machine sees it, whose PyTorch has no GPU."""
    monkeypatch.setattr(people, "why_not_launch", lambda context, user: None)  # a page under test has no address
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run()
    return visit(open_sample(app), "cluster")


def open_cluster(page: AppTest, cluster: Cluster) -> AppTest:
    file = ("cluster.json", cluster.to_json().encode(), "application/json")
    page.file_uploader(key="cluster-file").set_value([file])
    page.run()
    assert not page.exception and not page.error
    return page


def in_use(page: AppTest) -> str:
    return next(caption.value for caption in page.caption if caption.value.startswith("In use: "))


def test_it_starts_what_was_asked_for_and_shows_what_was_found(page, started):
    next(number for number in page.number_input if number.label == "Ranks that measure").set_value(3)
    next(box for box in page.checkbox if box.label == "Quick").check()
    press(page, "Calibrate")
    assert started == [{"ranks": 3, "quick": True, "type": None}]
    table = page.dataframe[-1].value
    assert list(table["Operation"]) == [
        "GEMM bf16 H200",
        "memory H200",
        "all-to-all",
        "all-reduce",
        "exchange with a peer",
    ]
    assert "1,000 GFLOP/s" in set(table["Rate 1/β"])
    assert any(
        "3 held-out shapes" in text.value and "mean error **15 %**, worst 25 %" in text.value for text in page.markdown
    )
    assert "roofline" in in_use(page), "nothing is used before it is asked for"


def test_it_becomes_the_costs_of_a_cluster_that_it_fits(page, started):
    press(open_cluster(page, PAIR), "Calibrate")
    press(page, "Use it")
    assert "calibrated in a test" in in_use(page) and "roofline" not in in_use(page) and not page.error
    visit(page, "workload")
    visit(page, "cluster")
    assert "calibrated in a test" in in_use(page), "it is kept"


def test_what_it_does_not_have_comes_from_the_datasheet(page, started):
    three = Cluster(name="three", nodes=(*PAIR.nodes, Node(name="m", gpus=(gpu("H200"),))))
    press(open_cluster(page, three), "Calibrate")
    press(page, "Use it")
    assert "calibrated in a test" in in_use(page) and "network\\: datasheet roofline" in in_use(page)


def test_it_is_refused_for_a_cluster_of_other_gpus(page, started):
    press(page, "Calibrate")
    press(page, "Use it")
    assert any("cannot be used" in error.value and "A100" in error.value for error in page.error)
    assert "roofline" in in_use(page)


def test_who_may_not_launch_may_not_calibrate(page, started, monkeypatch):
    monkeypatch.setattr(people, "why_not_launch", lambda context, user: "Launching is off for visitors.")
    page.run()
    button = next(button for button in page.button if button.label == "Calibrate")
    assert button.disabled and any("Launching is off" in warning.value for warning in page.warning)
    assert started == [] and runner.jobs(store.data_folder()) == []


def test_usable_says_what_is_missing():
    from app.cluster.measuring import usable

    other = Cluster(name="other", nodes=(Node(name="n", gpus=(gpu("L40S"),) * 3),))
    with pytest.raises(InputError, match=r"no times for L40S .* no all-to-all over 3 GPUs"):
        usable(MADE, other, None)
