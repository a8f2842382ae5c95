"""The studio on a disk that is full or read-only, on damaged files, and in two tabs: every page says what is wrong in a line,
keeps the session and offers a way out."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import state, uploads
from app.state.stored import Session, read, write
from engine import store
from engine.errors import InputError
from tests.app.conftest import TOKEN
from tests.app.test_launch_page import JOB
from tests.app.test_pages import ROOT, open_sample, press, visit
from tests.faults import failing

pytestmark = pytest.mark.slow

ANOTHER, THIRD = "hgx-h100-8", "hgx-h200-8"
"""Clusters that are offered on every page, beside the sample's."""


def studio() -> AppTest:
    """The studio at the address of a session, which is stored where there is room."""
    with contextlib.suppress(InputError):
        if store.load_session(TOKEN) is None:
            store.save_session(TOKEN, write(Session()))
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60)
    app.query_params["session"] = TOKEN
    return app.run()


def said(elements) -> str:
    """What messages say, without the marks that keep them from being read as markup."""
    return " ".join(element.value for element in elements).replace("\\", "")


def choose(app: AppTest, cluster: str) -> AppTest:
    app.button(key=f"strip-cluster-{cluster}").click().run()
    assert not app.exception, app.exception
    return app


def stored_cluster() -> str:
    return read(store.load_session(TOKEN))[0].cluster.name


def test_a_first_visit_to_a_full_disk_has_a_line_and_pages_and_goes_on_once_there_is_room(
    own_data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--sample"])
    store.data_folder()
    with failing(own_data_folder, "ENOSPC", at=1):
        app = studio()
        for page in ("workload", "what_if"):
            visit(app, page)
            assert "cannot be written" in said(app.error) and app.info
            assert any(button.label == "Open the sample" for button in app.button)
    visit(app, "workload")
    assert not app.error and app.session_state["workload"] and app.session_state["cluster"]


def test_what_is_changed_on_a_full_disk_stays_in_the_tab_and_is_kept_once_there_is_room(own_data_folder: Path) -> None:
    app = open_sample(studio())
    with failing(own_data_folder, "ENOSPC", at=1):
        visit(app, "what_if")
        app.slider(key="what-if-noise").set_value(30).run()
        assert not app.exception
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
    older = open_sample(studio())
    newer = choose(studio(), ANOTHER)
    visit(older, "cluster")
    assert "changed in another tab" in said(older.warning)
    choose(older, THIRD)
    assert stored_cluster() == ANOTHER and older.session_state["cluster"].name == THIRD
    press(older, choice)
    assert "another tab" not in said(older.warning)
    wanted = ANOTHER if choice.startswith("Load") else THIRD
    assert stored_cluster() == older.session_state["cluster"].name == wanted
    # The board forgets what was drawn in a session that is not shown any more.
    assert ("sessions_shown" in older.session_state) == (wanted == ANOTHER)
    assert ("another tab" in said(newer.run().warning)) == (wanted != ANOTHER)
    choose(older, "mixed-8")
    assert stored_cluster() == "mixed-8"


@pytest.mark.parametrize(
    "names", [("result.json",), ("pid", "error.json", "exit", "progress.jsonl"), ("request.json",)]
)
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
