"""Rows of a dispatch: what every GPU sends every other when tokens travel copy by copy, GPU by GPU or node by node. And of an
all-gather, which every node enters once.

A matrix of rows has every hop of the way: with `node` travel the row that crosses the fabric stands between the GPUs of equal
places in their nodes, and the rows that are spread from there stand between GPUs of one node. Combine is its transpose.
"""

from functools import cached_property

import numpy as np

from engine.plan import TravelUnit


class Stops:
    """Where rows enter a node. domain: int[gpu], the same number for GPUs that talk over the links of their node."""

    def __init__(self, domain: np.ndarray) -> None:
        number, self.of_gpu = np.unique(domain, return_inverse=True)
        self.sizes = np.bincount(self.of_gpu)
        order = np.argsort(self.of_gpu, kind="stable")
        begin = np.cumsum(self.sizes) - self.sizes
        self._place = np.empty(len(domain), dtype=np.int64)
        self._place[order] = np.arange(len(domain)) - begin[self.of_gpu[order]]
        self._members, self._begin, self.count = order, begin, len(number)

    @property
    def gpus(self) -> int:
        return len(self.of_gpu)

    @cached_property
    def entry(self) -> np.ndarray:
        """int64[source gpu, domain]: the GPU at which a row of the source enters a domain: the one with its own place there,
        which in its own domain is itself; in a smaller one places go round."""
        place = self._place[:, None] % self.sizes[None, :]
        return self._members[self._begin[None, :] + place]

    def dealt(self, rows: np.ndarray) -> np.ndarray:
        """float64[gpu]: the rows of every domain (float64[gpu], whole numbers) dealt out evenly to its GPUs, in whole rows."""
        total, sizes = np.bincount(self.of_gpu, rows)[self.of_gpu], self.sizes[self.of_gpu]
        return (total + sizes - 1 - self._place) // sizes


def rows_of_tokens(hosts: np.ndarray, source: np.ndarray, stops: Stops, unit: TravelUnit) -> np.ndarray:
    """float64[src, dst] rows of a dispatch; on the diagonal those that stay.

    hosts: int[token, k], the GPU of every chosen expert, -1 = none; source: int[token], the GPU that holds the token
    """
    gpus = stops.gpus
    hosts = hosts.astype(np.int64)
    source = np.asarray(source, dtype=np.int64)[:, None]
    if unit == "copies":
        return _counted((source * gpus + hosts)[hosts >= 0], gpus)
    hosts = np.sort(hosts, axis=1)
    here = _first_of_equal(hosts)
    if unit == "gpu":
        return _counted((source * gpus + hosts)[here], gpus)
    domain = np.where(hosts >= 0, stops.of_gpu[hosts], -1)
    entry = stops.entry[source, domain]
    spread = _counted((entry * gpus + hosts)[here & (entry != hosts)], gpus)
    # Of the rows that stay on their GPU none is spread; those of other nodes have crossed the fabric already.
    domain.sort(axis=1)
    foreign = domain != stops.of_gpu[source]
    crossed = _first_of_equal(domain) & foreign
    crossing = _counted((source * gpus + stops.entry[source, domain])[crossed], gpus)
    stays = _counted((source * gpus + hosts)[here & (hosts == source)], gpus)
    return spread + crossing + stays


def rows_to_all(rows: np.ndarray, stops: Stops) -> np.ndarray:
    """float64[src, dst] rows of an all-gather, which gives every GPU all rows once; on the diagonal those that it has.

    It goes in two tiers: over its links a node gets the rows of its GPUs, each of which passes an even part of them on to the
    GPU with its own place in every other node, and from there they are spread over that node's links. So every row crosses
    the fabric once a node, and a GPU with many rows has the ports of its node to help. rows: float64[gpu], what every GPU has
    """
    source, target = np.meshgrid(np.arange(stops.gpus), np.arange(stops.gpus), indexing="ij")
    entry = stops.entry[source, stops.of_gpu[target]]
    inside = stops.of_gpu[source] == stops.of_gpu[target]
    passed = np.where(inside, rows[:, None], stops.dealt(rows)[:, None])
    matrix = np.zeros(source.shape)
    np.add.at(matrix, (np.where(entry == target, source, entry), target), passed)
    return matrix


def _first_of_equal(ascending: np.ndarray) -> np.ndarray:
    """bool[token, k]: the first of each token's equal entries that are not -1."""
    first = ascending >= 0
    first[:, 1:] &= ascending[:, 1:] != ascending[:, :-1]
    return first


def _counted(pair: np.ndarray, gpus: int) -> np.ndarray:
    return np.bincount(pair, minlength=gpus * gpus).reshape(gpus, gpus).astype(np.float64)


def places_of(share: np.ndarray, stops: Stops) -> np.ndarray:
    """float64[…, gpu and then domain]: shares of GPUs (float64[…, gpu]) with those of their domains behind them."""
    return np.concatenate([share, share @ np.eye(stops.count)[stops.of_gpu]], axis=-1)


def rows_by_chance(touched: np.ndarray, tokens: np.ndarray, stops: Stops, unit: TravelUnit) -> np.ndarray:
    """float64[src, dst] rows of a dispatch, in the mean, from how likely a token has an expert somewhere.

    touched: float64[source gpu, place], of a token of each source, the probability of every GPU and, with `node` travel, after
        them that of every domain; tokens: float64[source gpu]
    """
    gpus = stops.gpus
    rows = touched[:, :gpus] * tokens[:, None]
    if unit == "gpu":
        return rows
    matrix = np.zeros((gpus, gpus))
    source, target = np.meshgrid(np.arange(gpus), np.arange(gpus), indexing="ij")
    entry = stops.entry[source, stops.of_gpu[target]]
    spread = (entry != target) | (source == target)
    np.add.at(matrix, (entry[spread], target[spread]), rows[spread])
    source, domain = np.meshgrid(np.arange(gpus), np.arange(stops.count), indexing="ij")
    foreign = stops.of_gpu[source] != domain
    crossing = (touched[:, gpus:] * tokens[:, None])[foreign]
    np.add.at(matrix, (source[foreign], stops.entry[source, domain][foreign]), crossing)
    return matrix
