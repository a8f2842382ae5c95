"""The best of all: never slower than any other system, legal, bounded, repeated, and stopped soon."""

import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.catalogue import cluster_presets
from engine.costs import Datasheet
from engine.errors import InputError
from engine.formats import read_model
from engine.plan import Travel
from engine.problem import Problem, make_problem
from engine.result import Status
from engine.simulate import simulate
from engine.systems import SYSTEMS, System, best, run
from engine.systems.options import patient
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.cli import SAMPLES
from tests.cases.examples import examples
from tests.cases.processes import slow_machine
from tests.cases.samples import big_problem, chained, in_nodes, problem_of, sample, sample_problem, small_problem, with_memory
from tests.oracles.plans import check_plan
from tests.strategies import planned_or_skipped, problems

QUICK, PART = {"time_limit": 0.7}, {"time_limit": 0.02}
"""Seconds of the best, and a part of them that is no more than others get of it."""
GPU, NODE = (Travel(unit=unit) for unit in ("gpu", "node"))
GPU_FEWEST, NODE_FEWEST = (Travel(unit=unit, replicas="fewest") for unit in ("gpu", "node"))
OTHERS = ("linear", "round-robin", "eplb", "aurora", "joint", "coactivation", "exflow")


def unhurried(name: str) -> System:
    """A system whose time limit is an amount of work alone, as it is for `best`: cut short by a clock it has another plan."""
    return replace(SYSTEMS[name], options=patient(SYSTEMS[name].options))


def outcome_of(problem: Problem, **options):
    return run(unhurried("best"), problem, QUICK | options)


