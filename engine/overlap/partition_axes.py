"""The axis along which every tensor of a partitioned range is cut: constraint satisfaction (Lancet §5.2).

An operator allows some combinations of axes of its inputs and outputs; a tensor keeps one axis throughout, for changing
it needs data of other parts and would stop the pipeline. CP-SAT finds an assignment. Counting all of them does not list
them: tensors are summed out one by one, which stays small as long as the operators form something like a chain.

`overlappable` reads off a training step's dependencies which weight gradients may run under which all-to-alls.
"""

import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import InputError
from engine.result import Bools, Limits, Result, Status, Stop, never, result_of

if TYPE_CHECKING:
    import networkx as nx

Axis = int | str
"""A dimension counted from 0, -1 for a tensor that every part uses whole, or a name such as `irregular`."""

LEAST_SECONDS = 0.01
"""For CP-SAT where to lay the problem out took all the time."""
MOST_ROWS = 200_000
"""Combinations of axes a table may have while counting: a second or so, and some hundred megabytes."""

Table = tuple[tuple[str, ...], dict[tuple[int, ...], int]]
"""Tensors, and the number of ways in which each combination of their places comes about."""


@dataclass(frozen=True)
class AxisConstraint:
    """The combinations of axes that an operator allows for some tensors, in their order."""

    tensors: tuple[str, ...]
    allowed: tuple[tuple[Axis, ...], ...]


@dataclass(frozen=True)
class AxisProblem:
    """Tensors with the axes along which they can be cut, and the operators' constraints.

    An allowed combination with an axis that is in no tensor's domain is of no use, but no error. Raises InputError if a
    constraint names no tensor, an unknown one, or has a combination of another length.
    """

    domains: Mapping[str, Sequence[Axis]]
    constraints: Sequence[AxisConstraint]

    def __post_init__(self) -> None:
        for number, constraint in enumerate(self.constraints):
            if not constraint.tensors:
                raise InputError(f"constraint {number} names no tensor")
            for tensor in constraint.tensors:
                if tensor not in self.domains:
                    raise InputError(f"constraint {number} names tensor '{tensor}', which has no domain")
            for combination in constraint.allowed:
                if len(combination) != len(constraint.tensors):
                    raise InputError(
                        f"constraint {number}: {list(combination)} has {len(combination)} axes for "
                        f"{len(constraint.tensors)} tensors"
                    )

    def tables(self) -> list[tuple[tuple[str, ...], set[tuple[int, ...]]]]:
        """The constraints as (different tensors, combinations of places in their domains), impossible ones left out."""
        place = {tensor: {axis: i for i, axis in enumerate(axes)} for tensor, axes in self.domains.items()}
        tables = []
        for constraint in self.constraints:
            tensors = tuple(dict.fromkeys(constraint.tensors))
            rows = set()
            for combination in constraint.allowed:
                chosen: dict[str, Axis] = {}
                for tensor, axis in zip(constraint.tensors, combination, strict=True):
                    if axis not in place[tensor] or chosen.setdefault(tensor, axis) != axis:
                        break
                else:
                    rows.add(tuple(place[tensor][chosen[tensor]] for tensor in tensors))
            tables.append((tensors, rows))
        return tables


def partition_axes(problem: AxisProblem, limits: Limits = Limits(), stop: Stop = never) -> Result[dict[str, Axis] | None]:
    """An axis for every tensor, so that all constraints allow them; which one, where there are several, is left open.

    Status OPTIMAL with an assignment, INFEASIBLE if there is none, CANCELLED or TIME_LIMIT (wall seconds) if it was not
    decided. There is nothing to minimise: `objective` and `bound` are 0.
    """
    start = time.perf_counter()
    tables = problem.tables()
    if not all(rows for _, rows in tables) or not all(problem.domains.values()):
        status, solution = Status.INFEASIBLE, None
    else:
        from ortools.sat.python.cp_model import FEASIBLE, INFEASIBLE, OPTIMAL, CpModel, Domain

        from engine.solver import solve

        model, sizes = CpModel(), {tensor: len(axes) for tensor, axes in problem.domains.items()}
        place = {tensor: model.new_int_var_from_domain(Domain(0, size - 1), tensor) for tensor, size in sizes.items()}
        for tensors, rows in tables:
            model.add_allowed_assignments([place[tensor] for tensor in tensors], sorted(rows))
        left = max(start + limits.wall_seconds - time.perf_counter(), LEAST_SECONDS)
        answer, solver = solve(model, Limits(left, seed=limits.seed), stop)
        solution = None
        if answer in (OPTIMAL, FEASIBLE):
            status = Status.OPTIMAL
            solution = {tensor: problem.domains[tensor][solver.value(variable)] for tensor, variable in place.items()}
        elif answer == INFEASIBLE:
            status = Status.INFEASIBLE
        else:
            status = Status.CANCELLED if stop() else Status.TIME_LIMIT
    options = {"time_limit": limits.seconds}
    return result_of("partition-axes", start, status, 0.0, 0.0, solution, options, limits.seed)


