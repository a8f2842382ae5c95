"""The Review page without a browser: what is saved is what others open, what is said stays text, what is gone is said."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app.charts import review as charts
from app.launch import report
from app.review import store as review_store
from engine import store
from engine.catalogue import cluster_presets
from engine.costs import Datasheet
from engine.errors import InputError
from engine.jobs.kinds import read_answer
from engine.launch.preparation.launch import Launch
from engine.plan import Placement, Plan, SendOrder
from engine.problem import make_problem
from engine.result import Provenance
from engine.simulate import simulate
from engine.store import team
from engine.store.database import database
from engine.store.problems import problem_arguments
from engine.store.team_approval import SETTING, Place
from engine.systems import SYSTEMS, TRAINING, run
from engine.training import usual_step
from engine.webhook import WEBHOOK
from engine.workload import RoutingTrace
from tests.app.test_launch_page import MAIN, problem_of
from tests.app.test_pages import chooser, press, visit
from tests.app.test_people import visitor
from tests.app.test_step_page import said
from tests.app.test_verdict_line import gain
from tests.jobs.launched import finish, request_of
from tests.webhook_service import Service, serving, soon

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)> **v2** <script>alert(1)</script>"


@pytest.fixture
def app(ana: AppTest) -> Iterator[AppTest]:
    """Ana's session on the Review page, in a workspace of hers."""
    team.add_workspace(database(), "Autumn <b>x</b>", "Ana")
    return visit(ana, "review")


def enter(app: AppTest, label: str, text: str) -> AppTest:
    next(widget for widget in (*app.text_input, *app.text_area) if widget.label == label).set_value(text)
    return app


def save(app: AppTest, name: str | None = None, note: str = "", question: str | None = None) -> team.SavedPlan:
    for label, text in (("Name of the plan", name), ("Note", note), ("Question to the team", question)):
        if text is not None:
            enter(app, label, text)
    press(app, "Save")
    return team.find_saved(database(), app.session_state["reviewed"][0])


def link(**query: str) -> AppTest:
    """A new session that opens a link."""
    app = AppTest.from_file(MAIN, default_timeout=60)
    for name, value in query.items():
        app.query_params[name] = value
    visit(app, "review")
    assert not app.exception, app.exception
    return app


def table(app: AppTest):
    return app.dataframe[0].value


def review_of(saved: team.SavedPlan) -> team.Review:
    return team.reviews_of(database(), saved.number)[0]


# Saving, saying, deciding.


def test_a_plan_is_saved_discussed_and_decided(app: AppTest) -> None:
    saved = save(app, HOSTILE, "cheap\nand <b>fast</b>")
    assert (saved.name, saved.by, saved.plan) == (HOSTILE, "Ana", app.plans[1].id)
    assert app.query_params["plan"] == saved.plan and app.query_params["review"] == review_of(saved).id
    assert "cheap\nand <b>fast</b>" in [text.value for text in app.text]
    enter(app, "Your comment", HOSTILE)
    press(app, "Comment")
    press(app, "Reject")
    assert "Give a reason before rejecting." in said(app.error).replace("\\", "")
    enter(app, "Reason", "slow on <i>prose</i>")
    press(app, "Reject")
    assert table(app)["State"].tolist() == [["rejected"]] and table(app)["Comments"].tolist() == [1]
    press(app, "Reopen")
    press(app, "Approve")
    assert [decision.verdict for decision in review_of(saved).decisions] == ["rejected", "reopened", "approved"]
    texts = [text.value for text in app.text]
    assert HOSTILE in texts and "slow on <i>prose</i>" in texts
    assert "<script>" not in "".join(block.value for block in (*app.markdown, *app.caption, *app.subheader))
    assert table(app)["Plan"].tolist() == [HOSTILE]


