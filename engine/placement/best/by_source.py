"""The search where the rank that sends decides which copy of an expert serves its tokens, for one model or for two that share
the GPUs; compiled (numba).

The rules are those of `engine.placement.dispatch_rules` as far as a placement of one layer tells them: where ranks draw, they
are dealt the copies in turn instead, and a linear programme counts as equal parts. The simulation of the answer follows the
rules proper. With one copy of every expert there is nothing to choose.

Two models take their steps as Aurora's table 2 has them: one computes while the other sends, their all-to-alls meet on the same
ports, and those of the first come first. A single model is two of which the second has no expert.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.placement.best.annealing import draw
from engine.placement.best.tables import SMOOTH, Layer, Level, State, count_anew, exchange, put
from engine.plan import Travel

IN_TURN, STATIC, DYNAMIC, FIXED = range(4)
"""Copies that share alike; one's own, else the node's first, else one of all or all alike; the copy of a rank's number."""


class Shared(NamedTuple):
    """A layer of one or two models.

    layers: of both
    demand: of both, float64[expert, rank] tokens
    table: of both, float64[kind, so many steps of tokens] seconds of an expert's tokens on a kind of GPU
    step: of both, tokens
    kind: int64[gpu]
    fixed: float64[3, gpu] seconds of the second model's gate, of the first one's aggregation, and of the second one's with the
        gate that follows
    rule: see above
    per_node: ranks of a node, so many in a row
    items: of the first model
    """

    layers: tuple[Layer, Layer]
    demand: tuple[np.ndarray, np.ndarray]
    table: tuple[np.ndarray, np.ndarray]
    step: tuple[float, float]
    kind: np.ndarray
    fixed: np.ndarray
    rule: int
    per_node: int
    items: int


Levels = tuple[Level, Level, Level, Level]
"""The two of the first model, then those of the second."""
Known = tuple[Shared, Levels]


class Loads(NamedTuple):
    """Loads of both models: rows float64[model, port + 1] and seconds of FFNs float64[model, gpu]."""

    rows: np.ndarray
    busy: np.ndarray


@njit(cache=True, nogil=True)
def _begin(shared, levels, m, expert, place, loads):
    """The state of a model, and the copies of its ranks."""
    layer = shared.layers[m]
    experts, gpus = len(layer.ffn), len(layer.room)
    copies, on = np.zeros(experts, dtype=np.int64), np.zeros((experts, gpus), dtype=np.bool_)
    held, used = np.full((gpus, max(layer.room.max(), 1)), -1), np.zeros(gpus, dtype=np.int64)
    at = State(expert, place, copies, on, used, held, np.zeros(len(expert), dtype=np.int64), loads.rows[m], loads.busy[m])
    for item in range(len(expert)):
        if expert[item] >= 0:
            copies[expert[item]] += 1
            put(at, item, place[item])
    pick = np.full((experts, gpus), -1)
    for one in range(experts):
        choose(shared.rule, shared.per_node, on[one], one, pick[one])
    _lift(shared, levels, m, at, pick, np.arange(experts), np.arange(len(layer.member)), 1.0, loads)
    return at, pick


@njit(cache=True, nogil=True)
def begin(shared: Shared, levels: Levels, expert: np.ndarray, place: np.ndarray) -> tuple:
    """(the states of both models, the copy int64[expert, rank] of each, -1 where all share alike; the loads).

    expert, place: int64[item], -1 = unused; experts of the second model are counted on from those of the first
    """
    experts, items = len(shared.layers[0].ffn), shared.items
    loads = Loads(np.zeros((2, len(shared.layers[0].there) + 1)), np.zeros((2, len(shared.layers[0].room))))
    first, pick_first = _begin(shared, levels, 0, expert[:items].copy(), place[:items].copy(), loads)
    behind = np.where(expert[items:] >= 0, expert[items:] - experts, -1)
    second, pick_second = _begin(shared, levels, 1, behind, place[items:].copy(), loads)
    return (first, second), ((pick_first, pick_second), loads)


