"""A first visit on the sample: one quiet line a page that says what to look at, and leads to the next."""

import streamlit as st

from app import state

STEPS = {
    "Workload": (
        "workload",
        "Real routing of a small model: the bars show how unevenly the experts of each layer are used.",
    ),
    "Cluster": (
        "cluster",
        "Eight GPUs of four types: drag one, or edit the table, and every page counts with what you drew.",
    ),
    "Affinity": ("affinity", "Strong cells tell which expert follows which: on one GPU, their tokens need not travel."),
    "Optimise": ("optimise", "Press Run: systems and baselines make plans, each beside a proven bound."),
    "Timeline": (
        "timeline",
        "Every send and every computation of the plan above its baselines shows where time is won.",
    ),
    "Launch": ("launch", "Start runs the plan as a real job on this machine and lays the measured over the predicted."),
}
"""By the title of its page: the page's file, and one sentence."""


def show(page: str) -> None:
    """The step of the page of a title, where there is one and the tour is on."""
    if page not in STEPS or not state.on_tour():
        return
    titles = list(STEPS)
    at = titles.index(page)
    with st.container(border=True, horizontal=True, vertical_alignment="center", key="tour"):
        st.caption(f":material/explore: **Guide, {at + 1} of {len(titles)}.** {STEPS[page][1]}", width="stretch")
        if page != titles[-1]:
            file, _ = STEPS[titles[at + 1]]
            st.page_link(f"../pages/{file}.py", label=f"Next: {titles[at + 1]}", icon=":material/arrow_forward:")
        st.button("End guide", type="tertiary", icon=":material/close:", on_click=state.end_tour)
