"""The number of spare slots that is worth its memory: balance and time against slots, planned on one recording, judged on
others.

Most plans have as many slots on every GPU in every layer, as serving engines need it; numbers that people ask for in all, such
as 32 on 64 GPUs, are tried too, with one slot more on some. The number that is advised is one that engines take, at the knee
of the curve, as far as noise lets it be seen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, InstanceOf

from engine.compare.figures import Metrics, metrics
from engine.compare.held_out import by_time
from engine.compare.judge import (
    CONFIDENCE,
    Judge,
    Timing,
    deviation,
    interval,
    ratio_gain,
    redrawn_gains,
    redrawn_loads,
    timing,
)
from engine.errors import InputError
from engine.goal import Goal
from engine.parallel import reported
from engine.placement.even_slots import even_slots
from engine.placement.replication import Algorithm, ReplicationInstance, balancedness, replicate
from engine.plan import Placement, Plan, SendOrder
from engine.problem import MEMORY_SHARE, Problem
from engine.result import GUARD, Limits, Provenance, Stop, never
from engine.schema import Frozen
from engine.simulate.work import Load
from engine.systems.base import Report, silent
from engine.systems.eplb import replicas_by_rule, slots_within, speed_of_gpu
from engine.units import share, signed, size
from engine.workload import Workload

SPARE = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Spare slots per GPU and layer that are tried, as far as memory goes: every small number, then ever larger steps."""
IN_ALL = (16, 32, 64, 128)
"""Spare slots of a layer on all GPUs together that are tried, too."""
SECONDS_A_COUNT = 2.0
"""Seconds of work on the replicas of a count, at most."""


@dataclass(frozen=True)
class RedundancyPoint:
    """One number of slots.

    slots: of a layer on all GPUs; spare: beyond one for every expert; slots_of_gpu: of a layer on each GPU, or the fullest
    even: True for as many on every GPU, as engines need it
    balancedness: mean / max GPU load by its speed, mean over layers and judged recordings; least_balancedness: of the worst
        layer; planned_balancedness: mean over layers of the recording that was planned on
    seconds: of a step or pass, mean over the judged recordings; gain: over the fewest slots, mean over these, as a share
    memory_bytes: of the spare slots in all layers on all GPUs; gpu_bytes: of all slots of a GPU
    error: standard error of the gain, from the judged recordings being samples; gain_worst: on the one with the least; None of
        points that the first versions kept
    draws: float64[draw], the gain in every draw of the judged recordings, the same draws at every point; not kept in JSON
    """

    slots: int
    spare: int
    slots_of_gpu: int
    balancedness: float
    least_balancedness: float
    planned_balancedness: float
    seconds: float
    gain: float
    memory_bytes: float
    gpu_bytes: float
    error: float | None = None
    gain_worst: float | None = None
    even: bool = True
    draws: Annotated[InstanceOf[np.ndarray], Field(exclude=True)] = field(
        default_factory=lambda: np.zeros(0), repr=False, compare=False
    )

    @property
    def interval(self) -> tuple[float, float]:
        """In which the gain lies as far as the judged recordings are samples."""
        return interval(self.gain, self.error)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {kept.name: getattr(self, kept.name) for kept in fields(self) if kept.name != "draws"}


@dataclass(frozen=True, eq=False)
class Replication:
    """The planning of replicas. algorithm: see `replicate`; groups: of experts that EPLB keeps together on a node where the
    nodes divide them (DeepSeek-V3's gate has 8); 1: experts go to any node."""

    algorithm: Algorithm = "best"
    groups: int = 1
    seed: int = 0


def planned_and_judged(recordings: Sequence[Workload]) -> tuple[Workload, tuple[Workload, ...], bool]:
    """(the recording to plan on, those to judge on, True if these were held out): the first and the others, of a single routing
    log its halves in time, and loads or traffic that stand alone are judged on themselves. Raises InputError for none."""
    if not recordings:
        raise InputError("name at least one recording")
    if len(recordings) > 1:
        return recordings[0], tuple(recordings[1:]), True
    if cut := by_time(recordings[0]):
        return cut[0], (cut[1],), True
    return recordings[0], (recordings[0],), False


