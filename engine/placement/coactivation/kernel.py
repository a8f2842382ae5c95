"""Experts on GPUs so that the experts of a token are on few GPUs (or nodes), with a proven bound.

Where one row a destination GPU is sent for a token, or one a destination node, traffic is the number of different GPUs (nodes)
among its experts. Experts that fire together and live together lower it: a hypergraph partition with equal parts. Where a row
serves a node, experts go to nodes first, then inside each node to the GPUs, for few rows over its links.

Layers are independent, and each is placed in steps (`Layer`): a start or, for few experts, the exact answer (`exact`), tabu
searches with exact gains (`search`), GPUs inside nodes, and a semidefinite bound (`relaxation`). The busiest GPU's load may be
capped: a search under a cap begins at the least load of the busiest GPU, which also tells if the cap can be kept. Names of
GPUs matter through the tokens that are sent from them.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial

import numpy as np

from engine.placement.baselines import heaviest_first, linear_assignment
from engine.placement.coactivation.copies import served
from engine.placement.coactivation.exact import MOST_WORK, fewest_rows, work_of
from engine.placement.coactivation.instance import CoactivationInstance, Nets, nets_between, nets_inside
from engine.placement.coactivation.relaxation import Relaxation, least_seconds
from engine.placement.coactivation.search import Task, search
from engine.placement.replication import ReplicationInstance, replicate
from engine.result import Bools, Ints, Limits, Result, Status, Stop, never, result_of


def balanced(load: Ints, gpus: int, most_load: int, seconds: float, seed: int, hurry: Bools) -> tuple[Ints, int]:
    """(gpu_of_expert int64[expert], equally many on each GPU; tokens that the busiest GPU has in any placement at least).

    load: int64[expert] tokens
    most_load: tokens of the busiest GPU, kept wherever that was found possible
    seconds: work of the proof
    hurry: bool[1], set by another thread to end
    """
    place = heaviest_first(load, np.full(gpus, len(load) // gpus))
    if np.bincount(place, weights=load).max() <= most_load:
        return place, 0
    # Slots for one replica of each expert leave only the balance of replication.
    instance = ReplicationInstance(load[None, None].astype(np.float64), len(load), gpus)
    result = replicate(instance, Limits(seconds, wall=math.inf, seed=seed), lambda: bool(hurry[0]))
    place[result.solution[0]] = np.arange(len(load)) // (len(load) // gpus)
    return place, math.ceil(load.sum() / gpus / result.bound * (1 - 1e-9))


def grouped(nets: Nets) -> Ints:
    """The group of every expert, as many in each: int64[expert].

    Group by group: the free expert that fires with the other free ones most often, then always the one that fires most often
    with those of the group. A pair counts by the tokens that go to both, over their further experts.
    """
    experts = nets.experts
    together = np.zeros((experts + 1, experts + 1))
    sizes = (nets.member >= 0).sum(axis=1)
    weight = nets.price.max(axis=1) / np.maximum(sizes - 1, 1)
    for own in nets.member.T:
        for other in nets.member.T:
            np.add.at(together, (own, other), weight)
    together = together[:experts, :experts]  # without "none", which is last
    np.fill_diagonal(together, 0.0)
    group, free = np.empty(experts, dtype=np.int64), np.ones(experts, dtype=bool)
    with_free = together.sum(axis=1)
    for index in range(nets.groups):
        pull = with_free.copy()
        for held in range(experts // nets.groups):
            expert = np.where(free, pull, -1.0).argmax()
            pull = together[expert].copy() if held == 0 else pull + together[expert]
            group[expert], free[expert] = index, False
            with_free -= together[expert]
    return group


PER_SWAP, PER_MEMBER = 3.5e-9, 9e-9
"""Seconds of looking at a swap, and of updating a member of a net, on an ordinary core."""
MOST_STEPS = 40
"""Steps of one search for each expert at most; more gained less than 0.1 % of the rows wherever tried."""
EXACT_PER_SECOND = 3e8
"""Steps of the exact method a second."""
EVALUATE_EVERY, CONVERGED = 20, 3e-4
"""Steps of a bound between two values, and the relative gain between two values below which it ends."""
SEARCH_SHARE, BOUND_SHARE, SEARCH_CAP, BOUND_CAP = 0.4, 0.3, 0.6, 0.97
"""Work of each step as a part of the time limit by its own estimate for one core, and the part at which the clock ends it."""
FIRST_BOUND_SHARE = 0.1
"""Work after which every layer has a bound."""
SEARCHES, NODES_SHARE = 4, 0.2
"""Searches of a layer, between which the groups get new names; part of the search's work for GPUs inside nodes."""
BALANCE_SHARE, BALANCE_CAP = 0.2, 0.5
"""Part of the search's work, and of its time, for the least load where the cap is hard to keep."""
POLL = 0.05
"""Seconds between two questions whether to stop."""


