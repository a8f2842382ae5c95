"""The place that a comment points to: its choice next to the comment, and the way there."""

import streamlit as st

from app import components, state
from app.review import store
from app.tables import plain
from engine.goal import Goal
from engine.problem import Problem
from engine.store.team import SavedPlan
from engine.store.team_approval import CHARTS, Place
from engine.workload import RoutingTrace

TITLES = {"verdict": "Worth it?", "timelines": "Timelines of the brief", "load": "Load of every GPU"}
ICON = ":material/near_me:"


def places(problem: Problem | None) -> list[Place]:
    """All places that a comment on a plan can point to. problem: the saved one; None if its inputs are not here."""
    if problem is None:
        return []
    layers = 0 if problem.goal is Goal.TRAINING else problem.workload.layers
    hops = max(0, layers - 1) if isinstance(problem.workload, RoutingTrace) else 0
    return [
        *(Place("chart", chart=chart) for chart in CHARTS if chart != "verdict" or problem.goal is Goal.INFERENCE),
        *(Place("layer", layer) for layer in range(layers)),
        *(Place("hops", layer) for layer in range(hops)),
        *(Place("gpu", gpu) for gpu in range(len(problem.cluster.gpus))),
    ]


def title(place: Place, problem: Problem | None = None) -> str:
    """`Layer 3 on Timeline`, `Layers 3 and 4 on Affinity`, `GPU 5 · H100`, `Timelines of the brief`"""
    match place.kind:
        case "layer":
            return f"Layer {place.number} on Timeline"
        case "hops":
            return f"Layers {place.number} and {place.number + 1} on Affinity"
        case "chart":
            return TITLES[place.chart]
    names = problem.cluster.gpu_names if problem is not None else ()
    return names[place.number] if place.number < len(names) else f"GPU {place.number}"


def chart_of(place: Place) -> str | None:
    """The chart of the brief that shows a place; None: a page of its own does."""
    return "load" if place.kind == "gpu" else place.chart or None


def go(saved: SavedPlan, place: Place) -> str | None:
    """Lead to a place: to its page with the plan open, or to its chart in the brief; ends the run where a page changes.

    Returns why the plan cannot be opened, if it cannot.
    """
    if chart_of(place) is not None:
        state.visit.point_at(place)
        return None
    is_open = saved.plan in state.session.saved and state.session.plan == saved.plan
    if not is_open and (fault := store.open_in_session(saved)):
        return fault
    if place.kind == "hops":
        pair = (place.number, place.number + 1)
        state.visit.layers_compared = (pair, pair)
        st.switch_page("../pages/affinity.py")
    else:
        state.visit.point_at(place)
        st.switch_page("../pages/timeline.py")
    return None


def here() -> str:
    """The place in the brief that a comment points to, as the address has it; "": none, or it is on another page."""
    place, _ = state.visit.pointed
    return "" if place is None or chart_of(place) is None else str(place)


def mark_layer() -> None:
    """Name the layer on Timeline that the followed comment on the open plan points to, and lead back."""
    place, _ = state.visit.pointed
    number, _ = state.visit.reviewed or (None, None)
    is_its_plan = number is not None and state.session.saved.get(state.session.plan or "") == number
    if place is not None and place.kind == "layer" and is_its_plan:
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.markdown(f"{ICON} **The comment points to layer {place.number}.**", width="content")
            if st.button("Back to the comment", icon=":material/arrow_back:", type="tertiary"):
                state.visit.return_to_discussion = True
                st.switch_page("../pages/review.py")


def mark(chart: str, problem: Problem | None = None) -> Place | None:
    """Say above a chart that the followed comment points to it, and scroll there; None if none does."""
    place, turn = state.visit.pointed
    if place is None or chart_of(place) != chart:
        return None
    what = f"{title(place, problem)}, framed below" if place.kind == "gpu" else "this chart"
    components.scroll_here_once(turn)
    st.markdown(f"{ICON} **{plain(f'The comment points to {what}.')}**")
    return place
