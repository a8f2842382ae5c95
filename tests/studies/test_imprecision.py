"""Noise in the traffic, contention from which ordering pays, and utilisation with one and two models."""

from dataclasses import replace

import numpy as np
import pytest

from app.charts import cluster as charts
from engine import store
from engine.cluster import Efficiency
from engine.compare import contention as contended
from engine.compare.imprecision import ImprecisionPoint, check_levels, contenders_of, gains, imprecision, noisy
from engine.compare.what_if import Change, changed
from engine.costs import Datasheet
from engine.errors import InputError, StoppedError
from engine.plan import Plan, SendOrder, Travel
from engine.problem import Problem, make_problem
from engine.result import Provenance
from engine.simulate import simulate
from engine.simulate.work import work_of, works_of
from engine.systems import SYSTEMS, run
from engine.systems.base import silent
from engine.systems.pieces import best_order, linear_placement
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload
from tests.cases.problems import small, step_problem
from tests.cases.samples import in_nodes
from tests.cases.two_models import pair_of_samples
from tests.oracles.plans import check_plan
from tests.strategies import cluster_of, make_gpu, make_model

BRIEF = {"aurora": {"time_limit": 1.0}}


@pytest.mark.clock
def test_without_noise_every_system_is_itself() -> None:
    problem = small()
    points = list(imprecision(problem, [0.0], seeds=5, options=BRIEF))
    assert [point.system for point in points] == ["aurora", "rga", "rcs", "sjf"], "nothing to draw: one seed"
    for point in points:
        options = BRIEF.get(point.system, {})
        assert point.total == run(SYSTEMS[point.system], problem, options).result.objective


def test_a_point_is_a_plan_from_the_recorded_traffic_on_noisy_one() -> None:
    """Aurora §8.2: the plan is for the first layer's traffic, and other layers' is added to it."""
    problem = small()
    points = list(imprecision(problem, [0.75], seeds=2, noise="experts", options=BRIEF))
    assert len(points) == 8
    for point in points:
        plan = run(SYSTEMS[point.system], problem, BRIEF.get(point.system, {})).result.solution
        assert point.total == simulate(plan, noisy(problem, 0.75, point.seed, "experts")).total


def test_two_models_are_compared_with_random_gpus_and_random_colocation() -> None:
    problem = pair_of_samples(4, 8)
    points = list(imprecision(problem, [0.0, 0.75], seeds=1, noise="layers", options=BRIEF))
    assert [point.system for point in points] == ["aurora", "rga+rec", "rec"] * 2
    plan = run(SYSTEMS["rec"], problem, {"gpus": "random"}).result.solution
    by_system = {point.system: point.total for point in points if point.level}
    assert by_system["rga+rec"] == simulate(plan, noisy(problem, 0.75, 0, "layers")).total
    baseline, first, last = gains(points)
    assert baseline == "rga+rec" and last == by_system["rga+rec"] / by_system["aurora"] and first > 1


COPIED = {"redundant": 1, "algorithm": "eplb"}  # at once, without a proof


def recordings(tokens: int) -> list[Workload]:
    """One recording as a log with padding, as loads, as loads of ranks, and as traffic; few tokens leave pairs without any."""
    rng = np.random.default_rng(4)
    chosen = np.argsort(rng.gumbel(size=(tokens, 3, 8)) - np.arange(8) / 2, axis=2)[:, :, :2].astype(np.int16)
    chosen[rng.random(tokens) < 0.2] = -1
    trace = RoutingTrace("log", chosen, 8)
    of_ranks = ExpertLoad("ranks", trace.load, (1, 2, 3), trace.demand(4).transpose(1, 0, 2))
    matrix = TrafficMatrix("matrix", trace.demand(4) * 128, 128)
    return [trace, replace(of_ranks, by_source=None), of_ranks, matrix]


