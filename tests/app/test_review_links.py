"""Links to plans on the Review page, also to lost ones, and to the layer, GPU or chart that a comment points to."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app.charts import review as charts
from app.review import plan_list
from app.review import store as review_store
from engine import store
from engine.catalogue import cluster_presets
from engine.costs import Datasheet
from engine.problem import make_problem
from engine.store import team
from engine.store.database import database
from engine.store.problems import problem_arguments
from engine.systems import SYSTEMS, TRAINING, run
from engine.training import usual_step
from engine.workload import RoutingTrace
from tests.cases.pages import buttons, field, press, said, visit
from tests.cases.reviews import fill, link, review_of, save
from tests.cases.sessions import problem_of


def test_a_link_opens_the_plan_and_everything_that_it_was_made_from(unreviewed: AppTest) -> None:
    app = unreviewed
    session, code = app.session_state, problem_of(app).workload
    other = RoutingTrace("other", code.experts[::-1].copy(), code.num_experts)
    session["workloads"] = {**session["workloads"], store.save_workload(other): "other"}
    session["others"], session["in_use"] = [other.digest], app.plans[0].id
    session["cost"] = {"source": "datasheet", "compute_efficiency": 0.5, "memory_efficiency": 0.8, "launch": 5e-6}
    app.run()
    saved = save(app, "to be shared")
    visitor = link(plan=saved.plan)
    theirs = visitor.session_state
    assert theirs["plan"] == saved.plan and theirs["in_use"] == app.plans[0].id
    for key in ("workload", "cluster", "model", "others", "second", "step", "cost"):
        assert theirs[key] == session[key], key
    assert "to be shared" in said(visitor.subheader)
    visit(visitor, "timeline")
    assert not visitor.error and any(metric.label == "Simulated pass" for metric in visitor.metric)
    visit(visitor, "optimise")
    listed = visitor.dataframe[0].value.set_index("Plan")
    assert "to be shared" in listed.index and listed.loc["Linear placement", "Copies to move"].startswith("0 ")


def test_a_link_opens_its_plan_and_review_whatever_was_there_before(reviewed: AppTest, monkeypatch) -> None:
    app, saved = reviewed, reviewed.saved
    newest = team.open_review(database(), saved.number, "second?", "Ben")
    oldest = team.reviews_of(database(), saved.number)[-1].id
    press(app, "Compare")
    assert "to be shared" not in said(app.subheader)
    assert "to be shared" in said(link(plan=saved.plan, session=app.query_params["session"]).subheader)
    assert plan_list.QUESTION in said(link(plan=saved.plan, review=oldest).text)
    visitor = link(plan=saved.plan, review=newest.id)
    assert "second?" in said(visitor.text)
    # A reload does not open the plan again over what was changed since.
    visit(visitor, "workload")
    visitor.button(key="strip-cluster-hgx-h100-8").click().run()
    again = link(plan=saved.plan, session=visitor.query_params["session"])
    assert again.session_state["cluster"] == cluster_presets()["hgx-h100-8"].cluster
    assert again.session_state["reviewed"][0] == saved.number and not again.error
    assert "review of another one" in said(link(plan=app.plans[0].id, review=oldest).error)
    # A database that does not answer is said, and other pages go on.
    monkeypatch.setenv("DATABASE_URL", "sqlite:////nowhere/at/all.db")
    visit(app, "review")
    assert "does not answer" in said(app.error)
    visit(app, "timeline")
    assert not app.error


def test_a_link_that_leads_nowhere_is_said() -> None:
    for plan in ("0" * 64, "x'; drop table plan; --", "<script>alert(1)</script>"):
        visitor = link(plan=plan)
        assert "does not work" in said(visitor.error) and "<script>" not in visitor.error[0].value
        assert visitor.session_state["plan"] is None and visitor.info


def test_a_recording_that_is_gone_is_named_and_everything_else_is_shown(reviewed: AppTest, own_data_folder: Path) -> None:
    app, saved = reviewed, reviewed.saved
    point(app, "Layer 3 on Timeline")
    (recording,) = (own_data_folder / "workloads").iterdir()
    recording.rename(own_data_folder / "away.npz")
    visitor = link(plan=saved.plan)
    assert "does not have the recording alpha-code" in said(visitor.warning)
    assert visitor.session_state["plan"] is None and visitor.session_state["workload"] is None
    assert "look here" in said(visitor.text) and "Comment" in buttons(visitor)
    assert next(metric for metric in visitor.metric if metric.label == "Time, simulated").value.endswith("ms")
    overload = next(metric for metric in visitor.metric if metric.label == "Overload factor")
    assert overload.value.endswith("×") and "p95" in overload.help
    pointed = link(plan=saved.plan, about="layer:3")
    assert [header.value for header in pointed.header] == ["Review"], "the discussion, which names the layer"
    assert "does not have the recording" in said(pointed.error) and "look" in [text.value for text in pointed.text]
    press(visitor, "Open in this session")
    assert "does not have the recording" in said(visitor.error)
    (own_data_folder / "away.npz").rename(recording)
    press(visitor, "Open in this session")
    assert visitor.session_state["plan"] == saved.plan and not visitor.warning


@pytest.mark.parametrize("kind", ["step", "two"])
def test_plans_of_steps_and_of_two_models_are_reviewed_too(unreviewed: AppTest, kind: str) -> None:
    one = problem_of(unreviewed)
    second = RoutingTrace("second", one.workload.experts[::-1].copy(), one.workload.num_experts)
    store.save_workload(second)
    more = {"step": usual_step(one.model, 8)} if kind == "step" else {"second": (second, one.model)}
    problem = make_problem(one.workload, one.cluster, one.model, Datasheet(), **more)
    plan = run(TRAINING["lina"] if kind == "step" else SYSTEMS["packing"], problem, {}).result.solution
    inputs = problem_arguments(problem) | {review_store.NAMES: {}}
    room = team.workspaces(database())[0]
    saved = team.save_plan(database(), room.id, plan, "Ben", "", inputs)
    visitor = link(plan=saved.plan)
    assert not visitor.error and visitor.session_state["plan"] == saved.plan
    assert (visitor.session_state["step"] is not None) == (kind == "step")
    assert (visitor.session_state["second"] is not None) == (kind == "two")
    expected = "pieces of at most 30 MB" if kind == "step" else "second model's 16 experts"
    assert expected in said(visitor.markdown)
    visit(visitor, "timeline")
    assert not visitor.error and not visitor.info


def test_a_name_of_two_systems_is_told_by_the_plans_goal(unreviewed: AppTest) -> None:
    problem = problem_of(unreviewed)
    plan = run(SYSTEMS["lina"], problem, {}).result.solution
    inputs = problem_arguments(problem) | {review_store.NAMES: {}}
    saved = team.save_plan(database(), team.workspaces(database())[0].id, plan, "Ben", "", inputs)
    told = said(link(plan=saved.plan).caption)
    assert f"made by {SYSTEMS['lina'].title}, seed" in told and TRAINING["lina"].title not in told


def point(app: AppTest, title: str) -> None:
    """Comment on a place."""
    field(app, "About").set_value(title)
    press(fill(app, "Your comment", "look"), "Comment")


def shown_layers(app: AppTest, label: str) -> tuple[int, int]:
    return next(slider.value for slider in app.slider if slider.label == label)


def headers(app: AppTest) -> list[str]:
    return [header.value for header in app.header]


def test_a_comment_points_to_a_layer_a_gpu_or_a_chart(reviewed: AppTest) -> None:
    app, saved, names = reviewed, reviewed.saved, problem_of(reviewed).cluster.gpu_names
    for title in ("Layer 3 on Timeline", "Layers 4 and 5 on Affinity", names[5], "Timelines of the brief"):
        point(app, title)
    review = review_of(saved)
    assert [str(comment.place) for comment in review.comments] == ["layer:3", "hops:4", "gpu:5", "chart:timelines"]
    assert field(app, "About").value is None
    codes = [code.value for code in app.code]
    assert any(code.endswith(f"plan={saved.plan}&review={review.id}&about=layer%3A3") for code in codes)

    # A layer is shown on a page of its own.
    visitor = link(plan=saved.plan, review=review.id, about="layer:3")
    assert headers(visitor) == ["Timeline"] and shown_layers(visitor, "MoE layers") == (3, 4)
    assert visitor.session_state["plan"] == saved.plan and not visitor.error
    assert shown_layers(visit(visitor, "timeline"), "MoE layers") == (3, 4)
    assert "The comment points to layer 3." in said(visitor.markdown)
    visitor.session_state["plan"] = app.plans[0].id
    assert "points to layer" not in said(visitor.run().markdown), "it is on another plan"
    visitor = link(plan=saved.plan, review=review.id, about="hops:4")
    assert headers(visitor) == ["Affinity"] and shown_layers(visitor, "Layers compared") == (4, 5)
    press(app, "Layer 3 on Timeline")
    assert headers(app) == ["Timeline"] and shown_layers(app, "MoE layers") == (3, 4)
    press(app, "Back to the comment")
    assert headers(app) == ["Review"] and "about" not in app.query_params
    assert "Discussion" in said(app.subheader)

    # A GPU or a chart is in the brief.
    visitor = link(plan=saved.plan, review=review.id, about="gpu:5")
    assert f"points to {names[5]}, framed below" in said(visitor.markdown)
    assert visitor.query_params["about"] in ("gpu:5", ["gpu:5"])
    press(visitor, "Timelines of the brief")
    assert "points to this chart" in said(visitor.markdown) and "framed below" not in said(visitor.markdown)
    figure = charts.placement(app.plans[1], problem_of(app), 5)
    assert [(shape.x0, shape.x1) for shape in figure.layout.shapes][-1] == (4.5, 5.5)


def test_a_link_that_points_to_nothing_shows_its_plan_and_says_so(reviewed: AppTest) -> None:
    saved = reviewed.saved
    for text in ("<script>alert(1)</script>", "layer:9999999"):
        visitor = link(plan=saved.plan, about=text)
        assert "is no layer, GPU or chart" in said(visitor.error) and "<script>" not in visitor.error[0].value
        assert "to be shared" in said(visitor.subheader)
    # With a layer that the plan lacks the Timeline begins with the first.
    visitor = link(plan=saved.plan, about="layer:4000")
    assert shown_layers(visitor, "MoE layers") == (0, 1) and not visitor.error
