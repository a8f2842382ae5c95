"""How even plans are on a problem: by hand for every goal, and the same with and without a simulation."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compare.figures import balance_of, metrics
from engine.costs import Datasheet
from engine.plan import Placement, Plan, SendOrder
from engine.problem import make_problem
from engine.result import Provenance
from engine.training import TrainingStep
from engine.workload import RoutingTrace
from tests.cases.examples import examples
from tests.simulate.test_training import plan_of as step_plan
from tests.simulate.test_work import coherent
from tests.strategies import cluster_of, make_gpu, make_model, placements, problems

TWO = cluster_of(make_gpu(), make_gpu())
TOKENS = np.array([[0, 2], [0, 2], [0, 3], [1, 0], [2, 1], [0, 1], [0, 0], [0, 0]], dtype=np.int16)
"""Top-1 experts [token, layer]: six, one, one and none of layer 0; three, two, two and one of layer 1."""
TRACE = RoutingTrace("by hand", TOKENS[:, :, None], 4)


def plan_of(*experts_of_gpu: tuple, **parts) -> Plan:
    """Plan with a placement for every layer, and concurrent sends."""
    placement = Placement(experts=4, experts_of_gpu=experts_of_gpu, model_layers=(1, 2))
    order, origin = SendOrder(mode="concurrent"), Provenance(optimiser="test")
    return Plan(name="by hand", placement=placement, send_order=order, provenance=origin, **parts)


def problem(**more):
    return make_problem(TRACE, TWO, make_model(2, 4), Datasheet(), **more)


BLOCKS = ((0, 1), (2, 3))


def test_one_copy_of_every_expert():
    """Seven and one token in layer 0, five and three in layer 1; of 4 each, were they even."""
    plan = plan_of(BLOCKS, BLOCKS)
    assert balance_of(plan, problem()).overload == pytest.approx((7 / 4, 5 / 4))
    figures = metrics(plan, problem())
    assert figures.balance.mean == 1.5 and figures.balancedness == pytest.approx((4 / 7 + 4 / 5) / 2)


def test_replicas_share_the_tokens_of_their_expert():
    """Three of expert 0's six tokens go to the second GPU: four each. In layer 1 six and two."""
    plan = plan_of(((0, 1), (0, 2, 3)), ((0, 1, 3), (2,)))
    assert balance_of(plan, problem()).overload == pytest.approx((1, 6 / 4))


def test_two_models_one_after_the_other():
    second = RoutingTrace("second", TOKENS[::-1, ::-1, None].copy(), 4)
    pair = problem(second=(second, make_model(2, 4)))
    blocks = Placement(experts=4, experts_of_gpu=(BLOCKS, BLOCKS), model_layers=(1, 2))
    plan = plan_of(BLOCKS, BLOCKS, placement_b=blocks, send_order_b=SendOrder(mode="concurrent"))
    assert balance_of(plan, pair).overload == pytest.approx((7 / 4, 5 / 4, 5 / 4, 7 / 4))
    assert metrics(plan, pair).balance == balance_of(plan, pair)


def test_a_training_step_with_recorded_routing():
    """The shares of the recording, where capacity drops nothing."""
    step = TrainingStep(
        batch=8, sequence_length=16, heads=4, dense_d_ff=96, vocabulary=50, routing="recorded", capacity_factor=0
    )
    of_step = problem(step=step)
    plan = step_plan(of_step, placement=plan_of(BLOCKS, BLOCKS).placement)
    assert balance_of(plan, of_step) == metrics(plan, of_step).balance
    assert balance_of(plan, of_step).overload == pytest.approx((7 / 4, 5 / 4))


def test_a_recording_of_nothing_is_even():
    nothing = RoutingTrace("padding", np.full((3, 2, 1), -1, dtype=np.int16), 4)
    balance = balance_of(plan_of(BLOCKS, BLOCKS), make_problem(nothing, TWO, make_model(2, 4), Datasheet()))
    assert balance.overload == (1, 1) and balance.imbalance_ratio == 0


@st.composite
def planned(draw):
    drawn = draw(problems())
    layers, experts, gpus = drawn.workload.layers, drawn.workload.num_experts, len(drawn.cluster.gpus)
    placement = draw(placements(layers, experts, gpus))
    order, origin = SendOrder(mode="concurrent"), Provenance(optimiser="test")
    return Plan(name="drawn", placement=placement, send_order=order, provenance=origin), drawn


@given(planned())
@settings(max_examples=examples(25), deadline=None)
def test_the_same_with_and_without_a_simulation(case):
    plan, drawn = case
    figures = metrics(plan, drawn)
    assert figures.balance == balance_of(plan, drawn)
    load = np.einsum("le,leg->lg", drawn.workload.load, plan.placement.share)
    loaded = load.max(axis=1) > 0
    factors = np.array(figures.balance.overload)
    assert factors[loaded] == pytest.approx((load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-300))[loaded])
    assert (factors[~loaded] == 1).all()
    written = json.loads(json.dumps(figures.to_dict()))
    assert written["balancedness"] == figures.balancedness and len(
        written["balance"]["overload_factor_of_layer"]
    ) == len(load)
    if plan.placement.single:
        carried = coherent(plan.placement)
        assert metrics(carried, drawn).balance == balance_of(carried, drawn)
