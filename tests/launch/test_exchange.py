"""Exchanges between three real ranks: every row arrives where it belongs, whatever the order, and a pace is kept."""

import json
import math
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from engine.launch.rank.exchange import MOST_SLICES, SLICE, Exchange, slices
from engine.launch.rank.links import Links
from engine.launch.rank.recorder import Recorder
from engine.launch.rank.routes import Piece, pieces
from tests import warm
from tests.launch.exchange_cases import MODES, PACED_RATES, counts_of, schedule_of
from tests.launch.exchange_ranks import WIDTH

RANKS, ROOT = 3, Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, warm_process) -> list[dict]:
    """What every rank has found."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [str(warm.PYTHON), "-m", "tests.launch.exchange_ranks"]
    environment = os.environ | {warm.ADDRESS: str(warm_process)}
    ranks = [
        subprocess.Popen([*command, str(rank), str(RANKS), str(folder)], cwd=ROOT, env=environment)
        for rank in range(RANKS)
    ]
    try:
        assert [rank.wait(60) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(RANKS)]


def wanted(counts: np.ndarray, rank: int) -> list[list[int]]:
    """The rows that a rank receives: by source, as each source numbered them."""
    return [[src, rank, number] for src in range(len(counts)) for number in range(counts[src, rank])]


def test_every_row_arrives_in_its_place_in_every_order(outcomes):
    for rank, outcome in enumerate(outcomes):
        exchanges = iter(outcome["exchanges"])
        for seed in range(4):
            counts = counts_of(RANKS, seed)
            for mode in MODES:
                for matrix in (counts, counts.T):  # expected at the same time, and not mixed up
                    assert next(exchanges)["incoming"] == wanted(matrix, rank), (seed, mode)
        assert next(exchanges, None) is None


def test_every_piece_is_logged_once_by_each_of_its_ends(outcomes):
    for rank, outcome in enumerate(outcomes):
        exchanges = iter(outcome["exchanges"])
        for seed in range(4):
            counts = counts_of(RANKS, seed)
            for mode in MODES:
                for matrix in (counts, counts.T):
                    order = pieces(mode, schedule_of(mode, matrix, seed), matrix)
                    mine = [
                        [piece.src, piece.dst, piece.begin, piece.end]
                        for piece in order
                        if rank in (piece.src, piece.dst)
                    ]
                    assert sorted(next(exchanges)["logged"]) == sorted(mine)


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
    """Of a GPU that the host is ahead of."""

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


def test_links_are_a_network_of_their_rates():
    network = Links(np.array([4.0, 2.0]), 0.5).network
    assert network.send.tolist() == network.receive.tolist() == [4, 2] and not network.linked.any()
    assert network.start_up(np.array([0]), np.array([1])) == 0.5