def test_what_is_said_of_a_plan_is_what_the_simulation_says(app: AppTest) -> None:
    save(app, question="")
    problem = problem_of(app)
    ours, theirs = simulate(app.plans[1], problem).total, simulate(app.plans[0], problem).total
    figures = {metric.label: metric.value for metric in app.metric}
    assert gain(app) == {"Gain over Linear placement": f"{theirs / ours:.3g}×"}
    assert figures["Worst other recording"] == "none open"
    assert "Not scored on another recording" in said(app.markdown)
    assert app.session_state["reviewed"][1] is None and table(app)["State"].tolist() == [["no review"]]
    other = RoutingTrace("shifted *it*", (problem.workload.experts + 3) % 16, 16)
    app.session_state["workloads"] = {**app.session_state["workloads"], store.save_workload(other): other.name}
    press(app, "Ask for a decision")
    there = problem.with_workload(other)
    worst = simulate(app.plans[0], there).total / simulate(app.plans[1], there).total
    assert {metric.label: metric.value for metric in app.metric}["Worst other recording"] == f"{worst:.3g}×"
    assert "On shifted *it*" in said(app.markdown)
    assert table(app)["State"].tolist() == [["open"]] and "Shall we run this?" in said(app.text)


def test_a_plan_that_is_there_already_is_said_before_a_form_is_filled_in(app: AppTest) -> None:
    first = save(app, "first name")
    assert buttons(app)["Saved here already"].disabled and "Save" not in buttons(app)
    assert buttons(app)["Saved here already"].help == "by Ana, as first name"
    assert review_store.saved_in(first.workspace, app.plans[0]) is None


def test_who_decides_on_what_somebody_else_has_just_decided_is_told(app: AppTest) -> None:
    review = review_of(save(app))
    team.decide(database(), review.id, "rejected", "no money", "Ben")
    enter(app, "Reason", "cheap enough")
    press(app, "Approve")
    assert "Ben has just rejected this" in said(app.error) and len(review_of(review.saved).decisions) == 1
    assert "no money" in said(app.text) and any(button.label == "Reopen" for button in app.button)
    assert next(text_area for text_area in app.text_area if text_area.label == "Reason").value == "cheap enough"


def buttons(app: AppTest) -> dict:
    return {button.label: button for button in app.button}


def test_without_a_login_only_a_typed_name_tells_who_decided(app: AppTest) -> None:
    save(app)
    assert "Decided" not in table(app)
    press(app, "Approve")
    assert table(app)["Decided"].tolist() == [["self-approved (name typed, no login)"]]
    assert "**approved** it · self-approved (name typed, no login)" in said(app.markdown)
    press(app, "Reopen")
    assert "Decided" not in table(app) or table(app)["Decided"].tolist() == [[]]
    app.session_state["person"] = "Ben"
    app.run()
    enter(app, "Reason", "slow")
    press(app, "Reject")
    assert table(app)["Decided"].tolist() == [["unverified: no login"]]
    assert "**rejected** it · unverified: no login" in said(app.markdown)


def test_a_reason_is_asked_for_where_one_can_reject(app: AppTest) -> None:
    save(app)
    reasons = [area.placeholder for area in app.text_area if area.label == "Reason"]
    press(app, "Approve")
    reasons += [area.placeholder for area in app.text_area if area.label == "Reason"]
    assert reasons == ["needed to reject", ""]


def test_who_approves_what_they_asked_for_is_marked_and_can_be_stopped(app: AppTest, monkeypatch) -> None:
    visitor(monkeypatch, is_logged_in=True, email="ana@example.org", name="Ana")
    app.run()
    saved = save(app)
    assert (saved.login, review_of(saved).login) == ("ana@example.org", "ana@example.org")
    press(app, "Approve")
    assert table(app)["Decided"].tolist() == [["self-approved"]]
    press(app, "Reopen")
    monkeypatch.setenv(SETTING, "forbidden")
    app.run()
    assert buttons(app)["Approve"].disabled and "ask somebody else" in buttons(app)["Approve"].help
    assert not buttons(app)["Reject"].disabled
    with pytest.raises(InputError, match="ask somebody else"):
        team.decide(database(), review_of(saved).id, "approved", "", "Ana K", login="ana@example.org")
    visitor(monkeypatch, is_logged_in=True, email="ben@example.org", name="Ana")
    app.run()
    press(app, "Approve")
    assert table(app)["Decided"].tolist() == [["by somebody else"]]


