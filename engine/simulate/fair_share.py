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

from typing import NamedTuple

import numpy as np
from numba import njit

DONE = 1e-9
"""Part of its bytes that a send may lack when it has ended: without it, round-off would add endless tiny steps."""

LAST_STRETCH, NARROWEST = 0.05, 0.1
"""A window is at most this part of the time that is left, but not narrower than this part of its full width."""


class Sends(NamedTuple):
    """Columns of sends, those of a group next to one another.

    source, sink: int64[send], ports, those of one side never on the other; size: float64[send] bytes; latency: float64[send]
    seconds from the start to the first byte; group: int64[send], ascending, which starts together; exchange: int64[send];
    left: float64[send] bytes, start, end: float64[send] seconds, nan while they are not known: all three are written.
    """

    source: np.ndarray
    sink: np.ndarray
    size: np.ndarray
    latency: np.ndarray
    group: np.ndarray
    exchange: np.ndarray
    left: np.ndarray
    start: np.ndarray
    end: np.ndarray


class _Moving(NamedTuple):
    """What moves at the moment, in the order of the sources, in the first places of each column: which send it is (int64), its
    two ports (int64), bytes that are left and the second at which it would end at the present rate (float64)."""

    send: np.ndarray
    source: np.ndarray
    sink: np.ndarray
    left: np.ndarray
    end: np.ndarray


class _Ports(NamedTuple):
    """Columns of ports. level: see above; room: bytes/s that are not given away yet; share: of that, what each send of the
    port could have; credit: bytes of the last window that can still be carried; users: sends that are not held up elsewhere;
    source_first, sink_first: int64[port + 1], where the sends of a port begin among those in the order of the sources and
    among those in the order of the sinks; sources_of_sink: int64[send], the sources of the latter."""

    level: np.ndarray
    room: np.ndarray
    share: np.ndarray
    credit: np.ndarray
    users: np.ndarray
    source_first: np.ndarray
    sink_first: np.ndarray
    sources_of_sink: np.ndarray


@njit(cache=True, nogil=True)
def run(
    sends: Sends,
    follower: np.ndarray,
    unfinished: np.ndarray,
    capacity: np.ndarray,
    now: float,
    awaited: int,
    windows: tuple[float, float],
    hurry: np.ndarray,
) -> float:
    """Advance from `now` until the exchange `awaited` has ended; returns the second up to which the network has been simulated.

    Sends with a `start` are under way; a group begins when the one that has it as its `follower` (int64[group], -1: none) has
    ended. unfinished: int64[exchange], sends that have not ended, written; capacity: float64[port] bytes/s. windows: seconds,
    the second of them once `hurry` (bool[1]) is set, which another thread may do meanwhile.
    """
    total, ports = len(sends.size), len(capacity)
    first = np.searchsorted(sends.group, np.arange(len(follower) + 1))
    pending, waiting = np.zeros(len(follower), dtype=np.int64), np.empty(total, dtype=np.int64)
    moving = _Moving(
        np.empty(total, dtype=np.int64),
        np.empty(total, dtype=np.int64),
        np.empty(total, dtype=np.int64),
        np.empty(total),
        np.empty(total),
    )
    at = _Ports(
        np.empty(ports),
        np.empty(ports),
        np.empty(ports),
        np.zeros(ports),
        np.empty(ports, dtype=np.int64),
        np.empty(ports + 1, dtype=np.int64),
        np.empty(ports + 1, dtype=np.int64),
        np.empty(total, dtype=np.int64),
    )
    waits, count = _list_waiting(sends, pending, waiting), 0
    next_arrival, latest, changed = -np.inf, np.inf, True
    while unfinished[awaited] > 0:
        window = windows[1] if hurry[0] else windows[0]
        if next_arrival <= now:
            before = count
            waits, count, next_arrival = _admit(sends, waiting, waits, moving, count, now)
            changed = changed or count > before
        if not count:
            now = next_arrival
            continue
        if changed:
            _group(moving, count, at)
        width = min(window, max(NARROWEST * window, LAST_STRETCH * (latest - now)), next_arrival - now)
        owed = _open(at, capacity, width)
        _fill(at, moving.sink)
        earliest, latest = _predict(moving, count, at.level, now)
        # Ports that carry what they owe do so for one window only.
        until = min(now + width if owed else max(earliest, now + width), next_arrival)
        before = count
        count = _move(sends, moving, count, at, now, until, window)
        changed = count < before
        if changed:
            waits, next_arrival = _follow(
                sends,
                moving.send[count:before],
                pending,
                unfinished,
                follower,
                first,
                waiting,
                waits,
                until,
                next_arrival,
            )
        now = until
    for place in range(count):
        sends.left[moving.send[place]] = moving.left[place]
    return now


