"""Copies of experts in spare slots, and a choice among them by which each token touches the fewest groups, compiled (numba).

A token's experts with a single copy say where it goes in any case, its home costs nothing, and experts not held at any of
these need the fewest further groups that hold them: a set cover, exact, since few experts are left. Copies are added one by
one where they save most rows of tokens that then need not go to a GPU or node for a single expert, and placed anew while that
helps.
"""

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine.placement.coactivation.instance import CoactivationInstance
from engine.result import Bools, Ints, Stop, never

SECONDS_PER_CHOICE = 8e-8
"""Cost of a token's choice in serving all tokens twice, on an ordinary core: it turns seconds into steps, so that answers
repeat."""
MOST_PASSES = 4
"""Passes over all GPUs in which a copy may be replaced."""


def served(instance: CoactivationInstance, layer: int, holds: Bools) -> tuple[Ints, int]:
    """(the GPU that serves every choice of a token, int64[token, choice], -1 = none; rows to other GPUs or nodes, the fewest).

    Of the GPUs that serve it as well, a token takes the one with the least to do so far.

    holds: bool[expert, gpu], True for a copy, at least one of each expert
    """
    gpu, _, rows = _served(instance, layer, holds)
    return gpu, rows


def chosen_copies(experts: NDArray[np.int16], home: Ints, holds: Bools, group: Ints) -> Ints:
    """int64[token, choice]: the GPU that serves every choice of a token, -1 = none, so that it touches fewest groups.

    Of equally few groups those are taken that come first in the order in which the token's choices need them; of the GPUs
    that then serve a choice, the one with the fewest choices of earlier tokens.

    experts: int16[token, choice], -1 = none
    home: int64[token], the group that a token is in, which costs nothing
    holds: bool[expert, gpu], at least one copy of each expert
    group: int64[gpu], numbered from 0
    """
    return _serve(np.ascontiguousarray(experts, dtype=np.int16), home.astype(np.int64), holds, group.astype(np.int64))[0]


def _served(instance: CoactivationInstance, layer: int, holds: Bools) -> tuple:
    group = np.arange(instance.gpus) // instance.group_size
    return _serve(instance.experts[layer], instance.home_group, holds, group)


def with_copies(
    instance: CoactivationInstance, gpu_of_expert: Ints, spare: Ints | int, time_limit: float = math.inf, stop: Stop = never
) -> Bools:
    """bool[layer, expert, gpu], True for a copy: a GPU has its spare slots and its own experts, or fewer where none saves rows.

    A heuristic: it proves nothing.

    gpu_of_expert: int64[layer, expert], places that experts have in any case
    spare: int64[gpu] slots of a layer, or as many on all
    time_limit: work, in seconds of an ordinary core as estimated from its amount, of which every layer has an even part and
        the rest of those before it
    """
    spent = 0.0
    holds = np.zeros((*gpu_of_expert.shape, instance.gpus), dtype=bool)
    for layer, place in enumerate(gpu_of_expert):
        holds[layer, np.arange(len(place)), place] = True
        room, allowed = np.full(instance.gpus, spare), time_limit * (layer + 1) / instance.layers
        step = SECONDS_PER_CHOICE * instance.experts[layer].size

        def over(allowed: float = allowed, step: float = step) -> bool:
            nonlocal spent
            spent += step
            return spent > allowed or stop()

        while not over() and _add(instance, layer, holds[layer], room):
            pass
        for _ in range(MOST_PASSES):
            if not _replaced(instance, layer, holds[layer], place, room, over):
                break
    return holds


def _add(instance: CoactivationInstance, layer: int, holds: Bools, room: Ints) -> bool:
    """Put the copy that saves most on a GPU with room; True if there was one."""
    _, saves, _ = _served(instance, layer, holds)
    saves = np.where(holds | (room == 0), 0, np.repeat(saves, instance.group_size, axis=1))
    expert, gpu = np.unravel_index(saves.argmax(), saves.shape)
    if not saves[expert, gpu]:
        return False
    holds[expert, gpu] = True
    room[gpu] -= 1
    return True


