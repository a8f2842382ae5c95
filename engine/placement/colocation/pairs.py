"""Pairs of experts, one of each model, that share a GPU on a cluster of equal GPUs: exact; and a limit on their cycle.

Aurora section 6.2. A pair's weight is the more of its GPU's sends and receives in the summed all-to-all of both models, and
the largest weight decides the time of that all-to-all (Theorem 4.2). Where every expert receives as much as it sends, pairing
the heaviest of one model with the lightest of the other is optimal (Theorem 6.2); in general it is a bottleneck assignment.

No two models on one cluster are faster than the limit, whatever their placements and the order of sends. Table 2 of Aurora
grows with every time put into it, and these times are linear in the placement: a linear programme over fractional placements
of both models gives a lower limit of the whole cycle.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError
from engine.placement.assignment import bottleneck_assignment, with_slack
from engine.result import Floats, Ints, Result, Status, Stop, never, result_of

if TYPE_CHECKING:
    from scipy.sparse import coo_array

MOST_SMOOTHED = 1024
"""Experts up to which the sum of weights is made least too: that is one assignment, which nothing can stop."""
MOST_CELLS = 20_000
"""(GPU, expert) cells of both models up to which the programme is solved; above, each time is limited on its own."""
SAFETY = 1e-6
"""Taken from the programme's optimum, for its tolerance."""


def colocate(send_a: Floats, recv_a: Floats, send_b: Floats, recv_b: Floats, stop: Stop = never) -> Result[Ints]:
    """Pair the experts of two models so that the largest pair weight is least, proven.

    send_a, recv_a, send_b, recv_b: float64[expert], sends and receives of an expert's GPU for it, all in one unit of bytes,
        tokens or seconds, finite and at least 0; both models have as many experts

    `solution` is partner int64[expert of a], the expert of b with each. Of all optimal pairings it is one with the least
    sum of weights, for up to 1024 experts and while there is time. When `stop` answers True the status is CANCELLED, with
    the best pairing so far. Raises InputError for wrong shapes and values.
    """
    start = time.perf_counter()
    send_a, recv_a, send_b, recv_b = _checked(send_a=send_a, recv_a=recv_a, send_b=send_b, recv_b=recv_b)
    weight = pair_weight(send_a, recv_a, send_b, recv_b)
    if not np.isfinite(weight).all():
        raise InputError("loads are too large: what a pair sends or receives in all is not a finite number")
    partner = sorted_colocation(np.maximum(send_a, recv_a), np.maximum(send_b, recv_b))
    everyone = np.arange(len(partner))
    one_number = np.array_equal(send_a, recv_a) and np.array_equal(send_b, recv_b)
    bound = float(weight[everyone, partner].max())
    if not one_number:
        partner, bound = bottleneck_assignment(weight, partner, stop)
    objective = float(weight[everyone, partner].max())
    # With one number an expert every pairing has the same sum.
    if objective == bound and not one_number and len(partner) <= MOST_SMOOTHED and not stop():
        partner = with_slack(weight, objective)
    status = Status.OPTIMAL if objective == bound else Status.CANCELLED
    return result_of("colocate", start, status, objective, bound, partner)


def pair_weight(send_a: Floats, recv_a: Floats, send_b: Floats, recv_b: Floats) -> Floats:
    """float64[expert of a, expert of b]: the more of a pair's sends and receives; all given float64[expert]."""
    with np.errstate(over="ignore"):  # infinite weights are refused later
        return np.maximum(send_a[:, None] + send_b, recv_a[:, None] + recv_b)


def sorted_colocation(load_a: Floats, load_b: Floats) -> Ints:
    """The rule of Aurora Theorem 6.2: the popular experts of a with the unpopular of b; partner int64[expert of a].

    load_a, load_b: float64[expert]. Optimal where one number an expert decides; ties go to the lower index.
    """
    partner = np.empty(len(load_a), dtype=np.int64)
    partner[np.argsort(load_a, kind="stable")] = np.argsort(-np.asarray(load_b), kind="stable")
    return partner


def random_colocation(experts: int, seed: int) -> Ints:
    """Random expert colocation (REC in Aurora section 8): partner int64[expert of a], every pairing equally likely."""
    return np.random.default_rng(seed).permutation(experts)


