"""The search of `tables` where a row serves several experts and these have copies; compiled (numba).

Either copies serve in turn, or every token chooses those that touch the fewest GPUs or nodes. Rows are then no sum over copies,
so a move serves all tokens anew that have one of its experts. Of copies that are as good for a token that chooses a fixed one
serves it, evenly spread over tokens: the rule proper takes the one with the fewest choices so far, which a change anywhere may
alter. The simulation of the answer follows the rule proper.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.placement.best.tables import Layer, Level, State, count_anew, draw, put, take, weigh
from engine.placement.coactivation.copies import listed, touch


class Chooser(NamedTuple):
    """A layer with copies of experts.

    layer: with nets int32[net, choice] of experts in the order in which tokens chose them, -1 = none; without turns tokens
        choose
    home: int64[net], the group that the tokens are in, which costs nothing
    group: int64[gpu], GPUs or nodes, of which the fewest are touched
    ffn: float64[kind, tokens] seconds of an expert's tokens on a kind of GPU, where tokens choose
    kind: int64[gpu]
    """

    layer: Layer
    home: np.ndarray
    group: np.ndarray
    ffn: np.ndarray
    kind: np.ndarray


class Served(NamedTuple):
    """The copies that serve the tokens.

    gpu: int64[net, choice], -1 = none
    tokens: float64[expert, gpu]
    copies, near: GPUs and groups with an expert, int64[expert, place], ascending, -1 behind the last
    """

    gpu: np.ndarray
    tokens: np.ndarray
    copies: np.ndarray
    near: np.ndarray


@njit(cache=True, nogil=True)
def begin(chooser: Chooser, levels: tuple[Level, Level], expert: np.ndarray, place: np.ndarray) -> tuple[State, Served]:
    """(the state of a placement, the copies that serve).

    expert, place: int64[item], -1 = unused
    """
    layer = chooser.layer
    experts, gpus, nets = len(layer.ffn), len(layer.room), len(layer.member)
    held = np.full((gpus, max(layer.room.max(), 1)), -1)
    counts, on = np.zeros(experts, dtype=np.int64), np.zeros((experts, gpus), dtype=np.bool_)
    used, slot = np.zeros(gpus, dtype=np.int64), np.zeros(len(expert), dtype=np.int64)
    rows, busy = np.zeros(len(layer.there) + 1), np.zeros(gpus)
    at = State(expert.copy(), place.copy(), counts, on, used, held, slot, rows, busy)
    for item in range(len(expert)):
        if expert[item] >= 0:
            counts[expert[item]] += 1
            put(at, item, place[item])
    copies, near = np.full((experts, gpus + 1), -1), np.full((experts, gpus + 1), -1)
    served = Served(np.full((nets, layer.member.shape[1]), -1), np.zeros((experts, gpus)), copies, near)
    for one in range(experts):
        _list_anew(chooser, at, served, one)
    touched = np.zeros(chooser.group.max() + 1, dtype=np.bool_)
    for net in range(nets):
        _serve(chooser, served, net, touched, served.gpu[net])
        _count(chooser, levels, net, served.gpu[net], 1.0, rows, served.tokens)
    for one in range(experts):
        _share_alike(chooser, at, served.tokens, one)
    _price(chooser, np.zeros((experts, gpus)), served.tokens, busy)
    return at, served


@njit(cache=True, nogil=True)
def _share_alike(chooser, at, tokens, expert):
    """Give all copies of an expert that serve in turn equal parts of its tokens float64[expert, gpu], as for FFNs."""
    if chooser.layer.turn.shape[1]:
        tokens[expert] = at.on[expert] * (tokens[expert].sum() / at.on[expert].sum())


@njit(cache=True, nogil=True)
def _list_anew(chooser, at, served, expert):
    """The GPUs and groups of an expert, after its copies have changed."""
    copies, near = listed(at.on[expert : expert + 1], chooser.group)
    served.copies[expert], served.near[expert] = -1, -1
    served.copies[expert, : copies.shape[1]] = copies[0]
    served.near[expert, : near.shape[1]] = near[0]


@njit(cache=True, nogil=True)
def _serve(chooser, served, net, touched, gpu_of):
    """Write the GPUs that serve a net's choices."""
    chosen, turns = chooser.layer.member[net], chooser.layer.turn[net]
    if len(turns):
        for at in range(len(chosen)):
            copies = served.copies[chosen[at]]
            gpu_of[at] = copies[turns[at] % np.argmin(copies)] if chosen[at] >= 0 else -1
        return
    touched[:] = False
    touched[chooser.home[net]] = True
    touch(chosen, served.near, touched)
    for at in range(len(chosen)):
        gpu_of[at] = -1
        if chosen[at] < 0:
            continue
        as_good = 0
        for gpu in served.copies[chosen[at]]:
            if gpu < 0:
                break
            as_good += touched[chooser.group[gpu]]
        turn = (net + at) % as_good
        for gpu in served.copies[chosen[at]]:
            if touched[chooser.group[gpu]]:
                if turn == 0:
                    gpu_of[at] = gpu
                    break
                turn -= 1


