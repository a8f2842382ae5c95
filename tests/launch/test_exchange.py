"""Exchanges, also between real ranks: every row arrives where it belongs, in every order and format. Two-tier orders: by ports
that have their shares. Spread inside nodes: outputs come home once, and the rows are the simulated ones."""

import time
from collections import Counter
from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.communication.steps import Steps
from engine.communication.travel import Stops, rows_of_tokens
from engine.communication.two_tier import two_tier
from engine.network import Network, off_diagonal
from engine.plan import Travel
from engine.runtime.exchange.all_to_all import MOST_SLICES, SLICE, Exchange, slices
from engine.runtime.exchange.hops import Hops, Legs, hops
from engine.runtime.exchange.links import Links
from engine.runtime.exchange.recorder import Recorder
from engine.runtime.exchange.routes import Piece, pieces, rows_of_ranks
from engine.runtime.exchange.wire import Wire, wires_of
from tests.cases.examples import examples
from tests.cases.launch_plans import MODES
from tests.launch.exchange_ranks import PACED_RATES, WIDTH, counts_of, relays_of, schedule_of, spreads_of
from tests.strategies import make_model, networks

RANKS = 4


@pytest.fixture(scope="module")
def of_four(outcomes_of) -> list[dict]:
    """All exchanges of each of four ranks."""
    return outcomes_of("launch.exchange_ranks", RANKS)


def wanted(counts: np.ndarray, rank: int) -> list[list[int]]:
    """The rows that a rank receives: by source, as each source numbered them."""
    return [[src, rank, number] for src in range(len(counts)) for number in range(counts[src, rank])]


def test_every_row_arrives_in_its_place_in_every_order_and_both_ends_log_every_piece(of_four):
    for rank, outcome in enumerate(of_four):
        exchanges = iter(outcome["exchanges"])
        for seed, mode in product(range(4), MODES):
            counts = counts_of(RANKS, seed)
            for matrix in (counts, counts.T):  # expected at the same time, and not mixed up
                exchange, order = next(exchanges), pieces(mode, schedule_of(mode, matrix, seed), matrix)
                assert exchange["incoming"] == wanted(matrix, rank), (seed, mode)
                both = [[piece.src, piece.dst, piece.begin, piece.end] for piece in order]
                assert sorted(exchange["logged"]) == sorted(ends for ends in both if rank in ends[:2])
        assert next(exchanges, None) is None


def test_a_shared_order_takes_what_its_busiest_link_needs(of_four):
    counts = counts_of(RANKS, 0) + 50
    moved = np.where(np.eye(RANKS), 0, counts) * 24.0
    needed = max((moved.sum(axis=0) / PACED_RATES).max(), (moved.sum(axis=1) / PACED_RATES).max())
    parts = min(round(needed / SLICE), MOST_SLICES)
    assert parts > 4 and needed < 1
    for rank, outcome in enumerate(of_four):
        (unpaced, rows), (paced, same) = outcome["paced"]
        assert rows == same == wanted(counts, rank)
        # The last part is posted when the others have had their time, and these links are really much faster.
        assert needed * (parts - 1) / parts < paced + 0.01 and unpaced < paced


@pytest.mark.parametrize("ranks", [RANKS, pytest.param(8, marks=pytest.mark.everything)])
def test_every_row_arrives_in_its_place_and_every_hop_is_logged_once_by_each_of_its_ends(of_four, outcomes_of, ranks):
    outcomes = of_four if ranks == RANKS else outcomes_of("launch.exchange_ranks", ranks)
    cases = zip(relays_of(len(outcomes)), *(outcome["relayed"] for outcome in outcomes), strict=True)
    for number, ((counts, done), *exchanges) in enumerate(cases):
        order = [[piece.phase, piece.src, piece.dst, piece.begin, piece.end] for piece in done.order]
        for rank, exchange in enumerate(exchanges):
            wanted = [[src, rank, row] for src in range(len(counts)) for row in range(counts[src, rank])]
            assert exchange["incoming"] == wanted, number
            assert sorted(exchange["logged"]) == sorted(piece for piece in order if rank in piece[1:3])


