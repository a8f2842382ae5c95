"""How many GPUs for this target time: clusters of more and more equal parts, each planned for from scratch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from engine.cluster import Cluster, Node
from engine.errors import InputError
from engine.goal import Goal
from engine.parallel import in_order
from engine.plan import Claim
from engine.problem import Problem, make_problem
from engine.result import Status, Stop, never
from engine.systems import SYSTEMS, run
from engine.systems.base import Report, silent
from engine.systems.options import Value
from engine.workload import RoutingTrace, TrafficMatrix, Workload

MOST_GPUS = 256
BEYOND = 2
"""Sizes tried after the first that meets the target: whether it is still met there."""


@dataclass(frozen=True)
class CapacityPoint:
    """A cluster of `parts` equal parts with `gpus` GPUs. total, bound: seconds of its plan and what no plan of `scope` (see
    `Claim`) is below, None where nothing can be planned; refused: why not."""

    parts: int
    gpus: int
    total: float | None = None
    bound: float | None = None
    scope: str = ""
    refused: str = ""

    def meets(self, target: float) -> bool:
        """Whether its plan takes at most `target` seconds."""
        return self.total is not None and self.total <= target

    def cannot_meet(self, target: float) -> bool:
        """Whether it is certain that no placement with as many slots per GPU, none of them a replica, meets the target, in
        whatever order bytes move; or that its experts do not fit."""
        if self.total is None:
            return True
        return self.scope == "placement and order" and self.bound > target

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The point that `to_dict` described."""
        return cls(**data)


def parts_of(cluster: Cluster) -> dict[str, tuple[Node, ...]]:
    """What a cluster could be made larger by, in words: every kind of node it has, and if there are several all its nodes
    together."""
    kinds: dict[tuple, Node] = {}
    for node in cluster.nodes:
        kinds.setdefault((node.gpus, node.link_bandwidth, node.link_latency), node)
    parts = {_in_words(node): (node,) for node in kinds.values()}
    if len(kinds) > 1:
        parts[f"the whole cluster, {len(cluster.gpus)} GPUs"] = cluster.nodes
    return parts


def _in_words(node: Node) -> str:
    types = [gpu.type for gpu in node.gpus]
    held = " + ".join(f"{types.count(gpu_type)} × {gpu_type}" for gpu_type in dict.fromkeys(types))
    return f"{held} ({node.name})"


def grown(cluster: Cluster, part: Sequence[Node], count: int) -> Cluster:
    """`count` times the part on the cluster's fabric."""
    nodes = [
        node.model_copy(update={"name": f"{place + 1} {node.name[:50]}"}) for place, node in enumerate([*part] * count)
    ]
    return Cluster.from_dict(
        {
            "name": f"{cluster.name[:60]}, {count} × {len(part)} nodes",
            "nodes": [node.model_dump() for node in nodes],
            "latency": cluster.latency,
            "efficiency": cluster.efficiency,
        },
        "the larger cluster",
    )


def fitted(problem: Problem, cluster: Cluster) -> Problem:
    """The problem on another cluster: sequences are dealt to its GPUs anew, so recorded ranks do not count. Raises InputError
    where that cannot be."""
    if problem.goal is Goal.TRAINING:
        raise InputError("the number of GPUs is sought for inference; a training step's batch grows with its GPUs")
    if reason := problem.cost.lacks_computation(cluster) or problem.cost.lacks_network(cluster):
        raise InputError(reason)
    second = problem.second and (_unranked(problem.second.workload), problem.second.model)
    return make_problem(_unranked(problem.workload), cluster, problem.model, problem.cost, second)


def _unranked(workload: Workload) -> Workload:
    if isinstance(workload, TrafficMatrix):
        raise InputError(
            f"{workload.name} is traffic between {workload.bytes.shape[1]} GPUs and says nothing about more of them; open a "
            "routing log or expert loads"
        )
    return replace(workload, source_rank=None) if isinstance(workload, RoutingTrace) else workload


def capacity(
    problem: Problem,
    part: Sequence[Node],
    target: float,
    most_gpus: int,
    system: str = "aurora",
    options: Mapping[str, Value] | None = None,
    stop: Stop = never,
    report: Report = silent,
) -> Iterator[CapacityPoint]:
    """Plan for 1, 2, 3 … parts until the target (seconds) is met, and for `BEYOND` more sizes.

    No size is skipped: time need not fall with every GPU (experts that do not divide, one more receiver to start up), so
    the first that meets the target is only known to be the smallest because all smaller ones were tried. Raises InputError
    for a target, sizes and a recording that cannot be.
    """
    own = sum(len(node.gpus) for node in part)
    if not target > 0:
        raise InputError(f"the target time {target:g} s is not above 0")
    if not own <= most_gpus <= max(MOST_GPUS, own):
        raise InputError(f"{most_gpus} GPUs: give between {own} (one part) and {max(MOST_GPUS, own)}")
    _unranked(problem.workload)
    sizes, met, best = most_gpus // own, 0, None

    def begun(finished: int, index: int) -> None:
        report(finished / sizes, f"planning for {(index + 1) * own} GPUs", best)

    common = (problem, tuple(part), system, dict(options or {}))
    for _, point in in_order(_point_of_size, common, sizes, stop, begun):
        if point is None:
            continue
        yield point
        if point.total is not None:
            best = point.total if best is None else min(best, point.total)
            met += point.meets(target) or met > 0
            if met > BEYOND:
                return


def _point_of_size(
    common: tuple[Problem, tuple[Node, ...], str, dict[str, Value]], index: int, stop: Stop, report: Report
) -> CapacityPoint | None:
    """The point of `index + 1` parts; None when stopped."""
    problem, part, system, options = common
    count, gpus = index + 1, (index + 1) * sum(len(node.gpus) for node in part)
    try:
        outcome = run(SYSTEMS[system], fitted(problem, grown(problem.cluster, part, count)), options, stop)
    except InputError as error:
        return CapacityPoint(count, gpus, refused=str(error))
    if outcome.result.status is Status.CANCELLED:
        return None
    claim: Claim = outcome.result.solution.claim
    return CapacityPoint(count, gpus, claim.objective, claim.bound, claim.scope)


def smallest(points: Sequence[CapacityPoint], target: float) -> CapacityPoint | None:
    """The smallest size that meets the target; None where none does."""
    return min((point for point in points if point.meets(target)), key=lambda point: point.gpus, default=None)
