"""The loads of `tables` where a row serves several experts and these have copies; compiled (numba).

Either copies serve in turn, or every token chooses those that touch the fewest GPUs or nodes. Rows are then no sum over copies,
so a move serves all tokens anew that have one of its experts. Of copies that are as good for a token that chooses a fixed one
serves it, evenly spread over tokens: the rule proper takes the one with the fewest choices so far, which a change anywhere may
alter. The simulation of the answer follows the rule proper.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.placement.best.tables import Layer, Level, State, count_anew, exchange, put, weigh


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
    copies, near: GPUs and groups with an expert, int64[expert, place], ascending, -1 behind the last; many: int64[expert] GPUs
    mask: uint64[expert, word], a bit for each group with the expert
    """

    gpu: np.ndarray
    tokens: np.ndarray
    copies: np.ndarray
    near: np.ndarray
    many: np.ndarray
    mask: np.ndarray


class Draft(NamedTuple):
    """The changes of a move that is looked at, and room to count them in.

    count: int64[1], the nets that are served anew; anew: int64[net], those; hosts: int64[net, choice], their new GPUs
    more: float64[expert, gpu] tokens; of: bool[expert], the experts whose tokens change
    marked: bool[net]; touched: uint64[word], a bit for each group; depth: int64[2, choice + 1]
    """

    count: np.ndarray
    anew: np.ndarray
    hosts: np.ndarray
    more: np.ndarray
    of: np.ndarray
    marked: np.ndarray
    touched: np.ndarray
    depth: np.ndarray


