"""Rows that go once to every node and spread from there: who passes which token on to whom, in slices.

A token crosses the fabric to its entry in a node, the rank with its source's place there, and goes on over the node's links to
the other ranks with one of its experts; in its own node it goes straight to them (see `engine.communication.travel`). The rows
that enter are cut into slices: while one crosses, the one before is spread. Combine goes the same ways back, the last step
first. All of it follows from the tokens and the nodes, so that every rank finds the same by itself.
"""

from dataclasses import dataclass

import numpy as np

from engine.communication.relays import counted
from engine.communication.travel import Stops
from engine.launch.rank.hops import Hops
from engine.launch.rank.links import Links

MOST_SLICES, SHORTEST_STEP = 16, {"gloo": 0.02, "nccl": 2e-4}
"""Slices of an exchange at most, and seconds that a step lasts at the least, by what carries it: posting shorter ones would
take the processors as long as the links. That of NCCL, a few times a start-up, is not measured."""


@dataclass(frozen=True, eq=False)
class Legs:
    """The ways of one layer's tokens between so many ranks in a dispatch.

    token, src, dst: int64[leg]; second: bool[leg], whether it begins where the token has entered its node; place: float64[leg],
    0 to 1, where a token stands among those that take the same way
    """

    ranks: int
    token: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    second: np.ndarray
    place: np.ndarray

    @classmethod
    def of(cls, hosts: np.ndarray, source: np.ndarray, stops: Stops) -> "Legs":
        """hosts: int[token, k], the rank of every chosen expert, -1 = none; source: int[token], where tokens are."""
        ranks = stops.gpus
        token, choice = np.nonzero(hosts >= 0)
        token, host = np.divmod(np.unique(token * ranks + hosts[token, choice].astype(np.int64)), ranks)
        home = source[token].astype(np.int64)
        entry = stops.entry[home, stops.of_gpu[host]]  # in its own node a token is where it has to be
        foreign = entry != home
        way = (token * ranks + home) * ranks  # and where it leads to
        first = np.unique(way + np.where(foreign, entry, host))
        first_token, pair = np.divmod(first, ranks * ranks)
        first_src, first_dst = np.divmod(pair, ranks)
        by_pair = np.lexsort((first_token, pair))
        size = np.unique(pair[by_pair], return_counts=True)[1]
        place = np.empty(len(first))
        place[by_pair] = (counted(size) + 0.5) / np.repeat(size, size)
        on = foreign & (entry != host)
        entered = np.searchsorted(first, (way + entry)[on])
        src, dst = np.concatenate([first_src, entry[on]]), np.concatenate([first_dst, host[on]])
        leaves = src != dst
        columns = (np.concatenate([first_token, token[on]]), src, dst, np.arange(len(src)) >= len(first))
        columns = (*columns, np.concatenate([place, place[entered]]))
        return cls(ranks, *(column[leaves] for column in columns))

    def slices(self, row_bytes: float, links: Links | None, backend: str) -> int:
        """In how many slices tokens go at best: the last one has to be spread when all have entered, which is shorter with more
        of them, and each costs a start-up. row_bytes: of a row; links: of the ranks, 1 slice if they are not known"""
        if links is None or not self.second.any():
            return 1
        whole, spread = (self._seconds(which, row_bytes, links) for which in (np.ones_like(self.second), self.second))
        most = min(MOST_SLICES, whole / SHORTEST_STEP[backend])
        best = (spread / links.start_up) ** 0.5 if links.start_up else MOST_SLICES
        return max(1, int(min(most, best)))

    def _seconds(self, which: np.ndarray, row_bytes: float, links: Links) -> float:
        """Of the busiest port or link that some of the legs (bool[leg]) need."""
        src, dst = self.src[which], self.dst[which]
        return links.network.fluid_seconds(src, dst, np.full(len(src), float(row_bytes)))

    def dispatch(self, slices: int) -> Hops:
        """Step by step, so many slices: a slice enters in one step and is spread in the next. A hop's row is its token."""
        step = np.floor(self.place * slices).astype(np.int64) + self.second
        return Hops.of(step, self.src, self.dst, self.token, self.ranks)

    def combine(self, slices: int) -> Hops:
        """The dispatch of so many slices, backwards."""
        step = slices - np.floor(self.place * slices).astype(np.int64) - self.second
        return Hops.of(step, self.dst, self.src, self.token, self.ranks)


def hops_of_layer(
    hosts: np.ndarray,
    source: np.ndarray,
    stops: Stops,
    row_bytes: tuple[float, float],
    links: Links | None,
    backend: str,
) -> tuple[Hops, Hops]:
    """Dispatch and combine of a layer. hosts, source: see `Legs.of`; row_bytes: of a row there and back; links, backend: of the
    ranks"""
    legs, (out, back) = Legs.of(hosts, source, stops), row_bytes
    return legs.dispatch(legs.slices(out, links, backend)), legs.combine(legs.slices(back, links, backend))
