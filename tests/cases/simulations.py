"""Drawn problems with plans for inference, and the timeline of a small pass."""

import numpy as np
from hypothesis import strategies as st

from engine.communication.order import random_order
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem
from engine.simulate.events import EventLog
from engine.simulate.flows import Flows
from engine.simulate.work import Load
from engine.systems.pieces import phased_order
from engine.timeline import Timeline
from tests.cases.launch_plans import plan_with
from tests.strategies import placements, problems


def plan_of(problem: Problem, placement, mode: str) -> Plan:
    """A plan with an exact, a plain or a random one-by-one order."""
    if mode == "sequential":
        traffic = Load(problem, placement).traffic
        dispatch = tuple(random_order(matrix, 2 * layer) for layer, matrix in enumerate(traffic))
        combine = tuple(random_order(matrix.T, 2 * layer + 1) for layer, matrix in enumerate(traffic))
        order = SendOrder(mode=mode, dispatch=dispatch, combine=combine)
    else:
        order = phased_order(Load(problem, placement, problem.travel), mode, lambda: False)
    return plan_with(placement, send_order=order, travel=problem.travel)


@st.composite
def planned(draw, modes=("matched", "shared", "two-tier", "sequential", "concurrent"), **options):
    """A plan and its problem. modes: send orders; options: of `problems`"""
    problem = draw(problems(travelling=draw(st.booleans()), **options))
    sizes = (problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus))
    return plan_of(problem, draw(placements(*sizes)), draw(st.sampled_from(modes))), problem


def coherent(placement: Placement) -> Plan:
    return plan_with(placement, name="coherent", execution="context-coherent")


@st.composite
def coherent_plans(draw):
    """A context-coherent plan and its problem: a pass that ends with an all-gather."""
    problem = draw(problems())
    sizes = (problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus))
    return coherent(draw(placements(*sizes, replicas=False))), problem


def passes(layers: int = 2) -> Timeline:
    """Gate, one send and FFN of so many layers on two GPUs, whose names look like markup."""
    log, now = EventLog(), 0.0
    for layer in range(layers):
        now = log.compute("gate", layer, now, np.array([1.0, 2.0]))
        flows = Flows(np.array([0]), np.array([1]), np.array([8.0]), np.array([0.0]), np.array([3.0]))
        now = log.network("dispatch", layer, now, flows)
        now = log.compute("ffn", layer, now, np.array([4.0, 1.0]))
    return Timeline(log.frame(), ("GPU 0 · <b>A</b>", "GPU 1 · B"), "simulated", "test")