@njit(cache=True, nogil=True)
def choose(rule: int, per_node: int, on: np.ndarray, expert: int, pick: np.ndarray) -> None:
    """Write the copy of an expert that serves every rank, int64[rank]; -1 where all serve alike.

    rule, per_node: see `Shared`
    on: bool[gpu], the copies
    """
    gpus, count = len(on), on.sum()
    copies = np.flatnonzero(on)
    for rank in range(gpus):
        if count == 1:
            pick[rank] = copies[0]
        elif rule == IN_TURN:
            pick[rank] = -1
        elif rule == FIXED:
            pick[rank] = copies[rank % count]
        elif on[rank]:
            pick[rank] = rank
        else:
            begin = rank // per_node * per_node
            near = np.flatnonzero(on[begin : begin + per_node])
            if 0 < len(near) < count:
                pick[rank] = begin + near[0]
            else:
                pick[rank] = copies[(rank + expert) % count] if rule == STATIC else -1


@njit(cache=True, nogil=True)
def _ffns(layer, demand, table, step, kind, on, pick, expert, sign, busy):
    """Add the seconds of an expert's copies, or with a minus take them away."""
    gpus, count = len(on[expert]), on[expert].sum()
    if count == 1:
        busy[pick[expert, 0]] += sign * layer.ffn[expert, 0, pick[expert, 0]]
        return
    tokens = np.zeros(gpus)
    for rank in range(gpus):
        if pick[expert, rank] >= 0:
            tokens[pick[expert, rank]] += demand[expert, rank]
        else:
            tokens += on[expert] * (demand[expert, rank] / count)
    for gpu in range(gpus):
        if on[expert, gpu]:
            of_kind, steps = table[kind[gpu]], tokens[gpu] / step
            below = min(int(steps), len(of_kind) - 2)
            busy[gpu] += sign * (of_kind[below] + (steps - below) * (of_kind[below + 1] - of_kind[below]))


@njit(cache=True, nogil=True)
def _demands(level, demand, on, pick, expert, sign, rows):
    """Add the rows of an expert's tokens, each of which travels on its own, or with a minus take them away."""
    gpus, count = on.shape[1], on[expert].sum()
    for rank in range(gpus):
        if demand[expert, rank] == 0:
            continue
        only, kind, moved = pick[expert, rank], rank, sign * demand[expert, rank]
        if only >= 0:
            rows[level.sends[only, kind]] += moved
            rows[level.takes[only, kind]] += moved
            continue
        for gpu in range(gpus):
            if on[expert, gpu]:
                rows[level.sends[gpu, kind]] += moved / count
                rows[level.takes[gpu, kind]] += moved / count


@njit(cache=True, nogil=True)
def _rows(layer, one, two, pick, net, sign, rows):
    """Add the rows of a net, one to every GPU (and node) that serves it, or with a minus take them away."""
    members, rank, weight = layer.member[net], layer.source[net], sign * layer.weight[net]
    for which in range(2):
        level = one if which == 0 else two
        kind = level.kind[net]
        for at in range(len(members)):
            if members[at] < 0:
                continue
            own, first = level.group[pick[members[at], rank]], True
            for before in range(at):
                if members[before] >= 0 and level.group[pick[members[before], rank]] == own:
                    first = False
                    break
            if first:
                rows[level.sends[own, kind]] += weight
                rows[level.takes[own, kind]] += weight


