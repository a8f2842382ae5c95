"""Do it."""

import streamlit as st

from app import cached, header, verdict_line, widgets
from app.export import panel as export
from app.launch import form, history, report, watch

actions = header.show(
    "Launch",
    "Do it: plans as a torch.distributed job, on attached devices or emulated links, measured beside predicted.",
)
watch.watch()
past = history.launches()
problem = widgets.problem_or_advice()
plan = cached.open_plan()
if problem is not None and plan is None:
    st.info("Open a plan first: choose one in the sidebar or make one.", icon=":material/info:")
    st.page_link("../pages/optimise.py", label="Make a plan", icon=":material/play_arrow:")
if problem is not None and plan is not None:
    widgets.say_inference_only()
    if not widgets.why_not(plan, problem):
        verdict_line.show_plan_if_soon(plan, problem)
    form.form(problem, plan, past, actions)
    export.show(plan, problem, "launch")
watch.others(past)
if past:
    chosen = history.choose(past)
    if chosen is not None:
        report.show(chosen, past)
