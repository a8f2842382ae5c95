"""Documents: the canonical JSON that names them is Python's own, however long their lists of numbers are."""

import hashlib
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.plan import Placement, Plan, Schedule, SendOrder
from engine.result import Provenance
from engine.schema import LONG, Frozen
from tests.cases.examples import examples
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


def as_python_writes(document: Frozen) -> str:
    return json.dumps(document.model_dump(mode="json", exclude_none=True), sort_keys=True, separators=(",", ":"))


@settings(max_examples=examples(300), deadline=None)
@given(trees, st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5), seeds)
def test_canonical_json_is_what_python_writes(data, floats, seed):
    order = random.Random(seed)
    for more in ([], [order.uniform(-1e6, 1e6)] * LONG, [order.randrange(10**20)] * LONG, [True] * LONG):
        long = [*floats, *more, *floats]
        for document in (
            Document(data=data, also=floats),
            Document(data=long),
            Document(data={"ä": [{"x": long}, data]}),
        ):
            text = document.to_json()
            assert text == as_python_writes(document)
            assert document.digest == hashlib.sha256(text.encode()).hexdigest()


@settings(max_examples=examples(100), deadline=None)
@given(seeds, st.sampled_from(["plain", "tiny", "huge", "bits"]))
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


@settings(max_examples=examples(100), deadline=None)
@given(st.text(max_size=20), st.sampled_from(["", "x" * LONG, "é" * LONG, "\x7f" * LONG, '"\\' * LONG]))
def test_long_texts_are_written_as_python_writes_them(text, more):
    document = Document(data={"": more + text, text: [more]})
    assert document.to_json() == as_python_writes(document)


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
    content = plan.model_dump(mode="json", exclude_none=True, exclude={"claim", "name", "version"})
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert plan.id == hashlib.sha256(text.encode()).hexdigest()
    assert plan.to_json() == as_python_writes(plan)
    again = Plan.from_json(plan.to_json(), "again")
    assert again == plan and again.id == plan.id


def test_only_another_name_or_claim_leaves_the_id_as_it_is():
    placement = Placement(experts=1, experts_of_gpu=(((0,), ()),), model_layers=(0,))
    plan = Plan(
        name="one",
        placement=placement,
        send_order=SendOrder(mode="concurrent"),
        provenance=Provenance(optimiser="test"),
    )
    assert plan.model_copy(update={"name": "two"}).id == plan.id == plan.model_copy().id
    moved = placement.model_copy(update={"experts_of_gpu": (((), (0,)),)})
    for changes in ({"placement": moved}, {"name": "two", "parent": "0" * 64}):
        changed = plan.model_copy(update=changes)
        assert changed.id == Plan.from_json(changed.to_json(), "changed").id != plan.id


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1,]", "[" * 100_000, b"\xff\xfe", b"\x80", '{"data": "\\ud800"}', '{"data": 1} x', "{'data': 1}"],
)
def test_what_is_no_json_is_refused_in_a_line(text):
    with pytest.raises(InputError, match="doc: not valid JSON") as error:
        Document.from_json(text, "doc")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json_may_come_in_every_encoding_it_may_have(encoding):
    assert Document.from_json('{"data": "ä"}'.encode(encoding), "doc").data == "ä"
