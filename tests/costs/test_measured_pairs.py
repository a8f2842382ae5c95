"""Measured pairs as they are kept, beside clusters of their hosts and beside others."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.costs.pair_cluster import MeasuredPairs, PairTimes, draw_pairs
from engine.errors import InputError
from tests.cases.examples import examples

NAN = np.nan


def times_of(hosts: list[str], rate: np.ndarray) -> PairTimes:
    """rate: float64[gpu, gpu], of which the part above the diagonal counts."""
    above = np.triu(np.where(np.eye(len(rate), dtype=bool), NAN, rate), 1)
    both = np.where(np.triu(np.ones_like(rate), 1) > 0, above, above.T)
    np.fill_diagonal(both, NAN)
    buses = tuple(f"{gpu:02x}" for gpu in range(len(hosts)))
    return PairTimes(tuple(hosts), buses, ("NVIDIA H200",) * len(hosts), both, np.full_like(both, 1e-5), 1024.0)


RATES = st.integers(2, 6).flatmap(
    lambda gpus: st.lists(st.sampled_from([NAN, 1e9, 25e9, 300e9]), min_size=gpus**2, max_size=gpus**2).map(
        lambda cells: np.reshape(cells, (gpus, gpus))
    )
)


@settings(deadline=None, max_examples=examples(50))
@given(RATES, st.integers(1, 3))
def test_what_was_kept_is_what_was_measured(rate, of_a_host):
    assume(np.isfinite(rate[np.triu_indices(len(rate), 1)]).any())
    times = times_of([f"h{gpu // of_a_host}" for gpu in range(len(rate))], rate)
    drawn = draw_pairs(times, "drawn")
    kept = MeasuredPairs.of(times)
    again = MeasuredPairs.from_json(kept.to_json(), "kept").beside(drawn.cluster)
    for name in ("measured", "drawn"):
        np.testing.assert_array_equal(getattr(again, name), getattr(drawn, name))
    assert again.names == drawn.names
    assert again.is_partial == bool(np.isnan(rate[np.triu_indices(len(rate), 1)]).any())


def test_an_edited_cluster_is_held_against_them_and_another_is_not():
    times = times_of(["a", "a", "b"], np.array([[NAN, 100e9, 10e9], [NAN, NAN, 10e9], [NAN, NAN, NAN]]))
    kept, cluster = MeasuredPairs.of(times), draw_pairs(times, "drawn").cluster
    first, second = cluster.nodes
    slower = first.model_copy(update={"link_bandwidth": 50e9})
    beside = kept.beside(cluster.model_copy(update={"nodes": (slower, second)}))
    assert beside.difference[0, 1] == pytest.approx(-0.5) and beside.difference[0, 2] == pytest.approx(0)
    assert beside.worst(1) == [(0, 1)]
    for nodes in ((first,), (second, first), (first.model_copy(update={"gpus": first.gpus[:1]}), second)):
        assert kept.beside(cluster.model_copy(update={"nodes": nodes})) is None


def test_long_names_of_hosts():
    host = "node" * 40
    times = times_of([host, "b"], np.array([[NAN, 10e9], [NAN, NAN]]))
    assert MeasuredPairs.of(times).beside(draw_pairs(times, "drawn").cluster) is not None


@pytest.mark.parametrize(
    "fault",
    [
        {"buses": ["0"]},
        {"rate": [1e9]},
        {"first": [0, 1], "second": [1, 1]},
        {"first": [0, 1], "second": [1, 3]},
        {"first": [-1, 1]},
        {"rate": [1e9, 0]},
        {"hosts": ["a"]},
        {"first": [], "second": [], "rate": []},
    ],
)
def test_what_fits_nothing_is_refused(fault):
    fine = {"hosts": ["a", "a", "b"], "buses": ["0", "1", "2"], "first": [0, 1], "second": [1, 2], "rate": [1e9, 2e9]}
    MeasuredPairs.from_dict(fine, "kept")
    with pytest.raises(InputError, match=r"^kept: "):
        MeasuredPairs.from_dict(fine | fault, "kept")