@pytest.mark.parametrize("tokens", [9, 400])
@pytest.mark.parametrize(
    "travel",
    [None, Travel(unit="gpu"), Travel(unit="node", dispatch="fp8")]
    + [Travel(replicas=rule) for rule in ("nearest-dynamic", "lp")]
    + [Travel(unit=unit, replicas=rule) for unit in ("gpu", "node") for rule in ("fewest", "nearest-static", "fixed")],
    ids=lambda travel: travel.in_words if travel else "plain",
)
def test_next_to_no_noise_is_next_to_no_change_and_what_is_counted_stays_counted(travel, tokens) -> None:
    """Tokens of ranks as in the log, by hand: at level 1 of two layers each has the tokens of the other."""
    cluster = in_nodes(4, 2, 1e7).model_copy(update={"latency": 1e-3, "efficiency": Efficiency(fabric=((1, 1.0), (3, 0.4)))})
    for workload in recordings(tokens):
        problem = make_problem(workload, cluster, make_model(3, 8, 2), Datasheet(), travel=travel, others=(workload,))
        for system in ("linear", "eplb"):
            plan = run(SYSTEMS[system], problem, COPIED if system == "eplb" else {}).result.solution
            before = simulate(plan, problem).total
            for kind in ("layers", "experts"):
                mixed = noisy(problem, 1e-9, 0, kind)
                assert simulate(plan, mixed).total == pytest.approx(before, rel=1e-7)
                assert mixed.others == problem.others and mixed.estimates_rows(travel) == problem.estimates_rows(travel)
    trace = replace(recordings(tokens)[0], experts=recordings(tokens)[0].experts[:, :2])
    problem, turned = (
        make_problem(each, cluster, make_model(2, 8, 2), Datasheet(), travel=travel)
        for each in (trace, replace(trace, experts=trace.experts[:, ::-1]))
    )
    plan = run(SYSTEMS["eplb"], problem, COPIED).result.solution
    assert simulate(plan, noisy(problem, 1.0)).total == pytest.approx(simulate(plan, turned).total, rel=1e-7)
    rows, own, other = (works_of(plan, each)[0].dispatch for each in (noisy(problem, 0.25), problem, turned))
    assert np.allclose(rows, 0.75 * own + 0.25 * other, rtol=1e-6), "rows are those of all tokens, in their shares"


def test_a_gain_needs_two_levels() -> None:
    points = [ImprecisionPoint("aurora", 0.0, 0, 1.0), ImprecisionPoint("rga", 0.0, 0, 2.0)]
    assert gains(points) is None and gains([]) is None
    more = [ImprecisionPoint("aurora", 0.5, seed, 1.0) for seed in range(3)]
    more += [ImprecisionPoint("rga", 0.5, seed, total) for seed, total in enumerate((1.2, 1.5, 9.0))]
    assert gains(points + more) == ("rga", 2.0, 1.5)


def test_what_cannot_be_studied() -> None:
    problem = small()
    assert check_levels([0.5, 0, 0.5], 1) == [0, 0.5]
    for levels, seeds, said in (
        ([], 1, "give 1 to"),
        ([1.5], 1, "between 0 and 1"),
        ([0.5], 0, "0 draws"),
        (np.linspace(0, 1, 40), 1, "not 40"),
    ):
        with pytest.raises(InputError, match=said):
            check_levels(levels, seeds)
    with pytest.raises(InputError, match="training step"):
        contenders_of(step_problem())
    assert list(imprecision(problem, [0.5], stop=lambda: True)) == []


GPUS, SIZE = 6, 1e5


def even(latency: float, link: float | None = None) -> tuple[Problem, Plan]:
    """Every GPU of rate 1e6 bytes/s has 1e5 bytes for every other one; one layer."""
    cluster = cluster_of(*(make_gpu(send=1e6),) * GPUS, latency=latency)
    if link:
        cluster = in_nodes(GPUS, 3, link).model_copy(update={"latency": latency})
    matrix = TrafficMatrix("even", np.full((1, GPUS, GPUS), SIZE), 1)
    problem = make_problem(matrix, cluster, make_model(1, GPUS), Datasheet())
    placement = linear_placement(problem)
    plan = Plan(name="even", placement=placement, send_order=SendOrder(mode="concurrent"), provenance=Provenance(optimiser=""))
    return problem, plan


