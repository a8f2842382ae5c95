"""The pairs of GPUs that were measured, beside what the open cluster has for them."""

import streamlit as st

from app import cached, tables, widgets
from app.charts import pairs as charts
from engine.costs.pair_cluster import PairCluster
from engine.units import bandwidth, share, signed

WORST = 10
"""Pairs that are listed."""


def show() -> None:
    """Nothing where no pairs were measured on the hosts of the open cluster."""
    pairs = cached.measured_pairs()
    if pairs is None:
        return
    st.subheader("Measured pairs", anchor=False)
    unmeasured = " What was not measured is crossed out or empty." if pairs.is_partial else ""
    st.caption(
        "One pair of GPUs at a time, both ways at once, as the logs say, and what the cluster above has for it, edits and all. "
        f"Mean difference {share(pairs.mean_error)}.{unmeasured}"
    )
    if len(pairs.names) <= charts.MOST_GPUS:
        widgets.chart(charts.pair_rates(pairs, st.context.theme.type == "dark"), "measured-pairs")
    else:
        st.caption(f"Matrices of more than {charts.MOST_GPUS} GPUs are not drawn.")
    with st.expander("Pairs with the largest error"):
        tables.show(_worst(pairs), hide_index=True)


def _worst(pairs: PairCluster) -> list[dict[str, str]]:
    return [
        {
            "Pair": f"{pairs.names[first]} with {pairs.names[second]}",
            "Measured": bandwidth(pairs.measured[first, second]),
            "Drawn": bandwidth(pairs.drawn[first, second]),
            "Difference": signed(pairs.difference[first, second]),
        }
        for first, second in pairs.worst(WORST)
    ]
