"""Rows that spread inside nodes: every rank gets its tokens, outputs come home once, and the rows are the simulated ones."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.communication.travel import Stops, rows_of_tokens
from engine.launch.rank.hops import MOST_SLICES, Hops, Legs
from engine.launch.rank.links import Links
from engine.launch.rank.routes import rows_of_ranks
from engine.network import off_diagonal
from tests.cases.examples import examples
from tests.launch.spread_ranks import cases_of


@st.composite
def layers(draw) -> tuple[np.ndarray, np.ndarray, Stops]:
    """hosts int64[token, k] with padding, source int64[token], ranks in nodes of any sizes."""
    ranks, tokens, k = draw(st.integers(1, 7)), draw(st.integers(1, 30)), draw(st.integers(1, 4))
    hosts = draw(hnp.arrays(np.int64, (tokens, k), elements=st.integers(-1, ranks - 1)))
    source = draw(hnp.arrays(np.int32, tokens, elements=st.integers(0, ranks - 1)))
    node = np.sort(draw(hnp.arrays(np.int64, ranks, elements=st.integers(0, 2))))
    return hosts, source, Stops(node)


def steps_of(hops: Hops) -> list[list[tuple[int, int, int]]]:
    """(src, dst, token) of every step."""
    steps = {}
    for piece in hops.order:
        tokens = hops.between(piece.src, piece.dst)[piece.begin : piece.end]
        steps.setdefault(piece.phase, []).extend((piece.src, piece.dst, token) for token in tokens.tolist())
    return [steps[step] for step in sorted(steps)]


@settings(max_examples=examples(200), deadline=None)
@given(layers(), st.sampled_from((1, 2, 5)))
def test_rows_are_the_simulated_ones_there_and_back(layer, slices):
    hosts, source, stops = layer
    legs = Legs.of(*layer)
    wanted = off_diagonal(rows_of_tokens(hosts, source, stops, "node"))
    np.testing.assert_array_equal(legs.dispatch(slices).counts, wanted)
    np.testing.assert_array_equal(legs.combine(slices).counts, wanted.T)
    there, back = rows_of_ranks(hosts, source, stops.gpus)
    wanted = rows_of_tokens(hosts, source, stops, "gpu")
    np.testing.assert_array_equal(there.counts, wanted)
    np.testing.assert_array_equal(back.counts, wanted.T)


@settings(max_examples=examples(200), deadline=None)
@given(layers(), st.sampled_from((1, 2, 5)))
def test_nothing_is_passed_on_before_it_has_come_and_nothing_comes_twice(layer, slices):
    hosts, source, _ = layer
    legs = Legs.of(*layer)
    has = {(int(rank), token) for token, rank in enumerate(source)}
    for step in steps_of(legs.dispatch(slices)):
        assert all((src, token) in has for src, _, token in step)
        came = [(dst, token) for _, dst, token in step]
        assert len(set(came)) == len(came) and not has & set(came)
        has |= set(came)
    served = {(int(hosts[token, k]), int(token)) for token, k in zip(*np.nonzero(hosts >= 0), strict=True)}
    assert served <= has
    # Back: the outputs of every rank, until all of them are at home. A rank that has passed a token on has nothing more of it.
    holds = {pair: {pair[0]} for pair in served}
    for step in steps_of(legs.combine(slices)):
        moved = [(dst, token, holds.pop((src, token))) for src, dst, token in step]
        for dst, token, parts in moved:
            assert not holds.get((dst, token), set()) & parts
            holds[dst, token] = holds.get((dst, token), set()) | parts
    parts = {token: set(row[row >= 0].tolist()) for token, row in enumerate(hosts) if (row >= 0).any()}
    assert holds == {(int(source[token]), token): ranks for token, ranks in parts.items()}


@settings(max_examples=examples(60), deadline=None)
@given(layers())
def test_while_one_slice_enters_the_one_before_is_spread(layer):
    legs, slices = Legs.of(*layer), 4
    domain = layer[2].of_gpu
    for hops, last in ((legs.dispatch(slices), False), (legs.combine(slices), True)):
        for piece in hops.order:
            crosses = domain[piece.src] != domain[piece.dst]
            first, end = (1, slices) if last else (0, slices - 1)
            assert not crosses or first <= piece.phase <= end
            assert 0 <= piece.phase <= slices


def test_slices_are_as_many_as_shorten_the_exchange():
    """Two nodes of two; 400 tokens of rank 0 for rank 3, which enter by rank 2: 1 s over the port, and 0.4 s over the link."""
    stops = Stops(np.array([0, 0, 1, 1]))
    legs = Legs.of(np.full((400, 1), 3), np.zeros(400, dtype=int), stops)
    node = np.array([0, 0, 1, 1])

    def slices(start_up: float, port: float = 4e5, backend: str = "gloo") -> int:
        links = Links(np.full(4, port), start_up, node, np.full(4, port * 2.5))
        return legs.slices(1000.0, links, backend)

    assert slices(0.1) == 2 and slices(0.4) == slices(2.0) == 1 and slices(0.025) == 4
    assert slices(0.0) == slices(1e-6) == MOST_SLICES
    assert slices(0.0, 4e6) == 5, "0.1 s in steps of 20 ms"
    assert slices(0.0, 4e6, "nccl") == MOST_SLICES
    assert legs.slices(1000.0, None, "gloo") == 1
    inside = Legs.of(np.full((400, 1), 1), np.zeros(400, dtype=int), stops)
    assert inside.slices(1000.0, Links(np.full(4, 1e5), 0.0, node, np.full(4, 1e5)), "gloo") == 1, "nothing is spread"
    phases = [piece.phase for piece in legs.dispatch(4).order if piece.src == 0]
    assert phases == [0, 1, 2, 3] and {piece.end - piece.begin for piece in legs.dispatch(4).order} == {100}


# Real ranks.


RANKS = 4


@pytest.fixture(scope="module")
def outcomes(outcomes_of) -> list[list[dict]]:
    """The exchanges of every rank."""
    return outcomes_of("spread_ranks", RANKS)


def test_every_rank_gets_the_tokens_of_its_experts_and_what_is_made_of_them_comes_home_summed_up(outcomes):
    for rank, exchanges in enumerate(outcomes):
        for (hosts, source, *_), exchange in zip(cases_of(RANKS), exchanges, strict=True):
            wanted = np.flatnonzero((hosts == rank).any(axis=1))
            assert exchange["came"] == [[token, source[token]] for token in wanted.tolist()]
            for token, summed in enumerate(exchange["summed"]):
                ranks = {int(host) for host in hosts[token] if host >= 0} if source[token] == rank else set()
                assert summed == [token * len(ranks), sum(2**host for host in ranks)]


def test_both_ends_log_the_rows_that_are_simulated(outcomes):
    for number, (hosts, source, stops, slices) in enumerate(cases_of(RANKS)):
        wanted = off_diagonal(rows_of_tokens(hosts, source, stops, "node"))
        for rank, exchanges in enumerate(outcomes):
            rows = Counter()
            for phase, src, dst, count in exchanges[number]["logged"]:
                assert 0 <= phase <= slices and rank in (src, dst)
                rows[src, dst] += count
            both = wanted + wanted.T
            assert rows == {(src, dst): both[src, dst] for src, dst in np.argwhere(both).tolist() if rank in (src, dst)}
