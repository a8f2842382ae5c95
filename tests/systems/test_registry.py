"""Registered systems and their options, names of plans, and comparisons: the command line and the pages are made of these."""

from importlib import import_module
from pkgutil import walk_packages

import pytest

from engine import systems
from engine.compare.comparison import Comparison
from engine.errors import InputError
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.result import Provenance
from engine.systems import SYSTEMS, TRAINING, System, run
from engine.systems.options import Options
from engine.systems.plan_names import LONGEST, in_words, names_of
from tests.cases.samples import sample_problem, small_problem

EVERY = [*SYSTEMS.values(), *TRAINING.values()]
OPTIONS = [(system, name) for system in EVERY for name in system.options.model_fields]
TEXTS = {"boolean": ("maybe", "on or off"), "integer": ("many", "3.5"), "number": ("a lot", "")}


def title(value: object) -> str | None:
    return value.title if isinstance(value, System) else None


def test_every_file_with_systems_is_registered_and_no_name_twice() -> None:
    names = {module.name for module in walk_packages(systems.__path__, "engine.systems.")} - {"engine.systems.registry"}
    written = [system for name in names for system in getattr(import_module(name), "SYSTEMS", ())]
    assert sorted(system.title for system in written) == sorted(system.title for system in EVERY)


@pytest.mark.parametrize("system", EVERY, ids=title)
def test_a_problem_of_another_goal_is_refused(system: System) -> None:
    problem = sample_problem("alpha-code", tokens=200)
    if problem.goal in system.goals:
        assert systems.systems_for(problem)[system.name] is system
        return
    with pytest.raises(InputError, match=r"open a second recording|what is open is inference; change the goal"):
        run(system, problem)


@pytest.mark.parametrize("system, name", OPTIONS, ids=title)
def test_an_option_says_what_it_is_and_what_it_may_be_and_its_default_may_be_typed(system: System, name: str) -> None:
    schema, default = system.options.schemas()[name], getattr(system.settings({}), name)
    typed = getattr(system.settings({name: str(default)}), name)
    assert typed == default and type(typed) is type(default)
    assert schema["description"] and "default" in schema
    if "enum" in schema:
        assert schema["default"] in schema["enum"] and len(schema["enum"]) > 1
    elif schema["type"] != "boolean":
        assert schema["type"] in ("integer", "number") and schema["minimum"] <= schema["default"]


@pytest.mark.parametrize("system, name", OPTIONS, ids=title)
def test_what_cannot_be_is_answered_in_a_line_with_what_can(system: System, name: str) -> None:
    schema = system.options.schemas()[name]
    allowed = ", ".join(schema["enum"]) if "enum" in schema else ""
    for text in ("nowhere",) if allowed else TEXTS[schema["type"]]:
        with pytest.raises(InputError, match=f"^option {name}: '{text}' is not ") as caught:
            system.settings({name: text})
        assert allowed in str(caught.value) and "\n" not in str(caught.value)
    for limit, beyond in (("minimum", -1), ("maximum", 1)):
        if limit in schema:
            with pytest.raises(InputError, match=f"^option {name}: {schema[limit] + beyond} is not between "):
                system.settings({name: schema[limit] + beyond})


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        *(("seed", value, "not a whole number") for value in (2.5, None, [1], "nan", "inf", "-inf", float("nan"))),
        ("seed", float("inf"), "not a whole number"),
        ("time_limit", None, "not a number"),
        *(("time_limit", value, "is not between 0.1 and 3600") for value in ("nan", "inf", "-inf", float("nan"))),
    ],
)
def test_wrong_options_are_answered_with_what_is_allowed(option, value, says):
    with pytest.raises(InputError, match=f"option {option}: .*{says}"):
        run(SYSTEMS["aurora"], small_problem(), {option: value})


def test_options_may_come_as_text_or_typed():
    typed = SYSTEMS["aurora"].settings({"seed": "3", "time_limit": "2"}).model_dump()
    assert typed == {"slots": "even", "order": "best", "time_limit": 2.0, "seed": 3}
    assert SYSTEMS["aurora"].settings({"seed": 3.0}).seed == 3
    pipelining = [TRAINING["lina"].settings({"pipelining": value}).pipelining for value in ("yes", "false", "1", True)]
    assert pipelining == [True, False, True, True]
    with pytest.raises(InputError, match="option pipelining: 'maybe' is not true or false"):
        TRAINING["lina"].settings({"pipelining": "maybe"})


def test_plans_remember_their_options_and_inputs():
    problem = small_problem()
    provenance = run(SYSTEMS["aurora"], problem, {"time_limit": 0.3, "seed": 5}).result.solution.provenance
    assert provenance.options == {"slots": "even", "order": "best", "time_limit": 0.3, "seed": 5}
    assert provenance.seed == 5
    assert provenance.inputs["workload"] == problem.workload.digest


@pytest.mark.parametrize("name", SYSTEMS)
def test_an_option_that_does_not_exist_is_named(name: str) -> None:
    has = ", ".join(SYSTEMS[name].options.model_fields) or "none"
    with pytest.raises(InputError, match=rf"^{name} has no option 'colour' \(it has: {has}\)"):
        run(SYSTEMS[name], small_problem(), {"speed": "3", "colour": "red"})
    assert Options.schemas() == {}


PROBLEM = sample_problem("alpha-code", tokens=400)
LINEAR, ROUND_ROBIN, FOR_TWO = (SYSTEMS[name] for name in ("linear", "round-robin", "rec"))


