"""Another service is notified; nothing waits for it or fails with it."""

import logging
import socket
import time
from collections.abc import Iterator

import pytest

from engine import webhook
from engine.webhook import SETTING, Webhook, address
from tests.cases.refusals import refusal
from tests.webhook_service import SECRET, Service, serving, soon


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with serving(monkeypatch) as service:
        yield service


def test_messages_arrive_in_their_order_and_without_an_address_nothing_is_sent(service: Service, monkeypatch) -> None:
    hook = Webhook()
    for number in range(5):
        hook.send({"number": number, "text": "<b>ünï</b> \"'"})
    soon(lambda: len(service.told) == 5)
    assert service.told[0] == (f"/{SECRET}", "application/json", {"number": 0, "text": "<b>ünï</b> \"'"})
    assert [body["number"] for _, _, body in service.told] == list(range(5)) and hook.fault is None
    monkeypatch.delenv(SETTING)
    hook = Webhook()
    hook.send({"a": 1})
    assert address() is None and hook._thread is None and hook.fault is None and len(service.told) == 5


@pytest.mark.parametrize(
    "wanted", ["ftp://host/x", "file:///etc/passwd", "host/x", "http://", "http://host:x/", "http://a b/", "https://[x"]
)
def test_an_address_of_another_kind_is_refused(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, wanted)
    said, hook = refusal(address), Webhook()
    hook.send({"a": 1})
    assert "http:// or https://" in said and hook._thread is None and hook.fault == said


@pytest.mark.parametrize("status", [302, 307, 404, 500])
def test_what_is_not_taken_is_logged_and_said_until_something_is(service: Service, caplog, status: int) -> None:
    service.status, service.headers = status, {"Location": service.url}
    hook = Webhook()
    with caplog.at_level(logging.WARNING, webhook._LOG.name):
        hook.send({"a": 1})
        soon(lambda: hook.fault)
    assert hook.fault == f"the webhook at 127.0.0.1 did not take a message: it answered {status}"
    assert hook.fault in caplog.text and SECRET not in caplog.text
    assert len(service.told) == 1, "no redirection is followed"
    service.status = 200
    hook.send({"a": 2})
    soon(lambda: hook.fault is None)


def test_a_service_that_is_not_there_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv(SETTING, f"http://me:{SECRET[:2]}pass@127.0.0.1:{port}/{SECRET}")
    hook = Webhook()
    hook.send({"a": 1})
    soon(lambda: hook.fault)
    assert hook.fault == "the webhook at 127.0.0.1 did not take a message: ConnectionError" and SECRET not in caplog.text


@pytest.mark.clock
def test_a_service_that_does_not_answer_is_given_up_and_the_next_message_goes(service: Service, monkeypatch) -> None:
    monkeypatch.setattr(webhook, "TIMEOUT", (1.0, 0.3))
    service.wait.clear()
    hook = Webhook()
    begun = time.perf_counter()
    hook.send({"a": 1})
    assert time.perf_counter() - begun < 0.2
    soon(lambda: hook.fault and hook.fault.endswith("ReadTimeout"))
    service.wait.set()
    hook.send({"a": 2})
    soon(lambda: hook.fault is None)
    assert [body for _, _, body in service.told] == [{"a": 1}, {"a": 2}]


def test_what_is_too_much_is_left_out_and_said(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "WAITING", 2)
    service.wait.clear()
    hook = Webhook()
    for number in range(9):
        hook.send({"number": number})
    assert "2 messages wait already" in hook.fault
    service.wait.set()
    soon(lambda: hook.fault is None)
    assert 2 <= len(service.told) <= 4
