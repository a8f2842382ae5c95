"""Local search for affinity placements: greedy starts, best divisions of GPU pairs, kicks; several placements at a time.

A start is a chain of exact assignments layer by layer from a random layer outwards, then red/black coordinate descent
(with the odd layers fixed every even layer is an assignment problem, and the other way round). From there the moves of
`moves` are made until none gains. Then a kick moves experts round three GPUs, which no move of two can undo in
one step, and a worse result is taken back. Placements share the array operations, which makes numpy fast here.
"""

import time
from collections.abc import Callable

import numpy as np
from numba import njit

from engine.placement.affinity.moves import Prices, cross, divide_anew, states_of
from engine.result import Floats, Ints, Stop, never

MEMBERS, RENAMING_KICKS, KICKS_IN_A_NODE, MOST_KICKED_LAYERS = 12, 0.3, 0.5, 3
OVERHEAD, PER_ENTRY, PER_PAIR = 8e-5, 2.2e-9, 2e-6
"""Seconds a layer of one round, a table entry and a pair take on an ordinary core; they only divide a time limit."""
STARTS, START_SHARE, CROSS_EVERY = 32, 0.3, 2
"""Chains built at most, their part of the time, and after how many settlings of each member all of them are crossed."""
REPORTED_GAIN = 1e-3
"""Share of the worth from which a better placement is told; to count its cost anew takes as long as several rounds."""
_SECONDS_PER_GPU_ASSIGNMENT = 1e-7


def greedy_chain(prices: Prices, start: int, first: Ints, sweeps: int = 20, stop: Stop = never) -> Ints:
    """Placement int64[layer, expert] from one layer outwards, each layer exact given the last; then coordinate descent.

    start: the layer placed as `first` int64[expert]
    sweeps: at most so many red/black sweeps, ended when none gains
    """
    layers, experts = len(prices.counts) + 1, prices.counts.shape[1]
    place = np.empty((layers, experts), dtype=np.int64)
    place[:] = first
    for layer in [*range(start + 1, layers), *range(start - 1, -1, -1)]:
        if stop():
            return place
        place[layer] = best_layer(prices, place, layer, before=layer > start, after=layer < start)
    worth, stale = prices.worth(place), np.ones(layers, dtype=bool)  # layers whose neighbours have changed
    for _ in range(sweeps):
        for layer in [*range(0, layers, 2), *range(1, layers, 2)]:
            if stop():
                return place
            if not stale[layer]:
                continue
            before, place[layer] = place[layer].copy(), best_layer(prices, place, layer)
            if (place[layer] != before).any():
                stale[max(0, layer - 1) : layer + 2] = True
            stale[layer] = False
        last, worth = worth, prices.worth(place)
        if worth <= last * (1 + 1e-12):
            break
    return place


def best_layer(prices: Prices, place: Ints, layer: int, before: bool = True, after: bool = True) -> Ints:
    """gpu_of_expert int64[expert] of one layer, exact for its neighbours (one assignment problem)."""
    from scipy.optimize import linear_sum_assignment

    worth = _worth_of_layer(prices, place, layer, before, after)
    return linear_sum_assignment(np.repeat(worth.T, prices.size, axis=1), maximize=True)[1] // prices.size


def _worth_of_layer(prices: Prices, place: Ints, layer: int, before: bool = True, after: bool = True) -> Floats:
    """float64[gpu, expert]: worth of the hops that a layer's experts would keep on each GPU, given the layers around it."""
    none = np.empty((0, 0))
    behind = prices.counts[layer - 1] if before and layer > 0 else none
    ahead = prices.counts[layer] if after and layer < len(prices.counts) else none
    kept = _hops_to_gpus(behind, ahead, place[max(layer - 1, 0)], place[min(layer + 1, len(place) - 1)], prices.gpus)
    if not prices.node:
        return prices.gpu * kept
    in_node = kept.reshape(-1, prices.gpus_per_node, kept.shape[1]).sum(axis=1)
    return prices.gpu * kept + prices.node * np.repeat(in_node, prices.gpus_per_node, axis=0)


@njit(cache=True, nogil=True)
def _hops_to_gpus(behind: Floats, ahead: Floats, place_behind: Ints, place_ahead: Ints, gpus: int) -> Floats:
    """float64[gpu, expert]: hops of a layer's experts from and to those that each GPU holds of the layers behind and ahead.

    behind, ahead: float64[expert of the earlier layer, expert of the later one], empty where they do not count
    """
    hops = np.zeros((gpus, len(place_behind)))
    for other in range(len(behind)):
        hops[place_behind[other]] += behind[other]
    for expert in range(len(ahead)):
        for other in range(len(ahead)):
            hops[place_ahead[other], expert] += ahead[expert, other]
    return hops


