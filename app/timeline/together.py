"""What colocating is for: how much of the time the GPUs compute with each model alone, and with both."""

import streamlit as st

from app import cached, widgets
from app.charts import utilisation as charts
from engine.plan import Plan
from engine.problem import Problem


def show(plan: Plan, problem: Problem) -> None:
    """Of a plan for two models."""
    st.subheader("Alone and together", anchor=False)
    st.caption(
        "What colocating is for: GPU utilisation with each model alone on all GPUs, placed as in this plan, and with both "
        "(Aurora, Figure 12). Bars are means over the GPUs, dots single ones."
    )
    widgets.chart(charts.exclusive_and_colocated(cached.utilisation(plan, problem).parts), "utilisation")
