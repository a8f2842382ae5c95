"""What the open recording is, in figures."""

import streamlit as st

from engine import units
from engine.balance import over_layers
from engine.studies.inspection import Inspection


def show(inspection: Inspection) -> None:
    """One row, in a window of 1024 too: how large it is, how uneven, and how surely one expert tells the next."""
    skew = inspection.balance.factors
    with st.container(horizontal=True, gap="xsmall"):
        st.metric("Recorded", inspection.title)
        if inspection.tokens is not None:
            st.metric("Tokens", f"{inspection.tokens:,}")
        st.metric("Layers × experts", f"{inspection.layers} × {inspection.experts}")
        st.metric(
            "Worst skew",
            units.ratio(skew["max"]),
            help=f"busiest expert / mean expert of a layer; over layers {units.ratio(skew['mean'])} on average, "
            f"{over_layers(skew)}",
        )
        if inspection.layers > 1:
            st.metric(
                "Skew, p50 – p95",
                f"{units.ratio(skew['p50'])} – {units.ratio(skew['p95'])}",
                width="content",  # squeezed, it would be written smaller
                help=f"busiest expert / mean expert, of half the layers at most the first, of 95 % at most the second; "
                f"{over_layers(skew)}",
            )
        if inspection.predicted is not None and len(inspection.predicted):
            st.metric(
                "Predictability",
                units.share(float(inspection.predicted.mean())),
                help=f"how often the likeliest next expert is right, given the current one; by chance "
                f"{units.share(1 / inspection.experts)} (ExFlow §III)",
            )