@njit(cache=True, nogil=True)
def rearranged(worth: Floats, gpu_of_expert: Ints, slack: float) -> Ints:
    """The placement int64[expert] of the most worth float64[gpu, expert] with as many experts on each GPU as in the given one.

    Experts go round cycles of GPUs that gain more than `slack`, until there is none: quick where few do.
    """
    gpus, experts = worth.shape
    place = gpu_of_expert.copy()
    gain, mover = np.empty((gpus, gpus)), np.empty((gpus, gpus), dtype=np.int64)
    stale = np.ones(gpus, dtype=np.bool_)
    far, came = np.empty(gpus), np.empty(gpus, dtype=np.int64)
    while True:
        for gpu in range(gpus):
            if stale[gpu]:
                gain[gpu] = -np.inf
        for expert in range(experts):
            here = place[expert]
            if stale[here]:
                for there in range(gpus):
                    more = worth[there, expert] - worth[here, expert]
                    if there != here and more > gain[here, there]:
                        gain[here, there], mover[here, there] = more, expert
        stale[:] = False
        # The longest walks of ever more steps; a walk that is still growing after `gpus` of them goes round a cycle.
        far[:], came[:], last = 0.0, -1, -1
        for _ in range(gpus):
            last = -1
            for here in range(gpus):
                for there in range(gpus):
                    if far[here] + gain[here, there] > far[there] + slack:
                        far[there], came[there], last = far[here] + gain[here, there], here, there
            if last < 0:
                return place
        for _ in range(gpus):
            last = came[last]
        there = last
        while True:
            here = came[there]
            place[mover[here, there]] = there
            stale[here] = True
            there = here
            if there == last:
                break


def _kept_within(prices: Prices, places: Ints) -> Floats:
    """float64[member, layer]: hops that placements int64[member, layer, expert] keep on GPUs between experts of one layer."""
    if prices.within is None or not prices.gpu:
        return np.zeros(places.shape[:2])
    return np.array([prices.worth_within(place) for place in places]) / prices.gpu


