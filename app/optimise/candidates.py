"""The plans that were found for what is open: how the open one stands, and all beside what is deployed."""

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from app import cached, state, verdict_line, widgets
from app.charts import ranked as charts
from app.optimise import goal
from app.optimise import table as plan_table
from app.text import plain
from engine.problem import Problem


def show(problem: Problem, aim: str) -> None:
    """The table, what is known of the open plan, and the way on. aim: of `goal`"""
    table = plan_table.rows(problem)
    running = any(not job.state.finished for job in cached.jobs(state.plan_jobs()))
    if table.empty:
        if not running:  # else its row says how far a job is
            st.info("No plan for these inputs yet: choose systems and press Run.", icon=":material/info:")
        return
    shown = table[table["id"] == state.plan_id()]
    if aim == goal.STEP:
        plan_table.decomposition(table, problem)
    else:
        widgets.chart(_ranked(table, running), "plans-ranked")
    if len(shown):
        st.markdown(f"**{plain(shown['Plan'].iloc[0])}**")
        verdict_line.show_plan(cached.open_plan(), problem, narrow=True)
        verdict_line.say_made_for(cached.open_plan(), problem)
    on = "Simulated" if aim == goal.STEP else "Simulated on the open workload"
    st.subheader("Candidate plans", anchor=False)
    st.caption(f"{on}, fastest first; in the table what is deployed stays on top. Select a row to open its plan.")
    plan_table.show(table)
    if aim == goal.STEP:
        st.caption(
            "Exposed communication: the network is busy and nothing computes. Memory: weights, gradients and momentum on "
            "the fullest GPU, without activations."
        )
    if len(shown):
        plan_table.notes(shown.iloc[0], cached.made_for(cached.open_plan(), problem))
    with st.container(horizontal=True):
        st.page_link("../pages/timeline.py", label="See why on the timeline", icon=":material/view_timeline:")
        if aim == goal.ONE:
            st.page_link(
                "../pages/review.py", label="Save it and judge whether it is worth it", icon=":material/gavel:"
            )


def _ranked(table: pd.DataFrame, running: bool) -> go.Figure:
    deployed, opened = (next(iter(table.index[table[which]]), None) for which in ("deployed", "open"))
    columns = (table[name].astype(float).tolist() for name in ("Time", "Bound"))
    return charts.ranked(table["Plan"].tolist(), *columns, deployed, opened, st.context.theme.type == "dark", running)