def _checked(**loads: Floats) -> list[Floats]:
    loads = {name: np.asarray(load, dtype=np.float64) for name, load in loads.items()}
    experts = loads["send_a"].size
    for name, load in loads.items():
        if load.ndim != 1 or load.size != experts or not experts:
            raise InputError(f"{name}: shape {load.shape}; wanted one value for each of the {experts or 'n'} experts")
        if not np.isfinite(load).all() or load.min() < 0:
            raise InputError(f"{name}: every value must be finite and at least 0")
    return list(loads.values())


@dataclass(frozen=True, eq=False)
class ModelTables:
    """The work of GPUs for one model in one layer, in seconds.

    gate, aggregate: float64[gpu]
    ffn: float64[gpu, expert], an expert's part in the computation of its GPU
    receive: float64[gpu, expert], its part at the receiving port in one all-to-all, in the fastest direction of that port
    send_total: float64[gpu], sends of a GPU that keeps no token
    send_saved: float64[gpu, expert], by how much they are less for an expert of its own
    start_up: before the first byte of an all-to-all, 0 where nothing has to move
    slots: int64[gpu], the most experts on a GPU
    full: True if every slot is taken
    """

    gate: Floats
    aggregate: Floats
    ffn: Floats
    receive: Floats
    send_total: Floats
    send_saved: Floats
    start_up: float
    slots: Ints
    full: bool


def cycle_bound(a: ModelTables, b: ModelTables, next_gate: Floats) -> float:
    """Seconds below which no cycle of two colocated models is, from the end of a's gate everywhere to that of its next gate.

    Every inequality follows a chain of steps that wait for each other: a GPU computes F^a before F^b, the combine of a model
    follows its experts, both combines follow F^a on every GPU, and A^b and the next G^a follow all four all-to-alls on every
    GPU (see `engine.simulate.colocated`).

    next_gate: float64[gpu] seconds of a's gate of the next layer, 0 after the last
    """
    ends = float((b.aggregate + next_gate).max()), float((a.aggregate + b.aggregate + next_gate).max())
    if a.ffn.size + b.ffn.size > MOST_CELLS:
        return _one_by_one(a, b, ends)
    return max(_programme(a, b, ends) * (1 - SAFETY), _one_by_one(a, b, ends))


def least_largest(table: Floats) -> float:
    """A lower limit of the largest GPU sum, over all ways to give each expert to one GPU. table: float64[gpu, expert].

    Some GPU takes the heaviest expert; and the largest sum is at least any weighted mean of all sums, here with weights in
    proportion to the GPUs' speed, in which every expert counts at least its least weighted entry.
    """
    if not table.size:
        return 0.0
    total = table.sum(axis=1)
    weight = 1 / np.where(total > 0, total, np.inf)
    weight = weight / weight.sum() if weight.sum() > 0 else np.full(len(table), 1 / len(table))
    return float(max(table.min(axis=0).max(), (weight[:, None] * table).min(axis=0).sum()))


def _one_by_one(a: ModelTables, b: ModelTables, ends: tuple[float, float]) -> float:
    """The cycle with every time at its own lower limit."""
    send_a, send_b, both = _least_port(a), _least_port(b), _least_port(a, b)
    ffn_a, ffn_b = least_largest(a.ffn), least_largest(b.ffn)
    ffn_both = least_largest(np.concatenate([a.ffn, b.ffn], axis=1))
    quickest = min(a.start_up, b.start_up)
    # The last GPU with its gate of a has its gate of b still to do.
    dispatched = max(both + quickest, float(b.gate.min()) + send_b + b.start_up)
    end_ffn_a = send_a + a.start_up + ffn_a
    end_ffn_b = max(dispatched + ffn_b, send_a + a.start_up + ffn_both)
    end_combine_a = end_ffn_a + send_a + a.start_up
    end_combine_b = max(end_ffn_b + send_b + b.start_up, end_ffn_a + both + quickest)
    return max(end_combine_b + ends[0], end_combine_a + ends[1])


def _least_port(*models: ModelTables) -> float:
    """A lower limit of the busiest port's seconds when one all-to-all of each model is under way."""
    receiving = least_largest(np.concatenate([model.receive for model in models], axis=1))
    sending = np.zeros(len(models[0].slots))
    for model in models:
        saved = -np.sort(-model.send_saved, axis=1)
        kept = np.where(np.arange(saved.shape[1]) < model.slots[:, None], saved, 0.0).sum(axis=1)
        sending += np.maximum(model.send_total - kept, 0.0)
    return max(receiving, float(sending.max()))


