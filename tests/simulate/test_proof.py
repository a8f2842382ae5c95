"""What is proven of a plan: by bounds that are met or not, and never more than its optimiser's notes and claim say."""

from dataclasses import replace

import numpy as np
import pytest

from engine.compare.figures import Metrics, metrics, proof_of_plan
from engine.plan import Claim, Plan
from engine.result import Status
from engine.systems import SYSTEMS, run
from engine.units import share
from tests.cases.samples import chained, problem_of
from tests.strategies import cluster_of, make_gpu

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
    own = replace(
        figures,
        total=total,
        order_bound=order_bound,
        order_gap=total / order_bound - 1,
        bound=bound,
        gap=None if bound is None else total / bound - 1,
    )
    proof = proof_of_plan(claimed(plan, scope), own)
    assert proof.proven == proof.in_words == proven
    assert proof.order_gap == pytest.approx(total / order_bound - 1)
    assert proof.gap == (own.gap if scope == ANY else None)
    assert ("Not proven optimal" in proof.sentence) is (proven == "nothing")
    assert ("above what no placement can beat" in proof.sentence) is (
        proof.gap is not None and proven in ("order", "nothing")
    )
    assert (share(proof.order_gap) in proof.sentence) is (proven in ("placement", "nothing"))


def test_an_order_that_nearly_meets_its_bound_is_proven_but_for_that(linear) -> None:
    plan, figures = linear
    for gap, words in ((5e-4, "order within 0.1 %"), (2e-3, "nothing")):
        near = replace(figures, total=1 + gap, order_bound=1.0, order_gap=gap, bound=None, gap=None)
        assert proof_of_plan(plan, near).proven == "nothing" and proof_of_plan(plan, near).in_words == words


def test_without_a_claim_the_order_is_proven_all_the_same(linear) -> None:
    plan, figures = linear
    met = replace(figures, order_bound=figures.total, order_gap=0.0, bound=None, gap=None)
    assert proof_of_plan(plan.model_copy(update={"claim": None}), met).proven == "order"


def test_of_a_training_step_it_is_the_schedule(linear) -> None:
    plan, figures = linear
    step = replace(figures, decomposition={}, order_bound=figures.total, order_gap=0.0, bound=figures.total, gap=0.0)
    assert proof_of_plan(claimed(plan, "schedule"), step).proven == "schedule"


def test_who_was_stopped_says_so(linear) -> None:
    plan, figures = linear
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
