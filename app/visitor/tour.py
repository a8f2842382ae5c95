"""A first visit on a sample: one quiet line a page that says what to look at, and leads to the next."""

import streamlit as st

from app import state
from app.text import plain

STEPS = {
    "Workload": ("workload", "The chart shows how unevenly experts are used in {workload}."),
    "Cluster": ("cluster", "{gpus}: drag one, or edit the table, and every page uses what you drew."),
    "Affinity": ("affinity", "Strong cells: experts that belong on one GPU."),
    "Optimise": ("optimise", "{plans} a proven bound."),
    "Timeline": ("timeline", "See where the plan wins time over its baselines."),
    "What-if": ("what_if", "Move a slider: what is the plan worth then?"),
    "Review": (
        "review",
        "Save a plan and it gets a page: what it gains, where it fails, and what others say about it.",
    ),
    "Launch": (
        "launch",
        "Start runs the plan as a real job on this machine and shows measured times over the predicted ones.",
    ),
}
"""By the title of its page: the page's file, and one sentence on what is open."""


def show(page: str) -> None:
    """The step of the page of a title, where there is one and the tour is on."""
    if page not in STEPS or not state.on_tour():
        return
    titles = list(STEPS)
    at = titles.index(page)
    with st.container(horizontal=True, wrap=False, vertical_alignment="center", key="tour"):
        st.caption(f":material/explore: **Guide, {at + 1} of {len(titles)}.** {sentence(page)}", width="stretch")
        if page != titles[-1]:
            file, _ = STEPS[titles[at + 1]]
            st.page_link(f"../pages/{file}.py", label=f"Next: {titles[at + 1]}", icon=":material/arrow_forward:")
        st.button("End guide", type="tertiary", icon=":material/close:", on_click=state.end_tour)


def sentence(page: str) -> str:
    """A page's sentence, with what is open now."""
    workload, cluster = state.workloads().get(state.workload_digest() or ""), state.cluster()
    types = len({gpu.type for gpu in cluster.gpus}) if cluster else 0
    return STEPS[page][1].format(
        workload=f"“{plain(workload)}”" if workload else "what was recorded",
        plans="Each plan has" if state.plan_jobs() else "Press Run: each plan gets",
        gpus=f"{len(cluster.gpus)} GPUs of {types} type{'s' * (types > 1)}" if cluster else "Nothing drawn yet",
    )
