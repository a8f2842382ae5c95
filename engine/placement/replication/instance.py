"""The problem of replicating experts, and the worth of an answer.

Expert groups go onto nodes evenly as the first step of EPLB's hierarchical policy, here the best way where all can be tried.
Routing that is limited to few groups then meets few nodes; the price is that a node is as busy as its groups.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Literal

import numpy as np

from engine.errors import InputError
from engine.placement.replication.bounds import divided, equal_weights, packed
from engine.placement.replication.eplb import check_counts
from engine.placement.replication.search import Layouts, exchange
from engine.result import Bools, Floats, Ints, Stop, never

MOST_WAYS = 3000
"""Ways to deal groups to nodes up to which all are tried: 8 groups on 4 nodes are 105, 12 on 3 nodes 5775."""


def groups_of_nodes(load: Floats, nodes: int, groups: int, speed_of_node: float) -> tuple[Ints, Floats]:
    """(groups in the order of their nodes int64[row, group], proven least time of the busiest node float64[row]).

    load: float64[row, load, expert], in units in which a node does `speed_of_node` in a time of 1.
    """
    rows, loads, experts = load.shape
    work = load.reshape(rows, loads, groups, experts // groups).sum(axis=3) / speed_of_node
    ways = _partitions(groups, nodes)
    if ways is not None:
        worst = np.stack([work[:, :, way].sum(axis=3).max(axis=(1, 2)) for way in ways])
        return ways[worst.argmin(axis=0)].reshape(rows, groups), worst.min(axis=0)
    share = groups // nodes
    worst_work = work.max(axis=1)
    layout = packed(worst_work, np.ones((rows, groups), dtype=np.int64), np.full(nodes, share), np.ones(nodes))
    layouts = Layouts(layout, equal_weights(layout, work), np.ones(nodes))
    exchange(layouts, np.ones(rows), 200, np.random.default_rng(0), never)
    # The heaviest group has company: the lightest others at least.
    rising = np.sort(work, axis=2)
    least = rising[:, :, -1] + rising[:, :, : share - 1].sum(axis=2)
    return layouts.expert.reshape(rows, groups), least.max(axis=1)


def _partitions(groups: int, nodes: int) -> Ints | None:
    """int64[way, node, group of the node]: every even dealing of groups to alike nodes; None if there are too many."""
    ways: list[list[tuple[int, ...]]] = [[]]
    for _ in range(nodes):
        longer = []
        for way in ways:
            left = sorted(set(range(groups)).difference(*way))
            for others in combinations(left[1:], groups // nodes - 1):
                longer.append([*way, (left[0], *others)])
                if len(longer) > MOST_WAYS:
                    return None
        ways = longer
    return np.array(ways)


Split = Literal["equal", "free"]


@dataclass(frozen=True)
class ReplicationInstance:
    """Layers of experts to be replicated onto the same GPUs.

    loads: float64[load, layer, expert], one or several workloads, any unit
    slots: of one layer over all GPUs
    split: an expert's tokens divide equally over its replicas, or at will
    nodes, groups: where nodes divide groups, all replicas of the experts of a group (equal blocks of expert ids) stay on one
        node
    slots_of_gpu: int64[gpu], where it is not the same for all
    speed: float64[gpu], relative computing speed, 1 everywhere if not given

    Raises InputError for a wrong shape or value, or where the slots cannot hold every expert.
    """

    loads: Floats
    slots: int
    gpus: int
    split: Split = "equal"
    nodes: int = 1
    groups: int = 1
    slots_of_gpu: Ints | None = None
    speed: Floats | None = None

    def __post_init__(self) -> None:
        loads = np.asarray(self.loads, dtype=np.float64)
        if loads.ndim != 3 or loads.size == 0 or not np.isfinite(loads).all() or loads.min() < 0:
            raise InputError("loads: wanted a table [load, layer, expert] of finite values of at least 0, none empty")
        if self.split not in ("equal", "free"):
            raise InputError(f"split: must be 'equal' or 'free', not '{self.split}'")
        experts = loads.shape[2]
        slots_of_gpu = self.slots_of_gpu
        if slots_of_gpu is None:
            check_counts(experts, self.slots, self.gpus, self.nodes, self.groups)
            slots_of_gpu = np.full(self.gpus, self.slots // self.gpus)
        else:
            slots_of_gpu = self._checked_slots(experts)
            check_counts(experts, self.slots * self.gpus, self.gpus, self.nodes, self.groups)
        speed = np.ones(self.gpus) if self.speed is None else np.asarray(self.speed, dtype=np.float64)
        if speed.shape != (self.gpus,) or not np.isfinite(speed).all() or speed.min() <= 0:
            raise InputError(f"speed: wanted one positive number for each of the {self.gpus} GPUs")
        for name, value in (("loads", loads), ("slots_of_gpu", slots_of_gpu.astype(np.int64)), ("speed", speed)):
            object.__setattr__(self, name, value)
        if self.grouped and not self.alike:
            raise InputError(
                "groups: experts can be kept on nodes by group only where all GPUs have equal slots and speeds; "
                "leave groups and nodes out, or plan for equal GPUs"
            )

    def _checked_slots(self, experts: int) -> Ints:
        slots_of_gpu = np.asarray(self.slots_of_gpu)
        whole = np.issubdtype(slots_of_gpu.dtype, np.integer)
        if slots_of_gpu.shape != (self.gpus,) or not whole or slots_of_gpu.min(initial=0) < 0:
            raise InputError(f"slots_of_gpu: wanted one whole number of at least 0 for each of the {self.gpus} GPUs")
        if (total := int(slots_of_gpu.sum())) != self.slots:
            raise InputError(
                f"slots_of_gpu: adds up to {total}, but slots says {self.slots}; "
                f"change slots to {total}, or {abs(total - self.slots)} slots on some GPUs"
            )
        if self.slots < experts:
            raise InputError(
                f"slots_of_gpu: {self.slots} slots for {experts} experts, each of which needs one; "
                f"add {experts - self.slots} slots"
            )
        return slots_of_gpu

    @property
    def alike(self) -> bool:
        """True if all GPUs have equally many slots and the same speed."""
        return bool((self.slots_of_gpu == self.slots_of_gpu[0]).all() and (self.speed == self.speed[0]).all())

    @property
    def grouped(self) -> bool:
        """True if expert groups are kept on nodes (EPLB's hierarchical policy)."""
        return self.nodes > 1 and self.groups % self.nodes == 0

    @cached_property
    def gpu_of_slot(self) -> Ints:
        """int64[slot]."""
        return np.repeat(np.arange(self.gpus), self.slots_of_gpu)

    @cached_property
    def relative(self) -> Floats:
        """float64[layer, load, expert]: loads so that a perfect division takes every GPU a time of 1; no load stays 0."""
        greatest = self.loads.max(axis=2, keepdims=True)
        scaled = self.loads / np.where(greatest > 0, greatest, 1.0)
        total = scaled.sum(axis=2, keepdims=True)
        return (scaled / np.where(total > 0, total, 1.0) * self.speed.sum()).swapaxes(0, 1).copy()

    @cached_property
    def groups_in_order(self) -> tuple[Ints, Floats]:
        """Groups in the order of their nodes int64[layer, group], and the least time float64[layer] of a busiest node."""
        return groups_of_nodes(self.relative, self.nodes, self.groups, float(self.speed.sum()) / self.nodes)

    @property
    def experts_in_order(self) -> Ints:
        """int64[layer, expert]: experts in the order of their nodes; as they are if they may go to any node."""
        layers, experts = self.loads.shape[1:]
        if not self.grouped:
            return np.tile(np.arange(experts), (layers, 1))
        size = experts // self.groups
        return (self.groups_in_order[0][:, :, None] * size + np.arange(size)).reshape(layers, experts)

    def of_layer(self, layer: int) -> "ReplicationInstance":
        """One layer of it."""
        return replace(self, loads=self.loads[:, [layer]])

    def layout(self, physical_to_logical: Ints) -> Ints:
        """int64[layer, gpu, place] of int64[layer, slot]: -1 where a GPU has fewer slots than the largest one."""
        layout = np.full((len(physical_to_logical), self.gpus, int(self.slots_of_gpu.max())), -1, dtype=np.int64)
        layout[:, self._places] = physical_to_logical
        return layout

    def slots_in(self, layout: Ints) -> Ints:
        """int64[layer, slot] of int64[layer, gpu, place]; experts of a GPU in rising order."""
        experts = self.loads.shape[2]
        return np.sort(np.where(layout < 0, experts, layout), axis=2)[:, self._places]

    @cached_property
    def _places(self) -> Bools:
        return np.arange(self.slots_of_gpu.max()) < self.slots_of_gpu[:, None]


def share_of_slot(physical_to_logical: Ints, instance: ReplicationInstance, stop: Stop = never) -> Floats:
    """float64[load, layer, slot]: work of every slot, in units of a perfect division's work for a GPU of speed 1.

    Equal over replicas, or the division that relieves the slowest GPU most. physical_to_logical: int64[layer, slot].
    """
    layout = instance.layout(physical_to_logical)
    weight = equal_weights(layout, instance.relative)
    if instance.split == "free":
        weight = divided(layout, weight, instance.speed, stop)
    return weight[:, :, instance._places].swapaxes(0, 1)


def balancedness(physical_to_logical: Ints, instance: ReplicationInstance) -> Floats:
    """float64[load, layer], of int64[layer, slot]: the ideal time over the time of the slowest GPU; 1 without any load.

    With equal speeds it is mean / max of the GPUs' loads.
    """
    share = share_of_slot(physical_to_logical, instance)
    work = np.zeros((*share.shape[:2], instance.gpus))
    np.add.at(work, (slice(None), slice(None), instance.gpu_of_slot), share)
    return 1.0 / np.maximum((work / instance.speed).max(axis=2), 1.0)
