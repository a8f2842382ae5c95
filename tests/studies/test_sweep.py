"""Sweeps and capacity: every point is planned by its system, and sizes are held against all sizes tried by hand."""

from dataclasses import replace

import numpy as np
import pytest

from engine.catalogue import cluster_presets
from engine.cluster import Cluster, Efficiency, Node
from engine.compare.capacity import CapacityPoint, capacity, fitted, grown, ladder, most_gpus, parts_of, smallest, why_slower
from engine.compare.sensitivity import operators_of
from engine.compare.sweep import SweepPoint, best_of, check_values, sweep, trials_of
from engine.costs import Datasheet
from engine.errors import InputError
from engine.plan import Travel
from engine.problem import Problem, make_problem
from engine.result import Result
from engine.simulate import simulate
from engine.systems import SYSTEMS, TRAINING, run
from engine.systems.training.baselines import fixed_degree
from engine.training import TrainingStep, balanced_load
from engine.workload import RoutingTrace, TrafficMatrix
from tests.cases.problems import step_problem
from tests.strategies import cluster_of, make_gpu, make_model

STEP = TrainingStep(batch=8, sequence_length=16, heads=4, dense_d_ff=96)
SETTINGS = {
    "micro_op": {"packing": "off"},
    "degree": {"bucket_mb": 0.01},
    "range": {"parts": [2, 4], "weight_gradients": "greedy"},
}
VALUES = {"micro_op": [0.1, 0.2, 1.0], "degree": [1, 2, 5], "range": [0, 4, 8, 1000]}


def problem_of(layers: int = 2, vocabulary: int = 2000, **sizes) -> Problem:
    """A small step on four GPUs with computation, transfers and start-up times of about the same weight."""
    model = make_model(layers, 4, 1, **sizes)
    cluster = cluster_of(*(make_gpu() for _ in range(4)), latency=1e-4)
    return make_problem(
        balanced_load(model), cluster, model, Datasheet(), step=STEP.model_copy(update={"vocabulary": vocabulary})
    )


def points_of(problem: Problem, kind: str, values=None, settings=None) -> list[SweepPoint]:
    trials = trials_of(problem, kind, VALUES[kind] if values is None else values, settings or SETTINGS[kind])
    return [point for point, _ in sweep(problem, trials)]


def alone(system: str, **options) -> Result:
    return run(TRAINING[system], problem_of(), options).result


def test_points_are_their_systems_as_if_run_alone() -> None:
    """Weight gradients are moved once for all points of Lancet, which must not show in any of them."""
    wanted = [alone("lina", packing="off", micro_op_mb=value) for value in VALUES["micro_op"]]
    wanted += [alone("lina", packing="off", policy=policy, pipelining=False) for policy in ("fair", "naive", "fixed")]
    points = points_of(problem_of(), "micro_op")
    assert [point.value for point in points] == [*VALUES["micro_op"], None, None, None]
    for parts in (2, 4):
        for value in VALUES["range"]:
            cut = {"max_range": value} if value else {"partition": False}
            wanted.append(alone("lancet", weight_gradients="greedy", max_parts=parts, **cut))
            assert wanted[-1].solution.overlap.under
    points += points_of(problem_of(), "range")
    for point, result in zip(points[:-2], wanted, strict=True):
        assert (point.total, point.bound, point.plan_id) == (result.objective, result.bound, result.solution.id)
    assert [point.total for point in points[-2:]] == [alone("raf").objective, alone("tutel").objective]


@pytest.mark.parametrize("order", ["dispatch-first", "interleaved"])
def test_degree_points_are_the_fixed_degree_in_their_order(order: str) -> None:
    problem = problem_of(d_ff=400)
    trials = trials_of(problem, "degree", VALUES["degree"], {"orders": [order], "bucket_mb": 0.01})
    swept = list(sweep(problem, trials))
    for (point, outcome), value in zip(swept, VALUES["degree"], strict=False):
        draft = fixed_degree(problem, value, "fair", 1e4)
        if value > 1:
            draft = replace(draft, pipeline=draft.pipeline.model_copy(update={"order": order}))
        plan = draft.plan("by hand", outcome.result.provenance)
        assert point.total == simulate(plan, problem).total
        assert plan.pipeline == outcome.result.solution.pipeline
    own = run(TRAINING["pipemoe"], problem, {"bucket_mb": 0.01, "max_degree": 5}).result.objective
    assert swept[-1][0].total == own and swept[-1][0].value is None
    points = points_of(problem, "degree", [1, 5])
    by = {(point.series, point.value): point.total for point in points}
    assert by["dispatch first", 1] == by["interleaved", 1]
    assert by["dispatch first", 5] < by["interleaved", 5], "they differ where they can"


