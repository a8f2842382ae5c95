"""The copy of an expert that serves the tokens of a rank, by the rule of the engine that dispatches them.

Engines share a replicated expert's tokens in ways of their own:

* in turn (no rule): every copy serves as much as the others, whoever sends. SGLang without an all-to-all backend
* `nearest-static` (SGLang 0.5.23 with one, such as DeepEP; its default): a rank has one copy of every expert. Its own, else
  the first of its node if others are elsewhere, else one that every rank draws for itself when the placement is loaded, with
  the generator of Python's `random` and the seed 42. It draws in the order of layers and experts for each expert that it has
  not near, for all ranks that have none near (each copy as often as the others, the rest drawn), and takes its own place in
  the shuffled list. Ranks whose copies differ draw from different points of one sequence, so their choices do not balance.
  They draw for dense layers too, which have rows in its map
* `nearest-dynamic` (the same with `dynamic`): its own or its node's first copy as above, else all copies in turn
* `lp` (the same with `lp`): its own or its node's first copy as above, else copies by the division that would leave the busiest
  GPU least if all ranks kept to it, by a linear programme over all ranks' counts. Without a map of nearest copies, as after a
  rearrangement of SGLang's own, all of them do
* `fixed` (vLLM-Ascend 0.23.0 without tensor parallelism): rank r has copy r modulo the copies, in the order of ranks, near or
  not; a second copy on the same rank is dead. In tensor-parallel groups it has the copy of its place in the group + the group
  + the expert, modulo the copies

SGLang looks for near copies where it loads a map of slots, as our exports are. Where it makes the placement itself
(`--enable-eplb`, `logical_count`) ranks know all copies, and draw alike. `fewest` chooses for every token alone, see
`engine.communication.travel`. A node is a run of `Travel.ranks_per_node` ranks.
"""

import functools
import random

import numba
import numpy as np

from engine.plan import Placement, Travel

SEED = 42
STEPS, NEARLY, MISSING, TINY = 5, 0.999, 1000.0, 1e-12
"""Steps of the linear programme, the part of the way to the nearest bound, the price of what is missing, and what keeps its
equations solvable."""
SETTLED, NOTHING = 0.1, 1e-4
"""The slope and the missing part below which its answer is taken."""
TABLED = ("nearest-static", "fixed")
"""Rules that give a rank one copy of every expert."""


def choices_of_ranks(placement: Placement, travel: Travel, layer: int, load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int16[source rank, expert], the one GPU that serves a rank's tokens, -1 where its copies share them; float64[expert,
    gpu], the parts that they serve then).

    load: float64[expert] token copies of the layer in all
    """
    share = placement.share[layer]
    if travel.replicas in TABLED:
        return copy_of_rank(placement, travel)[layer], share
    if travel.replicas in ("nearest-dynamic", "lp"):
        near = _near(placement, travel.ranks_per_node or placement.gpus)[layer]
        return near, share if travel.replicas == "nearest-dynamic" or (near >= 0).all() else least_busy(share, load)
    return np.full((placement.gpus, placement.experts), -1, dtype=np.int16), share


def shares_of_ranks(placement: Placement, travel: Travel, layer: int, load: np.ndarray) -> np.ndarray:
    """float64[source rank, expert, gpu]: the share of a rank's tokens that each GPU serves. load: see `choices_of_ranks`."""
    near, share = choices_of_ranks(placement, travel, layer, load)
    return np.where(near[:, :, None] >= 0, near[:, :, None] == np.arange(placement.gpus), share)


