"""Jobs as real processes: the view of a page while they run, fail, are cancelled, or outlive the server."""

import errno
import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from engine.compare.comparison import Candidate
from engine.errors import InputError
from engine.files import write_atomically
from engine.jobs import protocol, queue, runner
from engine.jobs.protocol import Context, Progress
from engine.jobs.runner import State
from engine.jobs.tasks import OptimiseAnswer
from engine.plan import Plan
from tests.cases.jobs import ID, LONG, WORKER, by_hand, in_another_process, until
from tests.cases.teams import plan_of
from tests.jobs.handlers import LooseAnswer


def test_progress_and_the_best_so_far_are_seen_while_running_and_the_result_at_the_end(start):
    job = start("count", {"steps": 8, "pause": 0.2})  # long enough to be looked at on a busy machine
    seen = until(lambda: job.progress)
    assert job.state is State.RUNNING and job.finished is None and job.error is None
    assert 0 < seen.done < 1 and seen.message.startswith("step") and seen.bound is None
    assert 1 <= job.result["reached"] < 8
    assert runner.wait(job, 60) is State.DONE
    assert job.result == {"reached": 8, "returned": True}
    assert [report.incumbent for report in job.history] == list(range(1, 9)) and job.progress.done == 1
    assert job.started < job.finished <= time.time() and job.elapsed == job.finished - job.started > 0.8
    assert not psutil.pid_exists(json.loads((job.folder / "pid").read_text())["pid"])


def test_what_is_handed_over_is_in_no_file(start, tmp_path, warm_python):
    secret = b"nobody else's " * 100_000  # more than a pipe holds
    job, plain = start("take", {"steps": 1}, handed=secret), start("take", {"steps": 1})
    assert runner.wait(job, 60) is runner.wait(plain, 60) is State.DONE
    assert job.result["handed"] == len(secret) and plain.result["handed"] == 0
    assert not any(b"nobody else's" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_bad_input_and_a_bug_are_failures_with_a_reason(start, warm_python):
    refused, crashed, unknown = start("refuse"), start("crash"), start("dance")
    assert {runner.wait(job, 60) for job in (refused, crashed, unknown)} == {State.FAILED}
    assert refused.error == "load.csv, line 3: expert 9 of 8" and "Traceback" not in refused.log_tail()
    assert crashed.error == "KeyError: 'missing'" and crashed.log_tail(1) == "KeyError: 'missing'"
    assert crashed.log_tail().startswith("before the bug\nTraceback") and crashed.result is None
    assert "no job is of the kind 'dance'" in unknown.error


def test_a_worker_that_ends_without_a_word_or_is_killed_has_failed_with_its_descendants_gone_and_its_best_kept(start):
    left, job = start("leave"), start("cling")
    assert runner.wait(left, 60) is State.FAILED and left.error == "the worker ended with exit code 3"
    descendants = [psutil.Process(int(pid)) for pid in until(lambda: job.progress).message.split()]
    os.kill(protocol.living_worker(job.folder).pid, signal.SIGKILL)
    assert runner.wait(job, 5) is State.FAILED
    assert job.error == "the worker was killed by signal 9" and job.result == {"reached": 1}
    assert not any(map(protocol.is_alive, descendants))


@pytest.mark.clock
def test_cancel_stops_a_cooperative_worker_and_a_polite_signal_from_outside_counts_as_one(start):
    jobs = [start("count", LONG) for _ in range(2)]
    until(lambda: all(job.progress for job in jobs))
    before = time.monotonic()
    runner.cancel(jobs[0])
    protocol.living_worker(jobs[1].folder).terminate()
    assert jobs[0].state in (State.CANCELLING, State.CANCELLED)
    assert {runner.wait(job, 5) for job in jobs} == {State.CANCELLED}
    assert time.monotonic() - before < 2
    assert all(job.result["returned"] and job.result["reached"] >= 1 and job.error is None for job in jobs)


@pytest.mark.clock
def test_cancel_stops_a_worker_that_ignores_it_and_descendants_in_other_sessions(start):
    job = start("cling")
    descendants = [psutil.Process(int(pid)) for pid in until(lambda: job.progress).message.split()]
    before = time.monotonic()
    runner.cancel(job)
    assert time.monotonic() - before < 0.5
    assert job.state is State.CANCELLING and all(map(protocol.is_alive, descendants))
    with pytest.raises(InputError, match="still cancelling"):
        runner.remove(job)
    assert runner.wait(job, 5) is State.CANCELLED
    until(lambda: not any(map(protocol.is_alive, descendants)), timeout=1)
    assert time.monotonic() - before < 2
    assert job.result == {"reached": 1}


def test_cancel_before_the_worker_is_up_and_after_the_end_and_what_has_ended_can_be_removed(start, tmp_path):
    done, early = start("count", {"steps": 1, "pause": 0}), start("count", LONG)
    with pytest.raises(InputError, match="cancel it first"):
        runner.remove(early)
    runner.cancel(early)
    assert runner.wait(early, 5) is State.CANCELLED and early.result is None
    assert runner.wait(done, 60) is State.DONE
    runner.cancel(done)
    assert done.state is State.DONE
    runner.remove(early)
    assert runner.jobs(tmp_path) == [done]
    with pytest.raises(InputError, match="there is no job"):
        runner.find(early.id, tmp_path)


def test_a_job_outlives_the_server_that_started_it(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from engine.jobs import runner\n"
        "for pause in (0.05, 10):\n"
        "    job = runner.start('count', {'steps': 30, 'pause': pause}, Path(sys.argv[1]), module=sys.argv[2])\n"
        "    print(job.id, flush=True)\n"
        "os._exit(0)"
    )
    first, second = (runner.find(id, tmp_path) for id in in_another_process(code, tmp_path, WORKER).split())
    assert first.state is State.RUNNING
    assert [job.id for job in runner.jobs(tmp_path)] == [second.id, first.id]
    assert runner.jobs(tmp_path, kind="count") and not runner.jobs(tmp_path, kind="launch")
    until(lambda: second.progress)
    protocol.living_worker(second.folder).kill()
    assert runner.wait(second, 5) is State.FAILED and second.error == "the process is gone"
    assert runner.wait(first, 60) is State.DONE and first.result["reached"] == 30


def test_a_recycled_process_id_is_not_taken_for_the_worker(tmp_path):
    job = by_hand(tmp_path)
    protocol.write_pid(job.folder, os.getpid())
    assert job.state is State.RUNNING
    identity = json.loads((job.folder / "pid").read_text())
    (job.folder / "pid").write_text(json.dumps(identity | {"start": identity["start"] - 60}))
    assert job.state is State.FAILED and job.error == "the process is gone"
    runner.cancel(job)
    assert job.state is State.FAILED


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_leaves_no_job_starting(tmp_path, monkeypatch, hours):
    job = by_hand(tmp_path)
    queue.join(job.folder)
    later = job.folder.with_name(f"2026{job.id[4:]}")
    assert job.state is State.STARTING and queue.ahead_of(later) == 1
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600 * hours)
    assert job.state is State.FAILED and job.error == "the process is gone" and queue.ahead_of(later) == 0


