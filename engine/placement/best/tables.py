"""A layer under the time of its own: the loads of a placement, and how a move of experts between GPUs changes them; compiled
(numba).

The time of a layer is that of the busiest port in the dispatch, of the busiest GPU's FFNs, and of the busiest port in the
combine. A port's load is a sum of rows, and a move changes only rows to and from the GPUs (nodes) that it touches. Where every
copy of a token travels on its own, these are sums of demands. Where a row serves several experts, a bit stands for a token, 64
tokens of a source to a word: words tell which tokens chose an expert, and which have exactly one or at least one of their
experts on a GPU (node), so that a few operations on words count the rows that a move brings and saves.

A copy of an expert is an item. Where copies travel on their own, those of an expert divide its tokens evenly; rows that serve
several experts are served by one copy of each here, and by more in `choosing`.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

SMOOTH = 0.02
"""Weight of the 8-norms of all loads, which see the second busiest, beside the busiest ones."""


class Level(NamedTuple):
    """Receivers of one row of a token: every GPU, or every node.

    group: int64[gpu]
    kind: int64[net], the source as far as it matters to the rows of this level
    sends, takes: int64[group, kind], the ports of such a row; the last one, which has no load, of a row that stays
    out, into: int64[group, segment], the same for the words of a source
    """

    group: np.ndarray
    kind: np.ndarray
    sends: np.ndarray
    takes: np.ndarray
    out: np.ndarray
    into: np.ndarray


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
    bits: uint64[expert + 1, word], the tokens that chose an expert; the last row, of no expert, is empty
    heavy: int64[word], how many times its bits count double
    unit: tokens that a bit counts for that does so no time
    words: int64[segment + 1], the begin of the words of a source
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
    bits: np.ndarray
    heavy: np.ndarray
    unit: float
    words: np.ndarray


class Counts(NamedTuple):
    """The tokens that have experts in a group of a level.

    digits: uint64[group, digit, word], how many of its experts each token has there, as binary numbers across words
    one, some: uint64[group, word], the tokens that have exactly and at least one
    carry: uint64[word], tally: int64[2, word]: room to count in
    heavy: of the layer
    """

    digits: np.ndarray
    one: np.ndarray
    some: np.ndarray
    carry: np.ndarray
    tally: np.ndarray
    heavy: np.ndarray


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
    """(the state of a placement, the counts of both levels).

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
    return at, (_counts(layer, levels[0], at), _counts(layer, levels[1], at))


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


@intrinsic
def _bits_in(typing, word):
    """The number of ones in a word."""
    return types.uint64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@njit(cache=True, nogil=True)
def _counts(layer, level, at):
    words, groups = len(layer.heavy), len(level.sends)
    if groups == 1 or words == 0:  # nothing ever changes
        groups = words = 0
    most = 0
    while 1 << most <= layer.member.shape[1]:
        most += 1
    digits, one = np.zeros((groups, most, words), dtype=np.uint64), np.zeros((groups, words), dtype=np.uint64)
    room = np.zeros(words, dtype=np.uint64), np.zeros((2, words), dtype=np.int64)
    counts = Counts(digits, one, np.zeros_like(one), *room, layer.heavy)
    if groups == 0:
        return counts
    for item in range(len(at.place)):
        _add(digits[level.group[at.place[item]]], layer.bits[at.expert[item]], counts.carry)
    for group in range(groups):
        _tell(counts, group)
        for word in range(words):
            counts.tally[0, word] = np.int64(_bits_in(counts.some[group, word])) << layer.heavy[word]
        _spread(layer.words, layer.unit, level.out, level.into, group, counts.tally, 0, at.rows)
    return counts


# Loops over words are innermost and do one thing, so that the compiler makes vector instructions of them.


@njit(cache=True, nogil=True)
def _add(digits, bits, carry):
    """Tokens of these bits have one expert more: binary addition, digit by digit, of all tokens at once. carry: room"""
    carry[:] = bits
    for digit in range(len(digits)):
        row = digits[digit]
        for word in range(len(carry)):
            row[word], carry[word] = row[word] ^ carry[word], row[word] & carry[word]


@njit(cache=True, nogil=True)
def _remove(digits, bits, carry):
    carry[:] = bits
    for digit in range(len(digits)):
        row = digits[digit]
        for word in range(len(carry)):
            row[word], carry[word] = row[word] ^ carry[word], ~row[word] & carry[word]


@njit(cache=True, nogil=True)
def _tell(counts, group):
    """Derive the tokens with one and with some from the digits."""
    digits, one, some = counts.digits[group], counts.one[group], counts.some[group]
    some[:] = 0
    for digit in range(1, len(digits)):
        row = digits[digit]
        for word in range(len(some)):
            some[word] |= row[word]
    row = digits[0]
    for word in range(len(some)):
        one[word] = row[word] & ~some[word]
        some[word] |= row[word]


@njit(cache=True, nogil=True)
def _exchanged(in_bits, level, counts, i, j, g, h, change):
    """Add the changes of rows of a level if expert i goes from GPU g to GPU h and expert j, if not -1, back."""
    (bits, words, unit), own, other = in_bits, level.group[g], level.group[h]
    if own == other:
        return
    # Indices into whole arrays: each view of a row would cost as much as thirty words.
    one, some, heavy, tally = counts.one, counts.some, counts.heavy, counts.tally
    for word in range(len(heavy)):
        only_i, only_j = bits[i, word] & ~bits[j, word], bits[j, word] & ~bits[i, word]
        come, go = _bits_in(only_j & ~some[own, word]), _bits_in(only_i & one[own, word])
        tally[0, word] = np.int64(come) - np.int64(go) << heavy[word]
        come, go = _bits_in(only_i & ~some[other, word]), _bits_in(only_j & one[other, word])
        tally[1, word] = np.int64(come) - np.int64(go) << heavy[word]
    _spread(words, unit, level.out, level.into, own, tally, 0, change)
    _spread(words, unit, level.out, level.into, other, tally, 1, change)


