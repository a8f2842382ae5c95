"""The Review page: plans are saved, discussed, decided and compared, runs are noted, and news is shown."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from streamlit.testing.v1 import AppTest

from app.launch import report
from app.review import news
from app.review import store as review_store
from app.review.plan_list import FIRST
from app.tables import plain
from engine import store
from engine.catalogue import cluster_presets
from engine.errors import InputError
from engine.jobs.kinds import read_answer
from engine.plan import Placement, Plan, SendOrder
from engine.result import Provenance
from engine.simulate import simulate
from engine.store import team, team_list
from engine.store.database import database
from engine.store.team_approval import SETTING
from engine.units import seconds, signed
from engine.webhook import WEBHOOK
from engine.workload import RoutingTrace
from tests.cases.launched import finish, request_of
from tests.cases.pages import buttons, chooser, field, gain, metrics, press, said, studio, visit
from tests.cases.reviews import fill, link, review_of, save, table
from tests.cases.sessions import problem_of, visitor, wanted
from tests.webhook_service import Service, serving, soon


@pytest.fixture
def app(unreviewed: AppTest) -> AppTest:
    return unreviewed


HOSTILE = "<img src=x onerror=alert(1)> **v2** <script>alert(1)</script>"


def test_a_plan_is_saved_discussed_and_decided(app: AppTest) -> None:
    assert "Show the list alone" not in buttons(app) and not app.warning
    saved = save(app, HOSTILE, "cheap\nand <b>fast</b>")
    assert (saved.name, saved.by, saved.plan) == (HOSTILE, "Ana", app.plans[1].id)
    assert app.query_params["plan"] == saved.plan and app.query_params["review"] == review_of(saved).id
    assert "cheap\nand <b>fast</b>" in [text.value for text in app.text]
    assert table(app)[""].tolist() == ["▸"] and "Decided" not in table(app) and reason(app).placeholder
    there = buttons(app)["Saved here already"]
    assert there.disabled and "Save" not in buttons(app) and there.help == f"by Ana, as {plain(HOSTILE)}"
    assert review_store.saved_in(saved.workspace, app.plans[0]) is None
    press(fill(app, "Your comment", HOSTILE), "Comment")
    press(app, "Reject")
    assert "Give a reason before rejecting." in said(app.error)
    press(fill(app, "Reason", "slow on <i>prose</i>"), "Reject")
    assert table(app)["State"].tolist() == [["rejected"]] and table(app)["Comments"].tolist() == [1]
    press(app, "Reopen")
    press(app, "Approve")
    assert [decision.verdict for decision in review_of(saved).decisions] == ["rejected", "reopened", "approved"]
    texts = [text.value for text in app.text]
    assert HOSTILE in texts and "slow on <i>prose</i>" in texts
    assert "<script>" not in "".join(block.value for block in (*app.markdown, *app.caption, *app.subheader))
    assert table(app)["Plan"].tolist() == [HOSTILE]
    # Without a login only a typed name tells who decided.
    assert table(app)["Decided"].tolist() == [["self-approved (name typed, no login)"]] and not reason(app).placeholder
    assert "**approved** it · self-approved (name typed, no login)" in said(app.markdown)
    press(app, "Reopen")
    assert "Decided" not in table(app) or table(app)["Decided"].tolist() == [[]]
    app.session_state["person"] = "Ben"
    press(fill(app.run(), "Reason", "slow"), "Reject")
    assert table(app)["Decided"].tolist() == [["unverified: no login"]]
    assert "**rejected** it · unverified: no login" in said(app.markdown)
    press(app, "Show the list alone")
    assert plain(HOSTILE) not in [header.value for header in app.subheader]
    assert table(app)[""].tolist() == [""] and "plan" not in app.query_params


def reason(app: AppTest):
    return next(area for area in app.text_area if area.label == "Reason")


def test_what_is_said_of_a_plan_alone_and_against_another_is_what_the_simulation_says(app: AppTest) -> None:
    saved = save(app, "ours", question="")
    problem = problem_of(app)
    ours, theirs = simulate(app.plans[1], problem).total, simulate(app.plans[0], problem).total
    figures = metrics(app)
    assert gain(app) == {"Gain over Linear placement, in sample": signed(theirs / ours - 1)}
    assert figures["Simulated pass"] == seconds(ours) and "Nothing was held out" in said(app.markdown)
    assert app.session_state["reviewed"][1] is None and table(app)["State"].tolist() == [["no review"]]
    other = RoutingTrace("shifted *it*", (problem.workload.experts + 3) % 16, 16)
    app.session_state["workloads"] = {**app.session_state["workloads"], store.save_workload(other): other.name}
    press(app, "Ask for a decision")
    there = problem.with_workload(other)
    worst = simulate(app.plans[0], there).total / simulate(app.plans[1], there).total
    assert gain(app) == {"Gain over Linear placement, held out": signed(worst - 1)}
    assert "On shifted *it*" in said(app.markdown)
    assert table(app)["State"].tolist() == [["open"]] and "Shall we run this?" in said(app.text)

    press(app, "Compare")
    assert not app.error
    assert [box.label for box in app.selectbox if box.label in ("Plan", "Compare with")] == ["Plan", "Compare with"]
    figures = table(app).set_index("")
    assert figures.loc["Time (simulated)", "Second against first"] == signed(ours / theirs - 1)
    assert list(figures.columns[:2]) == ["ours", "Linear placement"]
    small = Placement(experts=2, experts_of_gpu=(((0,), (1,)),), model_layers=(0,))
    parts = {"name": "a small one", "placement": small, "provenance": Provenance(optimiser="test")}
    alien = Plan(**parts, send_order=SendOrder(mode="concurrent"))
    team.save_plan(database(), saved.workspace, alien, "Ben")
    beside = field(app.run(), "Compare with")
    assert "a small one" in beside.options[-1] and not app.error, "those of other inputs come last"
    beside.select_index(len(beside.options) - 1)
    app.run()
    assert not app.exception and "cannot be compared here" in said(app.error)


def test_who_decides_on_what_somebody_else_has_decided_is_told_and_named(reviewed: AppTest) -> None:
    app, review = reviewed, review_of(reviewed.saved)
    team.decide(database(), review.id, "rejected", "no money", "Ben")
    press(fill(app, "Reason", "cheap enough"), "Approve")
    assert "Ben has just rejected this" in said(app.error) and len(review_of(review.saved).decisions) == 1
    assert "no money" in said(app.text) and reason(app).value == "cheap enough"
    assert "rejected by Ben" in said(app.caption) and "had" not in said(app.caption)
    press(app, "Reopen")
    assert "reopened by Ana; Ben had rejected it" in said(app.caption)
    press(app, "Approve")
    assert "approved by Ana; Ben had rejected it" in said(app.caption)
    team.decide(database(), review.id, "reopened", "", "Ana")
    team.decide(database(), review.id, "rejected", "again", "Ben")
    assert "rejected by Ben" in said(app.run().caption) and "had" not in said(app.caption), "Ana took hers back herself"


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
    visitor(monkeypatch, is_logged_in=True, email="ben@example.org", name="Ana")
    app.run()
    press(app, "Approve")
    assert table(app)["Decided"].tolist() == [["by somebody else"]]


def test_the_list_says_what_plans_gain_and_is_searched_also_after_a_reload(app: AppTest) -> None:
    save(app, "fast one")
    problem = problem_of(app)
    ours, theirs = (simulate(plan, problem).total for plan in (app.plans[1], app.plans[0]))
    row = table(app).iloc[0]
    assert (row["Gain"], row["Compared with"]) == (pytest.approx(theirs / ours), "Linear placement")
    assert (row["Cluster"], row["Recording"]) == (problem.cluster.name, problem.workload.name)
    app.session_state["in_use"], app.session_state["plan"] = app.plans[1].id, app.plans[0].id
    save(app.run(), "slow one", question="")
    row = table(app).set_index("Plan").loc["slow one"]
    (figure,) = gain(app).values()
    assert (signed(row["Gain"] - 1), row["Compared with"]) == (figure, app.plans[1].name)
    assert not app.multiselect, "all plans are of one cluster and one recording"

    assert table(app)["Plan"].tolist() == ["slow one", "fast one"]
    app.pills[0].set_value(["open"])
    app.run()
    assert table(app)["Plan"].tolist() == ["fast one"]
    fill(app, "Search", "slow").run()
    assert "No saved plan fits this search and these filters" in said(app.caption)
    app.pills[0].set_value([])
    app.run()
    assert table(app)["Plan"].tolist() == ["slow one"]
    again = visit(studio(session=app.query_params["session"]), "review")
    assert table(again)["Plan"].tolist() == ["slow one"] and again.text_input(key="review-search").value == "slow"


def test_plans_are_found_by_cluster_and_recording(unreviewed: AppTest) -> None:
    app, room = unreviewed, team.workspaces(database())[0].id
    for cluster, recording, plan in (("a", "prose", app.plans[0]), ("b", "code", app.plans[1])):
        team.save_plan(database(), room, plan, "Ben", summary=team.Summary(cluster, recording))
    app.run()
    assert table(app)["Gain"].isna().all() and table(app)["Compared with"].tolist() == ["—", "—"]
    field(app, "Cluster").set_value(["a"])
    assert table(app.run())["Recording"].tolist() == ["prose"]
    field(app, "Recording").set_value(["code"])
    assert "No saved plan fits" in said(app.run().caption)


def test_the_first_saved_plan_begins_a_workspace_in_which_the_next_one_stands(ana: AppTest) -> None:
    app = visit(ana, "review")
    assert team.workspaces(database()) == [] and f"The first one begins the workspace {FIRST}" in said(app.info)
    first = save(app)
    assert (first.plan, app.query_params["plan"]) == (app.session_state["plan"],) * 2 and "Saved here already" in buttons(app)
    app.session_state["plan"] = next(plan.id for plan in app.plans if plan.id != first.plan)
    second = save(visit(app, "review"))
    (only,) = team.workspaces(database())
    assert (only.name, first.workspace, second.workspace) == (FIRST, only.id, only.id) and second.plan != first.plan


def test_a_plan_of_other_inputs_says_so_before_it_is_saved_and_a_workspace_needs_a_name(app: AppTest) -> None:
    app.session_state["cluster"] = cluster_presets()["hgx-h100-8"].cluster
    app.run()
    assert "Made for mixed-8; saved and simulated on hgx-h100-8, which is open." in said(app.warning)
    press(app, "Create")
    assert "name of the workspace" in said(app.error)
    press(fill(app, "Name of the workspace", "Spring"), "Create")
    assert chooser(app, "Workspace").options == ["Autumn <b>x</b>", "Spring"]
    assert "Nothing is saved here yet" in said(app.info)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with serving(monkeypatch) as service:
        yield service


def test_a_webhook_is_told_and_one_that_fails_is_said_to_the_operator_alone(app: AppTest, service: Service) -> None:
    saved = save(app, HOSTILE, question="Shall <!channel> we?")
    press(fill(app, "Reason", "x" * 600), "Reject")
    soon(lambda: len(service.told) == 2)
    (asked, decided), review = [body for _, _, body in service.told], review_of(saved)
    assert (asked["event"], asked["verdict"], asked["question"]) == ("review.requested", None, "Shall <!channel> we?")
    assert (asked["by"], asked["workspace"], asked["review"]) == ("Ana", "Autumn <b>x</b>", review.id)
    assert asked["plan"] == {"id": saved.plan, "name": HOSTILE} and asked["link"].endswith(f"review={review.id}")
    assert asked["text"] == f"A decision on a plan is requested: {asked['link']}"
    assert (decided["event"], decided["verdict"]) == ("review.decided", "rejected")
    assert len(decided["reason"]) == 500 and "x" * 9 not in decided["text"]
    service.status = 500
    press(app, "Reopen")
    assert review_of(saved).state == "open" and not app.error
    soon(lambda: WEBHOOK.fault)
    visit(app, "operate")
    assert "The webhook at 127.0.0.1 did not take a message" in said(app.warning)


def test_parents_and_children_lead_to_each_other(reviewed: AppTest) -> None:
    app, parent = reviewed, reviewed.saved
    child = Plan.from_dict(app.plans[0].model_dump(mode="json") | {"parent": parent.plan, "name": "the child"}, "plan")
    team.save_plan(database(), parent.workspace, child, "Ben", "", parent.inputs)
    app.run()
    press(app, f"the child · {child.id[:8]}")
    assert "the child" in said(app.subheader)
    press(app, f"to be shared · {parent.plan[:8]}")
    assert "to be shared" in said(app.subheader)


def test_a_finished_launch_is_noted_once_beside_its_plan(reviewed: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    app = reviewed
    job = request_of(wanted(app), store.data_folder())
    request = job.folder / "request.json"
    asked = json.loads(request.read_text())
    request.write_text(json.dumps(asked | {"arguments": asked["arguments"] | {"by": "Ben <b>x</b>"}}))
    finish(job, 1.5, monkeypatch)
    app.session_state["launch_jobs"] = [job.id]
    visit(app, "launch")
    runs = team.runs(database())
    assert sorted(run.plan for run in runs) == sorted(plan.id for plan in app.plans)
    (run_of_it,) = team.runs(database(), app.plans[0].id)
    assert run_of_it.measured == pytest.approx(1.5 * run_of_it.predicted) and run_of_it.by == "Ben <b>x</b>"
    assert run_of_it.report["ranks"] == 2 and len(run_of_it.report["passes"]) == 3
    visit(app, "review")
    assert app.dataframe[1].value["Launched by"].tolist() == ["Ben <b>x</b>"]
    assert app.dataframe[1].value["Ratio"].tolist()[0] == "1.65×"


def test_a_launch_is_held_up_by_no_database(launch_page: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    app = launch_page
    job = finish(request_of(replace(wanted(app), plans=tuple(app.plans[:1])), store.data_folder()), 1.5, monkeypatch)
    app.session_state["launch_jobs"] = [job.id]
    monkeypatch.setenv("DATABASE_URL", "sqlite:////nowhere/at/all.db")
    visit(app, "launch")
    assert "Not noted for the team" in said(app.caption) and app.metric
    assert report.runs_of(job, read_answer(job), "local", 2, 1.0)[0]["by"] == report.NOBODY


def test_the_list_and_the_review_say_what_is_new_since_one_looked(reviewed: AppTest, monkeypatch) -> None:
    app, review = reviewed, review_of(reviewed.saved)
    assert "New" not in table(app.run()) and "New since" not in said(app.markdown)
    app.session_state["reviewed"] = None
    app.run()
    for text in ("one", "two"):
        team.add_comment(database(), review.id, text, "Ben")
    team.decide(database(), review.id, "rejected", "no", "Ben")
    team.note_thresholds(database(), review.saved.plan, {"gain": 0.05}, {"gain": 0.15}, "Ben")
    team.add_comment(database(), review.id, "mine", "Ana")
    assert table(app.run())["New"].tolist() == ["2 comments, 1 decision, thresholds"]
    theirs = link(plan=review.saved.plan, session=app.query_params["session"])
    assert "New since you last looked" in said(theirs.markdown)
    assert "[Ben rejected it just now · 2 comments, thresholds](#discussion)" in said(theirs.markdown)
    assert "gain held out 5 % → 15 %" in said(theirs.markdown)
    assert "New" in table(theirs.run()), "nobody had the time to read it"
    monkeypatch.setattr(news, "TAKEN_IN", 0.0)
    assert "New" not in table(theirs.run().run()) and "New since you last looked" in said(theirs.markdown)
    visitor = link(plan=review.saved.plan)
    visitor.session_state["person"] = "Cara"
    assert table(visitor.run())["New"].tolist() == ["not seen yet"] and "New since" not in said(visitor.markdown)
    assert "New" not in table(visitor.run())

    def full(*_: object) -> None:
        raise InputError("the database is full")

    team.add_comment(database(), review.id, "new", "Ben")
    monkeypatch.setattr(team_list, "note_look", full)
    visitor = link(plan=review.saved.plan, session=app.query_params["session"])
    assert "[1 comment](#discussion)" in said(visitor.markdown) and "new" in said(visitor.text)


def test_what_others_do_while_a_page_stays_open_is_not_seen_by_its_refreshes(reviewed: AppTest, monkeypatch) -> None:
    monkeypatch.setattr(news, "TAKEN_IN", 0.0)
    app, review = reviewed, review_of(reviewed.saved)
    press(fill(app, "Reason", "no money"), "Reject")
    assert "New since" not in said(app.markdown)
    team.decide(database(), review.id, "reopened", "", "Ben")
    team.decide(database(), review.id, "approved", "", "Ben")
    for _ in range(3):
        app.run()
    told = "Ben reopened it just now · Ben approved it just now"
    assert told in said(app.markdown) and table(app)["New"].tolist() == ["2 decisions"]
    reloaded = link(plan=review.saved.plan, session=app.query_params["session"])
    assert told in said(reloaded.markdown)
    press(reloaded, "Dismiss")
    assert "New since" not in said(reloaded.markdown) and "New" not in table(reloaded.run())
    team.add_comment(database(), review.id, "why?", "Ben")
    assert "[1 comment](#discussion)" in said(reloaded.run().markdown)
    press(fill(reloaded, "Your comment", "therefore"), "Comment")
    assert "New since" not in said(reloaded.markdown)


def test_who_saved_a_plan_corrects_its_name_and_note(reviewed: AppTest) -> None:
    app, saved = reviewed, reviewed.saved
    other = visit(link(plan=saved.plan), "optimise")
    assert "to be shared" in table(other)["Plan"].tolist()
    fill(app, "Name", "Aurora <b>2</b>")
    press(fill(app, "Note", "cheap and fast"), "Change")
    now = team.find_saved(database(), saved.number)
    assert (now.name, now.note, now.by, now.at) == ("Aurora <b>2</b>", "cheap and fast", "Ana", saved.at)
    assert "changed the name from “to be shared” to “Aurora <b>2</b>”" in review_of(saved).comments[0].text
    assert table(app)["Plan"].tolist() == ["Aurora <b>2</b>"]
    assert "Aurora <b>2</b>" in table(other.run())["Plan"].tolist(), "though it was read under the other name"
    visitor = link(plan=saved.plan)
    visitor.session_state["person"] = "Ben"
    assert "Change" not in buttons(visitor.run())
    with pytest.raises(InputError, match="only Ana, who saved this plan"):
        team_list.correct_saved(database(), saved.number, "mine", "", "Ben")