def test_torn_lines_of_progress_are_passed_over(tmp_path):
    assert protocol.read_progress(tmp_path) == [] and protocol.latest_progress(tmp_path) is None
    reports = [Progress(time=float(i), message="ü" * i) for i in range(3)]
    for report in reports:
        protocol.append_progress(tmp_path, report)
    with (tmp_path / protocol.PROGRESS).open("ab") as file:
        file.write('{"time": 3, "message": "ü'.encode()[:-1])
    assert protocol.read_progress(tmp_path) == reports and protocol.latest_progress(tmp_path) == reports[-1]


def test_lines_of_many_threads_do_not_mix_and_none_overwrites_the_final_result(tmp_path):
    context = Context(tmp_path)
    threads = [threading.Thread(target=lambda: [context.report(7, "x" * 5000) for _ in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(protocol.read_progress(tmp_path)) == 160 and protocol.latest_progress(tmp_path).done == 1
    context.finish(LooseAnswer(best=1))
    context.keep(LooseAnswer(best=2))  # by a thread that was left behind
    assert protocol.read_result(tmp_path) == {"best": 1}


def test_rows_are_put_into_words_once_and_come_back_as_they_are(tmp_path, monkeypatch):
    dumped, dump = [], Plan.model_dump
    monkeypatch.setattr(Plan, "model_dump", lambda plan, **how: dumped.append(plan.name) or dump(plan, **how))
    context, answer = Context(tmp_path), OptimiseAnswer(refused={"Aurora": "no"})
    for name, runtime in (("one", 1.5), ("two", math.nan), ("three", math.inf)):
        row = Candidate(plan=plan_of(name), status="feasible", runtime=runtime, notes={})
        answer = answer.model_copy(update={"candidates": (*answer.candidates, row)})
        context.keep(answer)
    assert dumped == ["one", "two", "three"]
    kept, whole = protocol.read_result(tmp_path), answer.model_dump(mode="json")
    assert repr(sorted(kept.items())) == repr(sorted(whole.items())), "as text, for NaN is not equal to itself"


def test_one_damaged_folder_does_not_hide_the_other_jobs(tmp_path):
    job = by_hand(tmp_path)
    for name, text in ((ID.replace("1", "2"), "{"), (ID.replace("1", "3"), None), ("notes", None)):
        (tmp_path / "jobs" / name).mkdir()
        if text:
            (tmp_path / "jobs" / name / protocol.REQUEST).write_text(text)
    assert runner.jobs(tmp_path) == runner.jobs(tmp_path, "count") == [job] == [runner.find(ID, tmp_path)]
    unread = [folder.id for folder in runner.folders(tmp_path)]
    assert unread == sorted([ID, ID.replace("1", "2"), ID.replace("1", "3")], reverse=True), "the newest first"
    assert runner.folders(tmp_path / "nowhere") == []


DAMAGED = [
    *(b"", b"{", b"null", b"[]", b'"x', b"\xff\xfe", b"1e999", b"[" * 100_000),
    *(b'{"pid": "x"}', b'{"pid": -1, "start": 0}'),
]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: ascii(content[:12]))
def test_a_damaged_file_is_no_surprise(tmp_path, content):
    for name in (protocol.PID, protocol.EXIT, protocol.ERROR, protocol.RESULT, protocol.PROGRESS, protocol.REQUEST):
        job = by_hand(tmp_path / name)
        (job.folder / protocol.PID).write_text(json.dumps({"pid": 2**22 + 1, "start": 0.0}))
        (job.folder / name).write_bytes(content)
        assert job.state is State.FAILED and job.error and "\n" not in job.error
        assert job.finished and job.progress is None and job.history == []
        if name == protocol.RESULT and not content.startswith(b'{"'):
            with pytest.raises(InputError, match="damaged"):
                _ = job.result
        if name == protocol.REQUEST:
            with pytest.raises(InputError, match=protocol.REQUEST):
                runner.find(ID, tmp_path / name)
        assert runner.jobs(tmp_path / name) == ([] if name == protocol.REQUEST else [job])
        runner.cancel(job)


def test_a_worker_whose_note_is_damaged_counts_as_living_and_can_be_stopped(start):
    job = start("count", LONG)
    until(lambda: job.progress)
    runner._unreaped.discard(job.folder)
    (job.folder / protocol.PID).write_text("{")
    assert job.state is State.RUNNING
    runner.cancel(job)
    assert runner.wait(job, 5) is State.CANCELLED and job.result["returned"]


@pytest.mark.parametrize("id", ["", "..", "../x", f"{ID}/..", f"{ID}\n", ID.upper(), ID.replace("1", "2")])
def test_ids_that_are_not_ids_find_nothing(tmp_path, id):
    by_hand(tmp_path)
    with pytest.raises(InputError, match="there is no job"):
        runner.find(id, tmp_path)


@pytest.mark.parametrize("moment", [runner, protocol], ids=["before the process", "after the process"])
def test_a_full_disk_is_bad_input_and_leaves_nothing_behind(tmp_path, monkeypatch, moment):
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = set(psutil.Process().children())
    monkeypatch.setattr(moment, "write_atomically", full)
    with pytest.raises(InputError, match="No space left on device"):
        runner.start("count", LONG, tmp_path, module=WORKER)
    assert list((tmp_path / "jobs").iterdir()) == [] and not runner._unreaped
    assert set(psutil.Process().children()) <= before


def test_a_place_that_cannot_be_written_is_bad_input_and_work_goes_on_when_its_progress_finds_the_disk_full(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be started"):
        runner.start("count", LONG, tmp_path / "file")
    (tmp_path / protocol.PROGRESS).symlink_to("/dev/full")
    Context(tmp_path).report(0.5, "half")


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path):
    write_atomically(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "new \ud800")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
