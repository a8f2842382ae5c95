"""Who may start programs on this machine."""

from types import SimpleNamespace

import pytest

from app.visitor.people import FORWARDED, GUARD_SWITCH, PROXY, why_not_launch
from app.visitor.roles import SETTING

NOBODY, SOMEBODY = SimpleNamespace(is_logged_in=False), SimpleNamespace(is_logged_in=True)


def visitor(address: str | None, **headers: str) -> SimpleNamespace:
    return SimpleNamespace(ip_address=address, headers=headers)


def test_a_visitor_on_this_machine_may_launch() -> None:
    assert why_not_launch(visitor(None), NOBODY) is None


@pytest.mark.parametrize("user", [NOBODY, SOMEBODY])
def test_others_may_not(user, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GUARD_SWITCH, raising=False)
    assert "off" in why_not_launch(visitor("192.0.2.7"), user)


@pytest.mark.parametrize("header", FORWARDED)
def test_a_proxy_on_this_machine_does_not_make_a_visitor_local(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GUARD_SWITCH, raising=False)
    assert why_not_launch(visitor(None, **{header: "192.0.2.7"}), SOMEBODY) is not None


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:8501", "Origin": "https://plans.example.org"},  # nginx as it comes
        {"Host": "plans.example.org", "Origin": "https://plans.example.org"},
        {"Host": "plans.example.org"},
        {"Host": "localhost.example.org:8501"},
        {"Host": "127.0.0.1:8501", "Origin": "null"},
        {"Host": "[", "Origin": "http://["},
    ],
)
def test_a_proxy_that_adds_nothing_is_known_by_the_address(headers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GUARD_SWITCH, raising=False)
    assert why_not_launch(visitor(None, **headers), SOMEBODY) is not None


@pytest.mark.parametrize("here", ["localhost:8501", "127.0.0.1:8501", "[::1]:8501", "LOCALHOST"])
def test_this_machine_has_several_names(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GUARD_SWITCH, raising=False)
    headers = {"Host": here, "Origin": f"http://{here}"}
    assert why_not_launch(visitor(None, **headers), NOBODY) is None
    monkeypatch.setenv(PROXY, "1")
    assert why_not_launch(visitor(None, **headers), NOBODY) is not None


def test_who_may_only_plan_may_not_launch_even_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, '{"default": "plan", "ana@example.org": "launch"}')
    monkeypatch.setenv(GUARD_SWITCH, "1")
    ana = SimpleNamespace(is_logged_in=True, email="ana@example.org")
    for address in (None, "192.0.2.7"):
        assert "role here is plan" in why_not_launch(visitor(address), SOMEBODY)
        assert why_not_launch(visitor(address), ana) is None


def test_the_switch_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GUARD_SWITCH, "1")
    assert "Log in" in why_not_launch(visitor("192.0.2.7"), NOBODY)
    assert "Log in" in why_not_launch(visitor("192.0.2.7"), SimpleNamespace())
    assert why_not_launch(visitor("192.0.2.7"), SOMEBODY) is None
