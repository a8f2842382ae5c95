"""Which weight gradients may run under which all-to-alls, read off the dependencies of a training step."""

from collections.abc import Hashable, Iterable, Sequence

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError


def overlappable(
    graph: nx.DiGraph, alltoalls: Sequence[Hashable], weight_gradients: Sequence[Hashable]
) -> NDArray[np.bool_]:
    """bool[w, m]: whether no path leads from the dW to the all-to-all or back (Lancet section 4.1).

    graph: an edge from every operator to those that need its output; alltoalls, weight_gradients: names of its nodes, in
    the order of the columns and rows. Instead of one search per pair, the all-to-alls before and after every node are
    sets of bits that go once through the graph. Raises InputError for a graph with a cycle and for names that are not in
    it or come twice.
    """
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
