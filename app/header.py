"""The head of every page: its name, the question that it answers, its actions, the guide's line."""

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import cached, sidebar, state
from app.optimise import serving_form
from app.optimise import step as step_form
from app.tables import plain
from app.visitor import glossary
from engine.workload import TrafficMatrix

VALUES_IN_INK = '<style>.stSlider [data-testid="stSliderThumbValue"]:not([disabled]) { color: inherit; }</style>'
"""Streamlit writes the values of sliders in the primary colour, which in the dark is not read there: see the theme."""


def show(title: str, question: str) -> DeltaGenerator:
    """One line: the page's name, its question, and at its right the page's own actions; also the sidebar."""
    step_form.follow_model()
    serving_form.follow_model()
    _remember_model()
    sidebar.show(title)
    st.html(VALUES_IN_INK)
    _say_what_is_not_kept()
    with st.container(horizontal=True, wrap=False, vertical_alignment="center"):
        st.header(title, anchor=False, width="content")
        st.caption(question, width="stretch")
        actions = st.container(horizontal=True, vertical_alignment="center", width="content")
    glossary.show(title)
    if text := state.visit.take("notice"):
        st.toast(plain(text))
    if text := state.visit.take("left_out"):
        st.toast(plain(text), icon=":material/warning:", duration="infinite")
    return actions


def _say_what_is_not_kept() -> None:
    """Warn of changes that a reload would not find again, with the ways out."""
    if state.visit.overtaken:
        with st.container(horizontal=True, vertical_alignment="center", key="overtaken"):
            st.warning(
                "This session was changed in another tab. Changes in this tab are not saved until you choose.",
                icon=":material/tab:",
            )
            st.button("Load the other tab's version", icon=":material/sync:", on_click=state.open_newer)
            st.button("Keep this tab's version", icon=":material/save:", on_click=state.keep_older)
    elif reason := state.visit.not_stored:
        with st.container(horizontal=True, vertical_alignment="center", key="not-stored"):
            st.error(f"What you change stays in this tab only: {plain(reason)}.", icon=":material/error:")
            st.button("Try again", icon=":material/sync:", on_click=state.store_again)


def _remember_model() -> None:
    """A recording that is open with a model that fits it counts as made with that model."""
    recording, model = cached.workload(), state.session.model
    if recording is None or model is None:
        return
    # A traffic matrix says nothing of experts, so it fits every model.
    if isinstance(recording, TrafficMatrix) or cached.model_fault(recording, model) is None:
        state.remember_model(state.session.workload, model)
