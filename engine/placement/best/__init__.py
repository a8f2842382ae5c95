"""Experts and their copies on GPUs for the least time of a pass, layer by layer: the time that `simulate` has for a plain
all-to-all, as far as it is that of the busiest port, and the busiest GPU's FFNs.

Layers are independent where tokens go home after every layer, so each begins from the placement that is the fastest for it, by
whichever method, and is annealed by itself, on all cores. A part of the tokens may be hidden from the search: then a layer
keeps what is fastest on those, and stops once they gain no more.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import numpy as np

from engine.network import Network
from engine.placement.best import choosing, tables
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
    layer = Layer(
        member, turn, weight, source, first, net, demand, rows.there, rows.back, rows.start, least, rows.owner, ffn, room
    )
    levels = zip(rows.groups, rows.kind_of_source, rows.sends, rows.takes, strict=True)
    return layer, tuple(Level(group, kind[source], sends, takes) for group, kind, sends, takes in levels)


def chooser_of(
    layer: Layer, levels: tuple[Level, Level], group: Ints, ffn: Floats, kind: Ints
) -> tuple[Chooser, tuple[Level, Level]]:
    """A layer in which tokens choose among copies; see `Chooser`."""
    return Chooser(layer, group[layer.source], group, ffn, kind), levels


Known = tuple[Layer | Chooser, tuple[Level, Level]]
"""A layer for one of the kernels, with its levels."""


@dataclass
class Task:
    """A layer to search, and the fastest placement so far.

    layer: see `layer_of` and `chooser_of`
    expert, place: int64[item], -1 = unused
    hidden: the same layer for the tokens that the search does not see; None: it sees all
    moves: looked at so far
    """

    layer: Known
    expert: Ints
    place: Ints
    hidden: Known | None = None
    moves: int = 0

    @property
    def gpus(self) -> int:
        return len(self.layer[1][0].group)

    @property
    def held(self) -> list[list[int]]:
        """The experts of every GPU, ascending."""
        return [np.sort(self.expert[self.place == gpu]).tolist() for gpu in range(self.gpus)]

    def seconds(self, known: Known) -> float:
        """Seconds of the placement on these tokens."""
        return _kernel(known).seconds_of(*known, self.expert, self.place)

    def search(self, moves: int, seed: int, hurry: Bools) -> None:
        """Anneal with so many moves."""
        kernel, best = _kernel(self.layer), (self.expert.copy(), self.place.copy())
        lowest = begun = self.seconds(self.layer)
        if begun <= 0:
            return
        unseen = self.seconds(self.hidden) if self.hidden else 0.0
        risen, part = 0, moves // STRETCHES
        heats = [(hot, *at) for hot, count in HEATS for at in pairwise(np.linspace(0, 1, count + 1).tolist())]
        for stretch, (hot, begin, end) in enumerate(heats):
            if hurry[0]:
                break
            if begin == 0:
                state = kernel.begin(*self.layer, *best)
            span = (*(begun * hot * (COLD / hot) ** at for at in (begin, end)), part)
            before = lowest
            lowest, _ = kernel.anneal(*self.layer, *state, best, lowest, span, seed * STRETCHES + stretch, hurry)
            self.moves += part
            if self.hidden and lowest < before:
                told = kernel.seconds_of(*self.hidden, *best)
                if told >= unseen:
                    risen += 1
                    if risen == PATIENCE:
                        break
                    continue
                unseen, risen = told, 0
            if lowest < before:
                self.expert, self.place = best[0].copy(), best[1].copy()


def _kernel(known: Known) -> ModuleType:
    return choosing if isinstance(known[0], Chooser) else tables


HEATS, COLD = ((5e-3, 8), (0.1, 4), (5e-3, 4)), 1e-4
"""Parts of the time at which annealing begins, each time from the best so far, and its equally long stretches down to the cold
one. After each the hidden tokens are asked."""
STRETCHES = sum(count for _, count in HEATS)
PATIENCE = 2
"""Stretches with a gain on the tokens that are searched and none on the hidden ones, after which a layer's search ends."""
MOVES_PER_PLACE = 200
"""Limit of the moves of a layer, for each expert and GPU."""
POLL = 0.05


