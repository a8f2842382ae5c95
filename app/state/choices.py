"""What a person chose on the pages' widgets, by the keys of these: kept with the session."""

from typing import Any

import streamlit as st
from pydantic import ValidationError

from app.state.address import change
from app.state.moment import draw_anew
from app.state.session import MOST_CHOICES, Session


def choice(key: str, default: Any = None) -> Any:
    """What a person last chose on a widget; `default` where they never did."""
    return st.session_state.choices.get(key, default)


def forget_choices(*keys: str) -> None:
    """Let widgets show their defaults again."""
    kept = {key: chosen for key, chosen in st.session_state.choices.items() if key not in keys}
    draw_anew(keys)
    if kept != st.session_state.choices:
        change(choices=kept)


def keep_choice(key: str, value: Any) -> None:
    """Keep what a person chose, of the newest MOST_CHOICES widgets. value: of `session.Choice`, or a tuple of such; what a
    session cannot keep, as a text of a thousand lines, it does not."""
    value = list(value) if isinstance(value, tuple) else value
    try:
        Session.model_validate({"choices": {key: value}})
    except ValidationError:
        return
    kept = st.session_state.choices
    if key not in kept or kept[key] != value:
        others = {other: chosen for other, chosen in kept.items() if other != key}
        change(choices=dict([*others.items(), (key, value)][-MOST_CHOICES:]))
