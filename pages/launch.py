"""Do it."""

import streamlit as st

from app import cached, header, launch_form, launch_history, launch_report, launch_watch, widgets

header.show(
    "Launch",
    "Do it: plans as a torch.distributed job, on attached devices or emulated links, measured beside predicted.",
)
past = launch_history.launches()
problem = widgets.problem_or_advice()
plan = cached.open_plan()
if problem is not None and plan is None:
    st.info("Open a plan first: choose one in the row above or make one.", icon=":material/info:")
    st.page_link("../pages/optimise.py", label="Make a plan", icon=":material/play_arrow:")
if problem is not None and plan is not None:
    launch_form.form(problem, plan, past)
launch_watch.watch()
launch_watch.others(past)
if past:
    chosen = launch_history.choose(past)
    if chosen is not None:
        launch_report.show(chosen, past)
