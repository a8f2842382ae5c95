"""The sends of one layer on a few GPUs, where the whole timeline has bundles."""

from dataclasses import replace

import streamlit as st

from app import cached, failing, kept, widgets
from app.charts import gantt as charts
from app.charts import lanes
from app.text import plain
from engine.formats.perfetto import write_trace
from engine.goal import Goal
from engine.plan import Plan
from engine.problem import Problem


@failing.fragment
def show(plan: Plan, problem: Problem) -> None:
    """Once asked for: a layer and GPUs to choose, their chart, and a file with what it shows."""
    gpus, last_layer = problem.cluster.gpu_names, problem.workload.layers - 1
    if not kept.toggle("Send by send", key="send-by-send", help="every send of one layer, of the GPUs you choose"):
        return
    layer = kept.slider("MoE layer", 0, last_layer, 0, key="send-by-send-layer") if last_layer > 0 else 0
    whole = cached.sends_of_layer(plan, problem, layer)
    most = min(lanes.gpus_with_sends(len(gpus), 2 if plan.goal is Goal.TWO_MODELS else 1), lanes.MOST_SENDERS)
    waits = cached.waits(plan, problem)
    awaited = waits.loc[waits["layer"] == layer, "gpu"].unique()[:most].tolist()
    chosen = kept.multiselect(
        "GPUs",
        range(len(gpus)),
        awaited,
        lambda gpu: plain(gpus[gpu]),
        max_selections=most,
        key=f"senders-{plan.id[:16]}-{layer}",
        placeholder=f"Choose up to {most}",
        help="first those that the others wait for in this layer",
    )
    if not chosen:
        return
    part, count = lanes.only(whole, sorted(chosen))
    title = f"Layer {layer} of {charts.plain(plan.name)}, send by send, on {count} of {len(gpus)} GPUs"
    widgets.gantt(
        charts.gantt({plan.name: part}, layer, layer, title, lanes=count, dark=st.context.theme.type == "dark"),
        f"sends-{plan.id[:16]}",
    )
    st.download_button(
        "Download Perfetto trace of these sends",
        lambda: write_trace(replace(whole, events=whole.events[whole.events["resource"].isin(chosen)])),
        f"timeline-layer-{layer}.json",
        "application/json",
        icon=":material/download:",
        on_click="ignore",
    )
