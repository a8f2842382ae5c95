"""Documents with canonical JSON, errors of one line, and logs of one object a line."""

import hashlib
import io
import json
import logging
import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from engine import logs
from engine.errors import HEAD, TAIL, IllegalError, InputError, StoppedError, UndecidedError
from engine.model import MoEModel
from engine.plan import Placement, Plan, Schedule, SendOrder
from engine.result import Provenance
from engine.schema import LONG, Frozen
from tests.cases.examples import tried
from tests.cases.refusals import refusal
from tests.strategies import seeds


class Document(Frozen):
    """Any JSON."""

    data: Any = None
    also: tuple[float, ...] = ()


numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-4, 9.999e-5, 1e16, 9999999999999998.0, 1e15, 123456.0, 2.0**53]),
)
leaves = st.one_of(st.none(), st.booleans(), st.text(max_size=5), numbers)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=4)),
    max_leaves=12,
)


texts = st.sampled_from(["", "x" * LONG, "é" * LONG, "\x7f" * LONG, '"\\' * LONG])


def as_python_writes(document: Frozen, **options: Any) -> str:
    content = document.model_dump(mode="json", exclude_none=True, **options)
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


@tried(300, trees, st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5), texts, st.text(max_size=20), seeds)
def test_canonical_json_is_what_python_writes(data, floats, long_text, text, seed):
    order = random.Random(seed)
    for more in ([], [order.uniform(-1e6, 1e6)] * LONG, [order.randrange(10**20)] * LONG, [True] * LONG):
        long = [*floats, *more, *floats]
        nested = {"ä": [{"x": long}, data], "": long_text + text, text: [long_text]}
        for document in (Document(data=data, also=floats), Document(data=long), Document(data=nested)):
            written = document.to_json()
            assert written == as_python_writes(document)
            assert document.digest == hashlib.sha256(written.encode()).hexdigest()


@tried(100, seeds, st.sampled_from(["plain", "tiny", "huge", "bits"]))
def test_long_lists_keep_every_digit_there_and_back(seed, kind):
    rng = np.random.default_rng(seed)
    values = {
        "plain": 10.0 ** rng.uniform(-4, 16, 2 * LONG) * rng.choice([-1, 0, 1], 2 * LONG),
        "tiny": 10.0 ** rng.uniform(-310, -3, 2 * LONG),
        "huge": 10.0 ** rng.uniform(15, 308, 2 * LONG),
        "bits": rng.integers(0, 2**62, 2 * LONG).view(np.float64),
    }[kind]
    document = Document(also=tuple(values.tolist()))
    assert document.to_json() == as_python_writes(document)
    assert Document.from_json(document.to_json(), "again").also == document.also


def test_a_plan_of_many_sends_is_named_by_pythons_json():
    gpus = 20
    src, dst = np.nonzero(~np.eye(gpus, dtype=bool))
    size = np.random.default_rng(0).exponential(1e5, len(src))
    columns = {"src": src, "dst": dst, "bytes": size, "phase": (dst - src) % gpus - 1}
    schedule = Schedule(**{name: tuple(column.tolist()) for name, column in columns.items()}, duration=(3e-5,) * gpus)
    assert len(schedule.src) > LONG
    plan = Plan(
        name="long",
        placement=Placement(experts=1, experts_of_gpu=(((0,),) * gpus,), model_layers=(3,)),
        send_order=SendOrder(mode="matched", dispatch=(schedule,), combine=(schedule,)),
        provenance=Provenance(optimiser="test", options={"größe": 1}),
    )
    assert plan.id == hashlib.sha256(as_python_writes(plan, exclude={"claim", "name", "version"}).encode()).hexdigest()
    assert plan.to_json() == as_python_writes(plan)
    again = Plan.from_json(plan.to_json(), "again")
    assert again == plan and again.id == plan.id


@pytest.mark.parametrize(
    "text", ["", "{", "[1,]", "[" * 100_000, b"\xff\xfe", b"\x80", '{"data": "\\ud800"}', '{"data": 1} x', "{'data': 1}"]
)
def test_what_is_no_json_is_refused_in_a_line(text):
    assert refusal(Document.from_json, text, "doc").startswith("doc: not valid JSON")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json_may_come_in_every_encoding_it_may_have(encoding):
    assert Document.from_json('{"data": "ä"}'.encode(encoding), "doc").data == "ä"


@pytest.mark.parametrize("kind", [InputError, StoppedError, UndecidedError])
def test_a_message_is_one_line_of_bearable_length(kind):
    message = str(kind(f"run.json: 'x\n{'y' * 5000}\x1b[31m' is no number, which it must be"))
    assert len(message) == HEAD + TAIL + 3 and "\n" not in message and "\x1b" not in message
    assert message.startswith("run.json: 'x yyy") and message.endswith("is no number, which it must be")
    assert str(pickle.loads(pickle.dumps(kind(message)))) == message


def test_a_message_of_usual_length_stays_as_it_is_without_the_address_of_an_object():
    message = "run.json: num_experts: must be 1 … 4096"
    assert str(InputError(message)) == message and not issubclass(IllegalError, InputError)
    assert str(InputError(f"no number: {object()!r}")) == "no number: <object object>"
    assert len(refusal(MoEModel.from_dict, {"name": "m", "x" * 3000: 1}, "model.json")) < 1000


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
    "text", ["exit code 1", "64 tokens: 3 layers", "state: running", "http://127.0.0.1:8501/review?plan=" + "d" * 64, "12:30"]
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
