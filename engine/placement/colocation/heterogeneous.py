"""Two experts, one of each model, on every GPU of a mixed cluster: a 3-D bottleneck matching.

Aurora section 7, NP-hard in general. The paper decouples it: first the pairs without a look at the GPUs, then the pairs
to GPUs. Here: lower bounds (projections onto two of the three indices, and a weighted mean), a local search, and, where they
do not meet, CP-SAT on the question whether all costs can stay below a threshold, by bisection, with GPUs of equal cost merged
into one of a capacity.

The local search makes exact bottleneck assignments over two of the three indices in turn. With the experts of a fixed on
their GPUs, those of b are a plain assignment to GPUs, and likewise with a and b, or with pairs and GPUs, exchanged. No step
makes the largest cost worse; among equals it takes the least sum of a power of the costs, which also presses on those next to
the largest, so a descent ends where all three agree. A kick deals the experts of the worst GPU and of a few others out anew.
"""

import time
from collections.abc import Callable

import numpy as np

from engine.errors import InputError
from engine.placement.assignment import bottleneck_assignment, with_slack
from engine.result import Floats, Ints, Limits, Report, Result, Stop, never, result_of, status_of

RANDOM_STARTS = 4
KICKS = 30
LEAST_KICKED, MOST_KICKED = 2, 5
POWERS = (16.0, 4.0)
"""Descents take these in turn: neither leads to the better end everywhere, and both do better than the plain sum."""
ROUND_OFF = 1e-11
CP_SAT_TRIPLES = 2**19
"""Triples of kinds of GPUs and experts up to which CP-SAT pays: 64 different GPUs, or 4 types and 350 experts."""
LEAST_SECONDS = 0.05
QUESTION_SHARE = 0.5
"""Part of the work that a threshold question may take, halved after one without an answer: lower ones are easier."""

Triples = tuple[Ints, Ints]
"""int64[gpu] each: the expert of a and the expert of b on every GPU."""


def search(
    cost: Floats, starts: list[Triples], target: float, seed: int, stop: Stop, on_incumbent: Callable[[float], None]
) -> Triples:
    """Experts with a low largest cost, at least as good as every one of `starts` (at least one).

    cost: float64[gpu, expert of a, expert of b]. The search ends at a largest cost of `target`, after a fixed number
    of descents, or when `stop` answers True.
    """
    rng = np.random.default_rng(seed)
    gpus = len(cost)
    shape = cost - cost.min()
    best = min(starts, key=lambda state: largest(cost, state))
    lowest = largest(cost, best)
    on_incumbent(lowest)
    random = [(rng.permutation(gpus), rng.permutation(gpus)) for _ in range(RANDOM_STARTS)]
    first = [*starts, *random]
    for turn in range(len(first) + (KICKS if gpus > 1 else 0)):
        if lowest <= target or stop():
            break
        state = first[turn] if turn < len(first) else _kicked(cost, best, rng)
        state = _descend(shape, state, POWERS[turn % len(POWERS)], stop)
        worth = largest(cost, state)
        if worth < lowest:
            on_incumbent(worth)
        if worth <= lowest:  # another of the same worth is as good to kick, and not the same again
            best, lowest = state, worth
    return best


def largest(cost: Floats, state: Triples) -> float:
    """The largest cost that a state uses."""
    return float(cost[np.arange(len(cost)), *state].max())


def _worth(cost: Floats, state: Triples, power: float) -> tuple[float, float]:
    """The largest cost, then the sum of all costs to a power, in units of the largest."""
    used = cost[np.arange(len(cost)), *state]
    most = float(used.max())
    return most, float(((used / most) ** power).sum()) if most > 0 else 0.0


def _descend(cost: Floats, state: Triples, power: float, stop: Stop) -> Triples:
    """Reassign the experts of b, those of a, and the pairs to GPUs, until nothing changes for the better.

    cost: at least 0.
    """
    gpu = same = np.arange(len(cost))
    worth, failures, turn = _worth(cost, state, power), 0, 0
    while failures < 3 and not stop():
        a, b = state
        if turn == 0:
            changed = a, _reassign(cost[gpu, a, :], b, power)
        elif turn == 1:
            changed = _reassign(cost[gpu, :, b], a, power), b
        else:
            pair = _reassign(cost[:, a, b], same, power)
            changed = a[pair], b[pair]
        new_worth = _worth(cost, changed, power)
        failures = 0 if new_worth < worth else failures + 1
        if new_worth < worth:
            state, worth = changed, new_worth
        turn = (turn + 1) % 3
    return state


def _reassign(weight: Floats, known: Ints, power: float) -> Ints:
    """The bottleneck assignment of weight float64[row, column] with the least sum of powers; column_of_row int64[row]."""
    _, most = bottleneck_assignment(weight, known)
    if most <= 0:
        return known
    return with_slack(np.where(weight <= most, (weight / most) ** power, np.inf), 1.0)


