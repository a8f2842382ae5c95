"""All-gathers between ranks: everybody ends with everything, by the hops that are simulated."""

from itertools import groupby

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.communication.travel import Stops, rows_to_all
from engine.launch.rank.communicator import Gathering
from engine.network import off_diagonal
from tests.cases.examples import examples


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 6), st.data())
def test_ranks_pass_on_what_they_have_until_all_have_everything(domain, slices, data):
    ranks, stops = len(domain), Stops(np.array(domain))
    holder = np.array(data.draw(st.lists(st.integers(0, ranks - 1), max_size=40)), dtype=np.int64)
    gathering = Gathering(holder, stops, slices)
    assert sorted(gathering.row_of_item.tolist()) == list(range(len(holder)))
    item_of_row = np.argsort(gathering.row_of_item)
    has = holder[item_of_row][None, :] == np.arange(ranks)[:, None]
    moved = np.zeros((ranks, ranks))
    for _, phase in groupby(gathering.order, key=lambda piece: piece.phase):
        before = has.copy()
        for piece in phase:
            rows = slice(piece.begin, piece.end)
            assert before[piece.src, rows].all() and not has[piece.dst, rows].any()
            has[piece.dst, rows] = True
            moved[piece.src, piece.dst] += piece.end - piece.begin
    assert has.all()
    np.testing.assert_array_equal(moved, off_diagonal(rows_to_all(np.bincount(holder, minlength=ranks), stops)))


def test_slices_cross_while_others_are_collected_and_spread():
    """Two nodes of two ranks, eight items on rank 0, in two slices: of each, two rows cross by either rank."""
    order = Gathering(np.zeros(8, dtype=np.int64), Stops(np.array([0, 0, 1, 1])), 2).order
    hops = [(piece.phase, piece.src, piece.dst, piece.begin, piece.end) for piece in order]
    assert [hop for hop in hops if hop[1:3] == (0, 1)] == [(0, 0, 1, 0, 4), (1, 0, 1, 4, 8)]
    assert [hop for hop in hops if hop[1:3] == (1, 3)] == [(1, 1, 3, 2, 4), (2, 1, 3, 6, 8)]
    assert [hop for hop in hops if hop[1:3] == (3, 2)] == [(2, 3, 2, 2, 4), (3, 3, 2, 6, 8)]
