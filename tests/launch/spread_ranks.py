"""One of the ranks of `test_spread`: `python -m tests.launch.spread_ranks RANK RANKS FOLDER`.

It sends tokens once to every node, sums up the outputs that come back, in slices, and writes both as `outcome-RANK.json`.
"""

from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from engine.communication.travel import Stops
from engine.launch.rank.hops import Legs
from engine.launch.rank.recorder import Recorder
from engine.launch.rank.relayed import Pool, PooledExchange
from engine.launch.rank.routes import Piece
from engine.launch.rank.wire import Wire
from tests.launch.exchange_ranks import main, note

WIRE = Wire("fp32", 2)
SLICES = (1, 3, 16)


def cases_of(ranks: int) -> list[tuple[np.ndarray, np.ndarray, Stops, int]]:
    """hosts int64[token, k], source int64[token], nodes and slices."""
    cases = []
    for seed, node in enumerate(([0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 2], [0, 0, 0, 0])):
        rng = np.random.default_rng(seed)
        hosts, source = rng.integers(-1, ranks, (60, 3)), rng.integers(0, ranks, 60)
        cases += [(hosts, source, Stops(np.array(node)), slices) for slices in SLICES]
    return cases


def exchanged(rank: int, ranks: int) -> list[dict]:
    recorder, outcomes = Recorder(rank, torch.device("cpu")), []
    for number, (hosts, source, stops, slices) in enumerate(cases_of(ranks)):
        legs, held = Legs.of(hosts, source, stops), np.flatnonzero(source == rank)
        served = np.flatnonzero((hosts == rank).any(axis=1))
        home = held[(hosts[held] >= 0).any(axis=1)]
        logged: list[Piece] = []
        ways = []
        both = (legs.dispatch(slices), held, served), (legs.combine(slices), served, home)
        for channel, (hops, own, wanted) in enumerate(both):
            pool = Pool.of(rank, hops, own)
            final, log = pool.places(wanted)[0], partial(note, logged)
            way = PooledExchange(rank, hops, pool, final, log, recorder, channel=channel, wire=WIRE)
            way.ahead = number % 2 == 0  # if not: all of a step in one batch, as NCCL takes it
            incoming = torch.zeros((len(final), WIRE.bytes), dtype=torch.uint8)
            if number % 4 == 0:
                way.expect(incoming)
            ways.append((way, incoming, pool.number[final]))
        dist.barrier()
        (there, came, _), (back, returned, tokens) = ways
        there.run(WIRE.pack(torch.from_numpy(np.stack([held, source[held]], axis=1)).float()), came)
        # The output of this rank for a token: the token's number, and a bit of its own.
        made = torch.from_numpy(np.stack([served, np.full(len(served), 2**rank)], axis=1)).float()
        back.run(WIRE.pack(made), returned)
        summed = torch.zeros((len(source), 2)).index_add_(0, torch.from_numpy(tokens), WIRE.unpack(returned))
        sent = [(piece.phase, piece.src, piece.dst, piece.end - piece.begin) for piece in logged]
        outcomes.append({"came": WIRE.unpack(came).tolist(), "summed": summed.tolist(), "logged": sent})
    return outcomes


if __name__ == "__main__":
    main(exchanged)