def test_plans_are_found_by_text_and_state(app: AppTest) -> None:
    save(app, "fast one")
    app.session_state["plan"] = app.plans[0].id
    app.run()
    save(app, "slow one", question="")
    assert table(app)["Plan"].tolist() == ["slow one", "fast one"]
    app.pills[0].set_value(["open"])
    app.run()
    assert table(app)["Plan"].tolist() == ["fast one"]
    enter(app, "Search", "slow").run()
    assert "No saved plan fits this search and these filters" in said(app.caption)
    app.pills[0].set_value([])
    app.run()
    assert table(app)["Plan"].tolist() == ["slow one"]


def test_the_list_says_what_a_plan_gains_over_what_was_deployed_and_where(app: AppTest) -> None:
    save(app, "ours")
    problem = problem_of(app)
    ours, theirs = (simulate(plan, problem).total for plan in (app.plans[1], app.plans[0]))
    row = table(app).iloc[0]
    assert (row["Gain"], row["Compared with"]) == (pytest.approx(theirs / ours), "Linear placement")
    assert (row["Cluster"], row["Recording"]) == (problem.cluster.name, problem.workload.name)
    app.session_state["in_use"] = app.plans[1].id
    app.session_state["plan"] = app.plans[0].id
    app.run()
    save(app, "theirs")
    row = table(app).set_index("Plan").loc["theirs"]
    (figure,) = gain(app).values()
    assert (f"{row['Gain']:.3g}×", row["Compared with"]) == (figure.replace("1.00", "1"), app.plans[1].name)
    assert not app.multiselect, "all plans are of one cluster and one recording"


def test_plans_are_found_by_cluster_and_recording(app: AppTest) -> None:
    room = team.workspaces(database())[0].id
    for cluster, recording, plan in (("a", "prose", app.plans[0]), ("b", "code", app.plans[1])):
        team.save_plan(database(), room, plan, "Ben", summary=team.Summary(cluster, recording))
    app.run()
    assert table(app)["Gain"].isna().all() and table(app)["Compared with"].tolist() == ["—", "—"]
    next(box for box in app.multiselect if box.label == "Cluster").set_value(["a"])
    assert table(app.run())["Recording"].tolist() == ["prose"]
    next(box for box in app.multiselect if box.label == "Recording").set_value(["code"])
    assert "No saved plan fits" in said(app.run().caption)


def test_a_search_is_found_again_after_a_reload(app: AppTest) -> None:
    save(app, "fast one", question="")
    app.session_state["plan"] = app.plans[0].id
    save(app.run(), "slow one", question="")
    enter(app, "Search", "slow").run()
    again = AppTest.from_file(MAIN, default_timeout=60)
    again.query_params["session"] = app.query_params["session"]
    visit(again, "review")
    assert table(again)["Plan"].tolist() == ["slow one"] and again.text_input(key="review-search").value == "slow"


def test_the_list_folds_away_while_a_plan_is_looked_at(app: AppTest) -> None:
    assert not any(button.label == "Show the list alone" for button in app.button)
    save(app, "ours", question="")
    assert table(app)[""].tolist() == ["▸"]
    press(app, "Show the list alone")
    assert "ours" not in said(app.subheader) and table(app)[""].tolist() == [""] and "plan" not in app.query_params


def test_a_plan_that_was_made_for_something_else_says_so_before_it_is_saved(app: AppTest) -> None:
    assert not app.warning
    app.session_state["cluster"] = cluster_presets()["hgx-h100-8"].cluster
    app.run()
    assert "Made for mixed-8; saved and simulated on hgx-h100-8, which is open." in said(app.warning).replace("\\", "")


