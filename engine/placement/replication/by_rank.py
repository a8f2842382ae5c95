"""Replicas for engines in which ranks do not share copies equally: the nearest rules and the fixed one.

Every rank sends an expert's tokens to one copy, by the rule in `engine.placement.dispatch_rules`, so where copies stand decides
what they serve. With one copy in each node every rank has one near, and each serves its node; fewer in different nodes serve
equally in the mean, but by lot; a second copy in a node serves its own rank alone. The search therefore tries numbers of
experts that get a copy in every node, packs heaviest first, and exchanges slots of the busiest GPU with others under the very
choices that ranks make. Layers come in turn, because ranks draw for one after another from one sequence.

The bound holds for any division of tokens: no GPU can be left with less than the mean of all, nor with less than the heaviest
expert over the most copies that it may have.
"""

import time
from dataclasses import dataclass

import numba
import numpy as np

from engine.errors import InputError
from engine.placement.dispatch_rules import draw, drawn_numbers, fill_fixed, fill_near
from engine.result import Floats, Ints, Result, Status, Stop, never, result_of

RULES = {"nearest-static": 0, "nearest-dynamic": 1, "fixed": 2}
STARTS = 2
"""Packings of a layer that are improved: those that begin best."""
GOOD_ENOUGH = 1.002
"""Time of the busiest GPU over the ideal at which a layer is left alone."""
EXCHANGES = 400
"""Exchanges that are tried for a packing of 32 GPUs; in proportion fewer where one takes longer to weigh."""
TINY = 1e-9


@dataclass(frozen=True, eq=False)
class RankedInstance:
    """Layers of experts whose tokens are divided by rank.

    demand: float64[load, layer, rank, expert] token copies that a rank sends, of one or several workloads
    slots_of_gpu: int64[gpu]
    speed: float64[gpu], relative computing speed
    rule: one of RULES
    ranks_per_node: ranks of a node, so many in a row
    """

    demand: Floats
    slots_of_gpu: Ints
    speed: Floats
    rule: str
    ranks_per_node: int

    def __post_init__(self) -> None:
        demand, slots = np.asarray(self.demand, np.float64), np.asarray(self.slots_of_gpu)
        if demand.ndim != 4 or demand.size == 0 or not np.isfinite(demand).all() or demand.min() < 0:
            raise InputError("demand: wanted a table [load, layer, rank, expert] of finite values of at least 0, none empty")
        if slots.shape != (demand.shape[2],) or slots.min() < 0 or slots.sum() < demand.shape[3]:
            raise InputError(f"slots_of_gpu: wanted a number for each of the {demand.shape[2]} ranks, room for every expert")
        if slots.max() > demand.shape[3]:
            raise InputError(f"slots_of_gpu: a GPU has at most one slot for each of the {demand.shape[3]} experts")
        if self.rule not in RULES:
            raise InputError(f"rule: must be one of {', '.join(RULES)}, not '{self.rule}'")

    @property
    def bound(self) -> Floats:
        """float64[layer]: the time of the busiest GPU under the worst load, in units of the ideal, that nothing undercuts."""
        load = self.demand.sum(axis=2)
        total = np.maximum(load.sum(axis=2), TINY)
        copies = min(len(self.slots_of_gpu), int(self.slots_of_gpu.sum()) - load.shape[2] + 1)
        fastest = np.sort(self.speed)[::-1][:copies].sum()
        return np.maximum(1.0, (load.max(axis=2) / fastest / (total / self.speed.sum())).max(axis=0))


