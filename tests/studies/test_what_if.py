"""A plan after a change: against changes made by hand, by scaling everything, and as more network never hurts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.cluster import Efficiency, contention_points
from engine.compare.contention import contention_curve, most_saved, ordered
from engine.compare.imprecision import imprecision, noisy
from engine.compare.sensitivity import ANEW, changes_of, curve, pace_of, parameters_of, sensitivity
from engine.compare.what_if import Change, changed, is_quick, least, outlook
from engine.costs import CollectiveTimes, Combined, CostProfile, Datasheet, Line, MeasuredTimes, Profiled
from engine.costs.alpha_beta import AlphaBeta
from engine.costs.scaled import Scaled
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.serving.aiconfigurator import choose_operators_of
from engine.serving.sizes import usual_sizes
from engine.serving.step import ServingStep
from engine.simulate import bound_of_plan, simulate
from engine.simulate.serving import Serving
from engine.systems import SYSTEMS, TRAINING, run
from engine.workload import TrafficMatrix
from tests.cases.examples import examples
from tests.cases.plans import plan_of
from tests.cases.problems import small, step_problem
from tests.strategies import cluster_of, make_gpu, make_model, placements, problems

FEW = settings(max_examples=examples(25), deadline=None)
CASES = ("linear", "rcs", "aurora")


@st.composite
def planned(draw) -> tuple[Problem, Plan]:
    problem = draw(problems())
    placement = draw(placements(problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus)))
    return problem, plan_of(placement)


@FEW
@given(planned(), st.sampled_from((0.5, 2.0, 8.0)))
def test_everything_so_many_times_faster_takes_such_a_part_of_the_time(case, factor: float) -> None:
    problem, plan = case
    faster = changed(problem, Change(network=factor, compute=factor, latency=1 / factor))
    assert simulate(plan, faster).total == pytest.approx(simulate(plan, problem).total / factor, rel=1e-9)
    assert outlook(plan, faster).bound == pytest.approx(outlook(plan, problem).bound / factor, rel=1e-9)


@FEW
@given(planned(), st.sampled_from(("network", "compute")))
def test_more_network_or_computation_never_slows_a_plain_all_to_all(case, what: str) -> None:
    """With all sends at once. With orders faster links can hurt: the start-up times then weigh on other sends."""
    problem, plan = case
    before, after = simulate(plan, problem).total, simulate(plan, changed(problem, Change(**{what: 2.0}))).total
    assert before / 2 * (1 - 1e-9) <= after <= before * (1 + 1e-9)


@FEW
@given(planned(), st.sampled_from((0.5, 3.0)))
def test_so_many_tokens_are_the_recording_so_often(case, factor: float) -> None:
    """Against every token copy and byte counted so often by hand."""
    problem, plan = case
    matrix = problem.demand * problem.model.bytes_per_token * factor
    by_hand = replace(problem, workload=TrafficMatrix("often", matrix, problem.model.bytes_per_token))
    assert simulate(plan, changed(problem, Change(tokens=factor))).total == pytest.approx(
        simulate(plan, by_hand).total, rel=1e-9
    )


@pytest.fixture(scope="module", params=CASES)
def solved(request) -> tuple[Problem, Plan]:
    problem = small()
    return problem, run(SYSTEMS[request.param], problem, {}).result.solution


def test_against_a_cluster_and_a_model_changed_by_hand(solved) -> None:
    problem, plan = solved
    faster = cluster_of(
        *(
            card.model_copy(update={"send_bandwidth": 3 * card.send_bandwidth, "receive_bandwidth": 3 * card.receive_bandwidth})
            for card in problem.cluster.gpus
        ),
        latency=5e-5,
    )
    wider = problem.model.model_copy(update={"d_model": 128, "d_ff": 192, "dtype": "fp8"})
    by_hand = make_problem(problem.workload, faster, wider, Datasheet())
    mine = changed(problem, Change(network=3, latency=0.5, width=2, dtype="fp8"))
    assert simulate(plan, mine).total == pytest.approx(simulate(plan, by_hand).total, rel=1e-12)


def test_no_change_is_no_change(solved) -> None:
    problem, plan = solved
    assert simulate(plan, changed(problem, Change())).total == simulate(plan, problem).total
    assert Change().is_none and not Change(noise=0.1).is_none
    assert Change().in_words == "nothing changed"
    assert Change(network=2, noise=0.3, dtype="fp8").in_words == "network 2×, fp8, 30 % traffic noise"
    assert Change(contention=0.05).in_words == "5 % contention"


def test_contention_is_that_of_a_cluster_that_has_it(solved) -> None:
    problem, plan = solved
    points = contention_points(0.2, len(problem.cluster.gpus) - 1)
    cluster = problem.cluster.model_copy(update={"efficiency": Efficiency(fabric=points, links=points)})
    by_hand = replace(problem, cluster=cluster)
    mine = changed(problem, Change(contention=0.2))
    assert simulate(plan, mine).total == pytest.approx(simulate(plan, by_hand).total, rel=1e-12)
    assert bound_of_plan(plan, mine) == bound_of_plan(plan, problem)
    assert "contention 0.2" in mine.cost_source and "ports reach 100 % of their rate with 1 send" in by_hand.cost_source
    assert "however many sends share them (assumed)" in problem.cost_source
    assert least(plan, mine).total <= simulate(plan, mine).total * (1 + 1e-9)
    assert (least(plan, mine).total > least(plan, problem).total) == (plan.send_order.mode == "concurrent")


def test_measured_all_to_alls_contend_too() -> None:
    times = CollectiveTimes(operation="all_to_all", ranks=4, points=((4e3, 2e-3), (4e6, 5.0)))
    measured = Profiled(MeasuredTimes(name="bench", origin="by hand", collectives=(times,)))
    cluster = cluster_of(*(make_gpu() for _ in range(4)))
    cost = Scaled(measured, contention=0.5)
    # Three sends meet at a port, so that bytes take twice as long; the start-up does not.
    start_up = float(measured.all_to_all(cluster, 1.0))
    assert float(cost.all_to_all(cluster, 4e6)) == pytest.approx(start_up + 2 * (5.0 - start_up))


def test_one_gpu_type_changes_only_that() -> None:
    problem = small()
    network = changed(problem, Change(network=2, gpu_type="type-1")).network
    assert (network.send / problem.network.send).tolist() == [1, 2, 1, 2]
    cost = Scaled(Datasheet(), compute=4, gpu_type="type-1")
    cards = problem.cluster.gpus
    for card, factor in zip(cards, (1, 4, 1, 4), strict=True):
        ratio = Datasheet().memory_pass(card, np.array(1e6)) / cost.memory_pass(card, np.array(1e6))
        assert ratio == pytest.approx(factor)
    with pytest.raises(InputError, match="no GPU of the cluster is a H100"):
        changed(problem, Change(gpu_type="H100"))


def test_bytes_that_were_recorded_grow_with_the_numbers_sent() -> None:
    rng = np.random.default_rng(0)
    cluster = cluster_of(*(make_gpu() for _ in range(4)))
    matrix = TrafficMatrix("bytes", rng.uniform(0, 1e4, (2, 4, 4)), 2)
    problem = make_problem(matrix, cluster, make_model(2, 4), Datasheet())
    wide = changed(problem, Change(width=2))
    assert np.allclose(wide.demand, problem.demand)
    assert np.allclose(wide.workload.bytes, 2 * problem.workload.bytes)


def test_what_does_not_fit_is_said() -> None:
    problem = small()
    plan = run(SYSTEMS["linear"], problem, {}).result.solution
    with pytest.raises(InputError, match="of expert weights"):
        outlook(plan, changed(problem, Change(width=400)))
    with pytest.raises(InputError, match="noise: Input should be less than or equal to 1"):
        Change.from_dict({"noise": 2}, "change")


@FEW
@given(planned())
def test_the_least_is_the_bound_and_its_parts(case) -> None:
    problem, plan = case
    quick, whole = least(plan, problem), outlook(plan, problem)
    assert quick.bound == pytest.approx(whole.bound)
    assert quick.bound <= quick.total * (1 + 1e-9) and quick.total <= whole.total * (1 + 1e-9)
    whole_rates = problem.network.direct and not problem.network.contended
    assert not whole_rates or quick.bound == pytest.approx(quick.total)
    for summary in (quick, whole):
        assert sum(summary.parts.values()) == pytest.approx(summary.total)
        assert summary.layers.sum() == pytest.approx(summary.total) and (summary.layers >= 0).all()
        assert summary.bound <= summary.total * (1 + 1e-9)
    assert whole.busiest == (whole.compute + whole.network).argmax()
    assert np.allclose(quick.compute, whole.compute), "without sends on the way computation is the same"
    assert (quick.network <= whole.network * (1 + 1e-9) + 1e-12).all()
    assert is_quick(problem) and not quick.simulated


def test_two_models_change_together() -> None:
    first = small(layers=2)
    problem = make_problem(first.workload, first.cluster, first.model, Datasheet(), (first.workload, first.model))
    plan = run(SYSTEMS["linear"], problem, {}).result.solution
    before, after = (outlook(plan, case) for case in (problem, changed(problem, Change(network=2, compute=2, latency=0.5))))
    assert after.total == pytest.approx(before.total / 2)
    assert sum(after.parts.values()) == pytest.approx(after.total)
    noise = changed(problem, Change(noise=0.5))
    assert not np.allclose(noise.second.demand, problem.second.demand)


def test_a_training_step_changes_in_costs_and_batch() -> None:
    problem = step_problem()
    plan = run(TRAINING["lina"], problem, {}).result.solution
    before = outlook(plan, problem)
    after = outlook(plan, changed(problem, Change(network=2, compute=2, latency=0.5)))
    assert after.total == pytest.approx(before.total / 2, rel=1e-6)
    assert before.layers is None and sum(before.parts.values()) == pytest.approx(before.total)
    assert outlook(plan, changed(problem, Change(tokens=2))).total > before.total
    assert changed(problem, Change(tokens=2)).step.batch == 16
    for change in (Change(width=2), Change(noise=0.5), Change(dtype="fp8")):
        with pytest.raises(InputError, match="of a training step"):
            changed(problem, change)


def test_measured_collectives_scale_their_start_up_and_the_rest_apart() -> None:
    line = Line(alpha=2e-3, beta=1e-9)
    profile = CostProfile(name="p", origin="o", gemm={"type-0": line}, memory={}, all_reduce=line, ranks=4, cores=4)
    cluster, size = cluster_of(*(make_gpu() for _ in range(4))), np.array([0.0, 1e6, 1e7])
    cost = Scaled(Combined(Datasheet(), AlphaBeta(profile)), network_speed=4, latency=0.5)
    assert cost.all_reduce(cluster, size) == pytest.approx([0, 1e-3 + 0.25e-3, 1e-3 + 2.5e-3], rel=1e-5)
    drawn = Scaled(Combined(Datasheet(), Datasheet()), network_speed=4, latency=0.5)
    assert drawn.all_to_all(cluster, size) == pytest.approx(Datasheet().all_to_all(cluster, size) / 4, rel=1e-4)


@FEW
@given(problems(), st.integers(0, 5), st.sampled_from((0.2, 0.75, 1.0)), st.sampled_from(("layers", "experts")))
def test_noise_keeps_what_every_rank_sends(problem: Problem, seed: int, level: float, kind: str) -> None:
    assume(kind == "experts" or problem.workload.layers > 1)
    mixed = noisy(problem, level, seed, kind)
    assert np.allclose(mixed.demand.sum(axis=2), problem.demand.sum(axis=2))
    assert (mixed.demand >= 0).all()
    assert np.allclose(mixed.demand, noisy(problem, level, seed, kind).demand)
    assert noisy(problem, 0.0, seed, kind) is problem
    half, whole = (noisy(problem, share, seed, kind).demand - problem.demand for share in (0.5, 1.0))
    assert np.allclose(2 * half, whole), "the share is a share"


def test_noise_of_other_layers_is_other_layers() -> None:
    problem = small(layers=2)
    mixed = noisy(problem, 1.0, 0, "layers")
    assert np.allclose(mixed.demand, problem.demand[::-1])
    with pytest.raises(InputError, match="has one layer"):
        noisy(small(layers=1), 0.5, 0, "layers")
    with pytest.raises(InputError, match="not between 0 and 1"):
        noisy(problem, 1.5)


def test_sensitivity_is_the_plan_simulated_by_hand() -> None:
    problem = small()
    plan = run(SYSTEMS["aurora"], problem, {}).result.solution
    parameters = parameters_of(problem)
    points = {point.title: point for point in sensitivity(plan, problem, 0.25, parameters)}
    titles = list(points)
    assert titles == [parameter.title for parameter in parameters] and "type-1: network" in titles
    assert titles[:5] == ["network bandwidth", "computation speed", "latency", "tokens", "model width"]
    for title, change in (("network bandwidth", "network"), ("tokens", "tokens")):
        for side, factor in (("less", 0.75), ("more", 1.25)):
            assert getattr(points[title], side) == simulate(plan, changed(problem, Change(**{change: factor}))).total
    assert points["network bandwidth"].less > points["network bandwidth"].more
    assert points["tokens"].less < points["tokens"].more
    assert points["network bandwidth"].reach >= points["type-1: network"].reach
    assert len(list(sensitivity(plan, problem, 0.25, parameters, stop=lambda: True))) == 0
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(InputError, match="not between"):
            list(sensitivity(plan, problem, share, parameters))


def test_of_a_serving_step_sensitivity_and_a_curve_are_of_the_whole_step() -> None:
    problem = small()
    step, sizes = ServingStep(phase="decode", sequences=8, context=100, output=10), usual_sizes(problem.model)
    source, _ = choose_operators_of(None, problem.model, sizes, problem.cluster, step)
    serving = Serving(step, source, sizes)
    plan = run(SYSTEMS["linear"], problem, {}).result.solution
    points = list(curve(problem, "network", [0.5, 1.0, 2.0, 8.0], {"linear": plan}, serving=serving))
    totals = [point.total for point in points]
    assert totals[1] == serving.seconds(plan, problem) != simulate(plan, problem).total
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]
    assert [point.rate for point in points] == [8 / point.total for point in points]
    for kind in dict.fromkeys(gpu.type for gpu in problem.cluster.gpus):
        alone = pace_of(plan, problem, Change(compute=4, gpu_type=kind), serving).seconds
        assert pace_of(plan, problem, Change(compute=4), serving).seconds < alone < totals[1]

    parameters = parameters_of(problem, serving)
    assert [at.title for at in parameters][:4] == ["network bandwidth", "computation speed", "latency", "batch"]
    found = {point.title: point for point in sensitivity(plan, problem, 0.5, parameters, serving=serving)}
    assert found["network bandwidth"].less == totals[0] and found["batch"].less < totals[1] < found["batch"].more
    assert found["batch"].less_rate == 4 / found["batch"].less and found["batch"].more_rate == 12 / found["batch"].more
    orders = ordered(plan, problem, serving=serving)
    still, *crowded = contention_curve(problem, orders, (0.0, 0.5, 1.0), serving=serving)
    assert still.seconds["concurrent"] == serving.seconds(orders["concurrent"], problem)
    assert all(point.seconds["concurrent"] >= still.seconds["concurrent"] for point in crowded)
    assert most_saved(plan, problem, still.seconds["concurrent"], serving) >= still.saved / still.seconds["concurrent"]
    (exact, *_) = imprecision(problem, (0.0,), 1, options={"aurora": {"time_limit": 5.0}}, serving=serving)
    aurora = run(SYSTEMS["aurora"], problem, {"time_limit": 5.0}).result.solution
    assert exact.system == "aurora" and exact.total == serving.seconds(aurora, problem)

    with pytest.raises(InputError, match="of a serving step network"):
        list(curve(problem, "width", [2.0], {"linear": plan}, serving=serving))
    for bad in (Change(width=2), Change(dtype="fp8")):
        with pytest.raises(InputError, match="of a serving step network"):
            pace_of(plan, problem, bad, serving)


def test_a_curve_is_every_value_by_hand() -> None:
    problem = small()
    plans = {name: run(SYSTEMS[name], problem, {}).result.solution for name in ("sjf", "linear")}
    options = {"time_limit": 1.0}
    points = list(curve(problem, "network", [4, 0.5, 4], plans, (SYSTEMS["aurora"], options)))
    assert [(point.series, point.value) for point in points] == [
        (name, value) for value in (0.5, 4) for name in ("sjf", "linear", ANEW)
    ]
    for point in points:
        then = changed(problem, Change(network=point.value))
        by_hand = simulate(plans[point.series], then).total if point.series != ANEW else None
        if by_hand is None:
            assert run(SYSTEMS["aurora"], then, options).result.bound <= point.total
        else:
            assert point.total == by_hand
    wide = list(curve(problem, "width", [1, 900], {"linear": plans["linear"]}, (SYSTEMS["linear"], {})))
    assert [point.total is None for point in wide] == [False, False, True, True], "what does not fit is a gap"
    for values, said in (([], "give 1 to 32"), ([0.0], "greater than 0"), ([2000.0], "less than or equal")):
        with pytest.raises(InputError, match=said):
            changes_of("network", values)
    assert list(curve(problem, "network", [1.0], plans, stop=lambda: True)) == []


def test_sensitivity_of_equal_gpus_without_latency_and_of_a_step() -> None:
    problem = small(mixed=False)
    still = make_problem(problem.workload, cluster_of(*problem.cluster.gpus), problem.model, Datasheet())
    assert [parameter.field for parameter in parameters_of(still)] == ["network", "compute", "tokens", "width"]
    assert [at.title for at in parameters_of(step_problem())] == ["network bandwidth", "computation speed", "latency", "batch"]
