"""Which GPU holds which expert of a layer, so that the experts of a token are on few GPUs (or nodes), with a proven bound.

Where one row a destination GPU is sent for a token, or one a destination node, traffic is the number of different GPUs (nodes)
among its experts. Experts that fire together and live together lower it: a hypergraph partition with equal parts. Where a row
serves a node, experts go to nodes first, then inside each node to the GPUs, for few rows over its links.

Layers are independent. Few experts are placed exactly (`exact`), others by tabu search with exact gains (`search`, `swaps`);
the bound is a semidefinite one (`relaxation`). The busiest GPU's load may be capped; names of GPUs matter through the tokens
that are sent from them.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.placement.coactivation.compile_ahead import compile_ahead
from engine.placement.coactivation.instance import CoactivationInstance
from engine.placement.coactivation.layer import Layer
from engine.result import Provenance, Result, Status, Stop, library_versions, never

SEARCH_SHARE, BOUND_SHARE, SEARCH_CAP, BOUND_CAP = 0.4, 0.3, 0.6, 0.97
"""Work of each step as a part of the time limit by its own estimate for one core, and when the clock ends it in any case."""
FIRST_BOUND_SHARE = 0.1
"""Work after which every layer has a bound."""
SEARCHES, NODES_SHARE = 4, 0.2
"""Searches of a layer, between which the groups get new names; part of the search's work for GPUs inside nodes."""
BALANCE_SHARE, BALANCE_CAP = 0.2, 0.5
"""Part of the search's work, and of its time, for the least load where the cap is hard to keep."""
POLL = 0.05
"""Seconds between two questions whether to stop."""


def coactivation(
    instance: CoactivationInstance,
    time_limit: float = 10.0,
    seed: int = 0,
    exact: bool = True,
    stop: Stop = never,
    port_weight: float = 0.0,
    wall_limit: float | None = None,
) -> Result[NDArray[np.int64]]:
    """Experts on GPUs so that tokens send few rows; `solution` is gpu_of_expert int64[layer, expert], E / P on each GPU.

    The objective is the sum of rows to other GPUs (nodes) over tokens and layers, the bound what placements within the cap send
    at least (in layers that cannot keep it: placements with no more load on a GPU than allowed to this one).

    time_limit: wall seconds; the work is limited beforehand, so that the clock seldom decides. exact: prove small layers, and
    bound the others; with False all time goes into the search, and the bound is what does not fit beside a token's other
    experts. port_weight: what the rows into the busiest GPU (node), times the number of those, count beside the rows of all,
    in the search: 0.3 costs hardly any rows under a cap. wall_limit: seconds after which the clock decides, by default the
    time limit; later, a busy machine changes no answer.

    Where the cap cannot be kept in a layer its busiest GPU has as little load as was found, and of such placements few rows.
    Status INFEASIBLE, with that solution, if it is proven that some layer cannot keep it; otherwise OPTIMAL if proven,
    CANCELLED if `stop` answered True, TIME_LIMIT if the clock ended the work or no placement within the cap was found, and
    FEASIBLE. Same input and seed, same answer, unless the clock decided.
    """
    compile_ahead()
    clock = _Clock(wall_limit or time_limit, stop)
    layers = [Layer(instance, layer, port_weight) for layer in range(instance.layers)]
    in_time = _place(layers, clock, time_limit / len(layers), seed, exact)
    if exact:
        for share in FIRST_BOUND_SHARE, BOUND_SHARE - FIRST_BOUND_SHARE:
            tighten = partial(Layer.tighten, seconds=share * time_limit / len(layers))
            in_time = _of_all(layers, tighten, partial(clock.over, BOUND_CAP)) and in_time
    objective, least = sum(layer.rows for layer in layers), sum(layer.bound for layer in layers)
    status = _status(layers, objective == least, clock.cancelled, in_time)
    options: dict[str, str | int | float | bool] = {"travel": instance.travel, "time_limit": time_limit, "exact": exact}
    options |= {"port_weight": port_weight} | ({} if instance.cap is None else {"cap": instance.cap})
    provenance = Provenance(optimiser="coactivation", options=options, seed=seed, versions=library_versions())
    solution = np.array([layer.place for layer in layers])
    return Result(status, float(objective), float(least), clock.seconds, solution, provenance)


class _Clock:
    """Whether work is to end, and why."""

    def __init__(self, time_limit: float, stop: Stop) -> None:
        self.start, self.time_limit, self.stop, self.cancelled = time.perf_counter(), time_limit, stop, False

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.start

    def over(self, share: float) -> bool:
        """Whether so much of the time is over, or it was asked to stop."""
        self.cancelled = self.cancelled or self.stop()
        return self.cancelled or self.seconds > share * self.time_limit


def _place(layers: Sequence[Layer], clock: _Clock, seconds: float, seed: int, exact: bool) -> bool:
    """Place all layers in their part of so many seconds each; whether all had the time that they wanted."""
    cap = SEARCH_CAP if exact else BOUND_CAP
    seconds *= SEARCH_SHARE if exact else SEARCH_SHARE + BOUND_SHARE
    nodes = NODES_SHARE if layers[0].task.group_size > 1 else 0.0
    in_time = _of_all(layers, partial(Layer.begin, seconds=seconds, exact=exact), partial(clock.over, cap))
    balance = partial(Layer.balance, seconds=BALANCE_SHARE * seconds, seed=seed)
    in_time = _of_all(layers, balance, partial(clock.over, BALANCE_CAP * cap)) and in_time
    # A little of every layer at a time, so that a deadline finds all of them improved.
    for index in range(SEARCHES):
        search = partial(Layer.search, seconds=(1 - nodes) * seconds / SEARCHES, seed=seed + index)
        in_time = _of_all(layers, search, partial(clock.over, (1 - nodes) * cap)) and in_time
    arrange = partial(Layer.arrange_nodes, seconds=nodes * seconds, seed=seed)
    return _of_all(layers, arrange, partial(clock.over, cap)) and in_time


def _status(layers: Sequence[Layer], proven: bool, cancelled: bool, in_time: bool) -> Status:
    kept = all(layer.keeps_cap for layer in layers)
    if any(layer.hopeless for layer in layers):
        return Status.INFEASIBLE
    if proven and kept:
        return Status.OPTIMAL
    if cancelled:
        return Status.CANCELLED
    return Status.FEASIBLE if in_time and kept else Status.TIME_LIMIT


def _of_all(layers: Sequence[Layer], work: Callable[..., None], over: Callable[[], bool]) -> bool:
    """Do it to every layer, on all cores; whether all had the time that they wanted. `over` sets what hurries them."""
    hurry = np.array([over()])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads:
        futures = [threads.submit(work, layer, hurry=hurry) for layer in layers]
        waiting = set(futures)
        while waiting:
            waiting = wait(waiting, POLL).not_done
            if waiting and over():
                hurry[0] = True
    for future in futures:
        future.result()  # raises what the work raised
    return not hurry[0]
