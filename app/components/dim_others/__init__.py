"""Hovering over a bar of a Gantt chart dims all bars but those of the same work."""

from pathlib import Path

import streamlit as st

_component = st.components.v2.component(
    "dim_others", js=(Path(__file__).parent / "dim_others.js").read_text(encoding="utf-8")
)


def on_hover(key: str) -> None:
    """Of the chart that is drawn with a key: the same work is what the first line of the bars' tips names, such as the dispatch
    of a layer, on all lanes and in all plans of the chart."""
    _component(data={"chart": key}, key=f"dim-others-{key}")
