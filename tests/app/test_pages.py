"""Every page in every state it can be met in, without a browser: nothing raises, nothing is blank."""

from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import header
from app.tables import plain
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.errors import InputError
from engine.jobs import runner
from engine.workload import RoutingTrace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = ("workload", "cluster", "affinity", "optimise", "timeline", "what_if", "review", "launch")


@pytest.fixture
def app() -> AppTest:
    return AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run()


def visit(app: AppTest, page: str) -> AppTest:
    app.switch_page(f"../pages/{page}.py").run()
    assert not app.exception, app.exception
    return app


def chooser(app: AppTest, label: str):
    """The selectbox with a label."""
    return next(box for box in app.selectbox if box.label == label)


def offered_plans(app: AppTest) -> list[str]:
    """The plans that the chooser of the open plan offers."""
    return [label for box in app.selectbox if box.key == "choose-plan" for label in box.options]


def press(app: AppTest, label: str) -> AppTest:
    """Click the button with a label."""
    next(button for button in app.button if button.label == label).click()
    app.run()
    assert not app.exception, app.exception
    return app


def open_sample(app: AppTest) -> AppTest:
    return press(app, "Open the sample")


def plan_the_sample(app: AppTest) -> AppTest:
    """Run the default systems as a job, wait for it and draw the page again."""
    visit(app, "optimise")
    next(button for button in app.button if button.label == "Run").click()
    app.run()
    job = runner.jobs(store.data_folder(), "optimise")[0]
    assert runner.wait(job, 60) is runner.State.DONE, job.log_tail()
    app.run()
    assert not app.exception, app.exception
    return app


@pytest.mark.parametrize("page", PAGES)
def test_an_empty_page_says_what_to_do_next(app: AppTest, page: str) -> None:
    visit(app, page)
    assert app.info, "an empty page must say what to do"
    assert any(button.label == "Open the sample" for button in app.button)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_with_the_sample(app: AppTest, page: str) -> None:
    open_sample(app)
    visit(app, page)
    assert not app.error


@pytest.mark.parametrize("page", PAGES)
def test_a_page_with_the_sample_and_a_training_step(app: AppTest, page: str) -> None:
    open_sample(app)
    visit(app, "optimise")
    next(button for button in app.button if button.label == "Training step").click()
    app.run()
    visit(app, page)
    assert not app.error
    assert any("training step: 12 × 128 tokens on each GPU" in caption.value for caption in app.caption)


def test_the_pages_of_a_finished_plan(app: AppTest) -> None:
    open_sample(app)
    plan_the_sample(app)
    assert len(app.dataframe[0].value) == 4
    assert app.dataframe[0].value["Plan"].tolist()[:2] == ["Linear placement", "Aurora"]
    for page in ("timeline", "launch", "workload"):
        visit(app, page)
        assert not app.error
    visit(app, "timeline")
    assert {metric.label for metric in app.metric} >= {"Simulated pass", "Exposed communication", "GPU utilisation"}


def test_a_model_that_does_not_fit_is_answered_where_it_matters(app: AppTest) -> None:
    open_sample(app)
    app.session_state["model"] = model_presets()["Mixtral-8x7B"].model
    for page in ("optimise", "timeline", "launch"):
        visit(app, page)
        assert "does not fit the recording" in app.error[0].value.replace("\\", "")
    visit(app, "workload")
    assert not app.error


@pytest.mark.parametrize("page", PAGES)
def test_a_cluster_without_room_for_the_experts_is_answered(app: AppTest, page: str) -> None:
    open_sample(app)
    nodes = [
        node.model_copy(update={"gpus": tuple(gpu.model_copy(update={"memory": 3e6}) for gpu in node.gpus)})
        for node in app.session_state["cluster"].nodes
    ]
    app.session_state["cluster"] = app.session_state["cluster"].model_copy(update={"nodes": tuple(nodes)})
    visit(app, page)
    faults = {"cluster": "only 8 of the 16 experts"} | dict.fromkeys(
        ("affinity", "what_if"), "16 experts per layer do not fit"
    )
    assert not app.error if page not in faults else faults[page] in app.error[0].value


def test_what_a_page_cannot_use_is_said_in_a_line(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_) -> None:
        raise InputError("not <b>this</b>")

    open_sample(app)
    monkeypatch.setattr(header, "show", refuse)
    visit(app, "timeline")
    assert [error.value for error in app.error] == [plain("not <b>this</b>")]


@pytest.mark.usefixtures("warm_python")
def test_a_plan_for_another_cluster_is_not_shown_as_if_it_fitted(app: AppTest) -> None:
    open_sample(app)
    plan_the_sample(app)
    app.session_state["cluster"] = cluster_presets()["exflow-4-nodes"].cluster
    visit(app, "optimise")
    assert not app.dataframe
    visit(app, "timeline")
    assert any("Choose a plan in the sidebar" in info.value for info in app.info)


@pytest.mark.usefixtures("warm_python")
def test_a_traffic_matrix_can_be_planned_and_says_why_it_cannot_be_launched(app: AppTest) -> None:
    open_sample(app)
    next(button for button in app.button if button.label == "Traffic 8 × 8").click()
    app.run()
    plan_the_sample(app)
    assert app.dataframe[0].value["Plan"].tolist()[:2] == ["Linear placement", "Aurora"]
    visit(app, "launch")
    assert "no tokens to replay" in app.error[0].value.replace("\\", "")


@pytest.mark.usefixtures("warm_python")
def test_a_session_is_found_again_by_its_address(app: AppTest) -> None:
    open_sample(app)
    plan_the_sample(app)
    again = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60)
    again.query_params["session"] = app.query_params["session"]
    again.run()
    visit(again, "optimise")
    assert len(again.dataframe[0].value) == 4


def test_a_session_link_cannot_leave_the_data_folder() -> None:
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60)
    app.query_params["session"] = "../../etc/passwd"
    app.run()
    assert not app.exception
    assert app.info


@pytest.mark.usefixtures("warm_python")
def test_a_recording_of_nothing_but_padding_breaks_no_page(app: AppTest) -> None:
    open_sample(app)
    nothing = RoutingTrace("nothing", np.full((16, 8, 1), -1, dtype=np.int16), 16)
    app.session_state["workload"] = store.save_workload(nothing)
    plan_the_sample(app)
    for page in PAGES:
        visit(app, page)
