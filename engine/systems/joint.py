"""The joint planner: affinity against balance in one placement, for several recordings, not far from the one in use.

Beyond the five papers: a placement made for affinity alone leaves GPUs loaded unequally, one made for balance alone sends
nearly every token elsewhere. The weight between the two is the user's; the front of all weights is a study of its own.
"""

from typing import Literal

import numpy as np
from pydantic import Field
from scipy.optimize import linear_sum_assignment

from engine.errors import InputError
from engine.placement.joint.kernel import JointInstance, place_jointly
from engine.placement.transitions import transitions
from engine.plan import SendOrder
from engine.problem import Problem
from engine.result import Stop
from engine.systems.base import Draft, Note, Notes, Report, System, proof_of
from engine.systems.options import Execution, Options, Order, Seed, TimeLimit
from engine.systems.pieces import best_order, experts_per_gpu, linear_placement, to_placement
from engine.units import digits, share
from engine.workload import RoutingTrace


class JointOptions(Options):
    weight: float = Field(0.5, ge=0, le=1, description="0: balance alone … 1: affinity alone")
    over: Literal["worst", "mean"] = Field(
        "worst", description="with several recordings: count the worst of them, or their mean"
    )
    max_moves: int = Field(
        0, ge=0, description="experts that may move from the placement in use, over all layers; 0: any number"
    )
    execution: Execution = "vanilla"
    order: Order = "best"
    time_limit: TimeLimit = Field(10.0, description="seconds for the search")
    seed: Seed = 0


def joint(problem: Problem, options: JointOptions, stop: Stop, report: Report) -> Draft:
    """Weigh hops against imbalance, worst case or mean over the recordings, within the moves allowed."""
    instance, start = instance_of(problem), start_of(problem)
    most = options.max_moves

    def tell(objective: float, bound: float) -> None:
        report(0.4, f"objective {digits(objective)}, at least {digits(bound)}", None, None)

    report(0.05, "weighing affinity and balance", None, None)
    result = place_jointly(
        instance,
        options.weight,
        options.over,
        start,
        moves_left(problem, start, most),
        seed=options.seed,
        time_limit=options.time_limit,
        stop=stop,
        on_progress=tell,
    )
    placement = to_placement(result.solution, problem)
    figures = instance.figures(result.solution)
    notes: Notes = {
        "weighted objective": Note(f"{digits(result.objective)}, {proof_of(result)}"),
        "hops kept on their GPU": Note(f"{share(float(figures.kept_share.min()))}" + _in_the_worst(problem)),
        "balancedness": Note(f"{digits(float(figures.balancedness.min()))}" + _in_the_worst(problem)),
        "experts that move": Note(
            f"{moves_to(result.solution, problem)} of {start.size}" + (f", at most {most} allowed" if most else "")
        ),
    }
    if options.execution == "context-coherent":
        return Draft(
            placement, SendOrder(mode="concurrent"), None, notes, cancelled=stop(), execution="context-coherent"
        )
    ordered = best_order(placement, problem, options.order, stop, report)
    return ordered.draft(notes, stop())


def _in_the_worst(problem: Problem) -> str:
    return f" in the worst of {1 + len(problem.others)} recordings" if problem.others else ""


def instance_of(problem: Problem) -> JointInstance:
    """The placement problem of the open recording and the others it must serve. Recordings without tokens have no hops,
    so that only balance counts."""
    recordings = (problem.workload, *problem.others)
    hops = [
        transitions(recording.experts, recording.num_experts)
        if isinstance(recording, RoutingTrace)
        else np.zeros((recording.layers - 1, recording.num_experts, recording.num_experts))
        for recording in recordings
    ]
    return JointInstance(
        np.array(hops), np.array([recording.load for recording in recordings]), experts_per_gpu(problem)
    )


def start_of(problem: Problem) -> np.ndarray:
    """int64[layer, expert]: the placement in use (linear where none is). From one with replicas, or with other numbers of
    experts per GPU, the nearest of those that are chosen from: as many experts as possible on a GPU that holds them."""
    gpu_of_slot = np.repeat(np.arange(len(problem.cluster.gpus)), experts_per_gpu(problem))
    rows = [linear_sum_assignment(held[:, gpu_of_slot], maximize=True)[1] for held in _held(problem)]
    return gpu_of_slot[np.array(rows)]


def moves_to(gpu_of_expert: np.ndarray, problem: Problem) -> int:
    """(layer, expert) pairs that a placement int64[layer, expert] has on a GPU that does not hold them now."""
    return int((~np.take_along_axis(_held(problem), gpu_of_expert[:, :, None], axis=2)).sum())


def moves_left(problem: Problem, start: np.ndarray, most: int) -> int | None:
    """How many of `most` moves (0: any number, answered with None) are left at `start`. Raises InputError when even that is
    further from the placement in use."""
    needed = moves_to(start, problem)
    if most and most < needed:
        raise InputError(
            f"max_moves: one copy of every expert, as many on every GPU, is at least {needed} moves away from the placement in "
            f"use; choose max_moves={needed} or more"
        )
    return most - needed if most else None


def _held(problem: Problem) -> np.ndarray:
    """bool[layer, expert, gpu]: what the placement in use (linear where none is) has where."""
    return (problem.in_use or linear_placement(problem)).share > 0


SYSTEMS = (
    System(
        name="joint",
        title="Balance and affinity",
        summary="one placement for both aims and for several recordings, near the one in use",
        paper="ExFlow §IV with EPLB's aim",
        recipe=joint,
        options=JointOptions,
    ),
)
