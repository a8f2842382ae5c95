"""The number of GPUs for a target time: clusters of so many equal parts each, every one planned for from scratch."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np

from engine.cluster import Cluster, Node
from engine.errors import InputError
from engine.goal import Goal
from engine.parallel import reported
from engine.plan import Claim, Plan
from engine.problem import Problem, make_problem
from engine.result import Status, Stop, never
from engine.systems import run, system_named
from engine.systems.base import Outcome, Report, silent
from engine.systems.options import Value
from engine.units import digits, seconds
from engine.workload import RoutingTrace, TrafficMatrix, Workload

MOST_GPUS = 1024
LADDER = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Sizes that are tried unless others are asked for, in those of the open cluster."""


@dataclass(frozen=True)
class CapacityPoint:
    """A cluster of `parts` equal parts with `gpus` GPUs.

    total: seconds of its plan; None: nothing can be planned
    bound: seconds below which no plan of `scope` is (see `Claim`); None: nothing is proven
    refused: why nothing can be planned
    seconds: of the total, by kind of work; of two models by `Timeline.decomposition`
    most, mean: experts of a layer on the fullest GPU, copies too, and on a GPU in the mean
    skew: tokens that a layer's busiest GPU computes over those of the mean GPU
    spare: slots of a layer that hold copies
    plan: that takes so long; None: not kept
    """

    parts: int
    gpus: int
    total: float | None = None
    bound: float | None = None
    scope: str = ""
    refused: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    most: int = 0
    mean: float = 0.0
    skew: float = 0.0
    spare: int = 0
    plan: Plan | None = None

    def meets(self, target: float) -> bool:
        """True if its plan takes at most `target` seconds."""
        return self.total is not None and self.total <= target

    def cannot_meet(self, target: float) -> bool:
        """True if it is certain that no placement with as many slots per GPU, none of them a replica, meets the target, in
        whatever order bytes move; or that its experts do not fit."""
        if self.total is None:
            return True
        return self.scope == "placement and order" and self.bound is not None and self.bound > target


