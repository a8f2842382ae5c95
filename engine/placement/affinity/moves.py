"""The moves of the affinity search: two GPUs divide their experts anew in all layers at once, exactly.

The experts of the other GPUs stay. In a layer the two GPUs hold 2 C experts, and a division of them is a vector of signs;
hops between the divisions x and y of neighbouring layers are kept as x' W y up to constants, so the layers form a chain
and dynamic programming over the divisions finds the best one. Hops to other GPUs of the same price do not change. Only
between GPUs of different nodes they do, by an amount that adds up over experts.

Up to C = 4 every division is a state, else the present one and every exchange of one expert for one in a layer (of the 8
experts of each GPU that gain most by leaving, beyond C = 8). Where nothing else changes, all signs of a layer may flip:
an edge is then worth |x' W y|, which lets the two GPUs change names at any layer.

For x = s + c and y = s + d, changes c and d of the present signs s, x' W y is s' W s + c' (W s) + (s' W) d + c' W d: only the
last term is a table, and only over the experts that may be exchanged.

`cross` makes the best placement that takes every layer from one of several placements, GPUs renamed where it changes over.
Good placements tend to agree on much and to be better in different stretches of layers. With all hops alike the names of
the GPUs after a layer are free, so the kept hops between layer l of one placement and layer l + 1 of another are an
assignment problem over GPUs, and dynamic programming over the layers picks the sources.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import numpy as np
from numba import njit

from engine.result import Bools, Floats, Ints

ALL_DIVISIONS, LARGEST_EXCHANGE = 4, 8


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

    def of_layers(self, layers: slice) -> "Prices":
        """Those of some consecutive layers alone."""
        within = None if self.within is None else self.within[layers]
        return replace(self, counts=self.counts[layers.start : layers.stop - 1], within=within)

    def worth(self, gpu_of_expert: Ints) -> float:
        """gpu * hops kept on the GPU + node * hops kept in the node; gpu_of_expert: int64[layer, expert]."""
        kept = self.gpu * kept_hops(self.counts, gpu_of_expert[:-1], gpu_of_expert[1:], self.gpus)
        if self.node:
            node = gpu_of_expert // self.gpus_per_node
            kept += self.node * kept_hops(self.counts, node[:-1], node[1:], self.gpus // self.gpus_per_node)
        return float(kept.sum() + self.worth_within(gpu_of_expert).sum())

    def worth_within(self, gpu_of_expert: Ints) -> Floats:
        """float64[layer]: gpu * hops kept on the GPU between experts of one layer; gpu_of_expert: int64[layer, expert]."""
        if self.within is None:
            return np.zeros(len(gpu_of_expert))
        return 0.5 * self.gpu * kept_hops(self.within, gpu_of_expert, gpu_of_expert, self.gpus)


@njit(cache=True, nogil=True)
def kept_hops(counts: Floats, here: Ints, there: Ints, groups: int) -> Floats:
    """float64[layer]: hops float64[layer, expert, expert] between experts of the same group, of int64[layer, expert]."""
    kept = np.zeros(len(counts))
    ends = np.empty((groups, counts.shape[2]), dtype=np.int64)
    for layer in range(len(counts)):
        held = np.zeros(groups, dtype=np.int64)
        for expert in range(counts.shape[2]):
            group = there[layer, expert]
            ends[group, held[group]] = expert
            held[group] += 1
        for expert in range(counts.shape[1]):
            group = here[layer, expert]
            for at in range(held[group]):
                kept[layer] += counts[layer, expert, ends[group, at]]
    return kept


def divide_anew(held: Ints, prices: Prices, member: Ints, p: Ints, q: Ints, least_gain: float) -> Floats:
    """Improve pairs of GPUs in place; the gain in worth of each, 0 where below `least_gain`: float64[pair].

    All pairs must be independent: disjoint in GPUs, and at most one pair between two nodes; all in the same node, or none.

    held: int64[member, layer, gpu, C], experts of every GPU in several placements
    member, p, q: int64[pair], the GPUs p and q of a placement
    """
    across = bool(len(p)) and p[0] // prices.gpus_per_node != q[0] // prices.gpus_per_node
    changes, mirrored = changes_of(prices.size, not across)
    within = np.empty((0, 0, 0)) if prices.within is None else prices.within
    pairs = map(np.ascontiguousarray, (member, p, q))
    links = float(prices.gpu), float(prices.node) if across else 0.0, prices.gpus_per_node
    return _divide(held, prices.counts, within, *pairs, changes, mirrored, across, *links, float(least_gain))


@cache
def changes_of(size: int, flips: bool) -> tuple[Floats, bool]:
    """Divisions of 2 * size experts as changes of the present signs, `size` times +1 and then -1: float64[state, 2 * eager] of
    the first `eager` experts of each half, the present division first; and whether the negative of each is a state too.

    flips: the negative of a state needs no state of its own
    """
    eager = min(size, LARGEST_EXCHANGE)
    present = np.repeat([1.0, -1.0], eager)
    rows = [present]
    if size <= ALL_DIVISIONS:
        chosen = [row for row in combinations(range(2 * size), size) if not flips or 0 in row]
        return np.array([np.isin(np.arange(2 * size), row) * 2.0 - 1.0 for row in chosen]) - present, False
    for here in range(eager):
        for there in range(eager):
            row = present.copy()
            row[[here, eager + there]] = -1.0, 1.0
            rows.append(row)
    return np.array(rows) - present, not flips


def states_of(size: int, flips: bool) -> int:
    """The number of divisions that are tried in a layer; see `changes_of`."""
    changes, mirrored = changes_of(size, flips)
    return len(changes) * (2 if mirrored else 1)


@njit(cache=True, nogil=True)
def _divide(
    held: Ints,
    counts: Floats,
    within: Floats,
    member: Ints,
    p: Ints,
    q: Ints,
    changes: Floats,
    mirrored: bool,
    across: bool,
    gpu: float,
    node: float,
    gpus_per_node: int,
    least_gain: float,
) -> Floats:
    """`divide_anew`. node: 0 for pairs inside a node."""
    layers, size = held.shape[1], held.shape[3]
    width, eager, states = 2 * size, changes.shape[1] // 2, len(changes)
    weight = 0.5 * (gpu + node)
    present = np.ones(width)
    present[size:] = -1.0
    spots = np.append(np.arange(eager), size + np.arange(eager))  # of the experts that change
    turned_changes = np.ascontiguousarray(changes.T)
    count, half = np.empty((2 * eager, 2 * eager)), np.empty((2 * eager, states))
    table, square = np.empty((states, states)), np.empty((states, 2 * eager))
    before, after, own = np.empty(states), np.empty(states), np.empty(states)
    gains = np.zeros(len(member))
    origin = np.empty((layers - 1, 2 * states), dtype=np.int64)
    turned = np.empty((layers - 1, 2 * states), dtype=np.bool_)
    all_experts = np.empty((len(member), layers, width), dtype=np.int64)
    for pair in range(len(member)):
        all_experts[pair, :, :size] = held[member[pair], :, p[pair]]
        all_experts[pair, :, size:] = held[member[pair], :, q[pair]]
    pulls = _pulls(held, counts, within, member, p, q, all_experts, present, across, gpus_per_node, 0.5 * node)
    for pair in range(len(member)):
        mine, experts = held[member[pair]], all_experts[pair]
        ahead, behind, inside, outside = pulls[0, pair], pulls[1, pair], pulls[2, pair], pulls[3, pair]
        if size > LARGEST_EXCHANGE:
            _most_eager_first(experts, present, weight, outside, ahead, behind, inside)
        value, now = np.zeros(2 * states), 0.0
        for layer in range(layers):
            if layer:
                for j in range(2 * eager):
                    for i in range(2 * eager):
                        count[j, i] = counts[layer - 1, experts[layer - 1, spots[i]], experts[layer, spots[j]]]
                np.dot(count, turned_changes, half)
                np.dot(changes, half, table)
                _linear(changes, spots, ahead[layer - 1], present, before)
                _linear(changes, spots, behind[layer], 0 * present, after)
                for y in range(states):
                    for x in range(states):
                        table[y, x] = weight * (table[y, x] + before[x] + after[y])
                now += table[0, 0]
                value = _step(value, table, across, mirrored, origin[layer - 1], turned[layer - 1])
            if across:
                _linear(changes, spots, outside[layer], present, own)
                value[:states] += own
                if mirrored:
                    value[states:] -= own
                now += own[0]
            if len(within):
                for j in range(2 * eager):
                    for i in range(2 * eager):
                        count[j, i] = within[layer, experts[layer, spots[i]], experts[layer, spots[j]]]
                np.dot(changes, count, square)
                _linear(changes, spots, 2 * inside[layer], 0.5 * present, own)
                for state in range(states):
                    for i in range(2 * eager):
                        own[state] += square[state, i] * changes[state, i]
                value[:states] += 0.25 * gpu * own
                if mirrored:
                    value[states:] += 0.25 * gpu * own
                now += 0.25 * gpu * own[0]
        state = value[: 2 * states if mirrored else states].argmax()
        if value[state] - now <= least_gain:
            continue
        gains[pair] = value[state] - now
        path = np.empty(layers, dtype=np.int64)
        for layer in range(layers - 1, -1, -1):
            path[layer] = state
            state = origin[layer - 1, state] if layer else state
        negative = False
        for layer in range(layers):
            negative ^= layer > 0 and turned[layer - 1, path[layer]]
            division = present.copy()
            division[:eager] += changes[path[layer] % states, :eager]
            division[size : size + eager] += changes[path[layer] % states, eager:]
            first, second = 0, 0
            for at in range(width):
                if (division[at] > 0) != (negative ^ (path[layer] >= states)):
                    mine[layer, p[pair], first] = experts[layer, at]
                    first += 1
                else:
                    mine[layer, q[pair], second] = experts[layer, at]
                    second += 1
    return gains


@njit(cache=True, nogil=True)
def _linear(changes: Floats, spots: Ints, weights: Floats, present: Floats, sums: Floats) -> None:
    """Put into float64[state] the sum of weights float64[2 C] by the present signs and by the changes of every state."""
    now = 0.0
    for at in range(len(weights)):
        now += weights[at] * present[at]
    for state in range(len(changes)):
        sums[state] = now
        for at in range(len(spots)):
            sums[state] += weights[spots[at]] * changes[state, at]


@njit(cache=True, nogil=True)
def _step(value: Floats, table: Floats, across: bool, mirrored: bool, origin: Ints, turned: Bools) -> Floats:
    """The best values of the next layer, float64[2 * state], from table float64[next state, state]; `origin` and `turned` take
    the state that each comes from, and whether one of the two changes its sign on the way."""
    states = len(table)
    best = np.full(2 * states, -np.inf)
    for y in range(states):
        for x in range(states):
            worth = table[y, x] if across else abs(table[y, x])
            if value[x] + worth > best[y]:
                best[y], origin[y], turned[y] = value[x] + worth, x, not across and table[y, x] < 0
            if mirrored and value[x] - worth > best[states + y]:
                best[states + y], origin[states + y], turned[states + y] = value[x] - worth, x, False
        if mirrored:
            for x in range(states):
                if value[states + x] - table[y, x] > best[y]:
                    best[y], origin[y], turned[y] = value[states + x] - table[y, x], states + x, False
                if value[states + x] + table[y, x] > best[states + y]:
                    best[states + y], origin[states + y] = value[states + x] + table[y, x], states + x
                    turned[states + y] = False
    return best


@njit(cache=True, nogil=True)
def _pulls(
    held: Ints,
    counts: Floats,
    within: Floats,
    member: Ints,
    p: Ints,
    q: Ints,
    experts: Ints,
    present: Floats,
    across: bool,
    gpus_per_node: int,
    price: float,
) -> Floats:
    """float64[4, pair, layer, 2 C]: hops of every expert to those of GPU p less those to GPU q, in the next layer, in the one
    before and in its own; and the price of its hops to the other GPUs of p's node less those to q's.

    Layer by layer, so that the counts of one stay in the processor's cache.
    """
    pairs, layers, width = experts.shape
    pulls = np.zeros((4, pairs, layers, width))
    ahead, behind, inside, outside = pulls[0], pulls[1], pulls[2], pulls[3]
    for layer in range(layers):
        for pair in range(pairs):
            here = experts[pair, layer]
            for i in range(width):
                if len(within):
                    row = within[layer, here[i]]
                    for j in range(width):
                        inside[pair, layer, i] += row[here[j]] * present[j]
                if layer == layers - 1:
                    continue
                row, following = counts[layer, here[i]], experts[pair, layer + 1]
                for j in range(width):
                    count = row[following[j]]
                    ahead[pair, layer, i] += count * present[j]
                    behind[pair, layer + 1, j] += count * present[i]
            if not across or layer == layers - 1:
                continue
            for gpu, sign in ((p[pair], 1.0), (q[pair], -1.0)):
                low = gpu // gpus_per_node * gpus_per_node
                for mate in range(low, low + gpus_per_node):
                    if mate == gpu:
                        continue
                    for i in range(width):
                        row = counts[layer, here[i]]
                        for other in held[member[pair], layer + 1, mate]:
                            outside[pair, layer, i] += sign * row[other]
                    for other in held[member[pair], layer, mate]:
                        row = counts[layer, other]
                        for i in range(width):
                            outside[pair, layer + 1, i] += sign * row[experts[pair, layer + 1, i]]
    outside *= price
    return pulls


@njit(cache=True, nogil=True)
def _most_eager_first(
    experts: Ints, present: Floats, weight: float, outside: Floats, ahead: Floats, behind: Floats, inside: Floats
) -> None:
    """Sort the experts of each GPU by the gain if they alone left it, most first; all float64[layer, 2 C] alike."""
    size = len(present) // 2
    for layer in range(len(experts)):
        stays = (outside[layer] + weight * behind[layer] + weight * ahead[layer] + weight * inside[layer]) * present
        order = np.concatenate((np.argsort(stays[:size], kind="mergesort"), size + np.argsort(stays[size:], kind="mergesort")))
        experts[layer] = experts[layer][order]
        for table in (outside, ahead, behind, inside):
            table[layer] = table[layer][order]


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