class _Programme:
    """Rows of a linear programme: the cells of both placements, then the named times."""

    NAMES = (
        *("send_a", "send_b", "both", "dispatched"),
        *("end_ffn_a", "end_ffn_b", "end_combine_a", "end_combine_b", "cycle"),
    )

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.parts: list[tuple[NDArray, NDArray, NDArray]] = []
        self.limits: list[float] = []

    def at_most(self, limit: float, cells: NDArray | None = None, weights: NDArray | None = None, **times: float) -> None:
        """weights · cells + Σ times <= limit."""
        columns = [] if cells is None else [cells.ravel()]
        values = [] if cells is None else [weights.ravel()]
        columns.append(np.array([self.cells + self.NAMES.index(name) for name in times], dtype=np.int64))
        values.append(np.array(list(times.values()), dtype=np.float64))
        column, value = np.concatenate(columns), np.concatenate(values)
        self.parts.append((np.full(len(column), len(self.limits)), column, value))
        self.limits.append(limit)

    def matrix(self) -> "coo_array":
        from scipy.sparse import coo_array

        row, column, value = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        return coo_array((value, (row, column)), shape=(len(self.limits), self.cells + len(self.NAMES)))


def _programme(a: ModelTables, b: ModelTables, ends: tuple[float, float]) -> float:
    """The least cycle over fractional placements; 0 where the solver gives up."""
    from scipy.optimize import linprog

    gpus, experts = a.ffn.shape
    cell_a = np.arange(gpus * experts).reshape(gpus, experts)
    cell_b = cell_a.size + np.arange(b.ffn.size).reshape(b.ffn.shape)
    # The solver's tolerances are absolute, so times are counted in the size of the answer.
    unit = max(float(a.ffn.sum() + b.ffn.sum() + a.receive.sum() + b.receive.sum()) / gpus**2, 1e-300)
    rows = _Programme(cell_a.size + cell_b.size)
    quickest = min(a.start_up, b.start_up) / unit
    for gpu in range(gpus):
        sides = ((a, cell_a[gpu], "send_a"), (b, cell_b[gpu], "send_b"))
        for tables, cells, name in sides:
            rows.at_most(0.0, cells, tables.receive[gpu] / unit, **{name: -1})
            rows.at_most(-tables.send_total[gpu] / unit, cells, -tables.send_saved[gpu] / unit, **{name: -1})
            rows.at_most(float(tables.slots[gpu]), cells, np.ones(len(cells)))
            if tables.full:
                rows.at_most(-float(tables.slots[gpu]), cells, -np.ones(len(cells)))
        cells = np.concatenate([cell_a[gpu], cell_b[gpu]])
        rows.at_most(0.0, cells, np.concatenate([a.receive[gpu], b.receive[gpu]]) / unit, both=-1)
        rows.at_most(
            -(a.send_total[gpu] + b.send_total[gpu]) / unit,
            cells,
            -np.concatenate([a.send_saved[gpu], b.send_saved[gpu]]) / unit,
            both=-1,
        )
        rows.at_most(-a.start_up / unit, cell_a[gpu], a.ffn[gpu] / unit, send_a=1, end_ffn_a=-1)
        rows.at_most(0.0, cell_b[gpu], b.ffn[gpu] / unit, dispatched=1, end_ffn_b=-1)
        rows.at_most(-a.start_up / unit, cells, np.concatenate([a.ffn[gpu], b.ffn[gpu]]) / unit, send_a=1, end_ffn_b=-1)
    rows.at_most(-quickest, both=1, dispatched=-1)
    rows.at_most(-(float(b.gate.min()) + b.start_up) / unit, send_b=1, dispatched=-1)
    rows.at_most(-a.start_up / unit, end_ffn_a=1, send_a=1, end_combine_a=-1)
    rows.at_most(-b.start_up / unit, end_ffn_b=1, send_b=1, end_combine_b=-1)
    rows.at_most(-quickest, end_ffn_a=1, both=1, end_combine_b=-1)
    rows.at_most(-ends[0] / unit, end_combine_b=1, cycle=-1)
    rows.at_most(-ends[1] / unit, end_combine_a=1, cycle=-1)
    placed = _Programme(rows.cells)
    for cells in (cell_a, cell_b):
        for expert in range(cells.shape[1]):
            placed.at_most(1.0, cells[:, expert], np.ones(gpus))
    cost = np.zeros(rows.cells + len(rows.NAMES))
    cost[-1] = 1.0
    solved = linprog(
        cost, A_ub=rows.matrix().tocsr(), b_ub=rows.limits, A_eq=placed.matrix().tocsr(), b_eq=placed.limits, method="highs"
    )
    return float(solved.fun) * unit if solved.status == 0 else 0.0
