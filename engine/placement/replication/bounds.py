"""Limits of any replication's balance; greedy replica counts and packings; the best division of tokens over fixed hosts.

Rows are layers, or nodes of layers, many at once. A layout is int64[row, gpu, place]: the expert in the slot, -1 where a GPU
has fewer slots than the largest one.

All limits are of the time of the slowest GPU in units of the ideal (see `search`), and hold for both ways to split an expert's
tokens, whether or not two replicas of it share a GPU. The division is a linear program, exact: with the hosts fixed, the least
time of the slowest GPU is a maximum flow question, limited by a set of experts with hosts too slow for them (Hall). Experts
with one host are no question; only the others become variables.
"""

import numpy as np
from numpy.typing import NDArray

from engine.result import Bools, Floats, Ints, Stop, never

ROUND_OFF = 1e-12
"""By how much a limit gives way, so that no sum of floats can put it above the optimum."""
VARIABLES_AT_ONCE = 1500
"""Layers go into one program together until it has this many variables: fewer calls, and still quick to cancel."""
TOLERANCE = 1e-10


def greedy_counts(load: Floats, slots: int, capacity: Floats) -> Ints:
    """int64[row, expert] replicas, at least 1 each and `slots` in all, so that max load / capacity[replicas] is least.

    Replica by replica to the expert with the greatest quotient, which no other counts can undercut. Ties: lower index.

    load: float64[row, expert]
    capacity: float64[most replicas + 1], rising in the number of replicas, entry 0 unused
    """
    count = np.ones(load.shape, dtype=np.int64)
    quotient, row = load / capacity[1], np.arange(len(load))
    if len(capacity) == 2:
        quotient[:] = -1.0
    for _ in range(slots - load.shape[1]):
        expert = quotient.argmax(axis=1)
        count[row, expert] += 1
        now = count[row, expert]
        full = now == len(capacity) - 1
        quotient[row, expert] = np.where(full, -1.0, load[row, expert] / capacity[now])
    return count


def counts_of(expert: Ints, experts: int) -> Ints:
    """int64[row, expert]: replicas of every expert."""
    rows = len(expert)
    flat = np.where(expert < 0, experts, expert).reshape(rows, -1) + np.arange(rows)[:, None] * (experts + 1)
    return np.bincount(flat.ravel(), minlength=rows * (experts + 1)).reshape(rows, experts + 1)[:, :experts]


def equal_weights(expert: Ints, load: Floats) -> Floats:
    """float64[row, load, gpu, place] where load float64[row, load, expert] divides equally over the replicas."""
    share = load / np.maximum(counts_of(expert, load.shape[2]), 1)[:, None]
    rows, loads = load.shape[:2]
    flat = np.maximum(expert, 0).reshape(rows, 1, -1)
    weight = np.take_along_axis(share, np.broadcast_to(flat, (rows, loads, flat.shape[2])), axis=2)
    return np.where(expert[:, None] < 0, 0.0, weight.reshape(rows, loads, *expert.shape[1:]))


def packed(load: Floats, count: Ints, slots_of_gpu: Ints, speed: Floats) -> Ints:
    """Longest processing time first: each replica, heaviest first, where it ends soonest; int64[row, gpu, place].

    load: float64[row, expert]
    count: int64[row, expert], which adds up to the slots in every row
    """
    rows, experts = load.shape
    gpus, slots, row = len(slots_of_gpu), int(slots_of_gpu.sum()), np.arange(rows)
    share = load / count
    heaviest_first = np.argsort(-share, axis=1, kind="stable")
    ordered_count = np.take_along_axis(count, heaviest_first, axis=1)
    ordered = np.repeat(heaviest_first.ravel(), ordered_count.ravel()).reshape(rows, slots)
    weights = np.take_along_axis(share, ordered, axis=1)
    layout = np.full((rows, gpus, int(slots_of_gpu.max())), -1, dtype=np.int64)
    held = np.zeros((rows, gpus), dtype=np.int64)
    total = np.zeros((rows, gpus))
    has = np.zeros((rows, experts, gpus), dtype=bool)
    full = np.broadcast_to(np.where(slots_of_gpu == 0, np.inf, 0.0), (rows, gpus)).copy()
    repeats = count.max() > 1
    again = 4.0 * load.sum(axis=1, keepdims=True).max() / speed.min() + 1.0
    for step in range(slots):
        expert, weight = ordered[:, step], weights[:, step]
        end = (total + weight[:, None]) / speed + full
        if repeats:
            end += has[row, expert] * again
        gpu = end.argmin(axis=1)
        layout[row, gpu, held[row, gpu]] = expert
        has[row, expert, gpu] = True
        total[row, gpu] += weight
        held[row, gpu] += 1
        full[row, gpu] = np.where(held[row, gpu] == slots_of_gpu[gpu], np.inf, 0.0)
    return layout