def parts_of(cluster: Cluster) -> dict[str, tuple[Node, ...]]:
    """The parts by which a cluster could grow, by their words: every kind of node it has, and if there are several the fewest
    of its nodes in which they have the same shares."""
    kinds: dict[tuple, list[Node]] = {}
    for node in cluster.nodes:
        kinds.setdefault((node.gpus, node.link_bandwidth, node.link_latency), []).append(node)
    parts = {f"{hardware([node])} ({node.name})": (node,) for node, *_ in kinds.values()}
    if len(kinds) > 1:
        times = gcd(*map(len, kinds.values()))
        mix = tuple(node for alike in kinds.values() for node in alike[: len(alike) // times])
        what = "the whole cluster" if times == 1 else "the same mix"
        parts[f"{what} in steps of {sum(len(node.gpus) for node in mix)} GPUs"] = cluster.nodes if times == 1 else mix
    return parts


def hardware(part: Sequence[Node], count: int = 1) -> str:
    """`16 × H100 + 32 × L40S`: the GPUs of `count` times the part."""
    types = Counter(gpu.type for node in part for gpu in node.gpus)
    return " + ".join(f"{count * number} × {gpu_type}" for gpu_type, number in types.items())


def grown(cluster: Cluster, part: Sequence[Node], count: int) -> Cluster:
    """`count` times the part on the cluster's fabric."""
    nodes = [node.model_copy(update={"name": f"{place + 1} {node.name[:50]}"}) for place, node in enumerate([*part] * count)]
    parts = {
        "name": f"{cluster.name[:60]}, {count} × {len(part)} nodes",
        "nodes": [node.model_dump() for node in nodes],
        "latency": cluster.latency,
        "efficiency": cluster.efficiency,
    }
    return Cluster.from_dict(parts, "the larger cluster")


def fitted(problem: Problem, cluster: Cluster) -> Problem:
    """The problem on another cluster: sequences are dealt to its GPUs anew, so recorded ranks do not count, and a placement in
    use stays where there are as many GPUs. Raises InputError where that cannot be."""
    if problem.goal is Goal.TRAINING:
        raise InputError("the number of GPUs is sought for inference; a training step's batch grows with its GPUs")
    if reason := problem.cost.lacks_computation(cluster) or problem.cost.lacks_network(cluster):
        raise InputError(reason)
    second = problem.second and (_unranked(problem.second.workload), problem.second.model)
    in_use = problem.in_use if problem.in_use and problem.in_use.gpus == len(cluster.gpus) else None
    travel = problem.travel
    if travel and travel.ranks_per_node in {len(node.gpus) for node in problem.cluster.nodes}:
        travel = travel.model_copy(update={"ranks_per_node": None})  # of the nodes that there are then
    return make_problem(
        *(_unranked(problem.workload), cluster, problem.model, problem.cost, second),
        others=tuple(map(_unranked, problem.others)),
        in_use=in_use,
        travel=travel,
    )


def _unranked(workload: Workload) -> Workload:
    if isinstance(workload, TrafficMatrix):
        raise InputError(
            f"{workload.name} is traffic between {workload.bytes.shape[1]} GPUs and says nothing about more of them; open a "
            "routing log or expert loads"
        )
    return replace(workload, source_rank=None) if isinstance(workload, RoutingTrace) else workload


def most_gpus(cluster: Cluster) -> int:
    """Up to how many GPUs a cluster may grow."""
    return max(MOST_GPUS, round(LADDER[-1] * len(cluster.gpus)))


def ladder(cluster: Cluster, part: Sequence[Node]) -> list[int]:
    """Numbers of parts from a quarter of the cluster's size to three times as many GPUs."""
    own = sum(len(node.gpus) for node in part)
    return sorted({max(1, round(factor * len(cluster.gpus) / own)) for factor in LADDER})


def capacity(
    problem: Problem,
    part: Sequence[Node],
    target: float,
    sizes: Sequence[int],
    system: str = "aurora",
    options: Mapping[str, Value] | None = None,
    stop: Stop = never,
    report: Report = silent,
    spare: bool = False,
) -> Iterator[CapacityPoint]:
    """Plan for so many parts each, the fewest first; then for every number between the first that meets the target (seconds)
    and the largest below it that was tried.

    Time need not fall with every GPU (experts that do not divide, one more receiver to start up), so sizes that were not tried
    are not known. Raises InputError for a target, sizes and a recording that cannot be.

    spare: True to try copies of experts too, in slots that would stay empty and in one more on every GPU
    """
    own, most = sum(len(node.gpus) for node in part), most_gpus(problem.cluster)
    if not target > 0:
        raise InputError(f"the target time {target:g} s is not above 0")
    if not sizes:
        raise InputError("choose at least one number of GPUs")
    for size in (min(sizes), max(sizes)):
        if not 1 <= size <= max(1, most // own):
            raise InputError(f"{size * own} GPUs: give between {own} (one part) and {max(own, most)}")
    for recording in (problem.workload, *problem.others):
        _unranked(recording)
    common = (problem, tuple(part), system, dict(options or {}), spare)
    tried: dict[int, CapacityPoint] = {}
    missing = sorted(set(sizes))
    while missing and not stop():

        def report_all(done: float, size: str, before: int = len(tried), count: int = len(missing)) -> None:
            report((before + done * count) / (before + count), size)

        titles = [f"planning for {size * own} GPUs" for size in missing]
        for _, point in reported(_point_of_size, (common, tuple(missing)), titles, stop, report_all):
            tried[point.parts] = point
            yield point
        first = min((parts for parts, point in tried.items() if point.meets(target)), default=1)
        below = max((parts for parts in tried if parts < first), default=0)
        missing = list(range(below + 1, first))


def _point_of_size(
    common: tuple[tuple[Problem, tuple[Node, ...], str, dict[str, Value], bool], tuple[int, ...]],
    index: int,
    stop: Stop,
    report: Report,
) -> CapacityPoint | None:
    """The point of one of the sizes; None when stopped."""
    (problem, part, system, options, spare), sizes = common
    count, gpus = sizes[index], sizes[index] * sum(len(node.gpus) for node in part)
    runs = [(system_named(system, problem), options)]
    if spare and problem.goal is Goal.INFERENCE:
        limit = {name: options[name] for name in ("time_limit",) if name in options}
        copies, extra = system_named("eplb", problem), (0, 1) if problem.workload.num_experts % gpus else (1,)
        runs += [(copies, limit | {"redundant": more}) for more in extra]
    outcomes: list[Outcome] = []
    for turn, (chosen, own) in enumerate(runs):

        def report_part(done: float, *told: object, turn: int = turn) -> None:
            report((turn + done) / len(runs), *told)

        try:
            here = fitted(problem, grown(problem.cluster, part, count))
            outcomes.append(run(chosen, here, own, stop, report_part))
        except InputError as error:
            if not turn:
                return CapacityPoint(count, gpus, refused=str(error))
        if outcomes[0].result.status is Status.CANCELLED:
            return None
    outcomes = [each for each in outcomes if each.result.status is not Status.CANCELLED]
    return _point(here, count, min(outcomes, key=lambda each: each.result.solution.claim.objective))


def _point(problem: Problem, count: int, outcome: Outcome) -> CapacityPoint:
    plan, timeline = outcome.result.solution, outcome.timeline
    claim: Claim = plan.claim
    slots, one = plan.placement.slots, problem.goal is Goal.INFERENCE
    spent = timeline.seconds_of_kind() if one else timeline.decomposition()
    served = np.concatenate([load.served.sum(axis=1) for load in outcome.loads])  # [layer, gpu]
    return CapacityPoint(
        count,
        len(problem.cluster.gpus),
        claim.objective,
        claim.bound or None,
        claim.scope,
        seconds={kind: value for kind, value in spent.items() if value > 0},
        most=int(slots.max()),
        mean=float(slots.mean()),
        skew=float(served.max(axis=1).sum() / served.mean(axis=1).sum()) if np.any(served) else 0.0,
        spare=int(slots[0].sum()) - problem.workload.num_experts,
        plan=plan,
    )


ALIKE = 0.05
"""Share of a difference below which a part of it is not named."""
NAMED = dict.fromkeys(("dispatch", "combine", "prompt_gather", "all_gather"), "all-to-alls") | {
    "ffn": "expert FFNs",
    "communication": "exposed communication",
    "computation": "exposed computation",
    "overlapped": "both at once",
    "idle": "waiting",
}
"""Kinds of work, and parts of a timeline of two models, by their names in `why_slower`; others are the rest."""


def why_slower(point: CapacityPoint, points: Sequence[CapacityPoint]) -> str:
    """The reason in words why a size takes longer than the fastest smaller one; empty where none is as fast."""
    smaller = [each for each in points if each.gpus < point.gpus and each.total is not None]
    if point.total is None or not smaller or point.total <= (than := min(smaller, key=lambda each: each.total)).total:
        return ""
    more = point.total - than.total
    changes = {}
    for kind in {**than.seconds, **point.seconds}:
        name = NAMED.get(kind, "the rest")
        changes[name] = changes.get(name, 0.0) + point.seconds.get(kind, 0.0) - than.seconds.get(kind, 0.0)
    told = sorted((name for name in changes if abs(changes[name]) > ALIKE * more), key=lambda name: -changes[name])
    said = [f"{name} {seconds(abs(changes[name]))} {'more' if changes[name] > 0 else 'less'}" for name in told]
    if point.most > point.mean and point.most / point.mean > than.most / than.mean:
        said.append(f"experts divide unevenly, {point.most} on the fullest GPU for {digits(point.mean)} in the mean")
    if point.skew > than.skew * (1 + ALIKE):
        said.append(f"the busiest GPU computes {digits(point.skew)}× the mean, {digits(than.skew)}× before")
    return f"{seconds(more)} slower than {than.gpus} GPUs: {'; '.join(said)}"


def smallest(points: Sequence[CapacityPoint], target: float) -> CapacityPoint | None:
    """The smallest size that meets the target; None where none does."""
    return min((point for point in points if point.meets(target)), key=lambda point: point.gpus, default=None)
