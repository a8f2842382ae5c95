"""Flows step by step with numpy: slow, plain, and nothing shared with the compiled ones that are held against it."""

import numpy as np

from engine.network import Network
from engine.simulate.flows import Flows


def run(network: Network, src: np.ndarray, dst: np.ndarray, size: np.ndarray, lane: np.ndarray) -> Flows:
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
        rate = fair_rates(out[active], into[active], reached(network, out[active], into[active]))
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


def reached(network: Network, out: np.ndarray, into: np.ndarray) -> np.ndarray:
    """float64[port] bytes/s that every port reaches with the flows that it has."""
    capacity = network.capacity.copy()
    for port, flows in enumerate(np.bincount(np.r_[out, into], minlength=len(capacity))):
        if flows:
            row = network.share[1 if port >= 2 * network.gpus else 0]
            capacity[port] *= row[flows - 1] if flows <= len(row) else row[-1]
    return capacity


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
