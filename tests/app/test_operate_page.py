"""The operator's page without a browser: what it says of a studio, and to whom."""

import json
import os

import pytest
from streamlit.testing.v1 import AppTest

from app.visitor import people, roles
from engine.jobs import protocol, runner
from engine.upkeep import health
from tests.app.test_pages import ROOT, visit
from tests.app.test_people import login, visitor
from tests.app.test_step_page import said
from tests.upkeep.conftest import Folder, folder  # noqa: F401  a fixture

MAIN = str(ROOT / "app" / "main.py")
TEAM = json.dumps({"ana@example.org": "operate", "ben@example.org": "launch"})


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> AppTest:
    visitor(monkeypatch)
    return AppTest.from_file(MAIN, default_timeout=60)


def operate(app: AppTest) -> AppTest:
    return visit(app.run(), "operate")


def test_what_an_operator_sees(app: AppTest, folder: Folder) -> None:  # noqa: F811
    ended = folder.job(1, 100)
    folder.job(2, 1)
    folder.recording(0, 100)
    folder.session("an-old-session", 100)
    before = folder.names()
    operate(app)
    assert (
        "Healthy: the data folder is writable" in said(app.success)
        and "database answers" in said(app.success)
        and not app.error
    )
    assert "Times are in " in said(app.caption) and "Removable" in said(app.subheader)
    jobs, here, uses, going = (table.value for table in app.dataframe)
    assert list(jobs["State"]) == ["done", "done"] and list(jobs["Kind"]) == ["optimise", "optimise"]
    assert list(here.columns)[:2] == ["Who", "Role"]
    assert {"jobs", "recordings", "sessions"} <= set(uses["What"]) and uses["Share"].sum() == pytest.approx(100)
    assert list(going["What"]) == ["sessions", "jobs", "recordings"] and list(going["Number"]) == ["1", "1", "1"]
    assert before <= folder.names() and (folder.path / "jobs" / ended).is_dir(), "the page removes nothing"
    assert "an-old-session" not in str(app), "its address would open it"


def test_a_running_job_can_be_seen_and_stopped(app: AppTest, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    id = folder.job(1, 0, done=False)
    protocol.write_pid(folder.path / "jobs" / id, os.getpid())
    stopped = []
    monkeypatch.setattr(runner, "cancel", lambda job, grace: stopped.append(job.id))
    operate(app)
    assert "Jobs · 1 running or waiting" in said(app.subheader)
    app.button(key=f"stop-{id}").click().run()
    assert stopped == [id]


def test_what_is_wrong_stands_in_a_line(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "free", lambda where: (1_000_000, 10**12))
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:hunter2@127.0.0.1:1/x")
    operate(app)
    assert "its disk is full" in said(app.error) and "does not answer" in said(app.error)
    assert "hunter2" not in str(app) and len(app.dataframe) == 2, "what can be told is told"


@pytest.mark.parametrize(
    ("address", "email", "setting", "may"),
    [
        (None, None, None, True),
        ("192.0.2.7", None, None, False),
        ("192.0.2.7", "ana@example.org", None, False),
        (None, None, TEAM, False),
        ("192.0.2.7", "ana@example.org", TEAM, True),
        ("192.0.2.7", "ben@example.org", TEAM, False),
        ("192.0.2.7", None, '{"default": "operate"}', False),
        (None, None, '{"default": "operate"}', True),
        (None, None, "{", False),
    ],
)
def test_who_may_look_after_the_studio(address, email, setting, may, app: AppTest, monkeypatch) -> None:
    if setting is not None:
        monkeypatch.setenv(roles.SETTING, setting)
    visitor(monkeypatch, address, **(vars(login(email)) if email else {}))
    app.run()
    if may:
        assert operate(app).header[0].value == "Administration"
    context = type("Context", (), {"ip_address": address, "headers": {}})
    assert people.may_operate(context, login(email) if email else type("User", (), {})()) is may
