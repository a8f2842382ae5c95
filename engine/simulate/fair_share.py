"""Sends that share ports max-min fairly, from event to event, compiled (numba).

A port's *level* is the rate that it gives to each send that it holds up; a send goes at the lower level of its two ports.
Levels come from progressive filling (Bertsekas & Gallager, Data Networks, §6.5.2), port by port instead of send by send: of
the two sides, senders and receivers, the one with the lowest share freezes all its ports with a share of at most the other
side's lowest, because the rest at a port that stays open only gives larger shares.

With a *window* of 0 every end of a send is an event: exact. With a larger one, sends that end within a window end together,
each at the moment that its rate tells; bytes that their ports could have carried until the window's end are carried in the next
one. No port is ever ahead of its rate, so every bound holds; an end is late by a window at most, and windows shrink
towards the end, so that hardly anything of it is seen in the time of the whole.

Senders that work through lists of their own (`run_sequences`) have one send under way, so each holds only itself up: max-min
fairness at a receiver is water-filling over the rates of those that send to it, independent of the rest. Receivers
are therefore simulated on their own, and an end or a beginning costs as many steps as there are sends at that receiver
instead of as many as there are in all.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numba import njit

DONE = 1e-9
"""Part of its bytes that a send may lack when it has ended: without it, round-off would add endless tiny steps."""

LAST_STRETCH, NARROWEST = 0.05, 0.1
"""A window is at most this part of the time that is left, but not narrower than this part of its full width."""


class Sends(NamedTuple):
    """Columns of sends, those of a group next to one another.

    source, sink: int64[send], ports, those of one side never on the other
    size: float64[send] bytes
    latency: float64[send] seconds from the start to the first byte
    group: int64[send], ascending; a group starts together
    exchange: int64[send]
    left: float64[send] bytes, written
    start, end: float64[send] seconds, nan while they are not known, written
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
    """The sends that move, source by source, each with as many places as it had sends when the last one began.

    Indices are unsigned, so that compiled code need not look for negative ones.

    send: uint32[place], the send
    sink: uint32[place], its sink
    left: float64[place], bytes that are left
    least: float64[place], bytes with which it counts as ended
    end: float64[place], second at which it would end at the present rate
    """

    send: np.ndarray
    sink: np.ndarray
    left: np.ndarray
    least: np.ndarray
    end: np.ndarray


class _Ports(NamedTuple):
    """Columns of ports.

    level: float64[port], see above
    room: float64[port], bytes/s that are not given away yet
    share: float64[port], the part of the room for each send of the port
    credit: float64[port], bytes of the last window that can still be carried
    users: int64[port], sends that are not held up elsewhere
    out, into: int64[port], sends that move
    source_first, sink_first: int64[port], the first place of a port among those of the sources and those of the sinks
    sources_of_sink: uint32[send], the sources of the latter
    """

    level: np.ndarray
    room: np.ndarray
    share: np.ndarray
    credit: np.ndarray
    users: np.ndarray
    out: np.ndarray
    into: np.ndarray
    source_first: np.ndarray
    sink_first: np.ndarray
    sources_of_sink: np.ndarray


@njit(cache=True, nogil=True)
def run(
    sends: Sends,
    follower: np.ndarray,
    unfinished: np.ndarray,
    capacity: np.ndarray,
    reached: np.ndarray,
    now: float,
    awaited: int,
    windows: tuple[float, float],
    hurry: np.ndarray,
) -> float:
    """Advance from `now` until the exchange `awaited` has ended; returns the second up to which the network has been simulated.

    Sends with a `start` are under way.

    follower: int64[group], the group that begins when this one has ended, -1: none
    unfinished: int64[exchange], sends that have not ended, written
    capacity: float64[port] bytes/s
    reached: `Network.share`
    windows: seconds; the second once `hurry` is set
    hurry: bool[1], which another thread may set meanwhile
    """
    total = len(sends.size)
    first = np.searchsorted(sends.group, np.arange(len(follower) + 1))
    pending, waiting = np.zeros(len(follower), dtype=np.int64), np.empty(total, dtype=np.int64)
    moving = _Moving(np.empty(total, np.uint32), np.empty(total, np.uint32), np.empty(total), np.empty(total), np.empty(total))
    rates, counts, sources = np.zeros((4, len(capacity))), np.zeros((5, len(capacity)), np.int64), moving.sink.copy()
    at = _Ports(rates[0], rates[1], rates[2], rates[3], counts[0], counts[1], counts[2], counts[3], counts[4], sources)
    ended = np.empty(total, dtype=np.int64)
    waits, count = _list_waiting(sends, pending, waiting), 0
    next_arrival, latest = -np.inf, np.inf
    while unfinished[awaited] > 0:
        window = windows[1] if hurry[0] else windows[0]
        if next_arrival <= now:
            waits, count, next_arrival = _admit(sends, waiting, waits, moving, count, at, now)
        if not count:
            now = next_arrival
            continue
        width = min(window, max(NARROWEST * window, LAST_STRETCH * (latest - now)), next_arrival - now)
        owed = _open(at, capacity, reached, width)
        _fill(at, moving.sink)
        earliest, latest = _predict(moving, at, now)
        # Ports that carry owed bytes do so for one window only.
        until = min(now + width if owed else max(earliest, now + width), next_arrival)
        over = _move(sends, moving, at, now, until, window, ended)
        if over:
            count -= over
            waits, next_arrival = _follow(
                sends, ended[:over], pending, unfinished, follower, first, waiting, waits, until, next_arrival
            )
        now = until
    _write_left(sends, moving, at)
    return now