def most_slots(judge: Judge) -> tuple[int, str]:
    """(slots of a layer that fit every GPU, their limit in words). Engines give all GPUs as many, so that the smallest GPU
    decides. Raises InputError if not even one copy of every expert fits."""
    problem = judge.problem
    room = problem.cluster.values("memory") * MEMORY_SHARE - judge.bytes_beside()
    per_slot = problem.model.bytes_per_expert * problem.workload.layers
    fits, experts = np.floor(room / per_slot).astype(np.int64), problem.workload.num_experts
    tight, needed = int(fits.argmin()), -(-experts // len(fits))
    whose = f"{problem.cluster.gpu_names[tight]} has {size(max(room[tight], 0.0))} for experts, {size(per_slot)} a slot"
    if fits[tight] < needed:
        raise InputError(f"{needed} slots per layer are needed for {experts} experts, but {whose}; add GPUs or memory")
    if fits[tight] >= experts:
        return experts, f"a GPU needs no more than one slot for each of {experts} experts"
    return int(fits[tight]), whose


def counts_of(judge: Judge, replication: Replication) -> list[int]:
    """Slots of a layer that are tried, ascending, up to as many on each GPU as `most_slots`: those that all GPUs divide, as
    every engine asks, and spare ones IN_ALL, but for DeepSeek's EPLB and its groups, which need the same."""
    experts, gpus = judge.problem.workload.num_experts, len(judge.problem.cluster.gpus)
    base, (most, _) = -(-experts // gpus), most_slots(judge)
    totals = {(base + spare) * gpus for spare in SPARE} | {experts + spare for spare in IN_ALL}
    even = replication.algorithm == "eplb" or replication.groups > 1
    return sorted(total for total in totals if base * gpus <= total <= most * gpus and not (even and total % gpus))


def redundancy(
    judge: Judge,
    planned: Workload,
    judged: Sequence[Workload],
    replication: Replication | None = None,
    stop: Stop = never,
    report: Report = silent,
) -> Iterator[RedundancyPoint]:
    """The curve, fewest slots first. Asked to stop, it ends early. Raises InputError for recordings and groups that do not fit,
    and for anything but inference of one model."""
    if judge.problem.goal is not Goal.INFERENCE:
        raise InputError("spare slots are advised for inference of one model; close the second model or the training step")
    replication = replication or Replication()
    counts = counts_of(judge, replication)
    sampled = tuple((recording, redrawn_loads(recording, turn, stop)) for turn, recording in enumerate(judged))
    common, first = (judge, planned, sampled, replication, counts), None
    titles = [f"{count} slots" for count in counts]
    for turn, (index, (balance, planned_balance, timings)) in enumerate(reported(_count, common, titles, stop, report)):
        if index > turn:  # one before it was stopped midway
            return
        first = timings if first is None else first
        yield _point(judge, counts[index], balance, planned_balance, timings, first)


def _point(
    judge: Judge, slots: int, balance: np.ndarray, planned_balance: float, timings: list[Timing], first: list[Timing]
) -> RedundancyPoint:
    """balance: float64[recording, layer]; timings, first: of every judged recording, with these and with the fewest slots"""
    problem = judge.problem
    gpus = len(problem.cluster.gpus)
    slots_of_gpu = -(-slots // gpus)
    spare, layers = slots - problem.workload.num_experts, problem.workload.layers
    pairs = list(zip(first, timings, strict=True))
    gains = [ratio_gain(fewest.seconds, timed.seconds) for fewest, timed in pairs]
    draws = np.mean([redrawn_gains(*pair) for pair in pairs], axis=0)
    return RedundancyPoint(
        slots=slots,
        spare=spare,
        slots_of_gpu=slots_of_gpu,
        balancedness=float(balance.mean()),
        least_balancedness=float(balance.min()),
        planned_balancedness=planned_balance,
        seconds=float(np.mean([timed.seconds for timed in timings])),
        gain=float(np.mean(gains)),
        memory_bytes=spare * layers * problem.model.bytes_per_expert,
        gpu_bytes=slots_of_gpu * layers * problem.model.bytes_per_expert,
        error=deviation(draws),
        gain_worst=float(min(gains)),
        even=slots % gpus == 0,
        draws=draws,
    )


def _count(
    common: tuple[Judge, Workload, tuple[tuple[Workload, np.ndarray], ...], Replication, list[int]],
    index: int,
    stop: Stop,
    report: Report,
) -> tuple[np.ndarray, float, list[Timing]] | None:
    """(balancedness float64[judged recording, layer], its mean on the planned one, timings of every judged one); None when
    stopped.

    common: with every judged recording its draws, see `redrawn_loads`
    """
    judge, planned, sampled, replication, counts = common
    problem = judge.problem.with_workload(planned)
    gpus, speed, travel = len(problem.cluster.gpus), speed_of_gpu(problem), problem.travel
    nodes = len(problem.cluster.nodes) if replication.groups > 1 else 1
    loads = np.array([planned.load, *(recording.load for recording, _ in sampled)])
    fits, spare = np.full(gpus, -(-counts[index] // gpus)), counts[index] - planned.num_experts
    instance = ReplicationInstance(
        loads[:1],
        counts[index],
        gpus,
        nodes=nodes,
        groups=replication.groups,
        slots_of_gpu=slots_within(fits, problem, spare, "even", "in all")[0] if counts[index] % gpus else None,
        speed=None if replication.algorithm == "eplb" else speed,
    )
    searched = replication.algorithm == "best" and replication.groups == 1
    result = searched and replicas_by_rule(problem, instance.slots_of_gpu, replication.seed, stop)
    if not result:
        limits = Limits(SECONDS_A_COUNT, wall=GUARD * SECONDS_A_COUNT, seed=replication.seed)
        result = replicate(instance, limits, stop, algorithm=replication.algorithm)
    if stop():
        return None
    placement = Placement.from_slots(
        result.solution, instance.slots_of_gpu, problem.workload.num_experts, problem.model.moe_layers
    )
    if travel is None or travel.replicas is None:
        everywhere = balancedness(result.solution, replace(instance, loads=loads, nodes=1, groups=1, speed=speed))
    else:
        recordings = [problem, *(problem.with_workload(recording) for recording, _ in sampled)]
        load = np.array([Load(each, placement, travel).served.sum(axis=1) for each in recordings])
        ideal, busiest = load.sum(axis=2) / speed.sum(), (load / speed).max(axis=2)
        everywhere = np.where(busiest > 0, ideal / np.where(busiest > 0, busiest, 1.0), 1.0)
    order, provenance = SendOrder(mode="concurrent"), Provenance(optimiser="redundancy")
    name = f"{instance.slots} slots"
    plan = Plan(name=name, placement=placement, send_order=order, travel=travel, provenance=provenance)
    timings = [timing(judge, plan, recording, redrawn) for recording, redrawn in sampled]
    return everywhere[1:], float(everywhere[0].mean()), timings


KNEE_SHARE = 0.9
LEAST_GAIN = 0.01
ROUND_OFF = 1e-9

Rule = Literal["enough", "as good", "too little", "noise"]


class Knee(Frozen):
    """slots: of a layer, that are advised; rule: why, and reason: the same in words, without a full stop.

    enough: the fewest that bring `KNEE_SHARE` of the most that any number brings
    as good: the fewest with a gain that cannot be told from that
    too little: the fewest of all, for no number gains `LEAST_GAIN`
    noise: the fewest of all, for the interval of the most that any number brings includes nought
    """

    slots: int
    rule: Rule
    reason: str


def knee(points: Sequence[RedundancyPoint]) -> Knee:
    """More slots are advised only where the recordings tell that they gain more.

    points: as `redundancy` makes them, fewest slots first, at least one; only even ones are advised. Two are told apart by the
        interval of their difference in the same draws, which is narrower than those of their gains; that the most is picked
        from several is not allowed for.
    """
    points = [point for point in points if point.even]
    best = max(points, key=lambda point: point.gain)
    low, high = best.interval
    if best.gain < LEAST_GAIN:
        return Knee(
            slots=points[0].slots, rule="too little", reason=f"no number of spare slots gains as much as {share(LEAST_GAIN)}"
        )
    most = f"{signed(best.gain)} with {best.slots} slots, {share(CONFIDENCE)} interval {signed(low)} to {signed(high)}"
    if low <= 0:
        reason = f"the most that any number of spare slots brings may as well be nothing ({most})"
        return Knee(slots=points[0].slots, rule="noise", reason=reason)
    point, rule = next((point, rule) for point in points if (rule := _reaches(point, best)))
    which = {"enough": "the fewest that bring", "as good": "the fewest whose gain cannot be told from"}[rule]
    return Knee(slots=point.slots, rule=rule, reason=f"{which} {share(KNEE_SHARE)} of the most that any number brings ({most})")


def _reaches(point: RedundancyPoint, best: RedundancyPoint) -> Rule | None:
    """True if a point brings `KNEE_SHARE` of the most, or may do so as far as the draws can say."""
    missing = KNEE_SHARE * best.gain - point.gain
    if missing <= ROUND_OFF * best.gain:
        return "enough"
    least, _ = interval(missing, deviation(KNEE_SHARE * best.draws - point.draws))
    return "as good" if least <= 0 else None


@dataclass(frozen=True)
class EvenProjection:
    """plan: with the even placement; slots: on every GPU; added, dropped: copies of experts that are new and given up, over all
    layers; given: the plan that was projected, with all sends at once, as engines send; before, after: figures of both."""

    plan: Plan
    given: Plan
    slots: int
    added: int
    dropped: int
    before: Metrics
    after: Metrics


def project_evenly(plan: Plan, problem: Problem) -> EvenProjection:
    """The nearest even plan, see `engine.placement.even_slots`: with the fewest slots that hold as many copies as the plan's
    fullest layer, or as many as the smallest memory holds. Raises InputError for training steps and two models, and where
    the memory does not hold every expert."""
    if plan.goal is not Goal.INFERENCE:
        raise InputError(f"the plan {plan.name} is for {plan.goal}; only plans for one model's inference are projected")
    now = plan.placement
    most = int(np.minimum(problem.expert_slots_of_gpu(), now.experts).min())
    least, wanted = (-(-copies // now.gpus) for copies in (now.experts, int(now.slots.sum(axis=1).max())))
    if most < least:
        tight = problem.cluster.gpu_names[int(problem.expert_slots_of_gpu().argmin())]
        raise InputError(
            f"an even plan needs {least} experts per layer on every GPU, but {tight} has memory for {most}; leave it out of "
            "the cluster, or use a smaller dtype"
        )
    slots = min(wanted, most)
    held = now.share > 0
    even = even_slots(held, problem.workload.load, speed_of_gpu(problem), slots)
    rows = tuple(
        tuple(_in_order(row[gpu], layer[:, gpu]) for gpu in range(now.gpus))
        for row, layer in zip(now.experts_of_gpu, even, strict=True)
    )
    placement = now.model_copy(update={"experts_of_gpu": rows})
    parts = {"send_order": SendOrder(mode="concurrent"), "reaction": None, "claim": None}
    if not placement.single:
        parts["execution"] = "vanilla"
    before = plan.with_parts(**parts)
    after = plan.with_parts(**parts, placement=placement, parent=plan.id, name=f"{plan.name[:110]}, even")
    return EvenProjection(
        after,
        before,
        slots,
        int((even & ~held).sum()),
        int(now.slots.sum() - (even & held).sum()),
        metrics(before, problem),
        metrics(after, problem),
    )


def _in_order(before: tuple[int, ...], held: np.ndarray) -> tuple[int, ...]:
    """The experts of a GPU, bool[expert], first those it had, in the order of their slots."""
    kept = [expert for expert in dict.fromkeys(before) if held[expert]]
    return (*kept, *sorted(set(np.flatnonzero(held).tolist()).difference(kept)))
