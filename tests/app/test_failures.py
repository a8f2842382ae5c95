"""Full disks, a lost database and faults of a page: one clear line, and nothing lost."""

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import cached, header, state, uploads
from app import failing as page_faults
from app.state.stored import Session, read, write
from engine import store
from engine.errors import InputError
from engine.store import database, team
from tests.cases.pages import buttons, open_sample, press, run, said, studio, visit
from tests.cases.reviews import fill, link, review_of, save
from tests.cases.sessions import JOB, TOKEN
from tests.faults import failing
from tests.postgres import Server, serving

ANOTHER, THIRD = "hgx-h100-8", "hgx-h200-8"
"""Clusters that every page offers besides the sample's."""


def tab() -> AppTest:
    """The studio at the address of a session, which is stored where there is room."""
    with contextlib.suppress(InputError):
        if store.load_session(TOKEN) is None:
            store.save_session(TOKEN, write(Session()))
    return studio(session=TOKEN).run()


def choose(app: AppTest, cluster: str) -> AppTest:
    app.button(key=f"strip-cluster-{cluster}").click()
    return run(app)


def stored_cluster() -> str:
    return read(store.load_session(TOKEN))[0].cluster.name


def test_a_first_visit_to_a_full_disk_has_a_line_and_pages_and_goes_on_once_there_is_room(
    own_data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--sample"])
    store.data_folder()
    with failing(own_data_folder, "ENOSPC", at=1):
        app = tab()
        for page in ("workload", "what_if"):
            visit(app, page)
            assert "cannot be written" in said(app.error) and app.info
            assert "Open the sample" in buttons(app)
    visit(app, "workload")
    assert not app.error and app.session_state["workload"] and app.session_state["cluster"]


def test_what_is_changed_on_a_full_disk_stays_in_the_tab_and_is_kept_once_there_is_room(own_data_folder: Path) -> None:
    app = open_sample(tab())
    with failing(own_data_folder, "ENOSPC", at=1):
        visit(app, "what_if")
        app.slider(key="what-if-noise").set_value(30)
        run(app)
        choose(app, ANOTHER)
        for page in ("workload", "optimise", "review"):
            visit(app, page)
            assert app.session_state["cluster"].name == ANOTHER
            assert "What you change stays in this tab only: the data folder" in said(app.error)
        with pytest.raises(InputError, match="cannot be written"), uploads.as_file("a.csv", b"1"):
            pytest.fail("there is no room")
    assert stored_cluster() == "mixed-8"
    press(app, "Try again")
    assert not app.error and stored_cluster() == ANOTHER
    assert read(store.load_session(TOKEN))[0].choices["what-if-noise"] == 30


@pytest.mark.parametrize("choice", ["Load the other tab's version", "Keep this tab's version"])
def test_the_older_of_two_tabs_is_told_and_overwrites_nothing_by_itself(choice: str) -> None:
    older = open_sample(tab())
    newer = choose(tab(), ANOTHER)
    visit(older, "cluster")
    assert "changed in another tab" in said(older.warning)
    choose(older, THIRD)
    assert stored_cluster() == ANOTHER and older.session_state["cluster"].name == THIRD
    press(older, choice)
    assert "another tab" not in said(older.warning)
    wanted = ANOTHER if choice.startswith("Load") else THIRD
    assert stored_cluster() == older.session_state["cluster"].name == wanted
    # The board forgets the drawing of a session that is not shown any more.
    assert ("sessions_shown" in older.session_state) == (wanted == ANOTHER)
    assert ("another tab" in said(newer.run().warning)) == (wanted != ANOTHER)
    choose(older, "mixed-8")
    assert stored_cluster() == "mixed-8"


@pytest.mark.parametrize("names", [("result.json",), ("pid", "error.json", "exit", "progress.jsonl"), ("request.json",)])
def test_damaged_files_of_a_job_cost_no_page(ana: AppTest, names: tuple[str, ...]) -> None:
    ana.run()
    folder = store.data_folder() / "jobs" / JOB
    (folder / "pid").write_text('{"pid": 4194305, "start": 0}')  # nobody's
    if "exit" in names:
        (folder / "final").unlink()
    for name in names:
        (folder / name).write_bytes(b"{")
    for page in ("launch", "timeline") if "result.json" in names else ("launch",):
        visit(ana, page)
    visit(ana, "optimise")
    if "result.json" in names:
        assert "result.json is damaged" in said(ana.error)
    if "exit" in names:
        assert "why it failed cannot be read" in said(ana.error)


def test_a_part_of_a_page_that_runs_by_itself_finds_the_session_overtaken_once(empty_session) -> None:
    state.keep_choice("what-if-noise", 20)
    assert not state.was_overtaken(), "no page was drawn yet"
    st.session_state["drawn_overtaken"] = False
    assert not state.was_overtaken()
    kept = json.loads(store.load_session(TOKEN))
    store.save_session(TOKEN, json.dumps(kept | {"revision": kept["revision"] + 1}))
    assert state.was_overtaken()
    st.session_state["drawn_overtaken"] = True  # the page says so since
    assert not state.was_overtaken()


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
    press(fill(app, "Your comment", "before"), "Comment")
    server.stop()
    press(fill(app, "Your comment", "in the dark"), "Comment")
    lost(app)
    visitor = link(plan=saved.plan, review=review)
    lost(visitor)
    for page in ("workload", "optimise", "timeline"):
        assert not visit(app, page).error, "pages that need no database work without one"
    visit(app, "review")
    server.start()
    app.run()
    assert not app.exception and not app.error, said(app.error)
    assert field(app, "Your comment") == "in the dark"
    press(app, "Comment")
    press(fill(app, "Reason", "back again"), "Approve")
    kept = team.find_review(database.database(), review)
    assert [comment.text for comment in kept.comments] == ["before", "in the dark"] and kept.state == "approved"
    visitor.run()
    assert "in the dark" in [text.value for text in visitor.text], "the link is followed now"


def test_what_was_to_be_saved_with_a_plan_stays_too(unreviewed: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    app = unreviewed
    with monkeypatch.context() as away:
        away.setenv(database.URL, "sqlite:////nowhere/at/all.db")
        fill(app, "Note", "half a note")
        press(app, "Save")
        lost(app)
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


APOLOGISE = page_faults.apologise
SECRET = "/srv/secret/place"


@pytest.fixture
def apologising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults become apologies, as for a visitor."""
    monkeypatch.setattr(page_faults, "apologise", APOLOGISE)


def fail(*arguments, **options) -> None:
    raise RuntimeError(f"{SECRET} is gone")


def test_a_page_that_fails_keeps_the_session_and_offers_ways_out(ana: AppTest, apologising, monkeypatch, caplog) -> None:
    visit(ana, "optimise").run()
    token, plan = ana.query_params["session"], ana.session_state["plan"]
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR, page_faults.LOG.name):
        broken.setattr(header, "show", fail)
        ana.run()
    (said,) = (error.value for error in ana.error)
    number = re.search(r"Fault ([0-9a-f]{8}):", said)[1]
    assert SECRET not in said and "What you have is kept" in said and not ana.exception
    assert f"fault {number}" in caplog.text and SECRET in caplog.text
    assert ana.session_state["plan"] == plan and ana.query_params["session"] == token
    press(ana, "Try again")
    assert not ana.error and ana.session_state["plan"] == plan
    with monkeypatch.context() as broken:
        broken.setattr(header, "show", fail)
        assert number in ana.run().error[0].value, "the same fault has the same number"
    press(ana, "Go on in an empty session")
    assert not ana.error and ana.session_state["plan"] is None and ana.query_params.get("session") != token


def test_a_part_that_runs_by_itself_says_its_own_fault(apologising, caplog) -> None:
    def page() -> None:  # a script of its own
        import streamlit as st

        from app import failing as page_faults
        from engine.errors import InputError

        @page_faults.fragment
        def broken() -> None:
            raise InputError("costs.json: 3 GEMM sizes are too few")

        @page_faults.fragment(run_every=60)
        def faulty() -> None:
            raise RuntimeError("a fault")

        broken()
        faulty()
        st.write("the rest")

    app = AppTest.from_function(page).run()
    assert [error.value.split(",")[0] for error in app.error] == [
        r"costs\.json\: 3 GEMM sizes are too few",
        "This part of the page failed",
    ]
    assert app.markdown[-1].value == "the rest" and not app.exception
