"""Every page in every state, also on full disks, without its database and with faults: one clear line, and nothing lost."""

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psycopg
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import cached, header, state, uploads
from app import failing as page_faults
from app.state.stored import Session, read, write
from app.tables import plain
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.cluster import Cluster
from engine.errors import InputError
from engine.store import database, team
from engine.workload import RoutingTrace
from tests.cases.pages import (
    PAGES,
    buttons,
    messages,
    metrics,
    open_sample,
    plan_the_sample,
    press,
    run,
    run_the_job,
    said,
    studio,
    titles,
    visit,
)
from tests.cases.reviews import fill, link, review_of, save
from tests.cases.sessions import JOB, TOKEN, comes_from
from tests.faults import failing
from tests.postgres import Server, serving


def test_an_empty_page_says_what_to_do_next(app: AppTest) -> None:
    for page in PAGES:
        visit(app, page)
        assert app.info, f"the empty page {page} must say what to do"
        assert "Open the sample" in buttons(app), page


def test_every_page_with_the_sample_and_then_with_a_training_step(sample: AppTest) -> None:
    """Only Review asks for news by itself while nothing runs."""
    asking = set()
    for page in PAGES:
        with messages() as told:
            assert not visit(sample, page).error, page
        asking |= {page for message in told if message.WhichOneof("type") == "auto_rerun"}
    assert asking <= {"review"}
    press(visit(sample, "optimise"), "Training step")
    for page in PAGES:
        assert not visit(sample, page).error, page
        assert "training step: 12 × 128 tokens on each GPU" in said(sample.caption), page


def test_the_pages_of_a_finished_plan(planned: AppTest) -> None:
    assert planned.dataframe[0].value["Plan"].tolist() == ["Linear placement", "Aurora"]
    (first, *_), (said_first,) = titles(planned), titles(planned, "waterfall")
    assert first == said_first and first.startswith("Placement saves ") and first.endswith("is left (proven)")
    for page in ("timeline", "launch", "workload"):
        visit(planned, page)
        assert not planned.error
    visit(planned, "timeline")
    assert {metric.label for metric in planned.metric} >= {"Simulated pass", "Exposed communication", "GPU utilisation"}
    again = visit(studio(session=planned.query_params["session"]), "optimise")
    assert len(again.dataframe[0].value) == 2 and titles(again)[0] == first, "found again by its address"
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
    drawing = sample.session_state["cluster"].model_dump(mode="json")
    for gpu in (gpu for node in drawing["nodes"] for gpu in node["gpus"]):
        gpu["memory"] = 3e6
    sample.session_state["cluster"] = Cluster.from_dict(drawing, "drawing")
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
def test_a_traffic_matrix_can_be_planned_and_launched(sample: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    comes_from(None, monkeypatch)
    press(visit(sample, "workload"), "Traffic 8 × 8")
    plan_the_sample(sample)
    assert sample.dataframe[0].value["Plan"].tolist()[:2] == ["Linear placement", "Aurora"]
    told, made = said(visit(sample, "launch").markdown), "made of the bytes of traffic-8: 3.15 MB with"
    assert not sample.error and made in told and "rows of 512 bytes" in told
    run_the_job(sample, "Start", "launch")
    assert "Measured / predicted" in metrics(sample) and f"Routing {made}" in said(sample.caption)


def test_a_session_link_cannot_leave_the_data_folder() -> None:
    assert run(studio(session="../../etc/passwd")).info


@pytest.mark.usefixtures("warm_python")
def test_a_recording_of_nothing_but_padding_breaks_no_page(sample: AppTest) -> None:
    nothing = RoutingTrace("nothing", np.full((16, 8, 1), -1, dtype=np.int16), 16)
    sample.session_state["workload"] = store.save_workload(nothing)
    plan_the_sample(sample)
    for page in PAGES:
        visit(sample, page)


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


@pytest.mark.everything
def test_pages_that_need_no_database_work_without_one(server: Server, ana: AppTest) -> None:
    server.stop()
    for page in ("workload", "optimise", "timeline"):
        assert not visit(ana, page).error and ana.session_state["plan"]


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
