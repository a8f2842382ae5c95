"""The problem of placing experts for two aims at once: few hops between GPUs, and GPUs that are loaded alike.

ExFlow (section IV) minimises hops alone, load balancers such as EPLB the busiest GPU alone; a gain of one is a loss of the
other. Here both are figures of one placement without replicas, for one or several workloads.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.errors import InputError
from engine.result import Floats, Ints


@dataclass(frozen=True)
class JointFigures:
    """The worth of a placement on every workload; all float64[workload], without units.

    hop_cost_share: cost of hops / cost if every hop were of the dearest kind, 0 … 1
    kept_share: share of the transitions between two experts on one GPU, 0 … 1
    imbalance: mean over layers of max / mean GPU load, less 1
    balancedness: mean over layers of mean / max GPU load, as `engine.timeline.balancedness`
    """

    hop_cost_share: Floats
    kept_share: Floats
    imbalance: Floats
    balancedness: Floats


@dataclass(frozen=True, eq=False)
class JointInstance:
    """Layers of experts to be placed on GPUs, every expert on one GPU per layer.

    transitions: float64[workload, layer - 1, expert, expert], tokens that go from expert i of a layer to expert k of the
        next (without the first axis: one workload)
    load: float64[workload, layer, expert], tokens of every expert (or without the first axis)
    slots: int64[gpu], experts that each GPU takes in every layer, exactly
    gpus_per_node: GPUs 0 … n-1 form the first node, and so on; None if it does not matter
    cost_gpu, cost_node: cost of a hop to another GPU of the node and to another node, in any one unit;
        0 <= cost_gpu <= cost_node, not both 0. Without nodes only cost_gpu counts, and only that it is positive.

    A layer without load counts as balanced, a workload without transitions as keeping all of them.
    Raises InputError if a shape or a value is wrong.
    """

    transitions: Floats
    load: Floats
    slots: Ints
    gpus_per_node: int | None = None
    cost_gpu: float = 1.0
    cost_node: float = 1.0

    def __post_init__(self) -> None:
        transitions, load = np.asarray(self.transitions, np.float64), np.asarray(self.load, np.float64)
        if transitions.ndim == 3 and load.ndim == 2:
            transitions, load = transitions[None], load[None]
        if load.ndim != 3 or load.size == 0:
            raise InputError(f"load: shape {load.shape}; wanted [workload, layer, expert], none empty")
        workloads, layers, experts = load.shape
        wanted = (workloads, layers - 1, experts, experts)
        if transitions.shape != wanted:
            raise InputError(
                f"transitions: shape {transitions.shape}; wanted [workload, layer - 1, expert, expert] = {wanted} "
                "to go with the load"
            )
        for name, value in (("transitions", transitions), ("load", load)):
            if not np.isfinite(value).all() or value.min(initial=0.0) < 0:
                raise InputError(f"{name}: every value must be finite and at least 0")
        slots = np.asarray(self.slots)
        if slots.ndim != 1 or slots.size == 0 or not np.issubdtype(slots.dtype, np.integer) or slots.min() < 0:
            raise InputError("slots: wanted one whole number of at least 0 for each GPU")
        if slots.sum() != experts:
            raise InputError(
                f"slots: {slots.sum()} places for {experts} experts, every place is to be filled; "
                f"give {abs(experts - slots.sum())} {'more' if slots.sum() < experts else 'fewer'}"
            )
        if self.gpus_per_node is not None and (self.gpus_per_node < 1 or len(slots) % self.gpus_per_node):
            raise InputError(
                f"gpus_per_node: {len(slots)} GPUs cannot be divided into nodes of {self.gpus_per_node}; "
                "give a divisor of the number of GPUs"
            )
        if self.gpus_per_node is None:
            object.__setattr__(self, "cost_node", self.cost_gpu)
        if not (np.isfinite(self.cost_node) and 0 <= self.cost_gpu <= self.cost_node and self.cost_node > 0):
            raise InputError(
                f"cost_gpu, cost_node: {self.cost_gpu} and {self.cost_node}; a hop to another node must cost more than 0 "
                "and no less than one inside a node"
            )
        for name, value in (("transitions", transitions), ("load", load), ("slots", slots.astype(np.int64))):
            object.__setattr__(self, name, value)

    @property
    def workloads(self) -> int:
        return self.load.shape[0]

    @property
    def layers(self) -> int:
        return self.load.shape[1]

    @property
    def experts(self) -> int:
        return self.load.shape[2]

    @property
    def gpus(self) -> int:
        return len(self.slots)

    @property
    def flat(self) -> bool:
        """True if all hops between different GPUs cost the same."""
        return self.cost_gpu == self.cost_node or self.gpus_per_node in (None, self.gpus)

    @property
    def gpus_alike(self) -> bool:
        """True if GPUs can be renamed at will: all take as many experts and are as far from each other."""
        return self.flat and bool((self.slots == self.slots[0]).all())

    @cached_property
    def distance(self) -> Floats:
        """float64[gpu, gpu]: the cost of a hop / the cost of the dearest kind."""
        gpu = np.arange(self.gpus)
        different = (gpu[:, None] != gpu).astype(np.float64)
        if self.flat:
            return different
        node = gpu // self.gpus_per_node
        return np.where(node[:, None] != node, 1.0, different * self.cost_gpu / self.cost_node)

    @cached_property
    def random_hop_cost_share(self) -> float:
        """The expected hop cost share of a placement drawn blindly, layer by layer; 1 where no placement has hops."""
        share = self.slots / self.experts
        return float(share @ self.distance @ share) or 1.0

    @cached_property
    def transition_share(self) -> Floats:
        """float64[workload, layer - 1, expert, expert]: transitions / all transitions of the workload."""
        total = self.transitions.sum(axis=(1, 2, 3), keepdims=True)
        return np.divide(self.transitions, total, out=np.zeros_like(self.transitions), where=total > 0)

    @cached_property
    def relative_load(self) -> Floats:
        """float64[workload, layer, expert]: load / mean GPU load of the layer; 0 in a layer without load."""
        mean = self.load.sum(axis=2, keepdims=True) / self.gpus
        return np.divide(self.load, mean, out=np.zeros_like(self.load), where=mean > 0)

    def check_placement(self, gpu_of_expert: Ints, name: str = "gpu_of_expert") -> Ints:
        """The placement as int64[layer, expert]; raises InputError, starting with `name`, unless it fills the slots."""
        place = np.asarray(gpu_of_expert)
        if place.shape != (self.layers, self.experts) or not np.issubdtype(place.dtype, np.integer):
            raise InputError(
                f"{name}: wanted whole numbers [layer, expert] = ({self.layers}, {self.experts}), got shape {place.shape}"
            )
        if place.min() < 0 or place.max() >= self.gpus:
            raise InputError(f"{name}: GPU numbers go from 0 to {self.gpus - 1}, found {place.min()} … {place.max()}")
        held = (place[:, :, None] == np.arange(self.gpus)).sum(axis=1)
        if (held != self.slots).any():
            layer, gpu = np.argwhere(held != self.slots)[0]
            raise InputError(
                f"{name}: layer {layer} has {held[layer, gpu]} experts on GPU {gpu} in {self.slots[gpu]} slots; "
                "put exactly as many experts on every GPU as it has slots"
            )
        return place.astype(np.int64)

    def gpu_load(self, gpu_of_expert: Ints) -> Floats:
        """float64[workload, layer, gpu]: relative load of every GPU under int64[layer, expert]."""
        on_gpu = (gpu_of_expert[:, :, None] == np.arange(self.gpus)).astype(np.float64)
        return np.einsum("wle,leg->wlg", self.relative_load, on_gpu)

    def figures(self, gpu_of_expert: Ints) -> JointFigures:
        """The figures of any placement int64[layer, expert]."""
        before, after = gpu_of_expert[:-1, :, None], gpu_of_expert[1:, None, :]
        hops = np.einsum("wlik,lik->w", self.transition_share, self.distance[before, after])
        moving = self.transition_share.sum(axis=(1, 2, 3))
        kept = np.einsum("wlik,lik->w", self.transition_share, (before == after).astype(np.float64)) + 1 - moving
        return JointFigures(hops, np.minimum(kept, 1.0), *self.balance(gpu_of_expert))

    def balance(self, gpu_of_expert: Ints) -> tuple[Floats, Floats]:
        """Imbalance and balancedness of a placement int64[layer, expert], as in `JointFigures`."""
        peak = self.gpu_load(gpu_of_expert).max(axis=2)
        loaded = peak > 0
        most = np.where(loaded, peak, 1.0)
        return (most - 1).mean(axis=1), (1 / most).mean(axis=1)


def equal_slots(experts: int, gpus: int) -> Ints:
    """int64[gpu]: as many experts on every GPU; raises InputError if they do not divide."""
    if gpus < 1 or experts < 1 or experts % gpus:
        raise InputError(
            f"{experts} experts cannot be divided equally among {gpus} GPUs; use a divisor of {experts}, or give slots"
        )
    return np.full(gpus, experts // gpus, dtype=np.int64)
