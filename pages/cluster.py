"""What do I have?"""

import streamlit as st

from app import cluster_table, costs_form, samples, state, uploads, widgets
from app.charts import cluster as charts
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.problem import MEMORY_SHARE

widgets.header("Cluster", "What do I have? Edit the table; the picture follows.")

source, upload = st.columns(2, gap="large")
with source:
    presets = samples.clusters()
    chosen = st.selectbox(
        "Start from a preset", list(presets), index=None, placeholder="Choose a cluster",
        format_func=lambda name: f"{name}: {presets[name].description}",
    )  # fmt: skip
    if st.button("Open the preset", disabled=chosen is None, icon=":material/folder_open:"):
        state.open_cluster(presets[chosen].cluster)
        st.rerun()
with upload:
    file = st.file_uploader("Or open a cluster file (JSON)", type=["json"], key="cluster-file")
    if file and state.first_time(file.file_id):
        try:
            state.notice(uploads.receive(file.name, file.getvalue()))
            st.rerun()
        except InputError as error:
            state.complain(file.file_id, str(error))
    for complaint in state.complaints([file.file_id] if file else []):
        st.error(plain(complaint), icon=":material/error:")

cluster = state.cluster()
if cluster is None:
    st.info("No cluster yet. Open a preset or a file, or take the sample:", icon=":material/info:")
    widgets.sample_button()
    st.stop()

widgets.chart(charts.picture(cluster), "cluster-picture")

st.subheader("Inventory", anchor=False)
st.caption(
    "An empty number is the datasheet's. Links connect the GPUs of one node; without them they meet on the fabric."
)
edited = st.data_editor(
    cluster_table.base_frame(),
    key=f"cluster-table-{state.edit_round()}",
    num_rows="dynamic",
    hide_index=True,
    placeholder="datasheet",
    column_config=cluster_table.columns(),
)
latency = st.number_input(
    "Start-up of one send over the fabric, µs", 0.0, 1e6, cluster_table.base_latency(), step=1.0,
    key=f"cluster-latency-{state.edit_round()}", width=320,
)  # fmt: skip
try:
    changed = cluster_table.to_cluster(edited, cluster, latency)
except InputError as error:
    st.error(f"{plain(str(error))} The last valid cluster stays open.", icon=":material/error:")
else:
    if changed != cluster:
        state.open_cluster(changed, edited=True)
        st.rerun()

with st.container(horizontal=True, gap="large"):
    st.metric("GPUs", len(cluster.gpus))
    st.metric("Memory", f"{cluster.values('memory').sum() / 2**30:,.0f} GiB")
    st.metric("Peak, 16 bits", f"{cluster.values('flops_fp16').sum() / 1e15:.3g} PFLOP/s")
    st.metric("To the fabric", units.bandwidth(float(cluster.values("send_bandwidth").sum())))
    st.space("stretch")
    st.download_button(
        "Save as JSON", uploads.as_json(cluster), f"{cluster.name}.json", "application/json", icon=":material/download:"
    )

model = state.model()
if model:
    per_expert = model.bytes_per_expert * len(model.moe_layers)
    needed = per_expert * model.experts
    room = float(cluster.values("memory").sum()) * MEMORY_SHARE
    say = st.success if needed <= room else st.error
    say(
        f"{plain(model.name)}: experts take {units.size(needed)} of the {units.size(room)} that this cluster has "
        f"for weights ({MEMORY_SHARE:.0%} of memory)",
        icon=":material/memory:",
    )

st.subheader("Where times come from", anchor=False)
st.caption("Every simulated time counts with these costs; each page names them.")
costs_form.choose(cluster, model)
