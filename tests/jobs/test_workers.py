"""The standby worker: the next job's process, with all imported that plans need, that nobody has to look after."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from engine.costs import Datasheet
from engine.formats import read_cluster, read_model, read_workload
from engine.jobs import protocol, runner, workers
from engine.jobs.protocol import Request
from engine.jobs.runner import State
from engine.problem import make_problem
from engine.store.problems import problem_arguments, save_recordings
from tests.cases.jobs import WORKER, until
from tests.cases.samples import SAMPLES
from tests.spent import loop_seconds

KEEPER = """
import sys
from engine.jobs import workers
workers.keep_standby()
print(workers._standby.pid, flush=True)
sys.stdin.read()
"""
"""A process that keeps a standby, says which, and ends when it is told to."""
FIRST_PLANS = """
import json, sys, time
from pathlib import Path
from engine.jobs import kinds, protocol, workers

folder, kept = Path(sys.argv[1]), []
workers.load(lambda: True)
there, begun = set(sys.modules), time.process_time()

class Context(protocol.Context):
    def keep(self, answer):
        kept.append((time.process_time() - begun, len(answer.candidates), sorted(set(sys.modules) - there)))

request = protocol.Request.from_json((folder / protocol.REQUEST).read_bytes(), protocol.REQUEST)
kinds.answered(kinds.handler_of(request.kind), request.arguments, Context(folder))
print(json.dumps({"kept": kept, "there": sorted(there)}))
"""
"""Does a job in a process that has loaded what a standby loads, and says for every answer that it keeps: processor seconds, how
many plans it has, and which modules were imported for it."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, keep_standby: Callable[[], None]) -> Iterator[subprocess.Popen[bytes]]:
    """A standby that does the jobs of `tests/jobs/handlers.py`, kept by this process until the end of the test."""
    monkeypatch.setattr(workers, "WORKER", WORKER)
    monkeypatch.setattr(workers, "_kept", False)
    monkeypatch.setattr(workers, "_standby", None)
    keep_standby()
    yield workers._standby
    with workers._lock:
        workers._kept, last = False, workers._standby
    if last is not None:
        last.stdin.close()
        assert last.wait(60) == 0, "it ends by itself when nobody could give it a job"


def pid_of(job: runner.Job) -> int:
    return json.loads((job.folder / protocol.PID).read_text())["pid"]


def test_the_standby_does_the_next_job_and_is_replaced_when_that_has_ended(warm_python, keep_standby, kept, start):
    keep_standby()
    assert workers._standby is kept, "harmless to repeat"
    first, second = start("count", {"steps": 3}), start("crash")
    assert {runner.wait(job, 60) for job in (first, second)} == {State.DONE, State.FAILED}
    assert pid_of(first) != pid_of(second)
    assert first.result == {"reached": 3, "returned": True} and first.log_tail() == "step 1\nstep 2\nstep 3"
    assert second.error == "KeyError: 'missing'", "the job beside it has a process of its own"
    until(lambda: kept.returncode == 0 and workers._standby)
    assert workers._standby is not kept
    third = start("crash")
    assert runner.wait(third, 60) is State.FAILED and third.log_tail().startswith("before the bug\nTraceback")


def test_a_standby_that_has_died_costs_no_job_and_another_one_comes(warm_python, kept, start):
    os.killpg(kept.pid, signal.SIGKILL)
    kept.wait()
    assert runner.wait(start("count", {"steps": 1}), 60) is State.DONE
    until(lambda: workers._standby)


@pytest.mark.clock
def test_a_job_of_the_standby_is_stopped_with_its_descendants_whatever_they_ignore(kept, start):
    job = start("cling")
    descendants = [psutil.Process(int(pid)) for pid in until(lambda: job.progress).message.split()]
    assert all(map(protocol.is_alive, descendants))
    runner.cancel(job)
    assert runner.wait(job, 2) is State.CANCELLED and job.result == {"reached": 1}
    until(lambda: not any(map(protocol.is_alive, descendants)), timeout=1)


def test_the_first_plans_of_the_sample_wait_for_no_import(tmp_path):
    model = read_model(SAMPLES / "tiny-moe-alpha.json")
    recording = read_workload(SAMPLES / "tiny-moe" / "alpha-code.npz", num_experts=model.experts)
    problem = make_problem(recording, read_cluster(SAMPLES / "mixed-8.json"), model, Datasheet())
    save_recordings(problem)
    asked = problem_arguments(problem) | {"systems": [{"name": "linear"}, {"name": "aurora"}]}
    (tmp_path / protocol.REQUEST).write_text(Request(kind="optimise", arguments=asked, created=0.0).to_json())
    command = [sys.executable, "-c", FIRST_PLANS, str(tmp_path)]
    done = subprocess.run(command, cwd=workers.PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [plans for _, plans, _ in said["kept"]] == [1, 2]
    seconds, _, imported = said["kept"][-1]
    libraries = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert libraries <= {"engine"} and "torch" not in said["there"]
    assert seconds < loop_seconds(), "a new worker needs four times as long, most of it for imports"


def test_a_standby_ends_with_whoever_keeps_it_even_if_that_is_killed_while_it_imports():
    command = [sys.executable, "-c", KEEPER]
    with subprocess.Popen(command, cwd=workers.PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        standby = psutil.Process(int(keeper.stdout.readline()))
        assert protocol.is_alive(standby)
        keeper.kill()
    until(lambda: not protocol.is_alive(standby))
