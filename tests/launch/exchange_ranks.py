"""One of the ranks of `test_exchange`: `python -m tests.launch.exchange_ranks RANK RANKS FOLDER`. It runs exchanges of rows
that say where they come from and writes what arrived, and when, as `outcome-RANK.json`."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from engine.launch.rank.exchange import Exchange
from engine.launch.rank.links import Links
from engine.launch.rank.recorder import Recorder
from engine.launch.rank.routes import Piece, pieces
from tests.launch.exchange_cases import MODES, PACED_RATES, counts_of, schedule_of

WIDTH = 3


def outgoing_of(counts: np.ndarray, rank: int) -> torch.Tensor:
    """[row, 3]: source, destination and number of every row, ordered by destination."""
    rows = [(rank, dst, number) for dst in range(len(counts)) for number in range(counts[rank, dst])]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, WIDTH)


def main(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    recorder, exchanges = Recorder(rank, torch.device("cpu")), []
    for seed in range(4):
        counts = counts_of(ranks, seed)
        for mode in MODES:
            both = []
            for channel, matrix in enumerate((counts, counts.T)):
                logged: list[Piece] = []
                order = pieces(mode, schedule_of(mode, matrix, seed), matrix)
                way = Exchange(
                    rank,
                    mode,
                    order,
                    matrix,
                    lambda piece, begin, to=logged: to.append(piece),
                    recorder,
                    channel=channel,
                )
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
    dist.barrier()
    (folder / f"outcome-{rank}.json").write_text(json.dumps({"exchanges": exchanges, "paced": paced}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
