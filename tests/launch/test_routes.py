"""Who sends which rows to whom: no copy is lost or doubled, whatever the placement, the padding and the schedule."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.communication.order import order, random_order, shortest_first
from engine.plan import Placement, Schedule
from engine.runtime.exchange.routes import Piece, Route, combined, pieces, route
from tests.cases.examples import examples
from tests.cases.launch_plans import MODES


@st.composite
def layers(draw) -> tuple[np.ndarray, np.ndarray, Placement]:
    """One layer: experts int64[token, k] with padding, source int64[token], a placement with replicas."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    k, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    chosen = draw(hnp.arrays(np.int64, (tokens, k), elements=st.integers(-1, experts - 1)))
    source = draw(hnp.arrays(np.int64, tokens, elements=st.integers(0, ranks - 1)))
    homes = draw(st.lists(st.sets(st.integers(0, ranks - 1), min_size=1), min_size=experts, max_size=experts))
    row = tuple(tuple(e for e in range(experts) if rank in homes[e]) for rank in range(ranks))
    return chosen, source, Placement(experts=experts, experts_of_gpu=(row,), model_layers=(0,))


def copies(token: np.ndarray, choice: np.ndarray) -> list[tuple[int, int]]:
    return sorted(zip(token.tolist(), choice.tolist(), strict=True))


@settings(max_examples=examples(200), deadline=None)
@given(layers())
def test_every_copy_goes_once_to_a_rank_that_holds_its_expert_replicas_share_evenly_and_both_ends_agree(layer):
    chosen, source, placement = layer
    laid, ranks = route(chosen, source, placement.share[0]), range(placement.gpus)
    assert copies(laid.token, laid.choice) == copies(*np.nonzero(chosen >= 0))
    np.testing.assert_array_equal(laid.expert, chosen[laid.token, laid.choice])
    assert laid.counts.sum() == (chosen >= 0).sum() and laid.counts.min() >= 0
    hosted = np.zeros((placement.gpus, placement.experts, placement.gpus), dtype=int)
    for src, dst in product(ranks, ranks):
        rows = slice(laid.first[src, dst], laid.first[src, dst] + laid.counts[src, dst])
        assert (source[laid.token[rows]] == src).all()
        assert set(laid.expert[rows].tolist()) <= set(placement.experts_of_gpu[0][dst])
        np.add.at(hosted[src, :, dst], laid.expert[rows], 1)
    for expert in range(placement.experts):
        served = hosted[:, expert][:, placement.share[0, expert] > 0]
        assert (served.max(axis=1) - served.min(axis=1)).max() <= 1, "as evenly as whole rows allow"
    for side in (laid.outgoing, laid.incoming):
        assert sorted(np.concatenate([side(rank) for rank in ranks]).tolist()) == list(range(len(laid.token)))
    for rank in ranks:
        # Sender and receiver cut their buffers by the same counts, so both must have the rows of a pair in one order.
        parts = np.split(laid.outgoing(rank), np.cumsum(laid.counts[rank])[:-1])
        assert (source[laid.token[laid.outgoing(rank)]] == rank).all()
        for other, part in enumerate(parts):
            begin = laid.counts[:rank, other].sum()
            np.testing.assert_array_equal(part, laid.incoming(other)[begin : begin + laid.counts[rank, other]])


@settings(max_examples=examples(100), deadline=None)
@given(layers(), st.randoms(use_true_random=False))
def test_a_combine_brings_every_copy_from_its_expert_to_where_its_token_goes_on(layer, random):
    chosen, source, placement = layer
    out = route(chosen, source, placement.share[0])
    home = np.array([random.randrange(placement.gpus) for _ in source])
    back = combined(out, home)
    assert copies(back.token, back.choice) == copies(out.token, out.choice)
    computed = {(token, choice): rank for token, choice, rank in zip(out.token, out.choice, out.dst, strict=True)}
    for rank in range(placement.gpus):
        sent, received = back.outgoing(rank), back.incoming(rank)
        assert all(computed[back.token[row], back.choice[row]] == rank for row in sent)
        assert (home[back.token[received]] == rank).all()
    np.testing.assert_array_equal(combined(out, source).counts, out.counts.T)


def schedule_for(mode: str, traffic: np.ndarray, seed: int) -> Schedule | None:
    """A schedule as the systems make them."""
    if mode == "concurrent":
        return None
    if mode == "sequential":
        return random_order(traffic, seed) if seed % 2 else shortest_first(traffic)
    rate = np.full(len(traffic), 3e9)
    return order(traffic, rate, rate, mode).solution


