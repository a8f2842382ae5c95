"""One of the ranks of `test_exchange`: `python -m tests.launch.exchange_ranks RANK RANKS FOLDER`.

It exchanges rows that name their source and writes the rows that arrived, with times, as `outcome-RANK.json`.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from engine.communication.order import order, random_order
from engine.launch.rank.exchange import Exchange
from engine.launch.rank.links import Links
from engine.launch.rank.recorder import Mark, Recorder
from engine.launch.rank.routes import Piece, pieces
from engine.plan import OrderMode, Schedule
from tests.cases.launch_plans import MODES

WIDTH = 3


def outgoing_of(counts: np.ndarray, rank: int) -> torch.Tensor:
    """[row, 3]: source, destination and number of every row, ordered by destination."""
    rows = [(rank, dst, number) for dst in range(len(counts)) for number in range(counts[rank, dst])]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, WIDTH)


PACED_RATES = np.array([40e3, 20e3, 20e3])
"""Bytes/s."""


def counts_of(ranks: int, seed: int) -> np.ndarray:
    """int64[src, dst] rows, some of them none."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, 60, (ranks, ranks)) * (rng.random((ranks, ranks)) < 0.8)


def note(logged: list[Piece], piece: Piece, begin: Mark) -> None:
    """Keep a piece that an exchange logs."""
    logged.append(piece)


def schedule_of(mode: OrderMode, counts: np.ndarray, seed: int) -> Schedule | None:
    """A schedule made for other traffic than it is used for, so that some pairs are unknown to it."""
    planned = np.where(np.random.default_rng(seed + 100).random(counts.shape) < 0.8, counts, 0).astype(float)
    if mode == "concurrent":
        return None
    if mode == "sequential":
        return random_order(planned, seed)
    rate = np.linspace(1.0, 2.0, len(counts))
    return order(planned, rate, rate, mode).solution


def exchanged(rank: int, ranks: int) -> dict:
    recorder, exchanges = Recorder(rank, torch.device("cpu")), []
    for seed in range(4):
        counts = counts_of(ranks, seed)
        for mode in MODES:
            both = []
            for channel, matrix in enumerate((counts, counts.T)):
                logged: list[Piece] = []
                order = pieces(mode, schedule_of(mode, matrix, seed), matrix)
                log = partial(note, logged)
                way = Exchange(rank, mode, order, matrix, log, recorder, channel=channel)
                incoming = torch.full((int(matrix[:, rank].sum()), WIDTH), -1.0, dtype=torch.float64)
                both.append((way, matrix, incoming, logged))
                if seed % 2:
                    way.expect(incoming)
            dist.barrier()
            for way, matrix, incoming, logged in both:
                way.run(outgoing_of(matrix, rank), incoming)
                sent = [(piece.src, piece.dst, piece.begin, piece.end) for piece in logged]
                exchanges.append({"incoming": incoming.tolist(), "logged": sent})
    counts = counts_of(ranks, 0) + 50
    paced = []
    for links in (None, Links(PACED_RATES)):
        order = pieces("shared", schedule_of("shared", counts, 0), counts)
        way = Exchange(rank, "shared", order, counts, lambda piece, begin: None, recorder, links=links)
        incoming = torch.empty((int(counts[:, rank].sum()), WIDTH), dtype=torch.float64)
        way.expect(incoming)
        dist.barrier()
        begin = time.monotonic()
        way.run(outgoing_of(counts, rank), incoming)
        paced.append([time.monotonic() - begin, incoming.tolist()])
    return {"exchanges": exchanges, "paced": paced}


def main(outcome_of: Callable[[int, int], object]) -> None:
    """Be one of the ranks of `python -m tests.launch.PROGRAM RANK RANKS FOLDER`, and write its outcome."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    outcome = outcome_of(rank, ranks)
    dist.barrier()
    (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(exchanged)
