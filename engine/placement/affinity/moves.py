"""The moves of the affinity search: two GPUs divide their experts anew in all layers at once, exactly.

The experts of the other GPUs stay. In a layer the two GPUs hold 2 C experts, and a division of them is a vector of signs;
hops between the divisions x and y of neighbouring layers are kept as x' W y up to constants, so the layers form a chain
and dynamic programming over the divisions finds the best one. Hops to other GPUs of the same price do not change. Only
between GPUs of different nodes they do, by an amount that adds up over experts.

Up to C = 4 every division is a state, else the present one and every exchange of one expert for one in a layer (of the 8
experts of each GPU that gain most by leaving, beyond C = 8). Where nothing else changes, all signs of a layer may flip:
an edge is then worth |x' W y|, which lets the two GPUs change names at any layer.

`cross` makes the best placement that takes every layer from one of several placements, GPUs renamed where it changes over.
Good placements tend to agree on much and to be better in different stretches of layers. With all hops alike the names of
the GPUs after a layer are free, so the kept hops between layer l of one placement and layer l + 1 of another are an
assignment problem over GPUs, and dynamic programming over the layers picks the sources.
"""

from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

from engine.result import Floats, Ints

ALL_DIVISIONS, LARGEST_EXCHANGE = 4, 8
CHUNK = 400_000
"""Entries of a layer's table at a time, so that it stays in the processor's cache."""


