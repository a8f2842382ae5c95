"""Stands in for a service that takes webhooks."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.webhook import SETTING

SECRET = "T0/very-secret"


class Service(ThreadingHTTPServer):
    """Stands in for the service: keeps each message, and answers as it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.told: list[tuple[str, str, dict]] = []
        self.status, self.headers, self.wait = 204, {}, threading.Event()
        self.wait.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{SECRET}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.told.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.server.wait.wait(10)
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service that the studio is configured for."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Service() as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        monkeypatch.setenv(SETTING, service.url)
        yield service
        service.wait.set()
        service.shutdown()


def soon(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 15
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert happened()
