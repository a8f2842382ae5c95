"""Numbers as people read them, as columns, and finite wherever they leave the engine; recordings in two parts."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine import units
from engine.compare.figures import Metrics
from engine.errors import InputError
from engine.result import Result, Status
from engine.schema import LONG_TEXT, Amounts, Frozen, Integers, json_text
from engine.timeline import COLUMNS, Timeline
from engine.workload import RoutingTrace
from tests.cases.examples import tried
from tests.strategies import seeds

FACTOR = {name: factor for factor, name in units.TIME + units.SIZE}


READ = {
    units.seconds: "0 = 0 s; 1 = 1 s; 0.00123 = 1.23 ms; 0.9996 = 1 s; 0.9994e-3 = 999 µs; 42e-9 = 42 ns; "
    "2.5e-10 = 0.25 ns; 12345 = 12,345 s; -0.5 = -500 ms; inf = inf s",
    units.roughly: "0.02 = 1 s; 3.6 = 4 s; 23 = 25 s; 57 = 55 s; 59 = 1 min; 200 = 3 min; 5399 = 90 min; 5400 = 1.5 h",
    units.size: "0 = 0 B; 0.5 = 0.5 B; 999 = 999 B; 999.7 = 1 kB; 4194304 = 4.19 MB; 80e9 = 80 GB; 3.2e15 = 3,200 TB",
    units.share: "0 = 0.0 %; 0.0004 = < 0.1 %; 0.0005 = 0.1 %; 0.0543 = 5.4 %; 0.1 = 10 %; 0.43 = 43 %; 1 = 100 %; "
    "-0.25 = −25 %; 3.5 = 350 %",
    units.signed: "0.042 = +4.2 %; -0.3 = −30.0 %; 0 = +0.0 %; -0.0004 = +0.0 %; -0.0006 = −0.1 %; 12.5 = +1,250.0 %",
    units.bandwidth: "12.5e9 = 100 Gb/s; 0 = 0 Gb/s; 450e9 = 3.6 Tb/s",
    units.ratio: "1 = 1×; 1.384 = 1.38×; 0.0123 = 0.0123×; 1234.5 = 1,234×",
}
"""Numbers and their texts, by the function that writes them."""


@pytest.mark.parametrize("write", READ, ids=lambda write: write.__name__)
def test_numbers_as_people_read_them(write):
    for case in READ[write].split("; "):
        value, text = case.split(" = ")
        assert write(float(value)) == text, case


def read(text: str) -> tuple[float, str]:
    number, unit = text.split(" ")
    return float(number.replace(",", "")), unit


@pytest.mark.parametrize(
    ("write", "values", "largest"), [(units.seconds, st.floats(1e-9, 1e5), "s"), (units.size, st.floats(1.0, 1e18), "TB")]
)
@given(data=st.data())
def test_three_digits_are_right_and_the_unit_fits(write, values, largest, data):
    value = data.draw(values)
    text = write(value)
    number, unit = read(text)
    assert number * FACTOR[unit] == pytest.approx(value, rel=0.0051)
    assert (1 <= number < 1000 or unit == largest) and "e" not in text.split(" ")[0]
    assert units.digits(0.9375) == units.digits(15 / 16 - 1e-16) == "0.938"  # round-off decides no digit


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_longer_time_never_reads_as_a_shorter_one(first, second):
    (short, of_short), (long, of_long) = (read(units.seconds(value)) for value in sorted((first, second)))
    assert short * FACTOR[of_short] <= long * FACTOR[of_long] * (1 + 1e-12)


def test_words_in_a_row():
    assert [units.in_a_row(list(words)) for words in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]


@given(st.floats(0, 1000))
@example(0.0004)
def test_a_share_that_is_not_nothing_never_reads_as_nothing(value):
    text = units.share(value)
    assert re.fullmatch(r"(< )?[\d,]+(\.\d)? %", text)
    assert (text == "0.0 %") == (value == 0)
    assert units.at_most(value) == (f"less than {text[2:]}" if value and text[0] == "<" else f"at most {text}")


def test_json_is_what_json_is():
    data = {"b": [1, 2.5, None, True, "…"], "a": {}}
    assert json_text(data) == json.dumps(data)
    assert json_text(data, sort_keys=True, separators=(",", ":")) == '{"a":{},"b":[1,2.5,null,true,"\\u2026"]}'


def event(column: str, number: float) -> pd.DataFrame:
    return pd.DataFrame([dict.fromkeys(COLUMNS, 0) | {"stream": "compute", "kind": "ffn", column: number}])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "write",
    [
        lambda number: json_text({"a": [1.0, {"b": number}]}),
        lambda number: Result(Status.FEASIBLE, number, 0.0, 0.1, None),
        lambda number: Result(Status.FEASIBLE, 1.0, number, 0.1, None),
        lambda number: Timeline(event("start", number), ("GPU 0",), "simulated", "by hand"),
        lambda number: Timeline(event("end", number), ("GPU 0",), "simulated", "by hand"),
        lambda number: Timeline(event("bytes", number), ("GPU 0",), "simulated", "by hand"),
    ],
)
def test_json_results_and_timelines_have_none_but_finite_numbers(write, number):
    with pytest.raises(InputError, match="too far apart, or too large"):
        write(number)


def test_a_gap_above_nothing_is_none_in_json():
    nothing = dict.fromkeys(("order_bound", "bound", "utilisation", "exposed_communication", "overlap", "memory"), 0.0)
    balance = SimpleNamespace(balancedness=1.0, to_dict=dict)
    figures = Metrics(
        total=1.0, order_gap=math.inf, gap=math.inf, balance=balance, kept_local=1.0, phases=0, seconds={}, **nothing
    )
    assert (figures.to_dict()["gap"], figures.to_dict()["order_gap"]) == (None, None)


class Table(Frozen):
    count: Integers
    size: Amounts


def table(count: object = (), size: object = ()) -> Table:
    return Table.from_dict({"count": count, "size": size}, "table")


def as_json(column: np.ndarray, name: str) -> str | list:
    return json.loads(table(**{name: column}).to_json())[name]


def test_a_column_is_an_array_that_nobody_can_change_and_a_short_list_in_json():
    rows = np.array([1.0, 2.0])
    read = table([3, 1], rows)
    assert (read.count.dtype, read.size.dtype) == (np.int32, np.float64)
    rows[0] = 7
    assert read.size.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        read.count[0] = 1
    assert table([3, -1], [0.1]).to_json() == '{"count":[3,-1],"size":[0.1]}'


@tried(
    40,
    st.integers(0, 2**31 - 1).flatmap(lambda largest: st.tuples(st.just(largest), st.integers(-largest, largest))),
    st.integers(-3, 300),
    st.integers(0, 2**32),
)
def test_every_column_survives_json_and_has_one_text(ends, more, seed):
    largest, least = ends
    rng = np.random.default_rng(seed)
    count = rng.integers(min(least, largest), largest, LONG_TEXT + more, endpoint=True)
    size = rng.integers(0, 2047 << 52, LONG_TEXT + more).view(np.float64)  # any finite positive float, bit by bit
    document = table(count, size)
    text = document.to_json()
    again = Table.from_json(text, "again")
    np.testing.assert_array_equal(again.count, count)
    np.testing.assert_array_equal(again.size, size)
    assert again.to_json() == text == table(count.tolist(), size.tolist()).to_json()
    assert all(isinstance(value, list) == (more < 0) for value in json.loads(text).values())


@pytest.mark.parametrize(("largest", "dtype"), [(255, "u1"), (256, "u2"), (65_535, "u2"), (65_536, "i4")])
def test_long_whole_numbers_take_the_fewest_bytes(largest, dtype):
    count = np.zeros(LONG_TEXT, dtype=np.int64)
    count[7] = largest
    assert as_json(count, "count").startswith(f"{dtype}:")
    assert as_json(np.where(count > 0, -1, count), "count").startswith("i4:")


@pytest.mark.parametrize(
    ("column", "data", "says"),
    [
        ("count", [1, "a"], "count → 1: "),
        ("count", [2**31], "count → 0: "),
        ("count", 3, "count: "),
        ("count", "twelve", "count: must be a list of numbers, or a dtype"),
        ("count", "u1:AA=A", "count: must be a list of numbers, or a dtype"),
        ("count", "u1:A", "count: is base64 that ends within a number of u1"),
        ("count", "i4:AAA=", "count: is base64 that ends within a number of i4"),
        ("count", "f8:AAAAAAAA8D8=", "count: must be whole numbers"),
        ("count", np.array([2**31]), "count: must be whole numbers up to"),
        ("count", np.array([[1]]), "count: must be one column"),
        ("count", np.array([1.0]), "count: must be whole numbers"),
        ("size", [-1.0], "size → 0: "),
        ("size", np.array([np.nan]), "size: must be finite"),
        ("size", "f8:AAAAAAAA8P8=", "size: must be finite"),  # minus infinity
    ],
)
def test_what_is_no_column_is_refused_with_its_place(column, data, says):
    with pytest.raises(InputError, match=f"^table: {says}") as error:
        table(**{column: data})
    assert "\n" not in str(error.value)


def numbered(tokens: int, sequence: np.ndarray | None = None, rank: np.ndarray | None = None) -> RoutingTrace:
    """A trace with different choices for every token."""
    experts = np.stack([np.arange(tokens) // 100, np.arange(tokens) % 100], axis=1)[:, None, :].astype(np.int16)
    return RoutingTrace("numbered", experts, 100, sequence, rank)


def numbers(trace: RoutingTrace) -> list[int]:
    return (trace.experts[:, 0] @ [100, 1]).tolist()


@tried(100, st.integers(1, 60), st.integers(2, 9), seeds)
def test_whole_sequences_go_to_one_half_and_no_token_is_lost(tokens, sequences, seed):
    """Sequences of any length, mixed up, under any numbers, those of the first half before all of the second."""
    rng = np.random.default_rng(seed)
    names = rng.choice(1000, sequences, replace=False)
    sequence = names[rng.integers(0, sequences, tokens)].astype(np.int32)
    rank = rng.integers(0, 4, tokens).astype(np.int32)
    first, second = numbered(tokens, sequence, rank).halves()
    assert sorted(numbers(first) + numbers(second)) == list(range(tokens))
    for part in (first, second):
        order = numbers(part)
        assert order == sorted(order)
        assert part.sequence.tolist() == sequence[order].tolist()
        assert part.source_rank.tolist() == rank[order].tolist()
        assert (part.name, part.num_experts, part.layers, part.k) == ("numbered", 100, 1, 2)
    count = len(np.unique(sequence))
    if count > 1:
        mine, theirs = set(first.sequence.tolist()), set(second.sequence.tolist())
        assert not mine & theirs and max(mine) < min(theirs)
        assert (len(mine), len(theirs)) == (count // 2, count - count // 2)


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 150])
def test_without_sequences_tokens_are_halved_in_order(tokens):
    for column in (None, np.full(tokens, 5, dtype=np.int32)):
        first, second = numbered(tokens, column).halves()
        assert numbers(first) == list(range(tokens // 2)) and numbers(second) == list(range(tokens // 2, tokens))
        assert (first.sequence is None) == (second.sequence is None) == (column is None)
        assert first.source_rank is None
