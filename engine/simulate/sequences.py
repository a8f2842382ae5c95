"""Senders that each work through a list of their own, one send at a time, compiled (numba).

A sender has one send under way, so it holds nobody up but itself: max-min fairness at a receiver is water-filling over the
rates of those that send to it, whatever happens elsewhere. Receivers are therefore simulated on their own, and an end or a
beginning costs as many steps as there are sends at that receiver instead of as many as there are in all.
"""

import heapq

import numpy as np
from numba import njit

from engine.simulate.fair_share import rate_at


@njit(cache=True, nogil=True)
def run(
    source: np.ndarray,
    sink: np.ndarray,
    size: np.ndarray,
    latency: np.ndarray,
    follower: np.ndarray,
    capacity: np.ndarray,
    reached: np.ndarray,
    hurry: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(start, end), float64[send] seconds each, exact.

    source, sink: int64[send] ports, of which no source has two sends under way at once; size: float64[send] bytes; latency:
    float64[send] seconds; follower: int64[send], the send that begins when this one has ended, -1: none; a send that follows
    none begins at 0. capacity: float64[port] bytes/s; reached: `Network.share`; hurry: bool[1], which another thread may set
    meanwhile: then some ends are nan, for this cannot be hurried, only given up.
    """
    sends = len(size)
    start, end, left, rate = np.zeros(sends), np.full(sends, np.nan), size.copy(), np.zeros(sends)
    follows = np.zeros(sends, dtype=np.bool_)
    follows[follower[follower >= 0]] = True
    # The sends that a receiver has under way are a list: its newest, and of every send the one before and after it.
    newest, older, newer = np.full(len(capacity), -1), np.full(sends, -1), np.full(sends, -1)
    since, version = np.zeros(len(capacity)), np.zeros(len(capacity), dtype=np.int64)
    # (moment, send that arrives or -1, receiver at which a send ends, its version when that was known)
    events = [(latency[send], send, sink[send], 0) for send in range(sends) if not follows[send]]
    heapq.heapify(events)
    while len(events) and not hurry[0]:
        now, arriving, port, known = heapq.heappop(events)
        if arriving < 0 and known != version[port]:
            continue
        send = newest[port]
        while send >= 0:
            ends = since[port] + left[send] / rate[send]
            left[send] -= rate[send] * (now - since[port])
            following = older[send]
            if arriving < 0 and ends <= now:
                end[send] = now
                if newer[send] >= 0:
                    older[newer[send]] = older[send]
                else:
                    newest[port] = older[send]
                if older[send] >= 0:
                    newer[older[send]] = newer[send]
                if follower[send] >= 0:
                    after = follower[send]
                    start[after] = now
                    heapq.heappush(events, (now + latency[after], after, sink[after], 0))
            send = following
        if arriving >= 0:
            older[arriving], newer[arriving] = newest[port], -1
            if newest[port] >= 0:
                newer[newest[port]] = arriving
            newest[port] = arriving
        since[port] = now
        version[port] += 1
        if newest[port] >= 0:
            until = now + _fill(newest[port], older, source, left, rate, capacity, port, reached)
            heapq.heappush(events, (until, -1, port, version[port]))
    return start, end


@njit(cache=True, nogil=True)
def _fill(newest, older, source, left, rate, capacity, sink, reached):
    """Write the rates of the sends at a receiver; returns the seconds until the first of them ends."""
    open_sends = 0
    send = newest
    while send >= 0:
        rate[send] = np.inf
        open_sends += 1
        send = older[send]
    room = rate_at(sink, open_sends, capacity, reached)
    while open_sends:
        share, slower = room / open_sends, 0
        send = newest
        while send >= 0:
            if rate[send] == np.inf and capacity[source[send]] <= share:
                rate[send] = capacity[source[send]]
                room -= rate[send]
                slower += 1
            send = older[send]
        if not slower:
            break
        open_sends -= slower
    first = np.inf
    send = newest
    while send >= 0:
        if rate[send] == np.inf:
            rate[send] = share
        first = min(first, left[send] / rate[send])
        send = older[send]
    return first
