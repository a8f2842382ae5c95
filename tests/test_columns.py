"""Columns of numbers: arrays in memory, lists or text in JSON."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.schema import LONG_TEXT, Amounts, Frozen, Integers
from tests.cases.examples import examples


class Table(Frozen):
    count: Integers
    size: Amounts


def table(count: object = (), size: object = ()) -> Table:
    return Table.from_dict({"count": count, "size": size}, "table")


def as_json(column: np.ndarray, name: str) -> str | list:
    return json.loads(table(**{name: column}).to_json())[name]


def test_a_column_is_an_array_that_nobody_can_change():
    rows = np.array([1.0, 2.0])
    read = table([3, 1], rows)
    assert (read.count.dtype, read.size.dtype) == (np.int32, np.float64)
    rows[0] = 7
    assert read.size.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        read.count[0] = 1


def test_a_short_column_is_a_list_in_json():
    assert table([3, -1], [0.1]).to_json() == '{"count":[3,-1],"size":[0.1]}'


@settings(max_examples=examples(40), deadline=None)
@given(
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
