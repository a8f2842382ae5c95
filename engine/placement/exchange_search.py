"""Local search over expert exchanges for an objective that is only known by computing it."""

from collections.abc import Callable

import numpy as np

from engine.result import Stop, never

STEPS_PER_POLL = 32
PATIENCE = 4
"""Steps per expert without progress before a few exchanges are made blindly."""


def exchange_search(
    starts: list[np.ndarray],
    slots: np.ndarray,
    exact_slots: bool,
    objective: Callable[[np.ndarray], float],
    steps: int,
    seed: int = 0,
    stop: Stop = never,
) -> np.ndarray:
    """gpu_of_expert int64[expert] that no start (int64[expert] each) beats, after `steps` random exchanges.

    Begins at the best start; every step swaps two experts of different GPUs, or with slots to spare may move one, and is
    kept unless it makes the objective (seconds of an assignment) worse. Where nothing helps for a while it goes on from
    a few blind exchanges of the best. A heuristic: it proves nothing.

    slots: int64[gpu], the most experts of each GPU, all of them taken with `exact_slots`
    """
    rng = np.random.default_rng(seed)
    best = min(starts, key=objective).copy()
    lowest = now = objective(best)
    place, idle = best, 0
    for step in range(steps):
        if step % STEPS_PER_POLL == 0 and stop():
            break
        trial = _exchanged(place, slots, exact_slots, rng)
        seconds = objective(trial)
        idle = 0 if seconds < now else idle + 1
        if seconds <= now:
            place, now = trial, seconds
        if now < lowest:
            best, lowest = place, now
        if idle > PATIENCE * len(best):
            place, idle = best, 0
            for _ in range(3):
                place = _exchanged(place, slots, exact_slots, rng)
            now = objective(place)
    return best


def _exchanged(place: np.ndarray, slots: np.ndarray, exact_slots: bool, rng: np.random.Generator) -> np.ndarray:
    """The placement with two experts swapped or, where not all slots are to be taken, sometimes one moved."""
    trial = place.copy()
    first, second = rng.integers(len(place), size=2)
    gpu = rng.integers(len(slots))
    if not exact_slots and rng.random() < 0.5 and np.count_nonzero(place == gpu) < slots[gpu]:
        trial[first] = gpu
    else:
        trial[first], trial[second] = place[second], place[first]
    return trial
