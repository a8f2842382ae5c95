"""All ranks of a launch in one process, step by step, without torch.distributed: exchanges copy row by row."""

from unittest import mock

import numpy as np
import torch

from engine.launch.rank.communicator import Communicator
from engine.launch.rank.context import RankContext
from engine.launch.rank.instructions import RankInstructions, Tokens
from engine.launch.rank.layers import Layers
from engine.runtime.exchange.recorder import Recorder
from engine.runtime.exchange.relayed import PooledExchange
from tests.cases.launches import MODEL, plan_for, recording

CPU = torch.device("cpu")


def contexts_of(instructions: RankInstructions, *tokens: Tokens) -> list[RankContext]:
    """The job as every rank sees it."""
    return [RankContext(instructions, tokens, rank, CPU, Recorder(rank, CPU)) for rank in range(instructions.ranks)]


def only_context(**more) -> RankContext:
    """The only rank of a launch of one plan for four tokens. more: fields of `RankInstructions`"""
    plans = (plan_for(recording(4), "concurrent"),)
    (context,) = contexts_of(RankInstructions(**{"plans": plans, "model": MODEL, "ranks": 1, "backend": "gloo"} | more))
    return context


def ranks_of(instructions: RankInstructions, tokens: Tokens, kind: type[Layers] = Layers, hops: bool = False) -> list[Layers]:
    """The first model of the first plan on every rank. hops: its exchanges pass rows on, which takes a process group, of one
    rank, to make them; other exchanges are stood in for, and `move` does their work."""
    kind = type("Lockstep", (kind,), {} if hops else {"_way": lambda *_: mock.MagicMock()})
    return [kind(context, instructions.plans[0], Communicator(context)) for context in contexts_of(instructions, tokens)]


def run(ranks: list[Layers]) -> None:
    """A pass through all layers on all ranks."""
    with torch.inference_mode():
        for rank in ranks:
            rank.begin()
        for layer in range(ranks[0].layers):
            for rank in ranks:
                rank.ready(layer)
                rank.gate(layer)
            move(ranks, "dispatch", layer)
            for rank in ranks:
                rank.ffn(layer)
            move(ranks, "combine", layer)
            for rank in ranks:
                rank.aggregate(layer)


def move(ranks: list[Layers], kind: str, layer: int) -> None:
    """An exchange: every rank gets its rows from the others in the order of the senders."""
    if isinstance(ranks[0]._ways[kind], PooledExchange):
        move_on(ranks, kind)
        return
    counts = ranks[0].routes[kind][layer].counts
    for there, receiver in enumerate(ranks):
        buffer = receiver._ready.incoming if kind == "dispatch" else receiver._ready.back
        parts = []
        for here, sender in enumerate(ranks):
            np.testing.assert_array_equal(sender.routes[kind][layer].counts, counts)
            sent = sender.outgoing if kind == "dispatch" else sender.result
            assert len(sent) == counts[here].sum() and sent.shape[1] == buffer.shape[1]
            parts.append(sent.split(counts[here].tolist())[there])
        buffer.copy_(torch.cat(parts))


def move_on(ranks: list[Layers], kind: str) -> None:
    """An exchange in which ranks pass rows on, step by step."""
    ways, pools = [rank._ways[kind] for rank in ranks], []
    into = [rank._ready.incoming if kind == "dispatch" else rank._ready.back for rank in ranks]
    for rank, way, buffer in zip(ranks, ways, into, strict=True):
        pool = way._ready(buffer)
        pool[: way._own] = rank.outgoing if kind == "dispatch" else rank.result
        pools.append(pool)
    for step in sorted({phase for way in ways for phase in way.phases}):
        pieces = [piece for way in ways for piece in way.sends if piece.phase == step]
        moved = [ways[piece.src]._leaving(piece, pools[piece.src]).clone() for piece in pieces]
        for piece, rows in zip(pieces, moved, strict=True):
            way = ways[piece.dst]
            way._arriving(piece, pools[piece.dst][way._own :]).copy_(rows)
    for way, pool, buffer in zip(ways, pools, into, strict=True):
        torch.index_select(pool, 0, way._at_end, out=buffer)
