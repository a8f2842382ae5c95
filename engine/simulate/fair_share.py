"""Sends that share ports max-min fairly, from event to event, compiled (numba).

A port's *level* is the rate that it gives to each send that it holds up; a send goes at the lower level of its two ports.
Levels come from progressive filling (Bertsekas & Gallager, Data Networks, §6.5.2), port by port instead of send by send: of
the two sides, senders and receivers, the one with the lowest share freezes all its ports whose share is at most the other
side's lowest, because what is left at a port that stays open only gives larger shares.

With a *window* of 0 every end of a send is an event: exact. With a larger one, sends that end within a window end together,
each at the moment that its rate tells; what their ports could have carried until the window's end is carried in the next one.
No port is ever ahead of what it can carry, so every bound holds; an end is late by a window at most, and windows shrink
towards the end, so that hardly anything of it is seen in the time of the whole.
"""

import numpy as np
from numba import njit

DONE = 1e-9
"""Part of its bytes that a send may lack when it has ended: without it, round-off would add endless tiny steps."""

LAST_STRETCH, NARROWEST = 0.05, 0.1
"""A window is at most this part of the time that is left, but not narrower than this part of its full width."""


@njit(cache=True, nogil=True)
def run(
    source: np.ndarray,
    sink: np.ndarray,
    size: np.ndarray,
    latency: np.ndarray,
    group: np.ndarray,
    follower: np.ndarray,
    exchange: np.ndarray,
    unfinished: np.ndarray,
    left: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    capacity: np.ndarray,
    now: float,
    awaited: int,
    window: float,
) -> float:
    """Advance from `now` until the exchange `awaited` has ended; returns the second up to which the network has been simulated.

    Of sends: source, sink (int64[send], ports, those of one side are never on the other), size (float64[send] bytes), latency
    (float64[send] seconds), group (int64[send], ascending) and exchange (int64[send]); left (bytes), start and end (seconds,
    nan: not yet) are written. A group's sends start together: those with a `start` are under way, the others begin when the
    group that has theirs as its `follower` (int64[group], -1: none) has ended. unfinished: int64[exchange] sends that have
    not ended, written. capacity: float64[port] bytes/s; window: seconds, see above.
    """
    groups, ports = len(follower), len(capacity)
    first = np.searchsorted(group, np.arange(groups + 1))
    pending = np.zeros(groups, dtype=np.int64)
    waiting = np.empty(len(size), dtype=np.int64)
    waits, moving = 0, 0
    for send in range(len(size)):
        if np.isnan(end[send]):
            pending[group[send]] += 1
            if not np.isnan(start[send]):
                waiting[waits] = send
                waits += 1
    # Of the sends that move, in the order of their sources: which they are, their ports, bytes left and predicted ends.
    active, at_source = np.empty(len(size), dtype=np.int64), np.empty(len(size), dtype=np.int64)
    at_sink = np.empty(len(size), dtype=np.int64)
    bytes_left, ends = np.empty(len(size)), np.empty(len(size))
    # Their sources in the order of their sinks, and where those of a port begin.
    sources_of_sink = np.empty(len(size), dtype=np.int64)
    source_first, sink_first = np.zeros(ports + 1, dtype=np.int64), np.zeros(ports + 1, dtype=np.int64)
    level, room, share, credit = np.empty(ports), np.empty(ports), np.empty(ports), np.zeros(ports)
    users = np.empty(ports, dtype=np.int64)
    next_arrival, latest, changed = -np.inf, np.inf, True
    while unfinished[awaited] > 0:
        if next_arrival <= now:
            next_arrival, still, before = np.inf, 0, moving
            for place in range(waits):
                send = waiting[place]
                if start[send] + latency[send] <= now:
                    active[moving] = send
                    moving += 1
                else:
                    waiting[still] = send
                    still += 1
                    next_arrival = min(next_arrival, start[send] + latency[send])
            waits = still
            if moving > before:
                for place in range(before):
                    left[active[place]] = bytes_left[place]
                active[:moving] = active[:moving][np.argsort(source[active[:moving]], kind="mergesort")]
                for place in range(moving):
                    send = active[place]
                    at_source[place], at_sink[place], bytes_left[place] = source[send], sink[send], left[send]
                changed = True
        if not moving:
            now = next_arrival
            continue
        if changed:
            _group(at_source[:moving], at_sink[:moving], source_first, sink_first, sources_of_sink)
            changed = False
        width = min(window, max(NARROWEST * window, LAST_STRETCH * (latest - now)), next_arrival - now)
        owed = False
        for port in range(ports):
            owed |= credit[port] > 0
            room[port] = capacity[port] + (credit[port] / width if credit[port] > 0 else 0.0)
            credit[port] = 0.0
        _fill(room, at_sink, source_first, sources_of_sink, sink_first, level, share, users)
        earliest, latest = np.inf, now
        for place in range(moving):
            ends[place] = now + bytes_left[place] / min(level[at_source[place]], level[at_sink[place]])
            earliest, latest = min(earliest, ends[place]), max(latest, ends[place])
        # Ports that carry what they owe do so for one window only.
        until = min(now + width if owed else max(earliest, now + width), next_arrival)
        still = 0
        for place in range(moving):
            send = active[place]
            rate = min(level[at_source[place]], level[at_sink[place]])
            bytes_left[place] -= rate * (until - now)
            # A send may be so short that its end is no later than now in floats: it has ended all the same.
            if ends[place] > until and bytes_left[place] > DONE * size[send]:
                active[still], at_source[still], at_sink[still] = send, at_source[place], at_sink[place]
                bytes_left[still] = bytes_left[place]
                still += 1
                continue
            end[send], left[send] = min(ends[place], until), 0.0
            if window > 0:
                credit[at_source[place]] += rate * (until - end[send])
                credit[at_sink[place]] += rate * (until - end[send])
            changed = True
            unfinished[exchange[send]] -= 1
            pending[group[send]] -= 1
            after = follower[group[send]]
            if pending[group[send]] == 0 and after >= 0:
                for next_send in range(first[after], first[after + 1]):
                    start[next_send] = until
                    waiting[waits] = next_send
                    waits += 1
                    next_arrival = min(next_arrival, until + latency[next_send])
        moving, now = still, until
    for place in range(moving):
        left[active[place]] = bytes_left[place]
    return now


