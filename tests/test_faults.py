"""Every write fails in turn, and every moment is the last one before a kill or a power cut: everything reported as saved
is there afterwards, and nothing is half there."""

import os
import shutil
import signal
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import streamlit as st

from app import state
from app.state import address
from app.state.stored import Session, read
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.errors import InputError
from engine.jobs import protocol, queue, runner
from engine.jobs.protocol import Context
from engine.jobs.runner import Job, State
from engine.jobs.worker import run
from engine.launch.rank.failure import RankLogs, RankProgress, log_tail, standing
from engine.launch.rank.instructions import RankInstructions, read_instructions, write_instructions
from engine.store import team
from engine.store.database import Database
from engine.workload import RoutingTrace
from tests.cases.sessions import Fields
from tests.cases.teams import plan_of
from tests.faults import ENDS, REFUSALS, How, failing
from tests.jobs.handlers import LooseAnswer

TOKEN = "of-a-test"
CLUSTER, MODEL = cluster_presets()["mixed-8"].cluster, model_presets()["Mixtral-8x7B"].model
TRACE = RoutingTrace("a trace", np.random.default_rng(5).integers(0, 6, (20, 3, 2), dtype=np.int16), 6)

Said = list[Callable[[], None]]
"""Checks of everything that was reported as saved."""


def at_every_point(root: Path, how: How, work: Callable[[Said], None], look: Callable[[], None]) -> None:
    """Let `work` meet a disk that fails at its first point, at its second and so on, each time in an empty folder; then check
    that everything reported as saved is there and that all files are whole."""
    at, failed = 0, True
    while failed:
        at += 1
        shutil.rmtree(root, ignore_errors=True)
        said: Said = []
        with failing(root, how, at) as disk:
            try:
                work(said)
            except (InputError, OSError):
                assert how in REFUSALS
        failed = disk.failed
        assert all(is_kept() for is_kept in said)
        look()
    assert at > 1, "there was no point at all"


every_way = pytest.mark.parametrize("how", [*REFUSALS, *ENDS])


@every_way
def test_recordings_and_documents_are_there_or_not(how: How, own_data_folder: Path) -> None:
    config = own_data_folder.with_name("config.json")
    config.write_text('{"model_type": "mixtral"}')

    def work(said: Said) -> None:
        digest = store.save_workload(TRACE)
        said.append(lambda: np.array_equal(store.load_workload(digest).experts, TRACE.experts))
        store.save_document(CLUSTER)
        said.append(lambda: store.load_document(type(CLUSTER), CLUSTER.digest) == CLUSTER)
        kept = store.save_config(config)
        said.append(lambda: store.config_path(kept).read_text() == config.read_text())

    def look() -> None:
        if store.has_workload(TRACE.digest):
            store.load_workload(TRACE.digest)
        if (own_data_folder / "documents" / f"{CLUSTER.digest}.json").exists():
            store.load_document(type(CLUSTER), CLUSTER.digest)
        for path in (own_data_folder / "configs").glob("[!.]*"):
            assert path.read_text() == config.read_text()
        assert store.save_workload(TRACE) == TRACE.digest  # and the failed step can be done again

    at_every_point(own_data_folder, how, work, look)


@every_way
def test_a_session_is_as_it_was_stored_last_or_is_just_being_stored(how: How, own_data_folder: Path, monkeypatch) -> None:
    """No change of a session fails where it is made; a tab knows whether the last one was stored."""
    latest: list[tuple[int, int]] = []  # the change that was said to be stored last, and the one that was made last

    def work(said: Said) -> None:
        latest[:] = [(0, 0)]
        monkeypatch.setattr(st, "session_state", Fields())
        address.begin(TOKEN, Session())
        for number in (1, 2, 3):
            latest[:] = [(latest[0][0], number)]
            state.keep_choice("what-if-noise", number)
            assert state.session.choices.get("what-if-noise") == number
            assert not state.visit.overtaken
            if state.visit.not_stored is None:
                latest[:] = [(number, number)]

    def look() -> None:
        stored, made = latest[0]
        assert stored <= _stored() <= made
        text = store.load_session(TOKEN)
        assert text is None or read(text)[1] is None
        if how in REFUSALS:  # once there is room again, the way out works
            state.store_again()
            assert state.visit.not_stored is None and not state.visit.overtaken and _stored() == made

    at_every_point(own_data_folder, how, work, look)


