"""A job whose points went to processes: stopping and killing it ends them all and keeps what was there."""

import os
import signal
import time

import psutil
import pytest

from engine import store
from engine.catalogue import cluster_presets
from engine.costs import Datasheet
from engine.jobs import protocol, runner
from engine.jobs.runner import MARK, Job, State
from engine.model import MoEModel
from engine.parallel.processes import processors
from engine.problem import make_problem
from engine.store.problems import problem_arguments, save_recordings
from engine.training import balanced_load, usual_step
from tests.jobs.test_jobs import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(processors() < 2, reason="one processor does all points in one process"),
]


@pytest.fixture
def long_sweep():
    """A sweep of some half a minute that is past its first seconds: processes of its own do the points."""
    model = MoEModel(
        name="tall", layers=48, experts=16, experts_per_token=1, d_model=128, d_ff=512, batch=96, sequence_length=128
    )
    hardware = cluster_presets()["mixed-8"].cluster
    step = usual_step(model, len(hardware.gpus))
    problem = make_problem(balanced_load(model), hardware, model, Datasheet(), step=step)
    save_recordings(problem)
    wanted = {"kind": "micro_op", "values": [1.0 + 0.1 * place for place in range(60)], "settings": {}}
    job = runner.start("sweep", problem_arguments(problem) | {"sweep": wanted}, store.data_folder())
    try:
        # The worker, the tracker and the server of its processes, and those themselves.
        until(lambda: len(processes_of(job)) >= 5, timeout=30)
        until(lambda: job.result and len(job.result["candidates"]) >= 3, timeout=30)
        yield job
    finally:
        runner.cancel(job, grace=0)
        assert runner.wait(job, 5).finished


def processes_of(job: Job) -> list[psutil.Process]:
    mine = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(job.folder) and protocol.is_alive(process):
                mine.append(process)
        except psutil.Error:
            continue
    return mine


@pytest.mark.clock
def test_stop_ends_all_processes_in_two_seconds_and_keeps_the_points_so_far(long_sweep):
    begin = time.monotonic()
    runner.cancel(long_sweep)
    assert runner.wait(long_sweep, 5) is State.CANCELLED
    assert time.monotonic() - begin < 2.0
    until(lambda: not processes_of(long_sweep), timeout=1)
    points = [candidate["point"]["value"] for candidate in long_sweep.result["candidates"]]
    assert 3 <= len(points) < 60 and points == sorted(points)
    assert long_sweep.log_tail().count("Traceback") == 0


def test_progress_moves_with_every_point_and_a_killed_worker_takes_its_processes_along(long_sweep):
    seen = {report.done for report in long_sweep.history}
    until(lambda: len({report.done for report in long_sweep.history}) >= len(seen) + 3, timeout=20)
    done = [report.done for report in long_sweep.history]
    assert done == sorted(done) and long_sweep.progress.incumbent is not None
    os.kill(protocol.living_worker(long_sweep.folder).pid, signal.SIGKILL)
    assert runner.wait(long_sweep, 5) is State.FAILED
    until(lambda: not processes_of(long_sweep), timeout=3)