@pytest.mark.parametrize("kind", VALUES)
def test_the_figures_of_every_point_agree_with_each_other_and_a_stopped_sweep_keeps_the_points_before(kind: str) -> None:
    problem = problem_of()
    trials = trials_of(problem, kind, VALUES[kind], SETTINGS[kind])
    forward = {operator.name for operator in operators_of(problem).of_phase("forward")}
    whole = list(sweep(problem, trials))
    kept: list[SweepPoint] = []
    for point, _ in sweep(problem, trials, stop=lambda: len(kept) == 2):
        kept.append(point)
    assert len(whole) == len(trials) and kept == [point for point, _ in whole[:2]]
    for point, outcome in whole:
        assert sum(point.decomposition.values()) == pytest.approx(point.total)
        assert 0 < point.bound <= point.total
        assert 0 < point.forward < point.total
        events, labels = outcome.timeline.events, outcome.timeline.labels
        ends = [end for end, label in zip(events["end"], labels, strict=True) if label.split(" · ")[0] in forward]
        assert point.forward == max(ends)
        after = [start for start, label in zip(events["start"], labels, strict=True) if label.startswith("dx.loss")]
        assert all(start >= point.forward for start in after)
        plan = outcome.result.solution
        assert plan.id == point.plan_id and simulate(plan, problem).total == point.total
        assert point.experts_per_gpu == max(len(slots) for slots in plan.placement.experts_of_gpu[0])


def test_smaller_micro_ops_are_more_and_shorter() -> None:
    sizes = [0.1, 0.15, 0.3, 1.0]
    points = points_of(problem_of(), "micro_op", sizes, {"pipelining": False, "packing": "off"})[: len(sizes)]
    pieces, longest = [point.pieces for point in points], [point.longest for point in points]
    assert pieces == sorted(pieces, reverse=True) and pieces[0] > pieces[-1]
    assert longest == sorted(longest) and longest[0] < longest[-1]


def test_the_best_point_is_no_reference_and_the_first_among_equals() -> None:
    def point(value, total, forward=1.0):
        return SweepPoint("one", value, total, 1.0, forward, {}, 1, 1.0, 1, "id")

    points = [point(1, 3.0, 0.5), point(2, 2.0), point(3, 2.0), point(None, 1.0)]
    assert best_of(points).value == 2
    assert best_of(points, "forward").value == 1
    assert best_of([point(None, 1.0)]) is None


def test_a_point_that_was_stopped_midway_is_not_one() -> None:
    """Lancet answers a stop with its best plan so far, which is not the plan of that value."""
    problem, calls = problem_of(), []

    def stop() -> bool:
        calls.append(None)
        return len(calls) > 2  # past the first look round, inside the first system

    assert list(sweep(problem, trials_of(problem, "range", [1000], SETTINGS["range"]), stop)) == []
    assert len(calls) > 2


def test_progress_goes_up_and_names_the_best_so_far() -> None:
    reports, problem = [], problem_of()
    trials = trials_of(problem, "degree", [1, 2, 3], SETTINGS["degree"])
    points = [point for point, _ in sweep(problem, trials, report=lambda *what: reports.append(what))]
    assert [done for done, *_ in reports] == [step / len(points) for step in range(len(points))]
    assert reports[0][1] == "dispatch first: 1" and reports[0][2] is None
    assert reports[-1][2] == min(point.total for point in points[:-1])
    names = [trial.system.title for trial in trials_of(problem, "range", VALUES["range"], SETTINGS["range"])]
    assert "Lancet, 8 operators, 4 parts" in names, "plans are told apart by name"
    names = [trial.system.title for trial in trials_of(problem, "micro_op", [0.1, 30], {})]
    assert names[:2] == ["Lina, 0.1 MB micro-ops", "Lina, 30 MB micro-ops"]


