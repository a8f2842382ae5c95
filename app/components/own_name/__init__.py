"""The name that a person typed, kept in their browser: every link to a plan begins a session, which knows nobody."""

from collections.abc import Callable
from pathlib import Path

import streamlit as st

KEY = "own-name"
_component = st.components.v2.component(
    "own_name", js=(Path(__file__).parent / "own_name.js").read_text(encoding="utf-8")
)


def remember(name: str | None, recall: Callable[[str], None]) -> None:
    """Keep a name in the browser; without one, call back with that which the browser keeps, at the run that comes then."""
    _component(
        data={"name": name or ""},
        key=KEY,
        default={"name": ""},
        on_name_change=lambda: recall((st.session_state.get(KEY) or {}).get("name") or ""),
    )