@njit(cache=True, nogil=True)
def _group(at_source, at_sink, source_first, sink_first, sources_of_sink):
    """Write where the sends of every port begin, among those in the order of their sources, as they stand, and among those in
    the order of their sinks, whose sources are written too (counting sort)."""
    source_first[:] = 0
    sink_first[:] = 0
    for place in range(len(at_source)):
        source_first[at_source[place] + 1] += 1
        sink_first[at_sink[place] + 1] += 1
    for port in range(1, len(source_first)):
        source_first[port] += source_first[port - 1]
        sink_first[port] += sink_first[port - 1]
    free = sink_first.copy()
    for place in range(len(at_source)):
        sources_of_sink[free[at_sink[place]]] = at_source[place]
        free[at_sink[place]] += 1


@njit(cache=True, nogil=True)
def _fill(room, at_sink, source_first, sources_of_sink, sink_first, level, share, users):
    """Write the level of every port: infinite where it holds nobody up. room: float64[port] bytes/s, used up."""
    ports = len(room)
    sources, sinks = np.empty(ports, dtype=np.int64), np.empty(ports, dtype=np.int64)
    open_sources, open_sinks = 0, 0
    for port in range(ports):
        level[port] = np.inf
        out, into = source_first[port + 1] - source_first[port], sink_first[port + 1] - sink_first[port]
        users[port] = out + into
        if out:
            sources[open_sources] = port
            open_sources += 1
        elif into:
            sinks[open_sinks] = port
            open_sinks += 1
    least_source = _shares(sources, open_sources, room, users, share)
    least_sink = _shares(sinks, open_sinks, room, users, share)
    while open_sources and open_sinks:
        if least_source <= least_sink:
            open_sources = _freeze(sources, open_sources, least_sink, share, level, room, users, at_sink, source_first)
            open_sinks = _drop_idle(sinks, open_sinks, users)
            least_source = _least(sources, open_sources, share)
            least_sink = _shares(sinks, open_sinks, room, users, share)
        else:
            open_sinks = _freeze(
                sinks, open_sinks, least_source, share, level, room, users, sources_of_sink, sink_first
            )
            open_sources = _drop_idle(sources, open_sources, users)
            least_sink = _least(sinks, open_sinks, share)
            least_source = _shares(sources, open_sources, room, users, share)


