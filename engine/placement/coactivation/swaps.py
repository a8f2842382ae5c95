"""What every swap of two experts saves, kept up to date from swap to swap, compiled (numba).

A group costs the price of each net that touches it. If expert i leaves group g for h and j comes in its place, g loses the
nets in which i was alone there, unless they hold j too, and gains the nets of j that did not touch it. Three tables give that
in O(1); a swap changes them only where nets of i or j pass between none, one and two experts in g or h.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.placement.coactivation.nets import Nets


class Tables(NamedTuple):
    """group: int64[expert]. count: int16[net, group], experts of a net there. Prices int32 of nets, summed: alone[expert]:
    those in which it is the only one of its group; shared[expert, other]: of these, those that hold the other one too;
    joining[group, expert]: those of the expert that do not touch the group."""

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
    before = after = 0  # what the net adds to `alone` of the expert
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
