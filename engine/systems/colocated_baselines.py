"""What Aurora's colocation is compared with (§8.1): random colocation, and Lina's packing of one model's experts."""

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.placement.baselines import linear_assignment, random_assignment
from engine.plan import Placement
from engine.problem import Problem
from engine.result import Stop
from engine.systems.base import Draft, Report
from engine.systems.options import Options, Seed
from engine.systems.pieces import experts_per_gpu, phased_order, to_placement


class RandomColocationOptions(Options):
    gpus: Literal["in order", "random"] = Field(
        "in order",
        title="Order of GPUs",
        description="the first model's experts in contiguous blocks (REC), or at random as well (RGA + REC)",
    )
    seed: Seed = 0


def random_colocation(problem: Problem, options: RandomColocationOptions, stop: Stop, report: Report) -> Draft:
    """REC: experts of the first model in blocks, those of the second at random; with `gpus` random, both (RGA + REC)."""
    seed, placements = options.seed, []
    for turn, model_problem in enumerate((problem, problem.second)):
        taken, experts = experts_per_gpu(model_problem), model_problem.workload.num_experts
        if turn == 0 and options.gpus == "in order":
            rows = [linear_assignment(experts, taken)] * model_problem.workload.layers
        else:
            rows = [
                random_assignment(experts, taken, seed + 2 * layer + turn)
                for layer in range(model_problem.workload.layers)
            ]
        placements.append(to_placement(np.array(rows), model_problem))
    return _in_matched_order(placements, problem, stop)


def same_model_packing(problem: Problem, options: Options, stop: Stop, report: Report) -> Draft:
    """Lina's packing as Aurora §8.1 compares it: a GPU takes experts of one model only, the most popular beside the least;
    each model is alone on every second GPU, and so are its tokens: nothing of it crosses to the other's GPUs."""
    gpus = len(problem.cluster.gpus)
    if gpus < 2:
        raise InputError("packing each model on GPUs of its own needs at least 2 GPUs")
    placements, starts = [], []
    for model_problem, mine in zip(
        (problem, problem.second), (np.arange(gpus)[0::2], np.arange(gpus)[1::2]), strict=True
    ):
        experts = model_problem.workload.num_experts
        each = -(-experts // len(mine))
        fits = model_problem.expert_slots_of_gpu()[mine]
        if np.any(fits < each):
            raise InputError(
                f"{each} experts per layer of {model_problem.model.name} on each of {len(mine)} GPUs do not fit a memory for "
                f"{fits.min()}; add GPUs or memory, or use a smaller dtype"
            )
        rows = []
        for load in model_problem.workload.load:
            # Dealt back and forth, the heaviest meets the lightest.
            turns = np.tile(np.r_[mine, mine[::-1]], -(-experts // (2 * len(mine))) + 1)[:experts]
            row = np.empty(experts, dtype=np.int64)
            row[np.argsort(-load, kind="stable")] = turns
            rows.append(row)
        placements.append(to_placement(np.array(rows), model_problem))
        starts.append(tuple(mine[np.arange(gpus) * len(mine) // gpus].tolist()))
    moved = replace(problem, token_gpus=starts[0], second=replace(problem.second, token_gpus=starts[1]))
    draft = _in_matched_order(placements, moved, stop)
    return replace(draft, token_gpus=starts[0], token_gpus_b=starts[1])


def _in_matched_order(placements: list[Placement], problem: Problem, stop: Stop) -> Draft:
    problem.check_memory(*placements)
    orders = [
        phased_order(placement, side, "matched", stop)
        for placement, side in zip(placements, (problem, problem.second), strict=True)
    ]
    return Draft(placements[0], orders[0], cancelled=stop(), placement_b=placements[1], send_order_b=orders[1])
