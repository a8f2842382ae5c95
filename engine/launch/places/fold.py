"""A plan for many GPUs on fewer ranks: neighbouring GPUs share a rank, which keeps the experts and the sources. Their
sends to each other become local, and those to others are ordered again, as a phase in which every GPU has one peer
gives a rank several. Of packed experts (Lina §4.2), of which neighbours together hold all, a rank keeps a part all the same."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from engine.cluster import Cluster
from engine.communication.order import order as order_sends
from engine.communication.two_tier import order_on
from engine.goal import Goal
from engine.launch.rank.instructions import uses_nodes
from engine.network import Network, off_diagonal
from engine.plan import Placement, Plan, Schedule, SendOrder, expert_groups
from engine.runtime.exchange.links import Tiers
from engine.systems.pieces import reverse
from engine.workload import RoutingTrace

LAYER = re.compile(r"(^|\.)(\d+)\.")
"""The layer in the name of an operator of a training step, `dw.3.qkv`; embedding, head and loss have none."""


def layer_of(operator: str) -> int | None:
    """The model layer in an operator's name; None if there is none in it."""
    found = LAYER.search(operator)
    return None if found is None else int(found[2])


def rank_of_gpu(gpus: int, ranks: int) -> np.ndarray:
    """int64[gpu]: the rank of each GPU's part of the plan; equal blocks in GPU order."""
    return np.arange(gpus) * ranks // gpus


