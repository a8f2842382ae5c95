"""One of the ranks of `test_hops`: `python -m tests.launch.relayed_ranks RANK RANKS FOLDER`.

It runs two-tier exchanges of rows that name their source and writes the rows that arrived as `outcome-RANK.json`.
"""

from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from engine.communication.two_tier import two_tier
from engine.launch.rank.hops import Hops, hops
from engine.launch.rank.recorder import Recorder
from engine.launch.rank.relayed import RelayedExchange
from engine.launch.rank.routes import Piece
from engine.network import Network
from tests.launch.exchange_ranks import WIDTH, main, note, outgoing_of

NODES = {4: [(2, 2), (3, 1), (1, 2, 1), (4,)], 8: [(4, 4)]}
"""Sizes of the nodes, by the number of ranks."""


def cases_of(ranks: int) -> list[tuple[np.ndarray, Hops]]:
    """Rows (int64[src, dst], with empty pairs) and their hops: each matrix with its mirror image, which has relays of its own.
    Half of the schedules are for other traffic."""
    cases = []
    for seed, sizes in enumerate(NODES[ranks] * 2):
        rng = np.random.default_rng(seed)
        counts = rng.integers(1, 60, (ranks, ranks)) * (rng.random((ranks, ranks)) < 0.7)
        planned = counts if seed % 2 else np.where(rng.random(counts.shape) < 0.7, counts, 0)
        rate = rng.integers(1, 3, ranks).astype(float)
        node = np.repeat(np.arange(len(sizes)), sizes)
        network = Network(rate, rate, np.full(ranks, 4.0), node, 0.0, np.zeros(ranks))
        schedule = two_tier(planned.astype(float), network).solution
        back = schedule.model_copy(update={"src": schedule.dst, "dst": schedule.src})
        cases += [(counts, hops(schedule, counts, network)), (counts.T, hops(back, counts.T, network))]
    return cases


def exchanged(rank: int, ranks: int) -> list[dict]:
    recorder, outcomes = Recorder(rank, torch.device("cpu")), []
    cases = cases_of(ranks)
    for number in range(0, len(cases), 2):
        both = []
        for channel, (counts, done) in enumerate(cases[number : number + 2]):
            logged: list[Piece] = []
            way = RelayedExchange(rank, done, counts, partial(note, logged), recorder, channel=channel)
            incoming = torch.full((int(counts[:, rank].sum()), WIDTH), -1.0, dtype=torch.float64)
            way.ahead = number % 6 != 0  # if not: all of a step in one batch, as NCCL takes it
            if number % 6 == 2:
                way.expect(incoming)
            both.append((way, counts, incoming, logged))
        dist.barrier()
        for way, counts, incoming, logged in both:
            way.run(outgoing_of(counts, rank), incoming)
            sent = [(piece.phase, piece.src, piece.dst, piece.begin, piece.end) for piece in logged]
            outcomes.append({"incoming": incoming.tolist(), "logged": sent})
    return outcomes


if __name__ == "__main__":
    main(exchanged)
