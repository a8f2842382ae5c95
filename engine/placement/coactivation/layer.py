"""The placement of one layer, made in steps: a start or the exact answer, searches, GPUs inside nodes, and what none goes
below."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from engine.placement.coactivation.balance import balanced, heaviest_first
from engine.placement.coactivation.exact import MOST_WORK, fewest_rows, work_of
from engine.placement.coactivation.grouping import grouped
from engine.placement.coactivation.instance import CoactivationInstance
from engine.placement.coactivation.nets import Nets, nets_between, nets_inside
from engine.placement.coactivation.relaxation import Relaxation, least_seconds
from engine.placement.coactivation.search import Task, search

PER_SWAP, PER_MEMBER = 3.5e-9, 9e-9
"""Seconds of looking at a swap, and of updating a member of a net, on an ordinary core."""
MOST_STEPS = 40
"""Steps of one search for each expert at most; more gained less than 0.1 % of the rows wherever tried."""
EXACT_PER_SECOND = 3e8
"""Steps of the exact method a second."""
EVALUATE_EVERY, CONVERGED = 20, 3e-4
"""Steps of a bound between two values, and the relative gain between two values below which it ends."""


class Layer:
    """The placement of a layer so far.

    place: int64[expert], GPUs; bound: rows that placements with no more load on a GPU than allowed send at least; hopeless:
    proven that none keeps the cap. In all methods seconds is work by its own estimate, and hurry, bool[1], set by another
    thread, ends it.
    """

    def __init__(self, instance: CoactivationInstance, layer: int, port_weight: float) -> None:
        self.instance, self.layer = instance, layer
        load = instance.load(layer)
        self.task = Task(load, instance.gpus, instance.group_size, instance.most_load(layer), port_weight)
        self.capped = instance.cap is not None and instance.gpus > 1 and bool(load.any())
        blocks = np.arange(instance.expert_count) // (instance.expert_count // instance.gpus)
        self.place = heaviest_first(load, instance.gpus) if self.capped else blocks
        self.starts = [blocks]
        self.nets: Nets | None = None
        self.bound, self.hopeless, self.solved = 0, False, instance.groups == 1
        self.relaxation: Relaxation | None = None
        self.converged = False

    @property
    def rows(self) -> int:
        """To other groups."""
        if self.nets is None:
            return self.instance.rows_of_layer(self.layer, self.place)
        return self.nets.rows(self.place // self.task.group_size)

    @property
    def keeps_cap(self) -> bool:
        return not self.capped or self._heaviest() <= self.instance.most_load(self.layer)

    def begin(self, seconds: float, exact: bool, hurry: NDArray[np.bool_]) -> None:
        """The exact answer where it is cheap and asked for; else what a search needs."""
        if hurry[0]:
            return
        self.nets, self.bound = nets_between(self.instance, self.layer), self._plain_bound()
        work = work_of(self.nets.experts, self.nets.groups, self.instance.gpus)
        if exact and work <= min(MOST_WORK, EXACT_PER_SECOND * seconds):
            self.place, most = fewest_rows(self.nets, self.task, self.capped)
            self.bound, self.solved, self.hopeless = self.rows, True, most > self.task.most_load
        if not self.solved:
            order = np.argsort(grouped(self.nets), kind="stable")
            together = np.empty_like(order)
            together[order] = self.starts[0]
            self.starts.append(together)

    def balance(self, seconds: float, seed: int, hurry: NDArray[np.bool_]) -> None:
        """A start within the cap, or with as little load as can be found; the searches allow no more."""
        if self.capped and not self.keeps_cap and not self.solved and not hurry[0]:
            load, most = self.task.load, self.task.most_load
            self.place, least = balanced(load, self.instance.gpus, most, seconds, seed, hurry)
            self.hopeless = least > most
        self.task = self.task._replace(most_load=max(self.task.most_load, self._heaviest()))

    def search(self, seconds: float, seed: int, hurry: NDArray[np.bool_]) -> None:
        """Fewer rows: from experts that fire together the first time, from contiguous blocks the second, then from the best."""
        if self.solved or hurry[0] or self.nets is None:
            return
        start = self.starts.pop() if self.starts else self.place
        self.place = _searched(self.nets, self.task, start, self.place, seconds, seed, hurry)

    def arrange_nodes(self, seconds: float, seed: int, hurry: NDArray[np.bool_]) -> None:
        """The experts of every node on its GPUs for few rows over its links, within the load that GPUs had."""
        size, gpus = self.instance.node_size, self.instance.gpus
        if self.task.group_size == 1:
            return
        for node in range(gpus // size):
            if hurry[0]:
                return
            here = np.flatnonzero(self.place // size == node)
            nets = nets_inside(self.instance, self.layer, here)
            inner = self.task._replace(load=self.task.load[here], gpus=size, group_size=1)
            start = self.place[here] % size
            place = _searched(nets, inner, start, start, seconds * size / gpus, seed + node, hurry)
            self.place[here] = node * size + place

    def tighten(self, seconds: float, hurry: NDArray[np.bool_]) -> None:
        """A better bound."""
        rows, instance = self.rows, self.instance
        if self.bound >= rows or self.converged or hurry[0]:
            return
        if self.relaxation is None and least_seconds(instance.expert_count) > seconds:
            return
        if self.relaxation is None:
            load = self.task.load / (self.task.most_load * self.task.group_size) if self.capped else None
            chosen, groups = instance.experts[self.layer], instance.groups
            self.relaxation = Relaxation(chosen, instance.home_group, groups, instance.expert_count, load)
        steps, before = int(seconds / self.relaxation.seconds_of_step), self.relaxation.limit
        for step in range(1, steps + 1):
            if hurry[0]:
                return
            self.relaxation.iterate()
            if step % EVALUATE_EVERY and step < steps:
                continue
            limit = self.relaxation.evaluate()
            # Rows are whole.
            self.bound = min(rows, max(self.bound, math.ceil(limit - 1e-6 * (1 + abs(limit)))))
            gained, before = limit - before, limit
            if self.bound == rows or (step % EVALUATE_EVERY == 0 and gained < CONVERGED * abs(limit)):
                self.converged = True
                return

    def _heaviest(self) -> int:
        return int(np.bincount(self.place, weights=self.task.load, minlength=self.task.gpus).max())

    def _plain_bound(self) -> int:
        """Rows without which the tokens' experts do not fit: every group but the home takes as many as it has room for."""
        chosen = np.sort(self.instance.experts[self.layer], axis=1)
        again = (chosen[:, 1:] == chosen[:, :-1]) & (chosen[:, 1:] >= 0)
        different = (chosen >= 0).sum(axis=1) - again.sum(axis=1)
        groups = -(-different // (self.instance.expert_count // self.instance.groups))
        return int(np.maximum(groups - (self.instance.source_gpu >= 0), 0).sum())


def _searched(
    nets: Nets,
    task: Task,
    start: NDArray[np.int64],
    best: NDArray[np.int64],
    seconds: float,
    seed: int,
    hurry: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """gpu_of_expert int64[expert] of few rows within the cap, which `best` keeps; both starts are int64[expert]."""
    members = np.count_nonzero(nets.member >= 0)
    step = PER_SWAP * nets.experts**2 / 2 + PER_MEMBER * nets.member.shape[1] * 2 * members / nets.experts
    steps = min(int(seconds / step), MOST_STEPS * nets.experts)
    place = search(nets, task, start, best, steps, seed, hurry)
    # The same experts together, on the groups from which most of their tokens come.
    price = nets.touched(place // task.group_size).T.astype(np.float64) @ nets.price
    name = linear_sum_assignment(price)[1]
    return name[place // task.group_size] * task.group_size + place % task.group_size
