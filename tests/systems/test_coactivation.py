"""The co-activation system: rows saved on planted tokens, refusals, and notes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster import Cluster, Node
from engine.errors import InputError
from engine.plan import Plan, Travel
from engine.problem import Problem
from engine.result import Status
from engine.simulate import simulate
from engine.simulate.work import works_of
from engine.systems import SYSTEMS, run
from engine.systems.base import Outcome
from engine.units import digits
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.examples import examples
from tests.cases.samples import in_nodes, problem_of, with_memory
from tests.oracles.plans import check_plan
from tests.strategies import make_gpu, planned_or_skipped, problems

SETTINGS = {"time_limit": 2.0}


@cache
def planted(unit: str, tokens: int = 1200, layers: int = 2) -> Problem:
    """Sixteen experts in four teams of four that lie as far apart as they can; a token takes four of one team, seldom two."""
    rng = np.random.default_rng(5)
    team = rng.integers(0, 4, (tokens, layers))
    chosen = np.stack([team + 4 * place for place in range(4)], axis=2)  # expert e is of team e mod 4
    stray = rng.random((tokens, layers)) < 0.1
    chosen[stray, 0] = (chosen[stray, 0] + 1) % 16
    trace = RoutingTrace("planted", chosen.astype(np.int16), 16)
    return problem_of(trace, in_nodes(4, 2, 8e6), travel=Travel(unit=unit))


@cache
def planned(unit: str) -> Outcome:
    return run(SYSTEMS["coactivation"], planted(unit), SETTINGS)


@pytest.mark.parametrize("unit", ["gpu", "node"])
def test_planted_teams_are_found_and_save_rows(unit):
    problem, outcome = planted(unit), planned(unit)
    plan = outcome.result.solution
    assert plan.travel == Travel(unit=unit)
    assert check_plan(plan, problem) == pytest.approx(outcome.result.objective, rel=1e-9)
    linear = run(SYSTEMS["linear"], problem).result
    assert outcome.result.objective < 0.75 * linear.objective
    if unit == "gpu":
        home = plan.placement.gpu_of_expert
        assert all(len(set(home[layer, team::4])) == 1 for layer in range(2) for team in range(4))
    assert "saved" in outcome.notes["rows"].value and outcome.notes["fewest rows"].value


def test_it_gains_nothing_where_every_copy_travels_alone():
    """The placement that is best for rows is no better than contiguous blocks for copies, and says nothing else."""
    problem = planted("gpu")
    plan = planned("gpu").result.solution
    copies = replace(problem, travel=None)
    alone = plan.model_copy(update={"travel": None, "claim": None})
    linear = run(SYSTEMS["linear"], copies).result.objective
    assert simulate(alone, copies).total > 0.97 * linear
    with pytest.raises(InputError, match="every copy of a token travels on its own"):
        run(SYSTEMS["coactivation"], copies, SETTINGS)


def test_what_it_cannot_plan_for():
    problem = planted("node")
    one, two, three = (Node(name=f"{gpus}", gpus=(make_gpu(),) * gpus, link_bandwidth=8e6) for gpus in (1, 2, 3))
    for change, says in (
        ({"workload": ExpertLoad("loads", problem.workload.load, problem.model.moe_layers)}, "loads has none; use a r"),
        ({"cluster": Cluster(name="five", nodes=(two, three))}, "do not divide equally over 5 GPUs"),
        ({"cluster": Cluster(name="four", nodes=(one, three))}, "equal size here; the cluster's have 1, 3 GPUs"),
    ):
        with pytest.raises(InputError, match=says):
            run(SYSTEMS["coactivation"], replace(problem, **change), SETTINGS)


@settings(max_examples=examples(30, 4), deadline=None)
@given(problems(travelling=True), st.sampled_from(("gpu", "node")))
def test_on_any_cluster_the_plan_is_legal_and_above_its_bound(problem, unit):
    problem = replace(problem, travel=Travel(unit=unit))
    outcome = planned_or_skipped(lambda: run(SYSTEMS["coactivation"], problem, {"time_limit": 0.2}))
    result = outcome.result
    assert check_plan(result.solution, problem) == pytest.approx(result.objective, rel=1e-9)
    assert result.bound <= result.objective * (1 + 1e-9) and result.solution.claim.scope == "order"


def rows_away(plan: Plan, problem: Problem) -> float:
    """Rows to other GPUs, or to other nodes where tokens travel node by node."""
    group = problem.stops.of_gpu if plan.travel.unit == "node" else np.arange(plan.placement.gpus)
    dispatch = works_of(plan, problem)[0].dispatch.sum(axis=0)
    return dispatch[group[:, None] != group].sum() / plan.travel.row_bytes(problem.model)[0]


@pytest.mark.parametrize("unit", ["gpu", "node"])
def test_copies_that_tokens_choose_save_rows_on_tokens_not_seen(unit):
    problem = replace(planted(unit), travel=Travel(unit=unit, replicas="fewest"))
    plan_on, score_on = map(problem.with_workload, problem.workload.halves())
    plans = {spare: run(SYSTEMS["coactivation"], plan_on, SETTINGS | {"redundant": spare}) for spare in (0, 2)}
    rows = {spare: rows_away(outcome.result.solution, score_on) for spare, outcome in plans.items()}
    assert rows[2] < 0.95 * rows[0]
    with_copies = plans[2].result.solution
    assert with_copies.travel == problem.travel and with_copies.placement.slots.max() <= 6
    assert check_plan(with_copies, plan_on) == pytest.approx(plans[2].result.objective, rel=1e-9)
    said = plans[2].notes["copies"].value
    assert "in 16 spare slots, a heuristic without a bound; with them" in said and "copies" not in plans[0].notes
    for travel in (problem.travel, Travel(unit=unit), Travel(unit=unit, replicas="nearest-static")):
        outcome = run(SYSTEMS["coactivation"], replace(plan_on, travel=travel), SETTINGS | {"redundant": 2})
        tokens = plan_on.workload.tokens * plan_on.workload.layers
        away = f"with them {digits(rows_away(outcome.result.solution, plan_on) / tokens)} per token to other"
        said = outcome.notes["copies"].value
        assert away in said and ("made for engines that choose copies per token" in said) == (travel.replicas != "fewest")


def test_copies_need_memory():
    problem = planted("gpu")
    tight = replace(with_memory(problem, [5] * 8), travel=problem.travel)
    assert run(SYSTEMS["coactivation"], tight, SETTINGS | {"redundant": 1}).result.solution
    with pytest.raises(InputError, match=r"6 slots per layer do not fit .* choose redundant=1"):
        run(SYSTEMS["coactivation"], tight, SETTINGS | {"redundant": 2})


@pytest.mark.parametrize("asked", [0, 1, 3, 20])
def test_a_stop_leaves_a_legal_plan(asked):
    problem, answers = planted("node"), iter([False] * asked)
    result = run(SYSTEMS["coactivation"], problem, SETTINGS, lambda: next(answers, True)).result
    assert result.status is Status.CANCELLED or next(answers, None) is not None
    assert check_plan(result.solution, problem) == pytest.approx(result.objective, rel=1e-9)


def test_a_cap_is_kept_where_a_placement_keeps_it():
    problem = planted("gpu")
    plan = run(SYSTEMS["coactivation"], problem, SETTINGS | {"cap": 1.05}).result.solution
    load = np.einsum("le,leg->lg", problem.workload.load, plan.placement.share)
    assert (load.max(axis=1) / load.mean(axis=1)).max() <= 1.05 + 1e-9
