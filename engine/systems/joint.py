"""The joint planner: affinity against balance in one placement, for several recordings, not far from the one in use.

Beyond the five papers: a placement made for affinity alone leaves GPUs loaded unequally, one made for balance alone sends
nearly every token elsewhere. The weight between the two is the user's; the front of all weights is a study of its own.

Affinity is hops between layers, or, where tokens go home after every layer and one row serves several experts, rows.
"""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.placement.coactivation import CoactivationInstance
from engine.placement.coactivation.kernel import compile_ahead
from engine.placement.joint.bounds import most_balancedness
from engine.placement.joint.instance import JointInstance
from engine.placement.joint.kernel import place_jointly
from engine.placement.joint.rows import RowsInstance, rows_instance, with_starts
from engine.placement.transitions import require_room, transitions
from engine.plan import SendOrder
from engine.problem import Problem
from engine.result import Limits, Stop
from engine.systems import coactivation
from engine.systems.base import Draft, Note, Notes, Report, System, proof_of
from engine.systems.options import Execution, Options, Order, Seed, TimeLimit
from engine.systems.pieces import best_order, experts_per_gpu, linear_placement, to_placement
from engine.units import at_most, digits, share
from engine.workload import RoutingTrace, Workload

START_SHARE = 0.4
"""Part of the time for bounds and placements to begin from, where rows count."""


class JointOptions(Options):
    weight: float = Field(0.5, ge=0, le=1, title="Weight of affinity", description="0: balance alone … 1: affinity alone")
    over: Literal["worst", "mean"] = Field(
        "worst", title="Of several recordings", description="with several recordings: count the worst of them, or their mean"
    )
    max_moves: int = Field(
        0,
        ge=0,
        title="Most experts moved",
        description="experts that may move from the placement in use, over all layers; 0: any number",
    )
    execution: Execution = "vanilla"
    order: Order = "best"
    time_limit: TimeLimit = Field(10.0, description="seconds for the search")
    seed: Seed = 0


def joint(problem: Problem, options: JointOptions, stop: Stop, report: Report) -> Draft:
    """Weigh hops or rows against imbalance, worst case or mean over the recordings, within the moves allowed."""
    instance, start = instance_of(problem, options.execution), start_of(problem)
    most, time_limit, initial = options.max_moves, options.time_limit, ()
    left = moves_left(problem, start, most)

    def tell(objective: float, bound: float) -> None:
        report(0.4, f"objective {digits(objective)}, at least {digits(bound)}", None, None)

    if isinstance(instance, RowsInstance):
        compile_ahead()  # before the clock starts
    guard = options.guard(stop)
    report(0.05, "weighing affinity and balance", None, None)
    if isinstance(instance, RowsInstance):
        limits = Limits(START_SHARE * time_limit, wall=math.inf, seed=options.seed)
        instance, initial = with_starts(instance, limits, guard)
        time_limit *= 1 - START_SHARE
    limits, aim = Limits(time_limit, wall=math.inf, seed=options.seed), {"weight": options.weight}
    aim |= {"workloads": options.over, "start": start, "max_moves": left, "initial": initial}
    result = place_jointly(instance, limits, guard, report=tell, **aim)
    placement = to_placement(result.solution, problem)
    figures = instance.figures(result.solution)
    notes: Notes = {"weighted objective": Note(f"{digits(result.objective)}, {proof_of(result)}")}
    if isinstance(instance, RowsInstance):
        notes |= _rows_and_balance(instance, result.solution, problem)
    else:
        kept, balance, worst = figures.kept_share.min(), figures.balancedness.min(), _in_the_worst(problem)
        notes["hops kept on their GPU"] = Note(share(float(kept)) + worst)
        notes["balancedness"] = Note(digits(float(balance)) + worst)
    allowed = f", at most {most} allowed" if most else ""
    notes["experts that move"] = Note(f"{moves_to(result.solution, problem)} of {start.size}{allowed}")
    if options.execution == "context-coherent":
        order, execution = SendOrder(mode="concurrent"), options.execution
        return Draft(placement, order, None, notes, cancelled=stop(), limited=guard.cut, execution=execution)
    ordered = best_order(placement, problem, options.order, stop, report)
    return ordered.draft(notes, stop(), guard.cut)


def _in_the_worst(problem: Problem) -> str:
    return f" in the worst of {1 + len(problem.others)} recordings" if problem.others else ""


