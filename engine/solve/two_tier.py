"""`two-tier`: when the bytes of one all-to-all move over the links inside nodes and over the ports between them."""

from typing import Any

import numpy as np
from pydantic import Field

from engine.communication.steps import Steps
from engine.communication.two_tier import two_tier
from engine.errors import InputError
from engine.network import Network
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options, matrix, require_at_most
from engine.solve.order import MOST_GPUS, phases

MOST_PAIRS = 2**14
"""Of nodes: for more, to list what every pair does takes longer than an answer may be late."""


class TwoTierInstance(Frozen):
    """Bandwidths in bytes/s each way: one number, or one per GPU. gpus_per_node: one number, or one per node."""

    traffic: tuple[tuple[float, ...], ...]
    bandwidth: float | tuple[float, ...]
    link_bandwidth: float | tuple[float, ...]
    gpus_per_node: int | tuple[int, ...] = Field(description="GPUs are numbered node by node")


def _two_tier(instance: TwoTierInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    require_at_most(MOST_GPUS, GPUs=len(instance.traffic))
    traffic = matrix(instance.traffic, "traffic")
    network = _network(instance, len(traffic))
    nodes = int(network.node.max()) + 1
    require_at_most(MOST_PAIRS, nodes=nodes, other_nodes=nodes)
    result = two_tier(traffic, network, stop)
    steps, node = Steps.of(result.solution, traffic, network), network.node
    renamed = {name: node[getattr(result.solution, name)] for name in ("src", "dst")}
    return result, {
        "phases": phases(result.solution.model_copy(update=renamed)),
        "relays": _relays(steps),
        "steps": [
            {"seconds": seconds, "local": parts}
            for seconds, parts in zip(steps.seconds.tolist(), steps.local.tolist(), strict=True)
        ],
    }


def _network(instance: TwoTierInstance, gpus: int) -> Network:
    sizes = instance.gpus_per_node
    if isinstance(sizes, int):
        if sizes < 1 or gpus % sizes:
            raise InputError(f"gpus_per_node must divide the {gpus} GPUs of traffic, or list every node's ({sizes})")
        sizes = (sizes,) * (gpus // sizes)
    if min(sizes, default=0) < 1 or sum(sizes) != gpus:
        raise InputError(f"gpus_per_node must list nodes of at least 1 GPU, {gpus} in all, not {sum(sizes)}")
    rates = {}
    for name in ("bandwidth", "link_bandwidth"):
        rate = getattr(instance, name)
        rates[name] = np.full(gpus, rate) if isinstance(rate, float) else np.array(rate)
        if len(rates[name]) != gpus or not np.all(rates[name] > 0):
            raise InputError(f"{name} must be a positive number, or one for each of {gpus} GPUs")
    rate, link = rates["bandwidth"], rates["link_bandwidth"]
    return Network(rate, rate, link, np.repeat(np.arange(len(sizes)), sizes), 0.0, np.zeros(gpus))


def _relays(steps: Steps) -> list[dict[str, Any]]:
    """What every pair of nodes does with all of its bytes, of which a phase moves the same part everywhere."""
    relays, members = steps.relays, steps.domains.members
    of_pair = {name: getattr(relays, name) for name in ("balance", "rails", "spread")}
    listed = []
    for pair, (source, target) in enumerate(zip(relays.source.tolist(), relays.target.tolist(), strict=True)):
        entry: dict[str, Any] = {"src": source, "dst": target}
        for name, ends in (("balance", (source, source)), ("rails", (source, target)), ("spread", (target, target))):
            size = of_pair[name][pair]
            i, j = np.nonzero(size)
            columns = (members[ends[0]][i].tolist(), members[ends[1]][j].tolist(), size[i, j].tolist())
            entry[name] = [{"src": src, "dst": dst, "bytes": moved} for src, dst, moved in zip(*columns, strict=True)]
        listed.append(entry)
    return listed


KERNELS: dict[str, Face] = {"two-tier": (TwoTierInstance, _two_tier)}