def test_a_workspace_needs_a_name(app: AppTest) -> None:
    press(app, "Create")
    assert "name of the workspace" in said(app.error)
    enter(app, "Name of the workspace", "Spring")
    press(app, "Create")
    assert chooser(app, "Workspace").options == ["Autumn <b>x</b>", "Spring"] and "Nothing is saved here yet" in said(
        app.info
    )


# Links.


def test_a_link_opens_the_plan_and_everything_that_it_was_made_from(app: AppTest) -> None:
    prose = replace(problem_of(app).workload, name="other")
    other = RoutingTrace("other", prose.experts[::-1].copy(), prose.num_experts)
    store.save_workload(other)
    session = app.session_state
    session["workloads"] = {**session["workloads"], other.digest: "other"}
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


def test_a_link_opens_its_plan_where_plans_were_compared_before(app: AppTest) -> None:
    saved = save(app, "to be shared")
    press(app, "Compare")
    assert "to be shared" not in said(app.subheader)
    assert "to be shared" in said(link(plan=saved.plan, session=app.query_params["session"]).subheader)


def test_a_link_of_a_review_opens_that_review(app: AppTest) -> None:
    saved = save(app, question="first?")
    newest = team.open_review(database(), saved.number, "second?", "Ben")
    assert "first?" in said(link(plan=saved.plan, review=_oldest(saved)).text)
    assert "second?" in said(link(plan=saved.plan, review=newest.id).text)


def _oldest(saved: team.SavedPlan) -> str:
    return team.reviews_of(database(), saved.number)[-1].id


def test_a_reload_does_not_open_the_plan_again_over_what_was_changed_since(app: AppTest) -> None:
    saved = save(app)
    visitor = link(plan=saved.plan)
    visit(visitor, "workload")
    next(button for button in visitor.button if button.key == "strip-cluster-hgx-h100-8").click().run()
    again = link(plan=saved.plan, session=visitor.query_params["session"])
    assert again.session_state["cluster"] == cluster_presets()["hgx-h100-8"].cluster
    assert again.session_state["reviewed"][0] == saved.number and not again.error


@pytest.mark.parametrize("plan", ["0" * 64, "x'; drop table plan; --", "<script>alert(1)</script>"])
def test_a_link_that_leads_nowhere_is_said(app: AppTest, plan: str) -> None:
    visitor = link(plan=plan)
    assert "does not work" in said(visitor.error) and "<script>" not in visitor.error[0].value
    assert visitor.session_state["plan"] is None and visitor.info


def test_a_link_of_a_plan_and_another_ones_review_is_said(app: AppTest) -> None:
    saved = save(app)
    visitor = link(plan=app.plans[0].id, review=review_of(saved).id)
    assert "review of another one" in said(visitor.error)


def test_a_recording_that_is_gone_is_named_and_everything_else_is_shown(app: AppTest, own_data_folder: Path) -> None:
    saved = save(app, note="look here")
    (recording,) = (own_data_folder / "workloads").iterdir()
    recording.rename(own_data_folder / "away.npz")
    visitor = link(plan=saved.plan)
    assert "does not have the recording alpha-code" in said(visitor.warning)
    assert visitor.session_state["plan"] is None and visitor.session_state["workload"] is None
    assert "look here" in said(visitor.text) and any(button.label == "Comment" for button in visitor.button)
    assert next(metric for metric in visitor.metric if metric.label == "Time, simulated").value.endswith("ms")
    overload = next(metric for metric in visitor.metric if metric.label == "Overload factor")
    assert overload.value.endswith("×") and "p95" in overload.help
    press(visitor, "Open in this session")
    assert "does not have the recording" in said(visitor.error)
    (own_data_folder / "away.npz").rename(recording)
    press(visitor, "Open in this session")
    assert visitor.session_state["plan"] == saved.plan and not visitor.warning