@njit(cache=True, nogil=True)
def _list_waiting(sends, pending, waiting):
    """Write how many sends of each group have not ended and which have started; returns how many those are."""
    waits = 0
    for send in range(len(sends.size)):
        if np.isnan(sends.end[send]):
            pending[sends.group[send]] += 1
            if not np.isnan(sends.start[send]):
                waiting[waits] = send
                waits += 1
    return waits


@njit(cache=True, nogil=True)
def _admit(sends, waiting, waits, moving, count, now):
    """Let those move whose latency is over; returns how many wait, how many move and when the next one will."""
    next_arrival, still, before = np.inf, 0, count
    for place in range(waits):
        send = waiting[place]
        if sends.start[send] + sends.latency[send] <= now:
            moving.send[count] = send
            count += 1
        else:
            waiting[still] = send
            still += 1
            next_arrival = min(next_arrival, sends.start[send] + sends.latency[send])
    if count > before:
        for place in range(before):
            sends.left[moving.send[place]] = moving.left[place]
        moving.send[:count] = moving.send[:count][np.argsort(sends.source[moving.send[:count]], kind="mergesort")]
        for place in range(count):
            send = moving.send[place]
            moving.source[place], moving.sink[place] = sends.source[send], sends.sink[send]
            moving.left[place] = sends.left[send]
    return still, count, next_arrival


@njit(cache=True, nogil=True)
def _group(moving, count, at):
    """Write where the sends of every port begin, and the sources in the order of the sinks (counting sort)."""
    at.source_first[:] = 0
    at.sink_first[:] = 0
    for place in range(count):
        at.source_first[moving.source[place] + 1] += 1
        at.sink_first[moving.sink[place] + 1] += 1
    for port in range(1, len(at.source_first)):
        at.source_first[port] += at.source_first[port - 1]
        at.sink_first[port] += at.sink_first[port - 1]
    free = at.sink_first.copy()
    for place in range(count):
        at.sources_of_sink[free[moving.sink[place]]] = moving.source[place]
        free[moving.sink[place]] += 1


@njit(cache=True, nogil=True)
def _open(at, capacity, width):
    """Give every port its capacity and what it owes, within a window of that width; returns whether any owes something."""
    owed = False
    for port in range(len(capacity)):
        owed |= at.credit[port] > 0
        at.room[port] = capacity[port] + (at.credit[port] / width if at.credit[port] > 0 else 0.0)
        at.credit[port] = 0.0
    return owed


@njit(cache=True, nogil=True)
def _predict(moving, count, level, now):
    """Write when every send would end at its rate; returns the first and the last of these moments."""
    earliest, latest = np.inf, now
    for place in range(count):
        rate = min(level[moving.source[place]], level[moving.sink[place]])
        moving.end[place] = now + moving.left[place] / rate
        earliest, latest = min(earliest, moving.end[place]), max(latest, moving.end[place])
    return earliest, latest


@njit(cache=True, nogil=True)
def _move(sends, moving, count, at, now, until, window):
    """Carry bytes until that second and write what has ended, which stands behind what still moves then; returns how many do
    that."""
    still, ended = 0, np.empty(count, dtype=np.int64)
    for place in range(count):
        send, source, sink = moving.send[place], moving.source[place], moving.sink[place]
        rate = min(at.level[source], at.level[sink])
        left = moving.left[place] - rate * (until - now)
        # A send may be so short that its end is no later than now in floats: it has ended all the same.
        if moving.end[place] > until and left > DONE * sends.size[send]:
            moving.send[still], moving.source[still], moving.sink[still] = send, source, sink
            moving.left[still] = left
            still += 1
            continue
        sends.end[send], sends.left[send] = min(moving.end[place], until), 0.0
        ended[place - still] = send
        if window > 0:
            at.credit[source] += rate * (until - sends.end[send])
            at.credit[sink] += rate * (until - sends.end[send])
    moving.send[still:count] = ended[: count - still]
    return still


