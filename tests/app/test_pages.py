"""Every page in every state it can be met in, without a browser: nothing raises, nothing is blank."""

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import header
from app.tables import plain
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.errors import InputError
from engine.workload import RoutingTrace
from tests.cases.pages import PAGES, buttons, open_sample, plan_the_sample, press, run, said, studio, visit


def test_an_empty_page_says_what_to_do_next(app: AppTest) -> None:
    for page in PAGES:
        visit(app, page)
        assert app.info, f"the empty page {page} must say what to do"
        assert "Open the sample" in buttons(app), page


def test_every_page_with_the_sample_and_then_with_a_training_step(sample: AppTest) -> None:
    for page in PAGES:
        assert not visit(sample, page).error, page
    press(visit(sample, "optimise"), "Training step")
    for page in PAGES:
        assert not visit(sample, page).error, page
        assert "training step: 12 × 128 tokens on each GPU" in said(sample.caption), page


def test_the_pages_of_a_finished_plan(planned: AppTest) -> None:
    assert len(planned.dataframe[0].value) == 4
    assert planned.dataframe[0].value["Plan"].tolist()[:2] == ["Linear placement", "Aurora"]
    for page in ("timeline", "launch", "workload"):
        visit(planned, page)
        assert not planned.error
    visit(planned, "timeline")
    assert {metric.label for metric in planned.metric} >= {"Simulated pass", "Exposed communication", "GPU utilisation"}
    again = visit(studio(session=planned.query_params["session"]), "optimise")
    assert len(again.dataframe[0].value) == 4, "found again by its address"
    # A plan for another cluster is not shown as if it fitted.
    planned.session_state["cluster"] = cluster_presets()["exflow-4-nodes"].cluster
    visit(planned, "optimise")
    assert not planned.dataframe
    visit(planned, "timeline")
    assert "Choose a plan in the sidebar" in said(planned.info)


def test_a_model_that_does_not_fit_is_answered_where_it_matters(sample: AppTest) -> None:
    sample.session_state["model"] = model_presets()["Mixtral-8x7B"].model
    for page in ("optimise", "timeline", "what_if", "launch"):
        visit(sample, page)
        assert "does not fit the recording" in sample.error[0].value.replace("\\", "")
    visit(sample, "workload")
    assert not sample.error


def test_a_cluster_without_room_for_the_experts_is_answered(sample: AppTest) -> None:
    cluster = sample.session_state["cluster"]
    nodes = [
        node.model_copy(update={"gpus": tuple(gpu.model_copy(update={"memory": 3e6}) for gpu in node.gpus)})
        for node in cluster.nodes
    ]
    sample.session_state["cluster"] = cluster.model_copy(update={"nodes": tuple(nodes)})
    no_room = "16 experts per layer do not fit"
    faults = {"cluster": "only 8 of the 16 experts", "affinity": no_room, "what_if": no_room}
    for page in PAGES:
        visit(sample, page)
        assert faults[page] in sample.error[0].value if page in faults else not sample.error, page


def test_what_a_page_cannot_use_is_said_in_a_line(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_) -> None:
        raise InputError("not <b>this</b>")

    open_sample(app)
    monkeypatch.setattr(header, "show", refuse)
    visit(app, "timeline")
    assert [error.value for error in app.error] == [plain("not <b>this</b>")]


@pytest.mark.usefixtures("warm_python")
def test_a_traffic_matrix_can_be_planned_and_says_why_it_cannot_be_launched(sample: AppTest) -> None:
    press(visit(sample, "workload"), "Traffic 8 × 8")
    plan_the_sample(sample)
    assert sample.dataframe[0].value["Plan"].tolist()[:2] == ["Linear placement", "Aurora"]
    visit(sample, "launch")
    assert "no tokens to replay" in sample.error[0].value.replace("\\", "")


def test_a_session_link_cannot_leave_the_data_folder() -> None:
    assert run(studio(session="../../etc/passwd")).info


@pytest.mark.usefixtures("warm_python")
def test_a_recording_of_nothing_but_padding_breaks_no_page(sample: AppTest) -> None:
    nothing = RoutingTrace("nothing", np.full((16, 8, 1), -1, dtype=np.int16), 16)
    sample.session_state["workload"] = store.save_workload(nothing)
    plan_the_sample(sample)
    for page in PAGES:
        visit(sample, page)
