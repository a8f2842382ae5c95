"""Logs of the studio and its commands: on standard error, as JSON lines if the operator wants them, and without secrets.

Secrets open something: passwords, tokens, cookies, and the addresses of sessions. They are taken out of the finished line, so
that those in messages and traces of libraries go too.
"""

import json
import logging
import os
import re
from datetime import UTC, datetime
from urllib.parse import unquote, urlsplit

SWITCH = "SWITCHYARD_LOG"
"""Environment variable: json for JSON lines; unset: text."""
OURS = "switchyard"
"""The logger above all of ours."""
HIDDEN = "***"
_ORDINARY = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SECRETS = (
    (re.compile(r"(://[^/\s:@]*:)[^@\s/]+(@)"), rf"\1{HIDDEN}\2"),
    (re.compile(r"(\bsessions?[/=])[\w-]{8,40}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"""((?:password|passwd|secret|cookie|authorization|(?:access|id|refresh|xsrf)_?token)["']?\s*[=:]\s*["']?)"""
            r"""(?:bearer\s+)?[^\s"'&,;}]+""",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(\b(?:token|code|state)=)[^\s\"'&,;]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"), HIDDEN),
)
"""Addresses with a password, addresses and files of sessions, values that are called a secret, and JSON web tokens."""


def without_secrets(text: str) -> str:
    """The text with three stars for every secret in it."""
    for password in _passwords():
        text = text.replace(password, HIDDEN)
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def _passwords() -> list[str]:
    """The database's password in the forms that drivers write it."""
    try:
        password = urlsplit(os.environ.get("DATABASE_URL", "")).password
    except ValueError:
        return []
    return [written for written in {password, unquote(password)} if written] if password else []


class Lines(logging.Formatter):
    """A record as one JSON object on one line: time (UTC), level, logger, message, the fields of `extra`, and the trace of an
    exception as `trace`."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        for name, value in vars(record).items():
            if name not in _ORDINARY and not name.startswith("_"):
                entry.setdefault(name, value if isinstance(value, int | float) else without_secrets(str(value)))
        if record.exc_info:
            entry["trace"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False)


class Text(logging.Formatter):
    """A record as another formatter writes it, without secrets."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self._formatter = formatter

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(self._formatter.format(record))


def configure() -> None:
    """Set the format of every logger of this process, also of those with a handler of their own, as Streamlit's have.

    It may be called again for loggers that came later.
    """
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.StreamHandler())
    logging.getLogger(OURS).setLevel(logging.INFO)
    named = (logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger))
    for handler in {handler for logger in (root, *named) for handler in logger.handlers}:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler.formatter, Lines | Text):
            as_text = handler.formatter or logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
            handler.setFormatter(Lines() if os.environ.get(SWITCH) == "json" else Text(as_text))
