"""What every registered system promises of itself and of its options, from which the command line and the pages are made."""

from importlib import import_module
from pkgutil import walk_packages

import pytest

from engine import systems
from engine.errors import InputError
from engine.systems import SYSTEMS, TRAINING, System, run
from engine.systems.options import Options
from tests.systems.samples import sample_problem

EVERY = [*SYSTEMS.values(), *TRAINING.values()]
OPTIONS = [(system, name) for system in EVERY for name in system.options.model_fields]
TEXTS = {"boolean": ("maybe", "on or off"), "integer": ("many", "3.5"), "number": ("a lot", "")}


def title(value: object) -> str | None:
    return value.title if isinstance(value, System) else None


def test_every_file_with_systems_is_registered_and_no_name_twice() -> None:
    names = [module.name for module in walk_packages(systems.__path__, f"{systems.__name__}.")]
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
def test_an_option_says_what_it_is_and_what_it_may_be(system: System, name: str) -> None:
    schema = system.options.schemas()[name]
    assert schema["description"] and "default" in schema
    if "enum" in schema:
        assert schema["default"] in schema["enum"] and len(schema["enum"]) > 1
    elif schema["type"] != "boolean":
        assert schema["type"] in ("integer", "number") and schema["minimum"] <= schema["default"]


@pytest.mark.parametrize("system, name", OPTIONS, ids=title)
def test_a_default_may_be_typed_too(system: System, name: str) -> None:
    default = getattr(system.settings({}), name)
    typed = getattr(system.settings({name: str(default)}), name)
    assert typed == default and type(typed) is type(default)


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


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", float("nan")])
def test_numbers_that_are_none(value: object) -> None:
    with pytest.raises(InputError, match=f"option time_limit: {value} is not between 0.1 and 3600"):
        SYSTEMS["aurora"].settings({"time_limit": value})
    with pytest.raises(InputError, match=f"option seed: '{value}' is not a whole number"):
        SYSTEMS["aurora"].settings({"seed": value})


def test_options_that_a_system_does_not_have() -> None:
    with pytest.raises(InputError, match=r"linear has no option 'order' \(it has: slots\)"):
        SYSTEMS["linear"].settings({"order": "best", "speed": "3"})
    assert Options.schemas() == {}
    with pytest.raises(InputError, match=r"rga has no option 'slots' \(it has: seed\)"):
        SYSTEMS["rga"].settings({"slots": "even"})
