"""Experts and their copies on GPUs for the least time of a pass, layer by layer: the time that `simulate` has for a plain
all-to-all, as far as it is that of the busiest port, and the busiest GPU's FFNs.

Layers are independent where tokens go home after every layer, so each begins from the placement that is the fastest for it, by
whichever method, and is annealed by itself, on all cores.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import numpy as np

from engine.network import Network
from engine.placement.best import annealing, by_source, choosing, tables
from engine.placement.best.by_source import Shared
from engine.placement.best.choosing import Chooser
from engine.placement.best.tables import Layer, Level
from engine.placement.coactivation.instance import distinct, sets_of
from engine.plan import TravelUnit
from engine.result import Bools, Floats, Ints


@dataclass(frozen=True)
class Rows:
    """The ports of every row, as `Level` has them, and the seconds of a row at a port.

    sends, takes: of every level, int64[group, kind]; kind_of_source: of every level, int64[source]
    there, back, start: float64[port]; owner: int64[port]
    """

    groups: tuple[Ints, Ints]
    kind_of_source: tuple[Ints, Ints]
    sends: tuple[Ints, Ints]
    takes: tuple[Ints, Ints]
    there: Floats
    back: Floats
    start: Floats
    owner: Ints


def rows_on(networks: tuple[Network, Network], entry: Ints, domain: Ints, unit: TravelUnit, sizes: tuple[float, float]) -> Rows:
    """The rows of tokens that travel so.

    networks: as fast as they are in the dispatch and in the combine
    entry: int64[source, domain], the GPU by which a row enters a domain
    domain: int64[gpu], of GPUs that links connect
    sizes: bytes of a row in each

    A port counts at the rate that sends from (to) all its possible peers reach together, which fewer may exceed.
    """
    network, gpus = networks[0], networks[0].gpus
    source, alone = np.arange(gpus), np.zeros(gpus, dtype=np.int64)
    target, nowhere = source[:, None], np.full((1, 1), 4 * gpus)
    levels = [(source, source, *_ports(network, source[None], target)), (alone, alone, nowhere, nowhere)]
    if unit == "node":
        kinds, kind = np.unique(entry, axis=0, return_inverse=True)
        inside = _ports(network, kinds[:, domain].T, target)
        foreign = _ports(network, source[None], entry.T)
        own = domain[None] == np.arange(entry.shape[1])[:, None]
        levels = [(source, kind.ravel(), *inside), (domain, source, *(np.where(own, 4 * gpus, port) for port in foreign))]
    groups, kinds, sends, takes = zip(*levels, strict=True)
    both = [np.concatenate([ports.ravel() for ports in side]) for side in (sends, takes)]
    pairs = np.unique(np.stack(both), axis=1)
    pairs = pairs[:, pairs[0] < 4 * gpus]
    peers = np.bincount(pairs.ravel(), minlength=4 * gpus)
    used = np.flatnonzero(peers)
    number = np.full(4 * gpus + 1, len(used))
    number[used] = np.arange(len(used))
    mirror = np.arange(4 * gpus).reshape(2, 2, gpus)[:, ::-1].ravel()[used]
    there, back = sizes[0] / networks[0].rate(used, peers[used]), sizes[1] / networks[1].rate(mirror, peers[used])
    owner = used % gpus
    start = np.where(used < 2 * gpus, network.latency, network.link_latency[owner])
    numbered = (tuple(number[ports] for ports in side) for side in (sends, takes))
    return Rows(groups, kinds, *numbered, there, back, start.astype(np.float64), owner)


def _ports(network: Network, src: Ints, dst: Ints) -> tuple[Ints, Ints]:
    """The ports of rows from src to dst, int64[dst, src] each; the number after the last one for a row that stays."""
    src, dst = np.broadcast_arrays(src, dst)
    out, into = network.ports(src.ravel(), dst.ravel())
    return tuple(np.where(src == dst, 4 * network.gpus, port.reshape(src.shape)) for port in (out, into))


@dataclass(frozen=True)
class Tokens:
    """The rows that a layer sends.

    demand: float64[source, expert] tokens
    choices: int[token, choice] experts, where a row serves several of them; None: every copy travels on its own
    source: int64[token] GPUs
    turn: int[token, choice], how often the expert was chosen before, where its copies serve in turn; None: they do not
    count: tokens that each of these counts for
    """

    demand: Floats
    choices: Ints | None = None
    source: Ints | None = None
    turn: Ints | None = None
    count: float = 1.0


def layer_of(rows: Rows, tokens: Tokens, ffn: Floats, room: Ints, in_order: bool = False) -> tuple[Layer, tuple[Level, Level]]:
    """A layer for the kernel.

    ffn: float64[expert, copies - 1, gpu] seconds of a copy
    room: int64[gpu] slots
    in_order: True to keep the order in which tokens chose
    """
    member, weight, source = np.zeros((0, 1), dtype=np.int32), np.zeros(0), np.zeros(0, dtype=np.int64)
    times = np.zeros(0, dtype=np.int64)
    demand, turn = np.ascontiguousarray(tokens.demand.T), np.zeros((0, 0), dtype=np.int64)
    if tokens.choices is not None:
        choices, demand = tokens.choices.astype(np.int32), demand[:0]
        chosen = [tokens.source.astype(np.int32), choices if in_order else sets_of(choices)]
        if tokens.turn is not None:
            chosen.append(tokens.turn.astype(np.int32))
        chosen = np.column_stack(chosen)[(choices >= 0).any(axis=1)]
        at, _, times = distinct(chosen)
        source, member, turn = np.split(chosen[at], [1, 1 + choices.shape[1]], axis=1)
        member, weight, source = np.ascontiguousarray(member), times * tokens.count, source[:, 0].astype(np.int64)
        turn = np.ascontiguousarray(turn, dtype=np.int64)
    flat = member.ravel()
    order = np.argsort(flat, kind="stable")
    first = np.searchsorted(flat[order], np.arange(len(ffn) + 1))
    net = (order // member.shape[1]).astype(np.int32)
    least = 1e-9 * max(float(tokens.demand.sum()), 1e-30)
    ports = rows.there, rows.back, rows.start, least, rows.owner
    bits, heavy, words, origin = _in_bits(member, times, source, len(ffn))
    layer = Layer(member, turn, weight, source, first, net, demand, *ports, ffn, room, bits, heavy, tokens.count, words)
    levels = []
    for group, kind, *of_kind in zip(rows.groups, rows.kind_of_source, rows.sends, rows.takes, strict=True):
        of_segment = (np.ascontiguousarray(port[:, kind[origin]]) for port in of_kind)
        levels.append(Level(group, kind[source], *of_kind, *of_segment))
    return layer, tuple(levels)


def _in_bits(member: np.ndarray, times: Ints, source: Ints, experts: int) -> tuple[np.ndarray, Ints, Ints, Ints]:
    """(bits, heavy, words, origin) of a `Layer`: as many bits as a net has tokens, or one for each binary digit of that number,
    whichever needs fewer words."""
    digits = [np.flatnonzero(times >> digit & 1) for digit in range(int(times.max(initial=0)).bit_length())]
    choices = []
    for net, size in (
        (np.repeat(np.arange(len(times)), times), np.zeros(int(times.sum()), dtype=np.int64)),
        (np.concatenate([np.arange(0), *digits]), np.repeat(np.arange(len(digits)), [len(digit) for digit in digits])),
    ):
        key = source[net] * 64 + size
        order = np.argsort(key, kind="stable")
        kinds, begin, many = np.unique(key[order], return_index=True, return_counts=True)
        first = np.r_[0, np.cumsum(-(-many // 64))]
        place = np.arange(len(key)) - np.repeat(begin, many)
        choices.append((first[-1], net[order], np.repeat(first[:-1], many) + place // 64, place % 64, kinds, first))
    most, net, word, place, kinds, first = min(choices, key=lambda each: each[0])
    bits = np.zeros((experts + 1, most), dtype=np.uint64)
    for chosen in member[net].T:
        np.bitwise_or.at(bits, (chosen, word), np.uint64(1) << place.astype(np.uint64))
    bits[-1] = 0  # of choices that are none
    origin, segment = np.unique(kinds // 64, return_index=True)
    return bits, np.repeat(kinds % 64, np.diff(first)), np.append(first[segment], most), origin


def chooser_of(
    layer: Layer, levels: tuple[Level, Level], group: Ints, ffn: Floats, kind: Ints
) -> tuple[Chooser, tuple[Level, Level]]:
    """A layer in which tokens choose among copies; see `Chooser`."""
    return Chooser(layer, group[layer.source], group, ffn, kind), levels


Known = tuple[Layer | Chooser | Shared, tuple[Level, ...]]
"""A layer for one of the kernels, with its levels."""


@dataclass
class Task:
    """A layer to search, and the fastest placement so far.

    layer: see `layer_of` and `chooser_of`
    expert, place: int64[item], -1 = unused
    moves: looked at so far
    """

    layer: Known
    expert: Ints
    place: Ints
    moves: int = 0

    @property
    def gpus(self) -> int:
        return len(self.layer[1][0].group)

    @property
    def held(self) -> list[list[int]]:
        """The experts of every GPU, ascending."""
        return [np.sort(self.expert[self.place == gpu]).tolist() for gpu in range(self.gpus)]

    def seconds(self, known: Known) -> float:
        """Seconds of the placement in a layer with as many items."""
        return _kernel(known).seconds_of(*known, self.expert, self.place)

    def search(self, moves: int, seed: int, hurry: Bools) -> None:
        """Anneal with so many moves."""
        kernel, best = _kernel(self.layer), (self.expert.copy(), self.place.copy())
        lowest = begun = self.seconds(self.layer)
        if begun <= 0:
            return
        places = len(self.expert) * self.gpus
        # Few moves are not enough to cool down from anything hot; with many, a small layer's far placements are seen too.
        heats = MANY_HEATS if moves >= MANY * places else HEATS if moves >= FEW * places else HEATS[-1:]
        part = moves // sum(count for _, count in heats)
        stretches = [(hot, *at) for hot, count in heats for at in pairwise(np.linspace(0, 1, count + 1).tolist())]
        for stretch, (hot, begin, end) in enumerate(stretches):
            if hurry[0]:
                break
            if begin == 0:
                state = kernel.begin(*self.layer, *best)
            span = (*(begun * hot * (COLD / hot) ** at for at in (begin, end)), part)
            lowest, _ = anneal(self.layer, state, best, lowest, span, seed * STRETCHES + stretch, hurry)
            self.moves += part
        if lowest < begun:
            self.expert, self.place = best


def _kernel(known: Known) -> ModuleType:
    return {Layer: tables, Chooser: choosing, Shared: by_source}[type(known[0])]


def anneal(known: Known, state: tuple, *further) -> tuple[float, int]:
    """`annealing.anneal`, or that of `by_source`, from a state of the layer's kernel."""
    (layer, levels), (at, more) = known, state
    if isinstance(layer, Shared):
        return by_source.anneal(layer, levels, at, more, *further)
    if isinstance(layer, Chooser):
        return annealing.anneal(layer.layer, levels, at, None, (layer, more), *further)
    return annealing.anneal(layer, levels, at, more, None, *further)


