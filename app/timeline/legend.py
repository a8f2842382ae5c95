"""What the bars and lines of a pass's chart are, in words below it."""

import streamlit as st

from app.charts.theme import KIND_TITLES
from engine import units
from engine.goal import Goal
from engine.plan import Plan
from engine.simulate.metrics import Metrics


def show(plan: Plan, figures: Metrics, bundled: bool, folded: bool, chosen: bool) -> None:
    """figures: of the open plan; bundled: its sends are; folded: a lane stands for several GPUs; chosen: some have no lane."""
    longest = max(figures.seconds, key=figures.seconds.get)
    share = units.share(figures.seconds[longest] / (figures.total or 1.0))
    most = "" if plan.goal is Goal.TWO_MODELS else f"Most of the time goes to {KIND_TITLES[longest]} ({share}). "
    bar = "a send"
    if folded:
        bar = "the time from the first GPU's first send to the last one's last"
    elif bundled:
        bar = "the time in which a GPU sends or receives without a gap: there are too many sends to draw"
    which = " Drawn are those that the others wait for, and the busiest." if chosen else ""
    st.caption(
        f"{most}Outlined bars are {figures.how_simulated}.{which} A bar on a network lane is {bar}. The thin line is the "
        "critical path, which all GPUs wait for. Hover over a bar to see that work on every GPU; drag the range below the "
        "chart to zoom; double-click a kind in the legend to see it alone."
    )
