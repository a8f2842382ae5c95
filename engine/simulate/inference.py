"""Inference of one model's MoE layers: gate → dispatch → expert FFN → combine → aggregate, layer after layer.

Every step waits until all GPUs have finished the one before: computation and communication of one model do not overlap
(Aurora §2.2, equation 3). Two colocated models interleave, see `engine.simulate.colocated`. Only the MoE part of a layer
is simulated; attention, dense layers and shared experts cost every plan the same and are left out, but for the longer
attention over carried tokens (see `engine.simulate.work`).

The all-to-alls of a pass run on all cores: none depends on another's flows, only its start on the other's end.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import pandas as pd

from engine.costs.scaled import Scaled
from engine.errors import InputError
from engine.network import Network
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem
from engine.result import Advance, Stop, never, unwatched
from engine.simulate.events import EventLog, too_many
from engine.simulate.flows import EXACT_SENDS, Flows, all_to_all
from engine.simulate.scheduler import options_of
from engine.simulate.two_phase import two_phase
from engine.simulate.work import Load, Work, loads_of
from engine.timeline import Timeline
from engine.workload import RoutingTrace

POLL = 0.05
"""Seconds between two calls of `stop`."""
AHEAD = 2
"""Limit of all-to-alls for each core that are simulated ahead; at 1024 GPUs the flows of one take 40 MB."""


def exchanges(
    work: Work, order: SendOrder, network: Network, layers: Sequence[int], stop: Stop
) -> Iterator[tuple[Flows, Flows]]:
    """Dispatch and combine of each of these layers, in turn. Once `stop` answers True the rest is simulated in a hurry (see
    `all_to_all`), all-to-alls under way included; raises StoppedError for a sequential order of that size."""
    # If both directions are alike, an all-to-all takes the same time in reverse, send by send.
    start_up = np.where(network.linked, network.link_latency[:, None], network.latency)
    alike = np.array_equal(network.send, network.receive) and np.array_equal(start_up, start_up.T)
    mirrored = order.mode == "concurrent" and network.measured is None and alike
    hurry = np.zeros(1, dtype=bool)

    def of_layer(layer: int) -> tuple[Flows, Flows]:
        there, back = work.dispatch[layer], work.combine[layer]
        schedules = (None, None) if order.mode == "concurrent" else (order.dispatch[layer], order.combine[layer])
        dispatch = all_to_all(order.mode, schedules[0], there, work.carrying(network, "dispatch", layer), hurry)
        if mirrored and np.array_equal(there.T, back):
            return dispatch, dispatch.mirrored()
        return dispatch, all_to_all(order.mode, schedules[1], back, work.carrying(network, "combine", layer), hurry)

    if network.gpus * (network.gpus - 1) <= EXACT_SENDS:  # a thread would cost more than it saves
        yield from map(of_layer, layers)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def awaited(future: Future[tuple[Flows, Flows]]) -> tuple[Flows, Flows]:
        while True:
            hurry[:] = stop()  # also if the log of the sends is slower than the simulation
            if wait([future], POLL).done:
                return future.result()

    with ThreadPoolExecutor(cores) as threads:
        begun: deque[Future[tuple[Flows, Flows]]] = deque()
        for layer in layers:
            begun.append(threads.submit(of_layer, layer))
            if len(begun) > AHEAD * cores:
                yield awaited(begun.popleft())
        while begun:
            yield awaited(begun.popleft())


def simulate_inference(plan: Plan, loads: tuple[Load, ...], stop: Stop = never, advance: Advance = unwatched) -> Timeline:
    """The predicted timeline of a plan for one model. loads: see `loads_of`"""
    work, problem = loads[0].work, loads[0].problem
    log = EventLog(problem.network, too_many(work.dispatch, work.combine))
    log_model(log, work, plan.send_order, problem.network, range(len(work.dispatch)), stop=stop, advance=advance)
    return log.timeline(problem, plan.travel)


def simulate_reaction(plan: Plan, problem: Problem, stop: Stop = never, advance: Advance = unwatched) -> Timeline:
    """The predicted timeline of a plan whose scheduler hosts experts anew for every batch: the median batch of the second half
    of the recording, the scheduler having learnt from the first. As other plans have the whole recording as one batch, each
    batch stands for as many tokens. Waiting is a gap before a layer's dispatch.

    Raises InputError where the recording cannot be scheduled so, see `two_phase`.
    """
    reaction, trace = plan.reaction, problem.workload
    if not isinstance(trace, RoutingTrace):
        raise InputError(f"{trace.name}: {plan.name} follows tokens from layer to layer; it needs a routing log")
    profile, served = trace.halves()
    size = min(reaction.batch, served.tokens)
    options = options_of(reaction, trace.k, size, copies=trace.tokens / size)
    alone = replace(problem, workload=served, others=(), in_use=None)
    result = two_phase(alone, profile, options, stop, lambda done: advance(done / 2))
    middle = int(result.inference_seconds("lina").argsort(kind="stable")[(result.batches - 1) // 2])
    part = served.part(np.arange(middle * size, (middle + 1) * size))
    batch = replace(alone, workload=part, cost=Scaled(problem.cost, tokens=options.copies))
    hosted = Placement(
        experts=trace.num_experts, experts_of_gpu=result.hostings[middle], model_layers=plan.placement.model_layers
    )
    still = plan.with_parts(placement=hosted, reaction=None)
    timeline = simulate_inference(still, loads_of(still, batch), stop, lambda done: advance(0.5 + done / 2))
    waited = np.cumsum(result.schemes["lina"].waiting[middle])
    layer = timeline.events["layer"].to_numpy()
    first = np.searchsorted(plan.placement.model_layers, layer) if layer.max(initial=0) >= trace.layers else layer
    late = np.where(timeline.events["kind"] == "gate", np.append(0.0, waited)[first], waited[first])
    events = timeline.events.assign(start=timeline.events["start"] + late, end=timeline.events["end"] + late)
    return replace(timeline, events=events, cost_source=problem.cost_source)


def sends_of_inference(plan: Plan, loads: tuple[Load, ...], before: Timeline, first: int, last: int) -> pd.DataFrame:
    """The events of layers first … last with every send, columns as in `Timeline.events`.

    loads: see `loads_of`
    before: the layers before them
    """
    log, network = EventLog(), loads[0].problem.network
    log_model(log, loads[0].work, plan.send_order, network, range(first, last + 1), before.total)
    return log.frame()


def log_model(
    log: EventLog,
    work: Work,
    order: SendOrder,
    network: Network,
    layers: range,
    now: float = 0.0,
    stop: Stop = never,
    advance: Advance = unwatched,
) -> None:
    """Log these layers of one model's pass, which start at `now` seconds."""

    def gather(kind: str, layer: int, traffic: np.ndarray, passes: int = 1) -> float:
        flows = all_to_all("concurrent", None, traffic, network, np.array([stop()]))
        return log.network(kind, layer, now, flows if passes == 1 else flows.shared(passes))

    for layer, (dispatch, combine) in zip(layers, exchanges(work, order, network, layers, stop), strict=True):
        if layer == 0 and work.prompt_gather is not None:
            now = gather("prompt_gather", layer, work.prompt_gather, work.passes)
        if "attention" in work.compute:
            now = log.compute("attention", layer, now, work.compute["attention"][layer])
        now = log.compute("gate", layer, now, work.compute["gate"][layer])
        now = log.network("dispatch", layer, now, dispatch)
        now = log.compute("ffn", layer, now, work.compute["ffn"][layer])
        now = log.network("combine", layer, now, combine)
        now = log.compute("aggregate", layer, now, work.compute["aggregate"][layer])
        if layer == len(work.dispatch) - 1 and work.gather is not None:
            gather("all_gather", layer, work.gather)
        advance((layer + 1 - layers.start) / len(layers))


