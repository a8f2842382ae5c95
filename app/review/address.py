"""Links to saved plans, for anybody who reaches this studio: they name no session."""

from urllib.parse import urlencode, urlsplit

import streamlit as st

from engine.store.team import SavedPlan
from engine.store.team_place import Place


def link_to(saved: SavedPlan, review: str | None, place: Place | None = None) -> str:
    """A link to a saved plan, its review (an id) and what a comment points to; asked for on the Review page."""
    parameters = {"plan": saved.plan} | ({"review": review} if review else {})
    parameters |= {} if place is None else {"about": str(place)}
    here = urlsplit(st.context.url or "")
    page = f"{here.scheme}://{here.netloc}{here.path}" if here.netloc else "/review"
    return f"{page}?{urlencode(parameters)}"
