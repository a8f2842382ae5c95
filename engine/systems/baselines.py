"""The systems that Aurora is compared with (§8.1): random and shortest-job-first sends, random GPU assignment, and doing
nothing; its colocation with random colocation, and with Lina's packing of one model's experts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from pydantic import Field

from engine.communication.order import random_order, shortest_first
from engine.errors import InputError
from engine.goal import Goal
from engine.placement.baselines import linear_assignment, random_assignment, round_robin_assignment
from engine.plan import Placement, Schedule, SendOrder
from engine.problem import Problem
from engine.result import Stop
from engine.simulate.work import Load
from engine.systems.aurora_exclusive import PlacementTime, assign_layers
from engine.systems.base import Draft, Report, System
from engine.systems.options import Options, Seed, Slots
from engine.systems.pieces import experts_per_gpu, linear_placement, phased_order, to_placement


class SlotOptions(Options):
    slots: Slots = "even"


class RandomPlacementOptions(SlotOptions):
    seed: Seed = 0


class SequentialOptions(Options):
    """The options of systems that send to one peer after another."""

    placement: Literal["linear", "aurora"] = Field(
        "linear", description="experts in contiguous blocks, or where Aurora puts them (shows the effect of the order alone)"
    )
    slots: Slots = "even"
    time_limit: PlacementTime = 20.0
    seed: Seed = 0


class SeedOptions(Options):
    seed: Seed = 0


def linear(problem: Problem, options: SlotOptions, stop: Stop, report: Report) -> Draft:
    """Contiguous blocks of experts and a plain all-to-all, the default of serving engines."""
    draft = Draft(linear_placement(problem, options.slots), order := SendOrder(mode="concurrent"))
    if problem.goal is not Goal.TWO_MODELS:
        return draft
    return replace(draft, placement_b=linear_placement(problem.second, options.slots), send_order_b=order)


def round_robin(problem: Problem, options: SlotOptions, stop: Stop, report: Report) -> Draft:
    """Experts dealt one by one, the same in every layer, and a plain all-to-all."""
    row = round_robin_assignment(problem.workload.num_experts, experts_per_gpu(problem, options.slots))
    placement = to_placement(np.tile(row, (problem.workload.layers, 1)), problem)
    return Draft(placement, SendOrder(mode="concurrent"))


def random(problem: Problem, options: RandomPlacementOptions, stop: Stop, report: Report) -> Draft:
    """Every layer's experts at random, and a plain all-to-all."""
    return Draft(random_placement(problem, options.seed, options.slots), SendOrder(mode="concurrent"))


def rcs(problem: Problem, options: SequentialOptions, stop: Stop, report: Report) -> Draft:
    """Random communication scheduling."""
    return _sequential(problem, options, stop, report, _KERNELS["rcs"](options.seed))


def sjf(problem: Problem, options: SequentialOptions, stop: Stop, report: Report) -> Draft:
    """Shortest job first."""
    return _sequential(problem, options, stop, report, _KERNELS["sjf"](options.seed))


def rga(problem: Problem, options: SeedOptions, stop: Stop, report: Report) -> Draft:
    """Random GPU assignment with Aurora's order, as in Figure 11b."""
    placement = random_placement(problem, options.seed)
    load = Load(problem, placement, problem.travel)
    return Draft(placement, phased_order(load, "matched", stop), cancelled=stop(), loads=(load,))


def random_placement(problem: Problem, seed: int, kind: str = "even") -> Placement:
    """Every layer's experts at random."""
    slots, experts = experts_per_gpu(problem, kind), problem.workload.num_experts
    rows = [random_assignment(experts, slots, seed + layer) for layer in range(problem.workload.layers)]
    return to_placement(np.array(rows), problem)


Turns = Callable[[np.ndarray, int], Schedule]
"""From the bytes float64[src, dst] of an all-to-all, and its place among those of a pass, to its sends one after another."""
_KERNELS: dict[str, Callable[[int], Turns]] = {
    "rcs": lambda seed: lambda matrix, step: random_order(matrix, seed + step),
    "sjf": lambda seed: lambda matrix, step: shortest_first(matrix),
}


def one_by_one(load: Load, schedule: Turns) -> SendOrder:
    """The order in which every GPU sends to one peer after another."""
    dispatch = tuple(schedule(matrix, 2 * layer) for layer, matrix in enumerate(load.work.dispatch))
    combine = tuple(schedule(matrix, 2 * layer + 1) for layer, matrix in enumerate(load.work.combine))
    return SendOrder(mode="sequential", dispatch=dispatch, combine=combine)


