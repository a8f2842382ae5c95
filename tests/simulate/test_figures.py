"""Figures of whole plans: the proof from bounds, notes and claim, the cost of a migration, and the balance of load."""

import json
from dataclasses import replace

import numpy as np
import pytest

from engine.compare.figures import Metrics, balance_of, metrics, migration, proof_of_plan
from engine.costs import Datasheet
from engine.plan import Claim, Placement, Plan, SendOrder
from engine.problem import make_problem
from engine.result import Status
from engine.systems import SYSTEMS, run
from engine.training import TrainingStep
from engine.units import share
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.examples import tried
from tests.cases.launch_plans import plan_with
from tests.cases.samples import chained, problem_of
from tests.cases.simulations import coherent, planned
from tests.cases.training import plan_of as step_plan
from tests.strategies import cluster_of, make_gpu, make_model

ANY, OWN = "placement and order", "order"


@pytest.fixture(scope="module")
def problem():
    cluster = cluster_of(*[make_gpu(send=1e6)] * 4).model_copy(update={"latency": 0.0})
    return problem_of(chained(1, 400, 2, 8, 0.6), cluster)


@pytest.fixture(scope="module")
def linear(problem) -> tuple[Plan, Metrics]:
    plan = run(SYSTEMS["linear"], problem).result.solution
    return plan, metrics(plan, problem)


def claimed(plan: Plan, scope: str, status: Status = Status.FEASIBLE) -> Plan:
    return plan.model_copy(update={"claim": Claim(status=status, objective=1.0, bound=1.0, scope=scope)})


@pytest.mark.parametrize(
    ("scope", "total", "order_bound", "bound", "proven"),
    [
        (ANY, 1.0, 1.0, 1.0, "placement and order"),
        (ANY, 1.0, 0.9, 1.0, "placement and order"),  # the claim is the closer bound
        (ANY, 1.2, 1.0, 1.0, "placement"),
        (ANY, 1.2, 1.2, 1.0, "order"),
        (ANY, 1.2, 1.1, 1.0, "nothing"),
        (ANY, 1.2, 1.2, None, "order"),  # made from other inputs: the order is proven here all the same
        (ANY, 1.2, 1.1, None, "nothing"),
        (OWN, 1.0, 1.0, 1.0, "order"),
        (OWN, 1.2, 1.0, 1.0, "nothing"),  # a bound of its own placement proves no placement
        (ANY, 1.0 + 1e-9, 1.0, 1.0, "placement and order"),
    ],
)
def test_of_the_choices_whose_bound_is_met(linear, scope, total, order_bound, bound, proven) -> None:
    plan, figures = linear
    gaps = {"order_gap": total / order_bound - 1, "gap": None if bound is None else total / bound - 1}
    own = replace(figures, total=total, order_bound=order_bound, bound=bound, **gaps)
    proof = proof_of_plan(claimed(plan, scope), own)
    assert proof.proven == proof.in_words == proven
    assert proof.order_gap == pytest.approx(total / order_bound - 1)
    assert proof.gap == (own.gap if scope == ANY else None)
    assert ("Not proven optimal" in proof.sentence) is (proven == "nothing")
    above = proof.gap is not None and proven in ("order", "nothing")
    assert ("above what no placement can beat" in proof.sentence) is above
    assert (share(proof.order_gap) in proof.sentence) is (proven in ("placement", "nothing"))


def test_an_order_that_nearly_meets_its_bound_one_without_a_claim_a_schedule_and_one_that_was_stopped(linear) -> None:
    plan, figures = linear
    for gap, words in ((5e-4, "order within 0.1 %"), (2e-3, "nothing")):
        near = replace(figures, total=1 + gap, order_bound=1.0, order_gap=gap, bound=None, gap=None)
        assert proof_of_plan(plan, near).proven == "nothing" and proof_of_plan(plan, near).in_words == words
    met = replace(figures, order_bound=figures.total, order_gap=0.0, bound=None, gap=None)
    assert proof_of_plan(plan.model_copy(update={"claim": None}), met).proven == "order"
    step = replace(met, decomposition={}, bound=figures.total, gap=0.0)
    assert proof_of_plan(claimed(plan, "schedule"), step).proven == "schedule"
    stopped = proof_of_plan(claimed(plan, OWN, Status.CANCELLED), replace(figures, order_bound=0.0))
    assert stopped.in_words == "nothing (stopped early)" and "stopped early" in stopped.sentence


def test_a_placement_that_auroras_notes_call_proven_is_proven_with_its_order(problem) -> None:
    outcome = run(SYSTEMS["aurora"], problem)
    layers = problem.workload.layers
    assert f"in {layers} of {layers} layers" in outcome.notes["placement"].value
    plan = outcome.result.solution
    assert proof_of_plan(plan, metrics(plan, problem)).proven == "placement and order"


