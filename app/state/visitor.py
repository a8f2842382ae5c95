"""Who looks, what they ask of a plan, and where they left the studio: name, workspace, guide and sliders."""

import streamlit as st

from app.state.address import change
from app.state.moment import recalled_person
from engine.compare.evidence import Thresholds


def person() -> str | None:
    """The name that a person typed, in this session or, as their browser recalls it, in another."""
    return st.session_state.person or recalled_person()


def set_person(name: str) -> None:
    change(person=name)


def workspace() -> str | None:
    """Id of the workspace that was looked at last."""
    return st.session_state.workspace


def choose_workspace(id: str | None) -> None:
    if id != workspace():
        change(workspace=id)


def on_tour() -> bool:
    """Whether the guide through the sample is on."""
    return st.session_state.tour == "on"


def begin_tour() -> None:
    """Show the guide, unless this session has seen it."""
    if st.session_state.tour is None:
        change(tour="on")


def end_tour() -> None:
    change(tour="seen")


def thresholds() -> Thresholds:
    """What a plan has to reach for a verdict in its favour."""
    return st.session_state.thresholds


def set_thresholds(thresholds: Thresholds) -> None:
    if thresholds != st.session_state.thresholds:
        change(thresholds=thresholds)
