"""A placement with everything that makes a swap of two experts cheap to judge."""

import numpy as np

from engine.placement.joint.bounds import least_hop_cost_share, least_imbalance
from engine.placement.joint.instance import JointInstance
from engine.result import Floats, Ints, Stop, never

EVENNESS = 0.02
"""Weight of the squares of the GPU loads: they tell apart swaps that leave the busiest GPU as it is."""
BROAD, NARROW = 0.5, 0.02
"""Weight of the mean over workloads where the worst counts, first and last in a descent. Broadly it does not get stuck
where every swap harms one of several workloads that are about as bad; narrowly it ends where the worst can be no better."""
TOLERANCE = 1e-12


class JointTerms:
    """The objective weight · H / H_random + (1 - weight) · B as sums over layers, ready for the search.

    hop: float64[scenario, layer - 1, expert, expert], cost of a hop at the dearest price
    load: float64[workload, layer, expert], so that the largest GPU loads, summed over layers, are (1 - weight) (B + 1)

    Where the mean over the workloads counts, hops need one scenario, the mean. `offset` makes up for that 1, but for layers
    without load.
    """

    def __init__(self, instance: JointInstance, weight: float, worst: bool) -> None:
        self.instance, self.weight = instance, weight
        self.worst = worst and instance.workloads > 1
        self.hop = self._hop()
        per_workload = 1 if self.worst else instance.workloads
        self.load = instance.relative_load * ((1 - weight) / instance.layers / per_workload)
        self.unit = (1 - weight) / instance.layers / per_workload or 1.0
        self.distance = instance.distance
        empty = (instance.load.sum(axis=2) == 0).mean(axis=1)
        self.offset = (1 - weight) * (empty - 1) / per_workload

    def together(self, values: Floats) -> Floats:
        """The objective's part of values [scenario or workload, ...]: the largest, or the sum of values divided already."""
        return values.max(axis=0) if self.worst else values.sum(axis=0)

    def _hop(self) -> Floats:
        share = self.instance.transition_share
        share = share if self.worst else share.mean(axis=0, keepdims=True)
        return share * (self.weight / self.instance.random_hop_cost_share)

    def least_affinity(self, stop: Stop = never) -> float:
        """Lower limit of the hop cost share over the workloads."""
        return least_hop_cost_share(self.instance, self.worst, stop)

    def limit(self, stop: Stop = never) -> float:
        """A lower limit of the objective: each of the two figures at the least it can be on its own."""
        hops = self.least_affinity(stop) if self.weight > 0 else 0.0
        imbalance = least_imbalance(self.instance, self.worst) if self.weight < 1 else 0.0
        return self.weight * hops / self.instance.random_hop_cost_share + (1 - self.weight) * imbalance

    def objective(self, gpu_of_expert: Ints) -> float:
        """The objective of any placement int64[layer, expert], computed from nothing but the instance."""
        figures = self.instance.figures(gpu_of_expert)
        aggregate = np.max if self.worst else np.mean
        hops = float(aggregate(figures.hop_cost_share)) / self.instance.random_hop_cost_share
        return self.weight * hops + (1 - self.weight) * float(aggregate(figures.imbalance))


