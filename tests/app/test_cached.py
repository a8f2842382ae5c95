"""What the pages read of the engine changes neither the session nor the data folder; what starts something does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import cached, state, widgets
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.jobs import runner
from engine.jobs.tasks import problem_arguments, problem_from
from engine.training import balanced_load, usual_step
from engine.workload import ExpertLoad, TrafficMatrix
from tests.app.test_pages import ROOT, open_sample, visit

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
    state.open_model(MODEL)
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
    state.open_model(MODEL)
    state.open_cluster(CLUSTER)
    before = files()
    assert cached.problem() is not None
    assert files() == before and state.model_of(state.workload_digest()) is None


def test_a_traffic_matrix_is_found_by_a_job_as_the_model_makes_it(empty_session, started) -> None:
    state.open_workload(TrafficMatrix("traffic", np.ones((2, 8, 8)), 1.0))
    state.open_model(MODEL)
    state.open_cluster(CLUSTER)
    problem = cached.problem()
    assert problem.workload.digest != state.workload_digest()  # a token of this model has more bytes
    widgets.start_job_on(problem, "optimise", {})
    assert problem_from(started[0]).workload.digest == problem.workload.digest


def test_a_page_remembers_the_model_of_the_open_recording_where_it_fits() -> None:
    app = open_sample(AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run())
    digest, model = app.session_state["workload"], app.session_state["model"]
    assert app.session_state["model_of"] == {digest: model}
    app.session_state["model"] = MODEL
    visit(app, "workload")
    assert app.session_state["model_of"] == {digest: model}