def test_the_fewest_hops_prove_nothing_of_the_time(problem) -> None:
    outcome = run(SYSTEMS["exflow"], problem, {"execution": "vanilla"})
    assert outcome.notes["cost of hops"].value == "proven optimal"
    plan = outcome.result.solution
    figures = metrics(plan, problem)
    assert proof_of_plan(plan, figures).proven in ("order", "nothing")
    assert proof_of_plan(plan, figures).gap is None
    assert np.isclose(proof_of_plan(plan, figures).order_gap, figures.order_gap)


def test_a_migration_is_free_pays_back_or_never_pays():
    pair = problem_of(ExpertLoad("loads", np.ones((2, 4)), (0, 1)), cluster_of(*[make_gpu(send=1e9)] * 2))
    now, swapped, turned = (
        Placement.from_gpu_of_expert(np.array([first, [0, 0, 1, 1]]), 2, (0, 1))
        for first in ([0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0])
    )
    cost = migration(now, now, pair, 1.0, 1.0)
    assert (cost.copies, cost.bytes, cost.seconds, cost.steps) == (0, 0, 0, 0)
    cost, size = migration(now, swapped, pair, 1.0, 0.75), pair.model.bytes_per_expert
    assert cost.copies == 2 and cost.bytes == 2 * size
    assert cost.seconds == pytest.approx(size / 1e9 + pair.cluster.latency)  # both directions at once
    assert cost.bound <= cost.seconds and cost.steps == pytest.approx(cost.seconds / 0.25)
    assert migration(now, turned, pair, 1.0, 1.5).steps == float("inf")


TWO = cluster_of(make_gpu(), make_gpu())
TOKENS = np.array([[0, 2], [0, 2], [0, 3], [1, 0], [2, 1], [0, 1], [0, 0], [0, 0]], dtype=np.int16)
"""Top-1 experts [token, layer]: six, one, one and none of layer 0; three, two, two and one of layer 1."""
TRACE = RoutingTrace("by hand", TOKENS[:, :, None], 4)


def plan_of(*experts_of_gpu: tuple, **parts) -> Plan:
    """Plan with a placement for every layer, and concurrent sends."""
    return plan_with(Placement(experts=4, experts_of_gpu=experts_of_gpu, model_layers=(1, 2)), **parts)


def balance_problem(**more):
    return make_problem(TRACE, TWO, make_model(2, 4), Datasheet(), **more)


BLOCKS = ((0, 1), (2, 3))


def test_two_models_one_after_the_other():
    second = RoutingTrace("second", TOKENS[::-1, ::-1, None].copy(), 4)
    pair = balance_problem(second=(second, make_model(2, 4)))
    blocks = Placement(experts=4, experts_of_gpu=(BLOCKS, BLOCKS), model_layers=(1, 2))
    plan = plan_of(BLOCKS, BLOCKS, placement_b=blocks, send_order_b=SendOrder(mode="concurrent"))
    assert balance_of(plan, pair).overload == pytest.approx((7 / 4, 5 / 4, 5 / 4, 7 / 4))
    assert metrics(plan, pair).balance == balance_of(plan, pair)


def test_a_training_step_with_recorded_routing():
    """The shares of the recording, where capacity drops nothing."""
    step = TrainingStep(
        batch=8, sequence_length=16, heads=4, dense_d_ff=96, vocabulary=50, routing="recorded", capacity_factor=0
    )
    of_step = balance_problem(step=step)
    plan = step_plan(of_step, placement=plan_of(BLOCKS, BLOCKS).placement)
    assert balance_of(plan, of_step) == metrics(plan, of_step).balance
    assert balance_of(plan, of_step).overload == pytest.approx((7 / 4, 5 / 4))


@tried(25, planned(modes=("concurrent",)))
def test_the_same_with_and_without_a_simulation(case):
    plan, drawn = case
    figures = metrics(plan, drawn)
    assert figures.balance == balance_of(plan, drawn)
    load = np.einsum("le,leg->lg", drawn.workload.load, plan.placement.share)
    loaded = load.max(axis=1) > 0
    factors = np.array(figures.balance.overload)
    if plan.placement.single or drawn.travel is None or drawn.travel.replicas is None:
        assert factors[loaded] == pytest.approx((load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-300))[loaded])
    assert (factors[~loaded] == 1).all()
    written = json.loads(json.dumps(figures.to_dict()))
    assert written["balancedness"] == figures.balancedness
    assert len(written["balance"]["overload_factor_of_layer"]) == len(load)
    if plan.placement.single:
        carried = coherent(plan.placement)
        assert metrics(carried, drawn).balance == balance_of(carried, drawn)
