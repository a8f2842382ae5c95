"""One server over HTTP: only the address that was named, bounded in bytes and time, one line for every fault."""

import socket
import threading
import time

import pytest

from engine.recording.server import Server, ServerError, check_url
from tests.cases.refusals import refusal
from tests.recording.stand_in import Reply, StandIn


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost:30000", "http://localhost:30000"),
        ("https://gpu-7.example/", "https://gpu-7.example"),
        ("http://[::1]:8000/v1/", "http://[::1]:8000"),
        ("http://gateway/engines/a", "http://gateway/engines/a"),
    ],
)
def test_addresses(text, url):
    assert check_url(text) == url


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("localhost:30000", "http://HOST:PORT"),
        ("file:///etc/passwd", "http://HOST:PORT"),
        ("http://", "http://HOST:PORT"),
        ("http://[::1", "is not a URL"),
        ("http://h:99999", "is not a URL"),
        ("http://me:secret@h", "SWITCHYARD_API_KEY"),
        ("http://h/?a=b", "leave out what follows"),
    ],
)
def test_addresses_that_are_none(text, part):
    message = refusal(check_url, text)
    assert part in message and "secret" not in message


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(other: StandIn, status):
    """Neither to another host nor to another path of this one: only the named address is asked."""
    named = StandIn()
    named.answers["/server_info"] = lambda body: Reply(status, "", {"Location": f"{other.url}/server_info"})
    other.answers["/server_info"] = lambda body: {"model_path": "elsewhere"}
    assert f"redirect to '{other.url}" in refusal(Server(named.url, 5).get, "/server_info")
    assert refusal(Server(named.url, 5).post, "/server_info", {"prompt": "confidential"})
    assert not other.requests
    named.close()


def test_proxies_and_passwords_of_the_environment_are_not_used(other: StandIn, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, other.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    named = StandIn()
    named.answers["/v1/models"] = lambda body: {"data": []}
    assert Server(named.url, 5).get_object("/v1/models") == {"data": []}
    assert not other.requests and "Authorization" not in named.headers[0]
    named.close()


def test_the_key_goes_to_the_server_alone(other: StandIn, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_API_KEY", "sk-1")
    other.answers["/x"] = lambda body: {}
    Server(other.url, 5).get("/x")
    assert other.headers[0]["Authorization"] == "Bearer sk-1"
    assert "sk-1" not in repr(Server(other.url, 5))
    monkeypatch.setenv("SWITCHYARD_API_KEY", "sk-1\r\nX: y")
    assert "printable" in refusal(Server, other.url, 5)


@pytest.mark.clock
def test_a_server_that_never_answers_or_a_byte_at_a_time(other: StandIn):
    """Each byte comes in time; together they do not."""
    for answer, said, seconds in (
        (lambda body: time.sleep(2), "no answer within 0.3 s", 0.3),
        (lambda body: Reply(200, "x" * 1000, slowly=0.05), "not complete within 0.4 s", 0.4),
    ):
        other.answers["/x"] = answer
        begin = time.monotonic()
        assert said in refusal(Server(other.url, seconds).get, "/x")
        assert time.monotonic() - begin < 1.5


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_a_server_that_hangs_up_or_does_not_speak_http(greeting):
    listening = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        connection, _ = listening.accept()
        connection.sendall(greeting) if greeting else connection.recv(100)
        connection.close()

    threading.Thread(target=hang_up, daemon=True).start()
    assert "broke off" in refusal(Server(f"http://127.0.0.1:{listening.getsockname()[1]}", 5).get, "/x")
    listening.close()


def test_servers_that_are_not_there_break_off_or_say_too_much(other):
    assert "connection refused" in refusal(Server("http://127.0.0.1:1", 5).get, "/x")
    assert "no host of this name" in refusal(Server("http://nowhere.invalid", 5).get, "/x")
    other.answers["/x"] = lambda body: Reply(200, "x" * 1000, truncated=True)
    assert "broke off before the answer was complete" in refusal(Server(other.url, 5).get, "/x")
    other.answers["/x"] = lambda body: "x" * 3_000_000
    assert "larger than 1 MB" in refusal(Server(other.url, 5).get, "/x", most=1024**2)
    assert "does not speak https" in refusal(Server(other.url.replace("http", "https"), 5).get, "/x")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"message": "in\ntwo lines", "type": "BadRequest"}}, "in two lines"),
        ({"object": "error", "message": "as older servers say it"}, "as older servers say it"),
        ({"detail": [{"loc": ["body"], "msg": "field required"}]}, '[{"loc": ["body"], "msg": "field required"}]'),
        ("Internal Server Error", "Internal Server Error"),
        (b"\xff\x00", "\ufffd\ufffd"),
    ],
)
def test_a_server_s_own_words(other: StandIn, body, reason):
    other.answers["/x"] = lambda request: Reply(422, body)
    with pytest.raises(ServerError) as caught:
        Server(other.url, 5).get("/x")
    assert (caught.value.status, caught.value.reason) == (422, reason)
    assert str(caught.value) == f"{other.url}/x: HTTP 422 ({reason})"


@pytest.mark.parametrize("body", ["[1]", "{", "[" * 100_000, b"\xff"])
def test_an_object_that_is_none(other: StandIn, body):
    other.answers["/x"] = lambda request: Reply(200, body)
    assert refusal(Server(other.url, 5).get_object, "/x").startswith(f"{other.url}/x: ")
