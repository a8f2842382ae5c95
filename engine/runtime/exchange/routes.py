"""The tokens of one layer, laid out as rows between ranks for each of its exchanges. A row is a copy of a token for one
of its experts, or one for all of its experts on a rank."""

from dataclasses import dataclass

import numpy as np

from engine.plan import OrderMode, Schedule
from engine.plan.plan import replay


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one layer in one exchange, sorted by (source, destination, token).

    token: int64[row]
    counts: int64[src, dst] rows
    first: int64[src, dst], index of a pair's first row
    """

    token: np.ndarray
    counts: np.ndarray
    first: np.ndarray

    def outgoing(self, rank: int) -> np.ndarray:
        """int64[row] that a rank sends (its own share included), ordered by destination."""
        begin = self.first[rank, 0]
        return np.arange(begin, begin + self.counts[rank].sum())

    def incoming(self, rank: int) -> np.ndarray:
        """int64[row] that a rank receives (its own share included), ordered by source."""
        parts = [
            np.arange(self.first[src, rank], self.first[src, rank] + self.counts[src, rank]) for src in range(len(self.counts))
        ]
        return np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class Route(Rows):
    """Rows that are token copies, sorted by (source, destination, expert, token).

    choice: int64[copy], index into a token's k experts
    expert: int64[copy]
    dst: int64[copy], destination rank
    """

    choice: np.ndarray
    expert: np.ndarray
    dst: np.ndarray


@dataclass(frozen=True)
class Piece:
    """Rows [begin, end) of those that src sends to dst, in a phase of the order."""

    phase: int
    src: int
    dst: int
    begin: int
    end: int


def route(experts: np.ndarray, source: np.ndarray, share: np.ndarray, host: np.ndarray | None = None) -> Route:
    """Lay out one layer's dispatch. The copies that a rank has for a replicated expert go to its hosts in turn.

    experts: int[token, k], -1 = none
    source: int[token], the rank that holds a token
    share: float64[expert, rank] of `Placement.share`
    host: int[token, k], the rank of every choice where it is known
    """
    token, choice = np.nonzero(experts >= 0)
    expert = experts[token, choice].astype(np.int64)
    src = source[token].astype(np.int64)
    if host is not None:
        return _laid_out(token, choice, expert, src, host[token, choice].astype(np.int64), share.shape[1])
    hosts = share > 0
    host_count = hosts.sum(axis=1)
    host_list = np.argsort(~hosts, axis=1, kind="stable")
    group = src * len(share) + expert
    by_group = np.argsort(group, kind="stable")
    first_of_group = np.searchsorted(group[by_group], group[by_group])
    turn = np.empty(len(group), dtype=np.int64)
    turn[by_group] = np.arange(len(group)) - first_of_group
    return _laid_out(token, choice, expert, src, host_list[expert, turn % host_count[expert]], share.shape[1])


def combined(dispatch: Route, home: np.ndarray) -> Route:
    """Lay out the combine after a dispatch: every copy goes from the rank that computed it to the new home of its
    token. home: int[token] rank."""
    to = home[dispatch.token].astype(np.int64)
    return _laid_out(dispatch.token, dispatch.choice, dispatch.expert, dispatch.dst, to, len(dispatch.counts))


def rows_of_ranks(hosts: np.ndarray, source: np.ndarray, ranks: int) -> tuple[Rows, Rows]:
    """Dispatch and combine if a token goes once to every rank with some of its experts, and comes back summed up once
    from each. A rank returns rows in the order in which it receives them.

    hosts: int[token, k], the rank of every chosen expert, -1 = none
    source: int[token], the rank of each token
    """
    token, choice = np.nonzero(hosts >= 0)
    token, host = np.divmod(np.unique(token * ranks + hosts[token, choice].astype(np.int64)), ranks)
    there = _in_pairs(token, source[token].astype(np.int64), host, ranks)
    return there, _in_pairs(token, host, source[token].astype(np.int64), ranks)


def _in_pairs(token: np.ndarray, src: np.ndarray, dst: np.ndarray, ranks: int) -> Rows:
    return Rows(token[np.lexsort((token, dst, src))], *_counted(src, dst, ranks))


def _counted(src: np.ndarray, dst: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """counts and first of `Rows`."""
    counts = np.bincount(src * ranks + dst, minlength=ranks * ranks).reshape(ranks, ranks)
    return counts, np.concatenate([[0], np.cumsum(counts.ravel())[:-1]]).reshape(ranks, ranks)


def _laid_out(token: np.ndarray, choice: np.ndarray, expert: np.ndarray, src: np.ndarray, dst: np.ndarray, ranks: int) -> Route:
    order = np.lexsort((token, expert, dst, src))
    return Route(token[order], *_counted(src, dst, ranks), choice[order], expert[order], dst[order])


def pieces(mode: OrderMode, schedule: Schedule | None, counts: np.ndarray) -> list[Piece]:
    """Cut and order the exchange of `counts` (int64[src, dst] rows) as the schedule says; whole rows, none lost."""
    wanted = np.where(np.eye(len(counts), dtype=bool), 0, counts)
    if mode == "concurrent":
        src, dst = np.nonzero(wanted)
        return [Piece(0, int(i), int(j), 0, int(wanted[i, j])) for i, j in zip(src, dst, strict=True)]
    src, dst, rows, phase = replay(schedule, wanted.astype(np.float64))
    done = np.zeros(counts.shape)
    cut = []
    for step, (i, j) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        begin = round(done[i, j])
        done[i, j] += rows[step]
        end = round(done[i, j])
        if end > begin:
            cut.append(Piece(int(phase[step]), i, j, begin, end))
    return cut