def count_axes(problem: AxisProblem, stop: Stop = never) -> int | None:
    """The exact number of assignments that all constraints allow, however many; None when `stop` answers True.

    The tensor that is tied to the fewest others goes first: the tables that name it are joined and it is summed out.
    Raises InputError when so many tensors are tied to each other that a table would have more than `MOST_ROWS` rows.
    """
    tables = [(tensors, dict.fromkeys(rows, 1)) for tensors, rows in problem.tables()]
    left, count = dict.fromkeys(problem.domains), 1
    while left:
        if stop():
            return None
        neighbours: dict[str, set[str]] = {tensor: set() for tensor in left}
        for tensors, _ in tables:
            for tensor in tensors:
                neighbours[tensor].update(tensors)
        tensor = min(left, key=lambda name: len(neighbours[name]))
        del left[tensor]
        own = [table for table in tables if tensor in table[0]]
        tables = [table for table in tables if tensor not in table[0]]
        if not own:
            count *= len(set(problem.domains[tensor]))
            continue
        joined = own[0]
        for table in own[1:]:
            if stop():
                return None
            joined = _join(joined, table)
        scope, rows = joined
        at = scope.index(tensor)
        summed: dict[tuple[int, ...], int] = defaultdict(int)
        for row, ways in rows.items():
            summed[row[:at] + row[at + 1 :]] += ways
        if len(scope) > 1:
            tables.append((scope[:at] + scope[at + 1 :], summed))
        else:
            count *= summed[()]
    return count


def _join(a: Table, b: Table) -> Table:
    """The combinations that both tables allow."""
    shared = [tensor for tensor in b[0] if tensor in a[0]]
    fresh = [i for i, tensor in enumerate(b[0]) if tensor not in a[0]]
    in_a, in_b = [a[0].index(tensor) for tensor in shared], [b[0].index(tensor) for tensor in shared]
    matching = defaultdict(list)
    for row, ways in b[1].items():
        matching[tuple(row[i] for i in in_b)].append((tuple(row[i] for i in fresh), ways))
    pairs = [(row, ways, matching[tuple(row[i] for i in in_a)]) for row, ways in a[1].items()]
    if sum(len(partners) for _, _, partners in pairs) > MOST_ROWS:
        raise InputError(
            f"too many tensors are tied to each other to count the solutions (over {MOST_ROWS} combinations at once); "
            "ask for one solution only, or count a smaller range"
        )
    rows = {row + more: ways * others for row, ways, partners in pairs for more, others in partners}
    return a[0] + tuple(b[0][i] for i in fresh), rows


def overlappable(graph: "nx.DiGraph", alltoalls: Sequence[Hashable], weight_gradients: Sequence[Hashable]) -> Bools:
    """bool[w, m]: True if no path leads from the dW to the all-to-all or back (Lancet section 4.1).

    Instead of one search per pair, the all-to-alls before and after every node are sets of bits that go once through the graph.

    graph: an edge from every operator to those that need its output
    alltoalls, weight_gradients: names of its nodes, in the order of the columns and rows

    Raises InputError for a graph with a cycle and for names that are not in it or come twice.
    """
    import networkx as nx

    if not graph.is_directed():
        raise InputError("graph: wanted a directed graph, an edge from every operator to those that need its output")
    names = [*alltoalls, *weight_gradients]
    missing = [name for name in names if name not in graph]
    if missing:
        raise InputError(f"{missing[0]!r} is not an operator of the graph")
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise InputError(f"{twice!r} comes twice among the all-to-alls and weight gradients")
    try:
        order = list(nx.topological_sort(graph))
    except nx.NetworkXUnfeasible:
        raise InputError("graph: operators depend on each other in a circle") from None
    own = {name: 1 << column for column, name in enumerate(alltoalls)}
    before = _reached(order, graph.predecessors, own)
    after = _reached(reversed(order), graph.successors, own)
    dependent = [before[name] | after[name] for name in weight_gradients]
    rows = [[not bits >> column & 1 for column in range(len(alltoalls))] for bits in dependent]
    return np.array(rows, dtype=bool).reshape(len(weight_gradients), len(alltoalls))


def _reached(order: Iterable[Hashable], sources, own: dict[Hashable, int]) -> dict[Hashable, int]:
    """The bits of every node's all-to-alls: its own, and those of its sources, which come earlier in `order`."""
    bits: dict[Hashable, int] = {}
    for node in order:
        bits[node] = own.get(node, 0)
        for source in sources(node):
            bits[node] |= bits[source]
    return bits
