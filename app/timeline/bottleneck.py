"""What the others wait for: the time of a whole plan by the GPU that ends each step last, and by layer."""

from collections.abc import Sequence

import streamlit as st

from app import cached, widgets
from app.charts import waits as charts
from engine.plan import Plan
from engine.problem import Problem


def show(plan: Plan, problem: Problem, gpus: Sequence[str]) -> None:
    """Both charts, none of a plan that takes no time. gpus: their names"""
    st.subheader("The bottleneck", anchor=False)
    st.caption(
        "Every step of a layer ends with its slowest GPU; this is the time of the whole open plan by the GPU that the "
        "others wait for, and by layer. Of a transfer the end with the busier port counts; where several finish together, "
        "one of them."
    )
    waits = cached.waits(plan, problem)
    if not len(waits):
        return
    by_gpu, by_layer = st.columns(2, gap="large")
    with by_gpu:
        widgets.chart(charts.by_gpu(waits, gpus), "waits-by-gpu")
    with by_layer:
        widgets.chart(charts.by_layer(waits), "waits-by-layer")
