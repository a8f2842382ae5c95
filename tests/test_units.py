"""Numbers as people read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import units

FACTOR = {name: factor for factor, name in units.TIME + units.SIZE}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (1.0, "1 s"),
        (0.00123, "1.23 ms"),
        (0.9996, "1 s"),
        (0.9994e-3, "999 µs"),
        (42e-9, "42 ns"),
        (2.5e-10, "0.25 ns"),
        (12345.0, "12,345 s"),
        (-0.5, "-500 ms"),
        (float("inf"), "inf s"),
    ],
)
def test_seconds(value, text):
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.02, "1 s"),
        (3.6, "4 s"),
        (23.0, "25 s"),
        (57.0, "55 s"),
        (59.0, "1 min"),
        (200.0, "3 min"),
        (5399.0, "90 min"),
        (5400.0, "1.5 h"),
    ],
)
def test_what_is_only_estimated(value, text):
    assert units.roughly(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 B"),
        (0.5, "0.5 B"),
        (999.0, "999 B"),
        (999.7, "1 kB"),
        (4_194_304.0, "4.19 MB"),
        (80e9, "80 GB"),
        (3.2e15, "3,200 TB"),
    ],
)
def test_size(value, text):
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0 %"),
        (0.0004, "< 0.1 %"),
        (0.0005, "0.1 %"),
        (0.0543, "5.4 %"),
        (0.1, "10 %"),
        (0.43, "43 %"),
        (1.0, "100 %"),
        (-0.25, "-25 %"),
        (3.5, "350 %"),
    ],
)
def test_share(value, text):
    assert units.share(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.042, "+4.2 %"),
        (-0.3, "-30.0 %"),
        (0.0, "+0.0 %"),
        (-0.0004, "+0.0 %"),
        (-0.0006, "-0.1 %"),
        (1.5, "+150.0 %"),
    ],
)
def test_a_share_with_its_sign(value, text):
    assert units.signed(value) == text


def test_bandwidth_is_read_in_bits():
    assert units.bandwidth(12.5e9) == "100 Gb/s"
    assert units.bandwidth(0.0) == "0 Gb/s" and units.bandwidth(450e9) == "3.6 Tb/s"


@pytest.mark.parametrize(("value", "text"), [(1.0, "1×"), (1.384, "1.38×"), (0.0123, "0.0123×"), (1234.5, "1,234×")])
def test_ratio(value, text):
    assert units.ratio(value) == text


@given(st.floats(1e-9, 1e5))
def test_three_digits_of_a_time_are_right_and_its_unit_fits(value):
    number, unit = units.seconds(value).split(" ")
    assert float(number.replace(",", "")) * FACTOR[unit] == pytest.approx(value, rel=0.0051)
    assert 1 <= float(number.replace(",", "")) < 1000 or unit == "s"
    assert "e" not in number


@given(st.floats(1.0, 1e18))
def test_three_digits_of_a_size_are_right_and_its_unit_fits(value):
    number, unit = units.size(value).split(" ")
    assert float(number.replace(",", "")) * FACTOR[unit] == pytest.approx(value, rel=0.0051)
    assert 1 <= float(number.replace(",", "")) < 1000 or unit == "TB"


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_longer_time_never_reads_as_a_shorter_one(first, second):
    def read(value: float) -> float:
        number, unit = units.seconds(value).split(" ")
        return float(number.replace(",", "")) * FACTOR[unit]

    short, long = sorted((first, second))
    assert read(short) <= read(long) * (1 + 1e-12)


@given(st.floats(0, 10))
def test_a_share_that_is_not_nothing_never_reads_as_nothing(value):
    text = units.share(value)
    assert re.fullmatch(r"(< )?\d+(\.\d)? %", text)
    assert (text == "0.0 %") == (value == 0)


def test_round_off_decides_no_digit():
    assert units.digits(0.9375) == units.digits(15 / 16 - 1e-16) == "0.938"
