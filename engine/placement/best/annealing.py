"""The search of a layer by random moves at a falling temperature; compiled (numba)."""

import numpy as np
from numba import njit

from engine.placement.best import choosing, tables
from engine.placement.best.choosing import Chooser, Served
from engine.placement.best.tables import Counts, Layer, Level, State

LEADING, RELOCATED, RECOUNTED = 0.6, 0.3, 0.25
"""Parts of the moves that begin at a busiest GPU, that look for a free slot, and that change how many copies experts have."""
POLL = 16
"""Moves at one temperature, after each of which the search may be ended."""


@njit(cache=True, nogil=True)
def draw(room, at, leader, recounts):
    """(True if it may be, a random move: True if it gives copies up or makes some, GPUs g and h, items i on g and j on h that
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
        return not (there or last or (i < 0 and not vacant)), (counting, g, g, i, j, gained)
    if at.used[h] > 0 and not (at.used[h] < room[h] and np.random.random() < RELOCATED):
        j = at.held[h, np.random.randint(at.used[h])]
    elif at.used[h] == room[h]:
        return False, (counting, g, h, i, j, gained)
    legal = i >= 0 and g != h and not at.on[at.expert[i], h] and not (j >= 0 and at.on[at.expert[j], g])
    return legal, (counting, g, h, i, j, gained)


@njit(cache=True, nogil=True)
def anneal(
    layer: Layer,
    levels: tuple[Level, Level],
    at: State,
    counts: tuple[Counts, Counts] | None,
    chosen: tuple[Chooser, Served] | None,
    best: tuple[np.ndarray, np.ndarray],
    lowest: float,
    span: tuple[float, float, int],
    seed: int,
    hurry: np.ndarray,
) -> tuple[float, int]:
    """Change a state by random moves at a falling temperature; (the lowest seconds so far, moves accepted).

    at: with counts, or with a chooser and the copies that serve where tokens choose; the other is None
    best: (expert, place), int64[item] each, of the lowest seconds so far; changed in place
    span: temperature in seconds at the begin and at the end, and how many moves are looked at
    hurry: bool[1], set by another thread to end
    """
    np.random.seed(seed)
    hot, cold, moves = span
    change, longer, leader, ahead = np.zeros_like(at.rows), np.zeros_like(at.busy), np.zeros(3, np.int64), np.zeros(3, np.int64)
    _, value = tables.weigh(layer, at.rows, change, at.busy, longer, leader)
    accepted, temperature = 0, hot
    recounts = len(at.expert) > len(layer.ffn) and (counts is None or len(layer.demand) > 0)
    if chosen is not None:  # numba compiles a branch on what is not None alone
        draft = choosing.draft_of(*chosen)
    for number in range(moves):
        if number % POLL == 0:
            if hurry[0]:
                break
            temperature = hot * (cold / hot) ** (number / moves)
        legal, move = draw(layer.room, at, leader, recounts)
        if not legal:
            continue
        if counts is not None:
            tables.changes(layer, levels, counts, at, move, change, longer)
        if chosen is not None:
            choosing.changes(*chosen, levels, at, move, draft, change, longer)
        seconds, after = tables.weigh(layer, at.rows, change, at.busy, longer, ahead)
        if after > value and np.random.random() >= np.exp((value - after) / temperature):
            if chosen is not None:
                choosing.take_back(*chosen, at, move)
            continue
        accepted += 1
        value = after
        leader[:] = ahead
        at.rows[:] += change
        at.busy[:] += longer
        if counts is not None:
            tables.carry_out(layer, levels, counts, at, move)
        if chosen is not None:
            choosing.carry_out(*chosen, at, move, draft)
        if seconds < lowest * (1 - 1e-12):
            lowest = seconds
            best[0][:] = at.expert
            best[1][:] = at.place
    return lowest, accepted
