"""The joint planner: both ends of the weight, several recordings, few moves from the placement in use, true notes."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.placement.transitions import transitions
from engine.plan import Placement
from engine.problem import Problem
from engine.systems import SYSTEMS, run
from engine.systems.base import Outcome
from engine.systems.joint import moves_left, moves_to, start_of
from engine.systems.pieces import to_placement
from engine.units import digits, share
from engine.validate import check_joint, check_plan
from engine.validate.joint import JointCheck
from engine.workload import ExpertLoad, RoutingTrace, Workload
from tests.cases.examples import examples
from tests.strategies import cluster_of, make_gpu, problems, seeds
from tests.systems.samples import chained, every_placement, every_row, problem_of, sample_problem, walks

pytestmark = pytest.mark.slow

TWO, THREE, FOUR = (cluster_of(*[make_gpu()] * count) for count in (2, 3, 4))
LONG, SHORT = 20.0, 0.2
"""Limits that never decide, for small problems, and for where any plan will do."""


def joint(problem: Problem, **options) -> Outcome:
    limit = LONG if problem.workload.num_experts <= 8 else SHORT
    return run(SYSTEMS["joint"], problem, {"time_limit": limit} | options)


def row_of(outcome: Outcome) -> np.ndarray:
    return outcome.result.solution.placement.gpu_of_expert


def figures_on(gpu_of_expert: np.ndarray, workload: Workload, gpus: int) -> JointCheck:
    """The validator's figures on one recording, for slots as equal as they can be."""
    layers, experts = workload.load.shape
    hops = np.zeros((layers - 1, experts, experts))
    if isinstance(workload, RoutingTrace):
        hops = transitions(workload.experts, experts)
    slots = np.full(gpus, experts // gpus) + (np.arange(gpus) < experts % gpus)
    return check_joint(gpu_of_expert, hops, workload.load, slots)


def objective_of(gpu_of_expert: np.ndarray, workloads: list[Workload], gpus: int, weight: float, over: str) -> float:
    """weight · hops over those of a blind placement + (1 - weight) · imbalance, each the worst or the mean."""
    figures = [figures_on(gpu_of_expert, workload, gpus) for workload in workloads]
    several = max if over == "worst" else np.mean
    hops, imbalance = (
        several([figure.hop_share for figure in figures]),
        several([figure.imbalance for figure in figures]),
    )
    return float(weight * hops / (1 - 1 / gpus) + (1 - weight) * imbalance)


# The objective


@pytest.mark.parametrize("weight", [0, 0.5, 1])
@pytest.mark.parametrize("over", ["worst", "mean"])
def test_no_placement_has_a_better_objective(weight, over):
    traces = [chained(0, 200, 3, 4, 0.6, "one"), chained(1, 40, 3, 4, 0.6, "two")]
    best = min(objective_of(place, traces, 2, weight, over) for place in every_placement(3, 4, 2))
    outcome = joint(problem_of(traces[0], TWO, others=(traces[1],)), weight=weight, over=over)
    assert objective_of(row_of(outcome), traces, 2, weight, over) == pytest.approx(best)
    said, proof = outcome.notes["weighted objective"].value.split(", ", 1)
    assert said == digits(best) and (proof == "proven optimal" or over == "worst")


def test_the_worst_case_and_the_mean_are_different_plans():
    workloads = [chained(seed, 200, 3, 6, 0.6, f"trace {seed}") for seed in range(3)]
    problem = problem_of(workloads[0], THREE, others=tuple(workloads[1:]))
    rows = {over: row_of(joint(problem, over=over)) for over in ("worst", "mean")}
    value = {
        (row, scored): objective_of(rows[row], workloads, 3, 0.5, scored)
        for row in rows
        for scored in ("worst", "mean")
    }
    assert value["worst", "worst"] < value["mean", "worst"] and value["mean", "mean"] < value["worst", "mean"]


def test_the_weight_leads_from_balance_to_affinity():
    problem = sample_problem("alpha-code")
    outcomes = {weight: joint(problem, weight=weight) for weight in (0, 0.5, 1)}
    checks = {weight: figures_on(row_of(outcome), problem.workload, 8) for weight, outcome in outcomes.items()}
    kept = [checks[weight].kept_share for weight in outcomes]
    balance = [checks[weight].balancedness for weight in outcomes]
    assert kept == sorted(kept) and balance == sorted(balance, reverse=True)
    assert kept[2] > kept[0] + 0.1 and balance[0] > balance[2] + 0.1
    exflow = run(SYSTEMS["exflow"], problem, {"time_limit": SHORT}).result.solution.placement.gpu_of_expert
    assert kept[2] >= figures_on(exflow, problem.workload, 8).kept_share - 0.02
    linear = run(SYSTEMS["linear"], problem).result.solution.placement.gpu_of_expert
    assert figures_on(linear, problem.workload, 8).balancedness < balance[1]
    assert figures_on(linear, problem.workload, 8).kept_share < kept[1]


def test_hops_count_between_all_choices():
    """The second choices of a token follow a chain too, which only all hops together show."""
    rng = np.random.default_rng(0)
    start, step = rng.integers(4, 8, 300), 4 + rng.permutation(4)
    rows = np.zeros((300, 2, 2), dtype=np.int16)
    rows[:, 0, 0], rows[:, 1, 0] = rng.integers(0, 4, (2, 300))
    rows[:, 0, 1], rows[:, 1, 1] = start, step[start - 4]
    problem = problem_of(RoutingTrace("pairs", rows, 8), FOUR)
    outcome = joint(problem, weight=1)
    row = row_of(outcome)
    assert all(row[0, expert] == row[1, step[expert - 4]] for expert in range(4, 8))


# The notes


@pytest.mark.parametrize("names", [("alpha-code",), ("beta-code", "beta-man")])
def test_the_notes_are_counted_again(names):
    problem = sample_problem(*names)
    outcome = joint(problem)
    checks = [figures_on(row_of(outcome), other, 8) for other in (problem.workload, *problem.others)]
    worst = " in the worst of 2 recordings" if len(names) > 1 else ""
    notes = outcome.notes
    assert notes["hops kept on their GPU"].value == share(min(check.kept_share for check in checks)) + worst
    assert notes["balancedness"].value == digits(min(check.balancedness for check in checks)) + worst
    linear = np.tile(np.arange(16) // 2, (4, 1))
    assert notes["experts that move"].value == f"{(row_of(outcome) != linear).sum()} of 64"
    objective = objective_of(row_of(outcome), [problem.workload, *problem.others], 8, 0.5, "worst")
    text = notes["weighted objective"].value
    assert re.fullmatch(rf"{re.escape(digits(objective))}, a heuristic, \d[\d.]* % above its proven bound", text)


def test_where_nothing_is_proven_the_note_does_not_divide_by_nothing():
    """Stopped at once: the affinity that is possible in full is not found, and its bound is 0."""
    problem = problem_of(chained(0, 200, 4, 16, 1.0), FOUR)
    outcome = run(SYSTEMS["joint"], problem, {"weight": 1.0}, lambda: True)
    assert outcome.notes["weighted objective"].value.endswith(", a heuristic without a bound")


@settings(max_examples=examples(20), deadline=None)
@given(problems(layers=(1, 2)), st.sampled_from((0.0, 0.3, 1.0)), st.sampled_from(("worst", "mean")))
def test_any_plan_is_legal_and_takes_what_the_validator_says(problem, weight, over):
    outcome = joint(problem, weight=weight, over=over, time_limit=0.1)
    plan = outcome.result.solution
    assert check_plan(plan, problem) == pytest.approx(outcome.result.objective, rel=1e-9)
    figures_on(plan.placement.gpu_of_expert, problem.workload, len(problem.cluster.gpus))
    assert outcome.result.bound <= outcome.result.objective and plan.placement.single


# Executions


@pytest.mark.parametrize("execution", ["vanilla", "context-coherent"])
@pytest.mark.parametrize("name", ["alpha-code", "beta-code"])
def test_both_executions(name, execution):
    problem = sample_problem(name, tokens=500)
    outcome = joint(problem, execution=execution, weight=1, time_limit=0.1)
    plan = outcome.result.solution
    assert plan.execution == execution
    assert check_plan(plan, problem) == pytest.approx(outcome.result.objective, rel=1e-9)
    orders = [about for about in outcome.notes if about.endswith(" order")]
    assert orders == (["matched order", "concurrent order"] if execution == "vanilla" else [])


def test_a_workload_without_tokens_is_balanced_but_cannot_be_followed():
    rng = np.random.default_rng(0)
    problem = problem_of(ExpertLoad("counts", rng.integers(1, 50, (3, 6)).astype(float), (1, 2, 3)), THREE)
    outcome = joint(problem)
    assert outcome.notes["hops kept on their GPU"].value == "100 %"
    for layer, load in enumerate(problem.workload.load):
        busiest = min(np.bincount(row, load).max() for row in every_row(6, 3))
        assert np.bincount(row_of(outcome)[layer], load).max() == busiest
    with pytest.raises(InputError, match="counts has no tokens; use a routing log"):
        joint(problem, execution="context-coherent")


# The placement in use


def moved(outcome: Outcome, now: Placement) -> int:
    """Experts on a GPU that does not hold them now."""
    rows = outcome.result.solution.placement.experts_of_gpu
    return sum(
        expert not in now.experts_of_gpu[layer][gpu]
        for layer, row in enumerate(rows)
        for gpu, held in enumerate(row)
        for expert in held
    )


@pytest.mark.parametrize("most", [2, 5, 12])
def test_at_most_so_many_experts_move_from_the_placement_in_use(most):
    problem = problem_of(chained(0, 300, 4, 6, 0.6), THREE)
    now = run(SYSTEMS["random"], problem, {"seed": 3}).result.solution.placement
    problem = replace(problem, in_use=now)
    outcome = joint(problem, max_moves=most)
    assert outcome.notes["experts that move"].value == f"{moved(outcome, now)} of 24, at most {most} allowed"
    assert 0 < moved(outcome, now) <= most
    before, after = (
        objective_of(row, [problem.workload], 3, 0.5, "worst") for row in (now.gpu_of_expert, row_of(outcome))
    )
    assert after < before
    assert moved(joint(problem, max_moves=1), now) == 0  # two experts change places at least


def test_more_moves_never_make_it_worse_and_none_is_needed_at_the_best():
    problem = problem_of(chained(0, 200, 3, 4, 0.6), TWO)
    places = every_placement(3, 4, 2)
    now = to_placement(places[100], problem)
    values = []
    for most in (1, 2, 4, 12):
        outcome = joint(replace(problem, in_use=now), max_moves=most)
        values.append(objective_of(row_of(outcome), [problem.workload], 2, 0.5, "worst"))
        allowed = [place for place in places if (place != places[100]).sum() <= most]
        best = min(objective_of(place, [problem.workload], 2, 0.5, "worst") for place in allowed)
        assert values[-1] == pytest.approx(best)
    assert values[-1] < values[0]
    there = replace(problem, in_use=outcome.result.solution.placement)
    for most in (0, 5):
        assert joint(there, max_moves=most).notes["experts that move"].value.startswith("0 of 12")


@pytest.mark.parametrize("system", ["eplb", "lina"])
def test_a_placement_with_replicas_may_be_in_use(system):
    problem = sample_problem("alpha-code")
    now = run(SYSTEMS[system], problem).result.solution.placement
    assert not now.single
    problem = replace(problem, in_use=now)
    needed = moves_to(start_of(problem), problem)
    for most in (0, needed + 6):
        outcome = joint(problem, max_moves=most)
        figures_on(row_of(outcome), problem.workload, 8)
        assert outcome.notes["experts that move"].value.startswith(f"{moved(outcome, now)} of 64")
        assert not most or moved(outcome, now) <= most


def test_a_placement_of_other_numbers_of_experts_may_be_in_use():
    """Seven of eight experts on one of two GPUs: three must leave it."""
    problem = problem_of(chained(0, 100, 2, 8, 0.5), TWO)
    row = np.array([[0] * 7 + [1], [0, 1] * 4])
    problem = replace(problem, in_use=to_placement(row, problem))
    start = start_of(problem)
    assert moves_to(start, problem) == 3 and start[1].tolist() == row[1].tolist()
    with pytest.raises(InputError, match="at least 3 moves away from the placement in use; choose max_moves=3 or more"):
        joint(problem, max_moves=2)
    outcome = joint(problem, max_moves=3)
    assert moved(outcome, problem.in_use) == 3 and row_of(outcome)[1].tolist() == row[1].tolist()
    assert moves_left(problem, start, 0) is None and moves_left(problem, start, 5) == 2


@settings(max_examples=examples(60), deadline=None)
@given(seeds)
def test_the_start_is_the_nearest_of_all_that_may_be_chosen(seed):
    rng = np.random.default_rng(seed)
    held = [[[] for _ in range(2)] for _ in range(2)]
    for layer in held:
        for expert in range(4):
            for gpu in rng.permutation(2)[: rng.integers(1, 3)]:
                layer[gpu].append(expert)
    problem = problem_of(walks(rng.integers(0, 4, (20, 2)), 4), TWO)
    problem = replace(problem, in_use=Placement(experts=4, experts_of_gpu=held, model_layers=(1, 2)))
    start = start_of(problem)
    figures_on(start, problem.workload, 2)
    assert moves_to(start, problem) == min(moves_to(place, problem) for place in every_placement(2, 4, 2))