@settings(max_examples=examples(20, 5), deadline=None)
@given(
    problems(travelling=True, experts=(2, 6)),
    st.sampled_from((None, GPU, NODE, GPU_FEWEST, NODE_FEWEST)),
    st.sampled_from(("even", "uneven")),
    st.integers(0, 1),
    st.sampled_from(("best", "best", "concurrent", "matched")),
    st.sampled_from(("per GPU", "in all")),
)
def test_a_plan_is_legal_as_fast_as_said_and_never_slower_than_any_other_system(
    problem, travel, slots, redundant, order, spare
):
    problem = replace(problem, travel=travel)
    chosen = {"slots": slots, "redundant": redundant, "spare": spare}
    outcome = planned_or_skipped(lambda: outcome_of(problem, **chosen, order=order))
    result, plan = outcome.result, outcome.result.solution
    assert check_plan(plan, problem) == pytest.approx(result.objective, rel=1e-9)
    # EPLB fills the slots that equal GPUs have over, also where others may have unequal ones.
    gpus, experts = plan.placement.gpus, problem.workload.num_experts
    most = experts + redundant if spare == "in all" else (-(-experts // gpus) + redundant) * gpus
    assert plan.placement.slots.sum(axis=1).max() <= most and (
        slots == "uneven" or plan.placement.slots.max() <= -(-most // gpus)
    )
    for name in OTHERS:
        known = SYSTEMS[name].options.model_fields
        settings_of = {"order": order} | chosen | PART
        try:
            other = run(unhurried(name), problem, {key: value for key, value in settings_of.items() if key in known}).result
        except InputError:
            continue
        assert result.objective <= other.objective * (1 + 1e-12), name
        if result.solution.claim.scope == "placement and order" and other.solution.execution == "vanilla":
            assert result.bound <= other.objective * (1 + 1e-9), name


TEAMS = [(GPU, 0, 1.0), (GPU, 1, 1.04), (GPU_FEWEST, 1, 1.1), (NODE_FEWEST, 1, 1.03)]


@pytest.mark.parametrize(("travel", "redundant", "least"), TEAMS, ids=str)
def test_it_gains_on_tokens_that_fire_together(travel, redundant, least):
    """Twelve experts in teams that lie apart, popular ones among them, on two nodes; without spare slots blocks that go round
    are the best already, and nothing is to be gained."""
    rng = np.random.default_rng(3)
    team = rng.choice(4, (12_000, 2), p=[0.4, 0.3, 0.2, 0.1])
    chosen = np.stack([team, team + 4, team + 8], axis=2)
    stray = rng.random((12_000, 2)) < 0.2
    chosen[stray, 0] = (chosen[stray, 0] + 1) % 12
    problem = problem_of(RoutingTrace("teams", chosen.astype(np.int16), 12), in_nodes(4, 2, 8e6), travel=travel)
    outcome = run(SYSTEMS["best"], problem, {"redundant": redundant, "order": "concurrent"})
    assert outcome.notes["against the best of the other systems"].value >= least
    assert "left" in outcome.notes
    assert ("gained nothing on parts" in str(outcome.notes.get("held out"))) == (least == 1)


def test_a_search_is_only_followed_where_it_gains_on_parts_that_it_has_not_seen(monkeypatch):
    """Loads of one moment, and of steps: the same experts are popular in all of them, or others in each."""
    monkeypatch.setattr("engine.systems.best._others", lambda *asked: [(SYSTEMS["linear"], {})])
    rng = np.random.default_rng(0)
    popular = np.sort(rng.exponential(500.0, (2, 12))) * np.ones((8, 1, 1))
    anyhow = rng.exponential(500.0, (8, 2, 12))
    for steps, says in ((None, "has no parts"), (popular, None), (anyhow, "gained nothing")):
        load = popular[0] if steps is None else steps.sum(axis=0)
        problem = problem_of(ExpertLoad("loads", load, (0, 1), by_step=steps), in_nodes(4, 2, 8e6))
        outcome = run(SYSTEMS["best"], problem, {"order": "concurrent"})
        assert says is None or says in outcome.notes["held out"].value
        assert (outcome.notes["found by"].value == "the search") == (says is None)


@pytest.mark.everything
def test_a_search_that_loses_more_on_unseen_parts_is_not_followed(monkeypatch):
    """The search is the fastest where it has been planned for; ExFlow's plan, which no search begins at, on other tokens."""
    model, cluster = read_model(SAMPLES / "tiny-moe-alpha.json"), cluster_presets()["exflow-4-nodes"].cluster
    halves = sample("alpha-early-code").halves()
    seen, unseen = (make_problem(each, cluster, model, Datasheet(), travel=NODE_FEWEST) for each in halves)
    monkeypatch.setattr(best, "NOISE", 0.0)
    monkeypatch.setattr(best, "DOUBT", 0.0)
    plans = []
    for slower in (best._slower, lambda *asked: 10.0):
        monkeypatch.setattr(best, "_slower", slower)
        outcome = run(unhurried("best"), seen, {"redundant": 1, "order": "concurrent"})
        plans.append((outcome.notes["found by"].value, *(simulate(outcome.result.solution, on).total for on in (seen, unseen))))
    (ours, *careful), (other, *careless) = plans
    assert (ours, other) == ("ExFlow", "the search") and careful[0] > careless[0] and careful[1] < careless[1]


@pytest.mark.parametrize("loads", [False, True])
def test_a_plan_loses_on_unseen_parts_as_much_as_they_differ(loads):
    """Four equal quarters lose nothing; where each has popular experts of its own, a plan for three of them is slower on the
    fourth."""
    eplb = partial(best._again, SYSTEMS["eplb"], SYSTEMS["eplb"].options(redundant=1, time_limit=0.1))
    ratios = []
    for shift in (0, 3):
        popular = np.sort(np.random.default_rng(0).exponential(500.0, 12)).round() + 1
        steps = np.stack([np.roll(popular, shift * step) for step in range(4)])[:, None]
        workload = ExpertLoad("loads", steps.sum(axis=0), (0,), by_step=steps)
        if not loads:
            experts = np.concatenate([np.repeat(np.arange(12), step[0].astype(int)) for step in steps])
            sequence = np.repeat(np.arange(4), int(popular.sum()))
            workload = RoutingTrace("tokens", experts[:, None, None].astype(np.int16), 12, sequence=sequence.astype(np.int32))
        problem = problem_of(workload, in_nodes(4, 2, 8e6))
        ratios.append(best._slower(problem, SimpleNamespace(again=eplb), lambda: False))
    assert ratios[0] == pytest.approx(1, abs=0.02) and ratios[1] > 1.1


def test_all_recordings_count_alike(monkeypatch):
    """The worst of several recordings, over the least that another system has there, is never above that of another system."""
    names = "linear", "eplb"
    monkeypatch.setattr("engine.systems.best._others", lambda *asked: [(SYSTEMS[name], {}) for name in names])
    problem = replace(sample_problem("beta-code", "beta-man", tokens=400), travel=GPU)
    served = [problem, *(problem.with_workload(other) for other in problem.others)]
    plans = [run(SYSTEMS[name], problem, {}).result.solution for name in ("best", *names)]
    ours, *others = np.array([[simulate(plan, of).total for of in served] for plan in plans])
    assert (ours / np.min(others, axis=0)).max() <= min((each / np.min(others, axis=0)).max() for each in others) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("travel", "redundant"),
    [(None, 1), (NODE, 0), (GPU_FEWEST, 1), pytest.param(GPU, 1, marks=pytest.mark.everything)],
    ids=str,
)
def test_a_slow_machine_finds_the_same_plan(travel, redundant, monkeypatch):
    """From the plan of one system alone: the others count their work as well."""
    linear = [(SYSTEMS["linear"], {})]
    monkeypatch.setattr("engine.systems.best._others", lambda *asked: linear)
    problem = problem_of(sample("beta-code", 300), in_nodes(4, 2, 8e6), travel=travel)
    outcomes = []
    for factor in (1.0, 5.0):
        with slow_machine(monkeypatch, factor):
            outcomes.append(run(SYSTEMS["best"], problem, {"redundant": redundant}))
    quick, slow = outcomes
    assert quick.notes["found by"].value == "the search" and "time limit" not in slow.notes
    assert (slow.result.solution.id, slow.result.bound) == (quick.result.solution.id, quick.result.bound)


def test_the_least_is_proven_and_said_and_claimed_where_every_byte_goes_straight():
    outcome = outcome_of(small_problem())
    claim = outcome.result.solution.claim
    assert claim.scope == "placement and order" and 0.9 * claim.objective < claim.bound <= claim.objective
    assert "no placement of one copy of every expert is below" in outcome.notes["left"].value
    linked = replace(sample_problem("alpha-code", tokens=400), cluster=in_nodes(8, 4, 3e9, send=1e9))
    outcome = outcome_of(linked, order="concurrent")
    assert outcome.result.solution.claim.scope == "order" and outcome.notes["left"].value.endswith("by plain sends (proven)")


def test_a_context_coherent_plan_has_no_bound_of_plans_whose_tokens_go_home():
    problem = problem_of(chained(0, 400, 12, 8, 1.0), in_nodes(4, 4, None))
    outcome = outcome_of(problem)
    assert outcome.result.solution.execution == "context-coherent"
    assert outcome.notes["found by"].value == "ExFlow" and "left" not in outcome.notes


@pytest.mark.parametrize(
    ("travel", "loads", "redundant", "says"),
    [
        (Travel(unit="node"), True, 0, "rows of a recording without tokens are an estimate"),
        (Travel(replicas="nearest-static"), False, 1, None),
        (Travel(replicas="nearest-static"), False, 0, None),
        (None, True, 1, None),
        (Travel(unit="gpu"), False, 1, None),
    ],
)
def test_what_is_not_searched_says_so_and_is_still_the_best_of_the_others(travel, loads, redundant, says):
    problem = replace(sample_problem("beta-code", tokens=300), travel=travel)
    if loads:
        load = ExpertLoad("loads", problem.workload.load, problem.model.moe_layers)
        problem = replace(problem, workload=load)
    outcome = outcome_of(problem, redundant=redundant)
    assert says in outcome.notes["search"].value if says else "search" not in outcome.notes
    assert outcome.notes["against the best of the other systems"].value >= 1


@pytest.mark.parametrize("slots", ["even", "uneven"])
def test_memory_is_respected(slots):
    problem = replace(with_memory(small_problem(), [3, 2, 2]), travel=Travel(unit="gpu"))
    plan = outcome_of(problem, slots=slots).result.solution
    assert np.all(plan.placement.slots <= [3, 2, 2])
    if slots == "even":
        assert np.all(plan.placement.slots == 2)
    with pytest.raises(InputError, match="redundant="):
        outcome_of(problem, slots=slots, redundant=1)


@pytest.mark.parametrize("wait", [0.5, pytest.param(6.0, marks=pytest.mark.everything)])
@pytest.mark.clock
def test_it_stops_within_two_seconds(wait):
    problem = replace(big_problem(), travel=Travel(unit="gpu"))
    reports, begin = [], time.perf_counter()
    stop = lambda: time.perf_counter() - begin > wait  # noqa: E731
    result = run(SYSTEMS["best"], problem, {}, stop, lambda *report: reports.append(report[0])).result
    assert time.perf_counter() - begin < wait + 2
    assert result.status is Status.CANCELLED and reports == sorted(reports)
    assert simulate(result.solution, problem).total == result.objective
