"""Exchanges between three real ranks, and rows on the wire: every row arrives where it belongs, in every order and format."""

import math
import time
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.launch.rank.exchange import MOST_SLICES, SLICE, Exchange, slices
from engine.launch.rank.links import Links
from engine.launch.rank.recorder import Recorder
from engine.launch.rank.routes import Piece, pieces
from engine.launch.rank.wire import Wire, wires_of
from engine.plan import Travel
from tests.cases.examples import examples
from tests.cases.launch_plans import MODES
from tests.launch.exchange_ranks import PACED_RATES, WIDTH, counts_of, schedule_of
from tests.strategies import make_model

RANKS = 3


@pytest.fixture(scope="module")
def outcomes(outcomes_of) -> list[dict]:
    """The exchanges of every rank."""
    return outcomes_of("exchange_ranks", RANKS)


def wanted(counts: np.ndarray, rank: int) -> list[list[int]]:
    """The rows that a rank receives: by source, as each source numbered them."""
    return [[src, rank, number] for src in range(len(counts)) for number in range(counts[src, rank])]


def test_every_row_arrives_in_its_place_in_every_order_and_both_ends_log_every_piece(outcomes):
    for rank, outcome in enumerate(outcomes):
        exchanges = iter(outcome["exchanges"])
        for seed, mode in product(range(4), MODES):
            counts = counts_of(RANKS, seed)
            for matrix in (counts, counts.T):  # expected at the same time, and not mixed up
                exchange, order = next(exchanges), pieces(mode, schedule_of(mode, matrix, seed), matrix)
                assert exchange["incoming"] == wanted(matrix, rank), (seed, mode)
                both = [[piece.src, piece.dst, piece.begin, piece.end] for piece in order]
                assert sorted(exchange["logged"]) == sorted(ends for ends in both if rank in ends[:2])
        assert next(exchanges, None) is None


def test_a_shared_order_takes_what_its_busiest_link_needs(outcomes):
    counts = counts_of(RANKS, 0) + 50
    moved = np.where(np.eye(RANKS), 0, counts) * 24.0
    needed = max((moved.sum(axis=0) / PACED_RATES).max(), (moved.sum(axis=1) / PACED_RATES).max())
    parts = min(round(needed / SLICE), MOST_SLICES)
    assert parts > 4 and needed < 1
    for rank, outcome in enumerate(outcomes):
        (unpaced, rows), (paced, same) = outcome["paced"]
        assert rows == same == wanted(counts, rank)
        # The last part is posted when the others have had their time, and these links are really much faster.
        assert needed * (parts - 1) / parts < paced + 0.01 and unpaced < paced


class Stream:
    """The stream of a GPU that the host is ahead of."""

    LATE = 0.1

    def __init__(self) -> None:
        self.reached = math.nan

    def synchronize(self) -> None:
        time.sleep(self.LATE)
        self.reached = time.monotonic()


def test_over_nccl_a_pace_begins_when_the_gpu_has_come_to_the_exchange(monkeypatch):
    """The GPU is the host here: only its stream and NCCL have to be stood in for."""
    stream, posted, gpu = Stream(), [], torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
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
    assert all(moment >= stream.reached + part * SLICE for part, moment in enumerate(posted))


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


def numbers(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """float32[row, width] of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, width), generator=generator) * 10.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)


@settings(max_examples=examples(80), deadline=None)
@given(
    st.sampled_from(("copies", "gpu", "node")),
    st.sampled_from((None, *FORMATS)),
    st.sampled_from((None, *FORMATS)),
    st.sampled_from(("fp32", "bf16")),
    st.integers(1, 400),
    st.integers(1, 5),
)
def test_rows_are_as_long_as_the_plan_says(unit, there, back, dtype, width, k):
    travel = Travel(unit=unit, dispatch=there, combine=back)
    model = make_model(1, 8, k, d_model=width, dtype=dtype)
    wires = wires_of(travel, model)
    assert tuple(wire.bytes for wire in wires) == travel.row_bytes(model)
    weights = torch.rand((3, k))
    for wire in wires:
        rows = wire.pack(numbers(3, width), weights if wire.weights else None)
        assert rows.shape == (3, wire.bytes) and rows.dtype == torch.uint8
    if unit != "copies":
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