def _sequential(problem: Problem, options: SequentialOptions, stop: Stop, report: Report, schedule: Turns) -> Draft:
    guard = options.guard(stop)
    if options.placement == "aurora":
        gpu_of_expert, *_ = assign_layers(problem, options.slots, options.time_limit, options.seed, guard, report)
        placement = to_placement(gpu_of_expert, problem)
    else:
        placement = linear_placement(problem, options.slots)
    load = Load(problem, placement, problem.travel)
    return Draft(placement, one_by_one(load, schedule), cancelled=stop(), limited=guard.cut, loads=(load,))


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
        layers = range(model_problem.workload.layers)
        rows = [random_assignment(experts, taken, seed + 2 * layer + turn) for layer in layers]
        if turn == 0 and options.gpus == "in order":
            rows = [linear_assignment(experts, taken)] * len(layers)
        placements.append(to_placement(np.array(rows), model_problem))
    return in_order(placements, problem, stop)


class PackingOptions(Options):
    gpus: Literal["in order", "random"] = Field(
        "in order", title="GPUs", description="every second GPU for each model, or those that the seed draws"
    )
    sends: Literal["matched", "sjf", "rcs"] = Field(
        "matched", title="Send order", description="Aurora's, shortest job first (sjf), or random (rcs)"
    )
    seed: Seed = 0


def same_model_packing(problem: Problem, options: PackingOptions, stop: Stop, report: Report) -> Draft:
    """Lina's packing as Aurora §8.1 compares it: a GPU takes experts of one model only, the most popular with the least; each
    model and its tokens are alone on half of the GPUs: none of its bytes cross to the other's GPUs."""
    gpus = len(problem.cluster.gpus)
    if gpus < 2:
        raise InputError("packing each model on GPUs of its own needs at least 2 GPUs")
    ranked = np.arange(gpus) if options.gpus == "in order" else np.random.default_rng(options.seed).permutation(gpus)
    placements, starts = [], []
    for model_problem, mine in ((problem, ranked[0::2]), (problem.second, ranked[1::2])):
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
    draft = in_order(placements, moved, stop, options.sends, options.seed)
    return replace(draft, token_gpus=starts[0], token_gpus_b=starts[1])


def in_order(placements: list[Placement], problem: Problem, stop: Stop, mode: str = "matched", seed: int = 0) -> Draft:
    """The draft of these placements of each model. mode: "matched", or of the sends one after another: "sjf", "rcs" """
    sides = [problem] if problem.second is None else [problem, problem.second]
    problem.check_memory(*placements)
    loads = tuple(Load(side, placement, problem.travel) for side, placement in zip(sides, placements, strict=True))
    orders = [phased_order(load, mode, stop) if mode == "matched" else one_by_one(load, _KERNELS[mode](seed)) for load in loads]
    two = {} if len(sides) == 1 else {"placement_b": placements[1], "send_order_b": orders[1]}
    return Draft(placements[0], orders[0], cancelled=stop(), loads=loads, **two)


_usual = partial(System, paper="common practice", baseline=True)
_of_aurora = partial(System, paper="Aurora §8.1", baseline=True)
_sequence = partial(_of_aurora, options=SequentialOptions)

SYSTEMS = (
    _usual(
        name="linear",
        title="Linear placement",
        summary="experts in contiguous blocks, a plain all-to-all: what engines do unless told otherwise",
        recipe=linear,
        options=SlotOptions,
        goals=(Goal.INFERENCE, Goal.TWO_MODELS),
        preselected=True,
    ),
    _usual(
        name="round-robin",
        title="Round-robin placement",
        summary="experts assigned to the GPUs one by one, a plain all-to-all",
        recipe=round_robin,
        options=SlotOptions,
    ),
    _usual(
        name="random",
        title="Random placement",
        summary="every layer's experts on random GPUs, a plain all-to-all",
        recipe=random,
        options=RandomPlacementOptions,
    ),
    _sequence(
        name="rcs", title="Random order (RCS)", summary="every GPU sends to its peers one by one in a random order", recipe=rcs
    ),
    _sequence(
        name="sjf",
        title="Shortest job first (SJF)",
        summary="every GPU sends to the peer with the fewest bytes first",
        recipe=sjf,
    ),
    _of_aurora(
        name="rga",
        title="Random GPUs (RGA)",
        summary="experts on random GPUs, sends in Aurora's order",
        recipe=rga,
        options=SeedOptions,
    ),
)
