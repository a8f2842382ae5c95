"""What do I have?"""

import streamlit as st

from app import cached, drop_zone, header, samples, state, widgets
from app.cluster import costs, drawing, links, measuring, pairs, summary, table, trust
from app.text import plain
from engine import catalogue
from engine.catalogue.nvidia import Drawn
from engine.cluster import Cluster
from engine.errors import InputError
from engine.launch.places.devices import cluster_of


def tell(drawn: Drawn) -> None:
    """What was drawn, and what was assumed for it."""
    gpus = f"{len(drawn.cluster.gpus)} GPU{'s' if len(drawn.cluster.gpus) > 1 else ''}"
    st.success(f"{plain(drawn.cluster.name)}: {gpus}. {plain('; '.join(drawn.notes))}.", icon=":material/memory:")


def open_drawn(cluster: Cluster) -> None:
    """Before the page is drawn, so that all of it shows the new cluster."""
    state.open_cluster(cluster)
    state.notice(f"opened the cluster {cluster.name}")


header.show("Cluster", "What do I have? Draw it, or edit the table; each follows the other.")

source, upload = st.columns(2, gap="large")
with source:
    presets = samples.clusters()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox(
            "Start from a preset",
            list(presets),
            index=None,
            placeholder="Choose a cluster",
            format_func=lambda name: f"{name}: {presets[name].description}",
        )
        if st.button("Open the preset", disabled=chosen is None, icon=":material/folder_open:"):
            state.open_cluster(presets[chosen].cluster)
            st.rerun()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        kind = st.selectbox(
            "GPU type, where the driver or a file does not name it",
            list(catalogue.gpu_types()),
            index=None,
            placeholder="as detected",
        )
        detect = st.button(
            "Detect attached GPUs", icon=":material/memory:", help="looks at the machine that the studio runs on"
        )
    if detect:
        devices = cached.attached()
        try:
            drawn = cluster_of(devices.machine, kind)
        except InputError as error:
            notes = "".join(f" ({plain(note)})" for note in devices.notes)
            st.warning(f"{plain(devices.summary)}: {plain(str(error))}{notes}", icon=":material/info:")
        else:
            st.markdown(plain(devices.summary))
            tell(drawn)
            st.button("Open these GPUs", icon=":material/folder_open:", on_click=open_drawn, args=(drawn.cluster,))
with upload:
    drop_zone.show(
        "cluster-file",
        "Or open a cluster file, nvidia-smi topo -m, or nccl-tests of pairs",
        "`nvidia-smi -L > topo.txt; nvidia-smi topo -m >> topo.txt` also names the GPUs. Logs of `sendrecv_perf` between two "
        "GPUs each, dropped together, are drawn as the cluster that meets them best.",
        kind,
    )

cluster = state.cluster()
drawing.board(cluster)
if cluster is None:
    st.info("No cluster is open yet. Draw one, open a preset or a file, or take the sample:", icon=":material/info:")
    widgets.sample_button()
    st.stop()
links.show(cluster)

st.subheader("Inventory", anchor=False)
st.caption(
    "An empty number is the datasheet's. Links connect the GPUs of one node; without them they meet on the fabric."
)
edited = st.data_editor(
    table.base_frame(),
    key=f"cluster-table-{state.edit_round()}",
    num_rows="dynamic",
    hide_index=True,
    placeholder="—",
    column_config=table.columns(),
)
latency = st.number_input(
    "Start-up of one send over the fabric, µs",
    0.0,
    1e6,
    table.base_latency(),
    step=1.0,
    key=f"cluster-latency-{state.edit_round()}",
    width=320,
)
try:
    changed = table.to_cluster(edited, cluster, latency, table.base_frame())
except InputError as error:
    st.error(f"{plain(str(error))} The last valid cluster stays open.", icon=":material/error:")
else:
    if changed != cluster:
        state.open_cluster(changed, edited=table.shows(edited, changed))
        st.rerun()

summary.show(cluster)
pairs.show()

st.subheader("Where times come from", anchor=False)
st.caption("Every simulated time counts with these costs; each page names them.")
costs.choose(cluster, state.model())
measuring.show(cluster, state.model())
trust.show()
