"""The copy of an expert that serves the tokens of a rank, by the rule of the engine that dispatches them.

Engines share a replicated expert's tokens in ways of their own:

* in turn (no rule): every copy serves as much as the others, whoever sends. SGLang without an all-to-all backend
* `nearest-static` (SGLang 0.5.23 with one, such as DeepEP; its default): a rank has one copy of every expert. Its own, else
  the first of its node if others are elsewhere, else one that every rank draws for itself when the placement is loaded, with
  the generator of Python's `random` and the seed 42. It draws in the order of layers and experts for each expert that it has
  not near, for all ranks that have none near (each copy as often as the others, the rest drawn), and takes its own place in
  the shuffled list. Ranks whose copies differ draw from different points of one sequence, so their choices do not balance
* `nearest-dynamic` (the same with `dynamic`): its own or its node's first copy as above, else all copies in turn
* `fixed` (vLLM-Ascend, commit 182b75e): rank r has copy r modulo the copies, in the order of ranks, near or not
* `lp` (SGLang with `lp`): the division over copies that leaves the busiest GPU least, by a linear programme over all ranks'
  counts

`fewest` chooses for every token alone, see `engine.communication.travel`. A node is a run of `Travel.ranks_per_node` ranks.
"""

import functools
import random

import numba
import numpy as np

from engine.plan import Placement, Travel

SEED = 42
DRAWS = 2**20
"""32-bit numbers of the sequence that are kept: a rank of 320 uses up some hundred thousand for 58 layers of 32 spare slots,
and one that used up more would begin anew."""
TABLED = ("nearest-static", "fixed")
"""Rules that give a rank one copy of every expert."""


def shares_of_ranks(placement: Placement, travel: Travel, layer: int, load: np.ndarray) -> np.ndarray:
    """The share of a rank's tokens that each GPU serves: float64[source rank, expert, gpu], or float64[expert, gpu] where all
    sources share alike.

    load: float64[expert] token copies of the layer in all
    """
    rule, share = travel.replicas, placement.share[layer]
    if rule == "lp":
        return _least_busy(share > 0, load)
    if rule in TABLED:
        table = copy_of_rank(placement, travel)[layer]
        return _one_hot(table, placement.gpus)
    if rule == "nearest-dynamic":
        near = _near(placement, travel.ranks_per_node or placement.gpus)[layer]
        spread = np.broadcast_to(share, (placement.gpus, *share.shape))
        return np.where(near[:, :, None] >= 0, _one_hot(near, placement.gpus), spread)
    return share


def hosts_of_tokens(placement: Placement, travel: Travel, layer: int, experts: np.ndarray, source: np.ndarray) -> np.ndarray:
    """The GPU that serves every choice of a layer's tokens: int64[token, k], -1 where there is none.

    experts: int[token, k] choices, -1 = none
    source: int[token] ranks of the tokens
    """
    chosen, rank = experts.astype(np.int64), np.broadcast_to(np.asarray(source, np.int64)[:, None], experts.shape)
    if travel.replicas in TABLED:
        return np.where(chosen >= 0, copy_of_rank(placement, travel)[layer][rank, chosen], -1)
    if travel.replicas == "nearest-dynamic":
        near = _near(placement, travel.ranks_per_node or placement.gpus)[layer][rank, chosen]
        return np.where((chosen >= 0) & (near >= 0), near, placement.hosts(layer, np.where(near >= 0, -1, chosen)))
    load = np.bincount(chosen[chosen >= 0], minlength=placement.experts).astype(np.float64)
    return _divided(chosen, _least_busy(placement.share[layer] > 0, load))


def copy_of_rank(placement: Placement, travel: Travel) -> np.ndarray:
    """int16[layer, rank, expert]: the GPU with the copy that a rank has of every expert, under a rule of `TABLED`."""
    if travel.replicas == "fixed":
        return _fixed(placement)
    return _static(placement, travel.ranks_per_node or placement.gpus)


@functools.lru_cache(maxsize=4)
def _fixed(placement: Placement) -> np.ndarray:
    table = np.empty((placement.layers, placement.gpus, placement.experts), dtype=np.int16)
    fill_fixed(*copies_of(placement), table)
    return table


@functools.lru_cache(maxsize=4)
def _static(placement: Placement, ranks_per_node: int) -> np.ndarray:
    begin, gpus = copies_of(placement)
    table = near_copies(begin, gpus, (placement.layers, placement.gpus, placement.experts), ranks_per_node)
    draw(begin, gpus, drawn_numbers(), np.zeros(placement.gpus, dtype=np.int64), table)
    return table