@dataclass(frozen=True)
class Prices:
    """The worth of a kept hop.

    counts: float64[layer - 1, expert, expert]
    gpus_per_node: GPU g is in node g // gpus_per_node
    gpu: worth of a hop on the same GPU over one elsewhere in the node
    node: worth of a hop in the node over one outside
    within: float64[layer, expert, expert] or None, hops between experts of one layer, symmetric (both directions together)
        with nothing on the diagonal; only where all hops are alike, so that `node` is 0
    """

    counts: Floats
    gpus: int
    gpus_per_node: int
    gpu: float
    node: float
    within: Floats | None = None

    @property
    def size(self) -> int:
        """Experts of a GPU in a layer."""
        return self.counts.shape[1] // self.gpus

    def worth(self, gpu_of_expert: Ints) -> float:
        """gpu * hops kept on the GPU + node * hops kept in the node; gpu_of_expert: int64[layer, expert]."""
        total = 0.0
        for count, here, there in zip(self.counts, gpu_of_expert, gpu_of_expert[1:], strict=False):
            total += self.gpu * count[here[:, None] == there].sum()
            if self.node:
                total += self.node * count[(here // self.gpus_per_node)[:, None] == there // self.gpus_per_node].sum()
        return float(total + self.worth_within(gpu_of_expert).sum())

    def worth_within(self, gpu_of_expert: Ints) -> Floats:
        """float64[layer]: gpu * hops kept on the GPU between experts of one layer; gpu_of_expert: int64[layer, expert]."""
        if self.within is None:
            return np.zeros(len(gpu_of_expert))
        together = gpu_of_expert[:, :, None] == gpu_of_expert[:, None, :]
        return 0.5 * self.gpu * (self.within * together).sum(axis=(1, 2))


def divide_anew(held: Ints, prices: Prices, member: Ints, p: Ints, q: Ints, least_gain: float) -> Floats:
    """Improve pairs of GPUs in place; the gain in worth of each, 0 where below `least_gain`: float64[pair].

    All pairs must be independent: disjoint in GPUs, and at most one pair between two nodes; all in the same node, or none.

    held: int64[member, layer, gpu, C], experts of every GPU in several placements
    member, p, q: int64[pair], the GPUs p and q of a placement
    """
    gain = np.zeros(len(member))
    across = bool(len(p)) and p[0] // prices.gpus_per_node != q[0] // prices.gpus_per_node
    states = len(_divisions(prices.size, not across))
    chunk = max(1, CHUNK // states**2)
    for low in range(0, len(member), chunk):
        part = slice(low, low + chunk)
        gain[part] = _divide(held, prices, member[part], p[part], q[part], across, least_gain)
    return gain


def _divide(held: Ints, prices: Prices, member: Ints, p: Ints, q: Ints, across: bool, least_gain: float) -> Floats:
    layers, size, pairs = held.shape[1], prices.size, len(member)
    experts = np.concatenate([held[member, :, p], held[member, :, q]], axis=2).transpose(1, 0, 2)
    signs = _divisions(size, not across)
    outside = _outside(held, prices, member, p, q, experts) if across else None
    if size > LARGEST_EXCHANGE:
        experts, outside = _most_eager_first(experts, prices, outside)
    value = np.zeros((pairs, len(signs)))
    if across:
        value += outside[0] @ signs.T
    if prices.within is not None:
        value += _within(prices, experts, signs, 0)
    present = value[:, 0].copy()
    origin = np.empty((layers - 1, pairs, len(signs)), dtype=np.int16)
    for layer in range(layers - 1):
        count = prices.counts[layer][experts[layer][:, :, None], experts[layer + 1][:, None, :]]
        table = signs @ (count.transpose(0, 2, 1) @ signs.T)
        table *= 0.5 * (prices.gpu + (prices.node if across else 0.0))
        present += table[:, 0, 0]
        if not across:
            np.abs(table, out=table)
        table += value[:, None, :]
        origin[layer] = table.argmax(axis=2)
        value = table.max(axis=2)
        if across:
            here = outside[layer + 1] @ signs.T
            value += here
            present += here[:, 0]
        if prices.within is not None:
            here = _within(prices, experts, signs, layer + 1)
            value += here
            present += here[:, 0]
    last = value.argmax(axis=1)
    gain = value[np.arange(pairs), last] - present
    better = np.flatnonzero(gain > least_gain)
    if len(better):
        chosen = np.empty((layers, len(better)), dtype=np.int64)
        chosen[-1] = last[better]
        for layer in range(layers - 2, -1, -1):
            chosen[layer] = origin[layer, better, chosen[layer + 1]]
        _write(held, prices, member[better], p[better], q[better], experts[:, better], signs[chosen], across)
    return np.where(gain > least_gain, gain, 0.0)


def _within(prices: Prices, experts: Ints, signs: Floats, layer: int) -> Floats:
    """float64[pair, state]: worth of every division of two GPUs' experts for hops inside a layer, up to a constant. Hops to
    experts of other GPUs leave their GPU whatever these two do."""
    count = prices.within[layer][experts[layer][:, :, None], experts[layer][:, None, :]]
    return 0.25 * prices.gpu * ((signs @ count) * signs).sum(axis=2)


def _write(held, prices, member, p, q, experts, division, across) -> None:
    """Put the experts where the division float64[layer, pair, 2 C] says: its positive signs on p."""
    if not across:
        for layer in range(1, len(division)):
            count = prices.counts[layer - 1][experts[layer - 1][:, :, None], experts[layer][:, None, :]]
            edge = np.einsum("bi,bij,bj->b", division[layer - 1], count, division[layer])
            division[layer] *= np.where(edge < 0, -1.0, 1.0)[:, None]
    order = np.argsort(-division, axis=2, kind="stable")
    placed = np.take_along_axis(experts, order, axis=2).transpose(1, 0, 2)
    held[member, :, p] = placed[:, :, : prices.size]
    held[member, :, q] = placed[:, :, prices.size :]


@cache
def _divisions(size: int, flips: bool) -> Floats:
    """Signs float64[state, 2 * size] with `size` positive ones, the present division first.

    flips: the negative of a state needs no state of its own.
    """
    present = np.repeat([1.0, -1.0], size)
    if size <= ALL_DIVISIONS:
        rows = []
        for positive in combinations(range(2 * size), size):
            if not flips or 0 in positive:
                row = np.full(2 * size, -1.0)
                row[list(positive)] = 1.0
                rows.append(row)
        return np.array(rows)
    rows = [present]
    eager = min(size, LARGEST_EXCHANGE)
    for here in range(eager):
        for there in range(eager):
            row = present.copy()
            row[[here, size + there]] = -1.0, 1.0
            rows.append(row)
    return np.array(rows if flips else rows + [-row for row in rows])


def _outside(held, prices, member, p, q, experts) -> Floats:
    """float64[layer, pair, 2 C]: half of an expert's worth on p rather than q for its hops to the other GPUs of both nodes."""
    layers, pairs, width = experts.shape
    worth = np.zeros((layers, pairs, width))
    for gpu, sign in ((p, 1.0), (q, -1.0)):
        mates = gpu[:, None] // prices.gpus_per_node * prices.gpus_per_node + np.arange(prices.gpus_per_node)
        mates = mates[mates != gpu[:, None]].reshape(pairs, -1)
        others = held[member[:, None], :, mates].transpose(2, 0, 1, 3).reshape(layers, pairs, -1)
        for layer in range(layers - 1):
            count = prices.counts[layer]
            ahead = count[experts[layer][:, :, None], others[layer + 1][:, None, :]].sum(axis=2)
            behind = count[others[layer][:, :, None], experts[layer + 1][:, None, :]].sum(axis=1)
            worth[layer] += sign * ahead
            worth[layer + 1] += sign * behind
    return 0.5 * prices.node * worth


def _most_eager_first(experts, prices, outside):
    """The experts of each GPU sorted by the gain if they alone left it, most first; `outside` alike."""
    size = prices.size
    present = np.repeat([1.0, -1.0], size)
    weight = 0.5 * (prices.gpu + (0.0 if outside is None else prices.node))
    pull = np.zeros(experts.shape) if outside is None else outside.copy()
    for layer in range(len(experts) - 1):
        count = prices.counts[layer][experts[layer][:, :, None], experts[layer + 1][:, None, :]]
        pull[layer] += weight * (count @ present)
        pull[layer + 1] += weight * (present @ count)
    if prices.within is not None:
        for layer, here in enumerate(experts):
            pull[layer] += weight * (prices.within[layer][here[:, :, None], here[:, None, :]] @ present)
    stays = pull * present
    order = np.concatenate(
        [np.argsort(stays[:, :, :size], axis=2, kind="stable"), size + np.argsort(stays[:, :, size:], axis=2, kind="stable")],
        axis=2,
    )
    sorted_outside = None if outside is None else np.take_along_axis(outside, order, axis=2)
    return np.take_along_axis(experts, order, axis=2), sorted_outside


def cross(counts: Floats, places: Ints, gpus: int, within: Floats | None = None) -> Ints:
    """Placement int64[layer, expert] that keeps at least as many hops on GPUs as each of int64[member, layer, expert].

    counts: float64[layer - 1, expert, expert]
    within: float64[member, layer], hops kept between experts of the layer (None: there are none)
    """
    from scipy.optimize import linear_sum_assignment

    members, layers, _ = places.shape
    within = np.zeros((members, layers)) if within is None else within
    value = within[:, 0].copy()
    origin = np.empty((layers - 1, members), dtype=np.int64)
    for layer, count in enumerate(counts):
        shared = _shared(count, places[:, layer], places[:, layer + 1], gpus)
        joined = np.empty((members, members))
        for first in range(members):
            for second in range(members):
                row, column = linear_sum_assignment(shared[first, :, second], maximize=True)
                joined[first, second] = shared[first, row, second, column].sum()
        joined += value[:, None]
        origin[layer] = joined.argmax(axis=0)
        value = joined.max(axis=0) + within[:, layer + 1]
    source = [int(value.argmax())]
    for row in origin[::-1]:
        source.append(int(row[source[-1]]))
    source.reverse()
    place = np.empty(places.shape[1:], dtype=np.int64)
    place[0] = places[source[0], 0]
    for layer, count in enumerate(counts):
        following = places[source[layer + 1], layer + 1]
        shared = _shared(count, place[None, layer], following[None], gpus)[0, :, 0]
        place[layer + 1] = np.argsort(linear_sum_assignment(shared, maximize=True)[1])[following]
    return place


def _shared(count: Floats, before: Ints, after: Ints, gpus: int) -> Floats:
    """Hops float64[member, gpu, member, gpu] between the GPUs of int64[member, expert] and those one layer on."""
    here = (before[:, None, :] == np.arange(gpus)[:, None]).astype(np.float64).reshape(-1, count.shape[0])
    there = (after[:, None, :] == np.arange(gpus)[:, None]).astype(np.float64).reshape(-1, count.shape[0])
    return (here @ count @ there.T).reshape(len(before), gpus, len(after), gpus)
