"""Widgets that keep their value: on another page, after a reload, in a restarted studio.

Each is Streamlit's widget of the same name with a key of its own, and takes the same arguments. The value that a person chose
replaces the default as long as it fits the options or limits.

Also the input widgets for the options of optimisers, by their schemas.
"""

from collections.abc import Callable, Iterable
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import state, widgets
from engine.systems.options import Options, Value

_NEVER = object()


def checkbox(label: str, value: bool = False, *, key: str, **more: Any) -> bool:
    return st.checkbox(label, _flag(key, value), **_keeping(key, more))


def toggle(label: str, value: bool = False, *, key: str, **more: Any) -> bool:
    return st.toggle(label, _flag(key, value), **_keeping(key, more))


def selectbox(
    label: str, options: Iterable, index: int | None = 0, format_func: Callable = str, *, key: str, **more: Any
) -> Any:
    options = list(options)
    return st.selectbox(label, options, _place(key, options, index), format_func, **_keeping(key, more))


def expander(label: str, *, key: str, **more: Any) -> DeltaGenerator:
    """A part of a page that stays open or folded as a person left it; folded until then."""
    return st.expander(label, _flag(key, False), **_keeping(key, more))


def radio(label: str, options: Iterable, index: int | None = 0, format_func: Callable = str, *, key: str, **more: Any) -> Any:
    options = list(options)
    return st.radio(label, options, _place(key, options, index), format_func, **_keeping(key, more))


def multiselect(
    label: str, options: Iterable, default: Any = None, format_func: Callable = str, *, key: str, **more: Any
) -> list:
    options = list(options)
    return st.multiselect(label, options, _several(key, options, default), format_func, **_keeping(key, more))


def pills(label: str, options: Iterable, *, key: str, default: Any = None, **more: Any) -> list:
    """Pills of which several may be chosen."""
    options = list(options)
    default = _several(key, options, default)
    return st.pills(label, options, selection_mode="multi", default=default, **_keeping(key, more))


def segments(
    label: str, options: Iterable, format_func: Callable[[Any], str] = str, *, key: str, default: Any = None, **more: Any
) -> Any:
    """`widgets.segments`."""
    options = list(options)
    place = _place(key, options, options.index(default) if default in options else None)
    default = None if place is None else options[place]
    return widgets.segments(label, options, format_func, default=default, **_keeping(key, more))


def number_input(
    label: str, low: float | None = None, high: float | None = None, value: Any = "min", *, key: str, **more: Any
) -> Any:
    """A number field. low, high: limits, None if there is none."""
    kind = type(next((number for number in (value, low, high) if isinstance(number, int | float)), 0.0))
    value = _number(state.session.choices.get(key), kind, low, high, value)
    return st.number_input(label, low, high, value, **_keeping(key, more))


def limited(faults: list[str], label: str, low: float, high: float, value: float, *, key: str, **more: Any) -> Any:
    """A number field that takes any number, with a line among `faults` for one beyond the limits, and `value` in its place: the
    browser's own field would show what was typed and go on with the number before it."""
    number = number_input(label, None, None, value, key=key, **more)
    if low <= number <= high:
        return number
    faults.append(f"{label}: {number:,.10g} is not between {low:,.10g} and {high:,.10g}")
    return value


def slider(label: str, low: float, high: float, value: Any, *, key: str, **more: Any) -> Any:
    """value: a number, or a pair of them."""
    chosen = state.session.choices.get(key)
    if isinstance(value, tuple):
        ends = chosen if isinstance(chosen, list) and len(chosen) == len(value) else value
        fitting = tuple(_number(end, type(low), low, high, usual) for end, usual in zip(ends, value, strict=True))
        value = fitting if list(fitting) == sorted(fitting) else value
    else:
        value = _number(chosen, type(low), low, high, value)
    return st.slider(label, low, high, value, **_keeping(key, more))


def select_slider(label: str, options: Iterable, value: Any, format_func: Callable = str, *, key: str, **more: Any) -> Any:
    options = list(options)
    chosen = options[_place(key, options, options.index(value))]
    return st.select_slider(label, options, chosen, format_func, **_keeping(key, more))


def text_input(label: str, value: str = "", *, key: str, **more: Any) -> str:
    chosen = state.session.choices.get(key)
    return st.text_input(label, chosen if isinstance(chosen, str) else value, **_keeping(key, more))


def _flag(key: str, default: bool) -> bool:
    chosen = state.session.choices.get(key)
    return chosen if isinstance(chosen, bool) else default


def _place(key: str, options: list, default: int | None) -> int | None:
    """Place of the chosen option among the options."""
    chosen = state.session.choices.get(key, _NEVER)
    return options.index(chosen) if chosen in options else default


def _several(key: str, options: list, default: Any) -> Any:
    """The chosen options that still exist; the default if none is left."""
    chosen = state.session.choices.get(key, _NEVER)
    if not isinstance(chosen, list):
        return default
    fitting = [option for option in options if option in chosen]
    return fitting if fitting or not chosen else default


def _number(chosen: Any, kind: type, low: float | None, high: float | None, default: Any) -> Any:
    """The chosen number if it is one of this kind, within the limits."""
    if isinstance(chosen, bool) or not isinstance(chosen, int | float) or kind(chosen) != chosen:
        return default
    above, below = low is None or chosen >= low, high is None or chosen <= high
    return kind(chosen) if above and below else default


def _keeping(key: str, more: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a widget with its key, so that its value is kept before anything else reacts to its change."""
    then, args, kwargs = more.pop("on_change", None), more.pop("args", ()), more.pop("kwargs", {})
    drawn_as = state.visit.widget_key(key)

    def keep() -> None:
        state.keep_choice(key, st.session_state[drawn_as])
        if then is not None:
            then(*args, **kwargs)

    return more | {"key": drawn_as, "on_change": keep}


def option_key(system: str, name: str) -> str:
    """The key of the input widget of an option."""
    return f"option-{system}-{name}"


def option_input(system: str, options: type[Options], name: str, default: Value | None = None, width: int = 180) -> Value:
    """The input widget of an option by its name, by its schema.

    system: tells systems apart, also those of one name for different goals
    default: replaces the option's own
    width: of an input that is no box to tick; pixels
    """
    schema = options.schemas()[name]
    key, label = option_key(system, name), schema["title"]
    value = schema["default"] if default is None else default
    if "enum" in schema:
        choices = schema["enum"]
        return selectbox(label, choices, choices.index(value), key=key, help=schema["description"], width=width)
    if schema["type"] == "boolean":
        return checkbox(label, value, key=key, help=schema["description"])
    kind = {"integer": int, "number": float}[schema["type"]]
    low, high = (None if schema.get(limit) is None else kind(schema[limit]) for limit in ("minimum", "maximum"))
    return number_input(label, low, high, kind(value), key=key, help=schema["description"], width=width)
