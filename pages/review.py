"""Shall we do it?"""

import streamlit as st

from app import header, kept, state, widgets
from app.review import compare, link, place, plan_list, saved, show
from app.text import plain
from engine.errors import InputError
from engine.store.database import LostError

VIEWS = {"Plans": ":material/list: Plans", "Compare": ":material/compare: Compare"}


def page() -> None:
    """Everything below the header. Raises InputError when the team's database does not answer."""
    if state.is_empty():
        st.info(
            "Nothing is open in this session. Look at a saved plan, or start from the sample.", icon=":material/info:"
        )
        widgets.sample_button()
    workspace = saved.choose_workspace()
    if workspace is None:
        st.info(
            "Create a workspace to keep plans in, named for what they are for, such as a cluster or a quarter.",
            icon=":material/info:",
        )
        return
    view = kept.segments(
        "Show",
        list(VIEWS),
        default="Plans",
        required=True,
        label_visibility="collapsed",
        format_func=VIEWS.get,
        key="review-view",
    )
    if view == "Compare":
        compare.show(workspace)
        return
    plan_list.show(workspace)
    if (looked_at := saved.looked_at(workspace)) is not None:
        show.show(*looked_at)


fault = None
try:
    if (followed := link.follow()) is not None:
        fault = place.go(*followed)
except LostError:  # said below
    pass
except InputError as error:
    fault = f"This link does not work: {error}."
header.show("Review", "Shall we do it? Plans that the team saved, what was said about them, and what was decided.")
if fault:
    st.error(plain(fault), icon=":material/link_off:")
try:
    page()
    saved.watch()
except InputError as error:
    state.keep_typed()
    st.error(plain(str(error)), icon=":material/error:")
