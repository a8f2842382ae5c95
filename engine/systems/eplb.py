"""Replication of popular experts: DeepSeek's EPLB, and a stronger search on the same problem.

Spare slots take second and third copies of the experts with the most tokens, so that their work divides over several GPUs. EPLB
counts and packs greedily; `replicate` improves on that under the true objective, for GPUs of unequal speed, unequal
numbers of slots, and several recordings at once, and proves how far it can be from the best.
"""

import math
from typing import Literal

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.placement.replication import ReplicationInstance, balancedness, replicate
from engine.placement.replication.by_rank import RULES, RankedInstance, replicate_by_rank
from engine.plan import Placement, Travel, redundant_experts
from engine.plan.send_order import Replicas
from engine.problem import Problem
from engine.result import Limits, Result, Stop
from engine.simulate.work import Load
from engine.systems.base import Draft, Note, Notes, Report, System
from engine.systems.options import Options, Order, Redundant, Seed, Slots, Spare, TimeLimit
from engine.systems.pieces import best_order
from engine.timeline import balancedness as mean_over_max
from engine.units import digits, share

RULES_IN_WORDS: dict[str, Replicas | None] = {
    "with copies in turn": None,
    "nearest (SGLang with DeepEP)": "nearest-static",
    "nearest, dynamic (SGLang)": "nearest-dynamic",
    "by SGLang's linear programme": "lp",
    "fixed (vLLM-Ascend)": "fixed",
}
MOST_GPUS = 128
"""GPUs up to which a placement is tried under every rule: what ranks draw takes time in proportion to their square."""


class ReplicationOptions(Options):
    redundant: Redundant = Field(1, description="spare slots of a layer, on every GPU or in all, filled with replicas")
    spare: Spare = "per GPU"
    algorithm: Literal["best", "eplb"] = Field(
        "best", description="best: search under the true objective; eplb: DeepSeek's greedy, to the letter"
    )
    slots: Slots = Field(
        "even",
        title="Slots per GPU",
        description="slots per GPU: the same on every GPU (serving engines need this), or more on faster GPUs",
    )
    order: Order = "concurrent"
    time_limit: TimeLimit = Field(10.0, description="seconds for all layers together")
    seed: Seed = 0


def eplb(problem: Problem, options: ReplicationOptions, stop: Stop, report: Report) -> Draft:
    """Replicas for the open recording and, for a robust plan, the others it must serve."""
    printed = options.algorithm == "eplb"
    loads = np.array([other.load for other in (problem.workload, *problem.others)])
    slots_of_gpu = slots_per_gpu(problem, options.redundant, options.slots, options.spare)
    even = bool((slots_of_gpu == slots_of_gpu[0]).all())
    speed, spare = speed_of_gpu(problem), int(slots_of_gpu.sum()) - loads.shape[2]
    near = redundant_experts(loads.shape[2], spare, len(slots_of_gpu)) if options.slots == "even" else [spare]
    nearest = " or ".join(map(str, near))
    if printed and spare not in near:
        raise InputError(
            f"DeepSeek's EPLB needs as many slots on every GPU, but {slots_of_gpu.sum()} do not divide over "
            f"{len(slots_of_gpu)} GPUs; choose redundant={nearest} in all, or algorithm=best"
        )
    uneven = {"slots_of_gpu": None if even else slots_of_gpu, "speed": None if printed else speed}
    instance = ReplicationInstance(loads, int(slots_of_gpu.sum()), len(slots_of_gpu), **uneven)
    report(0.1, "replicating experts", None, None)
    guard, limits = options.guard(stop), Limits(options.time_limit, wall=math.inf, seed=options.seed)
    travel, ranked = problem.travel, None if printed else replicas_by_rule(problem, slots_of_gpu, options.seed, guard)
    rule = ranked and travel.replicas
    result = ranked or replicate(instance, limits, guard, algorithm=options.algorithm)
    _, layers, experts = loads.shape
    placement = Placement.from_slots(result.solution, slots_of_gpu, experts, problem.model.moe_layers)
    ordered = best_order(placement, problem, options.order, stop, report)
    worst = "the worst layer of the worst recording" if len(loads) > 1 else "the worst layer"
    worst_in_turn = worst + " with copies in turn"
    if travel and travel.replicas and not rule:  # copies share otherwise than the bound supposes
        worst = worst_in_turn
    proof = "optimal"
    if result.status.value != "OPTIMAL":
        proof = f"a heuristic within {share(result.bound / result.objective - 1)} of the best"
    size = spare * layers * problem.model.bytes_per_expert / 1e9
    notes: Notes = {
        "balancedness": Note(
            f"{digits(result.objective)} in {worst}; at most {digits(result.bound)} is possible (proven), so this is {proof}"
        ),
        "replicas": Note(f"{spare} spare slots per layer, {size:.3g} GB of memory in all"),
    }
    if spare not in near:
        notes["engines"] = Note(f"need as many slots on every GPU: {nearest} spare ones in all, not {spare}")
    if spare and len(slots_of_gpu) <= MOST_GPUS:
        names = {each: f"the rule {words}" for words, each in RULES_IN_WORDS.items()} | {None: "copies in turn"}
        notes["copies by other rules"] = Note(f"planned for {names[rule]}; balancedness {by_rule(problem, placement)}")
    if not printed and even and np.ptp(speed) == 0:
        greedy = replicate(instance, algorithm="eplb")
        said = f"balancedness {digits(float(balancedness(greedy.solution, instance).min()))} in {worst_in_turn}"
        if rule and spare and len(slots_of_gpu) <= MOST_GPUS:
            held = Placement.from_slots(greedy.solution, slots_of_gpu, experts, problem.model.moe_layers)
            said += f" and {digits(float(balancedness_under(problem, held, travel).min()))} by the rule of this plan"
        said += f", made in {greedy.runtime:.2g} s; this one took {result.runtime:.2g} s"
        notes["EPLB's own layout"] = Note(said)
    return ordered.draft(notes, stop(), guard.cut)