@functools.lru_cache(maxsize=4)
def _near(placement: Placement, ranks_per_node: int) -> np.ndarray:
    begin, gpus = copies_of(placement)
    return near_copies(begin, gpus, (placement.layers, placement.gpus, placement.experts), ranks_per_node)


def copies_of(placement: Placement) -> tuple[np.ndarray, np.ndarray]:
    """(int64[layer · experts + expert, and one more] first entry of an expert's copies, int16[copy] their GPUs), in the order
    of slots, GPU after GPU."""
    rows = [[expert for slots in row for expert in slots] for row in placement.experts_of_gpu]
    cell = np.concatenate([layer * placement.experts + np.array(row, np.int64) for layer, row in enumerate(rows)])
    gpu = np.repeat(np.tile(np.arange(placement.gpus), placement.layers), placement.slots.ravel())
    begin = np.zeros(placement.layers * placement.experts + 1, dtype=np.int64)
    np.cumsum(np.bincount(cell, minlength=len(begin) - 1), out=begin[1:])
    return begin, gpu[np.argsort(cell, kind="stable")].astype(np.int16)


def near_copies(begin: np.ndarray, gpus: np.ndarray, shape: tuple[int, int, int], ranks_per_node: int) -> np.ndarray:
    """int16[layer, rank, expert]: the only copy, the one on the rank itself, or the first one of its node if others are
    elsewhere; -1 where there is none of these.

    begin, gpus: as `copies_of` has them
    shape: layers, ranks, experts
    """
    near = np.empty(shape, dtype=np.int16)
    fill_near(begin, gpus, np.int64(ranks_per_node), near)
    return near


@functools.cache
def drawn_numbers() -> np.ndarray:
    """uint32[draw]: the sequence behind Python's `random.Random(SEED)`."""
    state = random.Random(SEED).getstate()[1]
    numbers = np.random.RandomState()
    numbers.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), state[-1]))
    return numbers.randint(0, 2**32, DRAWS, dtype=np.uint32)


@numba.njit(cache=True)
def fill_near(begin: np.ndarray, gpus: np.ndarray, ranks_per_node: int, near: np.ndarray) -> None:
    """`near_copies`, into int16[layer, rank, expert]."""
    layers, ranks, experts = near.shape
    for layer in range(layers):
        for expert in range(experts):
            cell = layer * experts + expert
            first, last = begin[cell], begin[cell + 1]
            for rank in range(ranks):
                found, here = -1, 0
                for copy in range(first, last):
                    if gpus[copy] == rank:
                        found = rank
                        break
                if found < 0:
                    node = rank // ranks_per_node
                    in_node = -1
                    for copy in range(first, last):
                        if gpus[copy] // ranks_per_node == node:
                            here += 1
                            if in_node < 0:
                                in_node = gpus[copy]
                    if last - first == 1:
                        found = gpus[first]
                    elif 0 < here < last - first:
                        found = in_node
                near[layer, rank, expert] = found


@numba.njit(cache=True)
def fill_fixed(begin: np.ndarray, gpus: np.ndarray, table: np.ndarray) -> None:
    """The copy of every rank under the fixed rule, into int16[layer, rank, expert]."""
    layers, ranks, experts = table.shape
    for layer in range(layers):
        for expert in range(experts):
            first = begin[layer * experts + expert]
            copies = begin[layer * experts + expert + 1] - first
            for rank in range(ranks):
                table[layer, rank, expert] = gpus[first + rank % copies]


@numba.njit(cache=True)
def _below(limit: int, numbers: np.ndarray, at: int) -> tuple[int, int]:
    """A number below the limit and the place after those that were used up, as Python's generator makes it: leading bits of a
    number, anew until they are below."""
    bits, rest = 0, limit
    while rest:
        bits, rest = bits + 1, rest >> 1
    while True:
        number = np.int64(numbers[at % len(numbers)]) >> (32 - bits)
        at += 1
        if number < limit:
            return number, at


