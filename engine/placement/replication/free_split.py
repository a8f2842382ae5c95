"""How to divide each expert's tokens over its hosts when any division will do: a linear program, exact.

With the hosts fixed, the least time of the slowest GPU is a maximum flow question; what limits it is a set of experts
whose hosts are too slow for them (Hall). Experts with one host are no question; only the others become variables.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from engine.result import Stop, never

VARIABLES_AT_ONCE = 1500
"""Layers go into one program together until it has this many variables: fewer calls, and still quick to cancel."""
TOLERANCE = 1e-10


def divided(
    expert: NDArray[np.int64], weight: NDArray[np.float64], speed: NDArray[np.float64], stop: Stop = never
) -> NDArray[np.float64]:
    """float64[row, load, gpu, place]: the weights after the best division, for each row and load on its own.

    expert: int64[row, gpu, place], -1 where there is no slot; weight: float64[row, load, gpu, place], any legal division
    of the loads; speed: float64[gpu]. Rows that are not reached before `stop` answers True keep their weights, as do
    those whose slowest GPU the program does not relieve.
    """
    weight = weight.copy()
    rows, loads = weight.shape[:2]
    ideal = weight.sum(axis=(2, 3)) / speed.sum()
    jobs, size = [], 0
    for row in range(rows):
        spread = _spread(expert[row])
        for load in range(loads):
            now = (weight[row, load].sum(axis=1) / speed).max()
            if spread.any() and now > ideal[row, load] * (1 + TOLERANCE):
                jobs.append((row, load, spread))
                size += int(spread.sum())
            if size > VARIABLES_AT_ONCE:
                if stop():
                    return weight
                _divide(jobs, expert, weight, speed, ideal)
                jobs, size = [], 0
    if jobs and not stop():
        _divide(jobs, expert, weight, speed, ideal)
    return weight


def _spread(expert: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool[gpu, place]: slots of experts that have another slot."""
    experts, place, count = np.unique(expert, return_inverse=True, return_counts=True)
    return ((count > 1) & (experts >= 0))[place].reshape(expert.shape)


def _divide(
    jobs: list[tuple[int, int, NDArray[np.bool_]]],
    expert: NDArray[np.int64],
    weight: NDArray[np.float64],
    speed: NDArray[np.float64],
    ideal: NDArray[np.float64],
) -> None:
    """Solve the jobs (row, load, slots to divide over) as one program and put what helps into `weight`."""
    gpus = len(speed)
    entries: list[tuple[NDArray, NDArray, NDArray]] = []
    equal_entries: list[tuple[NDArray, NDArray]] = []
    room, total, cost, parts = [], [], [], []
    column = equal_row = 0
    for number, (row, load, spread) in enumerate(jobs):
        gpu, place = np.nonzero(spread)
        unit = ideal[row, load]
        mine = weight[row, load][spread] / unit
        fixed = np.where(spread, 0.0, weight[row, load]).sum(axis=1) / unit
        _, of_expert = np.unique(expert[row][spread], return_inverse=True)
        columns = column + np.arange(len(gpu))
        # Sum of the parts on a GPU - speed * time <= - what is fixed there.
        entries.append((number * gpus + gpu, columns, np.ones(len(gpu))))
        entries.append((number * gpus + np.arange(gpus), np.full(gpus, column + len(gpu)), -speed))
        equal_entries.append((equal_row + of_expert, columns))
        room.append(-fixed)
        total.append(np.bincount(of_expert, mine))
        cost.append(np.r_[np.zeros(len(gpu)), 1.0])
        parts.append((row, load, gpu, place, of_expert, columns))
        column += len(gpu) + 1
        equal_row += len(total[-1])
    upper = [np.concatenate(part) for part in zip(*entries, strict=True)]
    equal = [np.concatenate(part) for part in zip(*equal_entries, strict=True)]
    solved = linprog(
        np.concatenate(cost),
        A_ub=coo_array((upper[2], (upper[0], upper[1])), shape=(len(jobs) * gpus, column)).tocsr(),
        b_ub=np.concatenate(room),
        A_eq=coo_array((np.ones(len(equal[0])), (equal[0], equal[1])), shape=(equal_row, column)).tocsr(),
        b_eq=np.concatenate(total),
        method="highs",
        options={"primal_feasibility_tolerance": TOLERANCE, "dual_feasibility_tolerance": TOLERANCE},
    )
    if solved.x is None:
        return
    for (row, load, gpu, place, of_expert, columns), wanted in zip(parts, total, strict=True):
        amount = np.maximum(solved.x[columns], 0.0)
        got = np.bincount(of_expert, amount)
        # What the program leaves undivided within its tolerance is made to add up exactly.
        amount *= np.where(got > 0, wanted / np.where(got > 0, got, 1.0), 0.0)[of_expert]
        trial = weight[row, load].copy()
        trial[gpu, place] = amount * ideal[row, load]
        if (trial.sum(axis=1) / speed).max() < (weight[row, load].sum(axis=1) / speed).max():
            weight[row, load] = trial