def _stored() -> int:
    """The change that the data folder has."""
    text = store.load_session(TOKEN)
    return 0 if text is None else read(text)[0].choices["what-if-noise"]


@every_way
def test_what_a_job_kept_and_finished_outlives_everything(how: How, own_data_folder: Path, monkeypatch) -> None:
    root = own_data_folder
    # A worker that has come to its end already; 4194305 is nobody's process id.
    gone = SimpleNamespace(pid=4194305, wait=lambda: 0, kill=lambda: 0)
    monkeypatch.setattr(runner.workers, "start", lambda module, folder, handed: gone)
    monkeypatch.setattr(runner.threading, "Thread", lambda target, args, **_: SimpleNamespace(start=lambda: target(*args)))
    monkeypatch.setattr(runner, "kill", lambda *_: None)
    monkeypatch.setattr(queue, "STARTING_LIMIT", 0)
    reached_by = {"kept": 0, "finished": False}

    def work(said: Said) -> None:
        reached_by.update(kept=0, finished=False)
        job = runner.start("count", {"steps": 3}, root)
        said.append(lambda: job.request.arguments == {"steps": 3})
        context = Context(job.folder)
        for reached in (1, 2, 3):
            context.report(reached / 3, f"step {reached}")
            context.keep(LooseAnswer(reached=reached))
            reached_by["kept"] = reached
        context.finish(LooseAnswer(reached=4))
        reached_by["finished"] = True

    def look() -> None:
        assert not runner._unreaped
        assert reached_by["kept"] == 0 or len(runner.jobs(root)) == 1
        for job in runner.jobs(root):
            reached = (job.result or {"reached": 0})["reached"]
            assert reached_by["kept"] <= reached <= reached_by["kept"] + 1
            assert job.state is State.DONE if reached_by["finished"] else job.state.finished
            assert reached == 4 or job.state is State.FAILED
            assert job.state is State.DONE or job.error
            assert job.elapsed >= 0 and len(job.history) <= 3
        queue.everybody(root / "jobs")

    at_every_point(root, how, work, look)


@pytest.mark.parametrize("how", [ENDS[0], *(pytest.param(how, marks=pytest.mark.everything) for how in ENDS[1:])])
def test_a_worker_that_is_killed_at_any_step_has_ended_with_its_best(how: How, tmp_path: Path, monkeypatch) -> None:
    """Real processes, ended by SIGKILL from within."""
    monkeypatch.setattr(queue, "STARTING_LIMIT", 0)
    at, code = 0, -signal.SIGKILL
    while code:
        at += 1
        id = f"20250102T030405{at:06d}-0123abcd"
        job = Job(id, tmp_path / "jobs" / id)
        job.folder.mkdir(parents=True)
        request = protocol.Request(kind="count", arguments={"steps": 1, "pause": 0}, created=1.0)
        (job.folder / protocol.REQUEST).write_text(request.to_json())
        queue.join(job.folder)
        code = _in_a_child(lambda job=job, at=at: _work_until(job.folder, tmp_path, how, at))
        result, end = job.result, job.state
        assert code in (0, -signal.SIGKILL) and at < 200
        assert end is (State.FAILED if code else State.DONE) or (end is State.DONE and result["returned"])
        assert result is None or result["reached"] == 1
        assert end is State.DONE or job.error == "the process is gone"
        assert end is not State.DONE or result == {"reached": 1, "returned": True}
        assert runner.find(job.id, tmp_path) == job and job in runner.jobs(tmp_path, "count")
    assert at > 1 and queue._free_slot(tmp_path / "jobs") is not None  # whoever was killed holds no place


