"""The plans that were found for what is open, fastest first."""

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from app import cached, state, widgets
from app.charts import ranked as charts
from app.optimise import goal
from app.optimise import table as plan_table
from app.text import plain
from engine import units
from engine.problem import Problem
from engine.systems import proposed_for


def show(problem: Problem, aim: str) -> None:
    """The table, what is known of the open plan, and the way on. aim: of `goal`"""
    table = plan_table.rows(problem)
    if table.empty:
        if all(job.state.finished for job in cached.jobs(state.plan_jobs())):  # else its row says how far a job is
            st.info(
                f"No plan for these inputs yet: press Run. {proposed_for(problem).title} takes a few seconds on the sample.",
                icon=":material/info:",
            )
        return
    st.subheader("Candidate plans", anchor=False)
    on = "Simulated" if aim == goal.STEP else "Simulated on the open workload"
    caption = f"{on}, fastest first. Select a row to open its plan."
    if len(table) > 1 and table["Time"][0] > 0:
        deployed = table.index[table["deployed"]]
        other = table.iloc[deployed[0] if len(deployed) and deployed[0] else -1]
        factor = units.ratio(other["Time"] / table["Time"][0])
        caption = f"{plain(table['Plan'][0])} is {factor} as fast as {plain(other['Plan'])}. {caption}"
    st.caption(caption)
    if aim != goal.STEP:  # whose chart shows what their time is made of too
        widgets.chart(_ranked(table), "plans-ranked")
    plan_table.show(table)
    if aim == goal.STEP:
        st.caption(
            "Exposed communication: the network is busy and nothing computes. Memory: weights, gradients and momentum on "
            "the fullest GPU, without activations."
        )
        plan_table.decomposition(table, problem)
    opened = table[table["id"] == state.plan_id()]
    if len(opened):
        plan_table.notes(opened.iloc[0])
    st.page_link("../pages/timeline.py", label="See why on the timeline", icon=":material/view_timeline:")


def _ranked(table: pd.DataFrame) -> go.Figure:
    deployed, opened = (next(iter(table.index[table[which]]), None) for which in ("deployed", "open"))
    columns = (table[name].astype(float).tolist() for name in ("Time", "Bound"))
    return charts.ranked(table["Plan"].tolist(), *columns, deployed, opened, st.context.theme.type == "dark")
