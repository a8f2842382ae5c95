"""What a recording says at a glance, of few experts and of as many as there are ids."""

import numpy as np
import pytest

from engine.compare import inspection
from engine.compare.inspection import inspect, predicted_share
from engine.workload import RoutingTrace


def test_the_share_that_is_foretold_by_hand():
    first_choices = np.array([[0, 1, 1], [0, 1, 2], [0, 2, 1], [3, 3, -1]])
    trace = RoutingTrace("by hand", first_choices[:, :, None].astype(np.int16), 4)
    assert predicted_share(trace) == pytest.approx([3 / 4, 2 / 3])


def test_both_ways_to_count_agree(monkeypatch):
    rng = np.random.default_rng(0)
    trace = RoutingTrace("drawn", rng.integers(-1, 12, (50, 6, 2)).astype(np.int16), 12)
    in_a_table = predicted_share(trace)
    monkeypatch.setattr(inspection, "MOST_CELLS", 0)
    np.testing.assert_array_equal(predicted_share(trace), in_a_table)


def test_the_largest_id_takes_no_table_of_all_pairs():
    trace = RoutingTrace("one token", np.full((1, 40, 1), 32767, np.int16), 32768)
    assert inspect(trace).predicted.tolist() == [1.0] * 39