@njit(cache=True, nogil=True)
def draft_of(chooser: Chooser, served: Served) -> Draft:
    """Room for the changes of a move."""
    nets, choices = served.gpu.shape
    return Draft(
        np.zeros(1, dtype=np.int64),
        np.zeros(nets, dtype=np.int64),
        np.empty_like(served.gpu),
        np.zeros_like(served.tokens),
        np.zeros(len(served.tokens), dtype=np.bool_),
        np.zeros(nets, dtype=np.bool_),
        np.zeros_like(served.mask[0]),
        np.zeros((2, choices + 1), dtype=np.int64),
    )


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
    mask = np.zeros((experts, chooser.group.max() // 64 + 1), dtype=np.uint64)
    served = Served(np.full((nets, layer.member.shape[1]), -1), np.zeros((experts, gpus)), copies, near, counts.copy(), mask)
    for one in range(experts):
        _list_anew(chooser, at, served, one)
    draft = draft_of(chooser, served)
    draft.anew[:] = np.arange(nets)
    draft.count[0] = nets
    _serve(layer.member, layer.turn, chooser.home, chooser.group, served, draft)
    _count(layer.member, layer.weight, levels[0], levels[1], served.gpu, draft, rows)
    served.gpu[:] = draft.hosts
    for one in range(experts):
        _share_alike(chooser, at, draft.more, one)
    draft.of[:] = True
    _price(chooser, served.tokens, draft, busy)
    served.tokens[:] = draft.more
    return at, served


@njit(cache=True, nogil=True)
def _share_alike(chooser, at, tokens, expert):
    """Give all copies of an expert that serve in turn equal parts of its tokens float64[expert, gpu], as for FFNs."""
    if chooser.layer.turn.shape[1]:
        tokens[expert] = at.on[expert] * (tokens[expert].sum() / at.on[expert].sum())


@njit(cache=True, nogil=True)
def _list_anew(chooser, at, served, expert):
    """The GPUs and groups of an expert, after its copies have changed."""
    copies, near, mask = served.copies[expert], served.near[expert], served.mask[expert]
    mask[:] = 0
    listed = groups = 0
    for gpu in range(len(chooser.group)):
        if at.on[expert, gpu]:
            copies[listed] = gpu
            listed += 1
            _mark(mask, chooser.group[gpu], True)
    copies[listed] = -1
    served.many[expert] = listed
    for group in range(64 * len(mask)):
        if _marked(mask, group):
            near[groups] = group
            groups += 1
    near[groups] = -1


@njit(cache=True, nogil=True)
def _mark(mask, group, on):
    bit = np.uint64(1) << np.uint64(group & 63)
    if on:
        mask[group >> 6] |= bit
    else:
        mask[group >> 6] &= ~bit


@njit(cache=True, nogil=True)
def _marked(mask, group):
    return mask[group >> 6] >> np.uint64(group & 63) & np.uint64(1) > 0


@njit(cache=True, nogil=True)
def _unserved(member, net, mask, touched):
    """The first of a net's experts that no touched group serves, -1 if there is none."""
    for at in range(member.shape[1]):
        expert = member[net, at]
        if expert >= 0:
            serves = False
            for word in range(len(touched)):
                serves |= (mask[expert, word] & touched[word]) > 0
            if not serves:
                return expert
    return -1


@njit(cache=True, nogil=True)
def _touch(member, net, near, mask, touched, depths):
    """Mark the fewest further groups that serve all of a net's experts. depths: int64[2, choice + 1], room"""
    for at in range(member.shape[1]):
        expert = member[net, at]
        if expert >= 0 and near[expert, 1] < 0:
            _mark(touched, near[expert, 0], True)
    for most in range(member.shape[1] + 1):
        # Depth first: every group that serves the first expert which none marked serves, in turn.
        depth, place = 0, 0
        while True:
            expert = _unserved(member, net, mask, touched)
            if expert < 0:
                return
            if depth < most and near[expert, place] >= 0:
                depths[0, depth], depths[1, depth] = near[expert, place], place
                _mark(touched, near[expert, place], True)
                depth, place = depth + 1, 0
            elif depth == 0:
                break
            else:
                depth -= 1
                _mark(touched, depths[0, depth], False)
                place = depths[1, depth] + 1


@njit(cache=True, nogil=True)
def _serve(member, turn, home, group, served, draft):
    """Write the GPUs that serve the choices of the nets that are served anew."""
    # Indices into whole arrays, and one call for all nets: views and calls would cost more than the work on a net.
    copies, many, near, mask, touched = served.copies, served.many, served.near, served.mask, draft.touched
    for number in range(draft.count[0]):
        net = draft.anew[number]
        if turn.shape[1] == 0:
            touched[:] = 0
            _mark(touched, home[net], True)
            _touch(member, net, near, mask, touched, draft.depth)
        for at in range(member.shape[1]):
            expert = member[net, at]
            if expert < 0 or turn.shape[1]:
                draft.hosts[number, at] = copies[expert, turn[net, at] % many[expert]] if expert >= 0 else -1
                continue
            as_good = 0
            for place in range(many[expert]):
                as_good += _marked(touched, group[copies[expert, place]])
            which, place = (net + at) % as_good, 0
            while which or not _marked(touched, group[copies[expert, place]]):
                which -= _marked(touched, group[copies[expert, place]])
                place += 1
            draft.hosts[number, at] = copies[expert, place]


@njit(cache=True, nogil=True)
def _count(member, weight, near, far, gpu_of, draft, rows):
    """Take away the rows of the nets that are served anew, and their tokens in the draft, and add those from their new GPUs.

    near, far: the levels; gpu_of: int64[net, choice], the GPUs so far; rows: float64[port + 1]
    """
    for number in range(draft.count[0]):
        net, same = draft.anew[number], True
        for at in range(member.shape[1]):
            same &= gpu_of[net, at] == draft.hosts[number, at]
        if same:
            continue
        for at in range(member.shape[1]):
            expert = member[net, at]
            if expert >= 0:
                if gpu_of[net, at] >= 0:
                    draft.more[expert, gpu_of[net, at]] -= weight[net]
                draft.more[expert, draft.hosts[number, at]] += weight[net]
                draft.of[expert] = True
        for side in range(2):
            hosts, row = (draft.hosts, number) if side else (gpu_of, net)
            tokens = weight[net] if side else -weight[net]
            _count_level(near.group, near.sends, near.takes, near.kind[net], hosts, row, tokens, rows)
            if len(far.sends) > 1:
                _count_level(far.group, far.sends, far.takes, far.kind[net], hosts, row, tokens, rows)


@njit(cache=True, nogil=True)
def _count_level(group, sends, takes, kind, hosts, row, tokens, rows):
    for at in range(hosts.shape[1]):
        if hosts[row, at] < 0:
            continue
        own, first = group[hosts[row, at]], True
        for before in range(at):
            first &= hosts[row, before] < 0 or group[hosts[row, before]] != own
        if first:
            rows[sends[own, kind]] += tokens
            rows[takes[own, kind]] += tokens


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
def _price(chooser, tokens, draft, longer):
    """Add the seconds that FFNs take longer with the draft's tokens more than float64[expert, gpu]."""
    for expert in range(len(tokens)):
        if not draft.of[expert]:
            continue
        of_all = max(tokens[expert].sum(), draft.more[expert].sum())
        for gpu in range(tokens.shape[1]):
            if draft.more[expert, gpu] != 0:
                now = tokens[expert, gpu]
                then = _ffn(chooser, expert, gpu, now + draft.more[expert, gpu], of_all)
                longer[gpu] += then - _ffn(chooser, expert, gpu, now, of_all)


@njit(cache=True, nogil=True)
def seconds_of(chooser: Chooser, levels: tuple[Level, Level], expert: np.ndarray, place: np.ndarray) -> float:
    """Seconds of dispatch, FFNs and combine of a placement; arguments as in `begin`."""
    at, _ = begin(chooser, levels, expert, place)
    nothing = np.zeros(len(at.rows))
    return weigh(chooser.layer, at.rows, nothing, at.busy, np.zeros(len(at.busy)), np.zeros(3, dtype=np.int64))[0]


@njit(cache=True, nogil=True)
def changes(chooser, served, levels, at, move, draft, change, longer):
    """Write the changes of a move, see `annealing`, and who then serves its experts' tokens into a draft; the lists of copies
    change with it, until `take_back`."""
    change[:], longer[:] = 0.0, 0.0
    for expert in range(len(draft.of)):
        if draft.of[expert]:
            draft.more[expert], draft.of[expert] = 0.0, False
    moved = _moved(at, move)
    _flip(at, move, moved)
    first, affected = chooser.layer.first, 0
    for expert in moved:
        if expert < 0:
            continue
        _list_anew(chooser, at, served, expert)
        for membership in range(first[expert], first[expert + 1]):
            net = chooser.layer.net[membership]
            if not draft.marked[net]:
                draft.marked[net] = True
                draft.anew[affected] = net
                affected += 1
    draft.count[0] = affected
    for number in range(affected):
        draft.marked[draft.anew[number]] = False
    layer = chooser.layer
    _serve(layer.member, layer.turn, chooser.home, chooser.group, served, draft)
    _count(layer.member, layer.weight, levels[0], levels[1], served.gpu, draft, change)
    for expert in moved:
        if expert >= 0:
            draft.more[expert] += served.tokens[expert]
            _share_alike(chooser, at, draft.more, expert)
            draft.more[expert] -= served.tokens[expert]
            draft.of[expert] = True  # also where every token keeps its copy, but one more or fewer shares
    _price(chooser, served.tokens, draft, longer)


@njit(cache=True, nogil=True)
def take_back(chooser, served, at, move):
    """Undo what `changes` did to the lists of copies."""
    moved = _moved(at, move)
    _flip(at, move, moved)
    for expert in moved:
        if expert >= 0:
            _list_anew(chooser, at, served, expert)


@njit(cache=True, nogil=True)
def carry_out(chooser, served, at, move, draft):
    """Do a move whose changes are in the draft."""
    for expert in range(len(draft.of)):
        if draft.of[expert]:
            served.tokens[expert] += draft.more[expert]
    for number in range(draft.count[0]):
        served.gpu[draft.anew[number]] = draft.hosts[number]
    _flip(at, move, _moved(at, move))
    counting, g, h, i, j, gained = move
    if counting:
        count_anew(at, i, gained, g)
    else:
        exchange(at, i, j, g, h)


@njit(cache=True, nogil=True)
def _moved(at, move):
    """The experts whose copies a move changes, -1 = none."""
    counting, _, _, i, j, gained = move
    two = gained if counting or j < 0 else at.expert[j]
    return at.expert[i] if i >= 0 else -1, two


@njit(cache=True, nogil=True)
def _flip(at, move, moved):
    """Do a move on `on` alone, or undo it: two experts change places, or on GPU g the second takes the place of the first."""
    counting, g, h = move[:3]
    for expert in moved:
        if expert >= 0:
            at.on[expert, g] = not at.on[expert, g]
            if not counting:
                at.on[expert, h] = not at.on[expert, h]
