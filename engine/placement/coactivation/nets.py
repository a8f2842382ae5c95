"""The tokens of a layer as nets: those that go to the same experts are one, with a price for every GPU or node.

Placing experts so that tokens touch few groups is partitioning a hypergraph (Çatalyürek & Aykanat, IEEE TPDS 10(7), 1999):
experts are its vertices, sets of experts its nets, and a net costs its price at every group that holds one of its experts.
At a group, the price is the number of the net's tokens that are sent from elsewhere.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine.placement.coactivation.instance import CoactivationInstance


class Nets(NamedTuple):
    """Columns of nets. member: int32[net, choice], its experts, -1 after the last; price: int32[net, group];
    first: int64[expert + 1], where the nets of an expert begin in `net`: int32[membership]."""

    member: NDArray[np.int32]
    price: NDArray[np.int32]
    first: NDArray[np.int64]
    net: NDArray[np.int32]

    @property
    def experts(self) -> int:
        return len(self.first) - 1

    @property
    def groups(self) -> int:
        return self.price.shape[1]

    def touched(self, group_of_expert: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether a net has an expert in a group: bool[net, group]; group_of_expert: int64[expert]."""
        group = np.where(self.member < 0, self.groups, group_of_expert[self.member])
        touched = np.zeros((len(group), self.groups + 1), dtype=bool)
        np.put_along_axis(touched, group, True, axis=1)
        return touched[:, : self.groups]

    def rows(self, group_of_expert: NDArray[np.int64]) -> int:
        """Rows to other groups; group_of_expert: int64[expert]."""
        return _rows(self.member, self.price, group_of_expert)


@njit(cache=True, nogil=True)
def _rows(member, price, group):
    rows = 0
    for net in range(len(member)):
        for at in range(member.shape[1]):
            if member[net, at] < 0:
                break
            own, first = group[member[net, at]], True
            for before in range(at):
                if group[member[net, before]] == own:
                    first = False
                    break
            if first:
                rows += price[net, own]
    return rows


def nets_between(instance: CoactivationInstance, layer: int) -> Nets:
    """The nets of a layer, priced by rows to other GPUs, or to other nodes where a row serves a node."""
    return nets_of(instance.experts[layer], instance.home_group, instance.groups, instance.expert_count)


def nets_inside(instance: CoactivationInstance, layer: int, here: NDArray[np.int64]) -> Nets:
    """The nets among the experts of one node, here: int64[expert], priced by rows over its links to other GPUs of it.

    A row enters a node at the GPU with its sender's place in its node, which therefore needs no other one. Expert e of
    these nets is here[e].
    """
    size = instance.node_size
    local = np.full(instance.expert_count + 1, -1, dtype=np.int64)
    local[here] = np.arange(len(here))
    chosen = local[instance.experts[layer]]
    entry = np.where(instance.source_gpu < 0, -1, instance.source_gpu % size)
    present = (chosen >= 0).any(axis=1)
    return nets_of(chosen[present], entry[present], size, len(here))


def nets_of(experts: NDArray[np.integer], home: NDArray[np.int64], groups: int, count: int) -> Nets:
    """Nets of tokens that go to experts int[token, choice] (-1 = none) from the group home int64[token] (-1 = outside)."""
    chosen = sets_of(experts)
    at, net, tokens = distinct(chosen)
    member = chosen[at]
    price = np.repeat(tokens[:, None], groups, axis=1).astype(np.int32)
    known = home >= 0
    np.subtract.at(price, (net[known], home[known]), 1)
    flat = member.ravel()
    order = np.argsort(flat, kind="stable")
    first = np.searchsorted(flat[order], np.arange(count + 1))
    return Nets(member, price, first, (order // member.shape[1]).astype(np.int32))


def sets_of(experts: NDArray[np.integer]) -> NDArray[np.int32]:
    """The experts of every token in falling order, each once, then -1: int32[token, choice]."""
    chosen = -np.sort(-experts.astype(np.int32), axis=1)
    chosen[:, 1:][chosen[:, 1:] == chosen[:, :-1]] = -1
    return -np.sort(-chosen, axis=1)


def distinct(rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of rows int32[row, column], where each different one is: int64[different]; which one a row is: int64[row]; and how often
    each occurs: int64[different]."""
    # Rows as single values: np.unique along an axis compares field by field.
    keys = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).ravel()
    _, at, which, times = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    return at, which.ravel(), times
