"""A page that fails says so in a line and keeps the navigation, the session and a way out."""

import logging
import re

import pytest
from streamlit.testing.v1 import AppTest

from app import failing, header
from tests.app.test_pages import press, visit

APOLOGISE = failing.apologise
SECRET = "/srv/secret/place"


@pytest.fixture
def apologising(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is for a visitor."""
    monkeypatch.setattr(failing, "apologise", APOLOGISE)


def fail(*arguments, **options) -> None:
    raise RuntimeError(f"{SECRET} is gone")


def test_a_page_that_fails_keeps_the_session_and_offers_ways_out(
    ana: AppTest, apologising, monkeypatch, caplog
) -> None:
    visit(ana, "optimise").run()
    token, plan = ana.query_params["session"], ana.session_state["plan"]
    whole = header.show
    monkeypatch.setattr(header, "show", fail)
    with caplog.at_level(logging.ERROR, failing.LOG.name):
        ana.run()
    (said,) = (error.value for error in ana.error)
    number = re.search(r"Fault ([0-9a-f]{8}):", said)[1]
    assert SECRET not in said and "What you have is kept" in said and not ana.exception
    assert f"fault {number}" in caplog.text and SECRET in caplog.text
    assert ana.session_state["plan"] == plan and ana.query_params["session"] == token
    ana.run()
    assert number in ana.error[0].value, "the same fault has the same number"
    monkeypatch.setattr(header, "show", whole)
    press(ana, "Try again")
    assert not ana.error and ana.session_state["plan"] == plan
    monkeypatch.setattr(header, "show", fail)
    ana.run()
    monkeypatch.setattr(header, "show", whole)
    press(ana, "Go on in an empty session")
    assert not ana.error and ana.session_state["plan"] is None and ana.query_params.get("session") != token


def test_a_part_that_runs_by_itself_says_its_own_fault(apologising, caplog) -> None:
    def page() -> None:  # a script of its own
        import streamlit as st

        from app import failing
        from engine.errors import InputError

        @failing.fragment
        def broken() -> None:
            raise InputError("costs.json: 3 GEMM sizes are too few")

        @failing.fragment(run_every=60)
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
