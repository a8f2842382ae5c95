"""The what-if studies as jobs: points while they run, what was found when stopped, and a plan for what would be."""

import time

import pytest

from engine import store
from engine.compare.capacity import capacity, parts_of
from engine.compare.contention import contention_curve, ordered, pays_from
from engine.compare.sensitivity import parameters_of, sensitivity
from engine.compare.what_if import Change, changed
from engine.jobs import runner
from engine.jobs.runner import Job, State
from engine.plan import Plan
from engine.problem import Problem
from engine.simulate import simulate
from engine.store.problems import problem_arguments
from engine.systems import SYSTEMS, run
from tests.studies.test_what_if import small


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


def test_a_stopped_study_keeps_its_points(problem: Problem) -> None:
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
