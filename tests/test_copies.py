"""The copy of an expert that serves a token: held against an exhaustive search, with the rows it saves."""

import json

import numpy as np
import pytest
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.compare.figures import metrics
from engine.errors import InputError
from engine.plan import Placement, Plan, Travel
from engine.problem import Problem, make_problem
from engine.simulate import simulate
from engine.simulate.work import Load, works_of
from engine.timeline import balancedness
from engine.workload import ExpertLoad
from tests.cases.examples import tried
from tests.cases.plans import plan_of
from tests.oracles.plans import check_plan, rows_of_layer
from tests.strategies import RULES, placements, problems

FEWEST = st.builds(Travel, unit=st.sampled_from(("gpu", "node")), replicas=st.just("fewest"))
BY_RANK = st.builds(
    Travel,
    unit=st.sampled_from(("copies", "gpu", "node")),
    replicas=st.sampled_from(RULES[1:]),
    ranks_per_node=st.sampled_from((None, 1, 2, 3)),
)


@st.composite
def placed(draw, travels: st.SearchStrategy[Travel] = FEWEST) -> tuple[Problem, Plan]:
    problem = draw(problems(travelling=True, linked=True))
    sizes = problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus)
    return problem, plan_of(draw(placements(*sizes)), travel=draw(travels))


@tried(450, placed(FEWEST | BY_RANK))
def test_rows_work_and_seconds_agree_with_a_reading_that_tries_every_way(case):
    problem, plan = case
    (work,), travel = works_of(plan, problem), plan.travel
    row_bytes, sources = travel.row_bytes(problem.model)[0], problem.gpu_of_token.tolist()
    for layer in range(problem.workload.layers):
        rows = rows_of_layer(plan.placement, problem, layer, travel, sources)
        np.testing.assert_allclose(work.dispatch[layer], rows * row_bytes, rtol=1e-12)
    load = Load(problem, plan.placement, travel)
    served, moved = load.served, load.copies_moved
    np.testing.assert_allclose(served.sum(axis=2), problem.demand.sum(axis=1))
    assert np.all((served > 0) <= (plan.placement.share > 0))
    np.testing.assert_allclose(moved.sum(axis=1), served.sum(axis=1) * problem.model.bytes_per_token)
    assert Plan.from_dict(json.loads(plan.to_json()), "plan") == plan
    assert simulate(plan, problem).total == pytest.approx(check_plan(plan, problem), rel=1e-9)


@tried(60, placed())
def test_balance_follows_the_tokens_that_are_served_and_loads_have_none_that_choose(case):
    problem, plan = case
    served = Load(problem, plan.placement, plan.travel).served.sum(axis=1)
    assert metrics(plan, problem).balancedness == pytest.approx(balancedness(served).mean())
    recorded = ExpertLoad("loads", problem.workload.load, problem.model.moe_layers)
    loads = make_problem(recorded, problem.cluster, problem.model, problem.cost)
    in_turn = plan.with_parts(travel=plan.travel.model_copy(update={"replicas": None}))
    (chosen,), (turns,) = works_of(plan, loads), works_of(in_turn, loads)
    assert np.array_equal(chosen.dispatch, turns.dispatch)
    assert all(np.array_equal(chosen.compute[kind], turns.compute[kind]) for kind in chosen.compute)
    assert "estimated" in loads.source_of_times(plan.travel)


def test_who_chooses_is_said_and_kept_out_of_plans_from_before():
    assert Travel(unit="gpu", dispatch="fp8").to_json() == '{"dispatch":"fp8","unit":"gpu"}'
    where = Placement(experts=2, experts_of_gpu=(((0,), (1,)),), model_layers=(0,))
    before = plan_of(where, travel=Travel(unit="node", dispatch="fp8", combine="bf16"))
    assert before.id == "d40d4483b6e1f7fe2e4dc25199d988281ffc07eb3e1ae059458ce1cf34ef9a50"
    fewest = [Travel(unit=unit, replicas="fewest") for unit in ("gpu", "node")]
    assert [travel.in_words.split(", ")[-1] for travel in fewest] == [
        f"each token to the copies that touch fewest {where}" for where in ("GPUs", "nodes")
    ]
    with pytest.raises(InputError, match=r"^plan: replicas: .* no choice saves rows; use gpu or node$"):
        Travel.from_dict({"unit": "copies", "replicas": "fewest"}, "plan")
    with pytest.raises(ValidationError):
        Travel(unit="gpu", replicas="in turn")
