"""The joint planner: both ends of the weight, several recordings, few moves from the placement in use, true notes."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compare.figures import metrics
from engine.errors import InputError
from engine.placement.joint.rows import RowsInstance
from engine.placement.transitions import transitions
from engine.plan import Placement, Travel
from engine.problem import Problem
from engine.systems import SYSTEMS, run
from engine.systems.base import Outcome
from engine.systems.joint import instance_of, moves_left, moves_to, start_of
from engine.systems.pieces import to_placement
from engine.units import digits, share
from engine.workload import ExpertLoad, RoutingTrace, Workload
from tests.cases.examples import examples
from tests.cases.samples import chained, every_placement, every_row, in_nodes, problem_of, sample_problem, walks
from tests.oracles.placing import JointCheck, check_joint
from tests.oracles.plans import check_plan
from tests.strategies import cluster_of, make_gpu, problems, seeds

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
    hops, imbalance = (several([getattr(figure, part) for figure in figures]) for part in ("hop_share", "imbalance"))
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


# The notes


@pytest.mark.parametrize("names", [("alpha-code",), ("beta-code", "beta-man")])
def test_the_notes_are_counted_again(names):
    problem = sample_problem(*names)
    outcome = joint(problem)
    checks = [figures_on(row_of(outcome), other, 8) for other in (problem.workload, *problem.others)]
    worst = " in the worst of 2 recordings" if len(names) > 1 else ""
    notes = outcome.notes
    kept = min(check.kept_share for check in checks)  # may lie on the border of two roundings
    assert notes["hops kept on their GPU"].value in {share(kept - 1e-12) + worst, share(kept + 1e-12) + worst}
    assert notes["balancedness"].value == digits(min(check.balancedness for check in checks)) + worst
    linear = np.tile(np.arange(16) // 2, (4, 1))
    assert notes["experts that move"].value == f"{(row_of(outcome) != linear).sum()} of 64"
    objective = objective_of(row_of(outcome), [problem.workload, *problem.others], 8, 0.5, "worst")
    text = notes["weighted objective"].value
    assert re.fullmatch(rf"{re.escape(digits(objective))}, a heuristic, \d[\d.]* % above its proven bound", text)
    # Stopped at once, the affinity that is possible in full is not found, and its bound is 0.
    perfect = problem_of(chained(0, 200, 4, 16, 1.0), FOUR)
    stopped = run(SYSTEMS["joint"], perfect, {"weight": 1.0}, lambda: True)
    assert stopped.notes["weighted objective"].value.endswith(", a heuristic without a bound")


@settings(max_examples=examples(20), deadline=None)
@given(problems(layers=(1, 2)), st.sampled_from((0.0, 0.3, 1.0)), st.sampled_from(("worst", "mean")))
def test_any_plan_is_legal_and_takes_what_the_validator_says(problem, weight, over):
    outcome = joint(problem, weight=weight, over=over, time_limit=0.1)
    plan = outcome.result.solution
    assert check_plan(plan, problem) == pytest.approx(outcome.result.objective, rel=1e-9)
    figures_on(plan.placement.gpu_of_expert, problem.workload, len(problem.cluster.gpus))
    assert outcome.result.bound <= outcome.result.objective and plan.placement.single


# Executions


@pytest.mark.parametrize(
    ("execution", "orders"), [("vanilla", ["matched order", "concurrent order"]), ("context-coherent", [])]
)
@pytest.mark.parametrize("name", ["alpha-code", "beta-code"])
def test_both_executions(name, execution, orders):
    problem = sample_problem(name, tokens=500)
    outcome = joint(problem, execution=execution, weight=1, time_limit=0.1)
    plan = outcome.result.solution
    assert plan.execution == execution and [about for about in outcome.notes if about.endswith(" order")] == orders
    assert check_plan(plan, problem) == pytest.approx(outcome.result.objective, rel=1e-9)


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
    rows = now.gpu_of_expert, row_of(outcome)
    before, after = (objective_of(row, [problem.workload], 3, 0.5, "worst") for row in rows)
    assert after < before
    assert moved(joint(problem, max_moves=1), now) == 0  # two experts change places at least


def test_more_moves_never_make_it_worse_and_none_is_needed_at_the_best():
    problem = problem_of(chained(0, 200, 3, 4, 0.6), TWO)
    places = every_placement(3, 4, 2)
    now = to_placement(places[100], problem)
    worth = [objective_of(place, [problem.workload], 2, 0.5, "worst") for place in places]
    for most in (1, 2, 4, 12):
        outcome = joint(replace(problem, in_use=now), max_moves=most)
        best = min(value for place, value in zip(places, worth, strict=True) if (place != places[100]).sum() <= most)
        assert objective_of(row_of(outcome), [problem.workload], 2, 0.5, "worst") == pytest.approx(best)
    assert best < worth[100]
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


ROWS_LIMIT = 4.0


def team_tokens(seed: int, stray: float, first: float = 0.4, count: int = 900) -> RoutingTrace:
    """Sixteen experts in four teams that lie as far apart as they can, drawn anew in every layer, the first with its own
    probability; a token takes four of one team, and with probability `stray` one of the next in place of the first."""
    rng = np.random.default_rng(seed)
    team = rng.choice(4, (count, 3), p=[first, *[(1 - first) / 3] * 3])
    chosen = np.stack([team + 4 * place for place in range(4)], axis=2)
    strays = rng.random((count, 3)) < stray
    chosen[strays, 0] = (chosen[strays, 0] + 1) % 16
    return RoutingTrace(f"team_tokens {seed}", chosen.astype(np.int16), 16)


def planted_teams(unit: str = "gpu", others: tuple[RoutingTrace, ...] = (), first: float = 0.4) -> Problem:
    return problem_of(team_tokens(0, 0.3, first), in_nodes(4, 2, 8e6), others=others, travel=Travel(unit=unit))


def joint_rows(problem: Problem, **options) -> Outcome:
    return run(SYSTEMS["joint"], problem, {"time_limit": ROWS_LIMIT} | options)


@pytest.mark.parametrize("unit", ["gpu", "node"])
def test_rows_are_saved_at_the_balance_of_the_planner_that_does_not_see_them(unit):
    problem = planted_teams(unit, first=0.25)
    hops = joint_rows(replace(problem, travel=None)).result.solution
    outcome = joint_rows(problem)
    plan = outcome.result.solution
    assert check_plan(plan, problem) == pytest.approx(outcome.result.objective, rel=1e-9)
    before = metrics(hops.model_copy(update={"travel": problem.travel, "claim": None}), problem)
    after = metrics(plan, problem)
    assert after.rows < 0.8 * before.rows and after.balancedness > before.balancedness - 0.05


def test_the_weight_leads_from_balance_to_few_rows():
    problem = planted_teams()
    figures = [metrics(joint_rows(problem, weight=weight).result.solution, problem) for weight in (0, 0.2, 1)]
    rows, balance = [each.rows for each in figures], [each.balancedness for each in figures]
    assert rows == sorted(set(rows), reverse=True) and balance == sorted(set(balance), reverse=True)


def test_the_notes_tell_both_aims_and_their_bounds():
    problem = planted_teams(others=(team_tokens(1, 0.6),))
    outcome = joint_rows(problem)
    instance, row = instance_of(problem), row_of(outcome)
    assert isinstance(instance, RowsInstance) and "hops kept on their GPU" not in outcome.notes
    linear = np.tile(np.arange(16) // 4, (3, 1))
    saved = min(1 - instance.rows(row) / instance.rows(linear))
    said = outcome.notes["rows"].value
    assert said.startswith(f"{share(saved)} fewer than contiguous blocks send in the worst of 2 recordings; at most ")
    assert outcome.notes["balancedness"].value.endswith("is possible, proven")
    assert "rows to other GPUs" in outcome.notes["weighed"].value


def test_the_worst_recording_counts():
    """Teams of the other recording lie elsewhere: who plans for both gives up rows of the first for those of the second."""
    team, of_team = np.divmod(team_tokens(0, 0.1).experts, 4)
    other = RoutingTrace("shifted", (4 * team + (of_team + team) % 4).astype(np.int16), 16)
    alone, both = planted_teams(), planted_teams(others=(other,))
    instance = instance_of(both)
    for_one, for_both = (instance.figures(row_of(joint_rows(problem, weight=0.8))) for problem in (alone, both))
    assert for_both.hop_cost_share.max() < for_one.hop_cost_share.max()


def test_without_shared_rows_hops_count_as_ever():
    problem = planted_teams()
    loads = ExpertLoad("loads", problem.workload.load, problem.model.moe_layers)
    for other in ({"travel": None}, {"travel": Travel(unit="copies", dispatch="fp8")}, {"workload": loads}):
        assert not isinstance(instance_of(replace(problem, **other)), RowsInstance)
    assert not isinstance(instance_of(problem, "context-coherent"), RowsInstance)
    notes = joint_rows(replace(problem, travel=None), time_limit=0.2).notes
    assert "hops kept on their GPU" in notes and "rows" not in notes