def test_every_rank_gets_the_tokens_of_its_experts_and_their_outputs_come_home_summed_up_by_the_simulated_rows(of_four):
    for number, (hosts, source, stops, parts) in enumerate(spreads_of(RANKS)):
        wanted = off_diagonal(rows_of_tokens(hosts, source, stops, "node"))
        both = wanted + wanted.T
        for rank, outcome in enumerate(of_four):
            exchange, rows = outcome["spread"][number], Counter()
            served = np.flatnonzero((hosts == rank).any(axis=1)).tolist()
            assert exchange["came"] == [[token, source[token]] for token in served]
            for token, summed in enumerate(exchange["summed"]):
                ranks = {int(host) for host in hosts[token] if host >= 0} if source[token] == rank else set()
                assert summed == [token * len(ranks), sum(2**host for host in ranks)]
            for phase, src, dst, count in exchange["logged"]:
                assert 0 <= phase <= parts and rank in (src, dst)
                rows[src, dst] += count
            assert rows == {(src, dst): both[src, dst] for src, dst in np.argwhere(both).tolist() if rank in (src, dst)}


def test_over_nccl_a_pace_begins_when_the_gpu_has_come_to_the_exchange(monkeypatch):
    """The GPU is the host here: only its stream and NCCL have to be stood in for."""
    reached, posted, gpu = [], [], torch.device("cuda", 0)

    def catch_up() -> None:
        time.sleep(0.1)  # the host is ahead of the stream
        reached.append(time.monotonic())

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.MagicMock(synchronize=catch_up))
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "P2POp", lambda *operation: operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [posted.append(time.monotonic())][:0])
    recorder = Recorder(0, gpu)
    monkeypatch.setattr(recorder, "mark", lambda: None)
    counts = np.array([[0, 60], [60, 0]])
    links = Links(np.full(2, 60 * WIDTH * 8 / (4 * SLICE)))
    order = pieces("shared", schedule_of("shared", counts, 0), counts)
    way = Exchange(0, "shared", order, counts, lambda piece, begin: None, recorder, links=links)
    outgoing = torch.zeros((60, WIDTH), dtype=torch.float64)
    way.run(outgoing, torch.empty_like(outgoing))
    assert len(posted) == 4, "four parts"
    assert all(moment >= reached[0] + part * SLICE for part, moment in enumerate(posted))


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_slices_are_the_piece_and_nearly_equal(count):
    piece = Piece(3, 0, 1, 5, 28)
    parts = slices(piece, count)
    assert [part.begin for part in parts] == [5, *(part.end for part in parts[:-1])] and parts[-1].end == 28
    sizes = [part.end - part.begin for part in parts]
    assert len(parts) == count and max(sizes) - min(sizes) <= 1
    assert all((part.phase, part.src, part.dst) == (3, 0, 1) for part in parts)


# Rows on the wire.
FORMATS = ("fp32", "bf16", "fp16", "fp8")
RELATIVE = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "fp8": 2**-4}
"""Half a step between neighbours, relative to a number."""


WAYS = dict.fromkeys(("dispatch", "combine"), st.sampled_from((None, *FORMATS)))
TRAVELS = st.builds(Travel, unit=st.sampled_from(("copies", "gpu", "node")), **WAYS)