def _replaced(instance: CoactivationInstance, layer: int, holds: Bools, place: Ints, room: Ints, stop: Stop) -> bool:
    """Take every copy away once and put the best one in its place, until a stop; True if rows were saved."""
    if stop():
        return False
    rows = before = served(instance, layer, holds)[1]
    for expert, gpu in np.argwhere(holds):
        if place[expert] == gpu or stop():
            continue
        old = holds.copy(), room.copy()
        holds[expert, gpu] = False
        room[gpu] += 1
        _add(instance, layer, holds, room)
        now = served(instance, layer, holds)[1]
        if now < rows:
            rows = now
        else:
            holds[:], room[:] = old
    return rows < before


@njit(cache=True, nogil=True)
def _serve(experts, home, holds, group_of_gpu):
    """(GPU int64[token, choice], rows that a copy of an expert in a group would save int64[expert, group], rows)."""
    tokens, choices = experts.shape
    count, gpus = holds.shape
    groups = group_of_gpu.max() + 1
    copies, near = listed(holds, group_of_gpu)
    gpu_of = np.full((tokens, choices), -1)
    load, saves, rows = np.zeros(gpus, dtype=np.int64), np.zeros((count, groups), dtype=np.int64), 0
    touched, users = np.zeros(groups, dtype=np.bool_), np.zeros(groups, dtype=np.int64)
    for token in range(tokens):
        touched[:], users[:] = False, 0
        if home[token] >= 0:
            touched[home[token]] = True
        touch(experts[token], near, touched)
        for at in range(choices):
            expert = experts[token, at]
            if expert < 0:
                continue
            for gpu in copies[expert]:
                if gpu < 0:
                    break
                best = gpu_of[token, at]
                if touched[group_of_gpu[gpu]] and (best < 0 or load[gpu] < load[best]):
                    gpu_of[token, at] = gpu
            load[gpu_of[token, at]] += 1
            users[group_of_gpu[gpu_of[token, at]]] += 1
        for group in range(groups):
            rows += touched[group] and group != home[token]
        for at in range(choices):
            if gpu_of[token, at] < 0:
                continue
            own = group_of_gpu[gpu_of[token, at]]
            if users[own] == 1 and own != home[token]:
                for group in range(groups):
                    saves[experts[token, at], group] += touched[group] and group != own
    return gpu_of, saves, rows


@njit(cache=True, nogil=True)
def listed(holds, group_of_gpu):
    """(GPUs, groups) that hold each expert, ascending, int64[expert, place], -1 behind the last one."""
    count, gpus = holds.shape
    most = 0
    for expert in range(count):
        most = max(most, holds[expert].sum())
    copies, near = np.full((count, most + 1), -1), np.full((count, most + 1), -1)
    there = np.zeros(group_of_gpu.max() + 1, dtype=np.bool_)
    for expert in range(count):
        there[:] = False
        place = 0
        for gpu in range(gpus):
            if holds[expert, gpu]:
                copies[expert, place] = gpu
                place += 1
                there[group_of_gpu[gpu]] = True
        place = 0
        for group in range(len(there)):
            if there[group]:
                near[expert, place] = group
                place += 1
    return copies, near


@njit(cache=True, nogil=True)
def touch(chosen, near, touched):
    """Mark the fewest further groups that serve all chosen experts, int[choice] (-1 = none)."""
    for expert in chosen:
        if expert >= 0 and near[expert, 1] < 0:
            touched[near[expert, 0]] = True
    marked, at = np.empty(len(chosen), dtype=np.int64), np.empty(len(chosen), dtype=np.int64)
    for most in range(len(chosen) + 1):
        # Depth first: every group that serves the first expert which none marked serves, in turn.
        depth, place = 0, 0
        while True:
            expert = _unserved(chosen, near, touched)
            if expert < 0:
                return
            if depth < most and near[expert, place] >= 0:
                touched[near[expert, place]] = True
                marked[depth], at[depth] = near[expert, place], place
                depth, place = depth + 1, 0
            elif depth == 0:
                break
            else:
                depth -= 1
                touched[marked[depth]] = False
                place = at[depth] + 1


@njit(cache=True, nogil=True)
def _unserved(chosen, near, touched):
    """The first expert that no marked group serves, -1 if there is none."""
    for expert in chosen:
        if expert >= 0:
            serves = False
            for group in near[expert]:
                if group < 0:
                    break
                serves = serves or touched[group]
            if not serves:
                return expert
    return -1
