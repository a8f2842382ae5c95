"""Affinity placement, exact where that is cheap: one expert to a GPU, or few experts; and ExFlow's integer program as printed.

With one expert to a GPU and one price for every hop only the identity of experts across layers matters, so each pair of
layers is an assignment problem of its own. Otherwise a placement of a layer is a state and the layers form a chain:
dynamic programming over balanced placements, those that differ only by renaming equal GPUs counted once.

The program (equations 8 to 12) has a variable for every hop of every token. Those of tokens that make the same hop are equal
in every optimum, so one stands for all of them, with their number as its cost. Equations 11 and 12 are printed with the same
expert on both sides; meant are the experts of the token in the two layers.
"""

from itertools import pairwise, permutations, product
from math import factorial

import numpy as np

from engine.errors import InputError
from engine.result import Floats, Ints, Limits, Stop, never

CHUNK = 4_000_000
"""Table entries computed at a time."""
MOST_ROWS = 2_000_000
"""Inequalities of a printed program: two gigabytes of CP-SAT."""
WHOLE = 2.0**40
"""Sum of the costs of a program whose counts are no whole numbers."""


def one_expert_per_gpu(transitions: Floats) -> Ints:
    """The placement int64[layer, expert] with most hops kept on their GPU, proven, for as many GPUs as experts.

    transitions: float64[layer - 1, expert, expert]
    """
    from scipy.optimize import linear_sum_assignment

    place = np.empty((len(transitions) + 1, transitions.shape[1]), dtype=np.int64)
    place[0] = np.arange(transitions.shape[1])
    for layer, count in enumerate(transitions):
        expert, following = linear_sum_assignment(count, maximize=True)
        place[layer + 1, following] = place[layer, expert]
    return place


