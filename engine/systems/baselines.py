"""What Aurora is compared with (§8.1): random and shortest-job-first sends, random GPU assignment, and doing nothing."""

import numpy as np

from engine.communication.baselines import random_order, shortest_first
from engine.placement.baselines import linear_assignment, random_assignment, round_robin_assignment
from engine.plan import Placement, SendOrder
from engine.problem import Problem
from engine.result import Stop
from engine.systems.aurora_exclusive import (
    SLOTS,
    TIME_LIMIT,
    assign_layers,
    phased_order,
    slots_of_gpu,
    spread_evenly,
    to_placement,
)
from engine.systems.base import SEED, Draft, Option, Report, System, Value

PLACEMENT = Option(
    "placement",
    "linear",
    "experts in contiguous blocks, or where Aurora puts them (shows the effect of the order alone)",
    choices=("linear", "aurora"),
)


def linear(problem: Problem, settings: dict[str, Value], stop: Stop, report: Report) -> Draft:
    """Contiguous blocks of experts and a plain all-to-all: what serving engines do unless told otherwise."""
    if problem.second is None:
        return Draft(linear_placement(problem, str(settings["slots"])), SendOrder(mode="concurrent"))
    rows = [linear_placement(one, str(settings["slots"])) for one in (problem, problem.second)]
    order = SendOrder(mode="concurrent")
    return Draft(rows[0], order, placement_b=rows[1], send_order_b=order)


def round_robin(problem: Problem, settings: dict[str, Value], stop: Stop, report: Report) -> Draft:
    """Experts dealt one by one, the same in every layer, and a plain all-to-all."""
    row = round_robin_assignment(problem.workload.num_experts, _slots(problem, str(settings["slots"])))
    placement = to_placement(np.tile(row, (problem.workload.layers, 1)), problem)
    return Draft(placement, SendOrder(mode="concurrent"))


def random(problem: Problem, settings: dict[str, Value], stop: Stop, report: Report) -> Draft:
    """Every layer's experts at random, and a plain all-to-all."""
    return Draft(random_placement(problem, int(settings["seed"]), str(settings["slots"])), SendOrder(mode="concurrent"))


def rcs(problem: Problem, settings: dict[str, Value], stop: Stop, report: Report) -> Draft:
    """Random communication scheduling."""
    seed = int(settings["seed"])
    return _sequential(problem, settings, stop, report, lambda matrix, step: random_order(matrix, seed + step))


def sjf(problem: Problem, settings: dict[str, Value], stop: Stop, report: Report) -> Draft:
    """Shortest job first."""
    return _sequential(problem, settings, stop, report, lambda matrix, step: shortest_first(matrix))


def rga(problem: Problem, settings: dict[str, Value], stop: Stop, report: Report) -> Draft:
    """Random GPU assignment with Aurora's order, as in Figure 11b."""
    placement = random_placement(problem, int(settings["seed"]))
    return Draft(placement, phased_order(placement, problem, "matched", stop), cancelled=stop())


def linear_placement(problem: Problem, kind: str = "even") -> Placement:
    """Experts in contiguous blocks, the same in every layer; as equal as the memory allows with `kind` "uneven"."""
    row = linear_assignment(problem.workload.num_experts, _slots(problem, kind))
    return to_placement(np.tile(row, (problem.workload.layers, 1)), problem)


def random_placement(problem: Problem, seed: int, kind: str = "even") -> Placement:
    """Every layer's experts at random."""
    slots, experts = _slots(problem, kind), problem.workload.num_experts
    rows = [random_assignment(experts, slots, seed + layer) for layer in range(problem.workload.layers)]
    return to_placement(np.array(rows), problem)


def _slots(problem: Problem, kind: str) -> np.ndarray:
    return spread_evenly(slots_of_gpu(problem, kind), problem.workload.num_experts)


def _sequential(problem: Problem, settings: dict[str, Value], stop: Stop, report: Report, schedule) -> Draft:
    if settings["placement"] == "aurora":
        placement = to_placement(assign_layers(problem, settings, stop, report)[0], problem)
    else:
        placement = linear_placement(problem, str(settings["slots"]))
    traffic = problem.traffic(placement)
    dispatch = tuple(schedule(matrix, 2 * layer) for layer, matrix in enumerate(traffic))
    combine = tuple(schedule(matrix.T, 2 * layer + 1) for layer, matrix in enumerate(traffic))
    return Draft(placement, SendOrder(mode="sequential", dispatch=dispatch, combine=combine), cancelled=stop())


SYSTEMS = (
    System(
        "linear",
        "Linear placement",
        "experts in contiguous blocks, a plain all-to-all: what engines do unless told otherwise",
        "common practice",
        linear,
        (SLOTS,),
        baseline=True,
        models=(1, 2),
    ),
    System(
        "round-robin",
        "Round-robin placement",
        "experts dealt to the GPUs one by one, a plain all-to-all",
        "common practice",
        round_robin,
        (SLOTS,),
        baseline=True,
    ),
    System(
        "random",
        "Random placement",
        "every layer's experts on random GPUs, a plain all-to-all",
        "common practice",
        random,
        (SLOTS, SEED),
        baseline=True,
    ),
    System(
        "rcs",
        "Random order (RCS)",
        "every GPU sends to its peers one by one in a random order",
        "Aurora §8.1",
        rcs,
        (PLACEMENT, SLOTS, TIME_LIMIT, SEED),
        baseline=True,
    ),
    System(
        "sjf",
        "Shortest job first (SJF)",
        "every GPU sends to the peer with the fewest bytes first",
        "Aurora §8.1",
        sjf,
        (PLACEMENT, SLOTS, TIME_LIMIT, SEED),
        baseline=True,
    ),
    System(
        "rga",
        "Random GPUs (RGA)",
        "experts on random GPUs, sends in Aurora's order",
        "Aurora §8.1",
        rga,
        (SEED,),
        baseline=True,
    ),
)
