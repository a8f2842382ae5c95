"""What did I record, and can I trust it?"""

import pandas as pd
import streamlit as st

from app import cached, header, samples, state, uploads, widgets
from app.charts import workload as charts
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.workload import RoutingTrace

LEVELS = {
    "ok": (st.success, ":material/check_circle:"),
    "warning": (st.warning, ":material/warning:"),
    "error": (st.error, ":material/error:"),
}
ROWS_SHOWN = 1000

header.show("Workload", "What did I record, and can I trust it?")

drop, gallery = st.columns([2, 3], gap="large")
with drop:
    st.subheader("Your recordings", anchor=False)
    files = st.file_uploader(
        "Routing logs, expert loads, traffic matrices, a model's config.json",
        type=uploads.TYPES,
        accept_multiple_files=True,
        key="recordings",
        help="npz, npy, CSV, Parquet or SGLang statistics JSON",
    )
    st.caption("A red file is above 200 MB: cut it to fewer tokens, or save it as .npz or Parquet, which are smaller.")
    # Recordings before JSON, so that a recording and its model can be dropped together in any order.
    for file in sorted(files, key=lambda file: file.name.lower().endswith(".json")):
        if state.first_time(file.file_id):
            try:
                state.notice(uploads.receive(file.name, file.getvalue()))
                st.rerun()
            except InputError as error:
                state.complain(file.file_id, str(error))
    for complaint in state.complaints([file.file_id for file in files]):
        st.error(plain(complaint), icon=":material/error:")
with gallery:
    st.subheader("Samples", anchor=False)
    st.caption("Real routing of two small models, recorded on held-out text; see sample_traces/README.md.")
    for first in range(0, len(samples.RECORDINGS), 4):
        for place, sample in zip(st.columns(4), samples.RECORDINGS[first : first + 4], strict=True):
            if place.button(sample.title, key=sample.file, help=sample.text, width="stretch"):
                samples.open_recording(sample)
                st.rerun()

workload = cached.workload()
if workload is None:
    st.info("Drop a recording, open one of the samples, or take everything at once:", icon=":material/info:")
    widgets.sample_button()
    st.stop()

inspection = cached.inspection()
with st.container(horizontal=True, gap="large"):
    st.metric("Recorded", inspection.kind)
    if inspection.tokens is not None:
        st.metric("Tokens", f"{inspection.tokens:,}")
    st.metric("MoE layers × experts", f"{inspection.layers} × {inspection.experts}")
    st.metric("Worst skew", units.ratio(float(inspection.skew.max())), help="busiest expert / mean expert of a layer")
    if inspection.predicted is not None and len(inspection.predicted):
        st.metric(
            "Affinity",
            units.share(float(inspection.predicted.mean())),
            help=f"how often the likeliest next expert is right, given the present one; by chance "
            f"{units.share(1 / inspection.experts)} (ExFlow §III)",
        )
    st.space("stretch")
    st.page_link("../pages/optimise.py", label="Next: make a plan", icon=":material/arrow_forward:")

worst = max((finding.level for finding in inspection.findings), key=list(LEVELS).index, default="ok")
with st.expander(f"Checks: {worst}", expanded=worst == "error", icon=LEVELS[worst][1]):
    for finding in inspection.findings:
        show, icon = LEVELS[finding.level]
        show(plain(finding.text), icon=icon)

view = widgets.segments("Show", ["Popularity", "Traffic", "Table"], default="Popularity", label_visibility="collapsed")
if view == "Popularity":
    widgets.chart(charts.popularity(workload.load), "popularity")
elif view == "Traffic":
    problem = widgets.needed_problem()
    layer = st.slider("MoE layer", 0, workload.layers - 1, 0) if workload.layers > 1 else 0
    plan = cached.open_plan()
    placement, whose = widgets.placement_to_show(plan, problem)
    st.caption(
        f"Bytes of the dispatch all-to-all under {whose}; combine is the same backwards. Sequences are spread "
        "round-robin over the GPUs unless the recording names their ranks."
    )
    widgets.chart(charts.traffic(problem.traffic(placement)[layer], problem.cluster.gpu_names), "traffic")
elif isinstance(workload, RoutingTrace):
    head = workload.experts[:ROWS_SHOWN]
    columns = {f"layer {i}": [" ".join(map(str, row)) for row in head[:, i]] for i in range(workload.layers)}
    st.caption(f"The experts of the first {len(head):,} of {workload.tokens:,} tokens")
    st.dataframe(pd.DataFrame(columns).rename_axis("token"))
else:
    st.dataframe(pd.DataFrame(workload.load).rename_axis("layer"))