def chain_work(layers: int, experts: int, gpus: int, gpus_per_node: int) -> int:
    """Multiplications that `chain_optimum` needs."""
    placements = factorial(experts) // factorial(experts // gpus) ** gpus
    nodes = gpus // gpus_per_node
    symmetries = factorial(gpus_per_node) ** nodes * factorial(nodes)
    return layers * (-(-placements // symmetries)) * placements * experts * gpus


def chain_optimum(transitions: Floats, cost: Floats, gpus_per_node: int, stop: Stop = never) -> Ints | None:
    """The placement int64[layer, expert] of least cost with equally many experts on each GPU; None once `stop` is True.

    Time and memory grow with `chain_work`.

    transitions: float64[layer - 1, expert, expert]
    cost: float64[gpu, gpu] of a hop, unchanged when GPUs of a node or whole nodes are renamed
    """
    experts, gpus = transitions.shape[1], len(cost)
    # Every way to place the experts with equally many on each GPU.
    labelled, free = np.empty((1, 0), dtype=np.int64), np.full((1, gpus), experts // gpus)
    for _ in range(experts):
        way, gpu = np.nonzero(free)
        labelled, free = np.column_stack([labelled[way], gpu]), free[way]
        free[np.arange(len(gpu)), gpu] -= 1
    renamings = _renamings(gpus, gpus_per_node)
    number = labelled @ gpus ** np.arange(experts)
    by_number = np.argsort(number)
    least_name = np.min([renaming[labelled] @ gpus ** np.arange(experts) for renaming in renamings], axis=0)
    names, state = np.unique(least_name, return_inverse=True)
    representative = labelled[by_number[np.searchsorted(number, names, sorter=by_number)]]
    by_state = np.argsort(state, kind="stable")
    starts = np.searchsorted(state[by_state], np.arange(len(names) + 1))
    one_hot = np.eye(gpus)[labelled].reshape(len(labelled), -1)
    sources = np.eye(gpus)[representative].reshape(len(names), -1)

    value = np.zeros(len(names))
    steps = []
    for count in transitions:
        weight = np.einsum("ik,pq->ipkq", count, cost).reshape(experts * gpus, experts * gpus)
        targets = weight @ one_hot.T
        best, origin = np.full(len(labelled), np.inf), np.zeros(len(labelled), dtype=np.int64)
        rows = max(1, CHUNK // len(labelled))
        for low in range(0, len(names), rows):
            if stop():
                return None
            table = sources[low : low + rows] @ targets + value[low : low + rows, None]
            row = table.argmin(axis=0)
            least = table[row, np.arange(len(labelled))]
            better = least < best
            best[better], origin[better] = least[better], row[better] + low
        winner = by_state[[low + best[by_state[low:high]].argmin() for low, high in pairwise(starts)]]
        value = best[winner]
        steps.append((winner, origin[winner]))

    path = [int(value.argmin())]
    for _, origin in reversed(steps):
        path.append(int(origin[path[-1]]))
    path.reverse()
    place = [representative[path[0]]]
    for (winner, _), before, after in zip(steps, path, path[1:], strict=False):
        # The step was priced from the representative, which was placed under other names of the GPUs.
        rename = next(renaming for renaming in renamings if (renaming[representative[before]] == place[-1]).all())
        place.append(rename[labelled[winner[after]]])
    return np.array(place)


def _renamings(gpus: int, gpus_per_node: int) -> Ints:
    """Every permutation of GPUs that keeps nodes together: int64[renaming, gpu]."""
    names = np.arange(gpus).reshape(-1, gpus_per_node)
    inside = list(permutations(range(gpus_per_node)))
    return np.array(
        [
            np.concatenate([names[node][list(order)] for node, order in zip(nodes, orders, strict=True)])
            for nodes in permutations(range(len(names)))
            for orders in product(inside, repeat=len(names))
        ]
    )


def printed_program(transitions: Floats, groups: int, limits: Limits, stop: Stop = never) -> tuple[Ints, float, bool]:
    """Equations 8 to 12 of ExFlow by CP-SAT: (placement int64[layer, expert] in equal groups, hops between groups that no
    placement undercuts, True if proven). It starts from contiguous blocks, so that there is always an answer.

    transitions: float64[layer - 1, expert, expert]
    groups: nodes or GPUs, a divisor of the number of experts

    Raises InputError for a program that would not fit the memory.
    """
    from ortools.sat.python.cp_model import FEASIBLE, OPTIMAL, CpModel, LinearExpr

    from engine.solver import solve

    layers, experts = len(transitions) + 1, transitions.shape[1]
    hops = np.argwhere(transitions > 0)
    if (rows := 2 * len(hops) * groups) > MOST_ROWS:
        raise InputError(
            f"the printed program would have {rows:,} inequalities (at most {MOST_ROWS:,}); use stages=staged, or fewer "
            "layers, experts or GPUs"
        )
    counts = transitions[tuple(hops.T)]
    scale = 1.0 if (counts == np.rint(counts)).all() else WHOLE / counts.sum()
    costs = np.rint(counts * scale).astype(np.int64)
    linear = np.arange(experts) // (experts // groups)
    model = CpModel()
    held = [[[model.new_bool_var("") for _ in range(groups)] for _ in range(experts)] for _ in range(layers)]
    for of_layer in held:
        for of_expert in of_layer:
            model.add_exactly_one(of_expert)
        for of_group in zip(*of_layer, strict=True):
            model.add(LinearExpr.sum(of_group) == experts // groups)
    leaves = [model.new_bool_var("") for _ in hops]
    for (layer, expert, following), leaving in zip(hops.tolist(), leaves, strict=True):
        for here, there in zip(held[layer][expert], held[layer + 1][following], strict=True):
            model.add(leaving >= here - there)
            model.add(leaving >= there - here)
    model.minimize(LinearExpr.weighted_sum(leaves, costs.tolist()))
    hint = {held[at][e][g]: int(linear[e] == g) for at in range(layers) for e in range(experts) for g in range(groups)}
    hint |= {leaving: int(linear[hop[1]] != linear[hop[2]]) for hop, leaving in zip(hops, leaves, strict=True)}
    answer, solver = solve(model, limits, stop, hint=hint)
    if answer not in (OPTIMAL, FEASIBLE):
        return np.tile(linear, (layers, 1)), 0.0, False
    place = np.array([[[solver.value(var) for var in of_expert] for of_expert in of_layer] for of_layer in held]).argmax(axis=2)
    lost = 0.0 if scale == 1.0 else len(hops) / 2
    return place, max((solver.best_objective_bound - lost) / scale, 0.0), answer == OPTIMAL
