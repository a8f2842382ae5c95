"""Loads of slots as loads of experts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.arrays import fold_slots


def test_slots_of_an_expert_add_up():
    counts = np.array([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    np.testing.assert_array_equal(
        fold_slots(counts, np.array([[0, 1, 2, 0], [2, 2, 1, 0]]), 3), [[5, 2, 3], [8, 7, 11]]
    )


@given(st.data(), st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_as_counted_one_by_one(data, experts, redundant, layers, seed):
    rng = np.random.default_rng(seed)
    copies = data.draw(st.lists(st.integers(0, experts - 1), min_size=redundant, max_size=redundant))
    slots = np.array([rng.permutation([*range(experts), *copies]) for _ in range(layers)])
    counts = rng.integers(0, 9, (2, layers, slots.shape[1])).astype(float)
    expected = np.zeros((2, layers, experts))
    for source, layer, slot in np.ndindex(counts.shape):
        expected[source, layer, slots[layer, slot]] += counts[source, layer, slot]
    np.testing.assert_array_equal(fold_slots(counts, slots, experts), expected)
