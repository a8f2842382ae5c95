"""Shall we do it?"""

import streamlit as st

from app import review_compare, review_link, review_list, review_show, review_store, state, widgets
from app.text import plain
from engine.errors import InputError

try:
    review_store.db()
    fault = review_link.follow()
except InputError as error:
    widgets.header(
        "Review", "Shall we do it? Plans that the team saved, what was said about them, and what was decided."
    )
    st.error(plain(str(error)), icon=":material/error:")
    st.stop()
widgets.header("Review", "Shall we do it? Plans that the team saved, what was said about them, and what was decided.")
if fault:
    st.error(f"The link cannot be opened: {plain(fault)}.", icon=":material/link_off:")
if state.is_empty():
    st.info(
        "Nothing is open in this session. Look at a saved plan below, or start from the sample.", icon=":material/info:"
    )
    widgets.sample_button()

workspace = review_list.choose_workspace()
if workspace is None:
    st.info("Make a workspace to keep plans in: a name for what they are for, such as a cluster or a quarter.",
            icon=":material/info:")  # fmt: skip
    review_list.watch()
    st.stop()
view = st.segmented_control(
    "Show", ["Plans", "Compare"], default="Plans", required=True, label_visibility="collapsed", key="review-view",
    format_func={"Plans": ":material/list: Plans", "Compare": ":material/compare: Compare"}.get,
)  # fmt: skip
if view == "Plans":
    review_list.show(workspace)
    if (looked_at := review_list.looked_at(workspace)) is not None:
        review_show.show(*looked_at)
else:
    review_compare.show(workspace)
review_list.watch()