def replicate_by_rank(instance: RankedInstance, seed: int = 0, stop: Stop = never) -> Result:
    """Slots for every layer: solution int64[layer, slot], GPU after GPU; objective and bound are the balancedness of the worst
    layer and load, the ideal time over that of the busiest GPU."""
    demand, rng = np.ascontiguousarray(instance.demand, np.float64), np.random.default_rng(seed)
    started, (layers, ranks) = time.perf_counter(), demand.shape[1:3]
    slots_of_gpu = np.asarray(instance.slots_of_gpu, np.int64)
    used, numbers = np.zeros(ranks, dtype=np.int64), drawn_numbers()
    rows, worst = [], np.empty(layers)
    bound = instance.bound
    settings = RULES[instance.rule], min(instance.ranks_per_node, ranks)
    for layer in range(layers):
        here = np.ascontiguousarray(demand[:, layer])
        unit = np.maximum(here.sum(axis=(1, 2)), TINY) / instance.speed.sum()
        here /= unit[:, None, None]
        starts = []
        for count in _counts(here.sum(axis=1).max(axis=0), instance, stop):
            packed = np.full((ranks, int(slots_of_gpu.max())), -1, dtype=np.int64)
            if pack(here.sum(axis=1).mean(axis=0), count, slots_of_gpu, instance.speed, settings[1], packed):
                end, _ = weigh(packed, here, instance.speed, *settings, numbers, used)
                starts.append((end, len(starts), packed))
        best, best_time, best_used = None, np.inf, used
        for end, _, packed in sorted(starts)[:STARTS]:
            if not stop() and best_time > GOOD_ENOUGH * bound[layer]:
                draws = rng.integers(0, 2**62, EXCHANGES)
                end = exchange(packed, here, instance.speed, *settings, numbers, used, draws, GOOD_ENOUGH * bound[layer])
            if end < best_time:
                best, best_time = packed, end
                best_used = weigh(packed, here, instance.speed, *settings, numbers, used)[1]
        used, worst[layer] = best_used, best_time
        rows.append(np.concatenate([row[:size] for row, size in zip(best, slots_of_gpu, strict=True)]))
    objective, limit = float(1 / worst.max()), float(1 / bound.max())
    status = Status.OPTIMAL if objective >= limit * (1 - 1e-9) else Status.FEASIBLE
    options = {"rule": instance.rule, "ranks_per_node": instance.ranks_per_node}
    return result_of("replicate-by-rank", started, status, objective, limit, np.array(rows), options, seed)


