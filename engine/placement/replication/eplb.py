"""DeepSeek's EPLB, the load balancer serving engines use today: the baseline every replication plan is held against.

The published algorithm (https://github.com/deepseek-ai/EPLB), here for all layers at once. Experts are replicated
greedily, a replica at a time to whoever has the heaviest one, and packed greedily, heaviest replica first, onto the GPU
with the least load that still has a free slot. The hierarchical policy first packs whole expert groups to nodes and then
does both inside each node, so that a token routed to few groups meets few nodes.

Where values tie, the order decides: sorting is stable and descending, the heaviest expert and the lightest GPU are the
ones of lowest index. Loads are compared in single precision, as the published code does.
"""

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError
from engine.result import Floats, Ints


def eplb(load: Floats, slots: int, gpus: int, nodes: int = 1, groups: int = 1) -> Ints:
    """physical_to_logical int64[layer, slot]; slot j is on GPU j // (slots / gpus).

    Hierarchical if `nodes` divides `groups`, otherwise global, where neither of them has any effect. Raises InputError if
    the load is no table, the slots cannot hold every expert, or GPUs, nodes or groups do not divide evenly.

    load: float64[layer, expert], finite and at least 0, in any unit
    slots: expert replicas of a layer over all GPUs
    """
    load = np.asarray(load, dtype=np.float64)
    if load.ndim != 2 or load.size == 0 or not np.isfinite(load).all() or load.min() < 0:
        raise InputError("load: wanted a table [layer, expert] of finite values of at least 0")
    check_counts(load.shape[1], slots, gpus, nodes, groups)
    # Dividing by a power of two rounds nothing, and keeps any unit inside the range of single precision.
    load = (load / 2.0 ** np.frexp(load.max())[1]).astype(np.float32)
    if groups % nodes:
        nodes = groups = 1
    layers, experts = load.shape

    group_size, groups_of_node = experts // groups, groups // nodes
    node, place = _packed(load.reshape(layers, groups, group_size).sum(axis=2), nodes)
    group_at = np.empty((layers, groups), dtype=np.int64)
    np.put_along_axis(group_at, node * groups_of_node + place, np.arange(groups)[None, :], axis=1)
    expert_at = (group_at[:, :, None] * group_size + np.arange(group_size)).reshape(layers, experts)

    # From here on every node of every layer is a problem of its own: rows are [layer * node].
    local = np.take_along_axis(load, expert_at, axis=1).reshape(layers * nodes, experts // nodes)
    expert, count = replicated(local, slots // nodes)
    share = np.take_along_axis(local / count.astype(np.float32), expert, axis=1)
    gpu, place = _packed(share, gpus // nodes)
    slot = gpu * (slots // gpus) + place
    local_at = np.empty_like(expert)
    np.put_along_axis(local_at, slot, expert, axis=1)
    local_at = local_at.reshape(layers, nodes, -1) + np.arange(nodes)[:, None] * (experts // nodes)
    return np.take_along_axis(expert_at, local_at.reshape(layers, slots), axis=1)


def replicated(load: NDArray[np.floating], slots: int) -> tuple[Ints, Ints]:
    """Greedy replication: (expert of every replica int64[row, slots], replicas of every expert int64[row, expert]).

    load: float[row, expert]. Replicas come in the order in which they are made, first one of every expert. No other
    counts have a lower greatest load / replicas.
    """
    rows, experts = load.shape
    expert = np.empty((rows, slots), dtype=np.int64)
    expert[:, :experts] = np.arange(experts)
    count = np.ones((rows, experts), dtype=np.int64)
    share, row = load.copy(), np.arange(rows)
    for slot in range(experts, slots):
        heaviest = share.argmax(axis=1)
        expert[:, slot] = heaviest
        count[row, heaviest] += 1
        share[row, heaviest] = load[row, heaviest] / count[row, heaviest].astype(load.dtype)
    return expert, count


def _packed(weight: NDArray[np.float32], packs: int) -> tuple[Ints, Ints]:
    """Greedy packing of items into packs of equally many: (pack, place in the pack), int64[row, item] each."""
    rows, items = weight.shape
    if packs == items:
        return np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), dtype=np.int64)
    pack, place = np.empty((2, rows, items), dtype=np.int64)
    # Full packs weigh infinitely much, so none is ever the lightest.
    total = np.zeros((rows, packs), dtype=np.float32)
    held = np.zeros((rows, packs), dtype=np.int64)
    row, capacity = np.arange(rows), items // packs
    for item in np.argsort(-weight, axis=1, kind="stable").T:
        lightest = total.argmin(axis=1)
        pack[row, item] = lightest
        place[row, item] = held[row, lightest]
        held[row, lightest] += 1
        total[row, lightest] += weight[row, item]
        total[row, lightest] = np.where(held[row, lightest] == capacity, np.inf, total[row, lightest])
    return pack, place


def check_counts(experts: int, slots: int, gpus: int, nodes: int, groups: int) -> None:
    """Raise InputError unless every expert gets a slot and GPUs, nodes and groups divide evenly."""
    for name, value in (("slots", slots), ("gpus", gpus), ("nodes", nodes), ("groups", groups)):
        if value < 1:
            raise InputError(f"{name}: must be at least 1, not {value}")
    if slots % gpus:
        below, above = slots // gpus * gpus, (slots // gpus + 1) * gpus
        fitting = f"{below} or {above}" if below >= experts else f"{max(above, -(-experts // gpus) * gpus)}"
        raise InputError(f"slots: {slots} slots do not divide over {gpus} GPUs; take {fitting}")
    if slots < experts:
        raise InputError(
            f"slots: {slots} slots for {experts} experts, each of which needs one; "
            f"take at least {-(-experts // gpus) * gpus} (a multiple of the {gpus} GPUs)"
        )
    if gpus % nodes:
        raise InputError(f"nodes: {gpus} GPUs do not divide over {nodes} nodes; take {_divisors(gpus)} nodes")
    if experts % groups:
        raise InputError(f"groups: {experts} experts do not divide into {groups} groups; take {_divisors(experts)}")


def _divisors(number: int) -> str:
    divisors = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return f"{', '.join(divisors[:-1])} or {divisors[-1]}" if len(divisors) > 1 else divisors[0]