@njit(cache=True, nogil=True)
def weigh(shared: Shared, rows: np.ndarray, busy: np.ndarray, leader: np.ndarray) -> tuple[float, float]:
    """(seconds, seconds with the norms) of loads; the GPUs of the busiest port in dispatch and combine and of the longest FFNs
    into leader int64[3].

    rows, busy: see `Loads`
    """
    a, b = shared.layers
    ports, gpus = len(a.there), len(a.room)
    # Dispatches of a, b and both, combines of a and b, and of both as norms see them
    longest, power, top = np.zeros(5), np.zeros(3), np.zeros(3)
    for port in range(ports):
        some_a, some_b = rows[0, port] > a.least, rows[1, port] > b.least
        if not (some_a or some_b):
            continue
        start = a.start[port]
        there_a, there_b = some_a * rows[0, port] * a.there[port], some_b * rows[1, port] * b.there[port]
        back_a, back_b = some_a * rows[0, port] * a.back[port], some_b * rows[1, port] * b.back[port]
        if some_a:
            longest[0], longest[3] = max(longest[0], start + there_a), max(longest[3], start + back_a)
        if some_b:
            longest[1], longest[4] = max(longest[1], start + there_b), max(longest[4], start + back_b)
        out, back = start + there_a + there_b, start + back_a + back_b
        longest[2] = max(longest[2], out)
        if out > top[0]:
            top[0], leader[0] = out, a.owner[port]
        if back > top[1]:
            top[1], leader[1] = back, a.owner[port]
        power[0] += out**8
        power[1] += back**8
    dispatch_a, dispatch_b, both, back_a, back_b = longest
    gate, aggregate, last = shared.fixed
    both = max(both, gate.max() + dispatch_b)
    combined_a = combined_b = both
    for gpu in range(gpus):
        ffn = busy[0, gpu] + busy[1, gpu]
        if ffn > top[2]:
            top[2], leader[2] = ffn, gpu
        power[2] += ffn**8
        ended = max(dispatch_a, gate[gpu]) + busy[0, gpu]
        combined_a = max(combined_a, ended)
        combined_b = max(combined_b, max(ended, both) + busy[1, gpu])
    combined_a += back_a
    combined_b = max(combined_b, combined_a) + back_b
    seconds = 0.0
    for gpu in range(gpus):
        ended = max(max(dispatch_a, gate[gpu]) + busy[0, gpu], both) + busy[1, gpu]
        ended = max(ended, combined_a) + aggregate[gpu]
        seconds = max(seconds, max(ended, combined_b) + last[gpu])
    norms = (power[0] / max(ports, 1)) ** 0.125 + (power[1] / max(ports, 1)) ** 0.125 + (power[2] / gpus) ** 0.125
    return seconds, seconds + SMOOTH * norms


@njit(cache=True, nogil=True)
def seconds_of(shared: Shared, levels: Levels, expert: np.ndarray, place: np.ndarray) -> float:
    """Seconds of a layer under a placement; arguments as in `begin`."""
    _, (_, loads) = begin(shared, levels, expert, place)
    return weigh(shared, loads.rows, loads.busy, np.zeros(3, dtype=np.int64))[0]


@njit(cache=True, nogil=True)
def _lift(shared, levels, m, at, pick, moved, nets, sign, loads):
    """Add what these experts and nets of a model load, or with a minus take it away."""
    layer, demand = shared.layers[m], shared.demand[m]
    for expert in moved:
        if expert >= 0:
            busy = loads.busy[m]
            _ffns(layer, demand, shared.table[m], shared.step[m], shared.kind, at.on, pick, expert, sign, busy)
            if len(layer.member) == 0:
                _demands(levels[2 * m], demand, at.on, pick, expert, sign, loads.rows[m])
    for net in nets:
        _rows(layer, levels[2 * m], levels[2 * m + 1], pick, net, sign, loads.rows[m])


@njit(cache=True, nogil=True)
def _flip(shared, at, pick, counting, one, two, g, h):
    """Do a move on `on` and on the ranks' copies alone, or undo it: experts one and two change places, or on GPU g two takes
    the place of one."""
    for expert in (one, two):
        if expert >= 0:
            at.on[expert, g] = not at.on[expert, g]
            if not counting:
                at.on[expert, h] = not at.on[expert, h]
            choose(shared.rule, shared.per_node, at.on[expert], expert, pick[expert])


@njit(cache=True, nogil=True)
def _nets(layer, moved, marked, found):
    """The number of nets that have one of these experts (-1 = none); write which."""
    count = 0
    if len(layer.member):
        for expert in moved:
            for membership in range(layer.first[max(expert, 0)], layer.first[expert + 1] if expert >= 0 else 0):
                if not marked[layer.net[membership]]:
                    marked[layer.net[membership]], found[count] = True, layer.net[membership]
                    count += 1
        marked[found[:count]] = False
    return count