def replicas_by_rule(problem: Problem, slots_of_gpu: np.ndarray, seed: int, stop: Stop) -> Result | None:
    """Replicas for the rule by which ranks use copies: solution int64[layer, slot]; None where copies serve in turn, or by a
    rule that no replicas are planned for."""
    if problem.travel is None or problem.travel.replicas not in RULES:
        return None
    gpus = len(slots_of_gpu)
    demand = np.array([other.demand(gpus) for other in (problem.workload, *problem.others)])
    rule = problem.travel.replicas, problem.travel.ranks_per_node or gpus, problem.model.moe_layers
    return replicate_by_rank(RankedInstance(demand, slots_of_gpu, speed_of_gpu(problem), *rule), seed, stop)


def by_rule(problem: Problem, placement: Placement) -> str:
    """The balancedness of a placement under every rule by which engines use copies, in words."""
    said = []
    for words, rule in RULES_IN_WORDS.items():
        travel = (problem.travel or Travel()).model_copy(update={"unit": "copies", "replicas": rule})
        even = balancedness_under(problem, placement, travel.on_nodes(problem.cluster.node_sizes))
        said.append(f"{digits(float(even.mean()))} (worst layer {digits(float(even.min()))}) {words}")
    return ", ".join(said)


def balancedness_under(problem: Problem, placement: Placement, travel: Travel) -> np.ndarray:
    """float64[layer] balancedness of a placement of the open recording, with copies as tokens travel."""
    return mean_over_max(Load(problem, placement, travel).served.sum(axis=1))


def slots_per_gpu(problem: Problem, redundant: int, kind: str, spare: str = "per GPU") -> np.ndarray:
    """int64[gpu]: slots of one layer, experts and replicas; never more than one for each expert on a GPU. Raises InputError
    when they do not fit the memory. Arguments as for `slots_within`."""
    fits = np.minimum(problem.expert_slots_of_gpu(), problem.workload.num_experts)
    slots, most, total = slots_within(fits, problem, redundant, kind, spare)
    if slots is not None:
        return slots
    advice, tight = f"choose redundant={most}", int(fits.argmin())
    if kind == "even":
        spread = "slots=uneven, " if fits.sum() >= problem.workload.num_experts else ""
        advice = advice if most >= 0 else f"use {spread}more GPUs or memory, or a smaller dtype"
        wanted = f"{total} slots per layer in all" if spare == "in all" else f"{total // len(fits)} slots per layer"
        raise InputError(
            f"{wanted} do not fit {problem.cluster.gpu_names[tight]}, which has memory for {fits[tight]}; {advice}"
        )
    advice = advice if most >= 0 else "add GPUs or memory, or use a smaller dtype"
    raise InputError(f"{total} slots per layer do not fit: all GPUs together have room for {fits.sum()}; {advice}")


def slots_within(
    fits: np.ndarray, problem: Problem, redundant: int, kind: str, spare: str
) -> tuple[np.ndarray | None, int, int]:
    """(slots of one layer int64[gpu], None if they do not fit; the most that `redundant` may be, below 0 if no number fits;
    slots of all GPUs).

    fits: int64[gpu] slots that have room, at most one for each expert
    redundant: spare slots; at most those with which every GPU has all experts count
    kind: "even": as many on every GPU, or one more on some; "uneven": by the speed of GPUs
    spare: "per GPU", or "in all": all GPUs together have so many
    """
    experts, gpus = problem.workload.num_experts, len(fits)
    base, unit = (experts, 1) if spare == "in all" else (experts if kind == "uneven" else -(-experts // gpus) * gpus, gpus)
    total, tight = min(base + redundant * unit, experts * gpus), int(fits.min())
    room = tight * gpus + (np.count_nonzero(fits > tight) if unit == 1 else 0) if kind == "even" else int(fits.sum())
    if total > room:
        return None, (room - base) // unit, total
    if kind == "even":
        slots = np.full(gpus, total // gpus)
        if total % gpus:
            slots[[gpu for gpu in _in_turn(problem) if fits[gpu] > total // gpus][: total % gpus]] += 1
    else:
        slots, speed = np.zeros(gpus, dtype=np.int64), speed_of_gpu(problem)
        for _ in range(total):  # one after another to the GPU that is furthest below its share of the speed
            open_to = np.flatnonzero(slots < fits)
            slots[open_to[(slots[open_to] / speed[open_to]).argmin()]] += 1
    return slots, (room - base) // unit, total


def _in_turn(problem: Problem) -> list[int]:
    """GPUs, the fastest first; equally fast ones come from all nodes in turn."""
    node = problem.cluster.node_of_gpu
    place = np.arange(len(node)) - np.searchsorted(node, node)
    return np.lexsort((node, place, -speed_of_gpu(problem))).tolist()


def speed_of_gpu(problem: Problem) -> np.ndarray:
    """float64[gpu]: expert computation per second, relative to the fastest, at the mean number of tokens of an expert."""
    tokens = np.array([max(float(problem.workload.load.mean()), 1.0)])
    seconds = np.array([float(problem.cost.expert_ffn(gpu, tokens, problem.model)[0]) for gpu in problem.cluster.gpus])
    return seconds.min() / seconds


SYSTEMS = (
    System(
        name="eplb",
        title="Replication (EPLB)",
        summary="gives popular experts a second home in spare slots, so that no GPU has more to do than the others",
        paper="DeepSeek EPLB, Lina §5",
        recipe=eplb,
        options=ReplicationOptions,
    ),
)
