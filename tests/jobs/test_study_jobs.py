"""Studies as jobs: points while they run, the whole at the end, and the points so far after a stop."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from engine import store
from engine.catalogue import cluster_presets
from engine.compare.affinity import OutOfDistribution, TokensEnough
from engine.compare.capacity import capacity, parts_of
from engine.compare.contention import contention_curve, ordered, pays_from
from engine.compare.sensitivity import parameters_of, sensitivity
from engine.compare.sweep import SweepPoint
from engine.compare.what_if import Change, changed
from engine.costs import Datasheet
from engine.jobs import protocol, runner
from engine.jobs.runner import MARK, Job, State
from engine.model import MoEModel
from engine.parallel.processes import processors
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate import simulate
from engine.store.problems import problem_arguments, save_recordings
from engine.systems import SYSTEMS, run
from engine.training import TrainingStep, balanced_load, usual_step
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.jobs import until
from tests.cases.problems import small
from tests.strategies import cluster_of, make_gpu, make_model

two_processors = pytest.mark.skipif(processors() < 2, reason="one processor does all points in one process")


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
def start_study(own_data_folder: Path, warm_python: None):
    """Start studies, and kill those that still run at the end."""
    started = []

    def begin(workload: str, others: tuple[str, ...] = (), **more) -> Job:
        arguments = {"workload": workload, "others": list(others), "gpus": 4, "first_choice": True, "time_limit": 0.1}
        started.append(runner.start("affinity", arguments | more, store.data_folder()))
        return started[-1]

    yield begin
    for job in started:
        runner.cancel(job, grace=0)
        assert runner.wait(job, 5).finished


def test_a_study_reports_and_returns_both_parts(start_study) -> None:
    job = start_study(recording(0), (recording(1),), sizes=[100, 500], seeds=2)
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
def test_a_stopped_study_keeps_its_points(start_study) -> None:
    job = start_study(recording(0), sizes=[*range(10, 490, 2)], seeds=20, time_limit=0.5)
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


def test_what_cannot_be_studied_fails_with_one_line(start_study) -> None:
    loads = store.save_workload(ExpertLoad("loads", np.ones((4, 8)), (0, 1, 2, 3)))
    jobs = [
        start_study(loads),
        start_study(recording(0), (loads,)),
        start_study(recording(0), gpus=3),
        start_study(recording(0, layers=1)),
    ]
    assert {runner.wait(job, 30) for job in jobs} == {State.FAILED}
    assert "loads has no tokens" in jobs[0].error and "loads has no tokens" in jobs[1].error
    assert "over 3 GPUs" in jobs[2].error
    assert "single layer" in jobs[3].error


SMALL = TrainingStep(batch=8, sequence_length=16, heads=4, dense_d_ff=96, vocabulary=2000)


def problem_of(layers: int = 2, training: bool = True) -> Problem:
    model = make_model(layers, 4)
    recording = balanced_load(model)
    store.save_workload(recording)
    cluster = cluster_of(*(make_gpu() for _ in range(4)), latency=1e-4)
    return make_problem(recording, cluster, model, Datasheet(), step=SMALL if training else None)


@pytest.fixture
def start_sweep(own_data_folder: Path, warm_python: None):
    """Start sweeps, and kill those that still run at the end."""
    started = []

    def begin(problem: Problem, kind: str, values, **settings) -> Job:
        wanted = {"kind": kind, "values": list(values), "settings": settings}
        started.append(runner.start("sweep", problem_arguments(problem) | {"sweep": wanted}, store.data_folder()))
        return started[-1]

    yield begin
    for job in started:
        runner.cancel(job, grace=0)
        assert runner.wait(job, 5).finished


def test_a_sweep_returns_points_with_plans_that_take_what_they_say(start_sweep) -> None:
    problem = problem_of()
    job = start_sweep(problem, "degree", [1, 2, 3], orders=["dispatch-first"])
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
def test_a_stopped_sweep_keeps_its_points(start_sweep, kind: str, values, settings) -> None:
    job = start_sweep(problem_of(layers=12), kind, values, **settings)
    deadline = time.monotonic() + 60
    while not (job.result and len(job.result["candidates"]) >= 2):
        assert time.monotonic() < deadline and not job.state.finished, job.log_tail()
        time.sleep(0.02)
    runner.cancel(job, grace=10)
    assert runner.wait(job, 20) is State.CANCELLED
    kept = job.result["candidates"]
    assert 2 <= len(kept) < job.result["of"]
    assert [candidate["point"]["value"] for candidate in kept] == list(values)[: len(kept)]


def test_what_cannot_be_swept_fails_with_one_line(start_sweep) -> None:
    jobs = [
        start_sweep(problem_of(), "degree", [0]),
        start_sweep(problem_of(training=False), "degree", [1]),
        start_sweep(problem_of(), "micro_op", []),
    ]
    assert {runner.wait(job, 60) for job in jobs} == {State.FAILED}
    assert "pipeline degrees: 0 is not between 1 and 16" in jobs[0].error
    assert "inference" in jobs[1].error
    assert "at least one value" in jobs[2].error


@pytest.fixture
def problem(warm_python: None) -> Problem:
    sample = small()
    store.save_workload(sample.workload)
    return sample


def start(kind: str, problem: Problem, **more) -> Job:
    return runner.start(kind, problem_arguments(problem) | more, store.data_folder())


def done(job: Job) -> dict:
    assert runner.wait(job, 60) is State.DONE, job.log_tail()
    return job.result


def test_studies_return_what_their_functions_do(problem: Problem) -> None:
    plan = run(SYSTEMS["rcs"], problem, {}).result.solution
    part = next(iter(parts_of(problem.cluster).values()))
    jobs = [
        start("sensitivity", problem, plan=plan.model_dump(mode="json", exclude_none=True), share=0.25),
        start(
            "capacity",
            problem,
            part=[node.model_dump(mode="json") for node in part],
            title="four",
            target=1e-9,
            sizes=[1, 2],
            system="linear",
            options={},
        ),
    ]
    jobs.append(start("contention", problem, plan=plan.model_dump(mode="json", exclude_none=True)))
    results = [done(job) for job in jobs]
    assert results[0]["points"] == [
        point.to_dict() for point in sensitivity(plan, problem, 0.25, parameters_of(problem))
    ] and results[0]["of"] == len(results[0]["points"])
    assert results[0]["total"] == simulate(plan, problem).total
    plans = ordered(plan, problem)
    points = list(contention_curve(problem, plans))
    assert results[2]["points"] == [point.to_dict() for point in points]
    assert results[2]["pays_from"] == pays_from(points, problem, plans) and results[2]["of"] == len(points)
    assert 0 <= results[2]["most_saved"] < 1
    assert results[1]["points"] == [point.to_dict() for point in capacity(problem, part, 1e-9, [1, 2], "linear")]


def test_a_stopped_imprecision_study_keeps_its_points(problem: Problem) -> None:
    job = start("imprecision", problem, levels=[step / 20 for step in range(16)], seeds=20, noise="layers")
    deadline = time.monotonic() + 60
    while not (job.result and len(job.result["points"]) >= 4):
        assert time.monotonic() < deadline and not job.state.finished, job.log_tail()
        time.sleep(0.02)
    runner.cancel(job, grace=10)
    assert runner.wait(job, 20) is State.CANCELLED
    assert [point["system"] for point in job.result["points"][:4]] == ["aurora", "rga", "rcs", "sjf"]


def test_a_plan_for_after_a_change_says_what_it_takes_now_and_then(problem: Problem) -> None:
    change = Change(network=0.25, tokens=4)
    result = done(
        start(
            "replan",
            problem,
            change=change.model_dump(mode="json"),
            system="aurora",
            options={"time_limit": 1.0},
            parent="0" * 64,
        )
    )
    (candidate,) = result["candidates"]
    plan = Plan.from_dict(candidate["plan"], "plan")
    assert plan.id == candidate["point"]["plan_id"] and plan.parent == "0" * 64
    assert plan.name == "Aurora, network 0.25×, tokens 4×"
    assert plan.claim.objective == simulate(plan, problem).total
    assert candidate["point"]["seconds"] == simulate(plan, changed(problem, change)).total
    assert candidate["point"]["bound"] <= candidate["point"]["seconds"]
    assert Change.from_dict(result["change"], "change") == change


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
@two_processors
def test_stop_ends_all_processes_in_two_seconds_and_keeps_the_points_so_far(long_sweep):
    begin = time.monotonic()
    runner.cancel(long_sweep)
    assert runner.wait(long_sweep, 5) is State.CANCELLED
    assert time.monotonic() - begin < 2.0
    until(lambda: not processes_of(long_sweep), timeout=1)
    points = [candidate["point"]["value"] for candidate in long_sweep.result["candidates"]]
    assert 3 <= len(points) < 60 and points == sorted(points)
    assert long_sweep.log_tail().count("Traceback") == 0


@two_processors
def test_progress_moves_with_every_point_and_a_killed_worker_takes_its_processes_along(long_sweep):
    seen = {report.done for report in long_sweep.history}
    until(lambda: len({report.done for report in long_sweep.history}) >= len(seen) + 3, timeout=20)
    done = [report.done for report in long_sweep.history]
    assert done == sorted(done) and long_sweep.progress.incumbent is not None
    os.kill(protocol.living_worker(long_sweep.folder).pid, signal.SIGKILL)
    assert runner.wait(long_sweep, 5) is State.FAILED
    until(lambda: not processes_of(long_sweep), timeout=3)