class JointState:
    """A placement, its cost tables and GPU loads, kept up to date swap by swap.

    With `start` int64[layer, expert] no swap may put more than `max_moves` (layer, expert) pairs elsewhere than there.

    place: int64[layer, expert]
    cost: float64[scenario, layer, expert, gpu], cost of hops to and from an expert if it were on a GPU
    gpu_load, peak: float64[workload, layer, gpu] and its maximum over GPUs
    journal: the swaps made since it was last cleared; a swap is its own inverse, so `undo` replays them backwards
    linked: True if the cost of a swap depends on the neighbouring layers, so that exchanges in several at once can gain
    """

    linked = True

    def __init__(self, terms: JointTerms, place: Ints, start: Ints | None = None, max_moves: int | None = None) -> None:
        self.terms, self.start, self.max_moves = terms, start, max_moves
        self.breadth = BROAD
        self.gpus, self.layers = terms.instance.gpus, terms.instance.layers
        self.experts = terms.instance.experts
        self.reset(place)

    def reset(self, place: Ints) -> None:
        """Take over another placement and compute all tables afresh."""
        terms = self.terms
        self.place = place.copy()
        self.journal: list[tuple[int, int, int]] = []
        self._reset_hops()
        self.gpu_load = np.einsum("wle,leg->wlg", terms.load, (place[:, :, None] == np.arange(self.gpus)) * 1.0)
        self.peak = self.gpu_load.max(axis=2)
        self.peaks = self.peak.sum(axis=1) + terms.offset
        self.moves = int((place != self.start).sum()) if self.start is not None else 0

    def _reset_hops(self) -> None:
        terms, place = self.terms, self.place
        to = terms.distance[place]  # float64[layer, expert, gpu]
        self.cost = np.zeros((len(terms.hop), self.layers, self.experts, self.gpus))
        self.cost[:, :-1] += terms.hop @ to[1:]
        inward = terms.hop.transpose(0, 1, 3, 2) @ to[:-1]
        self.cost[:, 1:] += inward
        self.hops = np.take_along_axis(inward, place[None, 1:, :, None], axis=3).sum(axis=(1, 2, 3))

    @property
    def objective(self) -> float:
        return float(self.terms.together(self.hops) + self.terms.together(self.peaks))

    def swap_gains(self, layer: int, price: float = 0.0) -> Floats:
        """float64[expert, expert]: change of the guiding objective (negative: better) when two experts swap GPUs.

        price: added per (layer, expert) pair that leaves its GPU in `start`. Swaps inside a GPU and swaps that exceed
        max_moves are infinite.
        """
        terms, gpu = self.terms, self.place[layer]
        hops = self._hop_changes(layer)
        peaks = np.empty((len(terms.load), self.experts, self.experts))
        uneven = np.zeros((self.experts, self.experts))
        for workload, load in enumerate(terms.load[:, layer]):
            now = self.gpu_load[workload, layer]
            on = now[gpu]
            difference = load[:, None] - load
            mine, theirs = on[:, None] - difference, on + difference
            np.maximum(mine, theirs, out=peaks[workload])
            elsewhere = self._largest_elsewhere(now).take(gpu, axis=0).take(gpu, axis=1)
            np.maximum(peaks[workload], elsewhere, out=peaks[workload])
            peaks[workload] -= self.peak[workload, layer]
            theirs -= on[:, None]
            theirs *= difference
            uneven += theirs
        gain = self._change(hops, self.hops) + self._change(peaks, self.peaks)
        gain += (2 * EVENNESS / terms.unit / (len(terms.load) if terms.worst else 1)) * uneven
        gain[gpu[:, None] == gpu] = np.inf
        left = np.inf if self.max_moves is None else self.max_moves - self.moves
        if left < 2 or price:  # a swap moves two at most
            away = (gpu[None, :] != self.start[layer][:, None]).astype(np.int8)
            moved = away + away.T - away.diagonal()[:, None] - away.diagonal()  # between -2 and 2
            gain[moved > left] = np.inf
            gain += price * moved
        return gain

    def _hop_changes(self, layer: int) -> Floats:
        """float64[scenario, expert, expert]: change of `hops` when two experts of the layer swap GPUs."""
        there = self.cost[:, layer].take(self.place[layer], axis=2)
        there -= there.diagonal(axis1=1, axis2=2)[:, :, None].copy()
        return there + there.transpose(0, 2, 1)

    def swap(self, layer: int, first: int, second: int) -> None:
        """Swap the GPUs of two experts of a layer."""
        terms = self.terms
        here, there = int(self.place[layer, first]), int(self.place[layer, second])
        self._swap_hops(layer, first, second)
        difference = terms.load[:, layer, first] - terms.load[:, layer, second]
        self.gpu_load[:, layer, here] -= difference
        self.gpu_load[:, layer, there] += difference
        peak = self.gpu_load[:, layer].max(axis=1)
        self.peaks += peak - self.peak[:, layer]
        self.peak[:, layer] = peak
        if self.start is not None:
            home = self.start[layer]
            self.moves += int(there != home[first]) - int(here != home[first])
            self.moves += int(here != home[second]) - int(there != home[second])
        self.place[layer, first], self.place[layer, second] = there, here
        self.journal.append((layer, first, second))

    def _swap_hops(self, layer: int, first: int, second: int) -> None:
        """Bring `hops`, and the tables that their changes are read from, up to date with a swap to come."""
        terms = self.terms
        here, there = int(self.place[layer, first]), int(self.place[layer, second])
        cost = self.cost[:, layer]
        self.hops += cost[:, first, there] - cost[:, first, here] + cost[:, second, here] - cost[:, second, there]
        shift = terms.distance[there] - terms.distance[here]
        if layer + 1 < self.layers:
            tokens = terms.hop[:, layer, first] - terms.hop[:, layer, second]
            self.cost[:, layer + 1] += tokens[:, :, None] * shift
        if layer:
            tokens = terms.hop[:, layer - 1, :, first] - terms.hop[:, layer - 1, :, second]
            self.cost[:, layer - 1] += tokens[:, :, None] * shift

    def potential(self, layer: int) -> float:
        """The value that `swap_gains` of the layer are changes of, but for the part of other layers."""
        terms = self.terms
        share = EVENNESS / terms.unit / (len(terms.load) if terms.worst else 1)
        value = share * float(np.square(self.gpu_load[:, layer]).sum())
        for sums in (self.hops, self.peaks):
            if terms.worst:
                value += (1 - self.breadth) * float(sums.max()) + self.breadth * float(sums.mean())
            else:
                value += float(sums.sum())
        return value

    def undo(self, mark: int = 0) -> None:
        """Take back all but the first `mark` swaps of the journal."""
        for layer, first, second in reversed(self.journal[mark:]):
            self.swap(layer, first, second)
        del self.journal[mark:]

    @property
    def legal(self) -> bool:
        """True if no more pairs moved than may."""
        return self.max_moves is None or self.moves <= self.max_moves

    def guide(self, sums: Floats) -> Floats:
        """float64[scenario]: weight of each where a linear objective is needed; the worst counts half and more."""
        if not self.terms.worst:
            return np.ones(len(sums))
        share = np.full(len(sums), 0.5 / len(sums))
        share[sums.argmax()] += 0.5
        return share

    def _change(self, change: Floats, now: Floats) -> Floats:
        """Change of the guiding objective for changes [scenario, ...] of sums float64[scenario]."""
        if not self.terms.worst:
            return change[0] if len(change) == 1 else change.sum(axis=0)
        after = (change + now[:, None, None]).max(axis=0) - now.max()
        return (1 - self.breadth) * after + self.breadth * change.mean(axis=0)

    @staticmethod
    def _largest_elsewhere(load: Floats) -> Floats:
        """float64[gpu, gpu]: the largest of load float64[gpu] outside of a pair of GPUs; 0 where no other is left."""
        order = np.argsort(-load, kind="stable")[:3]
        value = np.append(load[order], [0.0, 0.0])
        largest = np.full((len(load), len(load)), value[0])
        largest[order[0], :] = largest[:, order[0]] = value[1]
        if len(order) > 1:
            largest[order[0], order[1]] = largest[order[1], order[0]] = value[2]
        return largest
