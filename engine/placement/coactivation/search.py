"""Tabu search over swaps of two experts, with kicks, compiled (numba).

Every step makes the best swap there is, better or not, and then bars its two experts for a few steps, unless a
swap leads to the best placement so far (Glover, ORSA Journal on Computing 1(3), 1989). Without progress for a while it goes
on from a few blind swaps of the best one. Load above the cap has a price, which rises while there is some and falls while
there is none, so that the search walks along the cap from both sides. The busiest group may count on top of the sum of all
rows: as an 8-norm, which every swap changes in O(1).

The savings of every swap are kept up to date from swap to swap. A group costs the price of each net that touches it. If
expert i leaves group g for h and j comes in its place, g loses the nets in which i was alone there, unless they hold j too,
and gains the nets of j that did not touch it. Three tables give that in O(1); a swap changes them only where nets of i or j
pass between none, one and two experts in g or h.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.placement.coactivation.instance import Nets


class Tables(NamedTuple):
    """A partition with the prices of nets that a swap changes.

    group: int64[expert]
    count: int16[net, group], experts of a net there
    alone: int32[expert], price of the nets in which it is the only one of its group
    shared: int32[expert, other], price of those of them that hold the other one too
    joining: int32[group, expert], price of the nets of the expert that do not touch the group
    """

    group: np.ndarray
    count: np.ndarray
    alone: np.ndarray
    shared: np.ndarray
    joining: np.ndarray


@njit(cache=True, nogil=True)
def tables_of(nets: Nets, group: np.ndarray) -> Tables:
    """The tables of a partition group int64[expert], of which they keep a copy."""
    member, net_price = nets.member, nets.price
    total, groups = net_price.shape
    experts = len(group)
    count = np.zeros((total, groups), dtype=np.int16)
    alone = np.zeros(experts, dtype=np.int32)
    shared = np.zeros((experts, experts), dtype=np.int32)
    joining = np.zeros((groups, experts), dtype=np.int32)
    for net in range(total):
        for at in range(member.shape[1]):
            expert = member[net, at]
            if expert >= 0:
                count[net, group[expert]] += 1
        for at in range(member.shape[1]):
            expert = member[net, at]
            if expert >= 0 and count[net, group[expert]] == 1:
                _alone(member, alone, shared, net, expert, net_price[net, group[expert]])
        for other in range(groups):
            if count[net, other] == 0:
                _joins(member, joining, net, other, net_price[net, other])
    return Tables(group.copy(), count, alone, shared, joining)


@njit(cache=True, nogil=True)
def swap(tables: Tables, nets: Nets, i: int, j: int) -> None:
    """Experts i and j, of different groups, change places."""
    group, count, alone, shared = tables.group, tables.count, tables.alone, tables.shared
    member, price, first, net_of = nets.member, nets.price, nets.first, nets.net
    g, h = group[i], group[j]
    # An expert on its way is in no group, so that it is not taken for the one that stays behind.
    group[i] = -1
    for at in range(first[i], first[i + 1]):
        net = net_of[at]
        if not _holds(member, net, j):
            _move(tables, member, price, net, g, h, i)
            continue
        # Who is there changes, not how many.
        if count[net, g] == 1:
            _alone(member, alone, shared, net, i, -price[net, g])
            _alone(member, alone, shared, net, j, price[net, g])
        if count[net, h] == 1:
            _alone(member, alone, shared, net, j, -price[net, h])
            _alone(member, alone, shared, net, i, price[net, h])
    group[i], group[j] = h, -1
    for at in range(first[j], first[j + 1]):
        if not _holds(member, net_of[at], i):
            _move(tables, member, price, net_of[at], h, g, j)
    group[j] = g


@njit(cache=True, nogil=True)
def _move(tables, member, price, net, source, target, expert):
    """An expert of the net goes from one group to another, where none that it changes places with is in the net."""
    group, count, alone, shared, joining = tables.group, tables.count, tables.alone, tables.shared, tables.joining
    stay, there = count[net, source] - 1, count[net, target]
    count[net, source], count[net, target] = stay, there + 1
    before = after = 0  # the net's part in `alone` of the expert
    if stay == 0:
        before = price[net, source]
        _joins(member, joining, net, source, before)
    elif stay == 1:
        _alone(member, alone, shared, net, _member_in(member, group, net, source), price[net, source])
    if there == 0:
        after = price[net, target]
        _joins(member, joining, net, target, -after)
    elif there == 1:
        _alone(member, alone, shared, net, _member_in(member, group, net, target), -price[net, target])
    if after != before:
        _alone(member, alone, shared, net, expert, after - before)


@njit(cache=True, nogil=True)
def _alone(member, alone, shared, net, expert, price):
    """The net's price joins, or with a minus leaves, those of the nets in which the expert is the only one of its group."""
    alone[expert] += price
    for at in range(member.shape[1]):
        other = member[net, at]
        if other < 0:
            break
        if other != expert:
            shared[expert, other] += price


