"""One server over HTTP: the address that a person named, and nothing else.

No redirect is followed, proxies and credentials of the environment (HTTP_PROXY, .netrc) are not used, an answer is bounded in
bytes and in seconds. Whatever goes wrong is an InputError of one line.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3

from engine.errors import InputError, one_line
from engine.formats.source import MAX_FILE_BYTES, quoted

API_KEY = "SWITCHYARD_API_KEY"
"""The environment variable with the key that a server asks for (`--api-key` of SGLang and vLLM)."""

CONNECT_SECONDS = 5.0
MAX_ANSWER_BYTES = MAX_FILE_BYTES + 16 * 1024**2
"""One request's `routed_experts` at their largest, and room for the text round them."""

_CHUNK = 1024**2


class ServerError(InputError):
    """The server answered with an error.

    status: its HTTP status
    reason: its own words, on one line
    """

    def __init__(self, where: str, status: int, reason: str) -> None:
        super().__init__(f"{where}: HTTP {status}" + (f" ({reason})" if reason else ""))
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Server:
    """A server to record from.

    url: as a person typed it, without the path of a request; `check_url` made it
    timeout: seconds that one answer may take, all in all
    headers: sent with every request; by default the key in `API_KEY`, if there is one
    """

    url: str
    timeout: float
    headers: Mapping[str, str] = field(default_factory=lambda: _authorisation(), repr=False)

    def get(self, path: str, most: int = MAX_ANSWER_BYTES) -> bytes:
        """The body that GET answers, of at most `most` bytes. Raises InputError; ServerError for a status of 400 and over."""
        return self._ask("GET", path, None, most)

    def get_object(self, path: str) -> dict[str, Any]:
        """The JSON object that GET answers. Raises InputError."""
        data = self._json(path, self.get(path))
        if not isinstance(data, dict):
            raise InputError(f"{self.url}{path}: answers something other than a JSON object")
        return data

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The body that POST of a JSON object answers. Raises InputError; ServerError for a status of 400 and over."""
        return self._ask("POST", path, body, MAX_ANSWER_BYTES)

    def post_for_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that POST of a JSON object answers. Raises InputError."""
        return self._json(path, self.post(path, body))

    def _json(self, path: str, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise InputError(f"{self.url}{path}: the answer is not valid JSON, or was cut short") from None

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, most: int) -> bytes:
        where, deadline = f"{self.url}{path}", time.monotonic() + self.timeout
        try:
            # A session of its own for every request: requests does not promise that threads may share one.
            with requests.Session() as session:
                session.trust_env = False
                answer = session.request(
                    method,
                    where,
                    json=body,
                    headers=dict(self.headers) | {"Accept-Encoding": "identity"},
                    timeout=(min(CONNECT_SECONDS, self.timeout), self.timeout),
                    allow_redirects=False,
                    stream=True,
                )
                content = _read(answer, where, most, deadline, self.timeout)
        except requests.exceptions.SSLError:
            raise InputError(f"{where}: the server's certificate is not trusted, or it does not speak https") from None
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError):
            raise InputError(f"{where}: no answer within {self.timeout:g} s") from None
        except requests.exceptions.ConnectionError as error:
            raise InputError(f"{where}: {_why_unreachable(error)}") from None
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError):
            raise InputError(f"{where}: the connection broke off before the answer was complete") from None
        if 300 <= answer.status_code < 400:
            target = quoted(answer.headers.get("Location", "nowhere"))
            raise InputError(f"{where}: answers with a redirect to {target}, which is not followed; name that URL itself")
        if answer.status_code >= 400:
            raise ServerError(where, answer.status_code, _reason(content))
        return content


def check_url(text: str) -> str:
    """The address of a server without a slash at its end; raises InputError unless it is plain http or https."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise InputError(f"{quoted(text)} is not a URL") from None
    if parts.scheme not in ("http", "https") or not host:
        raise InputError(f"{quoted(text)}: write http://HOST:PORT or https://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise InputError(f"put no user name or password into a URL; a server's key goes into {API_KEY}")
    if parts.query or parts.fragment:
        raise InputError(f"{quoted(text)}: leave out what follows '?' or '#'; the requests' own paths are added")
    return text.rstrip("/").removesuffix("/v1")


def _authorisation() -> dict[str, str]:
    key = os.environ.get(API_KEY, "")
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{API_KEY} must be one line of printable ASCII")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _read(answer: requests.Response, where: str, most: int, deadline: float, timeout: float) -> bytes:
    """The body, piece by piece as it arrives: a server that sends a byte a second is noticed, and one that never ends."""
    content = bytearray()
    while piece := answer.raw.read1(_CHUNK):
        content += piece
        if len(content) > most:
            raise InputError(f"{where}: the answer is larger than {most // 1024**2} MB")
        if time.monotonic() > deadline:
            raise InputError(f"{where}: the answer was not complete within {timeout:g} s")
    return bytes(content)


def _why_unreachable(error: requests.exceptions.ConnectionError) -> str:
    """The reason why the server cannot be reached, from the errors that requests and urllib3 put round one another."""
    inner: object = error
    while isinstance(inner, BaseException):
        if isinstance(inner, urllib3.exceptions.NameResolutionError):
            return "there is no host of this name"
        if isinstance(inner, ConnectionRefusedError):
            return "nothing answers there (connection refused); is the server running?"
        if isinstance(inner, (ConnectionResetError, urllib3.exceptions.ProtocolError)):
            return "the connection broke off before the answer was complete"
        inner = getattr(inner, "reason", None) or inner.__cause__ or inner.__context__
    return "it cannot be reached"


def _reason(content: bytes) -> str:
    """The words of an error, out of the JSON forms that SGLang, vLLM and FastAPI give it; else the text as it is."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        data = content[:1000].decode("utf-8", errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(data, dict) and data.get(key):
            data = data[key]
    text = one_line(data if isinstance(data, str) else json.dumps(data))
    return text if len(text) <= 200 else text[:200] + "…"
