"""How far simulated times are from public measurements."""

import pandas as pd
import streamlit as st

from app import kept, tables, widgets
from app.charts import trust as charts
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.studies.trust import SECTIONS, Prediction, Summary, summaries
from engine.studies.trust.deepep import OLD_PRICING


def show() -> None:
    """A chart and a table, once they are asked for: they take some seconds."""
    st.caption(
        "Predictions beside public measurements of real machines. Fitted models use every other point; errors are on "
        "the rest."
    )
    if not kept.toggle("Compare predictions with measurements", key="trust-shown"):
        return
    try:
        sections = _sections()
    except InputError as error:
        st.info(plain(str(error)), icon=":material/info:")
        return
    held_out = {
        name: [point for point in points if not point.fitted and not point.of.endswith(OLD_PRICING)]
        for name, points in sections.items()
    }
    old = [point for points in sections.values() for point in points if point.of.endswith(OLD_PRICING)]
    errors = [abs(point.error) for points in held_out.values() for point in points]
    title = (
        f"{len(errors):,} held-out predictions are {units.share(sum(errors) / len(errors))} off on average; without knowing "
        f"how tokens travel DeepEP's would be {units.share(sum(abs(point.error) for point in old) / len(old))} off"
    )
    widgets.chart(charts.predicted_measured(held_out, old, title), "trust")
    rows = summaries(point for points in sections.values() for point in points)
    tables.show(pd.DataFrame([_row(row) for row in rows]), hide_index=True)


@st.cache_resource(max_entries=1, show_spinner="Predicting what was measured")
def _sections() -> dict[str, list[Prediction]]:
    return {name: list(section()) for name, section in SECTIONS.items()}


def _row(row: Summary) -> dict[str, str | int]:
    return {
        "Predicted": row.of,
        "On": row.hardware,
        "Nodes": row.nodes,
        "Mean error": units.share(row.mean),
        "Worst": units.share(row.worst),
        "Points held out": row.points,
        "Points fitted": row.fitted,
    }