@njit(cache=True, nogil=True)
def _joins(member, joining, net, group, price):
    """The net's price joins those of the nets that do not touch the group."""
    for at in range(member.shape[1]):
        expert = member[net, at]
        if expert < 0:
            break
        joining[group, expert] += price


@njit(cache=True, nogil=True)
def _holds(member, net, expert):
    for at in range(member.shape[1]):  # noqa: SIM110  (compiled: a generator would not be)
        if member[net, at] == expert:
            return True
    return False


@njit(cache=True, nogil=True)
def _member_in(member, group, net, own):
    """The first member that is in the group; there must be one."""
    for at in range(member.shape[1]):
        expert = member[net, at]
        if expert >= 0 and group[expert] == own:
            return expert
    return -1


SWING, PRICE_STEPS, LEAST_PRICE, MOST_PRICE = 1.3, 5, 1e-2, 1e6
"""The price of a token above the cap changes by this factor after so many steps on one side of it, within these limits."""


class Task(NamedTuple):
    """The limits and weights of a search.

    load: int64[expert] tokens
    group_size: GPUs of a group
    most_load: tokens a GPU may have
    port_weight: weight of the busiest group, times the number of groups, against the rows of all of them
    """

    load: np.ndarray
    gpus: int
    group_size: int
    most_load: int
    port_weight: float


class _State(NamedTuple):
    """A placement and its costs. place: int64[expert], GPUs; gpu_load: int64[gpu] tokens; rows: float64[group]."""

    tables: Tables
    place: np.ndarray
    gpu_load: np.ndarray
    rows: np.ndarray


