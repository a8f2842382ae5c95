"""The problem of placing experts that fire together, and the worth of an answer.

Placing experts so that tokens touch few groups is partitioning a hypergraph (Çatalyürek & Aykanat, IEEE TPDS 10(7), 1999):
experts are its vertices, sets of experts its nets, and a net costs its price at every group that holds one of its experts.
The tokens of a layer that go to the same experts are one net; at a group, a GPU or node, its price is the number of its tokens
that are sent from elsewhere.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine.errors import InputError
from engine.result import Bools, Floats, Ints

Travel = Literal["gpu", "node"]
MOST_EXPERTS = 32_768


@dataclass(frozen=True)
class CoactivationInstance:
    """The experts that every token goes to in every layer, and the reach of one row of a token.

    experts: int16[layer, token, choice], -1 = none
    source_gpu: int64[token], the GPU that a token is sent from, -1 = from outside: then every GPU is another one
    gpus: a divisor of the number of experts
    gpus_per_node: GPU g is in node g // gpus_per_node; None = one node
    travel: one row a destination "gpu", or one a destination "node"
    cap: tokens of the most loaded GPU of a layer / mean over the GPUs, at most; None = any
    expert_count: experts of a layer; None = the fewest that include all ids and that the GPUs divide

    Raises InputError if a shape or a value is wrong.
    """

    experts: NDArray[np.int16]
    source_gpu: Ints
    gpus: int
    gpus_per_node: int | None = None
    travel: Travel = "gpu"
    cap: float | None = None
    expert_count: int | None = None

    def __post_init__(self) -> None:
        experts, source = _whole(self.experts, "experts"), _whole(self.source_gpu, "source_gpu")
        if experts.ndim != 3 or experts.shape[0] == 0 or experts.shape[2] == 0:
            raise InputError(f"experts: shape {list(experts.shape)}; wanted [layer, token, choice], at least one of each")
        if source.shape != experts.shape[1:2]:
            raise InputError(f"source_gpu: shape {list(source.shape)}; wanted one GPU for each of {experts.shape[1]} tokens")
        if self.gpus < 1:
            raise InputError(f"gpus: {self.gpus}; wanted at least 1")
        if self.gpus_per_node is not None and (self.gpus_per_node < 1 or self.gpus % self.gpus_per_node):
            raise InputError(f"gpus_per_node: {self.gpus} GPUs are not whole nodes of {self.gpus_per_node}")
        if source.size and not -1 <= source.min() <= source.max() < self.gpus:
            raise InputError(f"source_gpu: the GPUs are 0 to {self.gpus - 1} (-1: from outside), but one is {_odd(source)}")
        if self.travel not in get_args(Travel):
            raise InputError(f"travel: must be 'gpu' or 'node', not '{self.travel}'")
        if self.cap is not None and not 1 <= self.cap < math.inf:
            raise InputError(f"cap: the most loaded GPU has at least the mean load, so wanted at least 1, not {self.cap:g}")
        object.__setattr__(self, "experts", experts.astype(np.int16))
        object.__setattr__(self, "source_gpu", source.astype(np.int64))
        ids = int(experts.max(initial=0)) + 1
        count = -(-ids // self.gpus) * self.gpus if self.expert_count is None else self.expert_count
        if experts.min(initial=0) < -1 or ids > min(count, MOST_EXPERTS):
            limit = min(count, MOST_EXPERTS) - 1
            raise InputError(f"experts: ids are 0 to {limit} (-1: none), but one is {_odd(experts)}")
        if count < 1 or count % self.gpus:
            raise InputError(f"gpus: {count} experts cannot be spread equally over {self.gpus} GPUs")
        object.__setattr__(self, "expert_count", count)

    @property
    def layers(self) -> int:
        return len(self.experts)

    @property
    def node_size(self) -> int:
        """GPUs of a node."""
        return self.gpus_per_node or self.gpus

    @property
    def group_size(self) -> int:
        """GPUs that share a row of a token."""
        return self.node_size if self.travel == "node" else 1

    @property
    def groups(self) -> int:
        """Number of GPUs or nodes, each of which gets one row of a token."""
        return self.gpus // self.group_size

    @property
    def home_group(self) -> Ints:
        """The GPU or node that a token is sent from: int64[token], -1 = from outside."""
        return np.where(self.source_gpu < 0, -1, self.source_gpu // self.group_size)

    def load(self, layer: int) -> Ints:
        """Tokens of every expert of the layer: int64[expert]."""
        chosen = self.experts[layer]
        return np.bincount(chosen[chosen >= 0], minlength=self.expert_count)

    def most_load(self, layer: int) -> int:
        """Tokens that a GPU may have in this layer under the cap."""
        tokens = int(self.load(layer).sum())
        return tokens if self.cap is None else math.floor(self.cap * tokens / self.gpus * (1 + 1e-12))

    def rows(self, gpu_of_expert: Ints) -> Ints:
        """int64[layer]: rows of every layer to other GPUs (or nodes). gpu_of_expert: int64[layer, expert]."""
        return np.array([self.rows_of_layer(layer, place) for layer, place in enumerate(gpu_of_expert)], dtype=np.int64)

    def rows_of_layer(self, layer: int, gpu_of_expert: Ints) -> int:
        """The rows of one layer. gpu_of_expert: int64[expert]."""
        home = self.home_group
        chosen = self.experts[layer]
        # An expert that is none is at home, and so is every token: neither counts as a row.
        group = np.where(chosen < 0, home[:, None], gpu_of_expert[chosen] // self.group_size)
        visited = np.zeros((len(group), self.groups + 1), dtype=bool)
        np.put_along_axis(visited, group, True, axis=1)
        visited[np.arange(len(home)), home] = False
        return int(visited[:, : self.groups].sum())

    def imbalance(self, gpu_of_expert: Ints) -> Floats:
        """float64[layer]: tokens of the most loaded GPU / mean, 1 in a layer without tokens. gpu_of_expert: int64[layer,
        expert]."""
        ratio = np.ones(self.layers)
        for layer, place in enumerate(gpu_of_expert):
            load = np.bincount(place, weights=self.load(layer), minlength=self.gpus)
            if load.any():
                ratio[layer] = load.max() / load.mean()
        return ratio


def _whole(values: np.ndarray, name: str) -> np.ndarray:
    values = np.asarray(values)
    if values.size and not np.issubdtype(values.dtype, np.integer):
        raise InputError(f"{name}: wanted whole numbers")
    return values.astype(np.int64)


def _odd(ids: np.ndarray) -> int:
    """The id that is furthest out of its range."""
    return int(ids.min()) if ids.min() < -1 else int(ids.max())


class Nets(NamedTuple):
    """Columns of nets.

    member: int32[net, choice], its experts, -1 after the last
    price: int32[net, group]
    first: int64[expert + 1], the begin of the nets of an expert in `net`
    net: int32[membership]
    """

    member: NDArray[np.int32]
    price: NDArray[np.int32]
    first: Ints
    net: NDArray[np.int32]

    @property
    def experts(self) -> int:
        return len(self.first) - 1

    @property
    def groups(self) -> int:
        return self.price.shape[1]

    def touched(self, group_of_expert: Ints) -> Bools:
        """bool[net, group]: True if the net has an expert in the group. group_of_expert: int64[expert]."""
        group = np.where(self.member < 0, self.groups, group_of_expert[self.member])
        touched = np.zeros((len(group), self.groups + 1), dtype=bool)
        np.put_along_axis(touched, group, True, axis=1)
        return touched[:, : self.groups]

    def rows(self, group_of_expert: Ints) -> int:
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


def nets_inside(instance: CoactivationInstance, layer: int, here: Ints) -> Nets:
    """The nets among the experts of one node, priced by rows over its links to other GPUs of it.

    A row enters a node at the GPU with its sender's place in its node, which therefore needs no other one.

    here: int64[expert], the experts of the node; expert e of these nets is here[e]
    """
    size = instance.node_size
    local = np.full(instance.expert_count + 1, -1, dtype=np.int64)
    local[here] = np.arange(len(here))
    chosen = local[instance.experts[layer]]
    entry = np.where(instance.source_gpu < 0, -1, instance.source_gpu % size)
    present = (chosen >= 0).any(axis=1)
    return nets_of(chosen[present], entry[present], size, len(here))


def nets_of(experts: NDArray[np.integer], home: Ints, groups: int, count: int) -> Nets:
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


def distinct(rows: NDArray[np.int32]) -> tuple[Ints, Ints, Ints]:
    """(a row of each kind int64[kind], the kind of each row int64[row], rows of each kind int64[kind]) of equal rows.

    rows: int32[row, column]
    """
    # Rows as single values: np.unique along an axis compares field by field.
    keys = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).ravel()
    _, at, which, times = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    return at, which.ravel(), times