@njit(cache=True, nogil=True)
def _spread(words, unit, out, into, group, tally, side, change):
    """Add the rows int64[side, word] to a group to those of the ports."""
    port, run, whole, word = len(change) - 1, 0.0, 0, 0
    for segment in range(len(words) - 1):
        before = whole
        while word < words[segment + 1]:
            whole += tally[side, word]
            word += 1
        rows = unit * (whole - before)
        change[out[group, segment]] += rows
        # Rows of many sources end at one port: their sum is kept in a register, as memory would be waited for every time.
        if into[group, segment] != port:
            change[port] += run
            port, run = into[group, segment], 0.0
        run += rows
    change[port] += run


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
            port, run = len(change) - 1, 0.0
            for kind in range(layer.demand.shape[1]):
                rows = share * layer.demand[expert, kind]
                change[level.sends[gpu, kind]] += rows
                if level.takes[gpu, kind] != port:
                    change[port] += run
                    port, run = level.takes[gpu, kind], 0.0
                run += rows
            change[port] += run
        if was:
            longer[gpu] -= layer.ffn[expert, before - 1, gpu]
        if will:
            longer[gpu] += layer.ffn[expert, after - 1, gpu]


@njit(cache=True, nogil=True)
def changes(layer, levels, counts, at, move, change, longer):
    """Write the changes of a move, see `annealing.draw`, of float64[port + 1] rows and float64[gpu] seconds."""
    counting, g, h, i, j, gained = move
    change[:], longer[:] = 0.0, 0.0
    one, two = at.expert[i] if i >= 0 else -1, at.expert[j] if j >= 0 else -1
    if len(layer.demand):
        if one >= 0:
            _recounted(layer, levels[0], at, one, g, -1 if counting else h, change, longer)
        if two >= 0:
            _recounted(layer, levels[0], at, two, h, g, change, longer)
        if gained >= 0:
            _recounted(layer, levels[0], at, gained, -1, g, change, longer)
        return
    longer[g] -= layer.ffn[one, 0, g]
    longer[h] += layer.ffn[one, 0, h]
    if two >= 0:
        longer[h] -= layer.ffn[two, 0, h]
        longer[g] += layer.ffn[two, 0, g]
    in_bits = layer.bits, layer.words, layer.unit
    _exchanged(in_bits, levels[0], counts[0], one, two, g, h, change)
    _exchanged(in_bits, levels[1], counts[1], one, two, g, h, change)


@njit(cache=True, nogil=True)
def carry_out(layer, levels, counts, at, move):
    """Do a move, see `annealing.draw`."""
    counting, g, h, i, j, gained = move
    if not counting and len(layer.heavy):
        one, two = at.expert[i], at.expert[j] if j >= 0 else -1
        _regroup(layer.bits, levels[0].group, counts[0], one, two, g, h)
        _regroup(layer.bits, levels[1].group, counts[1], one, two, g, h)
    if counting:
        count_anew(at, i, gained, g)
        return
    exchange(at, i, j, g, h)


@njit(cache=True, nogil=True)
def _regroup(bits, group, counts, i, j, g, h):
    """Expert i goes from GPU g to GPU h and expert j, if not -1, back: in the counts of a level."""
    own, other = group[g], group[h]
    if own == other:
        return
    digits, carry = counts.digits, counts.carry
    _remove(digits[own], bits[i], carry)
    _add(digits[other], bits[i], carry)
    if j >= 0:
        _remove(digits[other], bits[j], carry)
        _add(digits[own], bits[j], carry)
    _tell(counts, own)
    _tell(counts, other)


@njit(cache=True, nogil=True)
def exchange(at, i, j, g, h):
    """Item i goes from GPU g to h and item j, if not -1, back."""
    take(at, i)
    if j >= 0:
        take(at, j)
        put(at, j, g)
    put(at, i, h)


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})
def longest(layer, rows, change, busy, longer):
    """Seconds of loads and their changes: of the busiest port in dispatch and in combine and of the longest FFNs, together."""
    dispatch, combine, ffn = 0.0, 0.0, 0.0
    for port in range(len(layer.there)):
        moved = rows[port] + change[port]
        there, back = layer.start[port] + moved * layer.there[port], layer.start[port] + moved * layer.back[port]
        dispatch = max(dispatch, there if moved > layer.least else 0.0)
        combine = max(combine, back if moved > layer.least else 0.0)
    for gpu in range(len(busy)):
        ffn = max(ffn, busy[gpu] + longer[gpu])
    return dispatch + ffn + combine


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
def seconds_of(layer: Layer, levels: tuple[Level, Level], expert: np.ndarray, place: np.ndarray) -> float:
    """Seconds of dispatch, FFNs and combine of a placement; arguments as in `begin`."""
    at, _ = begin(layer, levels, expert, place)
    nothing = np.zeros(len(at.rows))
    return weigh(layer, at.rows, nothing, at.busy, np.zeros(len(at.busy)), np.zeros(3, dtype=np.int64))[0]


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