@pytest.mark.parametrize("kind", ["step", "two"])
def test_plans_of_steps_and_of_two_models_are_reviewed_too(app: AppTest, kind: str) -> None:
    problem = problem_of(app)
    if kind == "step":
        problem = make_problem(
            problem.workload, problem.cluster, problem.model, Datasheet(), step=usual_step(problem.model, 8)
        )
        plan = run(TRAINING["lina"], problem, {}).result.solution
    else:
        second = RoutingTrace("second", problem.workload.experts[::-1].copy(), problem.workload.num_experts)
        store.save_workload(second)
        problem = make_problem(
            problem.workload, problem.cluster, problem.model, Datasheet(), second=(second, problem.model)
        )
        plan = run(SYSTEMS["packing"], problem, {}).result.solution
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


def test_a_database_that_does_not_answer_is_said_and_other_pages_go_on(app: AppTest, monkeypatch) -> None:
    save(app)
    monkeypatch.setenv("DATABASE_URL", "sqlite:////nowhere/at/all.db")
    visit(app, "review")
    assert "does not answer" in said(app.error)
    visit(app, "timeline")
    assert not app.error


# Who else is told.


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with serving(monkeypatch) as service:
        yield service


def test_a_webhook_is_told_of_requests_and_decisions(app: AppTest, service: Service) -> None:
    saved = save(app, HOSTILE, question="Shall <!channel> we?")
    enter(app, "Reason", "x" * 600)
    press(app, "Reject")
    soon(lambda: len(service.told) == 2)
    (asked, decided), review = [body for _, _, body in service.told], review_of(saved)
    assert (asked["event"], asked["verdict"], asked["question"]) == ("review.requested", None, "Shall <!channel> we?")
    assert (asked["by"], asked["workspace"], asked["review"]) == ("Ana", "Autumn <b>x</b>", review.id)
    assert asked["plan"] == {"id": saved.plan, "name": HOSTILE} and asked["link"].endswith(f"review={review.id}")
    assert asked["text"] == f"A decision on a plan is requested: {asked['link']}"
    assert (decided["event"], decided["verdict"]) == ("review.decided", "rejected")
    assert len(decided["reason"]) == 500 and "x" * 9 not in decided["text"]


def test_a_webhook_that_fails_is_said_to_the_operator_and_fails_nobody(app: AppTest, service: Service) -> None:
    service.status = 500
    saved = save(app)
    assert review_of(saved).question and not app.error and not app.exception
    soon(lambda: WEBHOOK.fault)
    visit(app, "operate")
    assert "The webhook at 127.0.0.1 did not take a message" in said(app.warning)


# Where a comment points.


def about(app: AppTest):
    return next(box for box in app.selectbox if box.label == "About")


def point(app: AppTest, title: str, text: str = "look") -> None:
    about(app).set_value(next(option for option in about(app).options if option == title))
    enter(app, "Your comment", text)
    press(app, "Comment")


def follow(**query: str) -> AppTest:
    """A new session that opens a link which leads to a page of its own."""
    app = AppTest.from_file(MAIN, default_timeout=60)
    for name, value in query.items():
        app.query_params[name] = value
    return visit(app, "review")


def shown_layers(app: AppTest, label: str) -> tuple[int, int]:
    return next(slider.value for slider in app.slider if slider.label == label)


