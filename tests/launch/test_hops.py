"""Two-tier orders in whole rows: every row reaches its rank once, by ports that have their shares, also between real ranks."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.communication.steps import Steps
from engine.communication.two_tier import two_tier
from engine.launch.rank.hops import Hops, hops
from engine.network import Network, off_diagonal
from tests.cases.examples import examples
from tests.launch.relayed_ranks import cases_of
from tests.strategies import networks

SIZES = [(2, 2), (4, 4), (3, 1, 2), (1, 1, 1), (4,), (1,)]


def network_of(sizes, link: float = 9.0) -> Network:
    """Nodes of so many ranks with ports of 1 byte/s."""
    ones = np.ones(sum(sizes))
    return Network(ones, ones, link * ones, np.repeat(np.arange(len(sizes)), sizes), 0.0, 0 * ones)


def carried_out(done: Hops, counts: np.ndarray, network: Network) -> list[tuple[int, int, int, int]]:
    """Every hop as (step, src, dst, row), with all held to the rules: a rank passes on only rows that it had when the step
    began, and in the end every rank has its rows."""
    ranks, domain = len(counts), network.domain
    origin, target = np.divmod(np.repeat(np.arange(ranks * ranks), counts.ravel()), ranks)
    at, taken = origin.copy(), []
    sent = np.zeros(counts.shape, dtype=int)
    assert [piece.phase for piece in done.order] == sorted(piece.phase for piece in done.order)
    for step in sorted({piece.phase for piece in done.order}):
        here = at.copy()
        pieces = [piece for piece in done.order if piece.phase == step]
        assert len({(piece.src, piece.dst) for piece in pieces}) == len(pieces)
        for piece in pieces:
            assert piece.begin == sent[piece.src, piece.dst] < piece.end and piece.src != piece.dst
            sent[piece.src, piece.dst] = piece.end
            rows = done.between(piece.src, piece.dst)[piece.begin : piece.end]
            assert (here[rows] == piece.src).all()
            at[rows] = piece.dst
            taken += [(step, piece.src, piece.dst, row) for row in rows.tolist()]
    np.testing.assert_array_equal(at, target)
    np.testing.assert_array_equal(sent, done.counts)
    moves = Counter((row, domain[src] == domain[dst]) for _, src, dst, row in taken)
    for row, (src, dst) in enumerate(zip(origin, target, strict=True)):
        away = domain[src] != domain[dst]
        assert moves[row, False] == away and moves[row, True] <= (2 if away else src != dst)
    return taken


@st.composite
def exchanges(draw):
    """Rows int64[src, dst] to move, those that a schedule was made for, and a network."""
    network = draw(networks(9))
    shape, rows = (network.gpus, network.gpus), st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 400))
    return draw(hnp.arrays(np.int64, shape, elements=rows)), draw(hnp.arrays(np.int64, shape, elements=rows)), network


@settings(max_examples=examples(200), deadline=None)
@given(exchanges())
def test_every_row_arrives_once_also_of_traffic_the_schedule_does_not_know(exchange):
    counts, planned, network = exchange
    for matrix in (counts, planned):
        schedule = two_tier(matrix.astype(float), network).solution
        carried_out(hops(schedule, counts, network), counts, network)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("largest", [2, 30, 3000])
def test_rows_go_as_the_bytes_of_the_simulation_do(sizes, largest):
    network, ranks = network_of(sizes), sum(sizes)
    counts = np.random.default_rng(ranks * largest).integers(0, largest, (ranks, ranks))
    schedule = two_tier(counts.astype(float), network).solution
    taken = carried_out(hops(schedule, counts, network), counts, network)
    steps = Steps.of(schedule, off_diagonal(counts).astype(float), network)
    step, src, dst, size = steps.sends()
    shape = (len(steps.seconds), ranks, ranks)
    planned = np.bincount(np.ravel_multi_index((step, src, dst), shape), size, np.prod(shape)).reshape(shape)
    rows = np.zeros(shape)
    np.add.at(rows, tuple(np.array([hop[:3] for hop in taken], dtype=int).reshape(-1, 3).T), 1)
    domain = steps.domains.of_gpu
    between = domain[:, None] != domain
    # A stage is one row off at most, each port's part of it another one, and two domains may meet in several stages.
    for axis in (1, 2):
        ports = np.where(between, rows - planned, 0).sum(axis=axis)
        assert np.abs(ports).max(initial=0) <= 2 * len(sizes)
        links = np.where(between, 0, rows - planned).sum(axis=axis)
        assert np.abs(links).max(initial=0) <= 0.05 * largest + 3 * ranks


def test_a_scaled_testbed_has_the_hops_of_the_drawn_cluster():
    network = network_of((2, 3))
    counts = np.random.default_rng(1).integers(0, 40, (5, 5))
    schedule = two_tier(counts * 512.0, network).solution
    slower = replace(network, send=network.send / 4, receive=network.receive / 4, link=network.link / 4)
    drawn, scaled = (hops(schedule, counts, of) for of in (network, slower))
    assert drawn.order == scaled.order and drawn.rows.tolist() == scaled.rows.tolist()


def test_a_row_relayed_to_the_idle_port():
    """One sender of a node of two: half of its rows leave by the other's port, and both ports of the receiving node take
    half."""
    counts = np.zeros((4, 4), dtype=int)
    counts[0, 3] = 32
    network = network_of((2, 2))
    done = hops(two_tier(counts.astype(float), network).solution, counts, network)
    wanted = np.zeros((4, 4), dtype=int)
    wanted[0, 1] = wanted[0, 2] = wanted[1, 3] = wanted[2, 3] = 16
    np.testing.assert_array_equal(done.counts, wanted)


def test_few_rows_are_spread_over_stages():
    """One row a pair: no rank's rows all go in the same stage."""
    network = network_of((4, 4))
    counts = np.ones((8, 8), dtype=int) - np.eye(8, dtype=int)
    done = hops(two_tier(counts.astype(float), network).solution, counts, network)
    crossing = Counter((piece.phase, piece.src) for piece in done.order if piece.src // 4 != piece.dst // 4)
    assert len({phase for phase, _ in crossing}) >= 4
    assert max(sum(1 for phase, _ in crossing if phase == step) for step, _ in crossing) <= 8


# Real ranks.


@pytest.fixture(scope="module", params=[4, pytest.param(8, marks=pytest.mark.everything)], ids="{} ranks".format)
def outcomes(request, outcomes_of) -> list[list[dict]]:
    """The exchanges of every rank."""
    return outcomes_of("relayed_ranks", request.param)


def test_every_row_arrives_in_its_place_and_every_hop_is_logged_once_by_each_of_its_ends(outcomes):
    for number, ((counts, done), *exchanges) in enumerate(zip(cases_of(len(outcomes)), *outcomes, strict=True)):
        order = [[piece.phase, piece.src, piece.dst, piece.begin, piece.end] for piece in done.order]
        for rank, exchange in enumerate(exchanges):
            wanted = [[src, rank, row] for src in range(len(counts)) for row in range(counts[src, rank])]
            assert exchange["incoming"] == wanted, number
            assert sorted(exchange["logged"]) == sorted(piece for piece in order if rank in piece[1:3])
