"""What runs for a session, as every page shows it."""

import time
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app import running
from engine import store
from engine.jobs import runner
from engine.jobs.kinds import HANDLERS
from engine.jobs.protocol import Progress
from engine.jobs.runner import Job, State
from tests.jobs.test_jobs import LONG, WORKER, until

pytestmark = pytest.mark.slow

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


def test_nothing_is_drawn_while_nothing_runs(page):
    assert not page.get("progress") and not page.button and not page.markdown and not page.caption


@pytest.mark.parametrize(
    "field", [{"plan_jobs": []}, {"study_jobs": {}}, {"launch_jobs": []}], ids=["plans", "study", "launch"]
)
@pytest.mark.clock
def test_a_job_is_shown_with_its_time_left_and_stopped_in_two_seconds(page, job, field):
    ((name, empty),) = field.items()
    page.session_state[name] = {"count": job.id} if isinstance(empty, dict) else [job.id]
    until(lambda: (job.progress or Progress(time=0)).done)
    until(lambda: len(job.history) > 2)
    page.run()
    (text,) = texts(page)
    assert text.startswith("**count**") and "left" in text
    begin = time.monotonic()
    page.button[0].click().run()
    assert runner.wait(job, 5) is State.CANCELLED and time.monotonic() - begin < 2.0
    page.run()
    assert not page.get("progress") and not page.button


def test_a_study_that_another_of_its_kind_follows_stays_in_sight(own_data_folder, job):
    page = AppTest.from_string(
        PAGE.replace(
            "running.show()", f"[state.set_study_job('sweep', id) for id in ('{job.id}', 'gone')]; running.show()"
        )
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


def test_a_job_that_is_gone_is_passed_over(page, own_data_folder):
    page.session_state["plan_jobs"] = ["20250102T030405000006-0123abcd"]
    page.run()
    assert not page.exception and not page.get("progress")
