"""A cluster out of files, or off the machine that the studio runs on."""

import streamlit as st

from app import cached, drop_zone, state
from app.text import plain
from engine import catalogue
from engine.catalogue.nvidia import Drawn
from engine.cluster import Cluster
from engine.errors import InputError
from engine.launch.places.devices import cluster_of


def show() -> None:
    """A drop zone, and a look for GPUs; what either found and what it assumed stays below it."""
    kind = st.selectbox(
        "GPU type, where the driver or a file does not name it",
        list(catalogue.fastest_first(catalogue.gpu_types())),
        index=None,
        placeholder="as detected",
    )
    drop_zone.show(
        "cluster-file",
        "A cluster file, nvidia-smi topo -m, or pairwise nccl-tests output",
        "`nvidia-smi -L > topo.txt; nvidia-smi topo -m >> topo.txt` also names the GPUs. Logs of `sendrecv_perf` between two "
        "GPUs each, dropped together, are drawn as the cluster that fits them best.",
        kind,
    )
    detect = st.button(
        "Detect attached GPUs", icon=":material/memory:", help="looks at the machine that the studio runs on"
    )
    if detect:
        _detect(kind)


def _detect(kind: str | None) -> None:
    devices = cached.attached()
    try:
        drawn = cluster_of(devices.machine, kind)
    except InputError as error:
        notes = "".join(f" ({plain(note)})" for note in devices.notes)
        st.warning(f"{plain(devices.summary)}: {plain(str(error))}{notes}", icon=":material/info:")
        return
    st.markdown(plain(devices.summary))
    _tell(drawn)
    st.button("Open these GPUs", icon=":material/folder_open:", on_click=_open, args=(drawn.cluster,))


def _tell(drawn: Drawn) -> None:
    """What was drawn, and what was assumed for it."""
    gpus = f"{len(drawn.cluster.gpus)} GPU{'s' if len(drawn.cluster.gpus) > 1 else ''}"
    st.success(f"{plain(drawn.cluster.name)}: {gpus}. {plain('; '.join(drawn.notes))}.", icon=":material/memory:")


def _open(cluster: Cluster) -> None:
    """Before the page is drawn, so that all of it shows the new cluster."""
    state.open_cluster(cluster)
    state.notice(f"opened the cluster {cluster.name}")
