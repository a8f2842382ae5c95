"""One of the ranks of `test_exchange`: `python -m tests.launch.exchange_ranks RANK RANKS FOLDER`.

It exchanges rows that name their source, directly and in two tiers, and sends tokens once to every node and sums up, in slices,
the outputs that come back. It writes all that arrived, with times, as `outcome-RANK.json`.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from engine.communication.order import order, random_order
from engine.communication.travel import Stops
from engine.communication.two_tier import two_tier
from engine.network import Network
from engine.plan import OrderMode, Schedule
from engine.runtime.exchange.all_to_all import Exchange
from engine.runtime.exchange.hops import Hops, Legs, hops
from engine.runtime.exchange.links import Links
from engine.runtime.exchange.recorder import Mark, Recorder
from engine.runtime.exchange.relayed import Pool, PooledExchange, RelayedExchange
from engine.runtime.exchange.routes import Piece, pieces
from engine.runtime.exchange.wire import Wire
from tests.cases.launch_plans import MODES

WIDTH = 3
PACED_RATES = np.array([40e3, 20e3, 20e3, 20e3])
"""Bytes/s."""
NODES = {4: [(2, 2), (3, 1), (1, 2, 1), (4,)], 8: [(4, 4)]}
"""Sizes of the nodes, by the number of ranks."""
WIRE = Wire("fp32", 2)


def outgoing_of(counts: np.ndarray, rank: int) -> torch.Tensor:
    """[row, 3]: source, destination and number of every row, ordered by destination."""
    rows = [(rank, dst, number) for dst in range(len(counts)) for number in range(counts[rank, dst])]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, WIDTH)


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


def direct(rank: int, ranks: int) -> dict:
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


def relays_of(ranks: int) -> list[tuple[np.ndarray, Hops]]:
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


def relayed(rank: int, ranks: int) -> list[dict]:
    recorder, outcomes = Recorder(rank, torch.device("cpu")), []
    cases = relays_of(ranks)
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


def spreads_of(ranks: int) -> list[tuple[np.ndarray, np.ndarray, Stops, int]]:
    """hosts int64[token, k], source int64[token], nodes and slices."""
    cases = []
    for seed, node in enumerate(([0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 2], [0, 0, 0, 0])):
        rng = np.random.default_rng(seed)
        hosts, source = rng.integers(-1, ranks, (60, 3)), rng.integers(0, ranks, 60)
        cases += [(hosts, source, Stops(np.array(node)), slices) for slices in (1, 3, 16)]
    return cases


def spread(rank: int, ranks: int) -> list[dict]:
    recorder, outcomes = Recorder(rank, torch.device("cpu")), []
    for number, (hosts, source, stops, slices) in enumerate(spreads_of(ranks)):
        legs, held = Legs.of(hosts, source, stops), np.flatnonzero(source == rank)
        served = np.flatnonzero((hosts == rank).any(axis=1))
        home = held[(hosts[held] >= 0).any(axis=1)]
        logged: list[Piece] = []
        ways = []
        both = (legs.dispatch(slices), held, served), (legs.combine(slices), served, home)
        for channel, (done, own, wanted) in enumerate(both):
            pool = Pool.of(rank, done, own)
            final, log = pool.places(wanted)[0], partial(note, logged)
            way = PooledExchange(rank, done, pool, final, log, recorder, channel=channel, wire=WIRE)
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


def main(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    outcome = {"relayed": relayed(rank, ranks)}
    if ranks == 4:
        outcome |= direct(rank, ranks) | {"spread": spread(rank, ranks)}
    dist.barrier()
    (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
