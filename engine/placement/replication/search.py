"""The search for balanced replications: greedy starts, exchanges between pairs of GPUs, other replica counts.

Rows are layers, or nodes of layers; all rows and all pairs of GPUs are searched at once. Loads are in units of the ideal: 1 is
the work of a GPU of speed 1 when the work is divided perfectly. No exchange puts two replicas of an expert on the same GPU.
"""

from dataclasses import dataclass

import numpy as np

from engine.placement.replication.bounds import counts_of, divided, equal_weights, greedy_counts, packed
from engine.result import Bools, Floats, Ints, Stop

STILL_ROUNDS = 6
"""Rounds without any improvement after which a row is taken to have none left: its pairs are drawn anew each time."""
IMPROVEMENT = 1e-9
"""Least relative improvement of a pair's worse GPU that counts, far above round-off."""
MOST_ENTRIES = 2**22
"""Entries of that table for one row: where there are more, the greedy layout has to do."""
ENTRIES_AT_ONCE = 400_000
"""Entries of the table of exchanges that are weighed in one step: few enough for the processor's cache."""
FIRST_ROUNDS, LATER_ROUNDS = 80, 24
FREE_PASSES = 4
BLIND_EXCHANGES = 3
ENTRIES, MOST_COPIES = 60_000, 48
"""Small problems are searched several times side by side, for up to this many entries in the table of exchanges."""
WANDER = 1.5
"""Distance from its target at which a search among several may go on, relative to its own, so that they end apart."""
TINY = 1e-9
"""Least share of the mean that an expert counts with, so that replicas spread evenly over experts without any load."""
SHARPNESS = 8.0
"""Exponent by which a load that plans serve badly outweighs the others in the last start."""


@dataclass
class Layouts:
    """Layouts and their weights.

    expert: int64[row, gpu, place]
    weight: float64[row, load, gpu, place], 0 where there is no slot
    speed: float64[gpu]
    time: float64[row, load, gpu], the sum of the weights over the GPU's speed
    """

    expert: Ints
    weight: Floats
    speed: Floats

    def __post_init__(self) -> None:
        self.time = self.weight.sum(axis=3) / self.speed

    @property
    def worst(self) -> Floats:
        """float64[row]: time of the slowest GPU under the worst load."""
        return self.time.max(axis=(1, 2))

    def take(self, rows: Ints) -> "Layouts":
        return Layouts(self.expert[rows], self.weight[rows], self.speed)

    def put(self, rows: Ints, better: "Layouts") -> None:
        self.expert[rows], self.weight[rows], self.time[rows] = better.expert, better.weight, better.time