@pytest.mark.parametrize(
    "kind, values, said",
    [
        ("micro_op", [], "give at least one value"),
        ("degree", [0], "0 is not between 1 and 16"),
        ("degree", [17], "17 is not between"),
        ("degree", [2.5], "2.5 is not a whole number"),
        ("micro_op", [0.0], "0 is not between 0.1 and 10,000"),
        ("micro_op", [float("nan")], "nan is not between"),
        ("micro_op", [float("inf")], "inf is not between"),
        ("range", [-1], "-1 is not between 0"),
        ("range", range(100), "100 values are too many"),
    ],
)
def test_values_that_cannot_be_swept(kind: str, values, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_values(kind, values)


def test_values_are_sorted_and_each_taken_once_and_too_many_micro_ops_are_refused_before_they_stall() -> None:
    assert check_values("degree", [4, 1, 4.0, 2]) == [1, 2, 4]
    problem = problem_of(layers=1, vocabulary=10_000_000, d_model=256)
    with pytest.raises(InputError, match=r"cut the gradients into [\d,]+; give sizes"):
        trials_of(problem, "micro_op", [0.1], {})
    assert trials_of(problem, "micro_op", [10], {})


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("degree", None, "what is open is inference"),
        ("degree", {"orders": ["random"]}, "not one of dispatch-first, interleaved"),
        ("range", {"parts": [1]}, "1 is not between 2 and 16"),
        ("micro_op", {"bukket": 1}, "no option 'bukket'"),
    ],
)
def test_settings_and_problems_that_cannot_be(kind, settings, said) -> None:
    problem = problem_of() if settings else replace(problem_of(), step=None)
    with pytest.raises(InputError, match=said):
        list(sweep(problem, trials_of(problem, kind, [4], settings)))


def two_nodes(memory: float = 1e9, per_node: int = 1) -> Problem:
    nodes = (
        Node(name="one", gpus=(make_gpu(memory=memory),) * per_node),
        Node(name="two", gpus=(make_gpu(1, send=5e5, memory=memory),) * per_node),
    )
    rng = np.random.default_rng(1)
    experts = rng.zipf(1.5, (300, 2, 1)).clip(1, 6).astype(np.int16) - 1
    trace = RoutingTrace("six", experts, 6, source_rank=rng.integers(0, 2, 300).astype(np.int32))
    return make_problem(trace, Cluster(name="two", nodes=nodes, latency=2e-4), make_model(2, 6, d_ff=800), Datasheet())


def first_part() -> tuple[Node, ...]:
    return next(iter(parts_of(two_nodes().cluster).values()))


def by_hand(problem: Problem, part, most: int) -> list[float]:
    return [
        run(SYSTEMS["linear"], fitted(problem, grown(problem.cluster, part, count)), {}).result.objective
        for count in range(1, most + 1)
    ]