@njit(cache=True, nogil=True)
def search(nets: Nets, task: Task, start: np.ndarray, best: np.ndarray, steps: int, seed: int, hurry: np.ndarray) -> np.ndarray:
    """The best placement gpu_of_expert int64[expert] within the cap that was met in so many steps from `start`, or `best`.

    start: int64[expert], within the cap or not
    best: int64[expert], within it
    hurry: bool[1], set by another thread to end
    """
    np.random.seed(seed)
    experts = len(start)
    at = _state(nets, task, best)
    lowest, best = _value(task, at.rows), best.copy()
    at = _state(nets, task, start)
    least_bar, patience, kicks = 1 + min(3, experts // 16), 2 * experts, max(2, experts // 16)
    barred = np.zeros(experts, dtype=np.int64)
    price, side, idle = 1.0, 0, 0
    for step in range(steps):
        if hurry[0]:
            break
        over = _over(task, at.gpu_load)
        if over == 0 and _value(task, at.rows) < lowest - 1e-9:
            lowest, idle = _value(task, at.rows), 0
            best[:] = at.place
        elif idle == patience:
            idle = 0
            at = _kicked(nets, task, best, kicks)
            over = _over(task, at.gpu_load)
        idle += 1
        side = max(side, 0) + 1 if over else min(side, 0) - 1
        if side == PRICE_STEPS or side == -PRICE_STEPS:
            price = min(max(price * (SWING if over else 1 / SWING), LEAST_PRICE), MOST_PRICE)
            side = 0
        i, j = _best_swap(task, at, barred, step, price, over, lowest)
        if i >= 0:
            _make(nets, task, at, i, j)
            barred[i] = step + least_bar + np.random.randint(least_bar + 2)
            barred[j] = step + least_bar + np.random.randint(least_bar + 2)
    if _over(task, at.gpu_load) == 0 and _value(task, at.rows) < lowest:
        best[:] = at.place
    return best


@njit(cache=True, nogil=True)
def _best_swap(
    task: Task, at: _State, barred: np.ndarray, step: int, price: float, over: int, lowest: float
) -> tuple[int, int]:
    """The two experts of the cheapest swap among those allowed, -1 and -1 if none is."""
    group, alone, shared, joining = at.tables.group, at.tables.alone, at.tables.shared, at.tables.joining
    load, gpu_load, most, rows = task.load, at.gpu_load, task.most_load, at.rows
    capped, ported = most < gpu_load.sum(), task.port_weight > 0
    scale, unit, eighths = _scaled(task, rows)
    total, port = rows.sum(), unit * eighths**0.125
    # The norm's slope in each group's rows. It is convex: a swap changes it by no less than this tells.
    slope = port / max(eighths, 1e-300) / scale * (rows / scale) ** 7
    least, first, second = np.inf, -1, -1
    for i in range(len(group)):
        g = group[i]
        joining_g, shared_i = joining[g], shared[i]
        for j in range(i + 1, len(group)):
            h = group[j]
            if g == h and (over == 0 or at.place[i] == at.place[j]):
                continue
            change_g = change_h = 0
            if g != h:
                change_g = joining_g[j] - alone[i] + shared_i[j]
                change_h = joining[h, i] - alone[j] + shared[j, i]
            # At most all load over the cap can be taken away.
            cost, left = float(change_g + change_h), 0
            floor = cost - price * over
            if ported:
                floor += slope[g] * change_g + slope[h] * change_h
            if floor >= least:
                continue
            if capped:
                p, q, more = at.place[i], at.place[j], load[j] - load[i]
                left = over - max(0, gpu_load[p] - most) - max(0, gpu_load[q] - most)
                left += max(0, gpu_load[p] + more - most) + max(0, gpu_load[q] - more - most)
                cost += price * (left - over)
            value = total + change_g + change_h + port
            if ported and g != h:
                moved = eighths - (rows[g] / scale) ** 8 - (rows[h] / scale) ** 8
                moved += ((rows[g] + change_g) / scale) ** 8 + ((rows[h] + change_h) / scale) ** 8
                norm = unit * max(moved, 0.0) ** 0.125
                cost += norm - port
                value += norm - port
            if cost < least and ((barred[i] <= step and barred[j] <= step) or (left == 0 and value < lowest - 1e-9)):
                least, first, second = cost, i, j
    return first, second


@njit(cache=True, nogil=True)
def _make(nets: Nets, task: Task, at: _State, i: int, j: int) -> None:
    """Swap two experts of different GPUs."""
    tables, g, h = at.tables, at.tables.group[i], at.tables.group[j]
    if g != h:
        at.rows[g] += tables.joining[g, j] - tables.alone[i] + tables.shared[i, j]
        at.rows[h] += tables.joining[h, i] - tables.alone[j] + tables.shared[j, i]
        swap(tables, nets, i, j)
    p, q, more = at.place[i], at.place[j], task.load[j] - task.load[i]
    at.gpu_load[p] += more
    at.gpu_load[q] -= more
    at.place[i], at.place[j] = q, p


@njit(cache=True, nogil=True)
def _kicked(nets: Nets, task: Task, place: np.ndarray, swaps: int) -> _State:
    """The state after so many blind swaps of a placement int64[expert]."""
    place = place.copy()
    for _ in range(swaps):
        i, j = np.random.randint(len(place)), np.random.randint(len(place))
        place[i], place[j] = place[j], place[i]
    return _state(nets, task, place)


@njit(cache=True, nogil=True)
def _state(nets: Nets, task: Task, place: np.ndarray) -> _State:
    tables = tables_of(nets, place // task.group_size)
    gpu_load = np.zeros(task.gpus, dtype=np.int64)
    for expert in range(len(place)):
        gpu_load[place[expert]] += task.load[expert]
    rows = np.zeros(nets.price.shape[1])
    for net in range(len(nets.price)):
        for group in range(len(rows)):
            if tables.count[net, group]:
                rows[group] += nets.price[net, group]
    return _State(tables, place.copy(), gpu_load, rows)


@njit(cache=True, nogil=True)
def _over(task: Task, gpu_load: np.ndarray) -> int:
    """Tokens above the cap."""
    over = 0
    for load in gpu_load:
        over += max(0, load - task.most_load)
    return over


@njit(cache=True, nogil=True)
def _value(task: Task, rows: np.ndarray) -> float:
    """Cost of the rows float64[group] with their busiest group."""
    _, unit, eighths = _scaled(task, rows)
    return rows.sum() + unit * eighths**0.125


@njit(cache=True, nogil=True)
def _scaled(task: Task, rows: np.ndarray) -> tuple[float, float, float]:
    """(scale, unit, sum of eighth powers of the rows in this scale): busy groups cost unit * sum ** (1 / 8)."""
    scale = max(rows.mean(), 1.0)
    eighths = 0.0
    for part in rows:
        eighths += (part / scale) ** 8
    return scale, task.port_weight * scale * len(rows) ** 0.875, eighths
