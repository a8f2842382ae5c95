"""Moves of experts between GPUs under the time of a layer itself: tables that tell the change of any move, and the search on
them; compiled (numba).

The time of a layer is that of the busiest port in the dispatch, of the busiest GPU's FFNs, and of the busiest port in the
combine. A port's load is a sum of rows, and a move changes only rows to and from the GPUs (nodes) that it touches. Where every
copy of a token travels on its own, these are sums of demands. Where a row serves several experts, tables as those of
`coactivation.search` give them for each kind of source: rows to a group for the sake of one expert alone, those of them whose
token has another given expert too, and rows that an expert would bring to a group that its tokens do not reach yet.

A copy of an expert is an item. Where copies travel on their own, those of an expert divide its tokens evenly; rows that serve
several experts are served by one copy of each here, and by more in `choosing`.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

SMOOTH = 0.02
"""Weight of the 8-norms of all loads, which see the second busiest, beside the busiest ones."""
LEADING, RELOCATED, RECOUNTED = 0.6, 0.3, 0.25
"""Parts of the moves that begin at a busiest GPU, that look for a free slot, and that change how many copies experts have."""


class Level(NamedTuple):
    """Receivers of one row of a token: every GPU, or every node.

    group: int64[gpu]
    kind: int64[net], the source as far as it matters to the rows of this level
    sends, takes: int64[group, kind], the ports of such a row; the last one, which has no load, of a row that stays
    """

    group: np.ndarray
    kind: np.ndarray
    sends: np.ndarray
    takes: np.ndarray


class Layer(NamedTuple):
    """One layer of the problem; nets are tokens of a source that go to the same items.

    member: int32[net, choice] experts, -1 after the last; no net where every copy travels on its own
    turn: int64[net, choice], how often a token's expert was chosen before; no choice where copies do not serve in turn
    weight: float64[net] tokens
    source: int64[net] GPUs
    first: int64[expert + 1], the begin of an expert's nets in `net`
    net: int32[membership]
    demand: float64[expert, source] tokens, where every copy travels on its own; else of no expert
    there, back: float64[port] seconds a row in dispatch and in combine
    start: float64[port] seconds
    least: rows below which a port has none, but round-off
    owner: int64[port] GPUs
    ffn: float64[expert, copies - 1, gpu] seconds of one copy
    room: int64[gpu] slots
    """

    member: np.ndarray
    turn: np.ndarray
    weight: np.ndarray
    source: np.ndarray
    first: np.ndarray
    net: np.ndarray
    demand: np.ndarray
    there: np.ndarray
    back: np.ndarray
    start: np.ndarray
    least: float
    owner: np.ndarray
    ffn: np.ndarray
    room: np.ndarray


class Tables(NamedTuple):
    """The rows of a level that moves change; float64 but for the count.

    count: int16[net, group] items of a net there
    alone: [item, kind] rows for its sake alone
    shared: [item, other, kind] those of them whose net has the other one too
    joining: [item, group, kind] rows that it would bring
    """

    count: np.ndarray
    alone: np.ndarray
    shared: np.ndarray
    joining: np.ndarray


class State(NamedTuple):
    """A placement with its loads.

    expert: int64[item], -1 = unused
    place: int64[item] GPUs
    copies: int64[expert]
    on: bool[expert, gpu]
    used: int64[gpu]
    held: int64[gpu, slot] items
    slot: int64[item]
    rows: float64[port + 1]
    busy: float64[gpu] seconds of FFNs
    """

    expert: np.ndarray
    place: np.ndarray
    copies: np.ndarray
    on: np.ndarray
    used: np.ndarray
    held: np.ndarray
    slot: np.ndarray
    rows: np.ndarray
    busy: np.ndarray


@njit(cache=True, nogil=True)
def begin(layer: Layer, levels: tuple[Level, Level], expert: np.ndarray, place: np.ndarray) -> tuple:
    """(the state of a placement, the tables of both levels).

    expert, place: int64[item], -1 = unused
    """
    items, gpus = len(expert), len(layer.room)
    copies, on = np.zeros(len(layer.ffn), dtype=np.int64), np.zeros((len(layer.ffn), gpus), dtype=np.bool_)
    used, slot = np.zeros(gpus, dtype=np.int64), np.zeros(items, dtype=np.int64)
    held = np.full((gpus, max(layer.room.max(), 1)), -1)
    rows, busy = np.zeros(len(layer.there) + 1), np.zeros(gpus)
    for item in range(items):
        if expert[item] >= 0:
            copies[expert[item]] += 1
    at = State(expert.copy(), place.copy(), copies, on, used, held, slot, rows, busy)
    for item in range(items):
        if expert[item] >= 0:
            put(at, item, place[item])
            busy[place[item]] += layer.ffn[expert[item], copies[expert[item]] - 1, place[item]]
    level = levels[0]
    for one in range(len(layer.demand)):
        for gpu in range(gpus):
            if on[one, gpu]:
                for kind in range(layer.demand.shape[1]):
                    rows[level.sends[gpu, kind]] += layer.demand[one, kind] / copies[one]
                    rows[level.takes[gpu, kind]] += layer.demand[one, kind] / copies[one]
    return at, (_tables(layer, levels[0], at), _tables(layer, levels[1], at))


@njit(cache=True, nogil=True)
def put(at, item, gpu):
    at.place[item], at.slot[item] = gpu, at.used[gpu]
    at.held[gpu, at.used[gpu]] = item
    at.used[gpu] += 1
    at.on[at.expert[item], gpu] = True


@njit(cache=True, nogil=True)
def take(at, item):
    gpu, slot = at.place[item], at.slot[item]
    at.used[gpu] -= 1
    last = at.held[gpu, at.used[gpu]]
    at.held[gpu, slot], at.slot[last] = last, slot
    at.on[at.expert[item], gpu] = False


@njit(cache=True, nogil=True)
def _tables(layer, level, at):
    items, nets = len(at.place), len(layer.member)
    groups, kinds = level.sends.shape
    if nets == 0:
        groups = kinds = items = 0
    tables = Tables(
        np.zeros((nets, groups), dtype=np.int16),
        np.zeros((items, kinds)),
        np.zeros((items, items, kinds)),
        np.zeros((items, groups, kinds)),
    )
    for net in range(nets):
        weight, kind = layer.weight[net], level.kind[net]
        for item in layer.member[net]:
            if item >= 0:
                tables.count[net, level.group[at.place[item]]] += 1
        for group in range(groups):
            if tables.count[net, group]:
                at.rows[level.sends[group, kind]] += weight
                at.rows[level.takes[group, kind]] += weight
            else:
                _joins(layer.member, tables.joining, net, group, kind, weight)
        for item in layer.member[net]:
            if item >= 0 and tables.count[net, level.group[at.place[item]]] == 1:
                _alone(layer.member, tables, net, item, kind, weight)
    return tables


@njit(cache=True, nogil=True)
def _alone(member, tables, net, item, kind, weight):
    tables.alone[item, kind] += weight
    for other in member[net]:
        if other < 0:
            break
        if other != item:
            tables.shared[item, other, kind] += weight


@njit(cache=True, nogil=True)
def _joins(member, joining, net, group, kind, weight):
    for item in member[net]:
        if item < 0:
            break
        joining[item, group, kind] += weight


@njit(cache=True, nogil=True)
def _member_in(member, level, place, net, group, but):
    for item in member[net]:
        if item >= 0 and item != but and level.group[place[item]] == group:
            return item
    return -1


@njit(cache=True, nogil=True)
def _regroup(layer, level, tables, at, item, target):
    """An item goes to another GPU, in the tables of a level."""
    member, g, h = layer.member, level.group[at.place[item]], level.group[target]
    if g == h:
        return
    for membership in range(layer.first[item], layer.first[item + 1]):
        net = layer.net[membership]
        weight, kind = layer.weight[net], level.kind[net]
        stay, there = tables.count[net, g] - 1, tables.count[net, h]
        tables.count[net, g], tables.count[net, h] = stay, there + 1
        if stay == 0:
            _joins(member, tables.joining, net, g, kind, weight)
        elif stay == 1:
            _alone(member, tables, net, _member_in(member, level, at.place, net, g, item), kind, weight)
        if there == 0:
            _joins(member, tables.joining, net, h, kind, -weight)
        elif there == 1:
            _alone(member, tables, net, _member_in(member, level, at.place, net, h, item), kind, -weight)
        if (stay == 0) != (there == 0):
            _alone(member, tables, net, item, kind, weight if there == 0 else -weight)


@njit(cache=True, nogil=True)
def _recounted(layer, level, at, expert, without, more_on, change, longer):
    """Add to the changes those of an expert that gives up the copy on one GPU and has one on another (-1 = none)."""
    before = at.copies[expert]
    after = before - (without >= 0) + (more_on >= 0)
    for gpu in range(len(layer.room)):
        was = at.on[expert, gpu]
        will = gpu == more_on or (was and gpu != without)
        share = (1.0 / after if will else 0.0) - (1.0 / before if was else 0.0)
        if share != 0:
            for kind in range(layer.demand.shape[1]):
                rows = share * layer.demand[expert, kind]
                change[level.sends[gpu, kind]] += rows
                change[level.takes[gpu, kind]] += rows
        if was:
            longer[gpu] -= layer.ffn[expert, before - 1, gpu]
        if will:
            longer[gpu] += layer.ffn[expert, after - 1, gpu]


@njit(cache=True, nogil=True)
def _changes(layer, levels, tables, at, i, j, h, change, longer):
    """Write the changes if item i goes to GPU h and item j, if not -1, from there to its place."""
    g = at.place[i]
    change[:], longer[:] = 0.0, 0.0
    if len(layer.demand):
        _recounted(layer, levels[0], at, at.expert[i], g, h, change, longer)
        if j >= 0:
            _recounted(layer, levels[0], at, at.expert[j], h, g, change, longer)
        return
    ffn = layer.ffn[at.expert[i], at.copies[at.expert[i]] - 1]
    longer[g] -= ffn[g]
    longer[h] += ffn[h]
    if j >= 0:
        ffn = layer.ffn[at.expert[j], at.copies[at.expert[j]] - 1]
        longer[h] -= ffn[h]
        longer[g] += ffn[g]
    for which in range(2):
        level, table = levels[which], tables[which]
        own, other = level.group[g], level.group[h]
        if own == other:
            continue
        for kind in range(level.sends.shape[1]):
            here, there = -table.alone[i, kind], table.joining[i, other, kind]
            if j >= 0:
                here += table.joining[j, own, kind] + table.shared[i, j, kind]
                there += table.shared[j, i, kind] - table.alone[j, kind]
            change[level.sends[own, kind]] += here
            change[level.takes[own, kind]] += here
            change[level.sends[other, kind]] += there
            change[level.takes[other, kind]] += there


@njit(cache=True, nogil=True)
def weigh(layer, rows, change, busy, longer, leader):
    """(seconds, seconds with the norms) of loads and their changes; the GPUs of the busiest port in dispatch and combine and of
    the longest FFNs into leader int64[3]."""
    dispatch, combine, ffn, power, power_back, power_ffn = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    ports, gpus = len(layer.there), len(busy)
    for port in range(ports):
        moved = rows[port] + change[port]
        if moved > layer.least:
            there = layer.start[port] + moved * layer.there[port]
            back = layer.start[port] + moved * layer.back[port]
            if there > dispatch:
                dispatch, leader[0] = there, layer.owner[port]
            if back > combine:
                combine, leader[1] = back, layer.owner[port]
            there *= there
            there *= there
            power += there * there
            back *= back
            back *= back
            power_back += back * back
    for gpu in range(gpus):
        seconds = busy[gpu] + longer[gpu]
        if seconds > ffn:
            ffn, leader[2] = seconds, gpu
        seconds *= seconds
        seconds *= seconds
        power_ffn += seconds * seconds
    norms = _root(power / max(ports, 1)) + _root(power_back / max(ports, 1)) + _root(power_ffn / gpus)
    return dispatch + ffn + combine, dispatch + ffn + combine + SMOOTH * norms


@njit(cache=True, nogil=True)
def _root(power):
    return np.sqrt(np.sqrt(np.sqrt(power)))


@njit(cache=True, nogil=True)
def draw(room, at, leader, recounts):
    """A random move: (True if it may be, True if it gives copies up or makes some, GPUs g and h, items i on g and j on h that
    change places, the expert that gains a copy on g); -1 for none of these."""
    g = leader[np.random.randint(3)] if np.random.random() < LEADING else np.random.randint(len(room))
    counting = recounts and np.random.random() < RECOUNTED
    vacant = counting and at.used[g] < room[g] and (at.expert < 0).any()
    i, j, h, gained = -1, -1, np.random.randint(len(room)), -1
    if at.used[g] > 0 and not (counting and vacant and np.random.random() < 0.5):
        i = at.held[g, np.random.randint(at.used[g])]
    if counting:
        if i < 0 or np.random.random() < 0.8:
            gained = np.random.randint(len(at.copies))
        there = gained >= 0 and at.on[gained, g]
        last = i >= 0 and at.copies[at.expert[i]] == 1
        return not (there or last or (i < 0 and not vacant)), counting, g, g, i, j, gained
    if at.used[h] > 0 and not (at.used[h] < room[h] and np.random.random() < RELOCATED):
        j = at.held[h, np.random.randint(at.used[h])]
    elif at.used[h] == room[h]:
        return False, counting, g, h, i, j, gained
    legal = i >= 0 and g != h and not at.on[at.expert[i], h] and not (j >= 0 and at.on[at.expert[j], g])
    return legal, counting, g, h, i, j, gained


@njit(cache=True, nogil=True)
def seconds_of(layer: Layer, levels: tuple[Level, Level], expert: np.ndarray, place: np.ndarray) -> float:
    """Seconds of dispatch, FFNs and combine of a placement; arguments as in `begin`."""
    at, _ = begin(layer, levels, expert, place)
    nothing = np.zeros(len(at.rows))
    return weigh(layer, at.rows, nothing, at.busy, np.zeros(len(at.busy)), np.zeros(3, dtype=np.int64))[0]


@njit(cache=True, nogil=True)
def anneal(
    layer: Layer,
    levels: tuple[Level, Level],
    at: State,
    tables: tuple[Tables, Tables],
    best: tuple[np.ndarray, np.ndarray],
    lowest: float,
    span: tuple[float, float, int],
    seed: int,
    hurry: np.ndarray,
) -> tuple[float, int]:
    """Change a state by random moves at a falling temperature; (the lowest seconds so far, moves accepted).

    best: (expert, place), int64[item] each, of the lowest seconds so far; changed in place
    span: temperature in seconds at the begin and at the end, and how many moves are looked at
    hurry: bool[1], set by another thread to end
    """
    np.random.seed(seed)
    hot, cold, moves = span
    gpus, linear = len(layer.room), len(layer.demand) > 0
    change, longer, leader, ahead = np.zeros(len(at.rows)), np.zeros(gpus), np.zeros(3, np.int64), np.zeros(3, np.int64)
    _, value = weigh(layer, at.rows, change, at.busy, longer, leader)
    accepted, temperature = 0, hot
    recounts = linear and len(at.expert) > len(layer.ffn)
    for move in range(moves):
        if move % 256 == 0:
            if hurry[0]:
                break
            temperature = hot * (cold / hot) ** (move / moves)
        legal, counting, g, h, i, j, gained = draw(layer.room, at, leader, recounts)
        if not legal:
            continue
        if counting:
            change[:], longer[:] = 0.0, 0.0
            if i >= 0:
                _recounted(layer, levels[0], at, at.expert[i], g, -1, change, longer)
            if gained >= 0:
                _recounted(layer, levels[0], at, gained, -1, g, change, longer)
        else:
            _changes(layer, levels, tables, at, i, j, h, change, longer)
        seconds, after = weigh(layer, at.rows, change, at.busy, longer, ahead)
        if after > value and np.random.random() >= np.exp((value - after) / temperature):
            continue
        accepted += 1
        value = after
        leader[:] = ahead
        at.rows[:] += change
        at.busy[:] += longer
        if counting:
            count_anew(at, i, gained, g)
        else:
            _carry_out(layer, levels, tables, at, i, j, h)
        if seconds < lowest * (1 - 1e-12):
            lowest = seconds
            best[0][:] = at.expert
            best[1][:] = at.place
    return lowest, accepted


@njit(cache=True, nogil=True)
def _carry_out(layer, levels, tables, at, i, j, h):
    """Item i goes to GPU h and item j, if not -1, from there to its place."""
    g = at.place[i]
    for item, target in ((i, h), (j, g)):
        if item >= 0 and len(layer.member):
            _regroup(layer, levels[0], tables[0], at, item, target)
            _regroup(layer, levels[1], tables[1], at, item, target)
        if item >= 0:
            take(at, item)
            at.place[item] = target
    put(at, i, h)
    if j >= 0:
        put(at, j, g)


@njit(cache=True, nogil=True)
def count_anew(at, i, gained, gpu):
    """Item i, if not -1, is given up, and an expert, if not -1, has a copy on the GPU."""
    if i >= 0:
        take(at, i)
        at.copies[at.expert[i]] -= 1
        at.expert[i], at.place[i] = -1, -1
    if gained >= 0:
        item = 0
        while at.expert[item] >= 0:
            item += 1
        at.expert[item] = gained
        at.copies[gained] += 1
        put(at, item, gpu)
