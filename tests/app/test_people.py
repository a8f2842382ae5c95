"""Who is looking and what they may do: by login where there is one, by name elsewhere; less than the operator says, never."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import streamlit as st
from streamlit import user_info
from streamlit.testing.v1 import AppTest

from app import state
from app.review import store
from app.visitor import people, roles
from engine.errors import InputError
from engine.store import team
from engine.store.database import database
from tests.app.test_pages import ROOT, chooser, visit

MAIN = str(ROOT / "app" / "main.py")
TEAM = {"Ana@Example.org": "launch", "ben@example.org": "plan", "default": "view"}
AUTH = {"auth": {"redirect_uri": "http://localhost/oauth2callback", "cookie_secret": "x" * 32, "client_id": "a"}}


def login(email: str, **more) -> SimpleNamespace:
    return SimpleNamespace(is_logged_in=True, email=email, **more)


def configure_team(monkeypatch: pytest.MonkeyPatch, setting: str | dict = TEAM) -> None:
    monkeypatch.setenv(roles.SETTING, setting if isinstance(setting, str) else json.dumps(setting))


def visitor(monkeypatch: pytest.MonkeyPatch, address: str | None = None, **claims) -> None:
    """Who looks at the pages: from an address (None: this machine), with what a login tells of them."""
    monkeypatch.setattr(type(st.context), "ip_address", property(lambda _: address))
    monkeypatch.setattr(user_info, "_get_user_info", lambda: claims)


def test_without_a_setting_everybody_may_plan_and_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(roles.SETTING, raising=False)
    assert roles.role_of(SimpleNamespace()) == "launch"


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


def test_a_setting_may_be_a_file_and_whom_it_does_not_name_may_only_look(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "roles.json").write_text('{"ana@example.org": "plan"}')
    configure_team(monkeypatch, str(tmp_path / "roles.json"))
    assert roles.role_of(login("ana@example.org")) == "plan" and roles.role_of(login("ben@example.org")) == "view"


@pytest.mark.parametrize("setting", ["{", "[]", "/nowhere/roles.json", '{"ana@example.org": "root"}', '["launch"]'])
def test_a_setting_that_cannot_be_read_gives_nobody_more_than_a_look(setting: str, monkeypatch) -> None:
    configure_team(monkeypatch, setting)
    with pytest.raises(InputError, match=roles.SETTING) as refused:
        roles.mapping()
    assert "\n" not in str(refused.value)
    assert roles.role_of(login("ana@example.org")) == "view"


def test_roles_include_what_stands_before_them() -> None:
    may = [[roles.includes(role, other) for other in roles.ORDER] for role in roles.ORDER]
    assert may == [[place <= own for place in range(len(roles.ORDER))] for own in range(len(roles.ORDER))]


def test_a_login_is_required_before_anything_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(people.SWITCH, "required")
    app = AppTest.from_file(MAIN, default_timeout=60).run()
    assert "has not said where" in app.error[0].value and not app.button and not app.exception
    app = AppTest.from_file(MAIN, default_timeout=60)
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


@pytest.mark.parametrize(
    ("hours", "setting"), [(11, None), (13, None), (13, "24"), (1, "0.5"), (1, "soon"), (0.1, "-1")]
)
def test_a_login_counts_for_so_many_hours(hours: float, setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    configure_team(monkeypatch)
    if setting is not None:
        monkeypatch.setenv(roles.HOURS, setting)
    user = login("ana@example.org", iat=time.time() - hours * 3600)
    counts = (hours, setting) in ((11, None), (13, "24"))
    assert roles.is_logged_in(user) is counts and roles.role_of(user) == ("launch" if counts else "view")


def test_an_expired_login_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(people.SWITCH, "required")
    app = AppTest.from_file(MAIN, default_timeout=60)
    app.secrets.update(AUTH)
    visitor(monkeypatch, "192.0.2.7", is_logged_in=True, email="ana@example.org", iat=time.time() - 13 * 3600)
    app.run()
    assert (
        "expired" in app.info[0].value and [button.label for button in app.button] == ["Log in"] and not app.header[1:]
    )
    visitor(monkeypatch, "192.0.2.7", is_logged_in=True, email="ana@example.org", iat=time.time())
    app.run()
    assert app.header[0].value == "Workload"


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


def test_every_provider_has_a_button(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(people.SWITCH, "required")
    app = AppTest.from_file(MAIN, default_timeout=60)
    app.secrets["auth"] = {
        "redirect_uri": "x",
        "cookie_secret": "x",
        "acme": {"client_id": "a"},
        "okta": {"client_id": "b"},
    }
    visitor(monkeypatch, is_logged_in=False)
    app.run()
    assert [button.label for button in app.button] == ["Log in with acme", "Log in with okta"]


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


@pytest.mark.parametrize("name", ["", "  ", "a\x1bb", "x" * 121])
def test_a_name_that_cannot_be_kept_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="name of you"):
        people.checked(name)


def test_nobody_takes_the_name_of_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    assert people.checked(" Ana  K ") == "Ana K" and people.checked("ana@home") == "ana@home"
    monkeypatch.setattr(people, "_providers", lambda: {"default": "Log in"})
    with pytest.raises(InputError, match="belongs to whoever logs in"):
        people.checked("Ana (ana@example.org)")


def test_who_may_only_look_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_viewer_sees_the_page_and_why_its_buttons_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_team(monkeypatch)
    visitor(monkeypatch)
    team.add_workspace(database(), "ours", "Ana")
    app = visit(AppTest.from_file(MAIN, default_timeout=60).run(), "review")
    assert chooser(app, "Workspace").value and not app.error
    assert not any(button.label == "Save" for button in app.button)


def test_a_name_that_the_browser_recalls_is_taken_as_one_that_is_typed(empty_session, monkeypatch) -> None:
    for refused in ("", "   ", "x" * 10_000):
        people._recall(refused)
        assert state.person() is None, refused
    monkeypatch.setattr(people, "_providers", lambda: {"default": "Log in"})
    people._recall("ana@example.org")
    assert state.person() is None, "it could be taken for a login's"
    people._recall(" <b>Ben</b>  B ")
    assert state.person() == "<b>Ben</b> B", "on one line, as it was typed"
