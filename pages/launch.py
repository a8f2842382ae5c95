"""The Launch page: do it."""

import time

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import cached, components, export, header, state, verdict_line, widgets
from app.launch import form, history, report, watch
from app.launch.history import Launched


def new_launch(past: list[Launched], showing: str | None, actions: DeltaGenerator) -> None:
    """The form, folded away while another launch is shown (its id), with a button in the head that opens it."""
    problem, plan = widgets.problem_or_advice(), cached.open_plan()
    if problem is None:
        return
    if plan is None:
        st.info("Open a plan first: choose one in the sidebar or make one.", icon=":material/info:")
        st.page_link("../pages/optimise.py", label="Make a plan", icon=":material/play_arrow:")
        return
    key = f"new-launch-{showing}"  # another key for every launch that is shown, folded away again
    if showing is not None:
        with actions:
            unfold = {"on_click": st.session_state.__setitem__, "args": (key, True)}
            asked = st.button("New launch", icon=":material/add:", key="to-new-launch", **unfold)
        if asked:
            components.scroll_here_once(time.time_ns() // 1_000_000)
    with st.expander("New launch", showing is None, icon=":material/rocket_launch:", key=key, on_change="rerun"):
        start = st.container(horizontal=True, wrap=False, vertical_alignment="center")
        widgets.say_inference_only()
        if not widgets.why_not(plan, problem):
            verdict_line.show_plan_if_soon(plan, problem)
            verdict_line.say_made_for(plan, problem)
        form.form(problem, plan, past, start)
    export.show(plan, problem, "launch")


actions = header.show("Launch", "Run plans as a real job and compare measured with predicted times.")
past = history.launches()
chosen = history.chosen(past)
running = [launch.job.id for launch in past if launch.job.id in state.session.launch_jobs and not launch.state.finished]
showing = running[0] if running else chosen.job.id if chosen else None
if past and showing is not None:
    with actions:
        history.fold(past, chosen.job.id if chosen else None)
watch.watch()
if chosen is not None:
    report.show(chosen, past)
new_launch(past, showing, actions)
watch.others(past)
if past and showing is None:
    st.subheader("Launches", anchor=False)
    history.show(past, None)