@njit(cache=True, nogil=True)
def anneal(
    shared: Shared,
    levels: Levels,
    states: tuple[State, State],
    more: tuple,
    best: tuple[np.ndarray, np.ndarray],
    lowest: float,
    span: tuple[float, float, int],
    seed: int,
    hurry: np.ndarray,
) -> tuple[float, int]:
    """Change the states by random moves at a falling temperature; arguments and answer as in `annealing.anneal`."""
    np.random.seed(seed)
    (hot, cold, moves), (picks, loads) = span, more
    leader, ahead, trial = np.zeros(3, np.int64), np.zeros(3, np.int64), Loads(loads.rows.copy(), loads.busy.copy())
    _, value = weigh(shared, loads.rows, loads.busy, leader)
    nets = max(len(shared.layers[0].member), len(shared.layers[1].member))
    marked, found = np.zeros(nets, dtype=np.bool_), np.zeros(nets, dtype=np.int64)
    models, accepted, temperature = 1 + (len(shared.layers[1].ffn) > 0), 0, hot
    for move in range(moves):
        if move % 16 == 0:
            if hurry[0]:
                break
            temperature = hot * (cold / hot) ** (move / moves)
        m = np.random.randint(models)
        layer, at, pick = shared.layers[m], states[m], picks[m]
        legal, (counting, g, h, i, j, gained) = draw(layer.room, at, leader, len(at.expert) > len(layer.ffn))
        if not legal:
            continue
        one = at.expert[i] if i >= 0 else -1
        two = gained if counting else (at.expert[j] if j >= 0 else -1)
        affected = found[: _nets(layer, (one, two), marked, found)]
        _lift(shared, levels, m, at, pick, (one, two), affected, -1.0, trial)
        _flip(shared, at, pick, counting, one, two, g, h)
        _lift(shared, levels, m, at, pick, (one, two), affected, 1.0, trial)
        seconds, after = weigh(shared, trial.rows, trial.busy, ahead)
        if after > value and np.random.random() >= np.exp((value - after) / temperature):
            _flip(shared, at, pick, counting, one, two, g, h)
            trial.rows[m], trial.busy[m] = loads.rows[m], loads.busy[m]
            continue
        accepted += 1
        value = after
        leader[:] = ahead
        loads.rows[m], loads.busy[m] = trial.rows[m], trial.busy[m]
        if counting:
            count_anew(at, i, gained, g)
        else:
            exchange(at, i, j, g, h)
        if seconds < lowest * (1 - 1e-12):
            lowest = seconds
            first = shared.items
            best[0][:first], best[1][:first] = states[0].expert, states[0].place
            best[0][first:], best[1][first:] = states[1].expert, states[1].place
            best[0][first:] += len(shared.layers[0].ffn) * (states[1].expert >= 0)
    return lowest, accepted


def rule_of(travel: Travel) -> int:
    """The rule by which the search takes copies. Where rows serve several experts every rank needs one copy, and ranks that
    would share copies alike are dealt them."""
    if travel.replicas == "fixed":
        return FIXED
    if travel.replicas is None:
        return IN_TURN
    return DYNAMIC if travel.unit == "copies" and travel.replicas != "nearest-static" else STATIC


class Model(NamedTuple):
    """A model's part of a layer, to be shared.

    layer, levels: as `layer_of` of the folder makes them
    demand: float64[rank, expert] tokens
    table: float64[kind, so many steps of tokens] seconds of an expert's tokens
    step: tokens
    items: of a placement
    """

    layer: Layer
    levels: tuple[Level, Level]
    demand: np.ndarray
    table: np.ndarray
    step: float
    items: int


def shared_of(first: Model, second: Model | None, kind: np.ndarray, fixed: np.ndarray, rule: int, per_node: int) -> Known:
    """A layer for the kernel, with its levels; for other arguments see `Shared`. second: None: there is one model"""
    if second is None:
        a, none, whole = first.layer, np.zeros(0), np.zeros(0, dtype=np.int64)
        parts = {"member": a.member[:0], "turn": a.turn[:0], "weight": none, "source": whole, "first": whole, "net": a.net[:0]}
        parts |= {"demand": a.demand[:0], "ffn": a.ffn[:0], "room": np.zeros_like(a.room)}
        second = first._replace(layer=a._replace(**parts), demand=first.demand[:, :0], items=0)
    both = first, second
    layers = tuple(each.layer for each in both)
    demands = tuple(np.array(each.demand.T, order="C") for each in both)  # the compiler tells what may be written apart
    tables, steps = tuple(each.table for each in both), tuple(each.step for each in both)
    shared = Shared(layers, demands, tables, steps, kind, fixed, rule, per_node, first.items)
    return shared, (*first.levels, *second.levels)


def seconds_per_move(shared: Shared) -> float:
    """Seconds of an ordinary core for a move."""
    sizes = [(len(layer.there), len(layer.net) / max(len(layer.ffn), 1), layer.member.shape[1]) for layer in shared.layers]
    ports, nets, choices = np.max(sizes, axis=0)
    return 1.5e-6 + 5e-8 * ports + 4 * nets * 4e-8 * choices
