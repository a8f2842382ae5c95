"""What the pages read of the engine changes neither the session nor the data folder; what starts something does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import cached, state, widgets
from app.cached import plans
from app.cached.plans import Answer, Candidate
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.jobs import runner
from engine.plan import Plan
from engine.problem import Problem
from engine.store.problems import problem_arguments, problem_from
from engine.systems import SYSTEMS, run
from engine.training import balanced_load, usual_step
from engine.workload import ExpertLoad, TrafficMatrix
from tests.app.test_pages import ROOT, open_sample, visit
from tests.systems.samples import sample_problem

MODEL, CLUSTER = model_presets()["Mixtral-8x7B"].model, cluster_presets()["hgx-h100-8"].cluster


def files() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.data_folder().rglob("*") if path.is_file()}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of the jobs that would have been started."""
    arguments: list[dict[str, Any]] = []

    def start(kind: str, of_job: dict[str, Any], root: Path) -> SimpleNamespace:
        arguments.append(of_job)
        return SimpleNamespace(id="job")

    monkeypatch.setattr(runner, "start", start)
    return arguments


def test_a_problem_is_read_without_writing_and_its_job_has_its_recording(empty_session, started) -> None:
    state.change(model=MODEL)
    state.open_cluster(CLUSTER)
    state.open_step(usual_step(MODEL, len(CLUSTER.gpus)))
    before = files()
    problem = cached.problem()
    assert problem.workload.digest == balanced_load(MODEL).digest
    assert files() == before and not store.has_workload(problem.workload.digest)
    widgets.start_job_on(problem, "optimise", {"systems": []})
    assert started == [problem_arguments(problem) | {"systems": []}]
    assert problem_from(started[0]).workload.digest == problem.workload.digest


def test_the_model_of_the_open_recording_is_not_remembered_by_reading(empty_session) -> None:
    state.open_workload(ExpertLoad("loads", np.ones((len(MODEL.moe_layers), MODEL.experts)), MODEL.moe_layers))
    state.change(model=MODEL)
    state.open_cluster(CLUSTER)
    before = files()
    assert cached.problem() is not None
    assert files() == before and state.session.model_of.get(state.session.workload) is None


def test_a_traffic_matrix_is_found_by_a_job_as_the_model_makes_it(empty_session, started) -> None:
    state.open_workload(TrafficMatrix("traffic", np.ones((2, 8, 8)), 1.0))
    state.change(model=MODEL)
    state.open_cluster(CLUSTER)
    problem = cached.problem()
    assert problem.workload.digest != state.session.workload  # a token of this model has more bytes
    widgets.start_job_on(problem, "optimise", {})
    assert problem_from(started[0]).workload.digest == problem.workload.digest


def test_a_page_remembers_the_model_of_the_open_recording_where_it_fits() -> None:
    app = open_sample(AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run())
    digest, model = app.session_state["workload"], app.session_state["model"]
    assert app.session_state["model_of"] == {digest: model}
    app.session_state["model"] = MODEL
    visit(app, "workload")
    assert app.session_state["model_of"] == {digest: model}


@pytest.fixture
def proven() -> tuple[Plan, Plan, Problem]:
    """A plan of which more is proven, the same one with half that bound, and their problem."""
    problem = sample_problem("alpha-code", tokens=200)
    plan = run(SYSTEMS["linear"], problem).result.solution
    claim = plan.claim.model_copy(update={"bound": plan.claim.bound / 2})
    return plan, plan.model_copy(update={"claim": claim}), problem


def test_figures_of_a_plan_are_those_of_its_own_claim(empty_session, proven) -> None:
    """Another job may find the same plan and prove less of it."""
    most, least, problem = proven
    assert cached.metrics(most, problem).bound == 2 * cached.metrics(least, problem).bound


def test_of_a_plan_that_several_jobs_found_what_proves_most_counts(empty_session, proven, monkeypatch) -> None:
    most, least, _ = proven
    answers = {
        job: Answer([Candidate(plan, "feasible", 1.0, {"said by": {"value": job}})], {})
        for job, plan in (("c", least), ("b", most), ("a", most))
    }
    monkeypatch.setattr(plans, "jobs", lambda ids: [SimpleNamespace(id=job) for job in answers])
    monkeypatch.setattr(plans, "answer_of", lambda job: answers[job.id])
    monkeypatch.setattr(plans, "_inputs_of", lambda id, job: {})
    (candidate,) = cached.candidates().values()
    assert candidate.plan.claim == most.claim and candidate.notes["said by"]["value"] == "b"


def test_only_plans_of_another_recording_than_the_open_one_say_of_which(empty_session, monkeypatch) -> None:
    found = []
    for name in ("alpha-code", "alpha-man"):
        problem = sample_problem(name, tokens=200)
        found.append(Candidate(run(SYSTEMS["linear"], problem).result.solution, "feasible", 1.0, {}))
        state.open_workload(problem.workload)
    monkeypatch.setattr(plans, "jobs", lambda ids: [SimpleNamespace(id="job")])
    monkeypatch.setattr(plans, "answer_of", lambda job: Answer(found, {}))
    monkeypatch.setattr(plans, "_inputs_of", lambda id, job: {})
    names = [candidate.plan.name for candidate in cached.candidates().values()]
    assert names == ["Linear placement · on alpha-code", "Linear placement"]