@numba.njit(cache=True)
def draw(begin: np.ndarray, gpus: np.ndarray, numbers: np.ndarray, used: np.ndarray, table: np.ndarray) -> None:
    """Fill in the copies that ranks draw, where the table has -1.

    begin, gpus: as `copies_of` has them
    numbers: uint32[draw] the sequence
    used: int64[rank] numbers of it that each rank has used up; moved on
    table: int16[layer, rank, expert]; changed in place
    """
    layers, ranks, experts = table.shape
    waiting = np.empty(ranks, dtype=np.int64)
    for layer in range(layers):
        for expert in range(experts):
            cell = layer * experts + expert
            first, copies = begin[cell], begin[cell + 1] - begin[cell]
            without = 0
            for rank in range(ranks):
                if table[layer, rank, expert] < 0:
                    waiting[without] = rank
                    without += 1
            rest = without % copies if copies else 0
            pool, dealt = np.empty(copies, dtype=np.int64), np.empty(without, dtype=np.int64)
            few = 21 if rest <= 5 else 21 + 4 ** int(np.ceil(np.log(rest * 3) / np.log(4.0)))
            for place in range(without):
                rank = waiting[place]
                at = used[rank]
                for turn in range(without - rest):
                    dealt[turn] = turn % copies
                for copy in range(copies):
                    pool[copy] = copy
                for turn in range(rest):
                    if copies <= few:
                        number, at = _below(copies - turn, numbers, at)
                        dealt[without - rest + turn] = pool[number]
                        pool[number] = pool[copies - turn - 1]
                    else:
                        taken = True
                        while taken:
                            number, at = _below(copies, numbers, at)
                            taken = False
                            for before in range(turn):
                                taken |= dealt[without - rest + before] == number
                        dealt[without - rest + turn] = number
                for turn in range(without - 1, 0, -1):
                    number, at = _below(turn + 1, numbers, at)
                    dealt[turn], dealt[number] = dealt[number], dealt[turn]
                used[rank] = at
                table[layer, rank, expert] = gpus[first + dealt[place]]


def _one_hot(gpu: np.ndarray, gpus: int) -> np.ndarray:
    """float64[…, gpu]: 1 at each of these GPUs (int[…]), nothing for -1."""
    return (np.asarray(gpu)[..., None] == np.arange(gpus)).astype(np.float64)


def _least_busy(held: np.ndarray, load: np.ndarray) -> np.ndarray:
    """float64[expert, gpu]: the shares that leave the busiest GPU least to do; of experts without tokens equal ones.

    held: bool[expert, gpu]
    load: float64[expert]
    """
    from scipy.optimize import linprog  # imported here: most plans never ask for it
    from scipy.sparse import coo_array

    gpus = held.shape[1]
    share = held / held.sum(axis=1, keepdims=True)
    many = (held.sum(axis=1) > 1) & (load > 0)
    if not many.any():
        return share
    expert, gpu = np.nonzero(held & many[:, None])
    row = np.unique(expert, return_inverse=True)[1]
    column = np.arange(len(expert))
    fixed = load[~many] @ share[~many]
    busiest = coo_array(
        (np.r_[load[expert], -np.ones(gpus)], (np.r_[gpu, np.arange(gpus)], np.r_[column, [len(expert)] * gpus]))
    )
    whole = coo_array((np.ones(len(expert)), (row, column)), shape=(row.max() + 1, len(expert) + 1))
    cost = np.zeros(len(expert) + 1)
    cost[-1] = 1.0
    answer = linprog(cost, A_ub=busiest, b_ub=-fixed, A_eq=whole, b_eq=np.ones(row.max() + 1), method="highs")
    divided = np.zeros_like(share)
    divided[expert, gpu] = np.maximum(answer.x[:-1], 0.0)
    return np.where(many[:, None], divided / np.maximum(divided.sum(axis=1, keepdims=True), 1e-300), share)


GOLDEN = (np.sqrt(5.0) - 1) / 2
"""Multiples of it, without their whole parts, fill the unit interval evenly however many there are."""


def _divided(experts: np.ndarray, share: np.ndarray) -> np.ndarray:
    """int64[token, k]: GPUs for choices (int64[token, k]) so that each expert's go to its copies by these shares."""
    flat = experts.ravel()
    order = np.argsort(flat, kind="stable")
    turn = np.empty(len(flat), dtype=np.int64)
    turn[order] = np.arange(len(flat)) - np.searchsorted(flat[order], flat[order])
    place = (turn * GOLDEN) % 1.0
    until = np.cumsum(share, axis=1)[flat]
    gpu = (place[:, None] * until[:, -1:] >= until).sum(axis=1)
    return np.where(flat >= 0, gpu, -1).reshape(experts.shape)
