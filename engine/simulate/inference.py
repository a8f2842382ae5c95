"""Inference of one model's MoE layers: gate → dispatch → expert FFN → combine → aggregate, layer after layer.

Every step waits until all GPUs have finished the one before: computation and communication of one model do not overlap
(Aurora §2.2, equation 3). Two colocated models interleave, see `engine.simulate.colocated`. Only the MoE part of a layer
is simulated; attention, dense layers and shared experts cost every plan the same and are left out.
"""

import numpy as np
import pandas as pd

from engine.network import Network
from engine.plan import Plan, SendOrder
from engine.problem import Problem
from engine.result import Advance, Stop, never, unwatched
from engine.simulate.events import EventLog, too_many
from engine.simulate.exchanges import exchanges
from engine.simulate.flows import all_to_all
from engine.simulate.work import Work, work_of
from engine.timeline import Timeline


def simulate_inference(plan: Plan, problem: Problem, stop: Stop = never, advance: Advance = unwatched) -> Timeline:
    """The predicted timeline of a plan for one model, which must fit the problem."""
    work = work_of(plan.placement, problem, plan.execution)
    log = EventLog(too_many(work.dispatch, work.combine))
    log_model(log, work, plan.send_order, problem.network, range(len(work.dispatch)), stop=stop, advance=advance)
    return log.timeline(problem)


def sends_of_inference(plan: Plan, problem: Problem, before: Timeline, first: int, last: int) -> pd.DataFrame:
    """The events of layers first … last with every send, columns as in `Timeline.events`. before: the layers before them."""
    work, log = work_of(plan.placement, problem, plan.execution), EventLog()
    log_model(log, work, plan.send_order, problem.network, range(first, last + 1), before.total)
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
    for layer, (dispatch, combine) in zip(layers, exchanges(work, order, network, layers, stop), strict=True):
        now = log.compute("gate", layer, now, work.compute["gate"][layer])
        now = log.network("dispatch", layer, now, dispatch)
        now = log.compute("ffn", layer, now, work.compute["ffn"][layer])
        now = log.network("combine", layer, now, combine)
        now = log.compute("aggregate", layer, now, work.compute["aggregate"][layer])
        if layer == len(work.dispatch) - 1 and work.gather is not None:
            gather = all_to_all("concurrent", None, work.gather, network, np.array([stop()]))
            log.network("all_gather", layer, now, gather)
        advance((layer + 1 - layers.start) / len(layers))


def bound_of_work(work: Work, network: Network, relayed: bool = False) -> np.ndarray:
    """float64[layer]: seconds below which no send order can bring this work: the steps' own maxima, with every all-to-all at
    the time of its busiest port and one start-up. The all-gather counts to the last layer. relayed: GPUs of a node may send
    for each other (two-tier orders), so that its ports count together; else every byte goes straight to its receiver."""
    bound = network.relayed_bound if relayed else network.bound
    seconds = sum(step.max(axis=1) for step in work.compute.values())
    seconds = seconds + [bound(out) + bound(back) for out, back in zip(work.dispatch, work.combine, strict=True)]
    if work.gather is not None:
        seconds[-1] += network.bound(work.gather)
    return seconds


def bound_of_inference(plan: Plan, problem: Problem, first: int, last: int, straight: bool = False) -> float:
    """Seconds below which no send order can bring the placement and execution of a plan for one model in layers first …
    last, both included, whoever relays for whom. straight: no order without relays, unless the plan's own has some."""
    work = work_of(plan.placement, problem, plan.execution).stretch(first, last)
    return float(bound_of_work(work, problem.network, not straight or plan.send_order.mode == "two-tier").sum())