def test_a_comment_points_to_a_layer_on_the_timeline_or_on_affinity(app: AppTest) -> None:
    saved = save(app)
    point(app, "Layer 3 on Timeline")
    point(app, "Layers 4 and 5 on Affinity")
    review = review_of(saved)
    assert [str(comment.place) for comment in review.comments] == ["layer:3", "hops:4"] and about(app).value is None
    codes = [code.value for code in app.code]
    assert any(code.endswith(f"plan={saved.plan}&review={review.id}&about=layer%3A3") for code in codes)
    visitor = follow(plan=saved.plan, review=review.id, about="layer:3")
    assert [header.value for header in visitor.header] == ["Timeline"] and shown_layers(visitor, "MoE layers") == (3, 4)
    assert visitor.session_state["plan"] == saved.plan and not visitor.exception and not visitor.error
    assert shown_layers(visit(visitor, "timeline"), "MoE layers") == (3, 4)
    visitor = follow(plan=saved.plan, review=review.id, about="hops:4")
    assert [header.value for header in visitor.header] == ["Affinity"]
    assert shown_layers(visitor, "Layers compared") == (4, 5) and not visitor.exception
    press(app, "Layer 3 on Timeline")
    assert [header.value for header in app.header] == ["Timeline"] and shown_layers(app, "MoE layers") == (3, 4)
    press(app, "Back to the comment")
    assert [header.value for header in app.header] == ["Review"] and "about" not in app.query_params
    assert "Discussion" in said(app.subheader)


def test_a_comment_points_to_a_gpu_or_a_chart_of_the_brief(app: AppTest) -> None:
    saved = save(app)
    names = problem_of(app).cluster.gpu_names
    point(app, names[5])
    point(app, "Timelines of the brief")
    review = review_of(saved)
    assert [str(comment.place) for comment in review.comments] == ["gpu:5", "chart:timelines"]
    visitor = link(plan=saved.plan, review=review.id, about="gpu:5")
    assert f"points to {names[5]}, framed below" in said(visitor.markdown).replace("\\", "")
    assert visitor.query_params["about"] in ("gpu:5", ["gpu:5"])
    press(visitor, "Timelines of the brief")
    assert "points to this chart" in said(visitor.markdown) and "framed below" not in said(visitor.markdown)
    figure = charts.placement(app.plans[1], problem_of(app), 5)
    assert [(shape.x0, shape.x1) for shape in figure.layout.shapes][-1] == (4.5, 5.5)


def test_on_its_page_a_layer_that_a_comment_points_to_is_named(app: AppTest) -> None:
    def page() -> None:
        from app import state
        from app.review import place

        state.restore()
        place.mark_layer()

    saved = save(app)
    beside = AppTest.from_function(page)
    beside.query_params["session"] = app.query_params["session"]
    beside.session_state["reviewed"] = (saved.number, None)
    assert not beside.run().markdown
    beside.session_state["pointed"] = (Place("layer", 7), 1)
    assert "The comment points to layer 7." in said(beside.run().markdown)
    beside.session_state["plan"] = app.plans[0].id
    assert not beside.run().markdown and not beside.exception


@pytest.mark.parametrize("text", ["layer:-1", "<script>alert(1)</script>", "chart:x", "gpu:1 2", "layer:9999999"])
def test_a_link_that_points_to_nothing_shows_its_plan_and_says_so(app: AppTest, text: str) -> None:
    saved = save(app, "to be shared")
    visitor = link(plan=saved.plan, about=text)
    assert "is no layer, GPU or chart" in said(visitor.error) and "<script>" not in visitor.error[0].value
    assert "to be shared" in said(visitor.subheader)


def test_a_link_to_a_layer_that_the_plan_lacks_begins_with_the_first(app: AppTest) -> None:
    visitor = follow(plan=save(app).plan, about="layer:4000")
    assert shown_layers(visitor, "MoE layers") == (0, 1) and not visitor.error and not visitor.exception


def test_where_the_recording_is_gone_a_link_to_a_layer_stays_with_the_discussion(app: AppTest, own_data_folder) -> None:
    saved = save(app)
    point(app, "Layer 3 on Timeline")
    (recording,) = (own_data_folder / "workloads").iterdir()
    recording.unlink()
    visitor = link(plan=saved.plan, about="layer:3")
    assert [header.value for header in visitor.header] == ["Review"]
    assert "does not have the recording" in said(visitor.error) and "look" in said(visitor.text)