def _kicked(cost: Floats, state: Triples, rng: np.random.Generator) -> Triples:
    """The worst GPU and a few others exchange their experts of both models at random."""
    gpus = len(cost)
    worst = int(cost[np.arange(gpus), *state].argmax())
    count = min(gpus, int(rng.integers(LEAST_KICKED, MOST_KICKED + 1)))
    others = np.delete(np.arange(gpus), worst)
    chosen = np.append(rng.choice(others, count - 1, replace=False), worst)
    a, b = state[0].copy(), state[1].copy()
    a[chosen], b[chosen] = a[rng.permutation(chosen)], b[rng.permutation(chosen)]
    return a, b


def projections(cost: Floats, stop: Stop) -> tuple[float, list[Triples]]:
    """A lower bound of the largest cost float64[gpu, expert of a, expert of b], and a state from each projection.

    With one index free to choose its best the other two are a bottleneck assignment, and its largest weight is a bound;
    completed by an assignment of the index left out it is a state.
    """
    gpu = np.arange(len(cost))
    bounds, states = [float(cost.min())], []
    for left_out in range(3):
        if stop():
            break
        weight = cost.min(axis=left_out)
        assignment, bound = bottleneck_assignment(weight, gpu, stop)
        bounds.append(bound)
        assignment = with_slack(weight, float(weight[gpu, assignment].max()))
        if left_out == 0:
            pair = assigned(cost[:, gpu, assignment])
            states.append((pair, assignment[pair]))
        elif left_out == 1:
            states.append((assigned(cost[gpu, :, assignment]), assignment))
        else:
            states.append((assignment, assigned(cost[gpu, assignment, :])))
    return max(bounds), states or [(gpu, gpu)]


def assigned(weight: Floats) -> Ints:
    """column_of_row int64[row] with the least largest weight float64[row, column], and of these the least sum."""
    _, most = bottleneck_assignment(weight, np.arange(len(weight)))
    return with_slack(weight, most)


def weighted_mean(cost: Floats) -> float:
    """A lower bound of the largest cost float64[gpu, expert of a, expert of b]: no mean is above the largest.

    The GPUs' costs are weighted so that the GPUs weigh alike over all pairs. A state's weighted mean is at least the
    least sum over pairs of experts of their least weighted cost on any GPU, a linear assignment. For costs (load of a +
    load of b) / speed the weights become the speeds and the bound all loads over all speeds.
    """
    from scipy.optimize import linear_sum_assignment

    mean = cost.mean(axis=(1, 2))
    if cost.min() < 0 or mean.min() <= 0:
        return float(cost.min())
    weight = 1 / mean
    weight /= weight.sum()
    least = (weight[:, None, None] * cost).min(axis=0)
    return float(least[linear_sum_assignment(least)].sum()) * (1 - ROUND_OFF)


def colocate_heterogeneous(
    cost: Floats, limits: Limits = Limits(), stop: Stop = never, report: Report | None = None
) -> Result[Ints]:
    """One expert of each of two models to every GPU so that the largest cost used is least.

    cost: float64[gpu, expert of a, expert of b], usually seconds (see `engine.simulate.colocated.layer_weight`), finite,
        all three of one length
    limits: the work is the proof's, the search ends by itself

    `solution` is int64[gpu, 2], the expert of a and the expert of b on every GPU. Status OPTIMAL if objective and bound
    are equal, TIME_LIMIT if the proof took too long, FEASIBLE if none was asked for or the instance is beyond CP-SAT,
    CANCELLED if `stop` answered True. Raises InputError for a wrong shape or value.
    """
    start = time.perf_counter()
    deadline, seed = start + limits.wall_seconds, limits.seed
    options = {"time_limit": limits.seconds, "exact": limits.exact}
    cost = _checked(cost)
    projected, starts = projections(cost, stop)
    least = max(projected, weighted_mean(cost))

    def found(objective: float) -> None:
        if report:
            report(objective, min(least, objective))

    best = search(cost, starts, least, seed, lambda: stop() or time.perf_counter() > deadline, found)
    bound = least
    same: dict[bytes, list[int]] = {}
    for gpu, cost_of_gpu in enumerate(cost):
        same.setdefault(cost_of_gpu.tobytes(), []).append(gpu)
    kinds = list(same.values())
    exact = limits.exact and len(kinds) * cost[0].size <= CP_SAT_TRIPLES
    if exact and largest(cost, best) > bound:
        best, bound = prove(cost, kinds, best, bound, limits.seconds, deadline, seed, stop, found)
    objective = largest(cost, best)
    status, solution = status_of(objective <= bound, stop, limited=exact), np.stack(best, axis=1)
    name = "colocate_heterogeneous"
    return result_of(name, start, status, objective, min(bound, objective), solution, options, seed)


