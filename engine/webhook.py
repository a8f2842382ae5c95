"""Messages to another service about events: one HTTP POST of a small JSON object, in the background.

Off unless the operator names an address. Nothing waits for a message or fails with it; one that cannot be delivered is logged,
and the operator is told. The address may be a secret as a whole, as those of chat services are, so only its host is ever logged
or shown.
"""

import logging
import os
import queue
import threading
from typing import Any
from urllib.parse import urlsplit

import requests

from engine import logs
from engine.errors import InputError

SETTING = "SWITCHYARD_WEBHOOK"
TIMEOUT = (3.05, 5.0)
"""Seconds for a connection, and for an answer."""
WAITING = 64
"""Messages that wait at most; a service that is down for long loses those after them."""
_LOG = logging.getLogger(f"{logs.OURS}.webhook")


def address() -> str | None:
    """The address that messages go to, or None. Raises InputError if the setting is no http(s) address."""
    wanted = os.environ.get(SETTING, "").strip()
    if not wanted:
        return None
    try:
        parts = urlsplit(wanted)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known or not wanted.isprintable() or " " in wanted:
        raise InputError(f"{SETTING} is no address that begins with http:// or https://; nothing is sent")
    return wanted


class Webhook:
    """Messages to one service, one after another, in a thread that begins with the first."""

    def __init__(self) -> None:
        self._messages: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._fault: str | None = None

    @property
    def fault(self) -> str | None:
        """The reason why nothing is sent, or why the last message was not delivered; None if all is well or no address is
        set."""
        try:
            return self._fault if address() else None
        except InputError as error:
            return str(error)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message for the address, if one is configured. message: plain JSON"""
        try:
            where = address()
        except InputError as error:
            _LOG.warning("%s", error)
            return
        if where is None:
            return
        try:
            self._messages.put_nowait((where, message))
        except queue.Full:
            self._fail(where, f"{WAITING} messages wait already, and one was left out")
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver, name="webhook", daemon=True)
                self._thread.start()

    def _deliver(self) -> None:
        while True:
            where, message = self._messages.get()
            try:
                # The answer is not read, and a redirection is not followed: messages go to the operator's address alone.
                with requests.post(where, json=message, timeout=TIMEOUT, allow_redirects=False, stream=True) as answer:
                    if 200 <= answer.status_code < 300:
                        self._fault = None
                    else:
                        self._fail(where, f"it answered {answer.status_code}")
            except Exception as error:  # the next message has to be sent after any failure
                self._fail(where, type(error).__name__)

    def _fail(self, where: str, why: str) -> None:
        fault = f"the webhook at {urlsplit(where).hostname} did not take a message: {why}"
        _LOG.warning("%s", fault)  # first: who sees the fault finds it in the log
        self._fault = fault


WEBHOOK = Webhook()
"""The one of this process."""
