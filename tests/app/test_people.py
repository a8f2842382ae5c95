"""Visitors and their permissions: roles, who may start programs, and the operator's page."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import state
from app.review import store
from app.tables import plain
from app.visitor import people, roles
from app.visitor.people import FORWARDED, GUARD_SWITCH, PROXY, why_not_launch
from app.visitor.roles import SETTING
from engine.errors import InputError
from engine.jobs import protocol, runner
from engine.store import team
from engine.store.database import database
from engine.upkeep import health
from tests.cases.pages import buttons, chooser, messages, put, run, said, studio, visit
from tests.cases.sessions import login, visitor
from tests.upkeep.conftest import Folder, folder  # noqa: F401  a fixture

TEAM = {"Ana@Example.org": "launch", "ben@example.org": "plan", "default": "view"}
AUTH = {"auth": {"redirect_uri": "http://localhost/oauth2callback", "cookie_secret": "x" * 32, "client_id": "a"}}


def configure_team(monkeypatch: pytest.MonkeyPatch, setting: str | dict = TEAM) -> None:
    monkeypatch.setenv(roles.SETTING, setting if isinstance(setting, str) else json.dumps(setting))


@pytest.mark.parametrize(
    ("user", "role"),
    [
        (login("ana@example.org"), "launch"),
        (login(" BEN@example.ORG "), "plan"),
        (login("eve@example.org"), "view"),
        (login(""), "view"),
        (SimpleNamespace(is_logged_in=False, email="ana@example.org"), "view"),
        (SimpleNamespace(), "view"),
        (login("ana@example.org", email_verified=False), "view"),
        (login("ana@example.org", email_verified=True), "launch"),
    ],
)
def test_a_role_belongs_to_an_address_that_a_login_vouches_for(user, role, monkeypatch: pytest.MonkeyPatch) -> None:
    configure_team(monkeypatch)
    assert roles.role_of(user) == role


def test_a_setting_may_be_a_file_whom_it_does_not_name_may_only_look_and_roles_include_others(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "roles.json").write_text('{"ana@example.org": "plan"}')
    configure_team(monkeypatch, str(tmp_path / "roles.json"))
    assert roles.role_of(login("ana@example.org")) == "plan" and roles.role_of(login("ben@example.org")) == "view"
    may = [[roles.includes(role, other) for other in roles.ORDER] for role in roles.ORDER]
    assert may == [[place <= own for place in range(len(roles.ORDER))] for own in range(len(roles.ORDER))]


@pytest.mark.parametrize("setting", ["{", "[]", "/nowhere/roles.json", '{"ana@example.org": "root"}', '["launch"]'])
def test_a_setting_that_cannot_be_read_gives_nobody_more_than_a_look(setting: str, monkeypatch) -> None:
    configure_team(monkeypatch, setting)
    with pytest.raises(InputError, match=roles.SETTING) as refused:
        roles.mapping()
    assert "\n" not in str(refused.value)
    assert roles.role_of(login("ana@example.org")) == "view"


def test_a_login_is_required_before_anything_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(people.SWITCH, "required")
    app = studio().run()
    assert "has not said where" in app.error[0].value and not app.button and not app.exception
    app = studio()
    app.secrets.update(AUTH)
    visitor(monkeypatch, "192.0.2.7", is_logged_in=False)
    asked = []
    monkeypatch.setattr(st, "login", asked.append)
    app.query_params["plan"] = "0" * 64
    app.run()
    assert [button.label for button in app.button] == ["Log in"] and "leads to its plan" in app.caption[0].value
    assert "workloads" not in app.session_state
    app.button[0].click().run()
    assert asked == ["default"]
    visitor(monkeypatch, "192.0.2.7", is_logged_in=True, email="ana@example.org", name="Ana")
    app.run()
    assert app.header[0].value == "Workload"
    # An expired login is asked for again.
    visitor(monkeypatch, "192.0.2.7", is_logged_in=True, email="ana@example.org", iat=time.time() - 13 * 3600)
    app.run()
    assert "expired" in app.info[0].value and [button.label for button in app.button] == ["Log in"]
    assert not app.header[1:]
    visitor(monkeypatch, "192.0.2.7", is_logged_in=True, email="ana@example.org", iat=time.time())
    app.run()
    assert app.header[0].value == "Workload"
    # Every provider has a button.
    app = studio()
    app.secrets["auth"] = {"redirect_uri": "x", "cookie_secret": "x", "acme": {"client_id": "a"}, "okta": {"client_id": "b"}}
    visitor(monkeypatch, is_logged_in=False)
    assert [button.label for button in app.run().button] == ["Log in with acme", "Log in with okta"]


def test_the_browser_knows_the_page_before_a_fragment_that_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the fragment runs as if for another page, and the browser empties the one that it shows."""
    visitor(monkeypatch, is_logged_in=True, email="ana@example.org", name="Ana")
    with messages() as told:
        studio().run()
    kinds = ["fragment" if message.delta.fragment_id else message.WhichOneof("type") for message in told]
    assert "fragment" in kinds[kinds.index("navigation") :] and "fragment" not in kinds[: kinds.index("navigation")]


