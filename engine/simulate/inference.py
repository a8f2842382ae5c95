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
from engine.simulate.events import EventLog
from engine.simulate.flows import all_to_all
from engine.simulate.work import Work, work_of
from engine.timeline import Timeline


def simulate_inference(plan: Plan, problem: Problem) -> Timeline:
    """The predicted timeline of a plan for one model, which must fit the problem."""
    work = work_of(plan.placement, problem, plan.execution)
    events = events_of_model(work, plan.send_order, problem.network)
    return Timeline(events, problem.cluster.gpu_names, "simulated", problem.cost.source)


def events_of_model(work: Work, order: SendOrder, network: Network) -> pd.DataFrame:
    """The events of one model's pass, columns as in `Timeline.events`."""
    log = EventLog()
    now = 0.0
    scheduled = order.mode != "concurrent"
    layers = len(work.dispatch)
    for layer in range(layers):
        out, back = (order.dispatch[layer], order.combine[layer]) if scheduled else (None, None)
        now = log.compute("gate", layer, now, work.compute["gate"][layer])
        now = log.network("dispatch", layer, now, all_to_all(order.mode, out, work.dispatch[layer], network))
        now = log.compute("ffn", layer, now, work.compute["ffn"][layer])
        now = log.network("combine", layer, now, all_to_all(order.mode, back, work.combine[layer], network))
        now = log.compute("aggregate", layer, now, work.compute["aggregate"][layer])
    if work.gather is not None:
        log.network("all_gather", layers - 1, now, all_to_all("concurrent", None, work.gather, network))
    return log.frame()


def bound_of_work(work: Work, network: Network) -> np.ndarray:
    """float64[layer]: seconds below which no send order can bring this work: the steps' own maxima, with every
    all-to-all at the time of its busiest port (of a node with links its ports together) and one start-up. The all-gather
    counts to the last layer."""
    seconds = sum(step.max(axis=1) for step in work.compute.values())
    seconds = seconds + [
        network.relayed_bound(out) + network.relayed_bound(back)
        for out, back in zip(work.dispatch, work.combine, strict=True)
    ]
    if work.gather is not None:
        seconds[-1] += network.relayed_bound(work.gather)
    return seconds


def bound_of_inference(plan: Plan, problem: Problem, first: int, last: int) -> float:
    """Seconds below which no send order can bring the placement and execution of a plan for one model in layers first …
    last, both included."""
    work = work_of(plan.placement, problem, plan.execution).stretch(first, last)
    return float(bound_of_work(work, problem.network).sum())
