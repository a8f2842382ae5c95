"""The catalogue's clusters as a gallery of small pictures."""

import streamlit as st

from app import samples, state
from app.charts.preset_picture import svg
from app.text import plain
from engine.cluster import Cluster

CARD = 196
"""Pixels across."""


def gallery() -> None:
    """A card each, which opens it."""
    with st.container(horizontal=True, gap="small"):
        for name, preset in samples.clusters().items():
            with st.container(border=True, width=CARD, gap="xsmall"):
                st.image(_picture(name), alt=in_words(preset.cluster))
                st.button(
                    plain(name),
                    key=f"preset-{name}",
                    help=f"{plain(preset.description)} ({plain(preset.source)})",
                    width="stretch",
                    on_click=_open,
                    args=(preset.cluster,),
                )
                st.caption(plain(in_words(preset.cluster)))


def in_words(cluster: Cluster) -> str:
    """`32 H100 in 4 nodes`, of more than two types `8 GPUs of 4 types in 4 nodes`."""
    types = [gpu.type for gpu in cluster.gpus]
    counts = [f"{types.count(kind)} {kind}" for kind in dict.fromkeys(types)]
    what = " + ".join(counts) if len(counts) <= 2 else f"{len(types)} GPUs of {len(counts)} types"
    nodes = len(cluster.nodes)
    return f"{what} in {nodes} node{'s' * (nodes > 1)}"


def _open(cluster: Cluster) -> None:
    """Before the page is drawn, so that all of it shows the new cluster."""
    state.open_cluster(cluster)


@st.cache_data(show_spinner=False)
def _picture(name: str) -> str:
    return svg(samples.clusters()[name].cluster)