def numbers(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """float32[row, width] of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, width), generator=generator) * 10.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)


@settings(max_examples=examples(80), deadline=None)
@given(TRAVELS, st.sampled_from(("fp32", "bf16")), st.integers(1, 400), st.integers(1, 5))
def test_rows_are_as_long_as_the_plan_says(travel, dtype, width, k):
    model = make_model(1, 8, k, d_model=width, dtype=dtype)
    wires = wires_of(travel, model)
    assert tuple(wire.bytes for wire in wires) == travel.row_bytes(model)
    weights = torch.rand((3, k))
    for wire in wires:
        rows = wire.pack(numbers(3, width), weights if wire.weights else None)
        assert rows.shape == (3, wire.bytes) and rows.dtype == torch.uint8
    if travel.unit != "copies":
        assert torch.equal(wires[0].gate_weights(wires[0].pack(numbers(3, width), weights)), weights)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [1, 127, 128, 300])
def test_numbers_come_out_rounded_to_the_nearest(dtype, width):
    wire, sent = Wire(dtype, width, 2), numbers(50, width)
    came = wire.unpack(wire.pack(sent, torch.ones((50, 2))))
    # In 8 bits a number far below the largest of its group is rounded to steps of that.
    least = sent.abs().amax(dim=1, keepdim=True) * 2**-10 / 448 if dtype == "fp8" else 1e-7
    assert ((came - sent).abs() <= sent.abs() * RELATIVE[dtype] + least).all()
    torch.testing.assert_close(wire.rounded(came), came, rtol=1e-6, atol=0.0)
    assert torch.equal(wire.rounded(sent), came)
    none = torch.empty(0, width)
    assert Wire(dtype, width).pack(none).shape == (0, Wire(dtype, width).bytes) and wire.rounded(none).shape == none.shape


def test_a_group_of_zeros_stays_zeros_and_scales_are_each_groups_own():
    wire, sent = Wire("fp8", 300), torch.zeros((2, 300))
    sent[0, 128:256] = 1e-20
    sent[1, 256:] = 3e30
    torch.testing.assert_close(wire.unpack(wire.pack(sent)), sent, rtol=1e-6, atol=0.0)


def test_rows_that_go_on_as_one_are_summed_before_they_are_rounded():
    wire = Wire("bf16", 2)
    rows = wire.pack(torch.tensor([[256.0, 1.0], [1.0, 1.0], [1.0, 1.0], [5.0, 5.0]]))
    summed = wire.unpack(wire.summed(rows, torch.tensor([0, 0, 0, 1]), 2))
    assert summed.tolist() == [[258.0, 3.0], [5.0, 5.0]], "one by one, 256 + 1 would stay 256"


# Two-tier orders in whole rows.
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


def test_few_rows_are_spread_over_stages():
    """One row a pair: no rank's rows all go in the same stage."""
    network = network_of((4, 4))
    counts = np.ones((8, 8), dtype=int) - np.eye(8, dtype=int)
    done = hops(two_tier(counts.astype(float), network).solution, counts, network)
    crossing = Counter((piece.phase, piece.src) for piece in done.order if piece.src // 4 != piece.dst // 4)
    assert len({phase for phase, _ in crossing}) >= 4
    assert max(sum(1 for phase, _ in crossing if phase == step) for step, _ in crossing) <= 8


# Rows that spread inside nodes.
@st.composite
def spreading(draw) -> tuple[np.ndarray, np.ndarray, Stops]:
    """hosts int64[token, k] with padding, source int64[token], ranks in nodes of any sizes."""
    ranks, tokens, k = draw(st.integers(1, 7)), draw(st.integers(1, 30)), draw(st.integers(1, 4))
    hosts = draw(hnp.arrays(np.int64, (tokens, k), elements=st.integers(-1, ranks - 1)))
    source = draw(hnp.arrays(np.int32, tokens, elements=st.integers(0, ranks - 1)))
    node = np.sort(draw(hnp.arrays(np.int64, ranks, elements=st.integers(0, 2))))
    return hosts, source, Stops(node)


@settings(max_examples=examples(200), deadline=None)
@given(spreading(), st.sampled_from((1, 2, 5)))
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


@settings(max_examples=examples(60), deadline=None)
@given(spreading())
def test_while_one_slice_enters_the_one_before_is_spread(layer):
    legs, slices = Legs.of(*layer), 4
    domain = layer[2].of_gpu
    for done, last in ((legs.dispatch(slices), False), (legs.combine(slices), True)):
        for piece in done.order:
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