# Parents, runs, comparison.


def test_parents_and_children_lead_to_each_other(app: AppTest) -> None:
    parent = save(app, "the parent")
    child = Plan.from_dict(app.plans[0].model_dump(mode="json") | {"parent": parent.plan, "name": "the child"}, "plan")
    team.save_plan(database(), parent.workspace, child, "Ben", "", parent.inputs)
    app.run()
    press(app, f"the child · {child.id[:8]}")
    assert "the child" in said(app.subheader)
    press(app, f"the parent · {parent.plan[:8]}")
    assert "the parent" in said(app.subheader)


def test_a_finished_launch_is_noted_once_beside_its_plan(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(app)
    wanted = Launch(tuple(app.plans), problem.workload, problem.model, problem.cluster, ranks=2, tokens=64)
    job = request_of(wanted, store.data_folder())
    request = json.loads((job.folder / "request.json").read_text())
    request["arguments"]["by"] = "Ben <b>x</b>"
    (job.folder / "request.json").write_text(json.dumps(request))
    finish(job, 1.5, monkeypatch)
    app.session_state["launch_jobs"] = [job.id]
    visit(app, "launch")
    runs = team.runs(database())
    assert sorted(run.plan for run in runs) == sorted(plan.id for plan in app.plans)
    (run_of_it,) = team.runs(database(), app.plans[0].id)
    assert run_of_it.measured == pytest.approx(1.5 * run_of_it.predicted) and run_of_it.by == "Ben <b>x</b>"
    assert run_of_it.report["ranks"] == 2 and len(run_of_it.report["passes"]) == 3
    visit(app, "review")
    save(app)
    assert app.dataframe[1].value["Launched by"].tolist() == ["Ben <b>x</b>"]
    assert app.dataframe[1].value["Ratio"].tolist()[0] == "1.65×"


def test_a_launch_is_held_up_by_no_database(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(app)
    wanted = Launch(tuple(app.plans[:1]), problem.workload, problem.model, problem.cluster, ranks=2, tokens=64)
    job = finish(request_of(wanted, store.data_folder()), 1.5, monkeypatch)
    app.session_state["launch_jobs"] = [job.id]
    monkeypatch.setenv("DATABASE_URL", "sqlite:////nowhere/at/all.db")
    visit(app, "launch")
    assert "Not noted for the team" in said(app.caption) and app.metric
    assert report.runs_of(job, read_answer(job), "local", 2, 1.0)[0]["by"] == report.NOBODY


def test_two_plans_are_compared(app: AppTest) -> None:
    save(app, "ours")
    press(app, "Compare")
    assert not app.exception and not app.error
    assert [box.label for box in app.selectbox if box.label in ("Plan", "Compare with")] == ["Plan", "Compare with"]
    figures = table(app).set_index("")
    problem = problem_of(app)
    ours, theirs = simulate(app.plans[1], problem).total, simulate(app.plans[0], problem).total
    assert figures.loc["Time (simulated)", "Second against first"] == f"{ours / theirs:.3g}× as fast"
    assert list(figures.columns[:2]) == ["ours", "Linear placement"]


def test_what_cannot_be_compared_is_said(app: AppTest) -> None:
    saved = save(app, "ours")
    small = Placement(experts=2, experts_of_gpu=(((0,), (1,)),), model_layers=(0,))
    other = Plan(
        name="a small one",
        placement=small,
        send_order=SendOrder(mode="concurrent"),
        provenance=Provenance(optimiser="test"),
    )
    team.save_plan(database(), saved.workspace, other, "Ben")
    press(app, "Compare")
    beside = next(selectbox for selectbox in app.selectbox if selectbox.label == "Compare with")
    assert "a small one" in beside.options[-1] and not app.error, "those of other inputs come last"
    beside.select_index(len(beside.options) - 1)
    app.run()
    assert not app.exception and "cannot be compared here" in said(app.error)
