"""Jobs in line, first come, first served, from any studio and through any death; and the time that a job has left."""

import importlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.jobs import protocol, queue, runner
from engine.jobs.protocol import Progress, append_progress, write_pid
from engine.jobs.runner import Job, State
from engine.jobs.runtimes import seconds_left
from tests.cases.jobs import LONG, WORKER, by_hand, in_another_process, until


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(queue.JOBS, "1")


def running(job: Job) -> bool:
    return job.state is State.RUNNING and job.progress is not None


def waiting(*jobs: Job) -> bool:
    return all(job.state is State.WAITING for job in jobs)


def test_jobs_wait_their_turn_in_the_order_in_which_they_came_but_not_for_one_that_watches_work_elsewhere(start, warm_python):
    watching = start("count", LONG, queued=False)
    until(lambda: running(watching))
    first = start("count", LONG)
    until(lambda: running(first))
    others = [start("count", {"steps": 5, "pause": 0.05}) for _ in range(3)]
    until(lambda: waiting(*others))
    assert [job.ahead for job in others] == [0, 1, 2] and not any(job.progress for job in others)
    standing_in_words = importlib.import_module("app.widgets").standing_in_words  # Streamlit: half a second
    words = [standing_in_words(job, job.state) for job in (first, *others)]
    assert words == ["running", "waiting, next in line", "waiting, 1 before it", "waiting, 2 before it"]
    assert running(watching)
    runner.cancel(first)
    assert {runner.wait(job, 60) for job in others} == {State.DONE}
    began = [job.history[0].time for job in others]
    ended = [job.history[-1].time for job in others]
    assert began == sorted(began) and all(end < begin for end, begin in zip(ended, began[1:], strict=False))
    assert list((first.folder.parent.parent / "queue" / "places").iterdir()) == []


@pytest.mark.clock
def test_as_many_run_as_the_limit_says_a_waiting_job_is_stopped_at_once_and_the_killed_keep_nobody_waiting(
    start, monkeypatch, warm_python
):
    monkeypatch.setenv(queue.JOBS, "2")
    first, second, third, fourth, fifth = (start("count", LONG) for _ in range(5))
    until(lambda: running(first) and running(second) and waiting(third, fourth, fifth))
    assert [job.ahead for job in (third, fourth, fifth)] == [0, 1, 2]
    begin = time.monotonic()
    runner.cancel(third)
    assert runner.wait(third, 3) is State.CANCELLED and time.monotonic() - begin < 2
    assert third.result is None and fifth.ahead == 1 and waiting(fourth, fifth)
    os.kill(protocol.living_worker(fourth.folder).pid, signal.SIGKILL)
    os.kill(protocol.living_worker(first.folder).pid, signal.SIGKILL)
    until(lambda: running(fifth) and fourth.state.finished)
    assert fourth.error == "the worker was killed by signal 9" and running(second)


def test_studios_on_one_data_folder_share_the_limit_and_the_queue_outlives_them(start, tmp_path):
    mine = start("count", LONG)
    until(lambda: running(mine))
    code = (
        "import os, sys; from pathlib import Path; from engine.jobs import runner\n"
        "print(runner.start('count', {'steps': 3, 'pause': 0}, Path(sys.argv[1]), module=sys.argv[2]).id, flush=True)\n"
        "os._exit(0)"
    )
    theirs = runner.find(in_another_process(code, tmp_path, WORKER), tmp_path)
    until(lambda: waiting(theirs))
    after = start("count", {"steps": 3, "pause": 0})
    until(lambda: waiting(after))
    assert (theirs.ahead, after.ahead) == (0, 1)
    runner.cancel(mine)
    assert runner.wait(theirs, 60) is State.DONE and runner.wait(after, 60) is State.DONE
    assert mine.history[-1].time < theirs.history[0].time < after.history[0].time


