"""The settings of a system: one small frozen model a system, from which the command line and the pages make theirs."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from engine.errors import InputError
from engine.result import GUARD, Guard, Stop
from engine.schema import Frozen

Value = str | int | float | bool


class Options(Frozen):
    """The options of a system, none as it stands here.

    A subclass has a field an option: a bool, an int or float with limits (`ge`, `le`), or a `Literal` of texts; each with a
    default and a description for people, and a title with its unit unless its name says as much.
    """

    model_config = ConfigDict(field_title_generator=lambda name, _: name.replace("_", " ").capitalize())

    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> Self:
        """Options from values by name, typed by a person or already of their type; the others have their defaults. Raises
        InputError that names the option, the value and the allowed ones."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
        name = fault["loc"][0]
        raise InputError(f"option {name}: {_complaint(fault, cls.schemas()[name])}")

    def guard(self, stop: Stop) -> Guard:
        """The guard of a system with a `time_limit`: the seconds that a person chose, or many times the usual ones, which only
        limit the amount of work. Chosen seconds are for the search: the solvers are loaded before they begin."""
        if self.time_limit == type(self).model_fields["time_limit"].default:
            return Guard(stop, self.time_limit * GUARD)
        for library in ("engine.solver", "scipy.optimize", "scipy.sparse"):
            import_module(library)
        return Guard(stop, self.time_limit)

    @classmethod
    @cache
    def schemas(cls) -> dict[str, dict[str, Any]]:
        """The JSON schema of every option by its name, in the order of the fields."""
        return cls.model_json_schema().get("properties", {})


@cache
def patient(kind: type[Options]) -> type[Options]:
    """The same options, of which a time limit is an amount of work alone, so that a busy machine finds the same answer."""
    return type(kind)(
        kind.__name__,
        (kind,),
        {"guard": lambda self, stop: Guard(stop, self.time_limit * GUARD), "__module__": kind.__module__},
    )


_KIND_NAMES = {"boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "a text"}


def _complaint(fault: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """The fault of a value, from pydantic's fault and the schema of its option."""
    value, kind = fault["input"], fault["type"]
    if "enum" in schema:
        return f"'{value}' is not one of {', '.join(schema['enum'])}"
    # NaN and infinity are numbers, but within no limits.
    if kind in ("greater_than_equal", "less_than_equal") or (kind == "finite_number" and schema["type"] == "number"):
        return f"{value} is not between {schema.get('minimum', -float('inf')):g} and {schema.get('maximum', float('inf')):g}"
    return f"'{value}' is not {_KIND_NAMES[schema['type']]}"


# Options that several systems have. Each chooses its own default, and if a word more is needed its own description.

Seed = Annotated[int, Field(ge=0, le=2**31 - 1, description="the same seed gives the same plan")]
Slots = Annotated[
    Literal["even", "uneven"],
    Field(
        title="Experts per GPU",
        description="experts per GPU: the same on every GPU (serving engines need this), or as many as memory holds",
    ),
]
Redundant = Annotated[int, Field(ge=0, le=4096, title="Spare slots")]
Spare = Annotated[
    Literal["per GPU", "in all"],
    Field(
        title="Counted",
        description="spare slots are counted per GPU, or in all as engines count redundant experts; where these do not divide, "
        "some GPUs have one slot more, which no serving engine takes",
    ),
]
Order = Annotated[
    Literal["best", "matched", "shared", "two-tier", "concurrent"],
    Field(
        title="Send order",
        description="when bytes move; two-tier: the GPUs of a node relay for each other over their links; best: the fastest",
    ),
]
Execution = Annotated[
    Literal["context-coherent", "vanilla"], Field(description="tokens stay where their expert was, or return after every layer")
]
TimeLimit = Annotated[float, Field(title="Time limit (s)", ge=0.1, le=3600)]
"""Seconds of work that a system's description names."""
