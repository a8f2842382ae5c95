"""A sweep as a job: points while it runs, plans that can be opened, and what was found when it is stopped."""

import time
from pathlib import Path

import pytest

from engine import store
from engine.compare.sweep import SweepPoint
from engine.costs import Datasheet
from engine.jobs import runner
from engine.jobs.runner import Job, State
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate import simulate
from engine.store.problems import problem_arguments
from engine.training import TrainingStep, balanced_load
from tests.strategies import cluster_of, make_gpu, make_model

pytestmark = pytest.mark.usefixtures("warm_python")

SMALL = TrainingStep(batch=8, sequence_length=16, heads=4, dense_d_ff=96, vocabulary=2000)


def problem_of(layers: int = 2, training: bool = True) -> Problem:
    model = make_model(layers, 4)
    recording = balanced_load(model)
    store.save_workload(recording)
    cluster = cluster_of(*(make_gpu() for _ in range(4)), latency=1e-4)
    return make_problem(recording, cluster, model, Datasheet(), step=SMALL if training else None)


@pytest.fixture
def start(own_data_folder: Path):
    """Starts a sweep; what still runs at the end is killed."""
    started = []

    def begin(problem: Problem, kind: str, values, **settings) -> Job:
        wanted = {"kind": kind, "values": list(values), "settings": settings}
        started.append(runner.start("sweep", problem_arguments(problem) | {"sweep": wanted}, store.data_folder()))
        return started[-1]

    yield begin
    for job in started:
        runner.cancel(job, grace=0)
        assert runner.wait(job, 5).finished


def test_a_sweep_returns_points_with_plans_that_take_what_they_say(start) -> None:
    problem = problem_of()
    job = start(problem, "degree", [1, 2, 3], orders=["dispatch-first"])
    assert runner.wait(job, 60) is State.DONE, job.log_tail()
    candidates = job.result["candidates"]
    assert len(candidates) == job.result["of"] == 4
    assert job.result["cost_source"] == problem.cost_source
    for candidate in candidates:
        point, plan = SweepPoint(**candidate["point"]), Plan.from_dict(candidate["plan"], "plan")
        assert plan.id == point.plan_id and plan.claim.objective == point.total
        assert simulate(plan, problem).total == point.total
        assert candidate["status"] == plan.claim.status.value and candidate["runtime"] > 0
    assert [candidate["point"]["value"] for candidate in candidates] == [1, 2, 3, None]
    done = [report.done for report in job.history]
    assert done == sorted(done) and job.history[-1].incumbent == min(
        candidate["point"]["total"] for candidate in candidates[:-1]
    )


@pytest.mark.parametrize(
    "kind, values, settings",
    [
        ("micro_op", [0.1 + step / 100 for step in range(64)], {}),
        ("degree", range(1, 17), {}),
        ("range", range(64), {"parts": [2, 3, 4]}),
    ],
)
def test_a_stopped_sweep_keeps_its_points(start, kind: str, values, settings) -> None:
    job = start(problem_of(layers=12), kind, values, **settings)
    deadline = time.monotonic() + 60
    while not (job.result and len(job.result["candidates"]) >= 2):
        assert time.monotonic() < deadline and not job.state.finished, job.log_tail()
        time.sleep(0.02)
    runner.cancel(job, grace=10)
    assert runner.wait(job, 20) is State.CANCELLED
    kept = job.result["candidates"]
    assert 2 <= len(kept) < job.result["of"]
    assert [candidate["point"]["value"] for candidate in kept] == list(values)[: len(kept)]


def test_what_cannot_be_swept_fails_with_one_line(start) -> None:
    jobs = [
        start(problem_of(), "degree", [0]),
        start(problem_of(training=False), "degree", [1]),
        start(problem_of(), "micro_op", []),
    ]
    assert {runner.wait(job, 60) for job in jobs} == {State.FAILED}
    assert "pipeline degrees: 0 is not between 1 and 16" in jobs[0].error
    assert "inference" in jobs[1].error
    assert "at least one value" in jobs[2].error