@pytest.mark.parametrize("kind", range(3))
def test_the_smallest_size_is_that_of_trying_all(kind: int) -> None:
    problem = two_nodes()
    part = list(parts_of(problem.cluster).values())[kind]
    times = by_hand(problem, part, 8 // len(part))
    for target in sorted({*times, 0.9 * min(times), 1.1 * max(times), float(np.median(times))}):
        points = list(capacity(problem, part, target, range(1, len(times) + 1), "linear"))
        first = next((place for place, seconds in enumerate(times) if seconds <= target), None)
        point = smallest(points, target)
        assert (point.parts if point else None) == (None if first is None else first + 1)
        assert [point.total for point in points] == times
        assert all(point.gpus == point.parts * sum(len(node.gpus) for node in part) for point in points)


@pytest.mark.parametrize(
    ("smallest_that_meets", "between"), [(1, [1]), (2, [1]), (3, [3, 4]), (5, [3, 4]), (6, [6, 7]), (8, [6, 7]), (9, [])]
)
def test_sizes_between_are_tried_until_the_smallest_is_known(monkeypatch, smallest_that_meets, between) -> None:
    def point_of_size(common, index, stop, report) -> CapacityPoint:
        count = common[1][index]
        return CapacityPoint(count, count, 1.0 / count)

    monkeypatch.setattr("engine.compare.capacity._point_of_size", point_of_size)
    target, said = 1.0 / smallest_that_meets, []
    report = lambda done, *rest: said.append(done)  # noqa: E731
    points = list(capacity(two_nodes(), first_part(), target, [8, 2, 5], "linear", report=report))
    assert [point.parts for point in points] == [2, 5, 8, *between]
    best = smallest(points, target)
    assert (best.parts if best else 9) == smallest_that_meets
    assert said == sorted(said) or between, "what is done falls only when more sizes are found to be missing"
    assert all(0 <= done < 1 for done in said)


def test_sizes_span_the_open_clusters() -> None:
    whole = cluster_presets()["hgx-h100-4-nodes"].cluster
    assert [8 * count for count in ladder(whole, whole.nodes[:1])] == [8, 16, 24, 32, 48, 64, 96]
    assert ladder(whole, whole.nodes) == [1, 2, 3] and most_gpus(whole) == 1024
    large = grown(whole, whole.nodes, 12)
    assert max(ladder(large, whole.nodes[:1])) * 8 == most_gpus(large) == 1152


def test_a_size_without_room_is_refused_and_the_search_goes_on() -> None:
    tight = two_nodes(memory=3.4 * two_nodes().model.bytes_per_expert * 2 / 0.9)
    part = next(iter(parts_of(tight.cluster).values()))
    points = list(capacity(tight, part, 1e-9, [1, 2, 3, 4], "linear"))
    assert "do not fit" in points[0].refused and points[0].total is None and points[0].cannot_meet(1.0)
    assert points[1].total is not None and len(points) == 4


def test_copies_are_kept_where_they_are_faster() -> None:
    problem, part = two_nodes(), first_part()
    alone = {point.parts: point for point in capacity(problem, part, 1e-9, [1, 2, 4], "linear")}
    for point in capacity(problem, part, 1e-9, [1, 2, 4], "linear", spare=True):
        slots, here = point.plan.placement.slots, fitted(problem, grown(problem.cluster, part, point.parts))
        assert point.total == simulate(point.plan, here).total <= alone[point.parts].total
        assert (point.spare > 0) == (point.total < alone[point.parts].total) and point.spare == slots[0].sum() - 6
        assert (point.most, point.mean) == (slots.max(), slots.mean())
        assert sum(point.seconds.values()) == pytest.approx(point.total)
    assert any(point.spare for point in capacity(problem, part, 1e-9, [4], "linear", spare=True)), "six experts on four GPUs"


def test_a_slower_size_has_the_reason_in_words() -> None:
    def point(gpus: int, dispatch: float, ffn: float, most: int, mean: float, skew: float) -> CapacityPoint:
        spent = {"gate": 0.5, "dispatch": dispatch / 2, "combine": dispatch / 2, "ffn": ffn}
        return CapacityPoint(gpus, gpus, sum(spent.values()), seconds=spent, most=most, mean=mean, skew=skew)

    small, large = point(24, 4.0, 4.0, 11, 32 / 3, 1.1), point(32, 7.1, 2.8, 8, 8.0, 1.2)
    assert why_slower(large, [small, large]) == (
        "1.9 s slower than 24 GPUs: all-to-alls 3.1 s more; expert FFNs 1.2 s less; "
        "the busiest GPU computes 1.2× the mean, 1.1× before"
    )
    uneven = point(48, 4.0, 5.0, 6, 16 / 3, 1.0)
    assert why_slower(uneven, [small, uneven]).endswith(
        "expert FFNs 1 s more; experts divide unevenly, 6 on the fullest GPU for 5.33 in the mean"
    )
    assert why_slower(small, [small, large]) == "" == why_slower(CapacityPoint(40, 40, refused="no room"), [small])


def test_a_bound_says_what_is_certain() -> None:
    points = list(capacity(two_nodes(), first_part(), 1e-9, [1, 2, 3], "aurora", {"time_limit": 1.0}))
    assert all(point.bound <= point.total and point.cannot_meet(0.99 * point.bound) for point in points)
    assert not any(point.cannot_meet(point.total) for point in points)
    order_only = CapacityPoint(1, 1, 2.0, 1.5, "order")
    assert not order_only.cannot_meet(1.0) and order_only.meets(2.0)


def test_a_larger_cluster_keeps_all_that_is_open() -> None:
    problem = two_nodes(per_node=2)
    other = replace(problem.workload, name="other", experts=5 - problem.workload.experts)
    in_use = run(SYSTEMS["linear"], problem).result.solution.placement
    travel = Travel(unit="node", dispatch="fp8", replicas="nearest-static", ranks_per_node=2)
    opened = replace(problem, others=(other,), in_use=in_use, travel=travel)
    for part, count in ((problem.cluster.nodes, 1), (problem.cluster.nodes, 2), (two_nodes(per_node=3).cluster.nodes, 1)):
        larger = grown(problem.cluster, part, count)
        on, ranks = fitted(opened, larger), len(part[0].gpus)
        assert on.travel == travel.model_copy(update={"ranks_per_node": ranks})
        assert [kept.source_rank for kept in (on.workload, *on.others)] == [None, None]
        assert np.array_equal(on.others[0].experts, other.experts)
        assert on.in_use == (in_use if len(larger.gpus) == 4 else None), "a placement is for as many GPUs as it has"
        by_hand = make_problem(
            *(replace(problem.workload, source_rank=None), larger, problem.model, problem.cost),
            travel=travel.model_copy(update={"ranks_per_node": ranks}),
        )
        (point,) = capacity(opened, part, 1e-9, [count], "linear")
        assert point.total == run(SYSTEMS["linear"], by_hand).result.objective
    pair = make_problem(problem.workload, problem.cluster, problem.model, problem.cost, (other, problem.model), travel=travel)
    assert fitted(pair, problem.cluster).second.travel == travel
    with pytest.raises(InputError, match="bytes is traffic between 4 GPUs"):
        matrix = TrafficMatrix("bytes", np.ones((2, 4, 6)), 128)
        list(capacity(replace(problem, others=(matrix,)), first_part(), 1.0, [1], "linear"))


def test_parts_and_larger_clusters() -> None:
    cluster = two_nodes(per_node=2).cluster
    parts = parts_of(cluster)
    assert list(parts) == ["2 × type-0 (one)", "2 × type-1 (two)", "the whole cluster in steps of 4 GPUs"]
    larger = grown(cluster, parts["the whole cluster in steps of 4 GPUs"], 3)
    assert len(larger.gpus) == 12 and larger.latency == cluster.latency
    crowded = cluster.model_copy(update={"efficiency": Efficiency(fabric=((1, 1.0), (4, 0.5)))})
    assert grown(crowded, crowded.nodes, 2).efficiency == crowded.efficiency and larger.efficiency is None
    assert larger.gpus[:4] == cluster.gpus and len({node.name for node in larger.nodes}) == 6
    doubled = parts_of(larger := grown(cluster, cluster.nodes, 2))
    assert doubled["the same mix in steps of 4 GPUs"] == (larger.nodes[0], larger.nodes[1])
    alike = cluster.model_copy(update={"nodes": (cluster.nodes[0], cluster.nodes[0].model_copy(update={"name": "same"}))})
    assert len(parts_of(alike)) == 1


def test_what_cannot_be_sought() -> None:
    problem, part = two_nodes(), first_part()
    for target, sizes, said in (
        (0.0, [4], "not above 0"),
        (float("nan"), [4], "not above 0"),
        (1.0, [], "at least one number"),
        (1.0, [0, 1], "give between 1"),
        (1.0, [1, 9999], "give between 1"),
    ):
        with pytest.raises(InputError, match=said):
            list(capacity(problem, part, target, sizes, "linear"))
    matrix = TrafficMatrix("bytes", np.ones((2, 2, 6)), 128)
    with pytest.raises(InputError, match="says nothing about more of them"):
        list(capacity(replace(problem, workload=matrix), part, 1.0, [4], "linear"))
    with pytest.raises(InputError, match="training step"):
        fitted(step_problem(), problem.cluster)
    assert list(capacity(problem, part, 1.0, [4], "linear", stop=lambda: True)) == []
