"""From which contention on ordering pays: against closed forms and a scan."""

import numpy as np
import pytest

from engine.compare.contention import (
    CONTENTIONS,
    ContentionPoint,
    contention_curve,
    most_saved,
    ordered,
    pays_from,
    seconds_at,
)
from engine.compare.what_if import Change, changed
from engine.costs import Datasheet
from engine.errors import InputError, StoppedError
from engine.plan import Plan, SendOrder, Travel
from engine.problem import Problem, make_problem
from engine.result import Provenance
from engine.simulate import simulate
from engine.simulate.work import works_of
from engine.systems import SYSTEMS, run
from engine.systems.base import silent
from engine.systems.pieces import best_order, linear_placement
from engine.validate import check_plan
from engine.workload import TrafficMatrix
from tests.strategies import cluster_of, make_gpu, make_model
from tests.studies.test_what_if import small, step_problem
from tests.systems.samples import in_nodes

GPUS, SIZE = 6, 1e5


def even(latency: float, link: float | None = None) -> tuple[Problem, Plan]:
    """Every GPU of rate 1e6 bytes/s has 1e5 bytes for every other one; one layer."""
    cluster = cluster_of(*(make_gpu(send=1e6),) * GPUS, latency=latency)
    if link:
        cluster = in_nodes(GPUS, 3, link).model_copy(update={"latency": latency})
    matrix = TrafficMatrix("even", np.full((1, GPUS, GPUS), SIZE), 1)
    problem = make_problem(matrix, cluster, make_model(1, GPUS), Datasheet())
    placement = linear_placement(problem)
    plan = Plan(
        name="even", placement=placement, send_order=SendOrder(mode="concurrent"), provenance=Provenance(optimiser="")
    )
    return problem, plan


def test_where_it_pays_is_where_start_ups_weigh_as_much_as_contention():
    # Five phases of a start-up and 0.1 s against one start-up and 0.5 s, (1 + 4 c) times as long under contention c.
    latency = 0.01
    problem, plan = even(latency)
    plans = ordered(plan, problem)
    assert set(plans) == {"concurrent", "matched"}
    points = list(contention_curve(problem, plans))
    assert [point.contention for point in points] == list(CONTENTIONS)
    base = points[0].seconds["concurrent"] - 0.5 * 2 - 2 * latency
    for point in points:
        assert point.seconds["concurrent"] - base == pytest.approx(2 * (latency + 0.5 * (1 + 4 * point.contention)))
        assert point.seconds["matched"] - base == pytest.approx(2 * 5 * (latency + 0.1))
    assert pays_from(points, problem, plans) == pytest.approx(4 * latency / 0.5 / 4, rel=0.01)


def test_best_chooses_all_at_once_before_that_and_an_order_behind_it():
    problem, plan = even(0.01)
    for contention, mode in ((0.0, "concurrent"), (0.015, "concurrent"), (0.025, "matched"), (0.5, "matched")):
        then = changed(problem, Change(contention=contention))
        best = best_order(plan.placement, then, "best", lambda: False, silent)
        assert best.order.mode == mode
        assert check_plan(best.plan, then) == pytest.approx(best.timeline.total)


def test_relays_are_tried_where_there_are_links_and_orders_are_legal():
    problem, plan = even(1e-3, link=1e7)
    plans = ordered(plan, problem)
    assert set(plans) == {"concurrent", "matched", "two-tier"}
    then = changed(problem, Change(contention=0.3))
    point = seconds_at(0.3, problem, plans)
    for mode, trial in plans.items():
        assert check_plan(trial, then) == pytest.approx(point.seconds[mode])
    assert point.saved == point.seconds["concurrent"] - min(point.seconds[mode] for mode in ("matched", "two-tier"))


def test_most_saved_is_a_bound_and_an_order_that_never_pays_says_so():
    problem, plan = even(1.0)  # start-ups so long that nothing can make up for them
    plans = ordered(plan, problem)
    points = list(contention_curve(problem, plans))
    assert pays_from(points, problem, plans) is None
    saved = most_saved(plan, problem, points[0].seconds["concurrent"])
    assert saved == pytest.approx(0, abs=1e-9)
    problem_that_pays, plan = even(0.01)
    then = seconds_at(0.5, problem_that_pays, ordered(plan, problem_that_pays))
    most = most_saved(plan, problem_that_pays, then.seconds["concurrent"]) * then.seconds["concurrent"]
    assert 0 < then.saved <= most == pytest.approx(2 * 0.5 * 4 * 0.5)
    assert ContentionPoint(**points[0].to_dict()) == points[0]


def test_orders_that_pay_as_things_are_pay_from_there():
    problem, plan = even(0.0)
    plans = ordered(plan, problem)
    points = list(contention_curve(problem, plans, (0.0, 0.5)))
    assert points[0].saved == pytest.approx(0, abs=1e-9) and pays_from(points, problem, plans) < 1e-2


def test_two_models_and_plans_that_follow_tokens_have_orders_too():
    first = small(layers=2)
    pair = make_problem(first.workload, first.cluster, first.model, Datasheet(), (first.workload, first.model))
    both = run(SYSTEMS["linear"], pair, {}).result.solution
    plans = ordered(both, pair)
    assert plans["matched"].send_order_b.mode == "matched" and set(plans) == {"concurrent", "matched"}
    assert simulate(plans["matched"], pair).total > 0
    coherent = run(SYSTEMS["exflow"], first, {"time_limit": 1.0}).result.solution
    assert simulate(ordered(coherent, first)["matched"], first).total > 0


def test_orders_are_of_the_rows_that_travel():
    problem, plan = even(1e-3, link=1e7)
    travelling = plan.model_copy(update={"travel": Travel(unit="node")})
    plans = ordered(travelling, problem)
    assert all(trial.travel == travelling.travel for trial in plans.values())
    moved = sum(sum(schedule.bytes) for schedule in plans["matched"].send_order.dispatch)
    (work,) = works_of(travelling, problem)
    assert moved == pytest.approx(sum(matrix.sum() - np.trace(matrix) for matrix in work.dispatch))


def test_a_training_step_and_a_stop_are_answered():
    problem = step_problem()
    plan = even(0.0)[1]
    with pytest.raises(InputError, match="orders of sends are of inference"):
        ordered(plan, problem)
    with pytest.raises(StoppedError):
        ordered(plan, even(0.0)[0], lambda: True)
