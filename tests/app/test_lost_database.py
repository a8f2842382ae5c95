"""The team's database goes in the middle of a review and comes back: one clear line, nothing lost, no restart."""

from collections.abc import Iterator

import psycopg
import pytest
from streamlit.testing.v1 import AppTest

from app import cached, state
from engine.store import database, team
from tests.app.test_launch_page import MAIN
from tests.app.test_pages import press, visit
from tests.app.test_review_page import enter, review_of, save
from tests.app.test_step_page import said
from tests.postgres import Server, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture
def server(programs: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with an empty database, which a test may stop."""
    monkeypatch.setenv(database.URL, programs.address)
    yield programs
    if not programs.runs:
        programs.start()
    database.database().close()
    with psycopg.connect(programs.address, autocommit=True) as connection:
        connection.execute("drop schema public cascade; create schema public")
    database._opened.cache_clear()


def field(app: AppTest, label: str) -> str:
    return next(widget for widget in (*app.text_input, *app.text_area) if widget.label == label).value


def lost(app: AppTest) -> None:
    """The page says that the database is gone, in one line."""
    lines = [error.value for error in app.error]
    assert not app.exception and len(lines) == 1 and "does not answer" in lines[0] and "\n" not in lines[0]


@pytest.mark.everything
def test_a_database_that_goes_in_the_middle_of_a_review_and_comes_back(server: Server, ana: AppTest) -> None:
    team.add_workspace(database.database(), "Autumn", "Ana")
    app = visit(ana, "review")
    saved = save(app)
    review = review_of(saved).id
    enter(app, "Your comment", "before")
    press(app, "Comment")
    server.stop()
    enter(app, "Your comment", "in the dark")
    press(app, "Comment")
    lost(app)
    visitor = AppTest.from_file(MAIN, default_timeout=60)
    visitor.query_params["plan"], visitor.query_params["review"] = saved.plan, review
    lost(visit(visitor, "review"))
    server.start()
    app.run()
    assert not app.exception and not app.error, said(app.error)
    assert field(app, "Your comment") == "in the dark"
    press(app, "Comment")
    enter(app, "Reason", "back again")
    press(app, "Approve")
    kept = team.find_review(database.database(), review)
    assert [comment.text for comment in kept.comments] == ["before", "in the dark"] and kept.state == "approved"
    visitor.run()
    assert "in the dark" in [text.value for text in visitor.text], "the link is followed now"


@pytest.mark.everything
def test_what_was_to_be_saved_with_a_plan_stays_too(server: Server, ana: AppTest) -> None:
    team.add_workspace(database.database(), "Autumn", "Ana")
    app = visit(ana, "review")
    server.stop()
    enter(app, "Note", "half a note")
    press(app, "Save")
    lost(app)
    server.start()
    app.run()
    assert field(app, "Note") == "half a note" and field(app, "Name of the plan") == app.plans[1].name
    press(app, "Save")
    (saved,) = team.saves_of(database.database(), [app.plans[1].id])
    assert saved.note == "half a note"


def test_a_page_waits_once_for_a_database_that_is_silent(empty_session, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def silent(db: database.Database, id: str) -> None:
        asked.append(id)
        raise database.LostError("it does not answer")

    monkeypatch.setattr(team, "load_plan", silent)
    for letter in "abc":
        state.add_saved(letter * 64, None)
    assert cached.candidates() == {} and len(asked) == 1


@pytest.mark.everything
def test_pages_that_need_no_database_work_without_one(server: Server, ana: AppTest) -> None:
    server.stop()
    for page in ("workload", "optimise", "timeline"):
        assert not visit(ana, page).error and ana.session_state["plan"]
