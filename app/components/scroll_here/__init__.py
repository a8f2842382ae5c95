"""Scrolls the page to where it stands."""

from pathlib import Path

import streamlit as st

_component = st.components.v2.component(
    "scroll_here", js=(Path(__file__).parent / "scroll_here.js").read_text(encoding="utf-8"), html="<span></span>"
)


def once(turn: int) -> None:
    """Scroll here when this is first drawn with a turn; later runs leave the page where the person has it."""
    _component(data={"turn": turn}, key="scroll-here")
