"""Input widgets for the options of optimisers, as their schemas say."""

from app import kept
from engine.systems.options import Options, Value


def key_of(system: str, name: str) -> str:
    """The key of the input widget of an option."""
    return f"option-{system}-{name}"


def show(system: str, options: type[Options], name: str, default: Value | None = None) -> Value:
    """The input widget of an option by its name, as its schema says; `system` tells systems apart, also those of one name for
    different goals. default: in place of the option's own."""
    schema = options.schemas()[name]
    key, label = key_of(system, name), schema["title"]
    value = schema["default"] if default is None else default
    if "enum" in schema:
        choices = schema["enum"]
        return kept.selectbox(label, choices, choices.index(value), key=key, help=schema["description"], width=180)
    if schema["type"] == "boolean":
        return kept.checkbox(label, value, key=key, help=schema["description"])
    kind = {"integer": int, "number": float}[schema["type"]]
    low, high = (None if schema.get(limit) is None else kind(schema[limit]) for limit in ("minimum", "maximum"))
    return kept.number_input(label, low, high, kind(value), key=key, help=schema["description"], width=180)