def served_and_sent(
    placement: Placement, travel: Travel, layer: int, demand: np.ndarray, load: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(float64[expert, gpu] token copies that each GPU serves, float64[source rank, gpu] that ranks send there).

    demand: float64[source rank, expert] token copies
    load: see `choices_of_ranks`
    """
    near, share = choices_of_ranks(placement, travel, layer, load)
    rank, expert = np.nonzero((near >= 0) & (demand != 0))
    gpu, amount, gpus = near[rank, expert].astype(np.int64), demand[rank, expert], placement.gpus
    shared = np.where(near >= 0, 0.0, demand)
    served = np.bincount(expert * gpus + gpu, amount, placement.experts * gpus).reshape(placement.experts, gpus)
    sent = np.bincount(rank * gpus + gpu, amount, gpus * gpus).reshape(gpus, gpus)
    return served + shared.sum(axis=0)[:, None] * share, sent + shared @ share


def hosts_of_tokens(
    placement: Placement, travel: Travel, layer: int, experts: np.ndarray, source: np.ndarray, load: np.ndarray | None = None
) -> np.ndarray:
    """The GPU that serves every choice of a layer's tokens: int64[token, k], -1 where there is none.

    experts: int[token, k] choices, -1 = none
    source: int[token] ranks of the tokens
    load: see `choices_of_ranks`; by default these tokens are all of the layer
    """
    chosen, rank = experts.astype(np.int64), np.broadcast_to(np.asarray(source, np.int64)[:, None], experts.shape)
    if load is None:
        load = np.bincount(chosen[chosen >= 0], minlength=placement.experts).astype(np.float64)
    near, share = choices_of_ranks(placement, travel, layer, load)
    host = np.where(chosen >= 0, near[rank, chosen].astype(np.int64), -1)
    shared = np.where(host >= 0, -1, chosen)
    return np.where(host >= 0, host, _divided(shared, share) if travel.replicas == "lp" else placement.hosts(layer, shared))


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
    (begin, gpus), experts = copies_of(placement), placement.experts
    table = near_copies(begin, gpus, (placement.layers, placement.gpus, experts), ranks_per_node)
    used = np.zeros(placement.gpus, dtype=np.int64)
    numbers = drawn_numbers(placement.model_layers, placement.gpus, experts, int(placement.slots.sum(axis=1).max()))
    for layer, dense in enumerate(dense_before(placement.model_layers)):
        pass_over(dense, placement.slots[layer], experts, ranks_per_node, numbers, used)
        here = begin[layer * experts : (layer + 1) * experts + 1]
        draw(here, gpus, numbers, used, table[layer : layer + 1])
    return table


def dense_before(model_layers: tuple[int, ...]) -> list[int]:
    """The number of dense layers between each MoE layer and the one before it. model_layers: ascending numbers of MoE layers"""
    return (np.diff(model_layers, prepend=-1) - 1).tolist()


def pass_over(
    dense: int, slots_of_gpu: np.ndarray, experts: int, ranks_per_node: int, numbers: np.ndarray, used: np.ndarray
) -> None:
    """Move `used` (int64[rank], as `numbers` see `draw`) on by the draws for so many dense layers. Their rows of SGLang's map,
    which nothing runs, hold the experts in turn, as exports write them."""
    slots, gpu = np.arange(slots_of_gpu.sum()) % experts, np.repeat(np.arange(len(slots_of_gpu)), slots_of_gpu)
    begin = np.r_[0, np.cumsum(np.bincount(slots, minlength=experts))]
    gpus = gpu[np.argsort(slots, kind="stable")].astype(np.int16)
    near = near_copies(begin, gpus, (1, len(slots_of_gpu), experts), ranks_per_node)
    for _ in range(dense):
        draw(begin, gpus, numbers, used, near.copy())


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


def drawn_numbers(model_layers: tuple[int, ...], ranks: int, experts: int, slots: int) -> np.ndarray:
    """uint32[draw]: the sequence behind Python's `random.Random(SEED)`, further than ranks get in it, who use up five numbers
    in the mean for a rank and an expert with copies.

    model_layers: ascending numbers of MoE layers
    slots: of a layer, at most
    """
    return _sequence((5 * (model_layers[-1] + 1) * ranks * min(experts, slots - experts) + 1000).bit_length())


@functools.lru_cache(maxsize=1)
def _sequence(bits: int) -> np.ndarray:
    state = random.Random(SEED).getstate()[1]
    numbers = np.random.RandomState()
    numbers.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), state[-1]))
    return numbers.randint(0, 2**32, 2**bits, dtype=np.uint32)


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
    alive = np.empty(ranks, dtype=np.int64)
    for layer in range(layers):
        for expert in range(experts):
            cell, copies = layer * experts + expert, 0
            for copy in range(begin[cell], begin[cell + 1]):
                if copies == 0 or gpus[copy] != alive[copies - 1]:
                    alive[copies] = gpus[copy]
                    copies += 1
            for rank in range(ranks):
                table[layer, rank, expert] = alive[rank % copies]


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
def _deal(dealt: np.ndarray, copies: int, rest: int, few: int, pool: np.ndarray, numbers: np.ndarray, at: int) -> int:
    """Deal copies in turn, those of the rest drawn, and shuffle them, as Python's `sample` and `shuffle` do; the place after
    the numbers that were used up. dealt: int16[rank without a near copy], filled in."""
    without = len(dealt)
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
    return at


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
            few = 21 if rest <= 5 else 21 + 4 ** int(np.ceil(np.log(rest * 3) / np.log(4.0)))
            # Ranks at one point of the sequence draw the same list.
            pool, dealt, kinds = np.empty(copies, dtype=np.int64), np.empty((without, without), dtype=np.int16), 0
            started, ended = np.empty(without, dtype=np.int64), np.empty(without, dtype=np.int64)
            for place in range(without):
                rank, kind = waiting[place], 0
                while kind < kinds and started[kind] != used[rank]:
                    kind += 1
                if kind == kinds:
                    kinds += 1
                    started[kind] = used[rank]
                    ended[kind] = _deal(dealt[kind], copies, rest, few, pool, numbers, used[rank])
                used[rank] = ended[kind]
                table[layer, rank, expert] = gpus[first + dealt[kind, place]]


def least_busy(share: np.ndarray, load: np.ndarray) -> np.ndarray:
    """float64[expert, gpu]: shares that leave the busiest GPU nearly least to do, between equal ones and a corner of the linear
    programme as SGLang's five steps have them; the given ones where these do not settle.

    A step goes along the projected gradient, scaled by the point, almost to the nearest bound (Dikin 1967; Barnes 1986).
    Unknowns are all at 1 first: the tokens of every copy of a replicated expert, as parts of the layer's, what each GPU has
    less than the busiest, the busiest's, and a multiple of what is missing from the equations.

    share: float64[expert, gpu] of copies in turn
    load: float64[expert]
    """
    held, gpus = share > 0, share.shape[1]
    many = (held.sum(axis=1) > 1) & (load > 0)
    if not many.any():
        return share
    expert, gpu = np.nonzero(held & many[:, None])
    row = np.unique(expert, return_inverse=True)[1]
    rows, copies = int(row[-1]) + 1, len(expert)
    equations = np.zeros((rows + gpus, copies + gpus + 2))
    equations[row, np.arange(copies)] = equations[rows + gpu, np.arange(copies)] = 1.0
    equations[rows:, copies:-2] = np.eye(gpus)
    equations[rows:, -2] = -1.0
    wanted = np.r_[load[many], -(load[~many] @ share[~many])] / load.sum()
    equations[:, -1] = wanted - equations.sum(axis=1)
    cost, point = np.zeros(copies + gpus + 2), np.ones(copies + gpus + 2)
    cost[-2:] = 1.0, MISSING
    for _ in range(STEPS):
        scaled = equations * point**2
        prices = np.linalg.solve(scaled @ equations.T + TINY * np.eye(rows + gpus), scaled @ cost)
        downhill = point * (cost - prices @ equations)
        steepest = downhill.max()
        point *= 1 - downhill * (NEARLY / steepest if steepest > 0 else 1.0)
    if not (steepest < SETTLED and point[-1] < NOTHING):
        return share
    divided = np.zeros_like(share)
    divided[expert, gpu] = np.maximum(point[:copies], 1e-300)
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