@pytest.mark.parametrize(("hours", "setting"), [(11, None), (13, None), (13, "24"), (1, "0.5"), (1, "soon"), (0.1, "-1")])
def test_a_login_counts_for_so_many_hours(hours: float, setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    configure_team(monkeypatch)
    if setting is not None:
        monkeypatch.setenv(roles.HOURS, setting)
    user = login("ana@example.org", iat=time.time() - hours * 3600)
    counts = (hours, setting) in ((11, None), (13, "24"))
    assert roles.is_logged_in(user) is counts and roles.role_of(user) == ("launch" if counts else "view")


def test_who_logs_in_after_somebody_logged_out_is_not_led_to_their_session(empty_session, monkeypatch) -> None:
    kept = []
    monkeypatch.setattr(people, "_providers", lambda: {"default": "Log in"})
    monkeypatch.setattr(people.components, "note_address", lambda: kept.append("address"))
    monkeypatch.setattr(st, "button", lambda *arguments, **options: False)
    monkeypatch.setattr(st, "logout", lambda: None)
    people._login()
    people._log_out()
    people._login()  # the page is drawn once more before the browser goes
    assert kept == ["address"]


def typed(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """The session has this name."""
    monkeypatch.setattr(state, "person", lambda: name)


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(roles.SETTING, raising=False)
    monkeypatch.setattr(people.getpass, "getuser", lambda: "operator")
    typed(monkeypatch, None)
    visitor(monkeypatch)
    assert people.who() == people.Person("operator", "launch", False)
    visitor(monkeypatch, "192.0.2.7")
    assert people.who().name == "" and "Set your name" in people.why_not("plan")
    typed(monkeypatch, "Ben")
    assert people.who().name == "Ben" and people.why_not("plan") is None
    visitor(monkeypatch, is_logged_in=True, email="ana@example.org", name="Ana\nK")
    assert people.who() == people.Person("AnaK (ana@example.org)", "launch", True)
    visitor(monkeypatch, is_logged_in=True, email="ana@example.org", name="x" * 300)
    assert people.who().name == "ana@example.org"
    visitor(monkeypatch, is_logged_in=True, sub="0815")
    assert people.who().name == "0815"


def test_a_login_knows_people_by_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    visitor(monkeypatch)
    assert people.login() is None
    visitor(monkeypatch, is_logged_in=True, email=" Ana@Example.org", name="Ana")
    assert people.login() == "ana@example.org"
    visitor(monkeypatch, is_logged_in=True, email="ana@example.org", email_verified=False, iss="https://a", sub="0815")
    assert people.login() == "https://a 0815"
    visitor(monkeypatch, is_logged_in=True, email="ana@example.org", iat=time.time() - 13 * 3600)
    assert people.login() is None


def test_a_name_that_cannot_be_kept_or_is_that_of_a_login_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "  ", "a\x1bb", "x" * 121):
        with pytest.raises(InputError, match="name of you"):
            people.checked(name)
    assert people.checked(" Ana  K ") == "Ana K" and people.checked("ana@home") == "ana@home"
    monkeypatch.setattr(people, "_providers", lambda: {"default": "Log in"})
    with pytest.raises(InputError, match="belongs to whoever logs in"):
        people.checked("Ana (ana@example.org)")


def test_who_may_only_look_writes_nothing_and_sees_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a page has drawn, the writes themselves refuse."""
    configure_team(monkeypatch)
    typed(monkeypatch, "Eve")
    visitor(monkeypatch)
    workspace = team.add_workspace(database(), "ours", "Ana")
    for write in (
        lambda: store.add_workspace("mine"),
        lambda: store.save(workspace.id, None, None, "x", "", ""),
        lambda: store.ask(SimpleNamespace(number=1), "?"),
        lambda: store.comment(SimpleNamespace(id="x"), "hm"),
        lambda: store.decide(SimpleNamespace(id="x", decisions=()), "approved", ""),
    ):
        with pytest.raises(InputError, match="Your role here is view"):
            write()
    assert [workspace.name for workspace in team.workspaces(database())] == ["ours"]
    app = visit(studio().run(), "review")
    assert chooser(app, "Workspace").value and not app.error and "Save" not in buttons(app)


def test_a_name_that_the_browser_recalls_is_taken_as_one_that_is_typed(empty_session, monkeypatch) -> None:
    for refused in ("", "   ", "x" * 10_000):
        people._recall(refused)
        assert state.person() is None, refused
    monkeypatch.setattr(people, "_providers", lambda: {"default": "Log in"})
    people._recall("ana@example.org")
    assert state.person() is None, "it could be taken for a login's"
    people._recall(" <b>Ben</b>  B ")
    assert state.person() == "<b>Ben</b> B", "on one line, as it was typed"


NOBODY, SOMEBODY = SimpleNamespace(is_logged_in=False), SimpleNamespace(is_logged_in=True)


def caller(address: str | None, **headers: str) -> SimpleNamespace:
    return SimpleNamespace(ip_address=address, headers=headers)


PROXIES = [
    *({header: "192.0.2.7"} for header in FORWARDED),
    {"Host": "127.0.0.1:8501", "Origin": "https://plans.example.org"},  # nginx as it comes
    {"Host": "plans.example.org", "Origin": "https://plans.example.org"},
    {"Host": "plans.example.org"},
    {"Host": "localhost.example.org:8501"},
    {"Host": "127.0.0.1:8501", "Origin": "null"},
    {"Host": "[", "Origin": "http://["},
]
"""Headers of requests that a proxy on this machine passes on, some without adding any of its own."""


def test_who_is_on_this_machine_may_launch_and_others_not_even_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(roles.SETTING, raising=False)
    monkeypatch.delenv(GUARD_SWITCH, raising=False)
    assert roles.role_of(SimpleNamespace()) == "launch" and why_not_launch(caller(None), NOBODY) is None
    for user in (NOBODY, SOMEBODY):
        assert "off" in why_not_launch(caller("192.0.2.7"), user)
    for headers in PROXIES:
        assert why_not_launch(caller(None, **headers), SOMEBODY) is not None, headers
    for here in ("localhost:8501", "127.0.0.1:8501", "[::1]:8501", "LOCALHOST"):
        headers = {"Host": here, "Origin": f"http://{here}"}
        assert why_not_launch(caller(None, **headers), NOBODY) is None, here
        with monkeypatch.context() as patch:
            patch.setenv(PROXY, "1")
            assert why_not_launch(caller(None, **headers), NOBODY) is not None, here


def test_who_may_only_plan_may_not_launch_even_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, '{"default": "plan", "ana@example.org": "launch"}')
    monkeypatch.setenv(GUARD_SWITCH, "1")
    ana = SimpleNamespace(is_logged_in=True, email="ana@example.org")
    for address in (None, "192.0.2.7"):
        assert "role here is plan" in why_not_launch(caller(address), SOMEBODY)
        assert why_not_launch(caller(address), ana) is None
    # Without roles the switch alone is not enough.
    monkeypatch.delenv(SETTING)
    assert "Log in" in why_not_launch(caller("192.0.2.7"), NOBODY)
    assert "Log in" in why_not_launch(caller("192.0.2.7"), SimpleNamespace())
    assert why_not_launch(caller("192.0.2.7"), SOMEBODY) is None


OPERATORS = json.dumps({"ana@example.org": "operate", "ben@example.org": "launch"})


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> AppTest:
    visitor(monkeypatch)
    return studio()


def operate(app: AppTest) -> AppTest:
    return visit(app.run(), "operate")


def test_what_an_operator_sees(app: AppTest, folder: Folder) -> None:  # noqa: F811
    ended = folder.job(1, 100)
    folder.job(2, 1)
    folder.recording(0, 100)
    folder.session("an-old-session", 100)
    before = folder.names()
    operate(app)
    healthy = said(app.success)
    assert "Healthy: the data folder is writable" in healthy and "database answers" in healthy and not app.error
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
        (None, None, OPERATORS, False),
        ("192.0.2.7", "ana@example.org", OPERATORS, True),
        ("192.0.2.7", "ben@example.org", OPERATORS, False),
        ("192.0.2.7", None, '{"default": "operate"}', False),
        (None, None, '{"default": "operate"}', True),
        (None, None, "{", False),
    ],
)
def test_who_may_look_after_the_studio(address, email, setting, may, app: AppTest, monkeypatch) -> None:
    if setting is not None:
        monkeypatch.setenv(roles.SETTING, setting)
    visitor(monkeypatch, address, **(vars(login(email)) if email else {}))
    if may:
        assert operate(app).header[0].value == "Administration"
    context = type("Context", (), {"ip_address": address, "headers": {}})
    assert people.may_operate(context, login(email) if email else type("User", (), {})()) is may


def test_a_new_tab_offers_the_browsers_last_sessions_that_still_exist_and_goes_on_with_one(sample: AppTest) -> None:
    token, name = sample.query_params["session"], next(iter(sample.session_state["workloads"].values()))
    tab = put(run(studio()), recalled_sessions=("no-such-session", "../../etc/passwd", token))
    assert not tab.error and [button.label for button in tab.button if (button.key or "").startswith("continue-")] == [
        plain(name)
    ]
    next(button for button in tab.button if button.key == f"continue-{token}").click()
    run(tab)
    assert tab.session_state["cluster"] == sample.session_state["cluster"] and tab.query_params["session"] == token
