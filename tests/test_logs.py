"""What is logged is one JSON object a line, and opens nothing."""

import io
import json
import logging

import pytest

from engine import logs

TOKEN, PASSWORD = "Zk3_-abcDEF012345", "hunter2!x"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbmEifQ.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    "text",
    [
        f"GET /workload?session={TOKEN}&plan=1",
        f"/data/sessions/{TOKEN}.json cannot be written",
        f"postgresql+psycopg://me:{PASSWORD}@db.example.org/x does not answer",
        f"connection failed: host=db password={PASSWORD} user=me",
        f'{{"client_secret": "{PASSWORD}", "id_token": "{JWT}"}}',
        f"Cookie: _streamlit_user={JWT}",
        f"Authorization: Bearer {TOKEN}",
        f"/oauth2callback?code={TOKEN}&state={TOKEN}",
        f"it said {PASSWORD} and {PASSWORD.replace('!', '%21')}",
    ],
)
def test_no_secret_is_in_a_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me:{PASSWORD.replace('!', '%21')}@db.example.org/x")
    record = logging.makeLogRecord({"msg": "%s", "args": (text,), "levelname": "INFO", "name": "x", "where": text})
    for formatter in (logs.Lines(), logs.Text(logging.Formatter("%(message)s"))):
        line = formatter.format(record)
        assert logs.HIDDEN in line
        for secret in (TOKEN, PASSWORD, PASSWORD.replace("!", "%21"), JWT):
            assert secret not in line


@pytest.mark.parametrize(
    "text",
    ["exit code 1", "64 tokens: 3 layers", "state: running", "http://127.0.0.1:8501/review?plan=" + "d" * 64, "12:30"],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert logs.without_secrets(text) == text


def test_records_are_json_lines_with_their_extras_and_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.SWITCH, "json")
    stream, logger = io.StringIO(), logging.getLogger("streamlit.of-a-test")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s as Streamlit has it"))
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    for _ in range(2):
        logs.configure()
    logger.warning("späť\nand on", extra={"job": "x", "seconds": 1.5})
    try:
        raise ValueError(f"session={TOKEN}")
    except ValueError:
        logger.exception("it broke")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first | {"time": ""} == {
        **{"time": "", "level": "warning", "logger": "streamlit.of-a-test", "message": "späť\nand on"},
        **{"job": "x", "seconds": 1.5},
    }
    assert "ValueError: session=***" in second["trace"] and TOKEN not in stream.getvalue()
