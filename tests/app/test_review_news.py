"""What others did on Review while one was away or sat before it, and what whoever saved a plan may correct."""

import pytest
from streamlit.testing.v1 import AppTest

from app.review import news
from engine.errors import InputError
from engine.store import team, team_list
from engine.store.database import database
from tests.app.test_pages import press, visit
from tests.app.test_review_page import buttons, enter, link, review_of, save, table
from tests.app.test_step_page import said

pytestmark = pytest.mark.slow


@pytest.fixture
def app(ana: AppTest) -> AppTest:
    """Ana's session on the Review page, in a workspace of hers."""
    team.add_workspace(database(), "Autumn", "Ana")
    return visit(ana, "review")


def test_the_list_and_the_review_say_what_is_new_since_one_looked(app: AppTest, monkeypatch) -> None:
    review = review_of(save(app))
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


def test_what_others_do_while_a_page_stays_open_is_not_seen_by_its_refreshes(app: AppTest, monkeypatch) -> None:
    monkeypatch.setattr(news, "TAKEN_IN", 0.0)
    review = review_of(save(app))
    enter(app, "Reason", "no money")
    press(app, "Reject")
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
    enter(reloaded, "Your comment", "therefore")
    press(reloaded, "Comment")
    assert "New since" not in said(reloaded.markdown)


def test_a_decision_says_whose_it_overruled(app: AppTest) -> None:
    review = review_of(save(app))
    team.decide(database(), review.id, "rejected", "no money", "Ben")
    assert "rejected by Ben" in said(app.run().caption) and "had" not in said(app.caption)
    press(app, "Reopen")
    assert "reopened by Ana; Ben had rejected it" in said(app.caption)
    press(app, "Approve")
    assert "approved by Ana; Ben had rejected it" in said(app.caption)
    team.decide(database(), review.id, "reopened", "", "Ana")
    team.decide(database(), review.id, "rejected", "again", "Ben")
    assert "rejected by Ben" in said(app.run().caption) and "had" not in said(app.caption), "Ana took hers back herself"


def test_a_page_goes_on_where_a_look_cannot_be_kept(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    review = review_of(save(app))
    team.add_comment(database(), review.id, "new", "Ben")

    def full(*arguments: object) -> None:
        raise InputError("the database is full")

    monkeypatch.setattr(team_list, "note_look", full)
    visitor = link(plan=review.saved.plan, session=app.query_params["session"])
    assert "[1 comment](#discussion)" in said(visitor.markdown) and "new" in said(visitor.text)


def test_who_saved_a_plan_corrects_its_name_and_note(app: AppTest) -> None:
    saved = save(app, "Arora", "cheap")
    other = visit(link(plan=saved.plan), "optimise")
    assert "Arora" in table(other)["Plan"].tolist()
    enter(app, "Name", "Aurora <b>2</b>")
    enter(app, "Note", "cheap and fast")
    press(app, "Change")
    now = team.find_saved(database(), saved.number)
    assert (now.name, now.note, now.by, now.at) == ("Aurora <b>2</b>", "cheap and fast", "Ana", saved.at)
    assert "changed the name from “Arora” to “Aurora <b>2</b>”" in review_of(saved).comments[0].text
    assert table(app)["Plan"].tolist() == ["Aurora <b>2</b>"]
    assert "Aurora <b>2</b>" in table(other.run())["Plan"].tolist(), "though it was read under the other name"
    visitor = link(plan=saved.plan)
    visitor.session_state["person"] = "Ben"
    assert "Change" not in buttons(visitor.run())
    with pytest.raises(InputError, match="only Ana, who saved this plan"):
        team_list.correct_saved(database(), saved.number, "mine", "", "Ben")