@njit(cache=True, nogil=True)
def rate_at(port, sends, capacity, reached):
    """Bytes/s that so many sends reach together at a port; see `Network.rate`."""
    column = min(sends, reached.shape[1]) - 1
    if column <= 0:
        return capacity[port]
    return capacity[port] * reached[1 if 2 * port >= len(capacity) else 0, column]


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
def _admit(sends, waiting, waits, moving, count, at, now):
    """Move the sends with their latency behind them; returns the number that wait, the number that move and the second of the
    next."""
    _write_left(sends, moving, at)
    chosen, before = np.empty(count + waits, dtype=np.int64), count
    count = 0
    for source in range(len(at.out)):
        for place in range(at.source_first[source], at.source_first[source] + at.out[source]):
            chosen[count] = moving.send[place]
            count += 1
    next_arrival, still = np.inf, 0
    for place in range(waits):
        send = waiting[place]
        if sends.start[send] + sends.latency[send] <= now:
            chosen[count] = send
            count += 1
        else:
            waiting[still] = send
            still += 1
            next_arrival = min(next_arrival, sends.start[send] + sends.latency[send])
    if count > before:
        _arrange(sends, chosen[:count], moving, at)
    return still, count, next_arrival


@njit(cache=True, nogil=True)
def _arrange(sends, chosen, moving, at):
    """Give these sends (int64[send]) their places: by source, and the sources by sink (counting sorts)."""
    at.out[:], at.into[:] = 0, 0
    for send in chosen:
        at.out[sends.source[send]] += 1
        at.into[sends.sink[send]] += 1
    at.source_first[0], at.sink_first[0] = 0, 0
    for port in range(1, len(at.out)):
        at.source_first[port] = at.source_first[port - 1] + at.out[port - 1]
        at.sink_first[port] = at.sink_first[port - 1] + at.into[port - 1]
    free = at.source_first.copy()
    for send in chosen:
        place = free[sends.source[send]]
        free[sends.source[send]] += 1
        moving.send[place], moving.sink[place] = send, sends.sink[send]
        moving.left[place], moving.least[place] = sends.left[send], DONE * sends.size[send]
    free = at.sink_first.copy()
    for source in range(len(at.out)):
        for place in range(at.source_first[source], at.source_first[source] + at.out[source]):
            at.sources_of_sink[free[moving.sink[place]]] = source
            free[moving.sink[place]] += 1


@njit(cache=True, nogil=True)
def _write_left(sends, moving, at):
    """Write the bytes that are left of the moving sends."""
    for source in range(len(at.out)):
        for place in range(at.source_first[source], at.source_first[source] + at.out[source]):
            sends.left[moving.send[place]] = moving.left[place]


@njit(cache=True, nogil=True)
def _open(at, capacity, reached, width):
    """Give every port the rate that its sends reach and the bytes it owes, within a window of that width; returns True if any
    owes something."""
    owed = False
    whole = reached.shape[1] == 1  # nothing to look up, which costs some per cent
    for port in range(len(capacity)):
        owed |= at.credit[port] > 0
        rate = capacity[port] if whole else rate_at(port, at.out[port] + at.into[port], capacity, reached)
        at.room[port] = rate + (at.credit[port] / width if at.credit[port] > 0 else 0.0)
        at.credit[port] = 0.0
    return owed


@njit(cache=True, nogil=True)
def _predict(moving, at, now):
    """Write when every send would end at its rate; returns the first and the last of these moments."""
    earliest, latest = np.inf, now
    for source in range(len(at.out)):
        level = at.level[source]
        for place in range(at.source_first[source], at.source_first[source] + at.out[source]):
            end = now + moving.left[place] / min(level, at.level[moving.sink[place]])
            moving.end[place] = end
            earliest, latest = min(earliest, end), max(latest, end)
    return earliest, latest