def _work_until(folder: Path, root: Path, how: How, at: int) -> int:
    with failing(root, how, at, end=lambda: os.kill(os.getpid(), signal.SIGKILL)):
        return run(folder, {"count": "tests.jobs.handlers:count"})


def _in_a_child(work: Callable[[], int]) -> int:
    """The exit code of a forked process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks while threads run: the child only writes files
        child = os.fork()
    if child == 0:
        code = 70
        try:
            code = work()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@every_way
def test_the_bookkeeping_of_a_launch_can_be_read_at_any_moment(how: How, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    plan = plan_of()
    instructions = RankInstructions(plans=(plan,), model=MODEL, ranks=2, backend="gloo")

    def work(said: Said) -> None:
        write_instructions(folder, instructions, [TRACE])
        said.append(lambda: read_instructions(folder)[0] == instructions)
        said.append(lambda: np.array_equal(read_instructions(folder)[1][0].experts, TRACE.experts))
        logs = RankLogs(folder, 2)
        for done in (0.5, 1.0):
            logs.progress(0, RankProgress(done=done, message=f"at {done}", time=0.0))
            logs.save()

    def look() -> None:
        now = standing(folder)
        assert now is None or now.steps[0].message in ("at 0.5", "at 1.0")
        assert log_tail(folder, 0) is not None

    at_every_point(folder, how, work, look)


def test_a_transaction_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    """SQLite is interrupted after its n-th instruction: the statement, the transaction and the migration are undone. At each of
    these moments its files are also opened as a kill would leave them."""
    stride, at, interrupted, made = 16, 0, True, tmp_path / "made.db"
    room = team.add_workspace(db := Database(f"sqlite:///{made}"), "a room", "Ana").id
    db.close()
    while interrupted:
        at += 1
        path = tmp_path / f"{at}.db"
        shutil.copy(made, path)
        db = Database(f"sqlite:///{path}")
        with db._engine.connect() as connection:
            raw = connection.connection.driver_connection
        calls, interrupted = [0], False

        def interrupt(calls=calls, at=at, path=path) -> int:
            calls[0] += 1
            if calls[0] != at:
                return 0
            _looks_whole(_as_killed(path), room)
            return 1

        raw.set_progress_handler(interrupt, stride)
        said: Said = []
        try:
            saved = team.save_plan(db, room, plan_of(), "Ana")
            said.append(lambda db=db, saved=saved: team.find_saved(db, saved.number) == saved)
            review = team.open_review(db, saved.number, "Shall we?", "Ana")
            said.append(lambda db=db, review=review: team.find_review(db, review.id).question == "Shall we?")
            team.decide(db, review.id, "approved", "", "Ben", seen=0)
            said.append(lambda db=db, review=review: team.find_review(db, review.id).state == "approved")
        except InputError as error:
            assert "interrupted" in str(error)
            interrupted = True
        raw.set_progress_handler(None, 0)
        assert all(is_kept() for is_kept in said)
        _looks_whole(_as_killed(path), room)
        db.close()
    assert at > 1


def _as_killed(path: Path) -> Path:
    """A copy of the files of a database that is open."""
    copy = path.with_suffix(".copy")
    for end in ("", "-wal"):
        Path(f"{copy}{end}").unlink(missing_ok=True)
        if Path(f"{path}{end}").exists():
            shutil.copy(f"{path}{end}", f"{copy}{end}")
    return copy


def _looks_whole(path: Path, room: str) -> None:
    with sqlite3.connect(path) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
        assert connection.execute("pragma foreign_key_check").fetchall() == []
        plans, saved = (connection.execute(f"select count(*) from {table}").fetchone()[0] for table in ("plan", "saved_plan"))
        assert plans == saved
    connection.close()
