"""The problem of placing experts that fire together, and what an answer is worth."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError

Travel = Literal["gpu", "node"]
MOST_EXPERTS = 32_768


@dataclass(frozen=True)
class CoactivationInstance:
    """Which experts every token goes to in every layer, and what one row of a token can serve.

    experts: int16[layer, token, choice], -1 = none; source_gpu: int64[token], the GPU that a token is sent from, -1 = from
    outside: then every GPU is another one. gpus: how many; they must divide the experts. gpus_per_node: GPU g is in node
    g // gpus_per_node; None = one node. travel: one row a destination "gpu", or one a destination "node".
    cap: tokens of the most loaded GPU of a layer / mean over the GPUs, at most; None = any. expert_count: experts of a
    layer; None = the fewest that include all ids and that the GPUs divide.

    Raises InputError if a shape or a value is wrong.
    """

    experts: NDArray[np.int16]
    source_gpu: NDArray[np.int64]
    gpus: int
    gpus_per_node: int | None = None
    travel: Travel = "gpu"
    cap: float | None = None
    expert_count: int | None = None

    def __post_init__(self) -> None:
        experts, source = _whole(self.experts, "experts"), _whole(self.source_gpu, "source_gpu")
        if experts.ndim != 3 or experts.shape[0] == 0 or experts.shape[2] == 0:
            raise InputError(
                f"experts: shape {list(experts.shape)}; wanted [layer, token, choice], at least one of each"
            )
        if source.shape != experts.shape[1:2]:
            raise InputError(
                f"source_gpu: shape {list(source.shape)}; wanted one GPU for each of {experts.shape[1]} tokens"
            )
        if self.gpus < 1:
            raise InputError(f"gpus: {self.gpus}; wanted at least 1")
        if self.gpus_per_node is not None and (self.gpus_per_node < 1 or self.gpus % self.gpus_per_node):
            raise InputError(f"gpus_per_node: {self.gpus} GPUs are not whole nodes of {self.gpus_per_node}")
        if source.size and not -1 <= source.min() <= source.max() < self.gpus:
            raise InputError(
                f"source_gpu: the GPUs are 0 to {self.gpus - 1} (-1: from outside), but one is {_odd(source)}"
            )
        if self.travel not in get_args(Travel):
            raise InputError(f"travel: must be 'gpu' or 'node', not '{self.travel}'")
        if self.cap is not None and not 1 <= self.cap < math.inf:
            raise InputError(
                f"cap: the most loaded GPU has at least the mean load, so wanted at least 1, not {self.cap:g}"
            )
        object.__setattr__(self, "experts", experts.astype(np.int16))
        object.__setattr__(self, "source_gpu", source.astype(np.int64))
        object.__setattr__(self, "expert_count", self._counted(experts))

    def _counted(self, experts: np.ndarray) -> int:
        """Experts of a layer, checked against the ids."""
        ids = int(experts.max(initial=0)) + 1
        count = -(-ids // self.gpus) * self.gpus if self.expert_count is None else self.expert_count
        if experts.min(initial=0) < -1 or ids > min(count, MOST_EXPERTS):
            limit = min(count, MOST_EXPERTS) - 1
            raise InputError(f"experts: ids are 0 to {limit} (-1: none), but one is {_odd(experts)}")
        if count < 1 or count % self.gpus:
            raise InputError(f"gpus: {count} experts cannot be spread equally over {self.gpus} GPUs")
        return count

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
        """GPUs or nodes: what a token sends one row each."""
        return self.gpus // self.group_size

    @property
    def home_group(self) -> NDArray[np.int64]:
        """The GPU or node that a token is sent from: int64[token], -1 = from outside."""
        return np.where(self.source_gpu < 0, -1, self.source_gpu // self.group_size)

    def load(self, layer: int) -> NDArray[np.int64]:
        """Tokens of every expert of the layer: int64[expert]."""
        chosen = self.experts[layer]
        return np.bincount(chosen[chosen >= 0], minlength=self.expert_count)

    def most_load(self, layer: int) -> int:
        """Tokens that a GPU may have in this layer under the cap."""
        tokens = int(self.load(layer).sum())
        return tokens if self.cap is None else math.floor(self.cap * tokens / self.gpus * (1 + 1e-12))

    def rows(self, gpu_of_expert: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows that the tokens of every layer send to other GPUs (or nodes): int64[layer]; gpu_of_expert: int64[layer,
        expert]."""
        return np.array([self.rows_of_layer(layer, place) for layer, place in enumerate(gpu_of_expert)], dtype=np.int64)

    def rows_of_layer(self, layer: int, gpu_of_expert: NDArray[np.int64]) -> int:
        """The same of one layer; gpu_of_expert: int64[expert]."""
        home = self.home_group
        chosen = self.experts[layer]
        # An expert that is none is at home, and so is every token: neither counts as a row.
        group = np.where(chosen < 0, home[:, None], gpu_of_expert[chosen] // self.group_size)
        visited = np.zeros((len(group), self.groups + 1), dtype=bool)
        np.put_along_axis(visited, group, True, axis=1)
        visited[np.arange(len(home)), home] = False
        return int(visited[:, : self.groups].sum())

    def imbalance(self, gpu_of_expert: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tokens of the most loaded GPU / mean: float64[layer], 1 in a layer without tokens; gpu_of_expert: int64[layer,
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