@njit(cache=True, nogil=True)
def _move(sends, moving, at, now, until, window, ended):
    """Carry bytes until that second; writes which sends have ended and returns how many."""
    over = 0
    for source in range(len(at.out)):
        level, still = at.level[source], at.source_first[source]
        for place in range(at.source_first[source], at.source_first[source] + at.out[source]):
            send, sink = moving.send[place], moving.sink[place]
            rate = min(level, at.level[sink])
            left = moving.left[place] - rate * (until - now)
            # A send may be so short that its end is no later than now in floats: it has ended all the same.
            if moving.end[place] > until and left > moving.least[place]:
                moving.send[still], moving.sink[still] = send, sink
                moving.left[still], moving.least[still] = left, moving.least[place]
                still += 1
                continue
            sends.end[send], sends.left[send] = min(moving.end[place], until), 0.0
            ended[over] = send
            over += 1
            if window > 0:
                at.credit[source] += rate * (until - sends.end[send])
                at.credit[sink] += rate * (until - sends.end[send])
        at.out[source] = still - at.source_first[source]
    for send in ended[:over]:  # out of the places of its sink
        source, sink = sends.source[send], sends.sink[send]
        at.into[sink] -= 1
        place, last = at.sink_first[sink], at.sink_first[sink] + at.into[sink]
        while at.sources_of_sink[place] != source:
            place += 1
        for later in range(place, last):
            at.sources_of_sink[later] = at.sources_of_sink[later + 1]
    return over


@njit(cache=True, nogil=True)
def _follow(sends, ended, pending, unfinished, follower, first, waiting, waits, until, next_arrival):
    """Count the ended sends and start the groups that follow; returns the number that wait and the second of the next."""
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
    """Write the level of every port: infinite if it holds no send up. Uses up `room`.

    sinks_of_source: the sinks in the order of the sources
    """
    ports = len(at.level)
    sources, sinks = np.empty(ports, dtype=np.int64), np.empty(ports, dtype=np.int64)
    open_sources, open_sinks = 0, 0
    for port in range(ports):
        at.level[port] = np.inf
        at.users[port] = at.out[port] + at.into[port]
        if at.out[port]:
            sources[open_sources] = port
            open_sources += 1
        elif at.into[port]:
            sinks[open_sinks] = port
            open_sinks += 1
    least_source, least_sink = _shares(sources, open_sources, at), _shares(sinks, open_sinks, at)
    while open_sources and open_sinks:
        if least_source <= least_sink:
            open_sources = _freeze(sources, open_sources, least_sink, at, sinks_of_source, at.source_first, at.out)
            open_sinks = _drop_idle(sinks, open_sinks, at.users)
            least_source, least_sink = _least(sources, open_sources, at.share), _shares(sinks, open_sinks, at)
        else:
            open_sinks = _freeze(sinks, open_sinks, least_source, at, at.sources_of_sink, at.sink_first, at.into)
            open_sources = _drop_idle(sources, open_sources, at.users)
            least_sink, least_source = _least(sinks, open_sinks, at.share), _shares(sources, open_sources, at)


@njit(cache=True, nogil=True)
def _shares(ports, count, at):
    """Write the share of each send at an open port, and return the least."""
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
    """Take ports with all their sends held up elsewhere out of the list; returns the number that stay."""
    still = 0
    for place in range(count):
        if users[ports[place]] > 0:
            ports[still] = ports[place]
            still += 1
    return still


@njit(cache=True, nogil=True)
def _freeze(ports, count, most, at, other_ends, first, sends):
    """Freeze the open ports of one side with a share of at most `most`; returns the number that stay open.

    other_ends: the other port of every send, in the order of this side
    first, sends: the first place of each port, and its number of sends
    """
    still = 0
    for place in range(count):
        port = ports[place]
        if at.share[port] > most:
            ports[still] = port
            still += 1
            continue
        at.level[port] = at.share[port]
        for index in range(first[port], first[port] + sends[port]):
            other = other_ends[index]
            if at.level[other] == np.inf:
                at.room[other] = max(at.room[other] - at.share[port], 0.0)
                at.users[other] -= 1
    return still


@njit(cache=True, nogil=True)
def run_sequences(
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

    source, sink: int64[send] ports, of which no source has two sends under way at once
    size: float64[send] bytes
    latency: float64[send] seconds
    follower: int64[send], the send that begins when this one has ended, -1: none; one that follows none begins at 0
    capacity: float64[port] bytes/s
    reached: `Network.share`
    hurry: bool[1], which another thread may set meanwhile: then some ends are nan, for this cannot be hurried, only given up
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
            until = now + _fill_sequences(newest[port], older, source, left, rate, capacity, port, reached)
            heapq.heappush(events, (until, -1, port, version[port]))
    return start, end


@njit(cache=True, nogil=True)
def _fill_sequences(newest, older, source, left, rate, capacity, sink, reached):
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
