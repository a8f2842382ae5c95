"""A plan projected to as many slots on every GPU, and its price."""

import numpy as np
import pytest

from engine.cluster import Cluster, Node
from engine.compare.redundancy import project_evenly
from engine.costs import Datasheet
from engine.errors import InputError
from engine.model import MoEModel
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem, make_problem
from engine.result import Provenance
from engine.simulate import simulate
from engine.workload import ExpertLoad
from tests.strategies import make_gpu

MODEL = MoEModel(name="m", layers=3, dense_layers=(0,), experts=4, experts_per_token=1, d_model=64, d_ff=256)
LOAD = ExpertLoad("loads", np.array([[40.0, 10.0, 30.0, 20.0], [10.0, 10.0, 10.0, 70.0]]), (1, 2))


def problem_with(*memory: float) -> Problem:
    gpus = tuple(make_gpu(memory=size) for size in memory)
    cluster = Cluster(name="c", nodes=(Node(name="n", gpus=gpus),), latency=1e-5)
    return make_problem(LOAD, cluster, MODEL, Datasheet())


def plan_of(*rows, **parts) -> Plan:
    placement = Placement(experts=4, experts_of_gpu=tuple(tuple(map(tuple, row)) for row in rows), model_layers=(1, 2))
    defaults = {"send_order": SendOrder(mode="concurrent"), "provenance": Provenance(optimiser="t")}
    return Plan(name="p", placement=placement, **defaults | parts)


def test_the_fullest_layer_says_how_many_slots_and_the_price_is_simulated():
    problem = problem_with(1e9, 1e9)
    plan = plan_of([[2, 0, 1], [3]], [[0, 1], [3, 2, 0]])
    projection = project_evenly(plan, problem)
    assert projection.slots == 3
    assert projection.plan.placement.slots.tolist() == [[3, 3], [3, 3]]
    assert projection.plan.placement.experts_of_gpu[0][0] == (2, 0, 1)  # what stays keeps its slots
    assert projection.plan.placement.experts_of_gpu[1][1] == (3, 2, 0)
    assert (projection.added, projection.dropped) == (3, 0)
    assert projection.plan.parent == plan.id and projection.plan.name == "p, even"
    assert projection.before.total == simulate(plan, problem).total
    assert projection.after.total == simulate(projection.plan, problem).total
    assert projection.plan.placement.experts_of_gpu[1][0] == (0, 1, 3)  # the busiest expert gets the replica


def test_an_even_plan_stays_as_it_is():
    projection = project_evenly(plan_of([[2, 0], [1, 3]], [[0, 1], [3, 2]]), problem_with(1e9, 1e9))
    assert (projection.slots, projection.added, projection.dropped) == (2, 0, 0)
    assert projection.plan.placement.experts_of_gpu == (((2, 0), (1, 3)), ((0, 1), (3, 2)))
    assert projection.before == projection.after


def test_the_smallest_memory_limits_the_slots():
    """Two layers of three slots fit the first GPU, of two the second; there are 196608 bytes an expert."""
    expert = MODEL.bytes_per_expert
    problem = problem_with(6.5 * expert / 0.9, 4.5 * expert / 0.9)
    projection = project_evenly(plan_of([[2, 0, 1], [3, 0]], [[0, 1, 2], [3, 2]]), problem)
    assert projection.slots == 2
    assert projection.dropped == 2 and projection.added == 0
    with pytest.raises(InputError, match=r"needs 2 experts per layer on every GPU, but .* has memory for 1;"):
        project_evenly(
            plan_of([[2, 0, 1], [3]], [[0, 1, 2], [3]]), problem_with(6.5 * expert / 0.9, 2.5 * expert / 0.9)
        )
