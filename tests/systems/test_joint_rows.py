"""The joint planner where a row serves several experts: rows in the place of hops, everything else as before."""

from dataclasses import replace

import numpy as np
import pytest

from engine.compare.figures import metrics
from engine.costs import Datasheet
from engine.placement.joint.rows import RowsInstance, with_starts
from engine.plan import Travel
from engine.problem import Problem, make_problem
from engine.systems import SYSTEMS, run
from engine.systems.base import Outcome
from engine.systems.joint import instance_of, rows_saved
from engine.units import share
from engine.validate import check_plan
from engine.workload import ExpertLoad, RoutingTrace
from tests.strategies import make_model
from tests.systems.samples import in_nodes

pytestmark = pytest.mark.slow

LIMIT = 4.0


def tokens(seed: int, stray: float, first: float = 0.4, count: int = 900) -> RoutingTrace:
    """Sixteen experts in four teams that lie as far apart as they can, drawn anew in every layer, the first with its own
    probability; a token takes four of one team, and with probability `stray` one of the next in place of the first."""
    rng = np.random.default_rng(seed)
    team = rng.choice(4, (count, 3), p=[first, *[(1 - first) / 3] * 3])
    chosen = np.stack([team + 4 * place for place in range(4)], axis=2)
    strays = rng.random((count, 3)) < stray
    chosen[strays, 0] = (chosen[strays, 0] + 1) % 16
    return RoutingTrace(f"tokens {seed}", chosen.astype(np.int16), 16)


def planted(unit: str = "gpu", others: tuple[RoutingTrace, ...] = (), first: float = 0.4) -> Problem:
    model, cluster = make_model(3, 16, 4), in_nodes(4, 2, 8e6)
    return make_problem(tokens(0, 0.3, first), cluster, model, Datasheet(), others=others, travel=Travel(unit=unit))


def joint(problem: Problem, **options) -> Outcome:
    return run(SYSTEMS["joint"], problem, {"time_limit": LIMIT} | options)


def row_of(outcome: Outcome) -> np.ndarray:
    return outcome.result.solution.placement.gpu_of_expert


@pytest.mark.parametrize("unit", ["gpu", "node"])
def test_rows_are_saved_at_the_balance_of_the_planner_that_does_not_see_them(unit):
    problem = planted(unit, first=0.25)
    hops = joint(replace(problem, travel=None)).result.solution
    outcome = joint(problem)
    plan = outcome.result.solution
    assert check_plan(plan, problem) == pytest.approx(outcome.result.objective, rel=1e-9)
    before = metrics(hops.model_copy(update={"travel": problem.travel, "claim": None}), problem)
    after = metrics(plan, problem)
    assert after.rows < 0.8 * before.rows and after.balancedness > before.balancedness - 0.05


def test_the_weight_leads_from_balance_to_few_rows():
    problem = planted()
    figures = [metrics(joint(problem, weight=weight).result.solution, problem) for weight in (0, 0.2, 1)]
    rows, balance = [each.rows for each in figures], [each.balancedness for each in figures]
    assert rows == sorted(set(rows), reverse=True) and balance == sorted(set(balance), reverse=True)


def test_the_notes_tell_both_aims_and_their_bounds():
    problem = planted(others=(tokens(1, 0.6),))
    outcome = joint(problem)
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
    first = tokens(0, 0.1)
    other = RoutingTrace(
        "shifted", ((first.experts + first.experts // 4) % 4 + first.experts // 4 * 4).astype(np.int16), 16
    )
    alone, both = planted(), planted(others=(other,))
    instance = instance_of(both)
    for_one, for_both = (instance.figures(row_of(joint(problem, weight=0.8))) for problem in (alone, both))
    assert for_both.hop_cost_share.max() < for_one.hop_cost_share.max()


def test_few_experts_move():
    problem = planted()
    now = run(SYSTEMS["linear"], problem).result.solution.placement
    outcome = joint(replace(problem, in_use=now), max_moves=6)
    row = row_of(outcome)
    assert 0 < (row != now.gpu_of_expert).sum() <= 6
    instance = instance_of(problem)
    assert instance.rows(row) < instance.rows(now.gpu_of_expert)


def test_without_shared_rows_hops_count_as_ever():
    problem = planted()
    loads = ExpertLoad("loads", problem.workload.load, problem.model.moe_layers)
    for other in (
        replace(problem, travel=None),
        replace(problem, travel=Travel(unit="copies", dispatch="fp8")),
        replace(problem, workload=loads),
    ):
        assert not isinstance(instance_of(other), RowsInstance)
    assert not isinstance(instance_of(problem, "context-coherent"), RowsInstance)
    notes = joint(replace(problem, travel=None), time_limit=0.2).notes
    assert "hops kept on their GPU" in notes and "rows" not in notes


def test_what_is_saved_is_within_what_is_possible():
    problem = planted()
    instance, starts = with_starts(instance_of(problem), 1.0)
    for place in starts:
        saved, possible = rows_saved(instance, place, problem)
        assert (saved <= possible).all() and saved[0] > 0.2
