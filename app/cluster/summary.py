"""What a cluster adds up to: totals, how fast its nodes reach each other, and whether the open models fit its memory."""

import numpy as np
import streamlit as st

from app import state, widgets
from app.charts import cluster as charts
from app.text import plain
from engine import units
from engine.cluster import Cluster
from engine.model import MoEModel
from engine.problem import MEMORY_SHARE


def totals(cluster: Cluster) -> None:
    """What the GPUs are together, the file, and whether the open models fit the memory."""
    with st.container(horizontal=True, gap="medium"):
        st.metric("GPUs", len(cluster.gpus))
        st.metric("Memory", f"{cluster.values('memory').sum() / 2**30:,.0f} GiB")
        st.metric("Peak, 16-bit", f"{cluster.values('flops_fp16').sum() / 1e15:.3g} PFLOP/s")
        st.metric("Fabric bandwidth", units.bandwidth(float(cluster.values("send_bandwidth").sum())))
        st.space("stretch")
        # Written when asked for: a file that is ready may be gone before the browser looks, when edits follow each other.
        st.download_button(
            "Save as JSON",
            lambda: cluster.model_dump_json(indent=1, exclude_none=True),
            f"{cluster.name}.json",
            "application/json",
            icon=":material/download:",
            on_click="ignore",
        )
    models = [model for model in (state.model(), _second()) if model is not None]
    for text, fits in memory_fit(cluster, models):
        (st.success if fits else st.error)(plain(text), icon=":material/memory:")
    for sentence in without_fp8(cluster, models):
        st.caption(plain(sentence))
    if not models:
        st.caption("Open a model to see whether its experts fit the memory.")


def without_fp8(cluster: Cluster, models: list[MoEModel]) -> list[str]:
    """What GPUs without 8-bit units compute a model of 8-bit numbers in, by `Gpu.flops`."""
    lacking = ", ".join(dict.fromkeys(gpu.type for gpu in cluster.gpus if not gpu.flops_fp8))
    return [
        f"{lacking} without fp8: {model.name} computes at the 16-bit rate there; its weights and tokens stay 8 bits wide."
        for model in models
        if lacking and model.dtype == "fp8"
    ]


def speeds(cluster: Cluster) -> None:
    """How fast nodes reach each other."""
    if len(cluster.nodes) == 1:
        st.caption("There is one node, so nothing is sent between nodes.")
        return
    widgets.chart(charts.link_speeds(cluster, st.context.theme.type == "dark"), "link-speeds")
    st.caption("Gb/s from all GPUs of a node (row) to all of another (column) at once; on the diagonal inside it.")


def _second() -> MoEModel | None:
    return state.model_of(state.second()) if state.second() else None


def memory_fit(cluster: Cluster, models: list[MoEModel]) -> list[tuple[str, bool]]:
    """A line a model, and one for two together: whether one copy of every expert fits `MEMORY_SHARE` of the memory, and
    which GPUs are too small for as many experts as the others."""
    room = cluster.values("memory") * MEMORY_SHARE
    lines = []
    for model in models:
        slot = model.bytes_per_expert * len(model.moe_layers)
        needed, slots = slot * model.experts, room // slot
        text = (
            f"The experts of {model.name} need {units.size(needed)}: {units.share(needed / room.sum())} of the memory free for "
            f"weights ({units.share(MEMORY_SHARE)} of all)"
        )
        even = -(-model.experts // len(room))
        small = np.flatnonzero(slots < even)
        if slots.sum() < model.experts:
            text += f". This cluster holds only {slots.sum():,.0f} of the {model.experts:,} experts of every layer"
        elif len(small):
            text += (
                f". An even share, {even} experts of every layer, is too much for {len(small)} of the GPUs "
                f"({cluster.gpu_names[small[0]]} holds {slots[small[0]]:,.0f}): a plan has to place fewer there"
            )
        lines.append((text, bool(slots.sum() >= model.experts)))
    if len(models) > 1:
        needed = sum(model.bytes_per_expert * len(model.moe_layers) * model.experts for model in models)
        lines.append(
            (
                f"Both together: {units.size(needed)}, {units.share(needed / room.sum())} of it",
                bool(needed <= room.sum()),
            )
        )
    return lines