@njit(cache=True, nogil=True)
def _follow(sends, ended, pending, unfinished, follower, first, waiting, waits, until, next_arrival):
    """Count what has ended, and start the groups that follow; returns how many sends wait and when the next one moves."""
    for send in ended:
        unfinished[sends.exchange[send]] -= 1
        pending[sends.group[send]] -= 1
        after = follower[sends.group[send]]
        if pending[sends.group[send]] == 0 and after >= 0:
            for next_send in range(first[after], first[after + 1]):
                sends.start[next_send] = until
                waiting[waits] = next_send
                waits += 1
                next_arrival = min(next_arrival, until + sends.latency[next_send])
    return waits, next_arrival


@njit(cache=True, nogil=True)
def _fill(at, sinks_of_source):
    """Write the level of every port: infinite where it holds nobody up. sinks_of_source: the sinks in the order of the sources.
    Uses up `room`."""
    ports = len(at.level)
    sources, sinks = np.empty(ports, dtype=np.int64), np.empty(ports, dtype=np.int64)
    open_sources, open_sinks = 0, 0
    for port in range(ports):
        at.level[port] = np.inf
        out = at.source_first[port + 1] - at.source_first[port]
        into = at.sink_first[port + 1] - at.sink_first[port]
        at.users[port] = out + into
        if out:
            sources[open_sources] = port
            open_sources += 1
        elif into:
            sinks[open_sinks] = port
            open_sinks += 1
    least_source, least_sink = _shares(sources, open_sources, at), _shares(sinks, open_sinks, at)
    while open_sources and open_sinks:
        if least_source <= least_sink:
            open_sources = _freeze(sources, open_sources, least_sink, at, sinks_of_source, at.source_first)
            open_sinks = _drop_idle(sinks, open_sinks, at.users)
            least_source, least_sink = _least(sources, open_sources, at.share), _shares(sinks, open_sinks, at)
        else:
            open_sinks = _freeze(sinks, open_sinks, least_source, at, at.sources_of_sink, at.sink_first)
            open_sources = _drop_idle(sources, open_sources, at.users)
            least_sink, least_source = _least(sinks, open_sinks, at.share), _shares(sources, open_sources, at)


@njit(cache=True, nogil=True)
def _shares(ports, count, at):
    """Write what each send at an open port could have, and return the least."""
    least = np.inf
    for place in range(count):
        port = ports[place]
        at.share[port] = at.room[port] / at.users[port]
        least = min(least, at.share[port])
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
def _freeze(ports, count, most, at, other_ends, first):
    """Freeze the open ports of one side whose share is at most `most`; returns how many stay open. other_ends: the other port
    of every send, in the order of this side; first: where those of a port begin."""
    still = 0
    for place in range(count):
        port = ports[place]
        if at.share[port] > most:
            ports[still] = port
            still += 1
            continue
        at.level[port] = at.share[port]
        for index in range(first[port], first[port + 1]):
            other = other_ends[index]
            if at.level[other] == np.inf:
                at.room[other] = max(at.room[other] - at.share[port], 0.0)
                at.users[other] -= 1
    return still


@njit(cache=True, nogil=True)
def latest_end(sends: Sends, capacity: np.ndarray, window: float) -> float:
    """Seconds at which sends that all start at 0 have ended at the latest, however wide the windows of `run`. Arguments as
    there; of the sends nothing is written.

    Max-min fairness gives a send at least the lower of the equal shares of its two ports. Here it gets just that, of ports that
    divide by all sends that have not ended here, which are at least those that have not ended there: so none ends earlier here.
    """
    source, sink, size, latency = sends.source, sends.sink, sends.size, sends.latency
    total, ports = len(size), len(capacity)
    users, active, left = np.zeros(ports, dtype=np.int64), np.arange(total), size.copy()
    for send in range(total):
        users[source[send]] += 1
        users[sink[send]] += 1
    share = np.empty(ports)
    now, last, moving = 0.0, 0.0, total
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