HEATS, MANY_HEATS, COLD = ((5e-3, 8), (0.1, 4), (5e-3, 4)), ((5e-3, 2), *((0.5, 2),) * 6, (5e-3, 2)), 1e-4
"""Parts of the time at which annealing begins, each time from the best so far, and its equally long stretches down to the cold
one; and those of a layer with many moves for its size."""
STRETCHES = 16
FEW, MOVES_PER_PLACE, MANY = 30, 200, 2000
"""Moves of a layer, for each of its items and GPUs: below these only the last heat is made; at most; and many."""
AT_LEAST = 50_000
"""Moves that a small layer has, too, at most."""
POLL = 0.05


def seconds_per_move(known: Layer | Chooser | Shared, levels: tuple[Level, ...]) -> float:
    """Seconds of an ordinary core for a move: looked at, and as often as usual carried out."""
    if isinstance(known, Shared):
        return by_source.seconds_per_move(known)
    chooses = isinstance(known, Chooser)
    layer = known.layer if chooses else known
    if chooses:
        return 1.5e-6 + 2 * len(layer.net) / len(layer.ffn) * (5e-8 if layer.turn.shape[1] else 1.5e-7)
    looked_at = 5e-7 + 3e-9 * (len(layer.there) + len(layer.room)) + 6e-9 * len(layer.heavy)
    return looked_at + 2e-8 * layer.demand.size / len(layer.ffn)


