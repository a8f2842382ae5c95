"""The address that somebody asked for, a plan's link or their session's, kept in the browser while they log in."""

from collections.abc import Callable
from pathlib import Path

import streamlit as st

_component = st.components.v2.component(
    "way_back", js=(Path(__file__).parent / "way_back.js").read_text(encoding="utf-8")
)


def leaving() -> None:
    """Keep the address of the page; call at every run where somebody may go to a login."""
    # The browser looks at its address again only where something here is new.
    at = {"page": st.context.url, "query": st.query_params.to_dict()}
    _component(data={"leaving": True, "at": at}, key="way-back-leaving")


def back(on_done: Callable[[], None]) -> None:
    """Go to the address that was kept, if one was. on_done: called once the browser has looked and stays; until then a run may
    have been broken off before the browser saw this, so it is to be drawn again."""
    _component(data={"leaving": False}, key="way-back", default={"done": False}, on_done_change=on_done)