def hold_every_row_once(cut: list[Piece], counts: np.ndarray) -> None:
    seen = np.zeros(counts.shape, dtype=int)
    for piece in cut:
        assert piece.src != piece.dst and piece.end > piece.begin
        assert piece.begin == seen[piece.src, piece.dst], "a pair's pieces must follow one another without a gap"
        seen[piece.src, piece.dst] = piece.end
    np.testing.assert_array_equal(seen, np.where(np.eye(len(counts), dtype=bool), 0, counts))


@st.composite
def exchanges(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows int64[src, dst] to move, bytes float64[src, dst] the schedule was made for, and a seed."""
    n = draw(st.integers(1, 6))
    rows = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 10**6))
    planned = st.one_of(st.just(0.0), st.floats(1, 1e9))
    counts, traffic = hnp.arrays(np.int64, (n, n), elements=rows), hnp.arrays(np.float64, (n, n), elements=planned)
    return draw(counts), draw(traffic), draw(st.integers(0, 9))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=examples(100), deadline=None)
@given(exchanges())
def test_pieces_hold_every_row_once_also_of_traffic_the_schedule_does_not_know(mode, exchange):
    counts, planned, seed = exchange
    hold_every_row_once(pieces(mode, schedule_for(mode, planned, seed), counts), counts)
    hold_every_row_once(pieces(mode, schedule_for(mode, counts.astype(float), seed), counts), counts)


@settings(max_examples=examples(100), deadline=None)
@given(exchanges())
def test_pieces_of_a_matched_order_made_for_the_traffic_keep_its_matchings(exchange):
    counts, _, seed = exchange
    schedule = schedule_for("matched", counts * 256.0, seed)
    cut = pieces("matched", schedule, counts)
    assert [piece.phase for piece in cut] == sorted(piece.phase for piece in cut)
    for end in ("src", "dst"):
        used = [(piece.phase, getattr(piece, end)) for piece in cut]
        assert len(set(used)) == len(used)
    planned = dict.fromkeys(zip(schedule.phase, schedule.src, schedule.dst, strict=True))
    assert all((piece.phase, piece.src, piece.dst) in planned for piece in cut)


@settings(max_examples=examples(100), deadline=None)
@given(exchanges())
def test_a_sender_keeps_the_order_of_a_sequential_schedule(exchange):
    counts, _, seed = exchange
    schedule = schedule_for("sequential", counts * 256.0, seed)
    cut = pieces("sequential", schedule, counts)
    for sender in range(len(counts)):
        wanted = [dst for src, dst in zip(schedule.src, schedule.dst, strict=True) if src == sender]
        assert [piece.dst for piece in cut if piece.src == sender] == wanted


def test_a_pair_without_planned_bytes_goes_last_in_a_phase_of_the_rotation():
    schedule = Schedule(src=(0, 1), dst=(1, 0), bytes=(4.0, 4.0), phase=(0, 1), duration=(1.0, 1.0))
    counts = np.array([[9, 2, 3], [2, 9, 0], [0, 0, 9]])
    assert pieces("matched", schedule, counts) == [Piece(0, 0, 1, 0, 2), Piece(1, 1, 0, 0, 2), Piece(4, 0, 2, 0, 3)]
    # Rows are cut in proportion to the planned bytes.
    schedule = Schedule(src=(0, 0), dst=(1, 1), bytes=(30.0, 10.0), phase=(0, 1), duration=(3.0, 1.0))
    cut = pieces("matched", schedule, np.array([[0, 8], [0, 0]]))
    assert cut == [Piece(0, 0, 1, 0, 6), Piece(1, 0, 1, 6, 8)]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=30), st.integers(1, 10**6))
def test_round_off_in_many_parts_of_a_pair_loses_no_row(parts, rows):
    count = len(parts)
    pair, steps = {"src": (0,) * count, "dst": (1,) * count}, tuple(range(count))
    schedule = Schedule(**pair, bytes=tuple(parts), phase=steps, duration=(1.0,) * count)
    counts = np.array([[0, rows], [0, 0]])
    for mode in ("matched", "sequential"):
        hold_every_row_once(pieces(mode, schedule, counts), counts)


def test_the_layout_is_sorted_by_source_destination_expert_and_token_and_padding_is_nowhere():
    padded = route(np.full((4, 2), -1), np.array([0, 1, 0, 1]), np.eye(2))
    assert len(padded.token) == 0 and not padded.counts.any()
    assert all(len(padded.outgoing(rank)) == len(padded.incoming(rank)) == 0 for rank in (0, 1))
    chosen = np.array([[2], [0], [1], [0], [3], [2]])
    laid: Route = route(chosen, np.array([1, 1, 0, 0, 0, 1]), np.array([[1, 0], [0, 1], [1, 0], [0, 1.0]]))
    assert laid.token.tolist() == [3, 2, 4, 1, 0, 5]
    assert laid.counts.tolist() == [[1, 2], [3, 0]] and laid.first.tolist() == [[0, 1], [3, 6]]