def exchange(layouts: Layouts, good_enough: Floats, rounds: int, rng: np.random.Generator, stop: Stop) -> None:
    """Improve layouts in place by exchanging replicas between the GPUs of pairs, all pairs of all rows at once.

    In each round the GPUs are paired anew, the slowest with the fastest or at random, and every pair makes the one
    exchange that lowers the time of its worse GPU, over all loads, the most. good_enough: float64[row], the worst time
    below which a row is left alone.
    """
    open_rows = np.flatnonzero(layouts.worst > good_enough)
    still = np.zeros(len(layouts.expert), dtype=np.int64)
    _, gpus, places = layouts.expert.shape
    if gpus < 2 or gpus // 2 * places * places > MOST_ENTRIES:
        return
    at_once = max(1, ENTRIES_AT_ONCE // (gpus // 2 * places * places))
    for turn in range(rounds):
        for first in range(0, len(open_rows), at_once):
            if stop():
                return
            rows = open_rows[first : first + at_once]
            part = layouts.take(rows)
            # In even turns the slowest GPU with the fastest and so on inwards, otherwise at random.
            key = rng.random((len(rows), gpus)) if turn % 2 else -part.time.max(axis=1)
            gpu = np.argsort(key, axis=1, kind="stable")
            changed = _exchange_once(part, gpu[:, : gpus // 2], gpu[:, ::-1][:, : gpus // 2])
            layouts.put(rows, part)
            still[rows] = np.where(changed, 0, still[rows] + 1)
        keep = (layouts.worst[open_rows] > good_enough[open_rows]) & (still[open_rows] < STILL_ROUNDS)
        open_rows = open_rows[keep]
        if not len(open_rows):
            return


def _exchange_once(layouts: Layouts, first: Ints, second: Ints) -> Bools:
    """One exchange for every pair of GPUs, int64[row, pair] each, that gains by one; bool[row], True if anything changed."""
    expert, weight, time, speed = layouts.expert, layouts.weight, layouts.time, layouts.speed
    rows, loads, _, places = weight.shape
    row = np.arange(rows)[:, None]
    mine, yours = expert[row, first], expert[row, second]  # [row, pair, place]
    every = np.arange(loads)[None, :, None]
    w1, w2 = weight[row[:, None], every, first[:, None]], weight[row[:, None], every, second[:, None]]
    t1, t2 = time[row[:, None], every, first[:, None]], time[row[:, None], every, second[:, None]]
    s1, s2 = speed[first], speed[second]
    before = np.maximum(t1, t2).max(axis=1)
    after = None
    for load in range(loads):
        moved = w1[:, load, :, :, None] - w2[:, load, :, None, :]
        first_time = t1[:, load, :, None, None] - moved / s1[..., None, None]
        second_time = t2[:, load, :, None, None] + moved / s2[..., None, None]
        worse = np.maximum(first_time, second_time, out=first_time)
        after = worse if after is None else np.maximum(after, worse, out=after)
    same = mine[..., :, None] == yours[..., None, :]
    forbidden = (same.any(axis=3) | (mine < 0))[..., :, None] | (same.any(axis=2) | (yours < 0))[..., None, :]
    after[forbidden] = np.inf
    flat = after.reshape(rows, -1, places * places)
    best = flat.argmin(axis=2)
    gains = np.take_along_axis(flat, best[..., None], axis=2)[..., 0] < before * (1 - IMPROVEMENT)
    r, p = np.nonzero(gains)
    i, j = np.divmod(best[r, p], places)
    g, h = first[r, p], second[r, p]
    expert[r, g, i], expert[r, h, j] = expert[r, h, j], expert[r, g, i]
    my_weight, your_weight = weight[r, :, g, i], weight[r, :, h, j]
    weight[r, :, g, i], weight[r, :, h, j] = your_weight, my_weight
    # Summed afresh, so that round-off does not add up over many rounds.
    time[r, :, g] = weight[r, :, g].sum(axis=2) / speed[g][:, None]
    time[r, :, h] = weight[r, :, h].sum(axis=2) / speed[h][:, None]
    return gains.any(axis=1)


def search(load: Floats, slots_of_gpu: Ints, speed: Floats, target: Floats, effort: int, seed: int, stop: Stop) -> Ints:
    """Layouts int64[row, gpu, place] with a fast slowest GPU under the worst load, with an equal split.

    Greedy steps know one load only. Several loads stand for one by their greatest value, by their mean, and by the mean
    with more weight on those which the plans so far serve badly; the exchanges then see them all.

    load: float64[row, load, expert]
    slots_of_gpu: int64[gpu]
    speed: float64[gpu]
    target: float64[row], the time of the slowest GPU at which a row is left alone
    effort: attempts with other replica counts or after blind exchanges
    """
    rows, loads, _ = load.shape
    entries = rows * loads * len(slots_of_gpu) * int(slots_of_gpu.max()) ** 2
    # Small problems several times side by side, every copy for itself.
    copies = max(1, min(MOST_COPIES, ENTRIES // entries))
    load, target, patience = np.repeat(load, copies, axis=0), np.repeat(target, copies), WANDER if copies > 1 else 1.0
    rng = np.random.default_rng(seed)
    best: Layouts | None = None
    for guide in range(3 if load.shape[1] > 1 else 1):
        if best is not None and (stop() or (best.worst <= target).all()):
            break
        if guide == 0:
            guiding_load = load.max(axis=1)
        elif guide == 1:
            guiding_load = load.mean(axis=1)
        else:
            weight = np.exp(SHARPNESS * (best.time.max(axis=2) - best.worst[:, None]))
            guiding_load = (load * (weight / weight.sum(axis=1, keepdims=True))[:, :, None]).sum(axis=1)
        start = Layouts(*_start(guiding_load, load, slots_of_gpu, speed), speed)
        exchange(start, target, FIRST_ROUNDS, rng, stop)
        best = start if best is None else _better(best, start, np.arange(len(load)))
    now = best.take(np.arange(len(load)))
    for attempt in range(effort):
        rows = np.flatnonzero(best.worst > target)
        if not len(rows) or stop():
            break
        trial = now.take(rows)
        if attempt % 2 or not _recount(trial, load[rows], rng):
            _shuffle(trial, rng)
        exchange(trial, target[rows], LATER_ROUNDS, rng, stop)
        best = _better(best, trial, rows)
        accepted = np.flatnonzero(trial.worst - target[rows] < patience * (now.worst - target)[rows])
        now.put(rows[accepted], trial.take(accepted))
    first = np.arange(0, len(load), copies)
    return best.expert[first + best.worst.reshape(-1, copies).argmin(axis=1)]


def _start(guiding_load: Floats, load: Floats, slots_of_gpu: Ints, speed: Floats) -> tuple[Ints, Floats]:
    """Greedy counts and packing by `guiding_load` float64[row, expert]: layouts and their weights under `load`."""
    guiding_load = np.maximum(guiding_load, TINY * np.where(guiding_load.any(axis=1), guiding_load.mean(axis=1), 1.0)[:, None])
    slots, hosts, experts = int(slots_of_gpu.sum()), int((slots_of_gpu > 0).sum()), guiding_load.shape[1]
    # More replicas than GPUs would share a GPU: only where there are more slots than anything else to put into them.
    most = hosts if slots <= experts * hosts else slots
    count = greedy_counts(guiding_load, slots, np.arange(most + 1, dtype=np.float64))
    layout = packed(guiding_load, count, slots_of_gpu, speed)
    return layout, equal_weights(layout, load)


def _better(best: Layouts, trial: Layouts, rows: Ints) -> Layouts:
    """`best` with those of its `rows` replaced that are better in `trial`."""
    better = np.flatnonzero(trial.worst < best.worst[rows])
    best.put(rows[better], trial.take(better))
    return best


def _recount(trial: Layouts, load: Floats, rng: np.random.Generator) -> bool:
    """A further replica for an expert of each row's slowest GPU, in the slot of one that can spare it.

    Both are drawn at random, the first by its work there, the second by how little its other replicas would get. False if no
    row has an expert that can spare one.
    """
    expert, experts = trial.expert, load.shape[2]
    rows, gpus, places = expert.shape
    row = np.arange(rows)
    count = counts_of(expert, experts)
    worst_load, slow = np.divmod(trial.time.reshape(rows, -1).argmax(axis=1), gpus)
    place = _draw(trial.weight[row, worst_load, slow], rng)
    wanted = expert[row, slow, place]
    flat = np.maximum(expert, 0).reshape(rows, -1)
    many = np.take_along_axis(count, flat, axis=1)
    rest = np.take_along_axis(load.max(axis=1), flat, axis=1) / np.maximum(many - 1, 1)
    has = np.repeat((expert == wanted[:, None, None]).any(axis=2), places, axis=1)
    spare = (many > 1) & (expert.reshape(rows, -1) >= 0) & ~has
    typical = trial.speed.sum() / (expert >= 0).sum(axis=(1, 2))
    chosen = _draw(np.where(spare, 1.0 / (rest + typical[:, None]), 0.0), rng)
    able = np.flatnonzero(spare[row, chosen])
    if not len(able):
        return False
    gpu, place = np.divmod(chosen[able], places)
    expert[able, gpu, place] = wanted[able]
    changed = Layouts(expert[able], equal_weights(expert[able], load[able]), trial.speed)
    trial.put(able, changed)
    return True


def _shuffle(trial: Layouts, rng: np.random.Generator) -> None:
    """Blind exchanges between each row's slowest GPU and others."""
    expert = trial.expert
    rows, gpus, _ = expert.shape
    row = np.arange(rows)
    slow = trial.time.max(axis=1).argmax(axis=1)
    for _ in range(BLIND_EXCHANGES):
        other = rng.integers(gpus, size=rows)
        i = _draw((expert[row, slow] >= 0).astype(np.float64), rng)
        j = _draw((expert[row, other] >= 0).astype(np.float64), rng)
        mine, yours = expert[row, slow, i], expert[row, other, j]
        legal = (mine >= 0) & (yours >= 0)
        legal &= ~(expert[row, other] == mine[:, None]).any(axis=1) & ~(expert[row, slow] == yours[:, None]).any(axis=1)
        r = row[legal]
        g, h, i, j = slow[legal], other[legal], i[legal], j[legal]
        expert[r, g, i], expert[r, h, j] = yours[legal], mine[legal]
        my_weight, your_weight = trial.weight[r, :, g, i], trial.weight[r, :, h, j]
        trial.weight[r, :, g, i], trial.weight[r, :, h, j] = your_weight, my_weight
    trial.time = trial.weight.sum(axis=3) / trial.speed


def _draw(chance: Floats, rng: np.random.Generator) -> Ints:
    """int64[row]: one index of each row, drawn in proportion to `chance` float64[row, choice]; 0 where all are 0."""
    total = np.cumsum(chance, axis=1)
    wanted = rng.random(len(chance))[:, None] * total[:, -1:]
    return np.minimum((total <= wanted).sum(axis=1), chance.shape[1] - 1) * (total[:, -1] > 0)


def search_free(layout: Ints, load: Floats, speed: Floats, target: Floats, seed: int, stop: Stop) -> Ints:
    """Layouts int64[row, gpu, place] at least as good when tokens are divided at will; see `search`.

    Division over fixed hosts and exchanges of replicas with their parts take turns; neither can make it worse.
    """
    rng = np.random.default_rng(seed)
    layout = layout.copy()
    rows = np.arange(len(layout))
    weight = equal_weights(layout, load)
    for _ in range(FREE_PASSES):
        divided_weight = divided(layout[rows], weight, speed, stop)
        part = Layouts(layout[rows].copy(), divided_weight, speed)
        before = part.worst
        exchange(part, target[rows], LATER_ROUNDS, rng, stop)
        layout[rows] = part.expert
        keep = (part.worst < before) & (part.worst > target[rows])
        rows, weight = rows[keep], part.weight[keep]
        if not len(rows) or stop():
            break
    return layout