@njit(cache=True, nogil=True)
def _count(chooser, levels, net, gpu_of, sign, rows, tokens):
    """Add the rows and the tokens of a net to those of ports and copies, or with a minus take them away."""
    layer = chooser.layer
    weight = sign * layer.weight[net]
    for at in range(len(gpu_of)):
        if gpu_of[at] >= 0:
            tokens[layer.member[net, at], gpu_of[at]] += weight
    for which in range(2):
        level = levels[which]
        kind = level.kind[net]
        for at in range(len(gpu_of)):
            if gpu_of[at] < 0:
                continue
            own, first = level.group[gpu_of[at]], True
            for before in range(at):
                if gpu_of[before] >= 0 and level.group[gpu_of[before]] == own:
                    first = False
                    break
            if first:
                rows[level.sends[own, kind]] += weight
                rows[level.takes[own, kind]] += weight


@njit(cache=True, nogil=True)
def _ffn(chooser, expert, gpu, tokens, of_all):
    """Seconds of so many of an expert's tokens on a GPU; of whole numbers of them, between these on a line."""
    if chooser.layer.turn.shape[1] and tokens > 0:
        return chooser.layer.ffn[expert, int(of_all / tokens + 0.5) - 1, gpu]
    table = chooser.ffn[chooser.kind[gpu]]
    tokens = min(max(tokens, 0.0), len(table) - 1.0)
    below = int(tokens)
    if below + 1 >= len(table):
        return table[below]
    return table[below] + (tokens - below) * (table[below + 1] - table[below])


@njit(cache=True, nogil=True)
def _price(chooser, tokens, more, longer):
    """Add the seconds that FFNs take longer with more tokens, both float64[expert, gpu]."""
    for expert in range(tokens.shape[0]):
        if not more[expert].any():
            continue
        of_all = max(tokens[expert].sum(), more[expert].sum())
        for gpu in range(tokens.shape[1]):
            if more[expert, gpu] != 0:
                now = tokens[expert, gpu]
                then = _ffn(chooser, expert, gpu, now + more[expert, gpu], of_all)
                longer[gpu] += then - _ffn(chooser, expert, gpu, now, of_all)


@njit(cache=True, nogil=True)
def seconds_of(chooser: Chooser, levels: tuple[Level, Level], expert: np.ndarray, place: np.ndarray) -> float:
    """Seconds of dispatch, FFNs and combine of a placement; arguments as in `begin`."""
    at, _ = begin(chooser, levels, expert, place)
    nothing = np.zeros(len(at.rows))
    return weigh(chooser.layer, at.rows, nothing, at.busy, np.zeros(len(at.busy)), np.zeros(3, dtype=np.int64))[0]


