"""A plan for many GPUs on fewer ranks: neighbouring GPUs share a rank, which keeps the experts, the sources and the
order of sends; what their sends were to each other becomes local."""

from collections.abc import Sequence

import numpy as np

from engine.cluster import Cluster
from engine.goal import Goal
from engine.launch.rank.tiers import Tiers
from engine.network import Network
from engine.plan import Placement, Plan, Schedule, SendOrder
from engine.workload import RoutingTrace


def rank_of_gpu(gpus: int, ranks: int) -> np.ndarray:
    """int64[gpu]: which rank a GPU's part of the plan runs on; equal blocks in GPU order."""
    return np.arange(gpus) * ranks // gpus


def fold_plan(plan: Plan, ranks: int) -> Plan:
    """The plan with its GPUs merged onto `ranks` ranks; its parent is the plan itself. Unchanged when they agree."""
    gpus = plan.placement.gpus
    if ranks == gpus:
        return plan
    rank = rank_of_gpu(gpus, ranks)
    folded = {"placement": _fold_placement(plan.placement, rank), "send_order": _fold_order(plan.send_order, rank)}
    if plan.goal is Goal.TWO_MODELS:
        folded["placement_b"] = _fold_placement(plan.placement_b, rank)
        folded["send_order_b"] = _fold_order(plan.send_order_b, rank)
    return plan.model_copy(update=folded | {"claim": None, "parent": plan.id})


def fold_trace(trace: RoutingTrace, gpus: int, ranks: int) -> RoutingTrace:
    """The trace with the source rank of every token written down, folded like the plan."""
    source = rank_of_gpu(gpus, ranks)[trace.rank_of_token(gpus)].astype(np.int32)
    return RoutingTrace(trace.name, trace.experts, trace.num_experts, trace.sequence, source)


def keeps_nodes(network: Network, ranks: int) -> bool:
    """Whether no rank stands for GPUs of several nodes, whose links it cannot have. Nodes without links do not matter."""
    rank = rank_of_gpu(network.gpus, ranks)
    first = np.searchsorted(rank, np.arange(ranks))[rank]
    linked = network.link > 0
    return not ((network.domain != network.domain[first]) & (linked | linked[first])).any()


def nearest_ranks(plans: Sequence[Plan], cluster: Cluster | None, ranks: int) -> int:
    """The number of ranks nearest to `ranks` that plans for one cluster can be folded onto: the most below it, or else the
    fewest above. Only two-tier orders leave some out, see `keeps_nodes`; where their nodes are not known, `ranks` itself."""
    gpus = plans[0].placement.gpus
    tiered = any(plan.send_order.mode == "two-tier" for plan in plans)
    if not tiered or cluster is None or len(cluster.gpus) != gpus:
        return ranks
    network = Network.of(cluster)
    return next(
        number for number in (*range(ranks, 0, -1), *range(ranks + 1, gpus + 1)) if keeps_nodes(network, number)
    )


def fold_tiers(cluster: Cluster, ranks: int) -> Tiers | None:
    """The nodes of a drawn cluster as nodes of ranks. A rank that stands for several GPUs has their ports together, and their
    links; a port that sends and receives at different rates counts with the slower one. None where nodes are split, see
    `keeps_nodes`."""
    network = Network.of(cluster)
    if not keeps_nodes(network, ranks):
        return None
    rank = rank_of_gpu(network.gpus, ranks)
    node = network.domain[np.searchsorted(rank, np.arange(ranks))]
    port, link = (np.bincount(rank, rate, ranks) for rate in (np.minimum(network.send, network.receive), network.link))
    _, node, size = np.unique(node, return_inverse=True, return_counts=True)
    link[size[node] == 1] = 0.0
    return Tiers(node=tuple(node.tolist()), port=tuple(port.tolist()), link=tuple(link.tolist()))


def _fold_placement(placement: Placement, rank: np.ndarray) -> Placement:
    experts_of_gpu = tuple(
        tuple(tuple(sorted({e for gpu in np.flatnonzero(rank == r) for e in row[gpu]})) for r in range(rank[-1] + 1))
        for row in placement.experts_of_gpu
    )
    return placement.model_copy(update={"experts_of_gpu": experts_of_gpu})


def _fold_order(order: SendOrder, rank: np.ndarray) -> SendOrder:
    return SendOrder(
        mode=order.mode,
        dispatch=tuple(_fold_schedule(schedule, rank) for schedule in order.dispatch),
        combine=tuple(_fold_schedule(schedule, rank) for schedule in order.combine),
    )


def _fold_schedule(schedule: Schedule, rank: np.ndarray) -> Schedule:
    src, dst = rank[schedule.src], rank[schedule.dst]
    keep = src != dst
    return Schedule(
        src=src[keep], dst=dst[keep], bytes=schedule.bytes[keep], phase=schedule.phase[keep], duration=schedule.duration
    )