class Layer:
    """The placement of a layer so far.

    In all methods seconds is work by its own estimate, and hurry, bool[1], set by another thread, ends it.

    place: int64[expert], GPUs
    bound: rows that placements with no more load on a GPU than allowed send at least
    hopeless: True if it is proven that none keeps the cap
    """

    def __init__(self, instance: CoactivationInstance, layer: int, port_weight: float) -> None:
        self.instance, self.layer = instance, layer
        load = instance.load(layer)
        self.task = Task(load, instance.gpus, instance.group_size, instance.most_load(layer), port_weight)
        self.capped = instance.cap is not None and instance.gpus > 1 and bool(load.any())
        slots = np.full(instance.gpus, instance.expert_count // instance.gpus)
        blocks = linear_assignment(instance.expert_count, slots)
        self.place = heaviest_first(load, slots) if self.capped else blocks
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

    def begin(self, seconds: float, exact: bool, hurry: Bools) -> None:
        """The exact answer where it is cheap and asked for; else the starts of a search."""
        if hurry[0]:
            return
        self.nets = nets_between(self.instance, self.layer)
        # Rows without which the tokens' experts do not fit: every group but the home takes as many as it has room for.
        chosen = np.sort(self.instance.experts[self.layer], axis=1)
        again = (chosen[:, 1:] == chosen[:, :-1]) & (chosen[:, 1:] >= 0)
        different = (chosen >= 0).sum(axis=1) - again.sum(axis=1)
        groups = -(-different // (self.instance.expert_count // self.instance.groups))
        self.bound = int(np.maximum(groups - (self.instance.source_gpu >= 0), 0).sum())
        work = work_of(self.nets.experts, self.nets.groups, self.instance.gpus)
        if exact and work <= min(MOST_WORK, EXACT_PER_SECOND * seconds):
            self.place, most = fewest_rows(self.nets, self.task, self.capped)
            self.bound, self.solved, self.hopeless = self.rows, True, most > self.task.most_load
        if not self.solved:
            order = np.argsort(grouped(self.nets), kind="stable")
            together = np.empty_like(order)
            together[order] = self.starts[0]
            self.starts.append(together)

    def balance(self, seconds: float, seed: int, hurry: Bools) -> None:
        """A start within the cap, or with as little load as can be found; the searches allow no more."""
        if self.capped and not self.keeps_cap and not self.solved and not hurry[0]:
            load, most = self.task.load, self.task.most_load
            self.place, least = balanced(load, self.instance.gpus, most, seconds, seed, hurry)
            self.hopeless = least > most
        self.task = self.task._replace(most_load=max(self.task.most_load, self._heaviest()))

    def search(self, seconds: float, seed: int, hurry: Bools) -> None:
        """Fewer rows: from experts that fire together the first time, from contiguous blocks the second, then from the best."""
        if self.solved or hurry[0] or self.nets is None:
            return
        start = self.starts.pop() if self.starts else self.place
        self.place = _searched(self.nets, self.task, start, self.place, seconds, seed, hurry)

    def arrange_nodes(self, seconds: float, seed: int, hurry: Bools) -> None:
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

    def tighten(self, seconds: float, hurry: Bools) -> None:
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


def _searched(nets: Nets, task: Task, start: Ints, best: Ints, seconds: float, seed: int, hurry: Bools) -> Ints:
    """gpu_of_expert int64[expert] of few rows within the cap, which `best` keeps; both starts are int64[expert]."""
    from scipy.optimize import linear_sum_assignment

    members = np.count_nonzero(nets.member >= 0)
    step = PER_SWAP * nets.experts**2 / 2 + PER_MEMBER * nets.member.shape[1] * 2 * members / nets.experts
    steps = min(int(seconds / step), MOST_STEPS * nets.experts)
    place = search(nets, task, start, best, steps, seed, hurry)
    # The same experts together, on the groups from which most of their tokens come.
    price = nets.touched(place // task.group_size).T.astype(np.float64) @ nets.price
    name = linear_sum_assignment(price)[1]
    return name[place // task.group_size] * task.group_size + place % task.group_size


@cache
def compile_ahead() -> None:
    """Run every compiled function once, with the types that it always has, before a clock starts.

    The machine code is kept next to the sources (numba's rule).
    """
    experts = np.array([[[0, 1], [2, 3], [1, 2]]])
    for exact in (True, False):
        instance = CoactivationInstance(experts, np.array([0, 1, 1]), 2, cap=2.0)
        layer = Layer(instance, 0, 1.0)
        hurry = np.zeros(1, dtype=bool)
        layer.begin(1.0, exact, hurry)
        layer.balance(1.0, 0, hurry)
        layer.search(1e-6, 0, hurry)
        layer.bound = 0
        layer.tighten(0.1, hurry)
    served(instance, 0, np.ones((4, 2), dtype=bool))


def coactivation(
    instance: CoactivationInstance, limits: Limits = Limits(), stop: Stop = never, *, port_weight: float = 0.0
) -> Result[Ints]:
    """Experts on GPUs so that tokens send few rows; `solution` is gpu_of_expert int64[layer, expert], E / P on each GPU.

    The objective is the sum of rows to other GPUs (nodes) over tokens and layers, the bound the least that placements within
    the cap send (in layers that cannot keep it: placements with no more load on a GPU than allowed to this one).

    limits: exact: prove small layers, and bound the others; with False all time goes into the search, and the bound counts
        the experts of a token that do not fit on a group with its others
    port_weight: weight in the search of the rows into the busiest GPU (node), times the number of those, against the rows of
        all: 0.3 costs hardly any rows under a cap

    Where the cap cannot be kept in a layer its busiest GPU has as little load as was found, and of such placements few rows.
    Status INFEASIBLE, with that solution, if it is proven that some layer cannot keep it; otherwise OPTIMAL if proven,
    CANCELLED if `stop` answered True, TIME_LIMIT if the clock ended the work or no placement within the cap was found, and
    FEASIBLE.
    """
    compile_ahead()
    clock = _Clock(limits.wall_seconds, stop)
    layers = [Layer(instance, layer, port_weight) for layer in range(instance.layers)]
    cap, share = (SEARCH_CAP, SEARCH_SHARE) if limits.exact else (BOUND_CAP, SEARCH_SHARE + BOUND_SHARE)
    seconds, seed = limits.seconds / len(layers) * share, limits.seed
    nodes = NODES_SHARE if layers[0].task.group_size > 1 else 0.0
    in_time = _of_all(layers, partial(Layer.begin, seconds=seconds, exact=limits.exact), partial(clock.over, cap))
    balance = partial(Layer.balance, seconds=BALANCE_SHARE * seconds, seed=seed)
    in_time = _of_all(layers, balance, partial(clock.over, BALANCE_CAP * cap)) and in_time
    # A little of every layer at a time, so that a deadline finds all of them improved.
    for index in range(SEARCHES):
        search = partial(Layer.search, seconds=(1 - nodes) * seconds / SEARCHES, seed=seed + index)
        in_time = _of_all(layers, search, partial(clock.over, (1 - nodes) * cap)) and in_time
    arrange = partial(Layer.arrange_nodes, seconds=nodes * seconds, seed=seed)
    in_time = _of_all(layers, arrange, partial(clock.over, cap)) and in_time
    if limits.exact:
        for share in FIRST_BOUND_SHARE, BOUND_SHARE - FIRST_BOUND_SHARE:
            tighten = partial(Layer.tighten, seconds=share * limits.seconds / len(layers))
            in_time = _of_all(layers, tighten, partial(clock.over, BOUND_CAP)) and in_time
    objective, least = sum(layer.rows for layer in layers), sum(layer.bound for layer in layers)
    kept = all(layer.keeps_cap for layer in layers)
    if any(layer.hopeless for layer in layers):
        status = Status.INFEASIBLE
    elif objective == least and kept:
        status = Status.OPTIMAL
    elif clock.cancelled:
        status = Status.CANCELLED
    else:
        status = Status.FEASIBLE if in_time and kept else Status.TIME_LIMIT
    options: dict[str, str | int | float | bool] = {"travel": instance.travel, "time_limit": limits.seconds}
    options |= {"exact": limits.exact, "port_weight": port_weight}
    options |= {} if instance.cap is None else {"cap": instance.cap}
    solution = np.array([layer.place for layer in layers])
    return result_of("coactivation", clock.start, status, float(objective), float(least), solution, options, limits.seed)


class _Clock:
    """Tells if work is to end, and why."""

    def __init__(self, time_limit: float, stop: Stop) -> None:
        self.start, self.time_limit, self.stop, self.cancelled = time.perf_counter(), time_limit, stop, False

    def over(self, share: float) -> bool:
        """True if so much of the time is over, or `stop` answered True."""
        self.cancelled = self.cancelled or self.stop()
        return self.cancelled or time.perf_counter() - self.start > share * self.time_limit


def _of_all(layers: Sequence[Layer], work: Callable[..., None], over: Callable[[], bool]) -> bool:
    """Do it to every layer, on all cores, and hurry them once `over`; True if all had the time that they wanted."""
    hurry = np.array([over()])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads:
        futures = [threads.submit(work, layer, hurry=hurry) for layer in layers]
        waiting = set(futures)
        while waiting:
            waiting = wait(waiting, POLL).not_done
            if waiting and over():
                hurry[0] = True
    for future in futures:
        future.result()  # raises the error of the work
    return not hurry[0]
