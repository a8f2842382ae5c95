"""Objects read member by member must be what json reads at once, wherever the pieces end."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.formats.measured import kineto
from engine.formats.measured.kineto import read_members
from tests.cases.examples import examples

PATH = Path("trace.json")
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
values = st.recursive(
    scalars, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3)
)


def members(text: str, most: int = 10**6) -> list[tuple[str, object]]:
    return list(read_members(io.StringIO(text), PATH, "events", most))


@given(
    st.dictionaries(st.text(max_size=5), values, max_size=3),
    st.lists(values, max_size=6),
    st.integers(1, 40),
    st.booleans(),
)
@settings(max_examples=examples(25), deadline=None)
def test_members_and_elements_are_those_of_the_whole(other, events, piece, spaced):
    other.pop("events", None)
    text = json.dumps(other | {"events": events, "last": 12345}, indent=2 if spaced else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kineto, "PIECE", piece)
        assert members(text) == [*other.items(), *(("events", event) for event in events), ("last", 12345)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a JSON object {…} is needed"),
        ("[1]", "a JSON object {…} is needed"),
        ('{"events": 3}', "'events' is not a list"),
        ('{"events": [1, 2', "it ends in the middle"),
        ('{"events": [1 2]}', "'2' instead of , or ]"),
        ('{"events": [{"a": ', "not valid JSON, or cut off"),
        ('{"a" 1}', "'1' instead of :"),
        ("{1: 2}", "a key must be a text"),
        ('{"a": }', "a value is missing"),
        ('{"a": 1,}', "a value is missing"),
        ('{"a": 1} {', "more after its end"),
    ],
)
def test_other_texts_are_refused(text, says):
    with pytest.raises(InputError, match=r"^trace\.json: ") as caught:
        members(text)
    assert says in str(caught.value)


def test_more_than_is_read_is_refused():
    with pytest.raises(InputError, match="unpacks to more than is read"):
        members('{"events": [' + " " * 2_000_000, most=10**6)


def test_one_endless_value_is_refused(monkeypatch):
    monkeypatch.setattr(kineto, "PIECE", 100)
    monkeypatch.setattr(kineto, "MAX_VALUE", 1000)
    file = io.StringIO('{"a": "' + "x" * 100_000)
    with pytest.raises(InputError, match="cut off"):
        list(read_members(file, PATH, "events", 10**6))
    assert file.tell() < 10_000


def test_nothing_is_kept_of_what_was_taken(monkeypatch):
    monkeypatch.setattr(kineto, "PIECE", 1000)
    file = io.StringIO('{"events": [' + ",".join(["1"] * 50_000) + "]}")
    reader = read_members(file, PATH, "events", 10**6)
    next(reader)
    assert file.tell() < 5000