@njit(cache=True, nogil=True)
def _shares(ports, count, room, users, share):
    """Write what each send at an open port could have, and return the least."""
    least = np.inf
    for place in range(count):
        port = ports[place]
        share[port] = room[port] / users[port]
        least = min(least, share[port])
    return least


@njit(cache=True, nogil=True)
def _least(ports, count, share):
    least = np.inf
    for place in range(count):
        least = min(least, share[ports[place]])
    return least


@njit(cache=True, nogil=True)
def _drop_idle(ports, count, users):
    """Take ports out of the list whose sends are all held up elsewhere; returns how many stay."""
    still = 0
    for place in range(count):
        if users[ports[place]] > 0:
            ports[still] = ports[place]
            still += 1
    return still


@njit(cache=True, nogil=True)
def _freeze(ports, count, most, share, level, room, users, other_ends, first):
    """Freeze the open ports of one side whose share is at most `most`; returns how many stay open. other_ends: the other port
    of every send, by port."""
    still = 0
    for place in range(count):
        port = ports[place]
        if share[port] > most:
            ports[still] = port
            still += 1
            continue
        level[port] = share[port]
        for index in range(first[port], first[port + 1]):
            other = other_ends[index]
            if level[other] == np.inf:
                room[other] = max(room[other] - share[port], 0.0)
                users[other] -= 1
    return still


@njit(cache=True, nogil=True)
def latest_end(
    source: np.ndarray, sink: np.ndarray, size: np.ndarray, latency: np.ndarray, capacity: np.ndarray, window: float
) -> float:
    """Seconds at which sends that all start at 0 have ended at the latest, however wide the windows of `run`. Arguments as
    there.

    Max-min fairness gives a send at least the lower of the equal shares of its two ports. Here it gets just that, of ports that
    divide by all sends that have not ended here, which are at least those that have not ended there: so none ends earlier here.
    """
    sends, ports = len(size), len(capacity)
    users, active, left = np.zeros(ports, dtype=np.int64), np.arange(sends), size.copy()
    for send in range(sends):
        users[source[send]] += 1
        users[sink[send]] += 1
    share = np.empty(ports)
    now, last, moving = 0.0, 0.0, sends
    while moving:
        for port in range(ports):
            share[port] = capacity[port] / max(users[port], 1)
        earliest, next_arrival = np.inf, np.inf
        for place in range(moving):
            send = active[place]
            if latency[send] > now:
                next_arrival = min(next_arrival, latency[send])
            else:
                earliest = min(earliest, now + left[send] / min(share[source[send]], share[sink[send]]))
        until = min(max(earliest, now + window), next_arrival)
        still = 0
        for place in range(moving):
            send = active[place]
            active[still] = send
            still += 1
            if latency[send] > now:
                continue
            rate = min(share[source[send]], share[sink[send]])
            ends = now + left[send] / rate
            left[send] -= rate * (until - now)
            if ends <= until or left[send] <= DONE * size[send]:
                last = max(last, ends)
                users[source[send]] -= 1
                users[sink[send]] -= 1
                still -= 1
        now, moving = until, still
    return last