def test_a_studio_that_starts_goes_on_with_the_queue_of_one_that_went_down(tmp_path):
    """As a container does that is started again: no process of before is left, and no studio noted its end."""
    waited, cancelled, begun = (by_hand_in_queue(tmp_path, number) for number in "345")
    (cancelled.folder / protocol.CANCELLED).touch()
    queue.leave(begun.folder)
    (waited.folder / protocol.REQUEST).write_text(
        waited.request.model_copy(update={"arguments": {"steps": 2, "pause": 0}}).to_json()
    )
    assert [job.state for job in (waited, cancelled, begun)] == [State.FAILED, State.CANCELLED, State.FAILED]
    assert runner.resume(tmp_path, module=WORKER) == [waited]
    assert runner.resume(tmp_path, module=WORKER) == []
    assert runner.wait(waited, 60) is State.DONE and waited.result["reached"] == 2
    assert (begun.state, begun.error) == (State.FAILED, "the process is gone")


def by_hand_in_queue(root: Path, number: str) -> Job:
    job = by_hand(root)
    folder = job.folder.with_name(job.id.replace("20250102", f"2025010{number}"))
    job.folder.rename(folder)
    (folder / protocol.PID).write_text(json.dumps({"pid": 2**22 + 1, "start": 0.0}))
    queue.join(folder)
    return Job(folder.name, folder)


def test_a_job_of_another_machine_is_seen_by_its_lock_and_stopped_by_its_marker(start, monkeypatch):
    job = start("count", LONG)
    until(lambda: running(job))
    runner._unreaped.discard(job.folder)
    monkeypatch.setattr(protocol, "_machine", lambda: "another")
    assert protocol.living_worker(job.folder) is None and job.state is State.RUNNING
    (job.folder / protocol.CANCELLED).touch()
    assert job.state is State.CANCELLING
    assert runner.wait(job, 3) is State.CANCELLED and job.result["returned"]


def test_a_limit_that_is_none_is_said_by_the_job(start, monkeypatch, warm_python):
    for wrong in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv(queue.JOBS, wrong)
        with pytest.raises(InputError, match=f"SWITCHYARD_JOBS is '{wrong}'"):
            queue.limit()
    job = start("count", LONG)
    assert runner.wait(job, 60) is State.FAILED and "SWITCHYARD_JOBS is '1.5'" in job.error
    monkeypatch.delenv(queue.JOBS)
    assert queue.limit() == len(os.sched_getaffinity(0))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = by_hand(tmp_path)
    write_pid(job.folder, os.getpid())
    return job


def report(job: Job, ago: float, done: float | None, expected: float | None = None) -> None:
    append_progress(job.folder, Progress(time=time.time() - ago, done=done, expected=expected))


@pytest.mark.parametrize(
    ("reports", "left", "off"),
    [
        ([], None, 0),
        ([(1.0, 0.0)], None, 0),
        ([(1.0, 0.0), (0.5, None)], None, 0),  # nothing is done yet
        ([(40.0, 0.2), (10.0, 0.6)], 30.0 / 0.4 * 0.4 - 10.0, 1.0),  # it goes on as it went
        ([(100.0, 0.0), (90.0, 0.5)], 0.0, 0),  # it takes longer than that
        ([(5.0, 0.0, 60.0)], 55.0, 1.0),
        # Nine tenths in 5 s: hardly more than half a second is left, whatever was expected.
        ([(5.0, 0.0, 60.0), (0.0, 0.9, 60.0)], 0.1 * (0.1 * 60 + 5), 0.2),
    ],
)
def test_what_is_expected_counts_until_the_job_shows_its_own_pace(job, reports, left, off):
    for ago, *said in reports:
        report(job, ago, *said)
    assert seconds_left(job) == (left if left is None else pytest.approx(left, abs=off))


def test_a_job_that_is_stopped_or_has_ended_says_nothing(job):
    report(job, 10.0, 0.0)
    report(job, 5.0, 0.5)
    assert seconds_left(job) is not None
    (job.folder / protocol.CANCELLED).touch()
    assert seconds_left(job) is None
    (job.folder / protocol.PID).unlink()
    assert seconds_left(job) is None


def test_a_report_of_a_version_that_expected_nothing_is_read(job):
    (job.folder / protocol.PROGRESS).write_text('{"time": 1.0, "done": 0.25, "message": "layer 3"}\n')
    assert job.progress.done == 0.25 and job.progress.expected is None
