"""Drawn problems with plans for inference."""

from hypothesis import strategies as st

from engine.communication.order import random_order
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem
from engine.simulate.work import Load
from engine.systems.pieces import phased_order
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
