"""Plan files changed by hand, place by place: one line, or a plan with the right simulated time for its new contents."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.compare.figures import metrics
from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Plan, Travel, expert_groups
from engine.problem import Problem, make_problem
from engine.provenance import has_inputs_of
from engine.simulate import bound_of_plan, simulate
from engine.simulate.training.pricing import graph_of
from engine.systems import run, systems_for
from engine.validate import refuse_broken
from tests.cases.examples import examples
from tests.cases.fuzzing import EXAMPLES, LONGEST_LINE
from tests.cases.mutations import places_in, with_change
from tests.cases.samples import mixed_problem, training_problem
from tests.oracles.plans import check_plan, check_timeline
from tests.oracles.training import check_step

ROUND_OFF = 1e-6
SHORT = {"time_limit": 0.1, "seed": 3}


def travelling(unit: str, **formats: Any) -> Problem:
    plain = mixed_problem()
    travel = Travel(unit=unit, **formats)
    return make_problem(plain.workload, plain.cluster, plain.model, plain.cost, travel=travel)


def of_two_models() -> Problem:
    first, other = mixed_problem(), mixed_problem(1)
    return make_problem(first.workload, first.cluster, first.model, first.cost, second=(other.workload, other.model))


CASES: dict[str, tuple[str, Callable[[], Problem], dict[str, Any]]] = {
    "matched": ("aurora", mixed_problem, {"order": "matched"}),
    "shared": ("aurora", mixed_problem, {"order": "shared"}),
    "two-tier": ("aurora", mixed_problem, {"order": "two-tier"}),
    "sequential": ("sjf", mixed_problem, {}),
    "concurrent": ("linear", mixed_problem, {}),
    "replicas": ("eplb", mixed_problem, {"order": "matched", "redundant": 4}),
    "contexts": ("exflow", mixed_problem, {}),
    "reaction": ("lina", mixed_problem, {}),
    "rows per GPU": ("coactivation", lambda: travelling("gpu", dispatch="fp8"), {}),
    "rows per node": ("eplb", lambda: travelling("node", replicas="fewest"), {"redundant": 4}),
    "two models": ("aurora", of_two_models, {"order": "matched"}),
    "joint": ("aurora", of_two_models, {"order": "joint"}),
    "lancet": ("lancet", training_problem, {}),
    "lina in training": ("lina", training_problem, {}),
    "pipemoe": ("pipemoe", training_problem, {}),
}


@cache
def planned(case: str) -> tuple[dict, Problem]:
    name, make, options = CASES[case]
    problem = make()
    system = systems_for(problem)[name]
    known = {name: value for name, value in (SHORT | options).items() if name in system.options.model_fields}
    return run(system, problem, known).result.solution.model_dump(mode="json", exclude_none=True), problem


def refused(data: object, problem: Problem) -> str | None:
    """The one line, or None where the plan is taken and right."""
    try:
        plan = Plan.from_dict(data, "sent.json")
        refuse_broken(plan, problem, "sent.json")
        timeline = simulate(plan, problem)
        total = timeline.total
        assert bound_of_plan(plan, problem) <= total * (1 + ROUND_OFF)
        figures = metrics(plan, problem, timeline)
        assert figures.bound is None or figures.bound <= total * (1 + ROUND_OFF)
        own = has_inputs_of(plan, problem, ("workload", "model", "cluster", "cost"))
        if problem.goal is Goal.TRAINING:
            graph = graph_of(problem, expert_groups(plan.placement))
            assert check_step(timeline, plan, problem, graph) == pytest.approx(total, rel=ROUND_OFF)
        elif problem.goal is Goal.TWO_MODELS:
            assert check_timeline(timeline, plan, problem) == pytest.approx(total, rel=ROUND_OFF)
        elif plan.reaction is None and (own or plan.send_order.mode in ("sequential", "concurrent")):
            assert check_plan(plan, problem) == pytest.approx(total, rel=ROUND_OFF)
    except InputError as error:
        line = str(error)
        assert line.isprintable() and len(line) < LONGEST_LINE, line
        return line
    return None


@pytest.mark.parametrize("case", CASES)
def test_as_it_is_a_plan_is_right(case):
    assert refused(*planned(case)) is None


NUMBERS = (0, 1, 2, -1, 7, 4096, 10**6, 10**30, 0.5, 1e-300, 1e300, 1e9)
OTHERS = (None, True, "x", "", [], {}, *("matched", "shared", "two-tier", "joint", "sequential", "concurrent", "node", "fp8"))


def family(path: tuple) -> tuple:
    """The field that a place belongs to, whichever of its entries it is."""
    return tuple("·" if isinstance(key, int) else key for key in path)


@cache
def families(case: str) -> dict[tuple, list[tuple]]:
    found: dict[tuple, list[tuple]] = {}
    for path in places_in(planned(case)[0])[1:]:
        found.setdefault(family(path), []).append(path)
    return found


def value_at(data: Any, path: tuple) -> Any:
    for key in path:
        data = data[key]
    return data


def unknown_inputs(plan: dict) -> dict:
    return plan | {"provenance": plan["provenance"] | {"inputs": {}}}


@st.composite
def tampered(draw: st.DrawFn, case: str) -> dict:
    """A plan file with one to three wrong values, any field as likely as any other."""
    data, places = planned(case)[0], families(case)
    if draw(st.booleans()):  # a file may also say that it was made for something else
        data = unknown_inputs(data)
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        path = draw(st.sampled_from(places[draw(st.sampled_from(sorted(places, key=str)))]))
        try:
            old = value_at(data, path)
        except (KeyError, IndexError, TypeError):
            continue  # gone with a change before
        kind = draw(st.sampled_from(("replace", "replace", "replace", "drop", "empty", "repeat")))
        new = draw(st.sampled_from(changes_of(old))) if kind == "replace" else None
        data = with_change(data, path, kind, new)
    return data


def changes_of(old: Any) -> list:
    match old:
        case bool() | None:
            return [*NUMBERS, *OTHERS]
        case int() | float():
            return [*NUMBERS, old + 1, old - 1, old * 2, old / 2, *OTHERS]
        case list():
            flat = all(not isinstance(item, list | dict) for item in old)
            zeros = [[0] * len(old), [old[0]] * len(old)] if old and flat else []
            return [old[::-1], old[1:], old[:-1], old * 2, old + old[:1], [], *zeros, *OTHERS]
    return [*OTHERS, *NUMBERS]


@given(data=st.data(), case=st.sampled_from(list(CASES)))
@settings(max_examples=examples(2) * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_changed_plan_is_refused_or_right(data, case):
    refused(data.draw(tampered(case)), planned(case)[1])


NO_SENDS = {"src": [], "dst": [], "bytes": [], "phase": [], "duration": []}
BROKEN: dict[str, Callable[[dict], dict]] = {
    "no sends": lambda sends: NO_SENDS,
    "in one phase": lambda sends: sends | {"phase": [0] * len(sends["phase"])},
    "to itself": lambda sends: sends | {"dst": sends["src"]},
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("case", ["matched", "two-tier", "joint"])
def test_no_broken_order_is_faster(case, broken):
    data, problem = planned(case)
    fair = simulate(Plan.from_dict(data, "plan"), problem).total
    order = data["send_order"]
    wrong = {kind: [BROKEN[broken](sends) for sends in order[kind]] for kind in ("dispatch", "combine")}
    plan = data | {"send_order": order | wrong}
    assert refused(plan, problem) is not None
    # Of a plan for something else, pairs that it does not know are sent as its kind of order may send them: no faster.
    foreign = unknown_inputs(plan)
    if refused(foreign, problem) is None:
        assert simulate(Plan.from_dict(foreign, "plan"), problem).total >= fair * (1 - ROUND_OFF)
