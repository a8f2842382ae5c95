"""Runtimes of systems as said: those that were measured."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from engine import store
from engine.goal import Goal
from engine.jobs import runtimes, tasks
from engine.jobs.protocol import Context, Progress
from engine.jobs.runtimes import Run, Took, estimate, expect, expected, note, noted, run_of, shipped, work_of
from engine.launch.step.sizes import step_flops
from engine.problem import Problem
from engine.serving.sizes import usual_serving, usual_sizes
from engine.store.problems import problem_arguments, save_recordings
from engine.systems import SYSTEMS, TRAINING, run
from tests.benchmarks import bench_runtimes
from tests.cases import steps
from tests.cases.steps import plan_by
from tests.jobs.asking import in_json

SMALLEST = bench_runtimes.SIZES[Goal.INFERENCE][0]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return bench_runtimes.problem_of(Goal.INFERENCE, *SMALLEST)


@pytest.fixture(autouse=True)
def nothing_noted(own_data_folder: Path) -> None:
    """A machine on which nothing has run."""


def test_what_a_page_proposes_was_measured_at_every_size():
    """The benchmark writes this file. A system that it lacks, as a new one, says nothing before its first run."""
    measured: dict[tuple, set] = {}
    for past in shipped():
        measured.setdefault(past.kind, set()).add((past.layers, past.experts, past.gpus))
    for (goal, name, rows, mixed), sizes in measured.items():
        every = TRAINING if goal is Goal.TRAINING else SYSTEMS
        assert goal in every[name].goals
        wanted = bench_runtimes.OF_ROWS if rows else bench_runtimes.OF_MIXED if mixed else bench_runtimes.SIZES[goal]
        assert sizes == set(wanted)
    for goal in Goal:
        every = TRAINING if goal is Goal.TRAINING else SYSTEMS
        for name, system in every.items():
            if goal in system.goals and (system.preselected or system.baseline):
                assert (goal, name, False, False) in measured
                assert goal is not Goal.INFERENCE or (goal, name, False, True) in measured


@pytest.mark.parametrize("name", ["linear", "rcs", "aurora-printed", "lina"])
def test_what_is_said_of_a_quick_system_is_what_it_takes(problem, name):
    """On any machine and under any load, so by an order of magnitude: a table of another unit or size is told."""
    run(SYSTEMS[name], problem)  # loads modules once
    seconds = bench_runtimes.measure(problem, SYSTEMS[name], most=5).seconds
    assert 0.1 < seconds / estimate(problem, SYSTEMS[name], {}) < 10


def test_at_a_measured_size_the_measured_time_is_said_and_larger_problems_take_longer(problem):
    for name in ("aurora", "exflow", "joint"):
        (measured,) = (
            run.seconds
            for run in shipped()
            if run.kind == (Goal.INFERENCE, name, False, False) and (run.layers, run.experts, run.gpus) == SMALLEST
        )
        assert estimate(problem, SYSTEMS[name], {}) == pytest.approx(measured, rel=0.01)
    sizes = ((4, 16, 8), (16, 64, 16), (58, 256, 32), (58, 256, 320))
    for name in ("linear", "aurora-printed", "lina"):
        law = runtimes.law_of((Goal.INFERENCE, name, False, False))
        times = [
            law.seconds(Run(goal="inference", system=name, layers=a, experts=b, gpus=c, seconds=1), None) for a, b, c in sizes
        ]
        assert times == sorted(times) and all(math.isfinite(seconds) for seconds in times)


def test_a_time_limit_cuts_what_is_said(problem):
    exflow = SYSTEMS["exflow"]
    usual = estimate(problem, exflow, {})
    assert usual > 1 and estimate(problem, exflow, {"time_limit": 0.5}) == pytest.approx(0.5)
    assert estimate(problem, exflow, {"time_limit": 1000.0}) == pytest.approx(usual)


def test_runs_of_this_machine_say_how_fast_it_is(problem):
    aurora = SYSTEMS["aurora-printed"]
    before = estimate(problem, aurora, {})
    for factor in (2.0, 3.0, 4.0):
        note(run_of(problem, aurora, {}, factor * before))
    assert estimate(problem, aurora, {}) == pytest.approx(3 * before)
    assert estimate(problem, SYSTEMS["lina"], {}) == pytest.approx(estimate(problem, SYSTEMS["lina"], {}))
    larger = bench_runtimes.problem_of(Goal.INFERENCE, 16, 16, 8)
    assert estimate(larger, aurora, {}) > 3 * before


def test_a_quick_run_that_started_slowly_says_nothing_of_a_large_problem(problem, monkeypatch):
    """The first run of a studio loads libraries: seconds in place of milliseconds."""
    monkeypatch.setattr(bench_runtimes, "RECIPE", replace(bench_runtimes.RECIPE, tokens=64))  # its size is what counts
    aurora, large = SYSTEMS["aurora"], bench_runtimes.problem_of(Goal.INFERENCE, 58, 256, 32)
    usual = estimate(large, aurora, {})
    note(run_of(problem, aurora, {}, 8.0))
    assert estimate(problem, aurora, {}) == pytest.approx(8.0) and estimate(large, aurora, {}) == usual
    note(run_of(large, aurora, {}, 2 * usual))
    assert estimate(large, aurora, {}) == pytest.approx(2 * usual)


def test_runs_of_other_machines_and_torn_lines_do_not_count_and_notes_do_not_grow_without_end(problem, monkeypatch):
    linear = SYSTEMS["linear"]
    before = estimate(problem, linear, {})
    path = store.data_folder() / runtimes.NOTES
    elsewhere = run_of(problem, linear, {}, 100.0).model_copy(update={"machine": "64 × another"})
    path.write_text(f'{elsewhere.to_json()}\n{{"goal": "infer\n\x00\n[]\n')
    assert noted() == () and estimate(problem, linear, {}) == before
    note(run_of(problem, linear, {}, 1.0))
    assert len(noted()) == 1
    monkeypatch.setattr(runtimes, "MOST_NOTES", 2000)
    monkeypatch.setattr("engine.files.TAIL", 1000)
    for seconds in range(1, 40):
        note(run_of(problem, linear, {}, float(seconds)))
    assert path.stat().st_size < 2500
    assert noted()[-1].seconds == 39.0 and len(noted()) > 2


def test_of_a_system_that_was_never_measured_only_the_same_size_is_said(problem):
    own = replace(SYSTEMS["linear"], name="somebody's own")
    assert estimate(problem, own, {}) is None
    note(run_of(problem, own, {}, 7.0))
    assert estimate(problem, own, {}) == 7.0
    assert estimate(bench_runtimes.problem_of(Goal.INFERENCE, 16, 16, 8), own, {}) is None


def test_a_job_takes_what_its_systems_take_side_by_side(monkeypatch):
    monkeypatch.setattr(runtimes, "processors", lambda: 2)
    assert expected([4.0, 2.0, 2.0]) == 4.0 and expected([9.0, 1.0]) == 9.0 and expected([3.0]) == 3.0
    assert expected([1.0, None]) is None and expected([]) is None


def test_a_job_of_a_serving_step_has_best_choose_by_it(problem, own_data_folder):
    save_recordings(problem)
    serving = {"step": usual_serving().model_dump(mode="json"), "sizes": usual_sizes(problem.model).model_dump(mode="json")}
    systems = [{"name": "best", "options": {"time_limit": 0.1, "order": "concurrent"}}]
    ask = problem_arguments(problem) | {"systems": systems, "serving": serving}
    (row,) = in_json(tasks.optimise)(ask, Context(own_data_folder))["candidates"]
    assert row["notes"]["compared by"]["value"] == "the whole step of serving"


def test_a_job_runs_baselines_first_and_what_is_soonest_done_before_the_rest(problem, own_data_folder):
    save_recordings(problem)
    context = Context(own_data_folder)
    names = ("exflow", "aurora-printed", "rcs", "linear")
    systems = [{"name": name, "options": {"time_limit": 0.3} if name == "exflow" else {}} for name in names]
    result = in_json(tasks.optimise)(problem_arguments(problem) | {"systems": systems}, context)
    made = [candidate["plan"]["provenance"]["optimiser"] for candidate in result["candidates"]]
    assert made == list(names), "they are listed as they were asked for"
    began = [run.system for run in noted()]
    assert set(began[:2]) == {"rcs", "linear"} and began[2:] == ["aurora-printed", "exflow"]
    reports = [Progress.model_validate_json(line) for line in (own_data_folder / "progress.jsonl").read_text().splitlines()]
    assert all(report.expected and report.expected > 0 for report in reports)
    shares = [report.done for report in reports if report.message.startswith("ExFlow")]
    assert min(shares) < 0.3, "what takes longest is the largest part"


def test_a_job_turns_the_knobs_before_best_and_its_share_never_falls(problem, own_data_folder, monkeypatch):
    save_recordings(problem)
    context, kept = Context(own_data_folder), []
    monkeypatch.setattr(Context, "keep", lambda self, answer: kept.append(answer))
    best = {"name": "best", "options": {"time_limit": 0.1}}
    asked = {"systems": [best, {"name": "linear"}, {"name": "aurora"}], "knobs": True}
    result = tasks.OptimiseAnswer(**in_json(tasks.optimise)(problem_arguments(problem) | asked, context))
    counts = [(len(answer.candidates), len(answer.waterfall.rows) if answer.waterfall else 0) for answer in kept]
    assert counts == sorted(counts) and {(2, 0), (2, 1), (2, 5), (3, 5)} <= set(counts)
    assert result.candidates[0].plan.provenance.optimiser == "best" and result.waterfall.floor
    assert result.waterfall.total <= min(row.metrics.total for row in result.candidates) * (1 + 1e-9)
    reports = [Progress.model_validate_json(line) for line in (own_data_folder / "progress.jsonl").read_text().splitlines()]
    assert any(report.message.startswith("turning knob") for report in reports)
    shares = [report.done for report in reports]
    assert shares == sorted(shares)
    unasked = {"systems": [{"name": "linear"}]}
    assert in_json(tasks.optimise)(problem_arguments(problem) | unasked, context)["waterfall"] is None


def test_on_gpus_of_several_types_a_search_is_said_to_take_as_long_as_there():
    alike, mixed = (
        bench_runtimes.problem_of(Goal.INFERENCE, *bench_runtimes.OF_MIXED[0], mixed=mixed) for mixed in (False, True)
    )
    assert estimate(mixed, SYSTEMS["aurora"], {}) > 5 * estimate(alike, SYSTEMS["aurora"], {})
    # Times measured on GPUs of one type alone are named as such.
    two = replace(mixed, second=mixed)
    assert estimate(two, SYSTEMS["aurora"], {}) is not None


def test_a_launch_takes_as_long_as_the_last_of_its_shape_or_by_its_flops_as_the_most_alike_one():
    one, both = steps.prepare_step(plan := plan_by("raf", steps.top_one_problem())), steps.prepare_step(plan, plan, repeats=7)
    gpus = replace(one, instructions=one.instructions.model_copy(update={"gpus": 2}))
    own, more = work_of(one), work_of(both)
    computed = steps.TOP_ONE_MODEL.model_copy(update={"dtype": "fp32"})
    assert own.flops == 2 * step_flops(computed, steps.TOP_ONE_STEP, plan) == more.flops / 2
    assert (own.turns, more.turns) == (4, 8)
    assert own.shape != more.shape and own.shape == work_of(steps.prepare_step(plan, repeats=9)).shape
    took = Took(work=own, start=10.0, passes=8.0, check=3.0)
    elsewhere = took.model_copy(update={"work": own.model_copy(update={"place": "another"}), "passes": 999.0})
    later = Took(work=more, start=12.0, passes=32.0, check=6.0)
    for launch, past, phases, how in (
        (one, [elsewhere, took], (10, 8, 3), "from the last launch of this shape"),
        (steps.prepare_step(plan, repeats=1), [later, took], (10, 4, 3), "from the last launch of this shape"),
        (both, [elsewhere, took], (10, 32, 6), "from the most similar launch so far, 2× its FLOP"),
        (one, [later], (12, 8, 3), "from the most similar launch so far, 0.5× its FLOP"),
    ):
        assert expect(launch, past)[:4] == (*phases, how)
    least = expect(one, [elsewhere])
    assert least.least and least.start == 0 and least.passes == pytest.approx(4 * least.check) and "GFLOP/s" in least.how
    assert expect(gpus, [took]) is None and expect(replace(one, destination=object()), [took]) is None
