"""Rows of profiling and warm-up are seen, and nothing that real routing does is taken for them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.checks.copies import skew_of
from engine.formats.checks.profile_rows import Stretch, profile_stretches
from engine.formats.remedies import REMEDIES
from engine.workload import RoutingTrace
from tests.cases.examples import examples
from tests.formats.checks.recordings import SAMPLES, finding_of, random_trace, sample


def with_rows(trace: RoutingTrace, *places: tuple[int, int], row: int = 77) -> RoutingTrace:
    """The trace with so many copies of one of its tokens put in before the token at each place."""
    order = np.arange(trace.tokens)
    for place, count in sorted(places, reverse=True):
        order = np.insert(order, place, np.full(count, row))
    return trace.part(order)


def test_8448_profile_rows_before_a_real_recording():
    trace = sample()
    profiled = with_rows(trace, (0, 8448), row=5000)
    finding = finding_of(profiled, "profile-rows")
    assert (finding.severity, finding.rows, finding.remedy) == ("warning", (0, 8448), "cut-profile-rows")
    assert f"skew reads {skew_of(profiled.load):.1f}×, without them {skew_of(trace.load):.1f}×" in finding.message
    assert "41 % of the recording" in finding.message
    remedy = REMEDIES["cut-profile-rows"]
    assert remedy.title(profiled) == "Cut the first 8,448 tokens"
    mended = remedy.apply(profiled)
    assert mended.digest == trace.digest
    assert finding_of(mended, "profile-rows") is None


def test_they_make_a_recording_of_256_experts_read_ten_times_its_skew():
    trace = random_trace(tokens=4000, layers=2, experts=256, k=8)
    profiled = with_rows(trace, (0, 1800))
    assert skew_of(trace.load) < 1.4 and skew_of(profiled.load) > 9
    assert skew_of(REMEDIES["cut-profile-rows"].apply(profiled).load) == pytest.approx(skew_of(trace.load), rel=1e-2)


def test_several_stretches_and_side_by_side_ones():
    trace = random_trace(tokens=3000)
    profiled = with_rows(trace, (0, 200), (1000, 100))
    other = with_rows(profiled, (200, 300), row=1500)  # other dummy inputs, right after the first
    assert profile_stretches(other) == [Stretch(0, 500), Stretch(1500, 1600)]
    assert "600 with those in 1 other places" in finding_of(other, "profile-rows").message
    assert REMEDIES["cut-profile-rows"].title(other) == "Cut 600 tokens in 2 places"
    assert REMEDIES["cut-profile-rows"].apply(other).digest == trace.digest


def test_columns_of_tokens_are_cut_with_them():
    trace = random_trace(tokens=1000, sequence=np.arange(1000, dtype=np.int32), phase=np.arange(1000) % 2)
    mended = REMEDIES["cut-profile-rows"].apply(with_rows(trace, (500, 90)))
    np.testing.assert_array_equal(mended.sequence, np.r_[0:500, 500:1000])
    np.testing.assert_array_equal(mended.phase, np.arange(1000) % 2)


@pytest.mark.parametrize(
    ("tokens", "rows", "seen"), [(20000, 64, False), (20000, 66, True), (400, 19, False), (400, 23, True)]
)
def test_longer_than_64_or_than_5_percent(tokens, rows, seen):
    profiled = with_rows(random_trace(tokens=tokens), (10, rows), row=300)
    assert (finding_of(profiled, "profile-rows") is not None) == seen


def test_no_real_recording_has_any():
    for path in SAMPLES.glob("*.npz"):
        assert profile_stretches(sample(path.stem)) == []


def test_long_stretches_are_natural_where_neighbours_are_often_alike():
    # One of two experts, nearly always.
    chosen = (np.random.default_rng(2).random((20000, 1, 1)) < 0.02).astype(np.int16)
    trace = RoutingTrace("skewed", chosen, 2)
    lengths = np.diff(np.flatnonzero(np.diff(chosen[:, 0, 0])))
    assert lengths.max() > 64
    assert profile_stretches(trace) == []


def test_nothing_but_profile_rows():
    trace = random_trace(tokens=1).part(np.zeros(500, np.int64))
    finding = finding_of(trace, "profile-rows")
    assert (finding.severity, finding.remedy) == ("error", None)


def test_padding_is_not_taken_for_them():
    trace = random_trace(tokens=1000)
    experts = trace.experts.copy()
    experts[600:] = -1
    assert profile_stretches(replace(trace, experts=experts)) == []


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 900), st.integers(70, 300))
def test_cutting_brings_the_recording_back(seed, place, rows):
    trace = random_trace(seed, tokens=900, layers=3)
    row = min(place, trace.tokens - 1)
    profiled = with_rows(trace, (place, rows), row=row)
    mended = REMEDIES["cut-profile-rows"].apply(profiled)
    # The token that the rows are copies of is next to them and goes with them.
    np.testing.assert_array_equal(mended.experts, np.delete(trace.experts, row, axis=0))
    assert profile_stretches(mended) == []