def _rows_and_balance(instance: RowsInstance, gpu_of_expert: np.ndarray, problem: Problem) -> Notes:
    """Both aims of a placement int64[layer, expert] for rows, with the proof of each alone."""
    balancedness = float(instance.figures(gpu_of_expert).balancedness.min())
    most = float(most_balancedness(instance).min())
    where = {"gpu": "GPUs", "node": "nodes"}[instance.recordings[0].travel]
    saved, possible = rows_saved(instance, gpu_of_expert, problem)
    return {
        "weighed": Note(f"balance against rows to other {where}: tokens go home after every layer, so hops cost nothing"),
        "rows": Note(
            f"{share(float(saved.min()))} fewer than contiguous blocks send{_in_the_worst(problem)}; "
            f"{at_most(float(possible.min()))} is possible, proven"
        ),
        "balancedness": Note(f"{digits(balancedness)}{_in_the_worst(problem)}; at most {digits(most)} is possible, proven"),
    }


def rows_saved(instance: RowsInstance, gpu_of_expert: np.ndarray, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(share of the rows of contiguous blocks that a placement saves, share that none exceeds): float64[recording] each, of
    recordings with tokens; 0 if contiguous blocks send no rows."""
    known = instance.blind_rows > 0
    before = instance.rows(linear_placement(problem).gpu_of_expert)[known]
    nothing = before == 0
    saved, possible = (
        np.where(nothing, 0.0, 1 - rows[known] / np.maximum(before, 1))
        for rows in (instance.rows(gpu_of_expert), instance.least_rows)
    )
    return saved, possible


def instance_of(problem: Problem, execution: Execution = "vanilla") -> JointInstance:
    """The placement problem of the open recording and the others it must serve, of rows if they count, else of hops. Recordings
    without tokens have neither, so that only balance counts."""
    recordings = (problem.workload, *problem.others)
    load = np.array([recording.load for recording in recordings])
    if execution == "vanilla" and _sends_shared_rows(problem):
        return rows_instance(tuple(_choices(problem, recording) for recording in recordings), load)
    require_room(len(recordings) * (problem.workload.layers - 1), problem.workload.num_experts)
    hops = [
        transitions(recording.experts, recording.num_experts)
        if isinstance(recording, RoutingTrace)
        else np.zeros((recording.layers - 1, recording.num_experts, recording.num_experts))
        for recording in recordings
    ]
    return JointInstance(np.array(hops), load, experts_per_gpu(problem))


def _sends_shared_rows(problem: Problem) -> bool:
    """True if a row serves several experts and the number of rows is known: from the open recording's tokens, on a cluster that
    `coactivation` plans for."""
    if len(problem.cluster.gpus) == 1 or not problem.workload.load.any():
        return False
    try:
        coactivation.instance_of(problem, None)
    except InputError:
        return False
    return True


def _choices(problem: Problem, recording: Workload) -> CoactivationInstance:
    """The choices of the tokens of a recording; no token for one without tokens."""
    if isinstance(recording, RoutingTrace):
        return coactivation.instance_of(problem.with_workload(recording), None)
    experts = np.empty((recording.layers, 0, 1), dtype=np.int16)
    return replace(coactivation.instance_of(problem, None), experts=experts, source_gpu=np.empty(0, dtype=np.int64))


def start_of(problem: Problem) -> np.ndarray:
    """int64[layer, expert]: the placement in use (linear where none is). From one with replicas, or with other numbers of
    experts per GPU, the nearest of those that are chosen from: as many experts as possible on a GPU that holds them."""
    from scipy.optimize import linear_sum_assignment

    gpu_of_slot = np.repeat(np.arange(len(problem.cluster.gpus)), experts_per_gpu(problem))
    rows = [linear_sum_assignment(held[:, gpu_of_slot], maximize=True)[1] for held in _held(problem)]
    return gpu_of_slot[np.array(rows)]


def moves_to(gpu_of_expert: np.ndarray, problem: Problem) -> int:
    """(layer, expert) pairs that a placement int64[layer, expert] has on a GPU that does not hold them now."""
    return int((~np.take_along_axis(_held(problem), gpu_of_expert[:, :, None], axis=2)).sum())


def moves_left(problem: Problem, start: np.ndarray, most: int) -> int | None:
    """The number of `most` moves (0: any number, answered with None) that are left at `start`. Raises InputError if even that
    is further from the placement in use."""
    needed = moves_to(start, problem)
    if most and most < needed:
        raise InputError(
            f"max_moves: one copy of every expert, as many on every GPU, is at least {needed} moves away from the placement in "
            f"use; choose max_moves={needed} or more"
        )
    return most - needed if most else None


def _held(problem: Problem) -> np.ndarray:
    """bool[layer, expert, gpu]: the copies of the placement in use, linear if there is none."""
    return (problem.in_use or linear_placement(problem)).share > 0


SYSTEMS = (
    System(
        name="joint",
        title="Balance and affinity",
        summary="one placement that balances load and affinity over several recordings, staying close to the deployed one",
        paper="ExFlow §IV with EPLB's aim",
        recipe=joint,
        options=JointOptions,
    ),
)
