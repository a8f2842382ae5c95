"""Flows on the network: how long an all-to-all takes when its sends follow a given order.

Flows that meet at a port share it max-min fairly, as concurrent TCP or RDMA streams do; every send starts with a latency
during which no byte moves.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.network import Network, off_diagonal
from engine.plan import OrderMode, Schedule
from engine.plan.replay import replay
from engine.simulate.two_tier import relayed_sends


@dataclass(frozen=True, eq=False)
class Flows:
    """The sends of one all-to-all as they ran. src, dst: int64[send]; bytes, start, end: float64[send], seconds from
    the start of the all-to-all; the latency lies inside [start, end]."""

    src: np.ndarray
    dst: np.ndarray
    bytes: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @property
    def seconds(self) -> float:
        return float(self.end.max(initial=0.0))


def all_to_all(mode: OrderMode, schedule: Schedule | None, traffic: np.ndarray, network: Network) -> Flows:
    """Run the traffic in the given order. traffic: float64[src, dst] bytes, diagonal ignored.

    The schedule may have been made for other traffic: its pairs keep their order and their split over phases, pairs it
    does not know follow at the end (see `replay`). In a two-tier order bytes go by relays, see
    `relayed_sends`.
    """
    traffic = off_diagonal(traffic)
    if mode == "concurrent":
        src, dst = np.nonzero(traffic)
        return _run(network, src, dst, traffic[src, dst], lane=np.arange(len(src)))
    if mode == "two-tier":
        return Flows(*relayed_sends(schedule, traffic, network))
    src, dst, size, phase = replay(schedule, traffic)
    if mode == "sequential":
        return _run(network, src, dst, size, lane=src)
    return _in_phases(network, src, dst, size, phase, paced=mode == "shared")


def _in_phases(
    network: Network, src: np.ndarray, dst: np.ndarray, size: np.ndarray, phase: np.ndarray, paced: bool
) -> Flows:
    """Phases one after another, each until its last send has ended."""
    start, end = np.zeros(len(src)), np.zeros(len(src))
    now = 0.0
    first = np.flatnonzero(np.r_[True, phase[1:] != phase[:-1]]) if len(phase) else np.empty(0, dtype=np.int64)
    for begin, stop in pairwise([*first, len(phase)]):
        here = slice(begin, stop)
        start[here] = now
        if paced:
            latency = network.start_up(src[here], dst[here]).max()
            end[here] = now + latency + network.fluid_seconds(src[here], dst[here], size[here])
        else:
            end[here] = now + _run(network, src[here], dst[here], size[here], np.arange(stop - begin)).end
        now = end[here].max()
    return Flows(src, dst, size, start, end)


def _run(network: Network, src: np.ndarray, dst: np.ndarray, size: np.ndarray, lane: np.ndarray) -> Flows:
    """Event-driven flows: those of one lane run one after another in the given order, lanes run side by side."""
    out, into = network.ports(src, dst)
    capacity, latency = network.capacity, network.start_up(src, dst)
    count = len(src)
    ports = np.concatenate([out, into])
    if len(np.unique(ports)) == 2 * count and len(np.unique(lane)) == count:  # nobody meets or waits for anybody
        end = latency + size / np.minimum(capacity[out], capacity[into])
        return Flows(src, dst, size, np.zeros(count), end)

    order = np.argsort(lane, kind="stable")
    follows = np.full(count, -1)
    same_lane = lane[order[1:]] == lane[order[:-1]]
    follows[order[:-1][same_lane]] = order[1:][same_lane]
    heads = order[np.r_[True, ~same_lane]]

    start, end = np.zeros(count), np.zeros(count)
    left = size.astype(np.float64).copy()
    ready_at = np.full(count, np.inf)
    ready_at[heads] = latency[heads]
    waiting, active = list(heads), np.empty(0, dtype=np.int64)
    now = 0.0
    while waiting or len(active):
        ripe = [flow for flow in waiting if ready_at[flow] <= now]
        if ripe:
            waiting = [flow for flow in waiting if ready_at[flow] > now]
            active = np.concatenate([active, ripe]).astype(np.int64)
        rate = fair_rates(out[active], into[active], capacity)
        step = (left[active] / rate).min(initial=np.inf)
        step = min(step, min((ready_at[flow] for flow in waiting), default=np.inf) - now)
        left[active] -= rate * step
        now += step
        # Flows within a billionth of their end are done: without this, round-off would add endless tiny steps.
        done = active[left[active] <= 1e-9 * size[active]]
        active = active[left[active] > 1e-9 * size[active]]
        end[done] = now
        for flow in follows[done][follows[done] >= 0]:
            start[flow] = now
            ready_at[flow] = now + latency[flow]
            waiting.append(flow)
    return Flows(src, dst, size, start, end)


def fair_rates(out: np.ndarray, into: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """float64[flow]: max-min fair rates by progressive filling (Bertsekas & Gallager, Data Networks, §6.5.2).

    Not only the port with the lowest share of all is filled in a round, but every one whose flows have no lower share at
    their other ends: the shares of the ports that stay open only grow, so nothing that is filled later can lower it.
    """
    rate = np.zeros(len(out))
    room, flows = capacity.copy(), np.arange(len(out))
    while len(flows):
        users = np.bincount(out, minlength=len(room)) + np.bincount(into, minlength=len(room))
        share = room / np.maximum(users, 1)
        at_out, at_into = share[out], share[into]
        level = np.minimum(at_out, at_into)
        full = np.ones(len(room), dtype=bool)
        full[out[at_out > level * (1 + 1e-12)]] = False
        full[into[at_into > level * (1 + 1e-12)]] = False
        fixed = full[out] | full[into]
        level = np.where(fixed, level, 0.0)
        rate[flows] = level
        room = np.maximum(room - np.bincount(out, level, len(room)) - np.bincount(into, level, len(room)), 0.0)
        out, into, flows = out[~fixed], into[~fixed], flows[~fixed]
    return rate
