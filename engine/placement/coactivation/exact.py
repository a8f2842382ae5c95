"""Every partition of few experts weighed at once: dynamic programming over sets of experts, compiled (numba).

Groups take their experts one after the other; of those before only the experts taken matter. Rows of a group with the experts
A are its price for all nets less that for the nets wholly outside A, which are sums over subsets of the complement of A. The
sets A that can be divided over the GPUs of a group within the cap are found the same way.
"""

from itertools import combinations
from math import comb

import numpy as np
from numba import njit

from engine.placement.coactivation.instance import Nets
from engine.placement.coactivation.search import Task
from engine.result import Ints

MOST_EXPERTS, MOST_WORK = 20, 3e8
UNREACHED = np.iinfo(np.int64).max // 4


def work_of(experts: int, groups: int, gpus: int) -> float:
    """Steps of `fewest_rows`, about 3e8 a second; infinite where its tables would not fit."""
    if experts > MOST_EXPERTS:
        return np.inf
    size, part = experts // groups, experts // gpus
    work = float(groups * experts * 2**experts)
    work += sum(comb(experts, g * size) * comb(experts - g * size, size) * size for g in range(groups))
    return work + sum(comb(experts, g * part) * comb(g * part - 1, part - 1) * part for g in range(1, gpus + 1))


def fewest_rows(nets: Nets, task: Task, capped: bool) -> tuple[Ints, int]:
    """(gpu_of_expert int64[expert] of the fewest rows, the tokens of a GPU that its cap allows).

    That is `task.most_load`, or where no placement keeps it the least that one can: its most loaded GPU has just as many.
    """
    experts, groups = nets.experts, nets.groups
    size, part = experts // groups, experts // task.gpus
    everyone = (1 << experts) - 1
    load = np.zeros(1, dtype=np.int64)  # of every set of experts
    for tokens in task.load:
        load = np.concatenate([load, load + tokens])
    most, peak, piece = task.most_load, load, np.zeros(1, dtype=np.int32)
    if capped:
        # For every set that parts divide, the least load of its heaviest part, and a part of such a division.
        peak, piece = np.full(len(load), UNREACHED), np.zeros(len(load), dtype=np.int32)
        peak[0] = 0
        for members in range(part, experts + 1, part):
            _peaks_of_size(load, peak, piece, members, _choices(members - 1, part - 1))
        most = max(most, int(peak[everyone]))
    bits = np.where(nets.member < 0, 0, 1 << np.maximum(nets.member, 0)).sum(axis=1)
    reached = np.full(everyone + 1, UNREACHED)
    reached[0] = 0
    taken = np.zeros((groups, everyone + 1), dtype=np.int32)
    for group in range(groups):
        inside = np.zeros(everyone + 1, dtype=np.int64)
        np.add.at(inside, bits, nets.price[:, group].astype(np.int64))
        total = inside.sum()
        for expert in range(experts):  # for every set the sum over its subsets
            halves = inside.reshape(-1, 2, 1 << expert)
            halves[:, 1] += halves[:, 0]
        rows = total - inside[::-1]
        if capped:
            rows[peak > most] = UNREACHED
        reached = _next_group(reached, rows, _choices(experts - group * size, size), taken[group])
    place, left = np.empty(experts, dtype=np.int64), everyone
    for group in reversed(range(groups)):
        members = int(taken[group, left])
        left ^= members
        for gpu in range(group * task.group_size, (group + 1) * task.group_size):
            own = int(piece[members]) if capped else members
            here = [expert for expert in range(experts) if own >> expert & 1][:part]
            place[here] = gpu
            members ^= sum(1 << expert for expert in here)
    return place, most


def _choices(of: int, size: int) -> Ints:
    """Every choice of `size` places among so many: int64[choice, size]."""
    return np.array(list(combinations(range(of), size)), dtype=np.int64)


@njit(cache=True, nogil=True)
def _peaks_of_size(load, peak, piece, members, choices):
    """Fill in the sets of so many members; their lowest one is in the part, with every choice of the others."""
    bits = np.empty(members, dtype=np.int64)
    for whole in range(len(load)):
        if _members(whole, bits, members) != members:
            continue
        for choice in choices:
            part = bits[0]
            for at in choice:
                part |= bits[at + 1]
            heaviest = max(load[part], peak[whole ^ part])
            if heaviest < peak[whole]:
                peak[whole], piece[whole] = heaviest, part


@njit(cache=True, nogil=True)
def _next_group(reached, rows, choices, taken):
    """int64[set]: fewest rows by the experts taken, once one more group has chosen among the free ones; writes `taken`."""
    total = len(reached)
    then = np.full(total, UNREACHED)
    bits = np.empty(64, dtype=np.int64)
    for before in range(total):
        if reached[before] >= UNREACHED:
            continue
        _members(total - 1 - before, bits, 64)
        for choice in choices:
            part = 0
            for at in choice:
                part |= bits[at]
            if rows[part] < UNREACHED and reached[before] + rows[part] < then[before | part]:
                then[before | part] = reached[before] + rows[part]
                taken[before | part] = part
    return then


@njit(cache=True, nogil=True)
def _members(whole, bits, most):
    """Write the single members of a set, up to so many; how many it has."""
    count = 0
    while whole:
        if count < most:
            bits[count] = whole & -whole
        whole &= whole - 1
        count += 1
    return count
