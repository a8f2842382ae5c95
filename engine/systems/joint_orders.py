"""The joint order of two colocated models: table 2 of Aurora walked once, with every all-to-all beside the one before it."""

from collections.abc import Sequence

import numpy as np

from engine.communication.joint_order import JointOrder
from engine.errors import InputError
from engine.network import Network
from engine.plan import Placement, Schedule, SendOrder
from engine.problem import Problem
from engine.result import Advance, Stop, unwatched
from engine.simulate.work import Work, work_of

LARGEST, MOST_PAIRS = 128, 250_000
"""GPUs for which a joint order is made, at most: its linear programs have a variable for every pair. And pairs of GPUs in all
layers together up to which `best` tries one: 64 GPUs and 61 layers, some 40 seconds."""

DISPATCH_A, DISPATCH_B, COMBINE_A, COMBINE_B = range(4)


def joint_orders(
    placements: Sequence[Placement], problem: Problem, stop: Stop, advance: Advance = unwatched
) -> tuple[SendOrder, SendOrder]:
    """The send orders of both models as one schedule a layer (see `JointOrder`). advance: called with the share that is done.

    When computation lets each all-to-all start is taken from the model's own recursion with the times that come out here, so
    on the traffic that it was made for the order is carried out as planned. Raises InputError above `LARGEST` GPUs.
    """
    if problem.network.gpus > LARGEST:
        raise InputError(f"a joint order is made for {LARGEST} GPUs at most; use matched or concurrent")
    sides = zip(placements, (problem, problem.second), strict=True)
    works = [work_of(placement, side, travel=problem.travel) for placement, side in sides]
    lane = np.zeros(problem.network.gpus)
    layers = []
    for layer in range(placements[0].layers):
        advance(layer / placements[0].layers)
        schedules, lane = layer_order(works, layer, problem.network, lane, stop)
        layers.append(schedules)
    parts = [tuple(schedules[exchange] for schedules in layers) for exchange in range(4)]
    return (
        SendOrder(mode="joint", dispatch=parts[DISPATCH_A], combine=parts[COMBINE_A]),
        SendOrder(mode="joint", dispatch=parts[DISPATCH_B], combine=parts[COMBINE_B]),
    )


def worth_trying(problem: Problem) -> bool:
    """Whether `best` has the time for a joint order."""
    gpus = problem.network.gpus
    return gpus <= LARGEST and problem.workload.layers * gpus**2 <= MOST_PAIRS


def layer_order(
    works: Sequence[Work], layer: int, network: Network, lane: np.ndarray, stop: Stop
) -> tuple[list[Schedule], np.ndarray]:
    """The schedules of one layer's four all-to-alls (dispatch of a and of b, combine of a and of b) on GPUs that are free from
    `lane` (float64[gpu] seconds) on, and when each is free after the layer."""
    a, b = works
    chain = JointOrder(network, exchanges=4, stop=stop)

    def run(work: Work, kind: str, ready: float) -> float:
        nonlocal lane
        lane = np.maximum(lane, ready) + work.compute[kind][layer]
        return float(lane.max())

    nothing = np.zeros_like(a.dispatch[layer])
    release_a, release_b = run(a, "gate", 0.0), run(b, "gate", 0.0)
    dispatched_a, left = chain.serve(DISPATCH_A, a.dispatch[layer], release_a, DISPATCH_B, b.dispatch[layer], release_b)
    begin = max(dispatched_a, release_b)
    release_a = run(a, "ffn", dispatched_a)
    dispatched_b, back = chain.serve(DISPATCH_B, left, begin, COMBINE_A, a.combine[layer], release_a)
    begin = max(dispatched_b, release_a)
    release_b = run(b, "ffn", dispatched_b)
    combined_a, left = chain.serve(COMBINE_A, back, begin, COMBINE_B, b.combine[layer], release_b)
    begin = max(combined_a, release_b)
    run(a, "aggregate", combined_a)
    combined_b, _ = chain.serve(COMBINE_B, left, begin, COMBINE_B, nothing, begin)
    run(b, "aggregate", combined_b)
    return chain.schedules(), lane