def test_where_it_pays_is_where_start_ups_weigh_as_much_as_contention():
    # Five phases of a start-up and 0.1 s against one start-up and 0.5 s, (1 + 4 c) times as long under contention c.
    latency = 0.01
    problem, plan = even(latency)
    plans = contended.ordered(plan, problem)
    assert set(plans) == {"concurrent", "matched"}
    points = list(contended.contention_curve(problem, plans))
    assert [point.contention for point in points] == list(contended.CONTENTIONS)
    base = points[0].seconds["concurrent"] - 0.5 * 2 - 2 * latency
    for point in points:
        assert point.seconds["concurrent"] - base == pytest.approx(2 * (latency + 0.5 * (1 + 4 * point.contention)))
        assert point.seconds["matched"] - base == pytest.approx(2 * 5 * (latency + 0.1))
    assert contended.pays_from(points, problem, plans) == pytest.approx(4 * latency / 0.5 / 4, rel=0.01)


def test_best_chooses_all_at_once_before_that_and_an_order_behind_it():
    problem, plan = even(0.01)
    for contention, mode in ((0.0, "concurrent"), (0.015, "concurrent"), (0.025, "matched"), (0.5, "matched")):
        then = changed(problem, Change(contention=contention))
        best = best_order(plan.placement, then, "best", lambda: False, silent)
        assert best.plan.send_order.mode == mode
        assert check_plan(best.plan, then) == pytest.approx(best.timeline.total)


def test_relays_are_tried_where_there_are_links_and_orders_are_legal():
    problem, plan = even(1e-3, link=1e7)
    plans = contended.ordered(plan, problem)
    assert set(plans) == {"concurrent", "matched", "two-tier"}
    then = changed(problem, Change(contention=0.3))
    point = contended.seconds_at(0.3, problem, plans)
    for mode, trial in plans.items():
        assert check_plan(trial, then) == pytest.approx(point.seconds[mode])
    assert point.saved == point.seconds["concurrent"] - min(point.seconds[mode] for mode in ("matched", "two-tier"))


def test_most_saved_is_a_bound_and_an_order_that_never_pays_says_so():
    problem, plan = even(1.0)  # start-ups so long that nothing can make up for them
    plans = contended.ordered(plan, problem)
    points = list(contended.contention_curve(problem, plans))
    assert contended.pays_from(points, problem, plans) is None
    saved = contended.most_saved(plan, problem, points[0].seconds["concurrent"])
    assert saved == pytest.approx(0, abs=1e-9)
    problem_that_pays, plan = even(0.01)
    then = contended.seconds_at(0.5, problem_that_pays, contended.ordered(plan, problem_that_pays))
    most = contended.most_saved(plan, problem_that_pays, then.seconds["concurrent"]) * then.seconds["concurrent"]
    assert 0 < then.saved <= most == pytest.approx(2 * 0.5 * 4 * 0.5)
    problem, plan = even(0.0)  # orders that pay as things are pay from there
    plans = contended.ordered(plan, problem)
    points = list(contended.contention_curve(problem, plans, (0.0, 0.5)))
    assert points[0].saved == pytest.approx(0, abs=1e-9) and contended.pays_from(points, problem, plans) < 1e-2


def test_two_models_and_plans_that_follow_tokens_have_orders_too():
    first = small(layers=2)
    pair = make_problem(first.workload, first.cluster, first.model, Datasheet(), (first.workload, first.model))
    both = run(SYSTEMS["linear"], pair, {}).result.solution
    plans = contended.ordered(both, pair)
    assert plans["matched"].send_order_b.mode == "matched" and set(plans) == {"concurrent", "matched"}
    assert simulate(plans["matched"], pair).total > 0
    coherent = run(SYSTEMS["exflow"], first, {"time_limit": 1.0}).result.solution
    assert simulate(contended.ordered(coherent, first)["matched"], first).total > 0