@njit(cache=True, nogil=True)
def anneal(
    chooser: Chooser,
    levels: tuple[Level, Level],
    at: State,
    served: Served,
    best: tuple[np.ndarray, np.ndarray],
    lowest: float,
    span: tuple[float, float, int],
    seed: int,
    hurry: np.ndarray,
) -> tuple[float, int]:
    """Change a state by random moves at a falling temperature; arguments and answer as in `tables.anneal`."""
    np.random.seed(seed)
    layer, (hot, cold, moves) = chooser.layer, span
    gpus, experts = len(layer.room), len(layer.ffn)
    change, longer, leader, ahead = np.zeros(len(at.rows)), np.zeros(gpus), np.zeros(3, np.int64), np.zeros(3, np.int64)
    _, value = weigh(layer, at.rows, change, at.busy, longer, leader)
    recounts = len(at.expert) > experts
    touched, more = np.zeros(chooser.group.max() + 1, dtype=np.bool_), np.zeros((experts, gpus))
    anew, hosts = np.zeros(len(layer.member), dtype=np.int64), np.empty_like(served.gpu)
    marked, accepted, temperature = np.zeros(len(layer.member), dtype=np.bool_), 0, hot
    for move in range(moves):
        if move % 16 == 0:
            if hurry[0]:
                break
            temperature = hot * (cold / hot) ** (move / moves)
        legal, counting, g, h, i, j, gained = draw(layer.room, at, leader, recounts)
        if not legal:
            continue
        one = at.expert[i] if i >= 0 else -1
        two = gained if counting else (at.expert[j] if j >= 0 else -1)
        _flip(at, counting, one, two, g, h)
        change[:], longer[:], more[:] = 0.0, 0.0, 0.0
        affected = _serve_anew(chooser, levels, at, served, (one, two), marked, anew, touched, hosts, change, more)
        _price(chooser, served.tokens, more, longer)
        seconds, after = weigh(layer, at.rows, change, at.busy, longer, ahead)
        if after > value and np.random.random() >= np.exp((value - after) / temperature):
            _flip(at, counting, one, two, g, h)
            for expert in (one, two):
                if expert >= 0:
                    _list_anew(chooser, at, served, expert)
            continue
        accepted += 1
        value = after
        leader[:] = ahead
        at.rows[:] += change
        at.busy[:] += longer
        served.tokens[:] += more
        for number in range(affected):
            served.gpu[anew[number]] = hosts[number]
        _flip(at, counting, one, two, g, h)
        if counting:
            count_anew(at, i, gained, g)
        else:
            take(at, i)
            if j >= 0:
                take(at, j)
                put(at, j, g)
            put(at, i, h)
        if seconds < lowest * (1 - 1e-12):
            lowest = seconds
            best[0][:] = at.expert
            best[1][:] = at.place
    return lowest, accepted


@njit(cache=True, nogil=True)
def _serve_anew(chooser, levels, at, served, moved, marked, anew, touched, hosts, change, more):
    """The number of nets that have one of two experts (-1 = none), which moved; write which, and who serves them, and add to
    the changes of rows and tokens."""
    first = chooser.layer.first
    affected = 0
    for expert in moved:
        if expert < 0:
            continue
        _list_anew(chooser, at, served, expert)
        for membership in range(first[expert], first[expert + 1]):
            net = chooser.layer.net[membership]
            if not marked[net]:
                marked[net] = True
                anew[affected] = net
                affected += 1
    for number in range(affected):
        net = anew[number]
        marked[net] = False
        _serve(chooser, served, net, touched, hosts[number])
        if (served.gpu[net] != hosts[number]).any():
            _count(chooser, levels, net, served.gpu[net], -1.0, change, more)
            _count(chooser, levels, net, hosts[number], 1.0, change, more)
    for expert in moved:
        if expert >= 0:
            more[expert] += served.tokens[expert]
            _share_alike(chooser, at, more, expert)
            more[expert] -= served.tokens[expert]
    return affected


@njit(cache=True, nogil=True)
def _flip(at, counting, one, two, g, h):
    """Do a move on `on` alone, or undo it: experts one and two change places, or on GPU g two takes the place of one."""
    for expert in (one, two):
        if expert >= 0:
            at.on[expert, g] = not at.on[expert, g]
            if not counting:
                at.on[expert, h] = not at.on[expert, h]
