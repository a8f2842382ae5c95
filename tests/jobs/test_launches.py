"""Launches as jobs: their notes for lists, and a scheduler's job as one of this machine."""

import json
import threading
import time
from pathlib import Path

import pytest

from engine import store
from engine.errors import InputError
from engine.jobs import launches
from engine.jobs.launches import BRIEF, Brief, brief_of
from engine.jobs.protocol import REQUEST, Context, Request
from engine.jobs.runner import Job
from engine.launch.preparation.launch import Launch
from engine.launch.rank.failure import log_tail, standing
from engine.launch.rank.instructions import BEGINS, COMPARED, PROGRESS
from engine.launch.results.run import Run
from engine.launch.running import clusters, local
from engine.launch.running.clusters import Status
from engine.launch.running.local import run_on_cluster
from engine.result import never
from tests.cases.cluster_launches import destination, launch_for
from tests.cases.launched import request_of, simulated
from tests.cases.launches import MODEL, plan_for, recording
from tests.jobs.asking import in_json
from tests.launch.cluster_fakes import install_slurm

TRACE = recording()
PLANS = tuple(plan_for(TRACE, mode) for mode in ("matched", "concurrent"))
HANDLE = "slurm://switchyard/4242"


@pytest.fixture
def job(tmp_path) -> Job:
    store.save_workload(TRACE)
    return request_of(Launch(PLANS, TRACE, MODEL, ranks=2, repeats=2), tmp_path)


def test_a_launch_notes_what_a_list_tells_of_it_before_and_after(job, monkeypatch):
    before = []

    def run(launch, *_) -> Run:
        before.append(brief_of(job))
        return simulated(launch, 1.5)

    monkeypatch.setattr(launches, "run", run)
    assert brief_of(job) == Brief(plans=("matched", "concurrent"), on="local", ranks=2)
    result = in_json(launches.launch)(job.request.arguments, Context(job.folder))
    assert before == [Brief(plans=("matched", "concurrent"), on="local", ranks=2, tokens=TRACE.tokens)]
    after = brief_of(job)
    assert after.predicted == tuple(run["predicted_seconds"] for run in result["runs"]) and min(after.predicted) > 0
    assert after.measured == pytest.approx([1.5 * after.predicted[0], 1.65 * after.predicted[1]])
    assert result["preference"]["order"] in ([0, 1], [1, 0])
    assert json.loads(json.dumps(result)) == result


def test_a_launch_is_timed_in_three_parts_by_which_the_next_one_says_how_far_it_is(job, monkeypatch, tmp_path):
    clock = iter([0.0, 10.0, 30.0, 40.0, *map(float, range(100, 200))])
    monkeypatch.setattr(launches.time, "monotonic", lambda: next(clock))

    def run(launch, folder, stop, report) -> Run:
        for done in (0.01, BEGINS, 0.45, COMPARED[False], 0.925):
            report(done, f"at {done}", None, None)
        return simulated(launch, 1.5)

    monkeypatch.setattr(launches, "run", run)
    in_json(launches.launch)(job.request.arguments, Context(job.folder))
    took = brief_of(job).took
    assert (took.start, took.passes, took.check) == (10.0, 20.0, 10.0) and took.work.turns == 3
    assert {progress.expected for progress in job.history} == {None}, "nothing was known of this machine"
    again = request_of(Launch(PLANS, TRACE, MODEL, ranks=2, repeats=5), tmp_path)
    in_json(launches.launch)(again.request.arguments, Context(again.folder))
    assert {progress.expected for progress in again.history} == {60.0}, "twice as many passes"
    assert [progress.done for progress in again.history] == pytest.approx([0, 1 / 30, 1 / 6, 0.5, 5 / 6, 11 / 12])


@pytest.mark.parametrize("brief", [None, "{", "null"])
def test_a_launch_is_listed_by_what_was_asked_for_unless_that_is_of_another_version(job, brief):
    if brief is not None:
        (job.folder / BRIEF).write_text(brief)
    assert brief_of(job).plans == tuple(plan.name for plan in PLANS) and brief_of(job).ranks == 2
    request = Request(kind="launch", arguments={"plan": {}, "ranks": 2}, created=1.0)
    (job.folder / REQUEST).write_text(request.to_json())
    assert brief_of(job) is None


