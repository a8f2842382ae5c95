"""Answers that pages keep: computed once, in processes of their own, the same as in this one."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import cached, simulations, state, widgets
from app.cached import figures, plans
from app.cached.plans import Candidate, Planned
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.compare.what_if import Change, Outlook, outlook_after
from engine.errors import InputError
from engine.jobs import runner
from engine.parallel import pool
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate import simulate
from engine.store.problems import problem_arguments, problem_from
from engine.systems import SYSTEMS, run
from engine.training import balanced_load, usual_step
from engine.workload import ExpertLoad, TrafficMatrix
from tests.cases.cli import ROOT
from tests.cases.pages import visit
from tests.cases.problems import small
from tests.cases.samples import linear_plan, sample_problem

MODEL, CLUSTER = model_presets()["Mixtral-8x7B"].model, cluster_presets()["hgx-h100-8"].cluster


def files() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in store.data_folder().rglob("*") if path.is_file()}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The arguments of the jobs that would have been started."""
    arguments: list[dict] = []
    job = SimpleNamespace(id="job")
    monkeypatch.setattr(runner, "start", lambda kind, of_job, root, handed: arguments.append(of_job) or job)
    return arguments


@pytest.fixture
def opened(empty_session) -> None:
    """A session with a model and a cluster."""
    state.change(model=MODEL)
    state.open_cluster(CLUSTER)


def test_a_problem_is_read_without_writing_and_its_job_has_its_recording(opened, started) -> None:
    state.open_step(usual_step(MODEL, len(CLUSTER.gpus)))
    before = files()
    problem = cached.problem()
    assert problem.workload.digest == balanced_load(MODEL).digest
    assert files() == before and not store.has_workload(problem.workload.digest)
    widgets.start_job_on(problem, "optimise", {"systems": []})
    assert started == [problem_arguments(problem) | {"systems": []}]
    assert problem_from(started[0]).workload.digest == problem.workload.digest


def test_the_model_of_the_open_recording_is_not_remembered_by_reading(opened) -> None:
    state.open_workload(ExpertLoad("loads", np.ones((len(MODEL.moe_layers), MODEL.experts)), MODEL.moe_layers))
    before = files()
    assert cached.problem() is not None
    assert files() == before and state.session.model_of.get(state.session.workload) is None


def test_a_traffic_matrix_is_found_by_a_job_as_the_model_makes_it(opened, started) -> None:
    state.open_workload(TrafficMatrix("traffic", np.ones((2, 8, 8)), 1.0))
    problem = cached.problem()
    assert problem.workload.digest != state.session.workload  # a token of this model has more bytes
    widgets.start_job_on(problem, "optimise", {})
    assert problem_from(started[0]).workload.digest == problem.workload.digest


def test_a_page_remembers_the_model_of_the_open_recording_where_it_fits(sample: AppTest) -> None:
    app = sample
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
        job: Planned([Candidate(plan, "feasible", 1.0, {"said by": {"value": job}})], {})
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
    monkeypatch.setattr(plans, "answer_of", lambda job: Planned(found, {}))
    monkeypatch.setattr(plans, "_inputs_of", lambda id, job: {})
    names = [candidate.plan.name for candidate in cached.candidates().values()]
    assert names == ["Linear placement · on alpha-code", "Linear placement"]


CHANGES = (Change(), Change(network=2), Change(noise=0.5), Change(width=0.5, dtype="fp8"))


@pytest.fixture(scope="module")
def beside() -> Iterator[None]:
    """Every simulation in another process: in one, for `tests/parallel/test_pool.py` has two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "processors", lambda: 1)
        patch.setattr(simulations, "FEW_SENDS", -1)
        simulations._pool.start()
        deadline = time.monotonic() + 60
        while not simulations._pool.ready:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield
    simulations._pool.close()


def two_models() -> Problem:
    problem = small()
    return make_problem(problem.workload, problem.cluster, problem.model, problem.cost, (problem.workload, problem.model))


def same(mine: Outlook, other: Outlook) -> bool:
    return all(np.array_equal(getattr(mine, field.name), getattr(other, field.name)) for field in fields(Outlook))


@pytest.mark.parametrize("problem", [small(), two_models()], ids=["one model", "two models"])
def test_outlooks_and_timelines_are_those_of_this_process(beside, empty_session, monkeypatch, problem):
    plan = linear_plan(problem)
    for change in CHANGES:
        here = outlook_after(problem, plan, change)
        (there,) = simulations.outlooks(problem, [plan], change)
        assert same(here, there) and there is not here
    pd.testing.assert_frame_equal(simulations.timeline(plan, problem).events, simulate(plan, problem).events)


def test_many_at_once_get_each_their_own(beside, empty_session):
    problem, changes = small(), [Change(network=1 + index / 10) for index in range(20)]
    plan = linear_plan(problem)
    with ThreadPoolExecutor(len(changes)) as threads:
        answers = list(threads.map(lambda change: simulations.outlooks(problem, [plan], change)[0], changes))
    assert all(same(answer, outlook_after(problem, plan, change)) for answer, change in zip(answers, changes, strict=True))


def test_a_change_that_cannot_be_is_said_in_one_line(beside, empty_session):
    problem = small()
    with pytest.raises(InputError, match="no GPU of the cluster is"):
        simulations.outlooks(problem, [linear_plan(problem)], Change(network=2, gpu_type="unknown"))


def test_a_session_that_has_left_does_not_wait(beside, monkeypatch):
    def left(visit: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(state.visit), "end_if_left", left)
    problem = small()
    with pytest.raises(KeyboardInterrupt):
        simulations.outlooks(problem, [linear_plan(problem)], Change(network=3))


def test_a_small_simulation_stays_here_unless_another_one_is_going_on(monkeypatch):
    asked: list[int] = []

    class Recorder:
        ready = True

        def start(self) -> None:
            """Nothing to start."""

        def answers(self, questions: list, still_wanted) -> list:
            asked.append(len(questions))
            return [question.work(*question.large.values(), *question.small) for question in questions]

    monkeypatch.setattr(simulations, "_pool", Recorder())
    monkeypatch.setattr(simulations, "FEW_SENDS", 10_000)
    problem = small()
    plan: Plan = linear_plan(problem)
    assert same(simulations.outlooks(problem, [plan], CHANGES[1])[0], outlook_after(problem, plan, CHANGES[1]))
    assert not asked
    with simulations._here:
        simulations.outlooks(problem, [plan, plan], CHANGES[1])
    assert asked == [2]
    monkeypatch.setattr(simulations, "FEW_SENDS", -1)
    simulations.timeline(plan, problem)
    assert asked == [2, 1]


def test_the_main_script_does_nothing_in_a_process_of_the_pool():
    """It is read again there, as multiprocessing does with the main script of whoever starts a process."""
    names: dict[str, object] = {"__name__": "__mp_main__", "__file__": str(ROOT / "app" / "main.py")}
    exec((ROOT / "app" / "main.py").read_text(), names)
    assert "st" not in names


@pytest.mark.parametrize("name", ["optimise", "timeline", "what_if"])
def test_no_page_simulates_again_after_a_restart(ana, monkeypatch, name):
    monkeypatch.setattr(store, "LONG", 0)
    st.cache_resource.clear()
    visit(ana.run(), name)
    st.cache_resource.clear()  # as in a studio that has just been started

    for module, function in ((simulations, "_answers"), (figures, "engine_metrics"), (figures, "engine_migration")):
        monkeypatch.setattr(module, function, None)
    shown = visit(ana.run(), name)
    assert not shown.exception and not shown.error and (shown.dataframe or shown.get("plotly_chart"))
