"""The Workload page: the recording, and if it can be trusted."""

import pandas as pd
import streamlit as st

from app import cached, header, kept, model_catalogue, state, tables, widgets, workload
from app.charts import workload as charts
from engine.simulate.work import Load
from engine.workload import RoutingTrace, TrafficMatrix

ROWS_SHOWN = 1000

workload.open_recorded()  # before the head, which says what is open
actions = header.show("Workload", "What did I record, and can I trust it?")

welcomed = state.is_empty() and not state.visit.brings_own
if welcomed and not state.visit.records:
    workload.show_welcome()

workload.show_recording()
workload.show_sources()
recording = cached.workload()
if recording is None:
    if welcomed:
        st.info("Drop a recording, or open one of the samples.", icon=":material/info:")
    else:
        st.info("Drop a recording, open one of the samples, or take everything at once:", icon=":material/info:")
        widgets.sample_button()
    workload.show_recordings()
    st.stop()

inspection = cached.inspection()
has_error = workload.has_error(inspection.findings)
with actions:
    if not has_error:
        workload.show_checks(recording, inspection.findings)
    workload.save_popover(recording)
    st.page_link("../pages/optimise.py", label="Make a plan", icon=":material/arrow_forward:")
model_catalogue.offer(recording)
workload.show_figures(inspection)
if has_error:
    workload.show_checks(recording, inspection.findings)

view = kept.segments(
    "Show", ["Popularity", "Traffic", "Table"], default="Popularity", label_visibility="collapsed", key="workload-view"
)
below = st.container()
workload.show_recordings()  # first: a view that lacks an input ends the run
with below:
    if view == "Popularity":
        of = "GPU" if isinstance(recording, TrafficMatrix) else "expert"
        widgets.chart(lambda: charts.popularity(recording.load, of), "popularity", recording.digest)
        model_catalogue.say_what_counts(recording)
    elif view == "Traffic":
        problem = widgets.needed_problem()
        layer = kept.slider("MoE layer", 0, recording.layers - 1, 0, key="traffic-layer") if recording.layers > 1 else 0
        plan = cached.open_plan()
        placement, whose = widgets.placement_to_show(plan, problem)
        travel = plan.travel if plan is not None and placement is plan.placement else problem.travel
        how = "" if travel is None else f" with {travel.in_words}"
        st.caption(
            f"Bytes of the dispatch all-to-all under {whose}{how}; combine is the same backwards. Sequences are spread "
            "round-robin over the GPUs unless the recording names their ranks."
        )
        widgets.chart(charts.traffic(Load(problem, placement, travel).traffic[layer], problem.cluster.gpu_names), "traffic")
    elif isinstance(recording, RoutingTrace):
        head = recording.experts[:ROWS_SHOWN]
        columns = {f"layer {i}": [" ".join(map(str, row)) for row in head[:, i]] for i in range(recording.layers)}
        st.caption(f"The experts of the first {len(head):,} of {recording.tokens:,} tokens")
        tables.show(pd.DataFrame(columns).rename_axis("token"))
    else:
        tables.show(pd.DataFrame(recording.load).rename_axis("layer"))