def seconds_per_move(known: Layer | Chooser, levels: tuple[Level, Level]) -> float:
    """Seconds of an ordinary core for a move: looked at, and as often as usual carried out."""
    chooses = isinstance(known, Chooser)
    layer = known.layer if chooses else known
    of_expert = len(layer.net) / len(layer.ffn)
    if chooses:
        return 3e-6 + 2 * of_expert * 4e-7
    looked_at = 6e-7 + 8e-9 * sum(level.sends.shape[1] for level in levels) + 3e-9 * (len(layer.there) + len(layer.room))
    return looked_at + 0.05 * 4e-8 * of_expert * layer.member.shape[1]


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
            most = MOVES_PER_PLACE * len(task.expert) * task.gpus
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


@dataclass(frozen=True)
class Prices:
    """Prices of the loads of a layer, not negative.

    there, back, ffn: float64[port], float64[port], float64[gpu] of dispatch, combine and FFNs; the sum of each is at most 1
    slot: float64[gpu] seconds of a slot
    """

    there: Floats
    back: Floats
    ffn: Floats
    slot: Floats


def prices_of(known: Known, cheapest: Floats) -> Prices:
    """Prices at which `least_seconds` is large: the dual of a linear programme that divides experts among GPUs.

    cheapest: see `least_seconds`
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, csr_array, eye_array, hstack, kron, vstack

    layer, (experts, gpus) = known[0], cheapest.shape
    ports = len(layer.there)
    cells, columns, rows = [], [], []
    expert = np.arange(experts)[:, None] * gpus
    for level in _levels(known):
        demand = _demand(layer, level)
        for gpu in range(gpus):
            group = level.group[gpu]
            part = demand / _together(layer, level, group)
            for side in (level.sends[group], level.takes[group]):
                cell, column = np.broadcast_arrays(expert + gpu, side[None])
                moves = (column < ports) & (part > 0)
                cells.append(cell[moves])
                columns.append(column[moves])
                rows.append(part[moves])
    shape = experts * gpus, ports
    moved = coo_array((np.concatenate(rows), (np.concatenate(cells), np.concatenate(columns))), shape).tocsr()
    own = kron(np.ones((experts, 1)), eye_array(gpus)).tocsr()
    ffn = own.multiply(cheapest.reshape(-1, 1)).tocsr()
    loads = hstack([moved * layer.there, moved * layer.back, ffn]).tocsr()
    scale = float(loads.max()) or 1.0
    sizes = [ports, ports, gpus]
    longest = csr_array(np.repeat(np.eye(3), sizes, axis=0))
    limits = vstack([hstack([loads.T / scale, -longest]), hstack([own.T, csr_array((gpus, 3))])]).tocsr()
    whole = hstack([kron(eye_array(experts), np.ones((1, gpus))), csr_array((experts, 3))]).tocsr()
    most = np.concatenate([np.zeros(sum(sizes)), layer.room])
    answer = linprog(np.repeat([0.0, 1.0], [experts * gpus, 3]), limits, most, whole, np.ones(experts), method="highs")
    if answer.x is None:
        return Prices(*(np.full(size, 1 / max(size, 1)) for size in sizes), np.zeros(gpus))
    dual = np.maximum(-answer.ineqlin.marginals, 0.0)
    *parts, slot = np.split(dual, np.cumsum(sizes))
    return Prices(*(part / max(float(part.sum()), 1.0) for part in parts), slot * scale)


def least_seconds(known: Known, cheapest: Floats, prices: Prices, single: bool) -> float:
    """Seconds below which no placement brings a layer with one copy of every expert, or where every copy of a token travels on
    its own with any copies that share alike: the slots times their prices less than what every expert costs where it is
    cheapest (weak duality; any prices prove a bound).

    cheapest: float64[expert, gpu] seconds of the FFN of all of an expert's tokens, the least that any copies leave
    single: True if every expert has one copy; then of n GPUs' i · n + 1 longest FFNs i + 1 are on one GPU

    A row that serves several experts is divided among them. How many those are is bounded by the experts that fire with an
    expert most often: 1 / (1 + m) of m others is never below the line through its values at two neighbouring m.
    """
    layer, (experts, gpus) = known[0], cheapest.shape
    cost = np.tile(prices.slot, (experts, 1))
    of_port = np.append(prices.there * layer.there + prices.back * layer.back, 0.0)
    for level in _levels(known):
        weight = (of_port[level.sends] + of_port[level.takes]).T  # of a row of a kind to a group
        alone = _demand(layer, level) @ weight
        least = alone.copy()
        if len(layer.member):
            shared = _shared(layer, level, experts) @ weight
            for group in range(len(level.sends)):
                beside = min(int(layer.room[level.group == group].sum()), experts) - 1
                most = np.sort(shared[:, :, group], axis=1)[:, ::-1][:, : max(beside, 0)].sum(axis=1)
                lines = [(alone[:, group] * (2 * m + 2) - most) / ((m + 1) * (m + 2)) for m in range(layer.member.shape[1])]
                least[:, group] = np.maximum.reduce(lines)
        cost = cost + least[:, level.group]
    slots, longest = float((layer.room * prices.slot).sum()), 0.0
    if single:
        ffns = np.sort(cheapest.min(axis=1))[::-1]
        longest = max(float(ffns[i * gpus - i : i * gpus + 1].sum()) for i in range((experts - 1) // gpus + 1))
    apart = max(float(cost.min(axis=1).sum()) - slots, 0.0) + longest
    return max(float((cost + cheapest * prices.ffn).min(axis=1).sum()) - slots, apart) * (1 - 1e-9)


def _levels(known: Known) -> tuple[Level, ...]:
    """The levels that rows are counted on."""
    layer, levels = known
    return levels if len(layer.member) else levels[:1]


def _together(layer: Layer, level: Level, group: int) -> int:
    """Experts of a token that a row to a group serves at most."""
    return max(min(layer.member.shape[1], int(layer.room[level.group == group].sum())), 1) if len(layer.member) else 1


def _demand(layer: Layer, level: Level) -> Floats:
    """float64[expert, kind] tokens."""
    if not len(layer.member):
        return layer.demand
    experts, kinds = len(layer.ffn), level.sends.shape[1]
    net, choice = np.nonzero(layer.member >= 0)
    cell = layer.member[net, choice] * kinds + level.kind[net]
    return np.bincount(cell, layer.weight[net], experts * kinds).reshape(experts, kinds)


def _shared(layer: Layer, level: Level, experts: int) -> Floats:
    """float64[expert, other, kind] tokens that go to both."""
    kinds, choices = level.sends.shape[1], range(layer.member.shape[1])
    shared = np.zeros(experts * experts * kinds)
    for one, other in ((one, other) for one in choices for other in choices if one != other):
        net = np.flatnonzero((layer.member[:, one] >= 0) & (layer.member[:, other] >= 0))
        cell = (layer.member[net, one].astype(np.int64) * experts + layer.member[net, other]) * kinds + level.kind[net]
        shared += np.bincount(cell, layer.weight[net], len(shared))
    return shared.reshape(experts, experts, kinds)


def compile_ahead() -> None:
    """Run every compiled function once, with the types that it always has."""
    one, gpus = np.ones(2), np.arange(2)
    network = Network(one, one, 0 * one, gpus, 0.0, 0 * one)
    rows = rows_on((network, network), np.zeros((2, 1)), gpus, "gpu", (1.0, 1.0))
    tokens = Tokens(np.ones((2, 2)), np.array([[0, 1], [1, 0]]), gpus)
    known = layer_of(rows, tokens, np.ones((2, 1, 2)), np.ones(2, dtype=np.int64))
    for layer in (known, chooser_of(*known, gpus, np.ones((1, 4)), np.zeros(2, dtype=np.int64))):
        Task(layer, gpus.copy(), gpus.copy()).search(STRETCHES, 0, np.zeros(1, dtype=bool))
