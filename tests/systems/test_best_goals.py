"""`best` for two models, under the rules of ranks, with a free choice of travel, and judged by a step of serving."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import units
from engine.costs import Datasheet
from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Plan, Travel
from engine.plan.send_order import Replicas, TravelUnit
from engine.problem import Problem, make_problem
from engine.result import never
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import TransformerSizes
from engine.serving.step import ServingStep, recording_of_step
from engine.simulate import simulate
from engine.simulate.serving import Serving
from engine.systems import SYSTEMS, best, run
from engine.systems.aurora_colocated import best_orders
from engine.systems.base import silent
from engine.systems.pieces import to_placement
from engine.validate import refuse_broken
from engine.workload import ExpertLoad
from tests.cases.best_layers import drawn
from tests.cases.examples import examples
from tests.cases.samples import in_nodes, problem_of, sample, sample_model, sample_problem
from tests.cases.two_models import pairs
from tests.oracles.plans import check_timeline
from tests.strategies import planned_or_skipped, problems

QUICK = {"time_limit": 0.3}
SIZES = TransformerSizes(heads=4, kv_heads=2, head_size=16, value_size=16, dense_d_ff=128, vocabulary=1000)
STEP = ServingStep(phase="decode", sequences=8, context=100, output=50)
EVERYTHING = pytest.mark.everything
PAIRED = [system for system in SYSTEMS.values() if Goal.TWO_MODELS in system.goals and system.name != "best"]
GPU, NODE = (Travel(unit=unit) for unit in ("gpu", "node"))


def outcome_of(problem: Problem, **options):
    return run(SYSTEMS["best"], problem, QUICK | options)


def travelling(problem: Problem, travel: Travel | None) -> Problem:
    return replace(problem, travel=travel, second=problem.second and replace(problem.second, travel=travel))


@settings(max_examples=examples(10, 2), deadline=None)
@given(
    pairs(most=3),
    st.sampled_from((None, GPU, NODE)),
    st.sampled_from(("even", "uneven")),
    st.sampled_from(("best", "concurrent", "matched")),
)
def test_a_plan_for_two_models_is_legal_and_never_slower_than_any_other_system(problem, travel, slots, order):
    problem, options = travelling(problem, travel), QUICK | {"slots": slots, "order": order}
    result = planned_or_skipped(lambda: outcome_of(problem, **options)).result
    plan = result.solution
    refuse_broken(plan, problem)
    assert check_timeline(simulate(plan, problem), plan, problem) == pytest.approx(result.objective)
    for system in PAIRED:
        known = system.options.model_fields
        other = run(system, problem, {name: value for name, value in options.items() if name in known}).result
        assert result.objective <= other.objective * (1 + 1e-12), system.name


BRUTE = [(None, 0, 3), *(pytest.param(travel, seed, 4, marks=EVERYTHING) for travel in (None, NODE) for seed in range(3))]


@pytest.mark.parametrize(("travel", "seed", "experts"), BRUTE, ids=str)
def test_no_placements_of_two_models_are_faster(travel, seed, experts):
    first, second = (drawn(2 * seed + side, travel or Travel(), experts=experts, links=True) for side in range(2))
    both = (second.workload, second.model)
    problem = make_problem(first.workload, first.cluster, first.model, Datasheet(), both, travel=travel)
    rows = [row for row in product(range(3), repeat=experts) if np.bincount(row, minlength=3).max() <= -(-experts // 3)]
    least, sides = np.inf, (problem, problem.second)
    for pair in product(rows, repeat=2):
        placements = [to_placement(np.array([row]), side) for row, side in zip(pair, sides, strict=True)]
        least = min(least, best_orders(placements, problem, "joint", never, silent).timeline.total)
    assert outcome_of(problem).result.objective <= least * (1 + 1e-9)


@EVERYTHING
def test_two_models_gain_and_have_one_copy_of_every_expert():
    inputs = (sample("alpha-code", 400), in_nodes(8, 4, 8e6), sample_model("alpha"), Datasheet())
    problem = make_problem(*inputs, (sample("beta-code", 400), sample_model("beta")), travel=NODE)
    outcome = outcome_of(problem, order="concurrent", time_limit=1.0)
    assert outcome.notes["against the best of the other systems"].value > 1.01
    assert outcome.notes["found by"].value == "the search"
    with pytest.raises(InputError, match="leave redundant at 0"):
        outcome_of(problem, redundant=1)
    loads = [ExpertLoad("loads", side.workload.load, side.model.moe_layers) for side in (problem, problem.second)]
    second = replace(problem.second, workload=loads[1])
    assert "estimate" in outcome_of(replace(problem, workload=loads[0], second=second)).notes["search"].value


@pytest.fixture
def few_systems(monkeypatch):
    """EPLB and contiguous blocks alone stand for the other systems."""
    asked = best._others
    names = ("linear", "eplb")
    monkeypatch.setattr(best, "_others", lambda *about: [each for each in asked(*about) if each[0].name in names])


RULES = [("copies", "nearest-static"), ("node", "lp")]
MORE = [("copies", "fixed"), ("copies", "lp"), ("gpu", "nearest-dynamic"), ("gpu", "nearest-static")]


@pytest.mark.usefixtures("few_systems")
@pytest.mark.parametrize(("unit", "rule"), [*RULES, *(pytest.param(*each, marks=EVERYTHING) for each in MORE)])
def test_under_a_rule_of_ranks_copies_are_placed_where_ranks_find_them(unit, rule):
    """On two nodes EPLB balances, but a copy in each node spares the slow network."""
    travel = Travel(unit=unit, replicas=rule).on_nodes([2, 2])
    problem = problem_of(sample("beta-code", 200), in_nodes(4, 2, 8e6), travel=travel)
    outcome = run(SYSTEMS["best"], problem, {"redundant": 1, "order": "concurrent"})
    eplb = run(SYSTEMS["eplb"], problem, {"redundant": 1, "time_limit": 0.3}).result
    assert outcome.result.objective <= eplb.objective and outcome.result.solution.travel == travel
    assert "the search" in outcome.notes["found by"].value and "search" not in outcome.notes


@settings(max_examples=examples(10, 2), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems(experts=(2, 6)), st.sampled_from(get_args(TravelUnit)), st.sampled_from(get_args(Replicas)[1:]))
@pytest.mark.usefixtures("few_systems")
def test_a_plan_under_any_rule_is_legal_and_no_slower_than_eplbs(problem, unit, rule):
    problem = replace(problem, travel=Travel(unit=unit, replicas=rule))
    options = QUICK | {"redundant": 1, "order": "concurrent"}
    result = planned_or_skipped(lambda: outcome_of(problem, **options)).result
    refuse_broken(result.solution, problem)
    assert simulate(result.solution, problem).total == pytest.approx(result.objective, rel=1e-12)
    assert result.objective <= run(SYSTEMS["eplb"], problem, options).result.objective * (1 + 1e-12)


@pytest.mark.usefixtures("few_systems")
def test_a_free_choice_takes_the_fastest_way_and_the_plan_carries_it():
    problem = problem_of(sample("beta-code", 120), in_nodes(4, 2, 8e6), travel=GPU)
    quick = {"redundant": 1, "order": "concurrent"}
    outcome = outcome_of(problem, travel="free", **quick)
    plan = outcome.result.solution
    tried = {about.removeprefix("with "): note.value for about, note in outcome.notes.items() if about.startswith("with one")}
    assert len(tried) == 5 and tried[(plan.travel or Travel()).in_words] == min(tried.values())
    assert simulate(plan, problem).total == outcome.result.objective <= outcome_of(problem, **quick).result.objective
    assert Plan.from_json(plan.to_json(), "plan").travel == plan.travel and plan.claim.scope == "order"


@EVERYTHING
def test_rows_of_loads_are_not_guessed_and_a_rule_of_the_engine_stays():
    problem, quick = problem_of(sample("beta-code", 120), in_nodes(4, 2, 8e6)), {"redundant": 1, "order": "concurrent"}
    loads = replace(problem, workload=ExpertLoad("loads", problem.workload.load, problem.model.moe_layers), travel=None)
    assert "tokens travel" not in outcome_of(loads, travel="free").notes
    ruled = replace(problem, travel=Travel(replicas="fixed"))
    assert outcome_of(ruled, travel="free", **quick).result.solution.travel.replicas == "fixed"


@dataclass(frozen=True)
class Backwards:
    """A step in which every plan takes a second less its pass."""

    kept: float = 0.0

    def seconds(self, plan, problem, stop=never):
        if plan.execution != "vanilla":
            raise InputError("no")
        return 1 - simulate(plan, problem).total

    def bytes_beside(self, problem):
        return np.full(len(problem.cluster.gpus), self.kept)


class Unserved(Backwards):
    """A step that no plan can serve."""

    def seconds(self, plan, problem, stop=never):
        raise InputError("no")


@pytest.mark.usefixtures("few_systems")
def test_a_step_of_serving_decides():
    problem = sample_problem("alpha-code", tokens=200)
    pass_ = outcome_of(problem, order="concurrent")
    step = outcome_of(replace(problem, judged_by=Backwards()), order="concurrent")
    assert step.result.objective > pass_.result.objective and step.result.solution.execution == "vanilla"
    one = in_nodes(4, 2, 8e6)
    at_step = recording_of_step(sample("beta-code", 300), STEP, model := sample_model("beta"), 4)
    serving = Serving(STEP, RooflineOperators(model, SIZES, one.nodes[0].gpus[0]), SIZES)
    problem = make_problem(at_step, one, model, Datasheet(), serving_step=STEP, judged_by=serving)
    plans = [run(SYSTEMS[name], problem, more).result.solution for name, more in (("linear", {}), ("eplb", {"redundant": 0}))]
    outcome = outcome_of(problem, order="concurrent")
    seconds, *others = (serving.seconds(plan, problem) for plan in (outcome.result.solution, *plans))
    assert seconds <= min(others) and outcome.notes["compared by"].value == "the whole step of serving"
    refused = outcome_of(replace(problem, judged_by=Unserved()), order="concurrent")
    assert "none of the plans can be served" in refused.notes["compared by"].value
    assert outcome.notes["best of the other systems"].value.endswith(units.seconds(min(others)))


@pytest.mark.parametrize("slots", ["even", "uneven"])
def test_keys_and_values_leave_room_for_spare_slots_or_not(slots):
    problem = sample_problem("alpha-code", tokens=200)
    per_slot, gpus = problem.model.bytes_per_expert * problem.workload.layers, len(problem.cluster.gpus)
    held = -(-problem.workload.num_experts // gpus)
    kept = float(problem.cluster.values("memory").min()) * 0.9 - (held + 1.5) * per_slot
    tight = replace(problem, judged_by=Backwards(kept))
    options = partial(best.BestOptions, slots=slots)
    room, _ = best.room_of(tight, options(redundant=1))
    smallest = problem.cluster.values("memory").argmin()
    assert room[smallest] == held + 1 and best.room_of(problem, options(redundant=1))[0].min() >= held + 1
    if slots == "even":
        with pytest.raises(InputError, match="choose redundant=1, or fewer sequences"):
            best.room_of(tight, options(redundant=2))
    full = replace(problem, judged_by=Backwards(1e18))
    assert np.array_equal(best.room_of(full, options())[0], best.room_of(problem, options())[0])  # without any room as ever
    with pytest.raises(InputError, match="choose redundant=0"):
        best.room_of(full, options(redundant=1))
