"""The affinity study as a job: partial results while it runs, the whole at the end, what was found when it is stopped."""

import time
from pathlib import Path

import numpy as np
import pytest

from engine import store
from engine.compare.affinity import OutOfDistribution, TokensEnough
from engine.jobs import runner
from engine.jobs.runner import Job, State
from engine.workload import ExpertLoad, RoutingTrace

pytestmark = pytest.mark.usefixtures("warm_python")


def recording(seed: int, layers: int = 4) -> str:
    """Digest of a kept recording in which every token follows one of two chains of experts."""
    rng = np.random.default_rng(seed)
    step = rng.permutation(8)
    walk = [rng.integers(0, 8, 1000)]
    for _ in range(layers - 1):
        walk.append(np.where(rng.random(1000) < 0.6, step[walk[-1]], rng.integers(0, 8, 1000)))
    trace = RoutingTrace(f"chains-{seed}", np.array(walk).T[:, :, None].astype(np.int16), 8)
    return store.save_workload(trace)


@pytest.fixture
def start(own_data_folder: Path):
    """Starts a study; what still runs at the end is killed."""
    started = []

    def begin(workload: str, others: tuple[str, ...] = (), **more) -> Job:
        arguments = {"workload": workload, "others": list(others), "gpus": 4, "first_choice": True, "time_limit": 0.1}
        started.append(runner.start("affinity", arguments | more, store.data_folder()))
        return started[-1]

    yield begin
    for job in started:
        runner.cancel(job, grace=0)
        assert runner.wait(job, 5).finished


def test_a_study_reports_and_returns_both_parts(start) -> None:
    job = start(recording(0), (recording(1),), sizes=[100, 500], seeds=2)
    assert runner.wait(job, 30) is State.DONE, job.log_tail()
    tokens, others = TokensEnough.from_dict(job.result["tokens"]), OutOfDistribution.from_dict(job.result["others"])
    assert tokens.complete and others.complete
    assert tokens.first_choice and tokens.gpus == others.gpus == 4
    assert [point.tokens for point in tokens.points] == [500, 100, 100]
    assert others.names == ("chains-0", "chains-1")
    done = [report.done for report in job.history]
    assert done == sorted(done) and 0.9 < done[-1] < 1
    assert job.history[-1].message == "planning on chains-1"


@pytest.mark.clock
def test_a_stopped_study_keeps_its_points(start) -> None:
    job = start(recording(0), sizes=[*range(10, 490, 2)], seeds=20, time_limit=0.5)
    deadline = time.monotonic() + 30
    while not (job.result and job.result["tokens"]["points"]):
        assert time.monotonic() < deadline, job.log_tail()
        time.sleep(0.02)
    begin = time.monotonic()
    runner.cancel(job, grace=5)
    assert runner.wait(job, 10) is State.CANCELLED
    assert time.monotonic() - begin < 2
    tokens = TokensEnough.from_dict(job.result["tokens"])
    assert tokens.points and not tokens.complete and job.result["others"] is None


def test_what_cannot_be_studied_fails_with_one_line(start) -> None:
    loads = store.save_workload(ExpertLoad("loads", np.ones((4, 8)), (0, 1, 2, 3)))
    jobs = [start(loads), start(recording(0), (loads,)), start(recording(0), gpus=3), start(recording(0, layers=1))]
    assert {runner.wait(job, 30) for job in jobs} == {State.FAILED}
    assert "loads has no tokens" in jobs[0].error and "loads has no tokens" in jobs[1].error
    assert "over 3 GPUs" in jobs[2].error
    assert "single layer" in jobs[3].error