def decoupled(cost: Floats, weight: Floats) -> Ints:
    """The sub-optimal method of Aurora section 7.2: int64[gpu, 2], the expert of a and the expert of b on every GPU.

    First pairs by a bottleneck assignment on `weight`: float64[expert of a, expert of b], which knows no GPU (see
    `engine.placement.colocation.pair_weight`); then pairs to GPUs by another on `cost`: float64[gpu, expert of a, expert
    of b]. Raises InputError for wrong shapes and values.
    """
    cost, weight = _checked(cost), np.asarray(weight, dtype=np.float64)
    if weight.shape != cost.shape[1:] or not np.isfinite(weight).all():
        raise InputError(f"weight: shape {weight.shape}; wanted {cost.shape[1:]}, every value finite")
    a = np.arange(len(cost))
    b = assigned(weight)
    pair = assigned(cost[:, a, b])
    return np.stack([pair, b[pair]], axis=1)


def _checked(cost: Floats) -> Floats:
    cost = np.asarray(cost, dtype=np.float64)
    if cost.ndim != 3 or cost.size == 0 or len(set(cost.shape)) != 1:
        raise InputError(
            f"cost: shape {cost.shape}; wanted [gpu, expert of a, expert of b] with as many experts of each model as GPUs"
        )
    if not np.isfinite(cost).all():
        raise InputError("cost: every value must be finite")
    return cost


def prove(
    cost: Floats,
    kinds: list[list[int]],
    best: Triples,
    bound: float,
    seconds: float,
    deadline: float,
    seed: int,
    stop: Stop,
    report: Callable[[float], None],
) -> tuple[Triples, float]:
    """A better state or a higher bound, by bisection over the values that the largest cost can still have.

    seconds: work for all questions together; deadline: of time.perf_counter.
    """
    from ortools.sat.python.cp_model import INFEASIBLE

    question = QUESTION_SHARE * seconds
    cost_of_kind = cost[[gpus[0] for gpus in kinds]]
    objective = largest(cost, best)
    values = np.unique(cost_of_kind[(cost_of_kind >= bound) & (cost_of_kind < objective)])
    # Nothing stays below values[low], `best` within values[high] (the objective beyond the end); from values[unknown]
    # on there is no answer in time. The first question is whether anything beats the incumbent: it mostly settles all.
    low, high = 0, len(values)
    unknown, middle = high, high - 1
    while low < unknown and not stop():
        limits = Limits(min(question, seconds), deadline - time.perf_counter(), seed)
        if min(limits.seconds, limits.wall) < LEAST_SECONDS:
            break
        answer, state, spent = _within(cost_of_kind, kinds, values[middle], limits, stop)
        seconds -= spent
        if state is not None:
            best, objective = state, largest(cost, state)
            high = unknown = int(np.searchsorted(values, objective))
            report(objective)
        elif answer == INFEASIBLE:
            low = middle + 1
        else:
            unknown, question = middle, question / 2
        middle = (low + unknown) // 2
    return best, float(values[low]) if low < high else objective


def _within(
    cost: Floats, gpus_of_kind: list[list[int]], most: float, limits: Limits, stop: Stop
) -> tuple[int, Triples | None, float]:
    """(CP-SAT's status, a state with no cost above `most` if it found one, its seconds of work).

    cost: float64[kind, expert of a, expert of b]
    """
    from ortools.sat.python.cp_model import FEASIBLE, OPTIMAL, CpModel, LinearExpr

    from engine.solver import seconds_of_work, solve

    size = cost.shape[1]
    model = CpModel()
    kind, a, b = np.nonzero(cost <= most)
    chosen = [model.new_bool_var("") for _ in range(len(kind))]
    for index in (a, b):
        order = np.argsort(index, kind="stable")
        ends = np.searchsorted(index[order], np.arange(size + 1))
        for expert in range(size):
            model.add_exactly_one(chosen[place] for place in order[ends[expert] : ends[expert + 1]])
    for gpu_kind, gpus in enumerate(gpus_of_kind):
        model.add(LinearExpr.sum([chosen[place] for place in np.flatnonzero(kind == gpu_kind)]) == len(gpus))
    status, solver = solve(model, limits, stop, linearization_level=2, probing_level=0)
    spent = seconds_of_work(solver)
    if status not in (OPTIMAL, FEASIBLE):
        return status, None, spent
    state = np.empty((2, size), dtype=np.int64)
    for gpu_kind, gpus in enumerate(gpus_of_kind):
        pairs = [place for place in np.flatnonzero(kind == gpu_kind) if solver.boolean_value(chosen[place])]
        state[0, gpus], state[1, gpus] = a[pairs], b[pairs]
    return status, (state[0], state[1]), spent