def test_orders_are_of_the_rows_that_travel():
    problem, plan = even(1e-3, link=1e7)
    travelling = plan.model_copy(update={"travel": Travel(unit="node")})
    plans = contended.ordered(travelling, problem)
    assert all(trial.travel == travelling.travel for trial in plans.values())
    moved = sum(sum(schedule.bytes) for schedule in plans["matched"].send_order.dispatch)
    (work,) = works_of(travelling, problem)
    assert moved == pytest.approx(sum(matrix.sum() - np.trace(matrix) for matrix in work.dispatch))


def test_a_training_step_and_a_stop_are_answered():
    problem, plan = even(0.0)
    with pytest.raises(InputError, match="orders of sends are of inference"):
        contended.ordered(plan, step_problem())
    with pytest.raises(StoppedError):
        contended.ordered(plan, problem, lambda: True)


@pytest.fixture(scope="module")
def pair() -> Problem:
    return pair_of_samples(8, 16)


@pytest.fixture(scope="module")
def colocated(pair) -> Plan:
    return run(SYSTEMS["aurora"], pair, {"time_limit": 1.0}).result.solution


@pytest.mark.parametrize("system", ["aurora", "packing", "linear"])
def test_busy_times_are_those_of_the_work_and_add_up_when_colocated(system, pair, colocated):
    problem, plan = pair, colocated if system == "aurora" else run(SYSTEMS[system], pair).result.solution
    first, second, both = contended.exclusive_and_colocated(plan, problem).parts
    moved = problem.as_planned(plan)
    for alone, placement, side in ((first, plan.placement, moved), (second, plan.placement_b, moved.second)):
        work = work_of(placement, side)
        busy = sum(seconds.sum(axis=0) for seconds in work.compute.values())
        np.testing.assert_allclose(alone.gpu * alone.seconds, busy)
    together = first.gpu * first.seconds + second.gpu * second.seconds
    np.testing.assert_allclose(both.gpu * both.seconds, together)
    assert both.seconds == simulate(plan, problem).total and 0 < both.mean <= 1


def test_colocating_uses_the_gpus_more_than_either_model_alone(pair, colocated):
    first, second, both = contended.exclusive_and_colocated(colocated, pair).parts
    assert both.mean > max(first.mean, second.mean)
    figure = charts.exclusive_and_colocated((first, second, both))
    bars, dots = figure.data
    np.testing.assert_allclose(bars.x, [100 * part.mean for part in (first, second, both)])
    assert len(set(bars.y)) == 3 and len(dots.x) == 24
    assert figure.layout.title.text.startswith("Colocated, GPUs compute ")


def test_it_is_kept_as_it_is():
    parts = tuple(contended.Utilisation(name, np.array([0.25, 1 / 3]), 1e-3) for name in ("first", "second", "both"))
    store.save_figures(contended.AloneAndTogether(parts), "0" * 64)
    kept = store.load_figures(contended.AloneAndTogether, "0" * 64).parts
    assert [(part.served, part.gpu.tolist(), part.seconds) for part in kept] == [
        (part.served, part.gpu.tolist(), part.seconds) for part in parts
    ]


def test_one_model_cannot_be_colocated():
    problem = pair_of_samples()
    alone = make_problem(problem.workload, problem.cluster, problem.model, problem.cost)
    travelling = replace(
        problem, travel=Travel(dispatch="fp32"), second=replace(problem.second, travel=Travel(dispatch="fp32"))
    )
    plan = run(SYSTEMS["linear"], travelling).result.solution
    first = contended.exclusive_and_colocated(plan, travelling).parts[0]
    own = plan.with_parts(placement_b=None, send_order_b=None)
    assert first.seconds == simulate(own, replace(travelling, second=None)).total, "tokens travel alone as they do together"
    with pytest.raises(InputError, match="open the second"):
        contended.exclusive_and_colocated(run(SYSTEMS["linear"], problem).result.solution, alone)
