"""Flows that share ports, event by event in plain numpy."""

import numpy as np

from engine.network import Network, off_diagonal
from engine.plan import Schedule
from engine.plan.plan import replay
from engine.simulate.flows import Flows


def sends_of(mode: str, schedule: Schedule | None, traffic: np.ndarray) -> tuple[np.ndarray, ...]:
    """src, dst, bytes, lane and group of every send. traffic: float64[src, dst] bytes"""
    traffic = off_diagonal(traffic)
    if mode == "concurrent":
        src, dst = np.nonzero(traffic)
        return src, dst, traffic[src, dst], np.arange(len(src)), np.zeros(len(src))
    src, dst, size, phase = replay(schedule, traffic)
    return (src, dst, size, 0 * src, phase) if mode == "matched" else (src, dst, size, src, np.arange(len(src)))


def plain_flows(network: Network, src, dst, size, lane, group, release: float | np.ndarray = 0.0) -> Flows:
    """Lanes run side by side; in a lane a group of sends starts when all of the group before it have ended.

    src, dst, size, lane, group: a value a send; release: seconds at which the first group of a lane starts
    """
    over_links, gpus = network.linked[src, dst], network.gpus
    out, into = src + 2 * gpus * over_links, dst + gpus + 2 * gpus * over_links
    latency, left = np.where(over_links, network.link_latency[src], network.latency), size.astype(np.float64)
    start, end, ready = (np.full(len(src), np.inf) for _ in range(3))
    now, release = 0.0, np.broadcast_to(release, len(src))
    groups: dict[int, list[np.ndarray]] = {}
    for name in np.unique(lane):
        own = np.flatnonzero(lane == name)
        groups[name] = [own[group[own] == step] for step in np.unique(group[own])]

    def begin(name: int, at: float) -> None:
        if groups[name]:
            start[groups[name][0]] = at
            ready[groups[name][0]] = at + latency[groups[name][0]]

    for name in groups:
        begin(name, release[groups[name][0][0]])
    while np.isinf(end).any():
        active = np.flatnonzero((ready <= now) & np.isinf(end))
        rate = fair_rates(out[active], into[active], reached(network, out[active], into[active]))
        step = min((left[active] / rate).min(initial=np.inf), ready[ready > now].min(initial=np.inf) - now)
        left[active] -= rate * step
        now += step
        # Flows within a billionth of their end are done: without this, round-off would add endless tiny steps.
        done = active[left[active] <= 1e-9 * size[active]]
        end[done] = now
        for name in np.unique(lane[done]):
            if np.isfinite(end[groups[name][0]]).all():
                groups[name].pop(0)
                begin(name, now)
    return Flows(src, dst, size, start, end)


def reached(network: Network, out: np.ndarray, into: np.ndarray) -> np.ndarray:
    """float64[port] bytes/s that every port reaches with the flows that it has."""
    capacity = np.concatenate([network.send, network.receive, network.link, network.link])
    for port, flows in enumerate(np.bincount(np.r_[out, into], minlength=len(capacity))):
        if flows:
            row = network.share[1 if port >= 2 * network.gpus else 0]
            capacity[port] *= row[min(flows, len(row)) - 1]
    return capacity


def fair_rates(out: np.ndarray, into: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """float64[flow]: max-min fair rates by progressive filling (Bertsekas & Gallager, Data Networks, §6.5.2).

    Not only the port with the lowest share of all is filled in a round, but every one with flows that have no lower share at
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