def held_by_gpu(gpu_of_expert: Ints, gpus: int) -> Ints:
    """Experts of every GPU int64[layer, gpu, C] from gpu_of_expert int64[layer, expert]."""
    layers, experts = gpu_of_expert.shape
    return np.argsort(gpu_of_expert, axis=1, kind="stable").reshape(layers, gpus, experts // gpus)


def gpu_of_expert(held: Ints) -> Ints:
    """int64[layer, expert] from int64[layer, gpu, C]."""
    layers, gpus, size = held.shape
    place = np.empty((layers, gpus * size), dtype=np.int64)
    gpu = np.broadcast_to(np.repeat(np.arange(gpus), size), place.shape)
    np.put_along_axis(place, held.reshape(layers, -1), gpu, axis=1)
    return place


class Population:
    """Placements that are improved side by side; see the module."""

    def __init__(self, prices: Prices, starts: list[Ints], rng: np.random.Generator) -> None:
        self.prices, self.rng = prices, rng
        self.held = np.array([held_by_gpu(start, prices.gpus) for start in starts])
        self.worth = np.array([prices.worth(start) for start in starts])
        self.best, self.best_worth = self.held.copy(), self.worth.copy()
        gpus = prices.gpus
        self.dirty = np.broadcast_to(np.triu(np.ones((gpus, gpus), dtype=bool), 1), (len(starts), gpus, gpus)).copy()
        self.rounds = list(_rounds(gpus, prices.gpus_per_node, bool(prices.node)))
        self.least_gain = 1e-10 * max(1.0, float(prices.counts.sum()) * (prices.gpu + prices.node))
        self.turn, self.seconds, self.settled = 0, 0.0, 0
        self.parts = max(1, len(prices.counts))  # of the work: layer pairs, or the one layer with hops inside

    def round(self) -> None:
        """Every pair of the next round that may still gain."""
        pairs = self.rounds[self.turn]
        self.turn = (self.turn + 1) % len(self.rounds)
        member, which = np.nonzero(self.dirty[:, pairs[:, 0], pairs[:, 1]])
        if not len(member):
            return
        p, q = pairs[which].T
        gain = divide_anew(self.held, self.prices, member, p, q, self.least_gain)
        gained = gain > 0
        self.touch(member[gained], p[gained], q[gained])
        self.dirty[member, p, q] = False
        self.worth += np.bincount(member, gain, minlength=len(self.worth))
        across = p[0] // self.prices.gpus_per_node != q[0] // self.prices.gpus_per_node
        states, width = states_of(self.prices.size, not across), 2 * self.prices.size
        entries = states * (states + 0.1 * width * (states + width))
        self.seconds += self.parts * (OVERHEAD + len(member) * (PER_PAIR + PER_ENTRY * entries))

    def touch(self, member: Ints, *gpus: Ints) -> None:
        """Mark the pairs with a best division that may have changed with the experts of these GPUs."""
        size = self.prices.gpus_per_node
        crossed = self.prices.node != 0 and any((gpu // size != gpus[0] // size).any() for gpu in gpus)
        for gpu in gpus:
            for mate in range(size) if crossed else [None]:
                peer = gpu if mate is None else gpu // size * size + mate
                self.dirty[member, peer, :] = True
                self.dirty[member, :, peer] = True
        self.dirty &= np.triu(np.ones(self.dirty.shape[1:], dtype=bool), 1)

    def settle(self) -> None:
        """Keep members without a gaining move if no worse than their best, else take them back; then kick them."""
        for member in np.flatnonzero(~self.dirty.any(axis=(1, 2))):
            if self.worth[member] >= self.best_worth[member] - self.least_gain:
                self.best[member], self.best_worth[member] = self.held[member], self.worth[member]
            else:
                self.held[member] = self.best[member]
            self._kick(int(member))
            self.settled += 1

    def cross(self) -> None:
        """The worst member becomes the best mixture of all members' best."""
        self.settled = 0
        places = np.array([gpu_of_expert(held) for held in self.best])
        place = cross(self.prices.counts, places, self.prices.gpus, _kept_within(self.prices, places))
        worst = int(self.best_worth.argmin())
        self.held[worst], self.worth[worst] = held_by_gpu(place, self.prices.gpus), self.prices.worth(place)
        self.best[worst], self.best_worth[worst] = self.held[worst], self.worth[worst]
        self.dirty[worst] = np.triu(np.ones(self.dirty.shape[1:], dtype=bool), 1)
        self.seconds += self.parts * len(places) ** 2 * _SECONDS_PER_GPU_ASSIGNMENT * self.prices.gpus**2

    def _kick(self, member: int) -> None:
        layers, rng, held = len(self.prices.counts) + 1, self.rng, self.held[member]
        gpus = rng.permutation(self.prices.gpus)[:3]
        if self.prices.node and self.prices.gpus_per_node > 2 and rng.random() < KICKS_IN_A_NODE:
            size = self.prices.gpus_per_node
            gpus = gpus[0] // size * size + rng.permutation(size)[:3]
        behind = np.roll(gpus, 1)
        if layers > 1 and rng.random() < RENAMING_KICKS:
            low = int(rng.integers(1, layers))
            high = layers if rng.random() < 0.5 else min(layers, low + 1 + int(rng.integers(MOST_KICKED_LAYERS)))
            held[low:high, gpus] = held[low:high, behind]
        else:
            low = int(rng.integers(layers))
            for layer in range(low, min(layers, low + 1 + int(rng.integers(MOST_KICKED_LAYERS)))):
                # Two GPUs could take a single exchange back in one move.
                for _ in range(2 if len(gpus) == 2 else 1):
                    slot = rng.integers(self.prices.size, size=len(gpus))
                    held[layer, gpus, slot] = held[layer, behind, np.roll(slot, 1)]
        self.worth[member] = self.prices.worth(gpu_of_expert(held))
        self.touch(np.array([member]), *(np.array([gpu]) for gpu in gpus))

    def fittest(self) -> tuple[Ints, float]:
        """The best placement int64[layer, expert] seen, settled or not, and its worth."""
        best, now = int(self.best_worth.argmax()), int(self.worth.argmax())
        if self.worth[now] > self.best_worth[best]:
            return gpu_of_expert(self.held[now]), float(self.worth[now])
        return gpu_of_expert(self.best[best]), float(self.best_worth[best])


def search(
    prices: Prices,
    starts: list[Ints],
    seconds: float,
    deadline: float,
    seed: int,
    enough: float = np.inf,
    stop: Stop = never,
    on_incumbent: Callable[[Ints], None] | None = None,
) -> Ints:
    """The placement int64[layer, expert] of the most worth found.

    starts: placements int64[layer, expert] to begin with, more are made
    seconds: work, as estimated from its amount and therefore the same on every machine
    deadline: of `time.perf_counter`, an outer cap
    enough: worth at which to end
    """
    rng = np.random.default_rng(seed)
    layers, experts = len(prices.counts) + 1, prices.counts.shape[1]

    def over() -> bool:
        return stop() or time.perf_counter() > deadline

    starts = list(starts)
    states = states_of(prices.size, not prices.node)
    sweep = prices.gpus**2 / 2 * layers * (PER_PAIR + PER_ENTRY * states * (states + 2 * prices.size))
    members = int(np.clip(seconds / (40 * sweep), 1, MEMBERS))
    if not prices.node:
        # Where nodes matter, chains built at once for GPUs and nodes start too far below the two stages to catch up.
        start_seconds = 10 * layers * (4e-5 + 7e-9 * experts**2.4)
        for _ in range(int(np.clip(START_SHARE * seconds / start_seconds, 0, STARTS))):
            if over():
                break
            first = rng.permutation(experts) % prices.gpus
            starts.append(greedy_chain(prices, int(rng.integers(layers)), first, stop=over))
        if len(starts) > 2 and layers > 1 and not over():
            places = np.array(starts)
            starts.append(cross(prices.counts, places, prices.gpus, _kept_within(prices, places)))
        starts = sorted(starts, key=prices.worth, reverse=True)[:members]
    population = Population(prices, starts, rng)
    if prices.gpus < 2 or (layers < 2 and prices.within is None):
        return population.fittest()[0]
    reported = -np.inf
    while population.seconds < seconds and not over():
        population.round()
        population.settle()
        if not prices.node and population.settled >= CROSS_EVERY * members > CROSS_EVERY:
            population.cross()
        best = max(population.best_worth.max(), population.worth.max())
        if best > reported + max(population.least_gain, REPORTED_GAIN * reported):
            reported = best
            if on_incumbent:
                on_incumbent(population.fittest()[0])
        if best >= enough:
            break
    return polish(prices, population.fittest()[0], over)


def polish(prices: Prices, place: Ints, stop: Stop = never) -> Ints:
    """int64[layer, expert], improved until no layer can be placed better alone and (all hops alike) no new names of all later
    GPUs help."""
    from scipy.optimize import linear_sum_assignment

    place, layers = place.copy(), len(place)
    slack = 1e-10 * max(1.0, float(prices.counts.sum()))
    stale = np.ones(layers, dtype=bool)
    while stale.any():
        for layer in range(layers):
            if stop():
                return place
            if not stale[layer]:
                continue
            stale[layer] = False
            trial = place.copy()
            trial[layer] = rearranged(_worth_of_layer(prices, place, layer), place[layer], slack / prices.gpus)
            near = slice(max(0, layer - 1), layer + 2)  # of these layers alone the worth may change
            part = prices.of_layers(near)
            if layer and not prices.node:
                share = np.zeros((prices.gpus, prices.gpus))
                np.add.at(share, (place[layer - 1][:, None], place[layer][None, :]), prices.counts[layer - 1])
                renamed = place.copy()
                renamed[layer:] = np.argsort(linear_sum_assignment(share, maximize=True)[1])[place[layer:]]
                trial = max(trial, renamed, key=lambda place, near=near, part=part: part.worth(place[near]))
            if part.worth(trial[near]) > part.worth(place[near]) + slack:
                changed = np.flatnonzero((trial != place).any(axis=1))
                stale[max(0, changed[0] - 1) : changed[-1] + 2] = True
                place = trial
    return place


def _rounds(gpus: int, gpus_per_node: int, priced_nodes: bool):
    """Every pair p < q of GPUs once, in rounds of independent pairs int64[pair, 2] (see `divide_anew`)."""
    if not priced_nodes:
        yield from _tournament(gpus)
        return
    first = np.arange(0, gpus, gpus_per_node)
    for pairs in _tournament(gpus_per_node):
        yield (first[:, None, None] + pairs).reshape(-1, 2)
    for nodes in _tournament(len(first)):
        for first_place in range(gpus_per_node):
            for second_place in range(gpus_per_node):
                yield first[nodes] + [first_place, second_place]


def _tournament(players: int):
    """The rounds of a tournament in which everyone meets everyone once: int64[pair, 2] each."""
    order = list(range(players + players % 2))
    for _ in range(len(order) - 1):
        pairs = [sorted((order[at], order[-1 - at])) for at in range(len(order) // 2)]
        yield np.array([pair for pair in pairs if pair[1] < players], dtype=np.int64).reshape(-1, 2)
        order = [order[0], order[-1], *order[1:-1]]