def bound_of_work(work: Work, network: Network, relayed: bool = False) -> np.ndarray:
    """float64[layer]: seconds below which no send order can bring this work: the steps' own maxima, with every all-to-all at
    the time of its busiest port and one start-up. All-gathers count to the first and last layer.

    relayed: True if GPUs of a node may send for each other (two-tier orders), so that its ports count together; else every byte
        goes straight to its receiver
    """
    return least_of_work(work, network, Network.relayed_bound if relayed else Network.bound)


def least_of_work(work: Work, network: Network, bound: Callable[[Network, np.ndarray], float]) -> np.ndarray:
    """float64[layer]: seconds below which this work cannot be brought.

    bound: seconds that no all-to-all (float64[src, dst] bytes) on a network can undercut
    """
    seconds = sum(step.max(axis=1) for step in work.compute.values())
    seconds = seconds + sum(bounds_of_exchanges(work, network, kind, bound) for kind in ("dispatch", "combine"))
    for layer, traffic, passes in ((0, work.prompt_gather, work.passes), (-1, work.gather, 1)):
        if traffic is not None:
            seconds[layer] += network.bound(traffic) / passes
    return seconds


def bounds_of_exchanges(
    work: Work, network: Network, exchange: str, bound: Callable[[Network, np.ndarray], float]
) -> np.ndarray:
    """float64[layer]: seconds that every dispatch or combine takes at the least, see `least_of_work`."""
    return np.array([bound(*carried) for carried in work.carried(network, exchange)])


def bound_of_inference(plan: Plan, loads: tuple[Load, ...], first: int, last: int, straight: bool = False) -> float:
    """Seconds below which no send order can bring the placement and execution of a plan for one model in layers first …
    last, both included, with any relays.

    straight: no order without relays, unless the plan's own has some
    """
    work, network = loads[0].work.stretch(first, last), loads[0].problem.network
    return float(bound_of_work(work, network, not straight or plan.send_order.mode == "two-tier").sum())