def fold_plan(plan: Plan, ranks: int, network: Network | None = None) -> Plan:
    """The plan with its GPUs merged onto `ranks` ranks, and a phased order made again for the sends between ranks; its
    parent is the plan itself. Unchanged if the numbers agree and the order is not joint (see `apart`).

    network: of the ranks, as fast out as in; None: each is as fast as the plan's fastest sends, and there are no links
    """
    gpus = plan.placement.gpus
    plan = apart(plan)
    if plan.token_gpus is not None:  # the traces of a launch carry the starts of the tokens, see `fold_trace`
        plan = plan.model_copy(update={"token_gpus": None, "token_gpus_b": None, "claim": None, "parent": plan.id})
    if ranks == gpus:
        return plan
    rank = rank_of_gpu(gpus, ranks)
    folded: dict[str, Any] = {}
    if plan.reaction is not None:
        slots = min(plan.placement.experts, plan.reaction.max_experts_per_device * -(-gpus // ranks))
        folded["reaction"] = plan.reaction.model_copy(update={"max_experts_per_device": slots})
    if plan.travel is not None and plan.travel.ranks_per_node is not None:
        per_node = max(1, plan.travel.ranks_per_node * ranks // gpus)
        folded["travel"] = plan.travel.model_copy(update={"ranks_per_node": per_node})
    for model in ("", "_b") if plan.goal is Goal.TWO_MODELS else ("",):
        placement = getattr(plan, f"placement{model}")
        held = gpus_of_ranks(placement, ranks)
        experts_of_gpu = tuple(
            tuple(tuple(sorted({e for gpu in gpus for e in row[gpu]})) for gpus in held) for row in placement.experts_of_gpu
        )
        folded[f"placement{model}"] = placement.model_copy(update={"experts_of_gpu": experts_of_gpu})
        order = getattr(plan, f"send_order{model}")
        again = partial(_order_again, rank=rank, mode=order.mode, network=network)
        fold = again if order.mode in ("matched", "shared") else partial(_fold_schedule, rank=rank)
        dispatch, combine = [], []
        for there, back in zip(order.dispatch, order.combine, strict=True):
            dispatch.append(fold(there))
            columns = (there.src, back.dst), (there.dst, back.src), (there.bytes, back.bytes), (there.phase, back.phase)
            mirrored = order.mode == "matched" and all(np.array_equal(mine, other) for mine, other in columns)
            combine.append(reverse(dispatch[-1]) if mirrored else fold(back))
        folded[f"send_order{model}"] = SendOrder(mode=order.mode, dispatch=tuple(dispatch), combine=tuple(combine))
    return plan.model_copy(update=folded | {"claim": None, "parent": plan.id})


def of_layers(plan: Plan, kept: Sequence[int], forward: Sequence[str]) -> Plan:
    """A plan for training with these model layers alone, which are counted anew from 0; its parent is the plan itself. Cuts are
    those of the operators that are left; a weight gradient runs under an all-to-all as many layers away as before.

    forward: names of all operators of the whole step's forward pass, in order
    """
    placement, place = plan.placement, {layer: at for at, layer in enumerate(kept)}
    rows = [row for row, layer in enumerate(placement.model_layers) if layer in place]

    def left(name: str) -> bool:
        return (layer := layer_of(name)) is None or layer in place

    def moved(name: str, by: int | None = None) -> str:
        """The operator's name with its new layer. by: the step from its old one; None: its own"""
        layer = layer_of(name)
        return name if layer is None else LAYER.sub(f"\\g<1>{place[layer] if by is None else layer + by}.", name, count=1)

    pipeline, overlap = plan.pipeline, plan.overlap
    if pipeline is not None:
        degrees = {way: tuple(getattr(pipeline, way)[row] for row in rows) for way in ("forward", "backward")}
        pipeline = pipeline.model_copy(update=degrees)
    if overlap is not None:
        ranges = []
        for cut in overlap.ranges:
            own = list(filter(left, forward[forward.index(cut.first) : forward.index(cut.last) + 1]))
            if own:
                ranges.append(cut.model_copy(update={"first": moved(own[0]), "last": moved(own[-1])}))
        under = {}
        for gradient, exchange in overlap.under.items():
            layer = layer_of(gradient) if layer_of(gradient) is not None else layer_of(exchange)
            if layer in place and 0 <= layer_of(exchange) + (by := place[layer] - layer) < len(kept):
                under[moved(gradient)] = moved(exchange, by)
        overlap = overlap.model_copy(update={"ranges": tuple(ranges), "under": under})
    order = plan.send_order
    if order.dispatch:
        order = order.model_copy(
            update={way: tuple(getattr(order, way)[row] for row in rows) for way in ("dispatch", "combine")}
        )
    update = {
        "experts_of_gpu": tuple(placement.experts_of_gpu[row] for row in rows),
        "model_layers": tuple(place[placement.model_layers[row]] for row in rows),
    }
    parts = {"placement": placement.model_copy(update=update), "send_order": order, "pipeline": pipeline, "overlap": overlap}
    return plan.model_copy(update=parts | {"claim": None, "parent": plan.id})


def packed(placement: Placement) -> tuple[int, int]:
    """(groups of neighbouring GPUs that hold every expert once, GPUs of each)."""
    groups = expert_groups(placement)
    return groups, placement.gpus // groups


def ranks_of_group(placement: Placement, ranks: int) -> int:
    """The ranks that hold all experts once after folding: of packed experts as many as a group has GPUs, or the most below
    that which divide the ranks; else all ranks. 1: no all-to-all is left."""
    groups, size = packed(placement)
    return ranks if groups == 1 else next(width for width in range(min(size, ranks), 0, -1) if ranks % width == 0)


def gpus_of_ranks(placement: Placement, ranks: int) -> list[np.ndarray]:
    """The GPUs that each rank has the experts of: its block of neighbours, or of packed experts its part of one group."""
    groups, size = packed(placement)
    if groups == 1:
        rank = rank_of_gpu(placement.gpus, ranks)
        return [np.flatnonzero(rank == own) for own in range(ranks)]
    width = ranks_of_group(placement, ranks)
    part = rank_of_gpu(size, width)
    return [np.flatnonzero(part == own % width) for own in range(ranks)]


def keeps_exchange(plan: Plan, ranks: int) -> bool:
    """True if the plan on so many ranks has all-to-alls, or has none on its GPUs either."""
    return packed(plan.placement)[1] == 1 or ranks_of_group(plan.placement, ranks) > 1


def apart(plan: Plan) -> Plan:
    """The plan with a joint order as a matched order of each model: the two models' exchanges on a rank know nothing of
    each other (see `SendOrder.alone`). Any other plan as it is."""
    if plan.send_order.mode != "joint":
        return plan
    alone = {"send_order": plan.send_order.alone, "send_order_b": plan.send_order_b.alone}
    return plan.model_copy(update=alone | {"claim": None, "parent": plan.id})


def fold_trace(trace: RoutingTrace, gpus: int, ranks: int, token_gpus: tuple[int, ...] | None = None) -> RoutingTrace:
    """The trace with the source rank of every token written down, folded like the plan. token_gpus: see `Plan`."""
    start = trace.rank_of_token(gpus) if token_gpus is None else np.array(token_gpus)[trace.rank_of_token(gpus)]
    source = rank_of_gpu(gpus, ranks)[start].astype(np.int32)
    return RoutingTrace(trace.name, trace.experts, trace.num_experts, trace.sequence, source, scores=trace.scores)


def keeps_nodes(network: Network, ranks: int) -> bool:
    """True if no rank stands for GPUs of several nodes, as it could not have the links of both. Nodes without links do
    not matter."""
    rank = rank_of_gpu(network.gpus, ranks)
    first = np.searchsorted(rank, np.arange(ranks))[rank]
    linked = network.link > 0
    return not ((network.domain != network.domain[first]) & (linked | linked[first])).any()


def nearest_ranks(plans: Sequence[Plan], cluster: Cluster | None, ranks: int) -> int:
    """The number of ranks nearest to `ranks` that plans for one cluster can be folded onto: the most below it, or else the
    fewest above. Plans that use nodes leave some out, see `keeps_nodes`, if those are known; packed experts others, see
    `keeps_exchange`."""
    gpus = plans[0].placement.gpus
    known = any(map(uses_nodes, plans)) and cluster is not None and len(cluster.gpus) == gpus
    network = Network.of(cluster) if known else None
    packings = [plan for plan in plans if packed(plan.placement)[0] > 1]

    def suits(number: int) -> bool:
        return (network is None or keeps_nodes(network, number)) and all(keeps_exchange(plan, number) for plan in packings)

    return next((number for number in (*range(ranks, 0, -1), *range(ranks + 1, gpus + 1)) if suits(number)), ranks)


def fold_tiers(cluster: Cluster, ranks: int) -> Tiers | None:
    """The nodes of a drawn cluster as nodes of ranks. A rank that stands for several GPUs has their ports together, and
    their links; a port that sends and receives at different rates counts with the slower one. None if nodes are split,
    see `keeps_nodes`."""
    network = Network.of(cluster)
    if not keeps_nodes(network, ranks):
        return None
    rank = rank_of_gpu(network.gpus, ranks)
    node = network.domain[np.searchsorted(rank, np.arange(ranks))]
    port, link = (np.bincount(rank, rate, ranks) for rate in (np.minimum(network.send, network.receive), network.link))
    _, node, size = np.unique(node, return_inverse=True, return_counts=True)
    link[size[node] == 1] = 0.0
    return Tiers(node=tuple(node.tolist()), port=tuple(port.tolist()), link=tuple(link.tolist()))


def _order_again(schedule: Schedule, rank: np.ndarray, mode: str, network: Network | None) -> Schedule:
    """A new order for a schedule's sends between ranks."""
    if not schedule.sends:
        return Schedule()
    ranks = int(rank[-1]) + 1
    traffic = np.zeros((ranks, ranks))
    np.add.at(traffic, (rank[schedule.src], rank[schedule.dst]), schedule.bytes)
    if network is None:
        pace = np.full(ranks, (schedule.bytes / schedule.duration[schedule.phase]).max())
        network = Network(pace, pace, np.zeros(ranks), np.arange(ranks), 0.0, np.zeros(ranks))
    return order_on(network, off_diagonal(traffic), partial(order_sends, mode=mode))[0]


def _fold_schedule(schedule: Schedule, rank: np.ndarray) -> Schedule:
    src, dst = rank[schedule.src], rank[schedule.dst]
    keep = src != dst
    return Schedule(
        src=src[keep], dst=dst[keep], bytes=schedule.bytes[keep], phase=schedule.phase[keep], duration=schedule.duration
    )
