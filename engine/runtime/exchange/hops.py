"""Exchanges step by step in whole rows: which rows every rank passes on to which other rank. All hops follow from the
rows and the nodes, so that every rank finds the same ones by itself.

Two-tier order (`hops`): `engine.communication.steps` divides bytes; here every row of a pair gets one stage, one port
out and one port in, so that the numbers come as near to those parts as whole rows allow. Rows are numbered in the order
of (origin, target), those that stay on their rank included.

Rows that go once to every node (`hops_of_layer`): a token crosses the fabric to its entry in a node, the rank at its
source's position there, and goes on over the node's links to the other ranks with one of its experts; in its own node
it goes straight to them (see `engine.communication.travel`). The rows that enter are cut into slices: while one
crosses, the previous one is spread. Combine goes the same ways back, the last step first.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.communication.relays import counted
from engine.communication.steps import BALANCE, CROSS, SPREAD, Steps
from engine.communication.travel import Stops
from engine.network import Network, off_diagonal
from engine.plan import Schedule
from engine.runtime.exchange.links import Links
from engine.runtime.exchange.routes import Piece

MOST_SLICES, SHORTEST_STEP = 16, {"gloo": 0.02, "nccl": 2e-4}
"""The most slices of an exchange, and the least seconds of a step, by backend: posting shorter ones would take the
processors as long as the links. That of NCCL, a few times a start-up, is not measured."""


@dataclass(frozen=True, eq=False)
class Hops:
    """The pieces of an exchange in which ranks pass on rows, their own or those of others.

    order: all pieces by step; a piece is the rows [begin, end) of all that src passes on to dst
    counts: int64[src, dst] rows that src passes on to dst
    rows: int64[hop], the rows by (src, dst, step)
    first: int64[src, dst], index of a pair's first row in `rows`
    """

    order: list[Piece]
    counts: np.ndarray
    rows: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, step: np.ndarray, src: np.ndarray, dst: np.ndarray, number: np.ndarray, ranks: int) -> "Hops":
        """Hops from their columns, int64[hop] each and in any order: step, sender, receiver and row number. The steps
        of a pair follow one another."""
        by_pair = np.lexsort((number, step, dst, src))
        step, pair = step[by_pair], (src * ranks + dst)[by_pair]
        passed = np.bincount(pair, minlength=ranks * ranks)
        first = np.cumsum(passed) - passed
        ends = np.flatnonzero(np.r_[True, (np.diff(pair) != 0) | (np.diff(step) != 0), True]) if len(pair) else [0]
        order = []
        for here, end in pairwise(ends):
            begin = first[pair[here]]
            order.append(Piece(int(step[here]), *divmod(int(pair[here]), ranks), int(here - begin), int(end - begin)))
        order.sort(key=lambda piece: piece.phase)
        return cls(order, passed.reshape(ranks, ranks), number[by_pair], first.reshape(ranks, ranks))

    def between(self, src: int, dst: int) -> np.ndarray:
        """int64[row] numbers of the rows that src passes on to dst."""
        return self.rows[self.first[src, dst] : self.first[src, dst] + self.counts[src, dst]]


@dataclass(frozen=True, eq=False)
class _Rows:
    """All rows that leave their rank.

    number: int64[row], as in `Hops`
    origin, target: int64[row] ranks
    place: float64[row], 0 to 1; position of a row among its origin's rows for the target's node, with those for
        different targets mixed in proportion
    """

    number: np.ndarray
    origin: np.ndarray
    target: np.ndarray
    place: np.ndarray

    def of(self, which: np.ndarray) -> "_Rows":
        return _Rows(self.number[which], self.origin[which], self.target[which], self.place[which])


def hops(schedule: Schedule, counts: np.ndarray, network: Network) -> Hops:
    """Route `counts` (int64[src, dst] rows) by a schedule between scale-up domains. In each of its stages the rows of a
    domain are a mix of all that its ranks have, in proportion."""
    ranks = len(counts)
    steps = Steps.of(schedule, counts.astype(np.float64), network)
    domain = steps.domains.of_gpu
    rows = _rows(counts, domain)
    away = domain[rows.origin] != domain[rows.target]
    local = rows.of(~away)
    local = local.of(np.lexsort((local.place, local.origin)))
    step = _takers(_dealt(steps.local.T[domain], np.bincount(local.origin, minlength=ranks)))
    moves = [(step, local.origin, local.target, local.number), *_relayed(rows.of(away), steps)]
    step, src, dst, number = (np.concatenate(column) for column in zip(*moves, strict=True))
    on = src != dst
    return Hops.of(step[on], src[on], dst[on], number[on], ranks)


def _rows(counts: np.ndarray, domain: np.ndarray) -> _Rows:
    size = off_diagonal(counts).ravel().astype(np.int64)
    pair = np.repeat(np.arange(size.size), size)
    origin, target = np.divmod(pair, len(counts))
    within = counted(size)
    number = (np.cumsum(counts.ravel()) - counts.ravel())[pair] + within
    # Every origin begins with another target, so that the rows of pairs with few of them do not all stand at one place.
    turn = (target - origin) % len(counts)
    group = origin * len(counts) + domain[target]
    place = _shares(group, np.lexsort((turn, (within + 0.5) / size[pair], group)))
    return _Rows(number, origin, target, place)


def _shares(group: np.ndarray, order: np.ndarray) -> np.ndarray:
    """float64[row], 0 to 1: position of a row in its group. order: int64[row], the rows by group and in sequence within it."""
    sizes = np.unique(group[order], return_counts=True)[1]
    place = np.empty(len(group))
    place[order] = (counted(sizes) + 0.5) / np.repeat(sizes, sizes)
    return place


def _dealt(parts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """int64[group, part]: whole numbers of sum `totals` (int64[group]), in proportion to float64[group, part] that add
    up to 1 in every group."""
    until = np.rint(np.minimum(np.cumsum(parts, axis=1), 1.0) * totals[:, None]).astype(np.int64)
    until[:, -1:] = totals[:, None]
    return np.diff(until, axis=1, prepend=0)


def _takers(room: np.ndarray) -> np.ndarray:
    """int64[row]: the part to which each row falls, for rows in the order of their groups, when the parts of group g
    take room[g, part] (int64) of them in turn."""
    return np.repeat(np.tile(np.arange(room.shape[1]), len(room)), room.ravel())


def _relayed(rows: _Rows, steps: Steps) -> list[tuple[np.ndarray, ...]]:
    """Step, src, dst and number (int64[hop] each) of rows for other domains: balanced, across, and spread. A hop from a
    rank to itself stands for a row that is there already."""
    domains = steps.domains
    width = domains.members.shape[1]
    seat = np.empty(len(domains.of_gpu), dtype=np.int64)
    seat[domains.members[domains.members < len(seat)]] = np.nonzero(domains.members < len(seat))[1]
    rows, send = _in_stages(rows, steps)
    source, target = steps.relays.source[steps.pair], steps.relays.target[steps.pair]
    totals = np.bincount(send, minlength=len(source))
    leaves = _dealt(domains.send_share[source], totals)
    held = np.bincount(send * width + seat[rows.origin], minlength=leaves.size).reshape(leaves.shape)
    stays = np.minimum(held, leaves)
    # As in `Relays`: rows above a port's share move, in turn, to the ports that have room.
    by_origin = np.lexsort((seat[rows.origin], send))
    rows, send = rows.of(by_origin), send[by_origin]
    spare = counted(held.ravel()) >= np.repeat(stays.ravel(), held.ravel())
    port = seat[rows.origin]
    port[spare] = _takers(leaves - stays)
    relay = domains.members[source[send], port]
    moves = [(steps.stage[send] + BALANCE, rows.origin, relay, rows.number)]
    by_port = np.lexsort((rows.place, port, send))
    rows, send, relay = rows.of(by_port), send[by_port], relay[by_port]
    entry = domains.members[target[send], _takers(_dealt(domains.receive_share[target], totals))]
    moves.append((steps.stage[send] + CROSS, relay, entry, rows.number))
    return [*moves, (steps.stage[send] + SPREAD, entry, rows.target, rows.number)]


def _in_stages(rows: _Rows, steps: Steps) -> tuple[_Rows, np.ndarray]:
    """The rows by the send between domains that carries them, and int64[row], the number of that send."""
    domains, relays = steps.domains, steps.relays
    pair_of = np.full((len(domains.first),) * 2, -1)
    pair_of[relays.source, relays.target] = np.arange(len(relays.source))
    pair = pair_of[domains.of_gpu[rows.origin], domains.of_gpu[rows.target]]
    order = np.lexsort((rows.origin, rows.place, pair))
    rows, pair, totals = rows.of(order), pair[order], np.bincount(pair, minlength=len(relays.source))
    by_stage = np.lexsort((steps.stage, steps.pair))
    # The parts of a pair add up to 1: so do those of all before it, to as many as they are.
    until = np.cumsum(steps.part[by_stage])
    send = by_stage[np.searchsorted(until, pair + (counted(totals) + 0.5) / totals[pair])]
    by_send = np.argsort(send, kind="stable")
    return rows.of(by_send), send[by_send]


@dataclass(frozen=True, eq=False)
class Legs:
    """The ways of one layer's tokens between `ranks` ranks in a dispatch.

    token, src, dst: int64[leg]
    second: bool[leg], true if the leg begins at the token's entry into its node
    place: float64[leg], 0 to 1; position of a token among those that take the same way
    """

    ranks: int
    token: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    second: np.ndarray
    place: np.ndarray

    @classmethod
    def of(cls, hosts: np.ndarray, source: np.ndarray, stops: Stops) -> "Legs":
        """The legs of a layer.

        hosts: int[token, k], the rank of every chosen expert, -1 = none
        source: int[token], the rank of each token
        """
        ranks = stops.gpus
        token, choice = np.nonzero(hosts >= 0)
        token, host = np.divmod(np.unique(token * ranks + hosts[token, choice].astype(np.int64)), ranks)
        home = source[token].astype(np.int64)
        entry = stops.entry[home, stops.of_gpu[host]]  # in its own node a token is where it has to be
        foreign = entry != home
        way = (token * ranks + home) * ranks  # plus the rank it leads to
        first = np.unique(way + np.where(foreign, entry, host))
        first_token, pair = np.divmod(first, ranks * ranks)
        first_src, first_dst = np.divmod(pair, ranks)
        place = _shares(pair, np.lexsort((first_token, pair)))
        on = foreign & (entry != host)
        entered = np.searchsorted(first, (way + entry)[on])
        src, dst = np.concatenate([first_src, entry[on]]), np.concatenate([first_dst, host[on]])
        leaves = src != dst
        columns = (np.concatenate([first_token, token[on]]), src, dst, np.arange(len(src)) >= len(first))
        columns = (*columns, np.concatenate([place, place[entered]]))
        return cls(ranks, *(column[leaves] for column in columns))

    def slices(self, row_bytes: float, links: Links | None, backend: str) -> int:
        """The best number of slices: the last one has to be spread when all have entered, which takes less time with
        more slices, and each costs a start-up.

        row_bytes: bytes of a row
        links: the links of the ranks; 1 slice if None
        """
        if links is None or not self.second.any():
            return 1
        whole, spread = (self._seconds(which, row_bytes, links) for which in (np.ones_like(self.second), self.second))
        most = min(MOST_SLICES, whole / SHORTEST_STEP[backend])
        best = (spread / links.start_up) ** 0.5 if links.start_up else MOST_SLICES
        return max(1, int(min(most, best)))

    def _seconds(self, which: np.ndarray, row_bytes: float, links: Links) -> float:
        """Seconds of the busiest port or link under some of the legs (bool[leg])."""
        src, dst = self.src[which], self.dst[which]
        return links.network.fluid_seconds(src, dst, np.full(len(src), float(row_bytes)))

    def dispatch(self, slices: int) -> Hops:
        """The dispatch in `slices` slices, step by step: a slice enters in one step and is spread in the next. A hop's
        row is its token."""
        step = np.floor(self.place * slices).astype(np.int64) + self.second
        return Hops.of(step, self.src, self.dst, self.token, self.ranks)

    def combine(self, slices: int) -> Hops:
        """The dispatch in `slices` slices, backwards."""
        step = slices - np.floor(self.place * slices).astype(np.int64) - self.second
        return Hops.of(step, self.dst, self.src, self.token, self.ranks)


def hops_of_layer(
    hosts: np.ndarray, source: np.ndarray, stops: Stops, row_bytes: tuple[float, float], links: Links | None, backend: str
) -> tuple[Hops, Hops]:
    """Dispatch and combine of a layer.

    hosts, source: see `Legs.of`
    row_bytes: bytes of a row there and back
    links, backend: of the ranks
    """
    legs, (out, back) = Legs.of(hosts, source, stops), row_bytes
    return legs.dispatch(legs.slices(out, links, backend)), legs.combine(legs.slices(back, links, backend))