def search(
    tasks: Sequence[Task], seconds: float, seed: int, over: Callable[[], bool], advance: Callable[[float], None]
) -> bool:
    """Search all layers, on all cores; True if none was cut short.

    seconds: work, by its own estimate for one core
    over: asked now and then whether to end
    advance: told the share that is done
    """
    hurry, done = np.array([over()]), 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads:
        futures = []
        for number, task in enumerate(tasks):
            most = max(MOVES_PER_PLACE * len(task.expert) * task.gpus, AT_LEAST)
            moves = min(int(seconds / len(tasks) / seconds_per_move(*task.layer)), most)
            futures.append(threads.submit(task.search, moves, seed + number, hurry))
        waiting = set(futures)
        while waiting:
            waiting = wait(waiting, POLL).not_done
            if len(futures) - len(waiting) > done:
                done = len(futures) - len(waiting)
                advance(done / len(futures))
            if waiting and over():
                hurry[0] = True
    for future in futures:
        future.result()  # raises the error of the work
    return not hurry[0]


def compile_ahead(by_rank: bool = False) -> None:
    """Run every compiled function once, with the types that it always has. by_rank: those of `by_source` too"""
    one, gpus = np.ones(2), np.arange(2)
    network = Network(one, one, 0 * one, gpus, 0.0, 0 * one)
    rows = rows_on((network, network), np.zeros((2, 1)), gpus, "gpu", (1.0, 1.0))
    tokens = Tokens(np.ones((2, 2)), np.array([[0, 1], [1, 0]]), gpus)
    known = layer_of(rows, tokens, np.ones((2, 1, 2)), np.ones(2, dtype=np.int64))
    layers, kind = [known, chooser_of(*known, gpus, np.ones((1, 4)), np.zeros(2, dtype=np.int64))], np.zeros(2, dtype=np.int64)
    if by_rank:
        model = by_source.Model(*known, np.ones((2, 2)), np.ones((1, 4)), 1.0, 2)
        layers.append(by_source.shared_of(model, None, kind, np.zeros((3, 2)), by_source.STATIC, 2))
    for layer in layers:
        Task(layer, gpus.copy(), gpus.copy()).search(STRETCHES, 0, np.zeros(1, dtype=bool))