def test_every_system_gets_a_row_or_a_reason():
    comparison = Comparison(PROBLEM)
    outcomes = list(comparison.run([(LINEAR, {}), (FOR_TWO, {}), (ROUND_ROBIN, {"slots": "even"})]))
    assert [outcome.result.provenance.optimiser for outcome in outcomes] == ["linear", "round-robin"]
    rows = comparison.candidates
    assert [row.plan.name for row in rows] == [LINEAR.title, ROUND_ROBIN.title]
    assert [row.metrics.total for row in rows] == [outcome.result.objective for outcome in outcomes]
    assert list(comparison.refused) == [FOR_TWO.title] and "two models" in comparison.refused[FOR_TWO.title]
    with pytest.raises(InputError, match="two models"):  # the only one that refuses says why itself
        list(Comparison(PROBLEM).run([(FOR_TWO, {})]))


def test_the_systems_report_as_one_piece_of_work_with_the_best_of_all():
    reports = []
    comparison = Comparison(PROBLEM)
    list(comparison.run([(LINEAR, {}), (ROUND_ROBIN, {})], report=lambda *report: reports.append(report)))
    done, message, best, bound = next(report for report in reports if report[1].startswith(ROUND_ROBIN.title))
    assert (done, message, bound) == (0.5, f"{ROUND_ROBIN.title}: started", None)
    assert best == comparison.candidates[0].metrics.total
    assert all(0 <= report[0] <= 1 for report in reports)


def test_no_system_begins_after_a_stop_but_what_was_found_stays():
    asked = []
    comparison = Comparison(PROBLEM)
    for _ in comparison.run([(LINEAR, {}), (ROUND_ROBIN, {})], stop=lambda: bool(asked)):
        asked.append(True)
    assert [row.plan.name for row in comparison.candidates] == [LINEAR.title]


CODE, PROSE, SMALL, LARGE = "a" * 64, "b" * 64, "c" * 64, "d" * 64
INPUTS = {CODE: "Alpha code", PROSE: "Alpha prose", SMALL: "8 mixed", LARGE: "16 mixed"}
PLACEMENT = Placement(experts=4, experts_of_gpu=(((0, 1), (2, 3)),), model_layers=(0,))


def made(name: str = "Aurora", workload: str = CODE, cluster: str = SMALL, travel: Travel | None = None, **options) -> Plan:
    origin = Provenance(optimiser="aurora", options=options, inputs={"workload": workload, "cluster": cluster})
    order = SendOrder(mode="concurrent")
    return Plan(name=name, placement=PLACEMENT, send_order=order, travel=travel, provenance=origin)


def names(*plans: Plan, chosen: dict[str, str] | None = None) -> list[str]:
    return list(names_of({plan.id: plan for plan in plans}, chosen or {}, INPUTS).values())


@pytest.mark.parametrize(
    ("other", "both"),
    [
        ({"workload": PROSE}, ["Aurora · on Alpha code", "Aurora · on Alpha prose"]),
        ({"cluster": LARGE}, ["Aurora · 8 mixed", "Aurora · 16 mixed"]),
        ({"redundant": 16}, ["Aurora · no spare slots", "Aurora · 36 slots (32 spare)"]),
        ({"redundant": 3, "spare": "in all"}, ["Aurora · no spare slots", "Aurora · 7 slots (3 spare)"]),
        ({"travel": Travel(unit="node")}, ["Aurora · one row per token copy", "Aurora · one row per node"]),
        ({"order": "matched"}, ["Aurora · best order", "Aurora · matched order"]),
        ({"time_limit": 5.0}, ["Aurora · 20 s limit", "Aurora · 5 s limit"]),
        (
            {"workload": PROSE, "redundant": 1},
            ["Aurora · on Alpha code · no spare slots", "Aurora · on Alpha prose · 6 slots (2 spare)"],
        ),
    ],
)
def test_what_differs_is_added_and_nothing_else(other: dict, both: list[str]) -> None:
    usual = {"redundant": 0, "order": "best", "time_limit": 20.0}
    assert names(made(**usual), made(**usual | other)) == both


def test_only_plans_of_one_name_are_told_apart_and_a_person_s_name_stays() -> None:
    first, second, eplb = made(seed=0), made(seed=1), made("EPLB", PROSE, seed=2)
    assert names(made(), eplb) == ["Aurora", "EPLB"]
    assert names(first, second, eplb) == ["Aurora · seed 0", "Aurora · seed 1", "EPLB"]
    assert names(first, second, chosen={second.id: "for Monday"}) == ["Aurora", "for Monday"]
    assert names(first, second, chosen={second.id: "mine", first.id: "mine"}) == ["mine · seed 0", "mine · seed 1"]


def test_ids_are_the_last_resort_and_a_hundred_long_names_are_all_different_and_fit() -> None:
    first, second = made(workload="e" * 64), made(workload="f" * 64)  # nobody knows the names of these recordings
    assert names(first, second) == [f"Aurora · {first.id[:8]}", f"Aurora · {second.id[:8]}"]
    plans = [made("x" * 120, workload, seed=seed) for seed in range(50) for workload in (CODE, PROSE)]
    told = names(*plans)
    assert len(set(told)) == 100 and max(map(len, told)) <= LONGEST


def test_every_option_of_every_system_is_said_in_words_of_its_own() -> None:
    for system in SYSTEMS.values():
        for name, schema in system.options.schemas().items():
            words = in_words(name, schema["default"], made())
            assert ("_" not in words and words != f"{name} {schema['default']}") or name == "seed", (system.name, words)
            assert schema["title"][0].isupper() and "_" not in schema["title"]