def least_time(load: Floats, slots_of_gpu: Ints, speed: Floats) -> Floats:
    """float64[row] time below which the slowest GPU cannot come under the worst load.

    load: float64[row, load, expert]
    slots_of_gpu: int64[gpu]
    speed: float64[gpu]
    """
    experts, slots, fastest = load.shape[2], int(slots_of_gpu.sum()), np.cumsum(-np.sort(-speed[slots_of_gpu > 0]))
    # n hosts give an expert at most the speed of the n fastest GPUs; slots are only so many, and all loads share the counts.
    capacity = np.r_[1.0, fastest, np.full(max(slots - len(fastest), 0), fastest[-1])]
    greatest = load.max(axis=1)
    bound = (greatest / capacity[greedy_counts(greatest, slots, capacity)]).max(axis=1)
    of_loads = [load.sum(axis=2) / speed.sum()]
    # The k heaviest experts find no more GPUs than the slots that the others leave them.
    heaviest = np.cumsum(-np.sort(-load, axis=2), axis=2)
    hosts = np.minimum(slots - experts + np.arange(1, experts + 1), len(fastest))
    of_loads.append((heaviest / fastest[hosts - 1]).max(axis=2))
    # Some GPUs with c slots together take at most the c heaviest experts, the others the rest.
    heaviest = np.concatenate([np.zeros_like(heaviest[..., :1]), heaviest], axis=2)
    for order in (np.argsort(slots_of_gpu, kind="stable"), np.argsort(slots_of_gpu / speed, kind="stable")):
        taken = np.minimum(np.cumsum(slots_of_gpu[order])[:-1], experts)
        others = speed.sum() - np.cumsum(speed[order])[:-1]
        of_loads.append(((heaviest[..., -1:] - heaviest[..., taken]) / others).max(axis=2, initial=0.0))
    return np.maximum(bound, np.max(of_loads, axis=0).max(axis=1)) * (1 - ROUND_OFF)


def divided(expert: Ints, weight: Floats, speed: Floats, stop: Stop = never) -> Floats:
    """float64[row, load, gpu, place]: the weights after the best division, for each row and load on its own.

    Rows that are not reached before `stop` answers True keep their weights, as do those with a slowest GPU that the program
    does not relieve.

    expert: int64[row, gpu, place], -1 where there is no slot
    weight: float64[row, load, gpu, place], any legal division of the loads
    speed: float64[gpu]
    """
    weight = weight.copy()
    rows, loads = weight.shape[:2]
    ideal = weight.sum(axis=(2, 3)) / speed.sum()
    jobs, size = [], 0
    for row in range(rows):
        # bool[gpu, place]: slots of experts that have another slot
        experts, place, count = np.unique(expert[row], return_inverse=True, return_counts=True)
        spread = ((count > 1) & (experts >= 0))[place].reshape(expert.shape[1:])
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


def _divide(jobs: list[tuple[int, int, Bools]], expert: Ints, weight: Floats, speed: Floats, ideal: Floats) -> None:
    """Solve the jobs (row, load, slots to divide over) as one program and put improvements into `weight`."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

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
        # Sum of the parts on a GPU - speed * time <= - the fixed work there.
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
        # Parts left undivided within the program's tolerance are made to add up exactly.
        amount *= np.where(got > 0, wanted / np.where(got > 0, got, 1.0), 0.0)[of_expert]
        trial = weight[row, load].copy()
        trial[gpu, place] = amount * ideal[row, load]
        if (trial.sum(axis=1) / speed).max() < (weight[row, load].sum(axis=1) / speed).max():
            weight[row, load] = trial
