"""How much longer a job says that it takes."""

import os
import time
from pathlib import Path

import pytest

from engine.jobs import protocol
from engine.jobs.protocol import Progress, append_progress, write_pid
from engine.jobs.runner import Job
from engine.jobs.runtimes import seconds_left
from tests.jobs.test_jobs import by_hand


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job on which this process works."""
    job = by_hand(tmp_path)
    write_pid(job.folder, os.getpid())
    return job


def report(job: Job, ago: float, done: float | None, expected: float | None = None) -> None:
    append_progress(job.folder, Progress(time=time.time() - ago, done=done, expected=expected))


def test_nothing_is_said_before_anything_is_done(job):
    assert seconds_left(job) is None
    report(job, 1.0, 0.0)
    assert seconds_left(job) is None
    report(job, 0.5, None)
    assert seconds_left(job) is None


def test_it_goes_on_as_it_went(job):
    report(job, 40.0, 0.2)
    report(job, 10.0, 0.6)
    assert seconds_left(job) == pytest.approx(30.0 / 0.4 * 0.4 - 10.0, abs=1.0)


def test_what_takes_longer_than_that_is_none_too_early(job):
    report(job, 100.0, 0.0)
    report(job, 90.0, 0.5)
    assert seconds_left(job) == 0.0


def test_what_is_expected_counts_until_the_job_shows_its_own_pace(job):
    report(job, 5.0, 0.0, expected=60.0)
    assert seconds_left(job) == pytest.approx(55.0, abs=1.0)
    report(job, 0.0, 0.9, expected=60.0)
    # Nine tenths in 5 s: what is left is hardly more than half a second, whatever was expected.
    assert seconds_left(job) == pytest.approx(0.1 * (0.1 * 60 + 5), abs=0.2)


def test_a_job_that_is_stopped_or_has_ended_says_nothing(job):
    report(job, 10.0, 0.0)
    report(job, 5.0, 0.5)
    (job.folder / protocol.CANCELLED).touch()
    assert seconds_left(job) is None
    (job.folder / protocol.PID).unlink()
    assert seconds_left(job) is None


def test_a_report_of_a_version_that_expected_nothing_is_read(job):
    (job.folder / protocol.PROGRESS).write_text('{"time": 1.0, "done": 0.25, "message": "layer 3"}\n')
    assert job.progress.done == 0.25 and job.progress.expected is None
