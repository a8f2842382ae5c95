"""Jobs that pages start and show: progress of a session's jobs, and calibration of the attached devices."""

import json
import time
from pathlib import Path

import pytest
import torch
from streamlit.testing.v1 import AppTest

from app import running
from app.visitor import people
from engine import store
from engine.catalogue import gpu
from engine.cluster import Cluster, Node
from engine.jobs import protocol, runner
from engine.jobs.kinds import HANDLERS
from engine.jobs.launches import describe_calibration
from engine.jobs.protocol import Progress
from engine.jobs.runner import Job, State
from tests.cases.jobs import LONG, WORKER, until
from tests.cases.pages import field, press, put, said, upload, visit
from tests.costs import device_profiles as planted

PAGE = """
from app import running, state
state.restore()
running.show()
"""


@pytest.fixture
def page(own_data_folder: Path) -> AppTest:
    return AppTest.from_string(PAGE, default_timeout=30).run()


@pytest.fixture
def job(own_data_folder: Path):
    """A job that counts for a while."""
    job = runner.start("count", LONG, store.data_folder(), module=WORKER)
    yield job
    runner.cancel(job, grace=0)
    assert runner.wait(job, 5).finished


def texts(page: AppTest) -> list[str]:
    return [bar.proto.text for bar in page.get("progress")]


def test_every_kind_of_job_has_a_title():
    assert set(running.TITLES) == set(HANDLERS)


@pytest.mark.clock
def test_a_job_is_shown_with_its_time_left_and_stopped_in_two_seconds(page, job):
    until(lambda: (job.progress or Progress(time=0)).done)
    until(lambda: len(job.history) > 2)
    for name, ids in {"plan_jobs": [job.id], "study_jobs": {"count": job.id}, "launch_jobs": [job.id]}.items():
        page.session_state[name] = ids
        page.run()
        (text,) = texts(page)
        assert text.startswith("**count**") and "left" in text
        page.session_state[name] = {} if name == "study_jobs" else []
    put(page, plan_jobs=[job.id])
    begin = time.monotonic()
    page.button[0].click().run()
    assert runner.wait(job, 5) is State.CANCELLED and time.monotonic() - begin < 2.0
    page.session_state["plan_jobs"] = ["20250102T030405000006-0123abcd"]  # of a job that is gone
    page.run()
    drawn = (*page.get("progress"), *page.button, *page.markdown, *page.caption)
    assert not drawn and not page.exception


def test_a_study_that_another_of_its_kind_follows_stays_in_sight(own_data_folder, job):
    page = AppTest.from_string(
        PAGE.replace("running.show()", f"[state.set_study_job('sweep', id) for id in ('{job.id}', 'gone')]; running.show()")
    )
    assert [text.split(" · ")[0] for text in texts(page.run())] == ["**count**"]
    page.run()
    assert page.session_state["study_jobs"] == {"sweep": "gone"}
    assert page.session_state["earlier_studies"] == [job.id]  # told twice, kept once


def test_a_job_that_waits_says_how_many_are_before_it(page, job, monkeypatch):
    page.session_state["plan_jobs"] = [job.id]
    with monkeypatch.context() as patch:
        patch.setattr(Job, "state", State.WAITING)
        patch.setattr(Job, "ahead", 2)
        page.run()
    assert texts(page) == ["**count** · waiting, 2 before it"]


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
def cluster_page(sample: AppTest, monkeypatch) -> AppTest:
    """The Cluster page with the sample open, seen by a visitor on this machine, without a GPU for PyTorch."""
    monkeypatch.setattr(people, "why_not_launch", lambda context, user: None)  # a page under test has no address
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return visit(sample, "cluster")


def open_cluster(cluster_page: AppTest, cluster: Cluster) -> AppTest:
    assert not upload(cluster_page, "cluster-file", {"cluster.json": cluster.to_json()}).error
    return cluster_page


def in_use(cluster_page: AppTest) -> str:
    return next(caption.value for caption in cluster_page.caption if caption.value.startswith("In use: "))


def test_it_starts_what_was_asked_for_and_is_used_as_far_as_it_fits(cluster_page, started):
    field(cluster_page, "Ranks that measure").set_value(3)
    field(cluster_page, "Quick").check()
    press(cluster_page, "Calibrate")
    assert started == [{"ranks": 3, "quick": True, "type": None}]
    table = cluster_page.dataframe[-1].value
    assert list(table["Operation"]) == [*("GEMM bf16 H200", "memory H200", "all-to-all", "all-reduce", "exchange with a peer")]
    assert "1,000 GFLOP/s" in set(table["Rate 1/β"])
    text = said(cluster_page.markdown)
    assert "3 held-out shapes" in text and "mean error **15 %**, worst 25 %" in text
    assert "roofline" in in_use(cluster_page), "nothing is used before it is asked for"
    three = Cluster(name="three", nodes=(*PAIR.nodes, Node(name="m", gpus=(gpu("H200"),))))
    press(open_cluster(cluster_page, three), "Use it")
    assert "calibrated in a test" in in_use(cluster_page), "what it lacks comes from the datasheet"
    assert "network\\: datasheet roofline" in in_use(cluster_page)
    press(open_cluster(cluster_page, PAIR), "Use it")
    assert "calibrated in a test" in in_use(cluster_page) and "roofline" not in in_use(cluster_page)
    assert not cluster_page.error
    visit(cluster_page, "workload")
    visit(cluster_page, "cluster")
    assert "calibrated in a test" in in_use(cluster_page), "it is kept"


def test_it_is_refused_for_a_cluster_of_other_gpus(cluster_page, started):
    press(cluster_page, "Calibrate")
    press(cluster_page, "Use it")
    assert any("cannot be used" in error.value and "no times for A100" in error.value for error in cluster_page.error)
    assert "roofline" in in_use(cluster_page)


def test_who_may_not_launch_may_not_calibrate(cluster_page, started, monkeypatch):
    monkeypatch.setattr(people, "why_not_launch", lambda context, user: "Launching is off for visitors.")
    cluster_page.run()
    button = next(button for button in cluster_page.button if button.label == "Calibrate")
    assert button.disabled and "Launching is off" in said(cluster_page.warning)
    assert started == [] and runner.jobs(store.data_folder()) == []
