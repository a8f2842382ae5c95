"""Sweeps: every point is what its system makes of that value, and stopping keeps what was run."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from engine.compare.sensitivity import operators_of
from engine.compare.sweep import SweepPoint, best_of, check_values, forward_seconds, sweep, trials_of
from engine.costs import Datasheet
from engine.errors import InputError
from engine.problem import Problem, make_problem
from engine.simulate import simulate
from engine.systems import TRAINING, run
from engine.systems.training.baselines import fixed_degree
from engine.timeline import Timeline
from engine.training import TrainingStep, balanced_load
from tests.strategies import cluster_of, make_gpu, make_model

STEP = TrainingStep(batch=8, sequence_length=16, heads=4, dense_d_ff=96)
SETTINGS = {
    "micro_op": {"packing": "off"},
    "degree": {"bucket_mb": 0.01},
    "range": {"parts": [2, 4], "weight_gradients": "greedy"},
}
VALUES = {"micro_op": [0.1, 0.2, 1.0], "degree": [1, 2, 5], "range": [0, 4, 8, 1000]}


def problem_of(layers: int = 2, vocabulary: int = 2000, **sizes) -> Problem:
    """A small step on four GPUs whose computation, transfers and start-up times weigh about the same."""
    model = make_model(layers, 4, 1, **sizes)
    cluster = cluster_of(*(make_gpu() for _ in range(4)), latency=1e-4)
    return make_problem(
        balanced_load(model), cluster, model, Datasheet(), step=STEP.model_copy(update={"vocabulary": vocabulary})
    )


def points_of(problem: Problem, kind: str, values=None, settings=None) -> list[SweepPoint]:
    trials = trials_of(problem, kind, VALUES[kind] if values is None else values, settings or SETTINGS[kind])
    return [point for point, _ in sweep(problem, trials)]


def test_micro_op_points_are_lina_and_its_other_policies() -> None:
    problem = problem_of()
    points = points_of(problem, "micro_op")
    wanted = [{"packing": "off", "micro_op_mb": value} for value in VALUES["micro_op"]]
    wanted += [{"packing": "off", "policy": policy, "pipelining": False} for policy in ("fair", "naive", "fixed")]
    for point, options in zip(points, wanted, strict=True):
        alone = run(TRAINING["lina"], problem, options).result
        assert (point.total, point.bound, point.plan_id) == (alone.objective, alone.bound, alone.solution.id)
    assert [point.value for point in points] == [*VALUES["micro_op"], None, None, None]


def test_range_points_are_lancet_as_if_run_alone() -> None:
    """Weight gradients are moved once for all points, which must not show in any of them."""
    problem = problem_of()
    points = points_of(problem, "range")
    wanted = [
        {"weight_gradients": "greedy", "max_parts": parts} | ({"max_range": value} if value else {"partition": False})
        for parts in (2, 4)
        for value in VALUES["range"]
    ]
    for point, options in zip(points, wanted, strict=False):
        alone = run(TRAINING["lancet"], problem, options).result
        assert (point.total, point.plan_id) == (alone.objective, alone.solution.id)
        assert alone.solution.overlap.under
    for point, name in zip(points[-2:], ("raf", "tutel"), strict=True):
        assert point.total == run(TRAINING[name], problem).result.objective


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


def test_the_orders_differ_where_they_can() -> None:
    points = points_of(problem_of(d_ff=400), "degree", [1, 5])
    by = {(point.series, point.value): point.total for point in points}
    assert by["dispatch first", 1] == by["interleaved", 1]
    assert by["dispatch first", 5] < by["interleaved", 5]


@pytest.mark.parametrize("kind", VALUES)
def test_the_figures_of_every_point_agree_with_each_other(kind: str) -> None:
    problem = problem_of()
    trials = trials_of(problem, kind, VALUES[kind], SETTINGS[kind])
    forward = {operator.name for operator in operators_of(problem).of_phase("forward")}
    for point, outcome in sweep(problem, trials):
        assert sum(point.decomposition.values()) == pytest.approx(point.total)
        assert 0 < point.bound <= point.total
        assert 0 < point.forward < point.total
        events, labels = outcome.timeline.events, outcome.timeline.labels
        ends = [end for end, label in zip(events["end"], labels, strict=True) if label.split(" · ")[0] in forward]
        assert point.forward == max(ends)
        after = [start for start, label in zip(events["start"], labels, strict=True) if label.startswith("dx.loss")]
        assert all(start >= point.forward for start in after)
        assert SweepPoint(**point.to_dict()) == point
        plan = outcome.result.solution
        assert plan.id == point.plan_id and simulate(plan, problem).total == point.total
        assert point.experts_per_gpu == max(len(slots) for slots in plan.placement.experts_of_gpu[0])


def test_the_forward_pass_ends_with_its_last_part() -> None:
    events = pd.DataFrame({"start": 0.0, "end": [1.0, 2.0, 5.0, 4.0], "bytes": 0.0})
    labels = ("head", "loss · part 1 of 2", "dx.loss", "loss · part 2 of 2")
    timeline = Timeline(events, ("GPU 0",), "simulated", "test", labels)
    assert forward_seconds(timeline, frozenset(("head", "loss"))) == 4.0


def test_a_longer_range_and_more_parts_never_hurt_the_forward_pass() -> None:
    """Lancet chooses among all ranges up to the limit; estimated and simulated forward pass are the same time."""
    points = points_of(problem_of(), "range", [0, 4, 5, 6, 8, 12, 1000])
    few, many = ([point.forward for point in points if point.series == f"up to {parts} parts"] for parts in (2, 4))
    for series in (few, many):
        assert (np.diff(series) <= 1e-12).all()
        assert series[-1] < series[0]
    assert (np.array(many) <= np.array(few) + 1e-12).all()


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


@pytest.mark.parametrize("kind", VALUES)
def test_a_stopped_sweep_keeps_the_points_before(kind: str) -> None:
    problem = problem_of()
    trials = trials_of(problem, kind, VALUES[kind], SETTINGS[kind])
    whole = [point for point, _ in sweep(problem, trials)]
    assert len(whole) == len(trials)
    kept: list[SweepPoint] = []
    for point, _ in sweep(problem, trials, stop=lambda: len(kept) == 2):
        kept.append(point)
    assert kept == whole[:2]


def test_a_point_that_was_stopped_midway_is_not_one() -> None:
    """Lancet answers a stop with what it has by then, which is not the plan of that value."""
    problem, calls = problem_of(), []

    def stop() -> bool:
        calls.append(None)
        return len(calls) > 2  # past the first look round, inside the first system

    assert list(sweep(problem, trials_of(problem, "range", [1000], SETTINGS["range"]), stop)) == []
    assert len(calls) > 2


def test_progress_goes_up_and_names_the_best_so_far() -> None:
    reports = []
    problem = problem_of()
    points = [
        point
        for point, _ in sweep(
            problem,
            trials_of(problem, "degree", [1, 2, 3], SETTINGS["degree"]),
            report=lambda *what: reports.append(what),
        )
    ]
    assert [done for done, *_ in reports] == [step / len(points) for step in range(len(points))]
    assert reports[0][1] == "dispatch first: 1" and reports[0][2] is None
    assert reports[-1][2] == min(point.total for point in points[:-1])


def test_plans_of_a_sweep_are_told_apart_by_name() -> None:
    problem = problem_of()
    names = [trial.system.title for trial in trials_of(problem, "range", VALUES["range"], SETTINGS["range"])]
    assert "Lancet, 8 operators, 4 parts" in names
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


def test_values_are_sorted_and_each_taken_once() -> None:
    assert check_values("degree", [4, 1, 4.0, 2]) == [1, 2, 4]


def test_too_many_micro_ops_are_refused_before_they_stall() -> None:
    problem = problem_of(layers=1, vocabulary=10_000_000, d_model=256)
    with pytest.raises(InputError, match=r"cut the gradients into [\d,]+; give sizes"):
        trials_of(problem, "micro_op", [0.1], {})
    assert trials_of(problem, "micro_op", [10], {})


def test_settings_and_problems_that_cannot_be() -> None:
    problem = problem_of()
    with pytest.raises(InputError, match="what is open is inference"):
        trials_of(replace(problem, step=None), "degree", [1], {})
    with pytest.raises(InputError, match="not one of dispatch-first, interleaved"):
        trials_of(problem, "degree", [1], {"orders": ["random"]})
    with pytest.raises(InputError, match="1 is not between 2 and 16"):
        trials_of(problem, "range", [4], {"parts": [1]})
    with pytest.raises(InputError, match="no option 'bukket'"):
        list(sweep(problem, trials_of(problem, "micro_op", [30], {"bukket": 1})))