def _counts(load: Floats, instance: RankedInstance, stop: Stop) -> list[Ints]:
    """Numbers of copies, int64[expert] each, that are worth packing."""
    gpus, experts = len(instance.slots_of_gpu), len(load)
    spare = int(instance.slots_of_gpu.sum()) - experts
    nodes = -(-gpus // instance.ranks_per_node)
    load = np.maximum(load, TINY * max(load.mean(), TINY))
    if instance.rule == "fixed":
        even = [count for count in range(1, gpus + 1) if gpus % count == 0]
        return [
            _greedy(load, np.ones(experts, dtype=np.int64), spare, even),
            _greedy(load, np.ones(experts, np.int64), spare, None),
        ]
    every = nodes if nodes > 1 else gpus
    order, found = np.argsort(-load, kind="stable"), []
    for covered in range(min(spare // max(every - 1, 1), experts) + 1 if every > 1 else 1):
        count = np.ones(experts, dtype=np.int64)
        count[order[:covered]] = every
        found.append(_greedy(load, count, spare - covered * (every - 1), list(range(1, every + 1)), order[covered:]))
    return found


def _greedy(load: Floats, count: Ints, spare: int, steps: list[int] | None, among: Ints | None = None) -> Ints:
    """Spare slots one after another to the expert with most tokens a copy, whose copies go up by the steps; those that no step
    fits go on by one."""
    count = count.copy()
    open_to = np.zeros(len(load), dtype=bool)
    open_to[np.arange(len(load)) if among is None else among] = True
    while spare > 0:
        quotient = np.where(open_to, load / count, -1.0)
        expert = int(quotient.argmax())
        if quotient[expert] < 0:
            break
        larger = count[expert] + 1 if steps is None else next((step for step in steps if step > count[expert]), 0)
        if larger == 0 or larger - count[expert] > spare:
            open_to[expert] = False
            continue
        spare -= larger - count[expert]
        count[expert] = larger
    most = len(load)
    while spare > 0:  # what is left goes to experts with least tokens, where it changes least
        for expert in np.argsort(load / count, kind="stable")[:most]:
            if spare > 0:
                count[expert] += 1
                spare -= 1
    return count


@numba.njit(cache=True)
def pack(load: Floats, count: Ints, slots_of_gpu: Ints, speed: Floats, ranks_per_node: int, packed: Ints) -> bool:
    """Deal copies to GPUs, heaviest first, each to the GPU that ends soonest among those with room that do not have the expert,
    in a node with as few of its copies as any. False if no GPU is left for a copy. packed: int64[gpu, place], filled in."""
    gpus = len(speed)
    nodes = (gpus + ranks_per_node - 1) // ranks_per_node
    time, filled = np.zeros(gpus), np.zeros(gpus, dtype=np.int64)
    for expert in np.argsort(-(load / count)):
        in_node, taken = np.zeros(nodes, dtype=np.int64), np.zeros(gpus, dtype=np.bool_)
        for _ in range(count[expert]):
            chosen, fewest, soonest = -1, 1 << 60, np.inf
            for gpu in range(gpus):
                if taken[gpu] or filled[gpu] >= slots_of_gpu[gpu]:
                    continue
                here, end = in_node[gpu // ranks_per_node], time[gpu] + load[expert] / count[expert] / speed[gpu]
                if here < fewest or (here == fewest and end < soonest):
                    chosen, fewest, soonest = gpu, here, end
            if chosen < 0:
                return False
            packed[chosen, filled[chosen]] = expert
            filled[chosen] += 1
            time[chosen] = soonest
            taken[chosen] = True
            in_node[chosen // ranks_per_node] += 1
    return True


@numba.njit(cache=True)
def weigh(
    packed: Ints, demand: Floats, speed: Floats, rule: int, ranks_per_node: int, numbers: Ints, used: Ints
) -> tuple[float, Ints]:
    """(time of the busiest GPU under the worst load, int64[rank] numbers used up after the layer).

    packed: int64[gpu, place], -1 where there is no slot
    demand: float64[load, rank, expert]
    """
    time, after = times(packed, demand, speed, rule, ranks_per_node, numbers, used)
    return time.max(), after


@numba.njit(cache=True)
def times(
    packed: Ints, demand: Floats, speed: Floats, rule: int, ranks_per_node: int, numbers: Ints, used: Ints
) -> tuple[Floats, Ints]:
    """(float64[load, gpu] times, int64[rank] numbers used up), see `weigh`."""
    loads, ranks, experts = demand.shape
    copies, number = np.zeros(experts, dtype=np.int64), np.full(experts, -1, dtype=np.int64)
    for expert in packed.ravel():
        if expert >= 0:
            copies[expert] += 1
    several = np.flatnonzero(copies > 1)  # of the others no rank has a choice
    number[several] = np.arange(len(several))
    begin = np.zeros(len(several) + 1, dtype=np.int64)
    begin[1:] = np.cumsum(copies[several])
    gpus, place = np.empty(begin[-1], dtype=np.int16), begin[:-1].copy()
    time, total = np.zeros((loads, ranks)), demand.sum(axis=1)
    for gpu in range(ranks):
        for expert in packed[gpu]:
            if expert >= 0 and number[expert] >= 0:
                gpus[place[number[expert]]] = gpu
                place[number[expert]] += 1
            elif expert >= 0:
                time[:, gpu] += total[:, expert]
    table, after = np.empty((1, ranks, len(several)), dtype=np.int16), used.copy()
    if rule == 2:
        fill_fixed(begin, gpus, table)
    else:
        fill_near(begin, gpus, ranks_per_node, table)
        if rule == 0:
            draw(begin, gpus, numbers, after, table)
    for load in range(loads):
        for turn in range(len(several)):
            count = begin[turn + 1] - begin[turn]
            for rank in range(ranks):
                amount = demand[load, rank, several[turn]]
                if table[0, rank, turn] >= 0:
                    time[load, table[0, rank, turn]] += amount
                else:
                    for copy in range(begin[turn], begin[turn + 1]):
                        time[load, gpus[copy]] += amount / count
        time[load] /= speed
    return time, after


@numba.njit(cache=True)
def exchange(
    packed: Ints,
    demand: Floats,
    speed: Floats,
    rule: int,
    ranks_per_node: int,
    numbers: Ints,
    used: Ints,
    draws: Ints,
    enough: float,
) -> float:
    """Exchange slots of the busiest GPU with slots of others, drawn at random, whenever that makes the busiest one faster; the
    time that it ends with. packed: int64[gpu, place], changed in place; draws: int64[exchange]; enough: time to stop at."""
    time, _ = times(packed, demand, speed, rule, ranks_per_node, numbers, used)
    best = time.max()
    gpus, places = packed.shape
    for number in draws:
        if best <= enough:
            break
        busiest = time.argmax() % gpus
        mine, number = number % places, number // places
        other, number = number % gpus, number // gpus
        yours = number % places
        here, there = packed[busiest, mine], packed[other, yours]
        if other == busiest or here < 0 or there < 0 or here == there:
            continue
        if (packed[busiest] == there).any() or (packed[other] == here).any():
            continue
        packed[busiest, mine], packed[other, yours] = there, here
        tried, _ = times(packed, demand, speed, rule, ranks_per_node, numbers, used)
        if tried.max() < best * (1 - 1e-12):
            time, best = tried, tried.max()
        else:
            packed[busiest, mine], packed[other, yours] = here, there
    return best


def compile_ahead() -> None:
    """Run every compiled function once, with the types that it always has."""
    for rule in RULES:
        replicate_by_rank(RankedInstance(np.ones((1, 1, 4, 4)), np.full(4, 2), np.ones(4), rule, 2))