# By a scheduler.
@pytest.fixture
def on_slurm(tmp_path, monkeypatch):
    """A launch on a stand-in of Slurm, asked twenty times a second; return launch, destination and the folder of its state."""
    state = install_slurm(tmp_path, monkeypatch)
    (state / "queue").write_text("PENDING Resources")
    (shared := tmp_path / "shared").mkdir()
    monkeypatch.setattr(local, "POLL", 0.05)
    where = destination("slurm", shared, gpus=0)
    return launch_for(where), where, state


def print_progress(shared: str, node: int, done: float, message: str) -> None:
    (folder,) = Path(shared).glob("run-*")
    with (folder / f"slurm-4242-switchyard-{node}.out").open("a") as file:
        file.write(f"[default0]:{PROGRESS}{json.dumps({'done': done, 'message': message})}\n{PROGRESS}torn\n")


def test_a_scheduled_launch_is_watched_to_its_end_and_its_results_are_read(on_slurm, tmp_path, monkeypatch):
    launch, where, state = on_slurm
    monkeypatch.setattr(clusters, "collect", lambda folder: simulated(launch, 2.0))
    reports: list[tuple] = []

    def report(done, message, *_) -> None:
        reports.append((done, message))
        if message == f"{HANDLE} is pending (Resources)":
            print_progress(where.shared, 0, 0.25, "pass 1 of 2")
            print_progress(where.shared, 1, 0.2, "warm-up")
            (state / "queue").write_text("RUNNING")
        elif message == f"{HANDLE} is running, pass 1 of 2":
            (state / "queue").write_text("COMPLETED\nCOMPLETED\n")

    seen = tmp_path / "seen"
    assert run_on_cluster(launch, seen, never, report).runs[0].plan == launch.plans[0]
    assert reports[0] == (0.0, "writing the run folder") and (0.25, f"{HANDLE} is running, pass 1 of 2") in reports
    assert [step.message for step in standing(seen).steps] == ["pass 1 of 2", "warm-up"]
    assert '"done": 0.2' in log_tail(seen, 1)


def test_a_scheduled_launch_that_fails_says_where_its_logs_are(on_slurm, tmp_path):
    launch, where, state = on_slurm
    (state / "queue").write_text("NODE_FAIL NodeDown\nCOMPLETED\n")
    words = r"failed: NODE_FAIL \(NodeDown\); its nodes have left no log in"
    with pytest.raises(InputError, match=f"{HANDLE} {words} {where.shared}/run-"):
        run_on_cluster(launch, tmp_path / "seen", never, lambda *_: None)


@pytest.mark.clock
def test_a_stop_ends_the_job_on_the_cluster_too(on_slurm, tmp_path):
    launch, _, state = on_slurm
    asked = threading.Event()

    def report(done, message, *_) -> None:
        if "pending" in message:
            asked.set()

    begun = time.monotonic()
    with pytest.raises(InputError, match=f"stopped, and {HANDLE} with it"):
        run_on_cluster(launch, tmp_path / "seen", asked.is_set, report)
    assert (state / "queue").read_text().startswith("CANCELLED") and time.monotonic() - begun < 20


def test_a_scheduler_that_does_not_answer_for_a_while_is_asked_again(on_slurm, tmp_path, monkeypatch):
    launch, _, _ = on_slurm
    monkeypatch.setattr(clusters, "collect", lambda folder: simulated(launch, 2.0))
    answers = [InputError("no route"), InputError("no route"), Status("succeeded", "", True)]

    def status(handle: str) -> Status:
        answer = answers.pop(0)
        if isinstance(answer, InputError):
            raise answer
        return answer

    monkeypatch.setattr(clusters, "status", status)
    reports: list[str] = []
    run_on_cluster(launch, tmp_path / "seen", never, lambda done, message, *_: reports.append(message))
    assert reports[-2:] == [f"{HANDLE}: no answer (no route)"] * 2 and not answers
    monkeypatch.setattr(local, "PATIENCE", 0.0)
    answers[:] = [InputError("no route")] * 3
    with pytest.raises(InputError, match=r"may still run.*no route; later.*engine collect .*/run-"):
        run_on_cluster(launch, tmp_path / "again", never, lambda *_: None)
    assert len(answers) == 2
