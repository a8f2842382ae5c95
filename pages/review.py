"""The Review page: should we do it?"""

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import header, kept, state, widgets
from app.review import compare, place, plan_list, show, store
from app.tables import plain, sentence
from engine.errors import InputError
from engine.store.database import LostError

VIEWS = {"Plans": ":material/list: Plans", "Compare": ":material/compare: Compare"}


def page(actions: DeltaGenerator) -> None:
    """Everything below the header. Raises InputError when the team's database does not answer."""
    if state.is_empty():
        st.info("Nothing is open in this session. Look at a saved plan, or start from the sample.", icon=":material/info:")
        widgets.sample_button()
    names = plan_list.workspace_names()
    workspace = plan_list.chosen_workspace(names)
    if workspace is None:
        with actions:
            plan_list.save_open_plan(None)
        plan_list.new_workspace()
        st.info(
            "No plan is saved yet. The first one begins the workspace "
            f"{plan_list.FIRST}, or create one named for example after a cluster or a quarter.",
            icon=":material/info:",
        )
        return
    brief = plan_list.looked_at(workspace) if state.session.choices.get(plan_list.VIEW) != "Compare" else None
    with actions:
        if brief is not None:
            plan_list.fold(names, workspace)
        plan_list.save_open_plan(workspace)
    if brief is not None:
        show.show(*brief)
        return
    state.write_link("", "")  # a reload stays here
    with st.container(horizontal=True, vertical_alignment="center"):
        view = kept.segments(
            "Show",
            list(VIEWS),
            default="Plans",
            required=True,
            label_visibility="collapsed",
            format_func=VIEWS.get,
            key=plan_list.VIEW,
        )
        plan_list.choose_workspace(names, workspace)
        plan_list.new_workspace()
    if view == "Compare":
        compare.show(workspace)
    else:
        plan_list.show(workspace)


fault = None
try:
    if state.asked_link() is not None:
        plan_list.look_at_plans()  # the address leads to one, whichever was on the page before
    if (followed := store.follow()) is not None:
        fault = place.go(*followed)
except LostError:  # said below
    pass
except InputError as error:
    fault = f"This link does not work: {error}."
actions = header.show("Review", "Should we do it? Saved plans, their discussion and decisions.")
if fault:
    st.error(plain(fault), icon=":material/link_off:")
try:
    page(actions)
    plan_list.watch()
except InputError as error:
    state.visit.keep_typed()
    st.error(sentence(str(error)), icon=":material/error:")
