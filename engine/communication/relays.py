"""The relays between scale-up domains: bytes are balanced over links before the ports, and spread behind them.

The bytes that domain A has for domain B move over A's links until every port of A has its share of them, cross the fabric on
rails (port to port), and go on over B's links to their receivers. Bytes are taken in proportion: of whatever a GPU passes on,
every receiver's bytes are the same part.
"""

from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.network import Network, off_diagonal

MOST_CELLS = 2**23
"""Pairs of GPUs of all pairs of domains, each as large as the largest: eight tables of them are in memory at once."""
SLIVER = 1e-12
"""A part of a pair's bytes, or of a GPU's, that is round-off."""


@dataclass(frozen=True, eq=False)
class Domains:
    """The scale-up domains of a network, numbered in the order of their first GPUs.

    first: int64[domain], the first GPU
    of_gpu: int64[gpu], the number of its domain
    members: int64[domain, place] GPUs in ascending order, padded with the number of GPUs
    send, receive: float64[domain] bytes/s of all its ports together
    send_share, receive_share: float64[domain, place], the part of them that a port has
    """

    first: np.ndarray
    of_gpu: np.ndarray
    members: np.ndarray
    send: np.ndarray
    receive: np.ndarray
    send_share: np.ndarray
    receive_share: np.ndarray

    @classmethod
    def of(cls, network: Network) -> "Domains":
        first, of_gpu, sizes = np.unique(network.domain, return_inverse=True, return_counts=True)
        order = np.argsort(of_gpu, kind="stable")
        members = np.full((len(first), sizes.max(initial=0)), network.gpus)
        members[of_gpu[order], counted(sizes)] = order
        rates = [np.append(rate, 0.0)[members] for rate in (network.send, network.receive)]
        send, receive = (rate.sum(axis=1) for rate in rates)
        return cls(first, of_gpu, members, send, receive, rates[0] / send[:, None], rates[1] / receive[:, None])

    def between(self, traffic: np.ndarray) -> np.ndarray:
        """float64[domain, domain] bytes, 0 on the diagonal. traffic: float64[src, dst] bytes."""
        by_domain = np.argsort(self.of_gpu, kind="stable")
        begin = np.searchsorted(self.of_gpu[by_domain], np.arange(len(self.first)))
        rows = np.add.reduceat(traffic[by_domain], begin, axis=0)
        return off_diagonal(np.add.reduceat(rows[:, by_domain], begin, axis=1))


@dataclass(frozen=True, eq=False)
class Relays:
    """The ways of all traffic between every pair of domains that has some.

    source, target: int64[pair], domains
    traffic: float64[pair, i, j] bytes that the GPU at place i of the source has for the one at place j of the target
    before: float64[pair, i, a], the part of i's bytes that leaves by the port of a
    across: float64[pair, a, b], the part of the bytes leaving by a's port that enters by b's
    entered: float64[pair, b, j] bytes that enter by b's port and are for j
    """

    source: np.ndarray
    target: np.ndarray
    traffic: np.ndarray
    before: np.ndarray
    across: np.ndarray
    entered: np.ndarray

    @classmethod
    def of(cls, traffic: np.ndarray, domains: Domains) -> "Relays":
        """Fewest bytes over the links of the source: only those above a port's share move. traffic: float64[src, dst]."""
        source, target = np.nonzero(domains.between(traffic))
        places = domains.members.shape[1]
        if (cells := len(source) * places**2) > MOST_CELLS:
            raise InputError(
                f"an order in two tiers for {len(source):,} pairs of nodes of up to {places} GPUs takes more memory than there "
                f"may be ({cells:,} pairs of their GPUs, at most {MOST_CELLS:,})"
            )
        padded = np.pad(traffic, (0, 1))
        block = padded[domains.members[source][:, :, None], domains.members[target][:, None, :]]
        held = block.sum(axis=2)
        moved = held.sum(axis=1)[:, None]
        leaves, enters = domains.send_share[source] * moved, domains.receive_share[target] * moved
        stays = np.minimum(held, leaves)
        spare, room = (np.where(part > SLIVER * moved, part, 0.0) for part in (held - stays, leaves - stays))
        before = _parts(_corners(spare, room) + stays[:, :, None] * np.eye(held.shape[1]))
        across = _parts(_corners(leaves, enters))
        entered = across.transpose(0, 2, 1) @ (before.transpose(0, 2, 1) @ block)
        return cls(source, target, block, before, across, entered)

    @property
    def balance(self) -> np.ndarray:
        """float64[pair, i, a] bytes over the links of the source, those that stay on their GPU left out."""
        return _away(self.traffic.sum(axis=2)[:, :, None] * self.before)

    @property
    def rails(self) -> np.ndarray:
        """float64[pair, a, b] bytes over the fabric."""
        return (self.before.transpose(0, 2, 1) @ self.traffic).sum(axis=2)[:, :, None] * self.across

    @property
    def spread(self) -> np.ndarray:
        """float64[pair, b, j] bytes over the links of the target, those that stay on their GPU left out."""
        return _away(self.entered)


def counted(counts: np.ndarray) -> np.ndarray:
    """0 … count - 1 for every one of int64[item] counts, one after another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _corners(supply: np.ndarray, demand: np.ndarray) -> np.ndarray:
    """float64[pair, i, j]: who gives to whom when supplies and demands (float64[pair, place], of equal sums) are served in
    order (the north-west corner rule: fewer entries than places of both together)."""
    supplied, demanded = supply.cumsum(axis=1), demand.cumsum(axis=1)
    until = np.minimum(supplied[:, :, None], demanded[:, None, :])
    before_supply, before_demand = (np.pad(sums[:, :-1], ((0, 0), (1, 0))) for sums in (supplied, demanded))
    overlap = until - np.maximum(before_supply[:, :, None], before_demand[:, None, :])
    # No supply may vanish as round-off altogether: the largest entry of a row is at least its mean.
    least = np.minimum(SLIVER * supplied[:, -1:], supply / (2 * supply.shape[1]))
    return np.where(overlap > least[:, :, None], overlap, 0.0)


def _parts(matrix: np.ndarray) -> np.ndarray:
    """Every row divided by its sum; rows of nothing stay so."""
    total = matrix.sum(axis=2, keepdims=True)
    return np.divide(matrix, total, out=np.zeros_like(matrix), where=total > 0)


def _away(matrix: np.ndarray) -> np.ndarray:
    return np.where(np.eye(matrix.shape[1], dtype=bool), 0.0, matrix)
